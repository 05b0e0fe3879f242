"""One node of a run on Ray: Ray's part of it, and on the first node the driver, which is verl's PPO (`trainer.backend:
verl`) or a program of the user's own (`ray`).

An agent starts this instead of `verl_slurm_daemon.agent.ranks` and ends it like that: with SIGKILL to the
whole tree, never with `ray stop`, which ends the Ray of everybody on the node. Slurm's warnings go to every process of
a step, and Ray's install handlers of their own, so ignoring them beforehand does not help: they are blocked here, and
what is blocked stays so across fork and exec (docs/decisions/0009-verl-on-ray.md).

The first node's process ends with the driver; the lead then ends the others. Where Ray ends by itself, so does the
launcher.
"""

import argparse
import asyncio
import importlib.util
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from verl_slurm.base.errors import ConfigError, Fenced, VerlSlurmError, WireError, restart_may_help
from verl_slurm.base.files import write_file
from verl_slurm.base.packages import pip_install
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import die_with_parent
from verl_slurm.base.scratch import Scratch
from verl_slurm.checkpoint.store.loop_checkpoint import require_guest
from verl_slurm.config.elastic import on_nodes
from verl_slurm.config.load import load_own
from verl_slurm.config.schema import RunConfig
from verl_slurm.loops.session import Session
from verl_slurm.loops.verl.ray_nodes import (
    object_store_bytes,
    ray_argv,
    ray_environment,
    ray_token,
    temp_fits,
)
from verl_slurm.loops.verl.verl_settings import require_verl, resume_point, start_settings
from verl_slurm.program.programs import Moves
from verl_slurm.wire.environment import CONTROL_VARIABLE, RECIPE_VARIABLE, RESTART_VARIABLE, users_umask
from verl_slurm.wire.lead_file import read_lead_address
from verl_slurm.wire.messages import StoreCall, StrangerMet
from verl_slurm.wire.store_line import StoreLine
from verl_slurm.wire.tcp_table import listener_of

_BLOCKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)
_TRY_EVERY_S = 0.2
_HEAD_LISTENS = "verl_slurm/ray_head_listens"
"""In the store of the ranks, which no other user reaches."""
_TEMP_PREFIX = "vs-ray-"
_MOST_SAID = 4096
"""Bytes to show of Ray's launcher output (advice on other days) when it ends by itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until Ray or the driver ends here; returns its exit code."""
    # First: threads and processes inherit the mask of their creator, and one that is made before could die of a
    # signal. Blocked, not ignored: Ray's processes install handlers of their own, and its drivers abort at USR1.
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    os.umask(0o077)
    # Up to the hard limit, which needs no privilege.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # Ray's processes hold thousands, against 1024 by default
    args = _parser().parse_args(argv)
    paths = RunPaths(args.run)
    config = Moves.of(paths).config(load_own(paths.run_yaml))
    try:
        return asyncio.run(_run(paths, on_nodes(config, args.nodes), args))
    except VerlSlurmError as error:
        sys.stderr.write(f"{type(error).__name__}: {error.one_line()}\n")
        # Said over the ranks' protocol: the exit code alone would count as a crash, and be started again.
        if isinstance(error, ConfigError) and not restart_may_help(error):
            with closing(Session.open(rank=0, world_size=1, lifeline=False)) as session:
                session.refused(error)
        return int(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl_slurm.loops.verl.ray_node", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument(
        "--resume", default="", help="the verified checkpoint, by name; empty: from the start"
    )
    parser.add_argument("--nodes", type=int, required=True, help="of this start")
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--head", required=True, help="HOST:PORT of Ray on the first node")
    parser.add_argument(
        "--scratch", type=Path, required=True, help="a private directory, removed by the agent"
    )
    return parser


async def _run(paths: RunPaths, config: RunConfig, args: argparse.Namespace) -> int:
    is_head = args.node_rank == 0
    # One process speaks for the run: Ray has one driver, and the lead expects rank 0 of 1.
    if is_head:
        # Ray and the driver take a minute before the driver reports for the run; until then this process does.
        # Closed again before the driver starts, which opens the same line as rank 0.
        with closing(Session.open(rank=0, world_size=1, lifeline=False)) as session:
            if config.trainer.backend == "verl":
                require_verl(session)
    _require_ray()
    # Before Ray is started: a refused setting should not cost the minute that Ray and verl take.
    driver = _driver(paths, config, args) if is_head else []
    # Each node derives the token from the lead's secret, so none has to wait for a file of another node.
    token = _write_token(paths, args)
    nodes = config.distributed.nodes
    environ = ray_environment(os.environ, token, args.head, nodes)
    if config.trainer.backend == "verl" and config.trainer.command:
        environ[RECIPE_VARIABLE] = "1"
    store = StoreLine(Path(os.environ[CONTROL_VARIABLE]))
    if is_head:
        # The port was free when the agent chose it. Ray's own start would send its token to a stranger who listens now.
        _refuse_stranger(args.head, store)
    else:
        _await_head(args.head, config, store)
    # The node's name may resolve to a loopback address (Debian's 127.0.1.1), at which the head cannot reach it.
    own_address = args.head.rpartition(":")[0] if is_head else await _own_address(args.head, config)
    said = args.scratch / "ray.out"
    ray = await _start(
        ray_argv(
            sys.executable,
            head=args.head,
            is_head=is_head,
            own_address=own_address,
            # Below a private directory: Ray makes its own 0777.
            temp=_temp(args.scratch),
            ranks=config.distributed.ranks_per_node,
            cpus=config.slurm.cpus_per_node,
            # Given, because Ray would take a share of the whole machine's memory, not of the job's.
            store_bytes=object_store_bytes(config.slurm.mem_mb_per_node, _shm_free()),
            free_port=_free_port() if is_head else 0,
        ),
        environ,
        said,
    )
    below = _ray_ended(ray, said)
    return await (_first(below, _lead(config, environ, driver, args.head, store)) if is_head else below)


def _driver(paths: RunPaths, config: RunConfig, args: argparse.Namespace) -> list[str]:
    """Returns the driver's program and its arguments, for Python.

    Raises:
        ConfigError: verl does not take its settings, or the checkpoint is not of this kind of run.
    """
    if config.trainer.backend == "verl":
        resume = resume_point(config, paths, args.resume)[0] if args.resume else None
        words = start_settings(config, paths, args.attempt, resume).words
        return [*(config.trainer.command or ("-m", "verl.trainer.main_ppo")), *words]
    if args.resume:
        # Its `verl_slurm.run` loads it; of another kind of loop it would fail there, after Ray has been started.
        require_guest(paths.checkpoints / args.resume, "loop", world_size=1)
    return list(config.trainer.command)


async def _lead(
    config: RunConfig, environ: Mapping[str, str], program: list[str], head: str, store: StoreLine
) -> int:
    """Tells the other nodes that Ray's head listens, and runs the driver once all of them are there."""
    shape = config.distributed
    await _publish_head(head, store)
    # A node that never comes must end the start before the daemon takes the silence for a hang.
    patience_s = str(config.daemon.start_timeout_s)
    wanted = [str(shape.nodes), str(shape.ranks_per_node), patience_s]
    # In a process of its own: a driver of Ray keeps threads and a connection for as long as its process lives.
    # -P: without it Python looks for modules in the working directory first.
    gather = await _start([sys.executable, "-P", "-m", "verl_slurm.loops.verl.ray_nodes", *wanted], environ)
    if code := await gather.wait():
        return code
    # A file is run as a rank is: its neighbours may be imported, and not before it begins. Ray hands that on.
    words = program if program[0] == "-m" else ["-m", "verl_slurm.loops.rendezvous", *program]
    return await _run_driver([sys.executable, "-P", *words], environ)


async def _run_driver(argv: list[str], environ: Mapping[str, str]) -> int:
    code = await (await _start(argv, environ)).wait()
    if code < 0:  # of its end it has said nothing itself
        sys.stderr.write(f"RayError: the run's driver was ended by {signal.Signals(-code).name}\n")
    return code


async def _first(ray: Coroutine[None, None, int], driver: Coroutine[None, None, int]) -> int:
    """Waits for the end of the driver, or of Ray below it."""
    tasks = [asyncio.create_task(driver), asyncio.create_task(ray)]
    # The other one is not ended here: the agent kills the whole tree when this process is gone.
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    # The driver first: where both have ended, its result says more than Ray's.
    return next(task.result() for task in tasks if task in done)


async def _ray_ended(ray: asyncio.subprocess.Process, said: Path) -> int:
    code = await ray.wait()
    with said.open("rb") as file:  # days of a run may have made the file large
        file.seek(max(file.seek(0, os.SEEK_END) - _MOST_SAID, 0))
        tail = file.read(_MOST_SAID).decode(errors="replace")
    sys.stderr.write(f"{tail}\nRayError: Ray has ended on this node (exit code {code})\n")
    # `ray start --block` may end with 0; without Ray this node can do nothing for the run.
    return code or 1


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed in the Python that the job runs",
            where=sys.executable,
            expected="the package ray",
            remedy=f"{pip_install('ray')}, or submit from the environment that has it",
        )


def _write_token(paths: RunPaths, args: argparse.Namespace) -> Path:
    """Writes Ray's token into a file for Ray alone.

    Raises:
        Fenced: another attempt leads the run.
        OSError, PermissionRefused, WireError: no lead lives, or its address is open to others, or cannot be read.
    """
    lead = read_lead_address(paths)
    # The file may be of a newer attempt already: its token would let this node into the wrong Ray.
    if lead.attempt != args.attempt:
        raise Fenced("a newer attempt owns the run", found=lead.attempt, expected=args.attempt)
    restart = int(os.environ.get(RESTART_VARIABLE, "0"))
    file: Path = args.scratch / "ray.token"
    write_file(file, ray_token(lead.token, args.attempt, restart).encode())
    return file


def _temp(scratch: Path) -> Path:
    """Returns Ray's directory: below the agent's, which goes with the agent; or one with a shorter path."""
    if temp_fits(scratch / "r"):
        return scratch / "r"
    # Ray's sockets add 64 bytes to the directory's path, and a Unix socket's path has at most 107.
    return Scratch(_TEMP_PREFIX, "/tmp").path / "r"  # noqa: S108 - under a name that cannot be guessed


def _refuse_stranger(head: str, store: StoreLine) -> bool:
    """Returns whether something listens at the port of Ray's head, which is on this node.

    Raises:
        WireError: another user does, and the lead has been told.
    """
    listener = listener_of(int(head.rpartition(":")[2]))
    if listener.uid is None or not listener.stranger:
        return listener.uid is not None
    error = WireError(
        "another user listens at the port of Ray's head",
        where=head,
        found=listener.name,
        remedy="the run starts again with another port; ask for whole nodes (slurm.extra: {exclusive: true})",
    )
    store.call(StrangerMet(call=0, rank=0, peers=f"at the port of Ray's head, {head}: {listener.name}"))
    raise error


async def _publish_head(head: str, store: StoreLine) -> None:
    """Waits until Ray's head listens and is this user's, and tells the other nodes."""
    # Without a limit: where Ray ends by itself, so does the start.
    while not _refuse_stranger(head, store):  # noqa: ASYNC110 - a port that opens is no event on this side
        await asyncio.sleep(_TRY_EVERY_S)
    store.call(StoreCall(call=0, op="set", keys=(_HEAD_LISTENS,), values=(b"1",)))


def _await_head(head: str, config: RunConfig, store: StoreLine) -> None:
    """Waits until the first node says that Ray's head listens and is this user's."""
    # Ray of this node sends its token there.
    patience_s = config.daemon.start_timeout_s
    answer = store.call(StoreCall(call=0, op="wait", keys=(_HEAD_LISTENS,), timeout_s=patience_s))
    if answer.outcome != "ok":
        raise WireError(
            "Ray's head has not begun to listen",
            where=head,
            found=f"no word of the first node: {answer.reason or answer.outcome}",
            expected=f"one within {patience_s:g} s",
            remedy="see the log of the first node",
        )


async def _own_address(head: str, config: RunConfig) -> str:
    """Returns the address at which the head reaches this node, once the head listens."""
    host, _, port = head.rpartition(":")
    loop = asyncio.get_running_loop()
    until = loop.time() + config.daemon.start_timeout_s
    while True:
        try:
            # A connection tells which of this node's addresses leads to the head; names and interfaces are ambiguous.
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError as error:
            if loop.time() > until:
                raise WireError(
                    "Ray's head cannot be reached",
                    where=head,
                    found=error,
                    remedy="are TCP connections between the job's nodes allowed?",
                ) from error
            await asyncio.sleep(_TRY_EVERY_S)  # a port that opens is no event on this side
            continue
        address = str(writer.get_extra_info("sockname")[0])
        writer.close()
        return address


async def _start(
    argv: list[str], environ: Mapping[str, str], said: Path | None = None
) -> asyncio.subprocess.Process:
    """Starts a process that ends with this one. `said`: where its output goes; None: where ours does."""
    with open(said, "wb") if said else nullcontext() as output:
        return await asyncio.create_subprocess_exec(
            *argv,
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # The agent kills by process tree; a child whose parent is gone would be missed.
            preexec_fn=die_with_parent,
            umask=users_umask(),  # the driver is the user's, and so are Ray's workers
        )


def _free_port() -> int:
    with socket.socket() as probe:
        # Free now, and perhaps not in a moment; Ray cannot be told to choose this port itself.
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _shm_free() -> int:
    try:
        return shutil.disk_usage("/dev/shm").free  # noqa: S108 - looked at only
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())

"""Has a step of verl divided by torch, in a process of the ranks' Python, and defines what the two say to each other.

The process is `torch_shards`; this side needs no torch. Which torch writes matters: a file of one release may not load
in another, so that of the ranks does it. The answers are lines of JSON on its standard output, of the classes below. It
says its `ReshardPlan`, and waits on its standard input for the directory to make: the end of that input ends it. Then
it divides, and says `Divided`. Any other end is an error, and so is a line that is none.
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec

from verl_slurm.base.errors import CheckpointCorrupt, ConfigError, VerlSlurmError
from verl_slurm.base.packages import install_command
from verl_slurm.base.processes import die_with_parent
from verl_slurm.base.search_path import clean_environment
from verl_slurm.config.schema import RunConfig
from verl_slurm.slurm.rank_setup import python_of, setup_script

OnBytes = Callable[[int], None]

_PROGRAM = "verl_slurm.verl.reshard.torch_shards"
_MAX_LINE = 1 << 20
_LOOK_MS = 500
_END_S = 5.0
END = signal.SIGALRM
"""Ends the process; Slurm sends it to nothing, and it writes no core file."""
# Slurm sends these to every process of a step. The process ends with the thread that reads its answers.
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT, signal.SIGHUP)
# What the set-up prints must not come between the program's lines, and it must not read what is told to the program.
_AFTER_SETUP = """\
_verl_slurm_argv=("$@")
exec {{_verl_slurm_output}}>&1 1>&2 {{_verl_slurm_input}}<&0 </dev/null
{script}exec "${{_verl_slurm_argv[@]}}" >&"$_verl_slurm_output" <&"$_verl_slurm_input"
"""
# Pyxis is a plugin of srun: the image is started by a step of one task, beside the others.
_IN_STEP = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--cpu-bind=none", "--quiet"]
_MISSING = re.compile(r"No module named '([\w.]+)'")


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of one model and its optimizer, each counted once.

    Attributes:
        role: `actor`, `critic`, or empty (SFT).
        num_divided: of its tensors; the others are whole in the file of every rank.
    """

    role: str
    engine: int
    num_tensors: int
    num_divided: int
    num_bytes: int


class ReshardPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """How a step is divided.

    Attributes:
        before, after: ranks.
        num_data: data loader states of SFT; None: PPO, whose one state does not depend on the ranks.
        written_bytes, largest_bytes: of the tensors in the files of all new ranks, and in the largest file.
    """

    before: int
    after: int
    roles: tuple[RolePlan, ...]
    num_data: int | None
    written_bytes: int
    largest_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(role.num_bytes for role in self.roles)

    @property
    def kept(self) -> int:
        """Returns the ranks that keep their generators' state."""
        return min(self.before, self.after)

    @property
    def new(self) -> int:
        """Returns the ranks that get generators of their own."""
        return self.after - self.kept

    @property
    def work_bytes(self) -> int:
        """Returns the bytes that are written and compared."""
        return self.written_bytes + 2 * self.num_bytes


class Worked(msgspec.Struct, frozen=True, kw_only=True, tag="worked"):
    """So many more bytes were written or compared, of `ReshardPlan.work_bytes`."""

    num_bytes: int


class Divided(msgspec.Struct, frozen=True, kw_only=True, tag="divided"):
    """All is written and compared; `tensors`: digest of all tensors put together, the same before and after."""

    tensors: str


class ReshardRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """An error by its parts; `errno`: an OSError, which has `what` and `where` alone."""

    exit_code: int = 0
    errno: int | None = None
    what: str
    where: str | None = None
    found: str | None = None
    expected: str | None = None
    remedy: str | None = None


Answer = ReshardPlan | Worked | Divided | ReshardRefused
_ANSWER = msgspec.json.Decoder(Answer)
_ERRORS = {int(one.exit_code): one for one in (ConfigError, CheckpointCorrupt)}
A = TypeVar("A", ReshardPlan, Divided)


class Command(NamedTuple):
    """A command line, its environment, and the Python in it, for messages."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    python: str


RanksPython = Callable[[Sequence[str], Sequence[Path]], Command]
"""Makes the command of a module of ours in some Python, of the module's name and arguments, and of the places that it
reads and writes below."""


def this_python(module: Sequence[str], places: Sequence[Path]) -> Command:
    """Takes the Python of this process."""
    argv = [sys.executable, "-P", "-m", *module]
    return Command(argv, clean_environment(dict(os.environ)), sys.executable)


def ranks_python(
    config: RunConfig,
    contained: Callable[..., list[str]],
    module: Sequence[str],
    places: Sequence[Path],
    *,
    on_node: bool = False,
) -> Command:
    """Takes the Python of a run's ranks, with their modules, or in the run's image.

    Args:
        config: paths absolute.
        on_node: this is a node of the job: the user's own commands (`slurm.setup`) are run, and their variables set.

    Raises:
        ConfigError: the image is one that srun alone starts, and this is no job; or a path cannot be mounted.
    """
    container = config.slurm.container
    if container is not None:
        argv = contained(config, module, *map(str, places))
        if container.runtime == "pyxis":
            if not on_node:
                raise ConfigError(
                    "a checkpoint cannot be divided in this image here",
                    where="slurm.container.runtime: pyxis",
                    found="an image that srun alone starts, and no job",
                    remedy="submit the run with another distributed.dp_size: its start divides the checkpoint",
                )
            argv = [*_IN_STEP, *argv]
        if container.runtime == "podman":
            # Else its standard input is empty.
            argv[2:2] = ["--interactive"]
        return Command(argv, dict(os.environ), f"{container.python} in {container.image}")
    python = python_of(config.slurm) or sys.executable
    argv, environ = [python, "-P", "-m", *module], clean_environment(dict(os.environ))
    if on_node:
        environ |= {name: str(value) for name, value in config.env.items()}
    if script := setup_script(config.slurm, commands=on_node):
        words = ("/bin/bash", "--noprofile", "--norc", "-c", _AFTER_SETUP.format(script=script), "verl-slurm")
        argv = [*words, *argv]
    return Command(argv, environ, python)


class Division:
    """A process that has planned how a step is divided (`plan`). Made by `start_division`."""

    def __init__(
        self,
        step: Path,
        child: "subprocess.Popen[bytes]",
        command: Command,
        stderr: IO[bytes],
        on_bytes: OnBytes,
    ) -> None:
        self._step, self._child, self._command, self._stderr = step, child, command, stderr
        self._on_bytes, self._lines = on_bytes, self._read()
        self.plan = self._answer(ReshardPlan)

    def divide(self, target: Path, on_bytes: OnBytes) -> Divided:
        """Makes `target`, a new directory, and compares it with the step. Nothing is made durable: a commit does that.

        Args:
            target: below one of the places that the process was started with.
            on_bytes: told how many more bytes were written or compared, `work_bytes` in all, and 0 twice in a second.
                An exception of its ends the work.

        Raises:
            ConfigError, VerlSlurmError, OSError: as `start_division`. `target` is left as far as it got.
            CheckpointCorrupt: the ranks disagree about what they all hold, or the copy is not the same.
        """
        self._on_bytes = on_bytes
        assert self._child.stdin is not None
        # A process that has ended says why by its answer, or by none.
        with suppress(BrokenPipeError), self._child.stdin as told:
            told.write(os.fsencode(target))
        return self._answer(Divided)

    def _answer(self, wanted: type[A]) -> A:
        last: Answer | None = None
        try:
            for line in self._lines:
                last = _ANSWER.decode(line)
                if not isinstance(last, Worked):
                    break
                self._on_bytes(last.num_bytes)
        except msgspec.MsgspecError as error:
            raise VerlSlurmError("the division gave no answer that is understood", found=error) from error
        match last:
            case ReshardRefused(errno=int(number)):
                raise OSError(number, last.what, last.where)
            case ReshardRefused(exit_code=code) if code in _ERRORS:
                facts = {"where": last.where, "found": last.found, "expected": last.expected}
                raise _ERRORS[code](last.what, remedy=last.remedy, **facts)
        if isinstance(last, wanted):
            return last
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)
        _end(self._child)
        words, is_plan = _last_line(self._stderr), wanted is ReshardPlan
        raise _broken(self._child.returncode, words, self._step, self._command, planned=is_plan)

    def _read(self) -> Iterator[bytes]:
        """Yields the lines of its output until that is closed; tells `on_bytes` twice in a second while it waits."""
        pipe = self._child.stdout
        assert pipe is not None
        poll, rest = select.poll(), b""
        poll.register(pipe, select.POLLIN)
        while True:
            self._on_bytes(0)
            if not poll.poll(_LOOK_MS):
                continue
            data = os.read(pipe.fileno(), _MAX_LINE)
            if not data or len(rest) > _MAX_LINE:
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from lines
        if rest:
            yield rest


@contextmanager
def start_division(
    step: Path,
    ranks: int,
    python: RanksPython,
    *,
    below: Sequence[Path] = (),
    on_bytes: OnBytes = lambda _: None,
) -> Iterator[Division]:
    """Plans the same state on `ranks` ranks, in a process that lives as long as the block.

    Args:
        below: directories of which one will hold what is made; none: the plan is all that is wanted.
        on_bytes: called with 0 twice in a second while it plans. An exception of its ends the work.

    Raises:
        ConfigError: it cannot be divided so, not in limited memory, or the Python lacks torch.
        CheckpointCorrupt: files are missing or contradict each other.
        VerlSlurmError: the process broke.
        OSError: it cannot be read.
    """
    command = python([_PROGRAM, str(step), str(ranks)], [step, *below])
    # stderr goes to a file: it is read when the child has ended, and a full pipe would stop the child before.
    with tempfile.TemporaryFile() as stderr:
        try:
            child = subprocess.Popen(
                command.argv,
                env=command.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_child_setup,
            )
        except OSError as error:
            raise ConfigError(
                "the ranks' Python cannot be started", where=command.argv[0], found=error
            ) from error
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield Division(step, child, command, stderr, on_bytes)
        finally:
            # `on_bytes` raised, or a signal came: the child must not write into a directory that is being removed.
            _end(child)
            child.stdin.close()
            child.stdout.close()


def cannot(
    where: Path, found: str, expected: str = "shards of FSDP2 or FSDP1 on one mesh of all ranks"
) -> ConfigError:
    """Returns the refusal of a checkpoint that cannot be divided anew."""
    return ConfigError(
        "the checkpoint cannot be divided among another number of ranks",
        where=where,
        found=found,
        expected=expected,
        remedy="go on with the number of ranks that saved it, or begin a new run from its weights: docs/verl.md",
    )


def _child_setup() -> None:
    for number in _WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()


def _end(child: "subprocess.Popen[bytes]") -> None:
    # First by a signal that a container's runtime passes on: what it has started may outlive it. The whole session, for
    # what `slurm.setup` has started.
    for number in (END, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
    child.wait()


def _last_line(stderr: IO[bytes]) -> str:
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MAX_LINE))
    return stderr.read().decode(errors="replace").strip().rpartition("\n")[2]


def _broken(code: int, words: str, step: Path, command: Command, *, planned: bool) -> VerlSlurmError:
    if missing := _MISSING.search(words):
        return ConfigError(
            "the Python that is to divide the checkpoint lacks a module",
            where=command.python,
            found=f"no {missing[1]}",
            expected="what the ranks import: a file is written by the torch that reads it",
            remedy=f"{install_command('trainer', command.python)}, or name the ranks' Python: slurm.python",
        )
    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if code < 0 and planned:
        return cannot(step, f"a process that read the shards was {killed}")
    remedy = "give this machine more memory" if code == -signal.SIGKILL else "report it"
    return VerlSlurmError(
        "the division of the checkpoint broke",
        where=step,
        found=f"{killed}: {words}" if words else killed,
        remedy=remedy,
    )

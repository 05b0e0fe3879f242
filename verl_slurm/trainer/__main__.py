"""Entry of one rank: `-m verl_slurm.trainer --run RUN_DIR --attempt E --resume NAME`.

The first message to the daemon is sent before torch is imported. Signals are not handled here: under the daemon TERM,
USR1 and CONT arrive ignored, and run by hand they end the process as usual.
"""

import argparse
import gc
import os
from contextlib import suppress
from pathlib import Path

from verl_slurm.base.errors import VerlSlurmError, restart_may_help, underlying
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.health import WrongProduct
from verl_slurm.loops.session import Session
from verl_slurm.trainer.measures import console
from verl_slurm.wire.client import NoDaemon, RankClient, RankLine
from verl_slurm.wire.environment import CONTROL_VARIABLE
from verl_slurm.wire.hang_records import answer_with_stacks
from verl_slurm.wire.lifeline import run_and_leave
from verl_slurm.wire.messages import MAX_REASON, RankStarted, RankUnfit


def main(argv: list[str] | None = None) -> int:
    """Runs one rank to its end. The exit code is 0 if the rank finished or stopped as asked."""
    parser = argparse.ArgumentParser(prog="verl_slurm.trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run's directory")
    parser.add_argument("--attempt", type=int, required=True, help="the attempt that may write")
    parser.add_argument("--resume", default="", metavar="NAME", help="a verified checkpoint; empty: none")
    options = parser.parse_args(argv)
    # First: every file and directory of this process is its owner's alone.
    os.umask(0o077)
    # The daemon asks a rank that hangs.
    answer_with_stacks()
    control = os.environ.get(CONTROL_VARIABLE)
    rank = int(os.environ.get("RANK", "0"))
    line: RankLine = RankClient.connect(Path(control)) if control else NoDaemon()
    # Before torch is imported, which takes seconds: the daemon knows that the process lives.
    line.send(RankStarted(rank=rank, pid=os.getpid()))
    try:
        _train(RunPaths(options.run), options.attempt, options.resume, line)
    except VerlSlurmError as raised:
        # RanksFailed stands on all ranks alike; what it was caused by decides about the next start.
        error = underlying(raised)
        console.complain(f"rank {rank}: {error.one_line()}")
        if isinstance(error, WrongProduct):
            line.send(RankUnfit(rank=rank, evidence=error.one_line()[:MAX_REASON]))
        # A crash: the daemon tries again. A refusal is told to it, and is final.
        if restart_may_help(error):
            return int(ExitCode.INTERNAL)
        _refuse(line, rank, error, RunPaths(options.run))
        return int(error.exit_code)
    return int(ExitCode.OK)


def _refuse(line: RankLine, rank: int, error: VerlSlurmError, paths: RunPaths) -> None:
    from verl_slurm.program.programs import Moves
    from verl_slurm.trainer.reward.python import RewardRaised

    session = Session(line, rank=rank, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    told = ""
    # What cannot be read costs the user's own places for those of the copy, and not the message.
    with suppress(VerlSlurmError, OSError):
        told = Moves.of(paths).as_submitted(error.one_line())
    if isinstance(error, RewardRaised):
        session.refused(error, told=told, place=error.place, worked=error.worked)
    else:
        session.refused(error, told=told)


def _train(paths: RunPaths, attempt: int, resume: str, line: RankLine) -> None:
    # Imports make a million objects and no garbage: to look for some takes a sixth of their time.
    gc.disable()
    from verl_slurm.config.elastic import on_ranks
    from verl_slurm.config.load import load_own
    from verl_slurm.trainer.flight_recorder import write_on_request
    from verl_slurm.trainer.known_results import check_product, check_sum
    from verl_slurm.trainer.place import Place, process_group
    from verl_slurm.trainer.setup import build_loop
    from verl_slurm.wire.standing_by import remember_imports

    gc.freeze()
    gc.enable()
    config = load_own(paths.run_yaml)
    place = Place.from_environ(os.environ)
    config = on_ranks(config, place.world_size)
    with process_group(config, place) as (device, ranks):
        if control := os.environ.get(CONTROL_VARIABLE):
            write_on_request(Path(control), place.rank)
        if config.health.known_results:
            check_product(device)
            check_sum(device, place.rank, place.world_size)
        loop = build_loop(
            config,
            paths,
            attempt=attempt,
            resume=resume,
            device=device,
            ranks=ranks,
            line=line,
            local_rank=place.local_rank,
        )
        if place.rank == 0:
            remember_imports(paths)
        loop.run()


if __name__ == "__main__":
    run_and_leave(main)

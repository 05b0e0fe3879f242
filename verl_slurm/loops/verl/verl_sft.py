"""Entry of one rank of verl's SFT trainer: `-m verl_slurm.loops.verl.verl_sft [HYDRA OVERRIDES]`.

Under a daemon the settings come from the section `verl` of the run's configuration, and the run decides where to save
and what to resume from. Run by hand, the arguments are the settings, verl saves and resumes as usual, and nothing is
committed. The trap at an epoch's end is avoided there, too.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_slurm.base.errors import VerlSlurmError, restart_may_help, underlying
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.loops.session import Session
from verl_slurm.loops.verl.verl_settings import require_verl, resume_point, start_settings
from verl_slurm.verl.composing import compose
from verl_slurm.verl.releases import installed_verl
from verl_slurm.verl.tracker import tracker_file
from verl_slurm.wire.lifeline import run_and_leave

if TYPE_CHECKING:
    from verl_slurm.save.ranks.collective import Collective


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank to its end; the exit code is 0 when it finished or stopped as asked."""
    parser = argparse.ArgumentParser(
        prog="verl_slurm.loops.verl.verl_sft", description=__doc__.splitlines()[0]
    )
    for name in ("--run", "--attempt", "--resume"):
        parser.add_argument(
            name, help=argparse.SUPPRESS
        )  # for people who read `ps`: the environment has it, too
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="verl's settings, as Hydra takes them")
    options = parser.parse_args(argv)
    # Before torch and verl are imported, which takes longer than the daemon waits for a first message.
    session = Session.open()
    try:
        _train(session, options.words)
    except VerlSlurmError as raised:
        error = underlying(raised)
        _complain(f"rank {session.rank}: {error.one_line()}")
        session.ended_by(error)
        return int(ExitCode.INTERNAL if restart_may_help(error) else error.exit_code)
    return int(ExitCode.OK)


def _train(session: Session, words: Sequence[str]) -> None:
    require_verl(session)
    if session.has_run:
        _under_a_daemon(session)
    else:
        _by_hand(words)


def _under_a_daemon(session: Session) -> None:
    from verl_slurm.config.elastic import on_ranks
    from verl_slurm.config.load import load_own
    from verl_slurm.program.programs import Moves

    paths, resume, resume_step = session.paths, None, 0
    config = on_ranks(Moves.of(paths).config(load_own(paths.run_yaml)), session.world_size)
    if session.resume is not None:
        resume, resume_step = resume_point(config, paths, session.resume.name)
    # Checked here once more: in front of a container `submit` had no verl to compose with.
    settings = start_settings(config, paths, session.attempt, resume).config
    with _process_group(settings) as ranks:
        # Imported here: verl's process group chooses the device first.
        from verl_slurm.loops.step_end import StepEndSaver
        from verl_slurm.loops.verl.verl_ppo_saves import last_words
        from verl_slurm.loops.verl.verl_sft_loop import ServedSFT

        saver = StepEndSaver(
            session,
            ranks,
            guest="verl",
            step=resume_step,
            metadata={"verl": installed_verl(), "torch": metadata.version("torch")},
            texts=tracker_file,
            beside=True,
            any_ranks=True,
        )
        # The saver before the trainer: verl's constructor loads the checkpoint and makes the handler that saves.
        trainer = ServedSFT(settings, saver, resume_step)
        saver.begin(resume_step, trainer.total)
        trainer.fit()
        # Before the verdict: the commit of the last step may still be running.
        saver.end()
        last_words(saver, step=trainer.step, total=trainer.total, began=resume_step)


def _by_hand(words: Sequence[str]) -> None:
    """Runs verl as it is, without its trap: it resumes from whatever it finds by itself."""
    settings = compose("sft", words)
    with _process_group(settings):
        from verl_slurm.loops.verl.verl_ppo_saves import require_all
        from verl_slurm.loops.verl.verl_sft_loop import ServedSFT

        trainer = ServedSFT(settings, None, None)
        began = trainer.step
        trainer.fit()
        # By hand, too, an end without a step is an error: verl itself exits with 0.
        require_all(trainer.step, trainer.total, began, where=Path(settings.trainer.default_local_dir))


@contextmanager
def _process_group(settings: Any) -> "Iterator[Collective]":
    import torch.distributed as dist
    from verl.utils.device import auto_set_device
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from verl_slurm.save.ranks.collective import Collective

    auto_set_device(settings)
    initialize_global_process_group()
    # A CPU group of our own: verl's may be NCCL, and its collectives run on the GPUs' streams.
    yield Collective(dist.new_group(backend="gloo"))
    destroy_global_process_group()  # not after an error: the others may wait in it


def _complain(text: str) -> None:
    with suppress(OSError, ValueError):
        os.write(2, text.encode(errors="replace") + b"\n")


if __name__ == "__main__":
    run_and_leave(main)

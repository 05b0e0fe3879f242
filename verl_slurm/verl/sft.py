"""Entry of one rank of verl's SFT trainer: `-m verl_slurm.verl.sft [HYDRA OVERRIDES]`.

Under a daemon the settings are those of the section `verl` of the run's configuration, and where it saves and what it
resumes from are the run's. Run by hand, the words are the settings, verl saves and resumes as it always does, and
nothing is committed; but the trap at an epoch's end is closed there, too.

The first word to the daemon goes out before torch and verl are imported.
"""

import argparse
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from verl_slurm.errors import VerlSlurmError
from verl_slurm.exit_codes import ExitCode
from verl_slurm.guest.session import Session
from verl_slurm.guest.tree import clear_work, require_guest
from verl_slurm.verl.composing import checked_settings, compose
from verl_slurm.verl.installed import installed_verl, require_installed
from verl_slurm.verl.overrides import OwnSettings

if TYPE_CHECKING:
    from verl_slurm.dcp.collective import Collective

__all__ = ["main", "run_and_leave"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank to its end; the exit code is 0 when it finished or stopped as asked."""
    parser = argparse.ArgumentParser(prog="verl_slurm.verl.sft", description=__doc__.splitlines()[0])
    for name in ("--run", "--epoch", "--resume"):
        parser.add_argument(
            name, help=argparse.SUPPRESS
        )  # for people who read `ps`: it stands in the environment
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="verl's settings, as Hydra takes them")
    options = parser.parse_args(argv)
    session = Session.open()
    try:
        _train(session, options.words)
    except VerlSlurmError as error:
        cause = error.__cause__
        if error.exit_code is ExitCode.INTERNAL and isinstance(cause, VerlSlurmError):
            error = cause  # what failed on this rank reaches us as a failure of all
        _complain(f"rank {session.rank}: {error.one_line()}")
        if error.exit_code is ExitCode.INTERNAL or _is_mood(error):
            return int(ExitCode.INTERNAL)  # a crash like any other: another start may help
        session.refused(error)
        return int(error.exit_code)
    return int(ExitCode.OK)


def _train(session: Session, words: Sequence[str]) -> None:
    release = require_installed("sft", installed_verl())
    if release.word != "run":
        session.notice(release.line, topic="device", loud=True)
    if session.has_run:
        _under_a_daemon(session)
    else:
        _by_hand(words)


def _under_a_daemon(session: Session) -> None:
    from verl_slurm.config.load import load_own

    paths, resume, resume_step = session.paths, None, 0
    config = load_own(paths.run_yaml)
    if session.resume is not None:
        manifest = require_guest(session.resume, "verl", world_size=session.world_size)
        resume_step = manifest.step
        resume = session.resume / f"global_step_{resume_step}"
    own = OwnSettings(
        nodes=config.distributed.nodes,
        ranks_per_node=config.distributed.ranks_per_node,
        save_dir=paths.work(session.epoch),
        resume=resume,
        every_steps=config.checkpoint.every_steps,
        name=paths.root.name,
    )
    settings = checked_settings("sft", config.verl, own).config
    with _process_group(settings) as ranks:
        from verl_slurm.verl.serving import Serving
        from verl_slurm.verl.sft_loop import ServedSFT

        work = Path(ranks.on_first("making the work directory", lambda: bytes(_made(session))).decode())
        serving = Serving(
            session,
            ranks,
            work,
            config=config,
            resume_step=resume_step,
            metadata={"verl": installed_verl(), "torch": metadata.version("torch")},
        )
        trainer = ServedSFT(settings, serving, resume_step)
        serving.begin(resume_step, trainer.total)
        trainer.fit()
        serving.end()
        _last_words(session, trainer, serving, resume_step)


def _made(session: Session) -> bytes:
    return str(clear_work(session.paths, session.epoch)).encode()


def _last_words(session: Session, trainer: Any, serving: Any, began: int) -> None:
    """What came of it, by the step that was reached."""
    if trainer.is_done and serving.saved_step == trainer.step:
        session.finished(trainer.step)
    elif trainer.order is not None:
        session.stopped(trainer.order.request_id)
    elif trainer.is_done:
        raise VerlSlurmError(
            "the last step is done and could not be saved",
            where=session.paths.root,
            found=f"the newest save is of step {serving.saved_step}",
            expected=f"step {trainer.total}",
        )
    else:
        _require_all(trainer, began, where=session.paths.root)


def _require_all(trainer: Any, began: int, *, where: Path) -> None:
    """verl ends with 0 whether or not it came to its last step.

    Raises:
        VerlSlurmError: a crash: it did not.
    """
    if not trainer.is_done:
        what = (
            "verl ended without a single step" if trainer.step == began else "verl ended before its last step"
        )
        raise VerlSlurmError(
            what, where=where, found=f"step {trainer.step}", expected=f"step {trainer.total}"
        )


def _by_hand(words: Sequence[str]) -> None:
    """verl as it is, without its trap: it resumes from what it finds by itself."""
    settings = compose("sft", words)
    with _process_group(settings):
        from verl_slurm.verl.sft_loop import ServedSFT
        from verl_slurm.verl.sft_wraps import Alone

        trainer = ServedSFT(settings, Alone(), None)
        began = trainer.step
        trainer.fit()
        _require_all(trainer, began, where=Path(settings.trainer.default_local_dir))


@contextmanager
def _process_group(settings: Any) -> "Iterator[Collective]":
    import torch.distributed as dist
    from verl.utils.device import auto_set_device
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from verl_slurm.dcp.collective import Collective

    auto_set_device(settings)
    initialize_global_process_group()
    yield Collective(dist.new_group(backend="gloo"))
    destroy_global_process_group()  # not after an error: the others may wait in it


def _is_mood(error: BaseException | None) -> bool:
    """Whether a storage that is unwell for a moment may be behind `error`."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__
    return False


def _complain(text: str) -> None:
    with suppress(OSError, ValueError):
        os.write(2, text.encode(errors="replace") + b"\n")


def run_and_leave() -> NoReturn:
    """`main`, and out without the interpreter's own end: there torch may abort (`trainer.__main__.run_and_leave`)."""
    code = int(ExitCode.INTERNAL)
    try:
        code = main()
    except SystemExit as leave:  # argparse
        code = leave.code if isinstance(leave.code, int) else int(ExitCode.USAGE)
    except BaseException:  # noqa: BLE001 - the root of this process: said here, as there is nobody above
        traceback.print_exc()
    finally:
        import sys

        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    run_and_leave()

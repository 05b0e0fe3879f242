"""The scripted rank, whose part of one save its writer process answers for with an error: no disk here is full."""

import msgspec

from tests.fakes.scripted_rank import ScriptedLine
from verl_slurm.save.ranks.pending_save import PendingSave
from verl_slurm.save.writer.protocol import Written
from verl_slurm.trainer import __main__ as entry
from verl_slurm.wire.lifeline import run_and_leave


class _Broken(ScriptedLine):
    def _break_save(self) -> None:
        answered = PendingSave.answered

        def fail_once(save: PendingSave, written: Written) -> None:
            PendingSave.answered = answered
            error = "OSError: [Errno 28] No space left on device"
            answered(save, msgspec.structs.replace(written, error=error, errno=28))

        PendingSave.answered = fail_once


if __name__ == "__main__":
    entry.NoDaemon = _Broken
    run_and_leave(entry.main)

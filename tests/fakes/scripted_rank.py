"""One trainer rank that is interrupted at an exact place; started by torchrun in place of the trainer.

It is the real rank without an agent: its line counts safe points and says what a daemon would. A real daemon, and a
signal from outside, cannot be held to one safe point.

`VS_TEST_SCRIPT` is a JSON object:

    rank       which rank acts; null: all of them
    safe_point the how-manieth safe point of this process (0: before any work) it acts at
    action     kill: SIGKILL oneself;
               alarm: have the kernel end the process `seconds` later, wherever it is then;
               break_save: let this rank's part of the next save fail;
               lose_sync: from then on the rollout engine gets no weights; with `stop_at`, stop at that one
"""

import json
import os
import signal

import msgspec

from verl_slurm.save.ranks.pending_save import PendingSave
from verl_slurm.save.writer.protocol import Written
from verl_slurm.trainer import __main__ as entry
from verl_slurm.trainer.rollout.sampling import HFRollout
from verl_slurm.trainer.rollout.vllm_rollout import VLLMRollout
from verl_slurm.wire.client import NoDaemon
from verl_slurm.wire.lifeline import run_and_leave
from verl_slurm.wire.messages import SaveRequest


class ScriptedLine(NoDaemon):
    """Counts the polls of a control page; there is exactly one at each safe point."""

    def __init__(self) -> None:
        self._script = json.loads(os.environ["VS_TEST_SCRIPT"])
        self._mine = self._script.get("rank") in (None, int(os.environ["RANK"]))
        self._polls = 0

    def request(self) -> SaveRequest | None:
        number, self._polls = self._polls, self._polls + 1
        if not self._mine or number < self._script["safe_point"]:
            return None
        match self._script["action"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "alarm" if number == self._script["safe_point"]:
                signal.setitimer(signal.ITIMER_REAL, self._script["seconds"])
            case "break_save" if number == self._script["safe_point"]:
                self._break_save()
            case "lose_sync":
                for engine in (HFRollout, VLLMRollout):
                    engine.sync = lambda *_: None
                if number == self._script.get("stop_at"):
                    return SaveRequest(request_id=1, stop=True)
        return None

    def _break_save(self) -> None:
        """The writer process answers with an error: no disk here is full."""
        answered = PendingSave.answered

        def fail_once(save: PendingSave, written: Written) -> None:
            PendingSave.answered = answered
            error = "OSError: [Errno 28] No space left on device"
            answered(save, msgspec.structs.replace(written, error=error, errno=28))

        PendingSave.answered = fail_once


if __name__ == "__main__":
    entry.NoDaemon = ScriptedLine
    run_and_leave(entry.main)

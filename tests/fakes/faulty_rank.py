"""The real trainer's rank, struck at exact places of its saves; started in place of `verl_slurm.trainer`.

It is the real rank, which trains and saves as ever. A signal from outside cannot be timed to one stage of a save.

`VS_HOSTILE` has under `strikes` a list of [rank, stage, act], carried out one after the other over all lives of the
ranks, and under `marks` a file into which each is written, just before:

    stages  before: nothing of this rank's part is written     during: half of its small files are
            wrote: its part is durable, and all ranks have heard so; rank 0 commits now
            asked: as before, in the save before the end alone
    acts    kill: SIGKILL        stop: SIGSTOP        raise: an error of the program
            oom: in the control group `memory` of `VS_HOSTILE`, take memory until the kernel kills
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_slurm.save.ranks import medium_results, saver
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.pending_save import MediumResult
from verl_slurm.trainer import __main__ as entry
from verl_slurm.trainer.loop import Loop
from verl_slurm.wire.lifeline import run_and_leave
from verl_slurm.wire.messages import SaveRequest

BENT: dict[str, Any] = json.loads(os.environ["VS_HOSTILE"])
MARKS, RANK = Path(BENT["marks"]), int(os.environ["RANK"])


def _done() -> int:
    text = MARKS.read_text() if MARKS.exists() else ""
    return sum(line.startswith("strike ") for line in text.splitlines())


BEFORE_US = _done()
_asked = False


def strike(stage: str) -> None:
    number, strikes = _done(), BENT["strikes"]
    # After a deadly one nobody of this life is struck any more.
    if number >= len(strikes) or any(act != "raise" for *_, act in strikes[BEFORE_US:number]):
        return
    rank, where, act = strikes[number]
    if (rank, where) != (RANK, stage):
        return
    with MARKS.open("a") as file:
        file.write(f"strike {number}: {act} rank {rank} {stage}\n")
    match act:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError(f"rank {rank} was struck {stage} its part was written")
        case "oom":
            (Path(BENT["memory"]) / "cgroup.procs").write_text(str(os.getpid()))
            eaten = []
            while True:
                eaten.append(b"x" * (8 << 20))


def _together(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Collective, what: str, work: Callable[[], Any]) -> Any:
        if what != "writing the checkpoint":
            return real(self, what, work)

        def struck() -> Any:
            strike("asked" if _asked else "before")
            return work()

        return real(self, what, struck)

    return call


def _write_to_medium(*args: Any, **more: Any) -> MediumResult:
    written = _real_write_to_medium(*args, **more)
    strike("wrote")
    return written


def _write_small(directory: Path, files: dict[str, bytes]) -> None:
    half = dict(list(files.items())[: (len(files) + 1) // 2])
    _real_write_small(directory, half)
    strike("during")
    _real_write_small(directory, {name: data for name, data in files.items() if name not in half})


def _save(self: Loop, request: SaveRequest | None, why: str) -> None:
    global _asked
    _asked = request is not None and request.stop
    _real_save(self, request, why)


if __name__ == "__main__":
    _real_write_small, medium_results.write_small = medium_results.write_small, _write_small
    _real_write_to_medium, saver.write_to_medium = saver.write_to_medium, _write_to_medium  # type: ignore[attr-defined]
    _real_save, Loop._save = Loop._save, _save  # type: ignore[method-assign]
    Collective.together = _together(Collective.together)  # type: ignore[method-assign]
    run_and_leave(entry.main)

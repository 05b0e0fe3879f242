"""Which checkpoint a generation starts from, and whether a fresh one can be trusted: reads files, no torch."""

import msgspec

from verl_slurm.checkpoint.commit import sweep
from verl_slurm.checkpoint.quarantine import move_to_quarantine
from verl_slurm.checkpoint.recover import choose_resume
from verl_slurm.checkpoint.verify import verify
from verl_slurm.config.schema import RunConfig
from verl_slurm.paths import RunPaths

__all__ = ["ResumePoint", "find_resume_point", "read_back"]


class ResumePoint(msgspec.Struct, frozen=True):
    """`name`: a directory in checkpoints/, empty for a start from nothing."""

    name: str
    reasons: tuple[str, ...]
    progress: str
    """What a start has to show: two starts with the same one brought nothing new in between."""


def find_resume_point(paths: RunPaths, config: RunConfig) -> ResumePoint:
    """Verify from the newest back and take the first that is good; sets corrupt ones aside."""
    sweep(paths)
    choice = choose_resume(paths, config.checkpoint.resume_from)
    name = choice.name or ""
    journaled = sum(f.stat().st_size for f in paths.ledger.glob("*.ledger")) if paths.ledger.is_dir() else 0
    return ResumePoint(name, tuple(choice.reasons), f"{name or 'start'}+{journaled}")


def read_back(paths: RunPaths, name: str) -> tuple[bool, str]:
    """Re-read a committed checkpoint, every byte; (good, what was found)."""
    verdict = verify(paths.checkpoints / name)
    if verdict.ok:
        return True, f"{verdict.num_bytes} bytes in {verdict.seconds:.3f} s"
    detail = "; ".join(f"{problem.path}: {problem.what}" for problem in verdict.problems[:3])
    move_to_quarantine(paths.checkpoints / name, [detail])
    return False, detail

"""The decisions about a submission before anything is made. Pure."""

from pathlib import Path
from typing import Literal

import msgspec

from verl_slurm.config.schema import RunConfig
from verl_slurm.program.record import CodeFile, CodeRecord

__all__ = ["Cluster", "CodePlan", "SubmissionPlan"]

Cluster = Literal["slurm", "local"]


class CodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempts of the run will run of the user's code."""

    record: CodeRecord = CodeRecord()
    files: tuple[tuple[CodeFile, ...], ...] = ()
    """Of each tree of the record."""
    diffs: tuple[bytes, ...] = ()
    """The difference of each tree from its commit."""
    notes: tuple[str, ...] = ()
    kept: bool = False
    """The run has this record and its copies already."""

    def lines(self) -> list[str]:
        """Describes each tree in a line."""
        return [line + (", as submitted before" if self.kept else "") for line in self.record.lines()]


class SubmissionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions about one submission before anything is made."""

    config: RunConfig
    """Paths absolute; builtin: names already replaced, except in a dry run."""
    run_dir: Path
    cluster: Cluster
    new_run: bool
    begun: bool = False
    """The run has a checkpoint or rollouts; until then any of its keys may change."""
    resumes_from: str | None = None
    """Its newest committed checkpoint."""
    inputs: tuple[tuple[str, str], ...] = ()
    """Model, data and reward that the run takes; empty for a guest."""
    code: CodePlan = CodePlan()
    checked: tuple[str, ...] = ()
    """The items that were checked and found good."""
    slurm: str = ""
    """Name of the Slurm cluster that was asked; empty: none was."""
    avoids: tuple[str, ...] = ()
    """Bad nodes of the user that the job is kept away from."""
    notes: tuple[str, ...] = ()
    """Notes for the user, e.g. that the local executor was chosen."""

"""Declares the section `code` of a configuration: which code of the user's a run keeps, and runs."""

from typing import Literal

from verl_slurm.config.section import Positive, Section


class CodeConfig(Section, frozen=True):
    """Sets what `submit` copies into the run, so that every attempt runs the submitted code (docs/code.md)."""

    tree: str | None = "auto"
    """The directory that is copied. `auto`: the git work tree that holds the program (a file of `trainer.command`, of
    `model.reward` or of `verl`), without what git ignores; else the program's own directory. null: nothing is copied,
    and each attempt runs what lies there at that time."""
    include: tuple[str, ...] = ()
    """Further files that git ignores, as globs relative to the tree, e.g. ["build/**/*.so"]."""
    exclude: tuple[str, ...] = ()
    """Files and directories to leave out, as globs relative to the tree or for one name, e.g. ["*.ipynb", "assets"]."""
    max_mb: Positive = 100
    """A larger copy is refused: code is small, and a directory with data was probably not meant."""
    on_drift: Literal["report", "refuse"] = "report"
    """What happens if the Python packages of an attempt are not those of the submission. `report`: a warning in the
    journal. `refuse`: the run ends before its ranks start."""

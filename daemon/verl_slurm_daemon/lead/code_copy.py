"""Checks before the ranks start that they run what was submitted: the copy of the user's code, and the packages."""

import sys

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.program.code_record import CodeRecord, package_drift, read_record
from verl_slurm.program.copying import check_copy
from verl_slurm.program.installed import Installed, look
from verl_slurm.slurm.rank_setup import python_of


def check_code(paths: RunPaths, config: RunConfig) -> list[ev.Event]:
    """Reads the copy back and asks the ranks' Python for its packages; returns what the journal is told.

    Takes a tenth of a second, and the time to read the copy. A run that was not submitted (`sbatch` by hand) has no
    record.

    Raises:
        DataError: the copy is not what was submitted.
        ConfigError: packages have changed, and `code.on_drift` is `refuse`.
        OSError: storage does not answer.
    """
    record = read_record(paths)
    if record is None:
        return []
    told: list[ev.Event] = []
    for tree in record.trees:
        if further := check_copy(paths, tree.digest):
            some = ", ".join(further[:3])
            text = f"{counted(len(further), 'file')} beside the submitted ones that Python may import: {some}"
            told.append(ev.Warned("code", f"{paths.code_tree(tree.digest)} has {text}"))
    if not record.python:
        return told  # the submission could not ask either: the ranks' Python is in an image
    python = python_of(config.slurm) or sys.executable
    # PYTHONPATH included: packages may lie there.
    found = look(python)
    if not found.python:
        told.append(ev.Warned("code", f"{python} does not tell which packages it has"))
    elif drift := package_drift(record, _record_of(found)):
        if config.code.on_drift == "refuse":
            raise ConfigError(
                "the packages are not those that the run was submitted with",
                where=python,
                found="; ".join(drift),
                remedy="install the former ones, or accept these with verl-slurm submit RUN --code new",
            )
        told.append(ev.Warned("packages", f"not those of the submission: {'; '.join(drift)}"))
    return told


def _record_of(found: Installed) -> CodeRecord:
    return CodeRecord(python=found.python, packages=found.packages)

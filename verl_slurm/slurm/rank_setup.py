"""Builds what a node does before its ranks start: modules, a Python, the user's commands. Pure.

The result is bash, because modules and conda's hooks are bash. It runs on each node, in a process whose environment the
ranks then get: the daemon does without, so that no library path of a module can break it.
"""

import shlex

from verl_slurm.config.schema import SlurmConfig

# `module` is a function of the login shell. Batch jobs of sites that do not export it have these files.
_MODULES = """\
if ! type module >/dev/null 2>&1; then
  for _verl_slurm_file in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" \\
      /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/modules/init/bash; do
    if [ -r "$_verl_slurm_file" ]; then . "$_verl_slurm_file"; break; fi
  done
fi
type module >/dev/null 2>&1 || _verl_slurm_failed 'no module command here'"""
OURS = "verl-slurm: "
"""Begins the line that names what failed, the last of the script's output."""
_FAILED = f'_verl_slurm_failed() {{ echo "{OURS}$1" >&2; exit 1; }}'


def python_of(slurm: SlurmConfig) -> str | None:
    """Returns the interpreter of `slurm.python`, which submit has made a directory; None: the daemon's own."""
    return None if slurm.python is None else f"{slurm.python}/bin/python"


def setup_script(slurm: SlurmConfig, *, commands: bool = True) -> str:
    """Returns the script; empty: there is nothing to do. `commands`: with the user's own (`slurm.setup`)."""
    lines = []
    if slurm.modules:
        lines.append(_MODULES)
    for name in slurm.modules:
        word = shlex.quote(name)
        lines.append(f"module load {word} || _verl_slurm_failed {shlex.quote(f'module load {name} failed')}")
    if slurm.python is not None:
        lines += _activation(slurm.python)
    # Without them, for a check that does nothing but load.
    for number, command in enumerate(slurm.setup if commands else ()):
        failed = f'"slurm.setup[{number}] failed with exit code $?"'
        # On lines of its own: a comment or a here-document at the end of a command stays inside.
        lines.append(f"{{\n{command}\n}} || _verl_slurm_failed {failed}")
    return "\n".join([_FAILED, *lines]) + "\n" if lines else ""


def _activation(directory: str) -> list[str]:
    """Does what `activate` does for programs; what it does for a prompt is left out."""
    place = shlex.quote(directory)
    return [
        f"export PATH={place}/bin${{PATH:+:$PATH}}",
        "unset PYTHONHOME",
        f"if [ -d {place}/conda-meta ]; then",
        f"  export CONDA_PREFIX={place} CONDA_DEFAULT_ENV={shlex.quote(directory.rpartition('/')[2])}",
        # Packages of conda put the paths of their libraries there.
        f"  for _verl_slurm_file in {place}/etc/conda/activate.d/*.sh; do",
        '    if [ -r "$_verl_slurm_file" ]; then . "$_verl_slurm_file"; fi',
        "  done",
        f"else export VIRTUAL_ENV={place}; fi",
    ]

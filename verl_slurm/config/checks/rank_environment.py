"""Checks what a run sets up for its ranks: modules, a Python, commands, variables. Pure."""

import re
from collections.abc import Iterator, Mapping

from verl_slurm.config.checks import Complaint
from verl_slurm.config.schema import RunConfig

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/=@:-]{0,127}")
# Slurm's, and the place of a rank in its run: another value would make ranks of one run disagree.
_OURS = re.compile(
    r"(VERL_SLURM|SLURM|SLURMD|SBATCH|SUBMITIT|PMI|PMI2|PMIX|TORCHELASTIC)_.*"
    r"|RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|OMP_NUM_THREADS|MKL_NUM_THREADS|PYTHONSAFEPATH|PYTHONUNBUFFERED|TOKENIZERS_PARALLELISM"
)
_SECRET = re.compile(
    r".*(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)", re.IGNORECASE
)
_SETTINGS = {
    "OMP_NUM_THREADS": "distributed.threads_per_rank",
    "MKL_NUM_THREADS": "distributed.threads_per_rank",
}


def rank_environment_complaints(config: RunConfig) -> Iterator[Complaint]:
    """Yields what is wrong with `slurm.modules`, `slurm.python`, `slurm.setup`, `env` and `env_from_files`."""
    slurm = config.slurm
    for name in slurm.modules:
        if not _MODULE.fullmatch(name):
            yield Complaint("slurm.modules", repr(name), "a module's name", "e.g. slurm.modules: [cuda/12.4]")
    for number, command in enumerate(slurm.setup):
        if not command.strip() or "\0" in command:
            yield Complaint(f"slurm.setup[{number}]", repr(command), "a command for bash", "remove it")
    if slurm.python is not None:
        if not slurm.python.strip() or not slurm.python.isprintable() or slurm.python.startswith("-"):
            yield Complaint(
                "slurm.python",
                repr(slurm.python),
                "the directory of a virtual or conda environment, or conda's name for it",
                "e.g. slurm.python: /home/me/venv",
            )
        elif slurm.container is not None:
            yield Complaint(
                "slurm.python",
                f"{slurm.python}, with slurm.container",
                "one of them: an image brings its own Python",
                "remove it, and name the image's Python by slurm.container.python",
            )
    yield from variable_complaints("", config.env, config.env_from_files)


def variable_complaints(
    place: str, env: Mapping[str, str | int], env_from_files: Mapping[str, str]
) -> Iterator[Complaint]:
    """Yields what is wrong with an `env` and its `env_from_files`.

    Args:
        place: the section that they are in; empty: they are the ranks'.
    """
    prefix = f"{place}." if place else ""
    plain, secret = f"{prefix}env", f"{prefix}env_from_files"
    for name, value in env.items():
        yield from _variable(plain, name)
        if "\0" in str(value):
            yield Complaint(f"{plain}.{name}", "a text with a zero byte", "text", "remove it")
        elif _SECRET.fullmatch(name) and value != "":
            # The value is not shown: whoever reads the error may not be who may know it.
            yield Complaint(
                f"{plain}.{name}",
                "a value whose name says that it is a secret",
                "a file with mode 0600 that holds it: run.yaml and checkpoints keep what stands here",
                f"{secret}: {{{name}: PATH}}",
            )
    for name, path in env_from_files.items():
        yield from _variable(secret, name)
        if not path.strip() or not path.isprintable():
            yield Complaint(
                f"{secret}.{name}", repr(path), "a path", "give the path of a file with mode 0600"
            )
        if name in env:
            yield Complaint(
                f"{plain}.{name}", "a value, and one in env_from_files", "one of them", "remove one"
            )


def _variable(key: str, name: str) -> Iterator[Complaint]:
    if not _VARIABLE.fullmatch(name):
        yield Complaint(
            f"{key}.{name!r}", "not a variable's name", "letters, digits and `_`", "e.g. NCCL_DEBUG"
        )
    elif _OURS.fullmatch(name):
        remedy = f"set {_SETTINGS[name]}" if name in _SETTINGS else "remove it"
        yield Complaint(
            f"{key}.{name}", "a variable that Slurm or the daemon sets", "another variable", remedy
        )

"""Checks what a run sets up for its ranks on the machine that submits, which has the nodes' file systems.

Modules are loaded for it, and the Python is asked what is installed in it, unless `why_not_run` has a reason against.
The user's commands (`slurm.setup`) are read by bash and not run: they may be meant for a node alone.
"""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

import verl_slurm
from verl_slurm.base.bounded import SMALL, TooMuch, read_regular
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.files import read_private, unsafe_on_the_way
from verl_slurm.base.packages import install_command
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import agents_inside
from verl_slurm.slurm.rank_setup import python_of, setup_script
from verl_slurm.submit.relative_paths import Places

_TIMEOUT_S = 120.0
# Metadata alone: importing torch takes seconds, and may want a module of the node.
_LOOK = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def find_python(text: str, places: Places) -> str:
    """Returns the directory of `slurm.python`: that of an environment, or the one that conda knows by this name.

    Raises:
        ConfigError: there is none, or there are several of this name.
    """
    if "/" not in text and not (here := Path(places.path("slurm.python", text))).is_dir():
        found = sorted({place for place in _conda_environments() if Path(place).name == text})
        if len(found) == 1:
            return found[0]
        known = ", ".join(sorted({Path(place).name for place in _conda_environments()}))
        raise ConfigError(
            "several conda environments have this name" if found else "no such Python environment",
            where=f"slurm.python={text}",
            found=", ".join(found) or f"neither {here} nor a conda environment of this name",
            expected=f"one of conda's: {known}" if known and not found else None,
            remedy="give the directory of the environment",
        )
    directory = places.path("slurm.python", text)
    # `source DIR/bin/activate` and `#!DIR/bin/python` are what people have at hand.
    for tail in ("/bin/activate", "/bin/python", "/bin/python3", "/bin"):
        directory = directory.removesuffix(tail)
    if not os.access(f"{directory}/bin/python", os.X_OK):
        raise ConfigError(
            "no such Python environment",
            where=f"slurm.python={text}",
            found=f"no program {directory}/bin/python",
            # What is there and is no environment is not to be filled with one.
            remedy="give the directory of an environment, which has bin/python"
            if os.path.lexists(directory)
            else f"python -m venv {shlex.quote(directory)}, or give the directory of another environment",
        )
    return directory


def _conda_environments() -> list[str]:
    """Returns the directories that conda, mamba or micromamba have made, as they record them."""
    roots = [
        os.environ.get("MAMBA_ROOT_PREFIX", ""),
        str(Path(os.environ.get("CONDA_EXE", "/x/x")).parent.parent),
    ]
    homes = [Path(root) / "envs" for root in roots if root]
    homes += [Path(place) for place in os.environ.get("CONDA_ENVS_PATH", "").split(":") if place]
    found = [str(place) for home in homes if home.is_dir() for place in home.iterdir()]
    with contextlib.suppress(OSError, TooMuch):  # conda has made none
        listed = read_regular(Path.home() / ".conda" / "environments.txt", SMALL)
        found += os.fsdecode(listed).split("\n")
    return [place for place in found if place and (Path(place) / "conda-meta").is_dir()]


def why_not_run(config: RunConfig, *, dry_run: bool, stranger: bool) -> str:
    """Returns why the modules and the Python of the ranks are not run here; empty: they are, or there are none.

    Args:
        dry_run: the user only looks, maybe at what somebody handed over: that runs nothing that it names.
        stranger: others own the configuration, or may write it.
    """
    slurm = config.slurm
    if agents_inside(config) or not (slurm.modules or slurm.python):
        return ""
    if dry_run:
        return "a dry run starts nothing that the configuration names; submit itself does"
    if stranger:
        return "others own or may write the configuration"
    if slurm.python is None or Path(slurm.python).resolve() == Path(sys.prefix).resolve():
        return ""
    python = Path(slurm.python)
    for place in (Path(f"{python}/bin/python"), *python.glob("lib/python3*/site-packages")):
        if found := unsafe_on_the_way(place):
            return f"others could have put programs there ({found[0]}: {found[1]})"
    return ""


def check_rank_environment(
    config: RunConfig, packages: Iterable[str], not_run: str = ""
) -> tuple[list[str], list[str]]:
    """Checks modules, Python, commands and secrets; returns what was checked, and notes for the user.

    Args:
        config: paths absolute.
        packages: what the ranks import.
        not_run: from `why_not_run`.

    Raises:
        ConfigError: a module cannot be loaded, bash cannot read a command, a package is missing, or a file has no
            value.
        PermissionRefused: a file with a secret is open to others.
    """
    checked, slurm = [], config.slurm
    for name, path in config.env_from_files.items():
        try:
            value = read_private(Path(path)).strip()
        except OSError as error:
            raise ConfigError(
                "a secret of the ranks cannot be read",
                where=f"env_from_files.{name}",
                found=f"{path}: {error.strerror}",
                remedy="write the value into it, and chmod 600",
            ) from None
        if not value:
            raise ConfigError(
                "a file holds no value for a variable", where=f"env_from_files.{name}", found=path
            )
    if config.env or config.env_from_files:
        checked.append(f"variables {', '.join([*config.env, *config.env_from_files])}")
    if agents_inside(config):
        return checked, []  # modules and commands are the image's
    for number, command in enumerate(slurm.setup):
        if problem := _bash(["-n", "-c", command]):
            raise ConfigError(
                "bash cannot read a command",
                where=f"slurm.setup[{number}]",
                found=problem.partition("line ")[2] or problem,
                expected="a command that is complete by itself",
                remedy="mend it",
            )
    if slurm.setup:
        checked.append(f"the syntax of slurm.setup ({len(slurm.setup)}, not run here)")
    if not_run:
        keys = [f"slurm.{name}" for name in ("modules", "python") if getattr(slurm, name)]
        return checked, [f"{' and '.join(keys)}: not looked at, nor the packages there, since {not_run}"]
    if (slurm.modules or slurm.python) and (problem := _bash(["-c", setup_script(slurm, commands=False)])):
        raise ConfigError(
            "the ranks' environment cannot be loaded",
            where="slurm.modules" if slurm.modules else "slurm.python",
            found=problem.removeprefix("verl-slurm: "),
            remedy="`module avail` lists the modules of this machine",
        )
    if slurm.modules:
        checked.append(f"modules {', '.join(slurm.modules)}")
    if python := python_of(slurm):
        checked.append(_check_python(config, python, ["verl-slurm", *packages]))
    return checked, []


def _bash(words: list[str]) -> str:
    """Returns the last line of what bash complains about; empty: nothing."""
    try:
        done = subprocess.run(
            ["/bin/bash", "--noprofile", "--norc", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_TIMEOUT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def _check_python(config: RunConfig, python: str, packages: list[str]) -> str:
    where = f"slurm.python={config.slurm.python}"
    try:
        done = subprocess.run(
            [python, "-P", "-c", _LOOK, *packages],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        found = msgspec.json.decode(done.stdout, type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError):
        raise ConfigError(
            "the Python does not answer", where=where, remedy=f"see what {python} says, from 3.11 on"
        ) from None
    if found.get("verl-slurm") != verl_slurm.__version__:
        raise ConfigError(
            "the ranks' Python has another version of verl-slurm",
            where=where,
            found=found.get("verl-slurm", "none"),
            expected=verl_slurm.__version__,
            remedy=install_command("trainer", python),
        )
    if missing := [name for name in packages if name not in found]:
        raise ConfigError(
            "the ranks' Python lacks a package",
            where=where,
            found=f"no {', '.join(missing)}",
            remedy=install_command("trainer", python),
        )
    return f"Python {python} with " + ", ".join(f"{name} {version}" for name, version in found.items())


def show_rank_environment(config: RunConfig) -> str:
    """Returns what each node does before its ranks start, as a script for people; empty: nothing. Secrets are named."""
    lines = [setup_script(config.slurm).rstrip("\n")]
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in config.env.items()]
    lines += [f"export {name}=...  # from {path}" for name, path in config.env_from_files.items()]
    return "\n".join(line for line in lines if line)

"""Checks what a run sets up for its ranks on the machine that submits, which has the nodes' file systems.

Modules are loaded and the Python is asked, unless `why_not_run` has a reason against.
"""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import verl_slurm
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.files import unsafe_on_the_way
from verl_slurm.base.packages import install_command
from verl_slurm.checks import Finding, good, warn
from verl_slurm.checks.probe_command import run_to_end
from verl_slurm.config.schema import RunConfig
from verl_slurm.containers.runtimes import agents_inside
from verl_slurm.program.installed import look
from verl_slurm.slurm.rank_setup import python_of, setup_script
from verl_slurm.submit.checks.user_programs import check_secret

_TIMEOUT_S = 120.0


def why_not_run(config: RunConfig, *, dry_run: bool, stranger: bool) -> str:
    """Returns why the modules and the Python of the ranks are not run here; empty: they are, or there are none.

    `dry_run`: the user only looks, maybe at what somebody handed over; `stranger`: others may write the
    configuration.
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


def check_rank_environment(config: RunConfig, packages: Iterable[str], not_run: str = "") -> list[Finding]:
    """Checks modules, Python with the `packages` that the ranks import, commands and secrets; paths absolute.

    `not_run` is from `why_not_run`.

    Raises:
        ConfigError: a module cannot be loaded, bash cannot read a command, a package is missing, a file has no value.
        PermissionRefused: a file with a secret is open to others.
    """
    found, slurm = list[Finding](), config.slurm
    for name, path in config.env_from_files.items():
        check_secret(f"env_from_files.{name}", path)
    if config.env or config.env_from_files:
        found.append(good(f"variables {', '.join([*config.env, *config.env_from_files])}"))
    if agents_inside(config):
        return found  # modules and commands are the image's
    for number, command in enumerate(slurm.setup):
        # Read and not run: it may be meant for a node alone.
        if problem := _bash(["-n", "-c", command]):
            raise ConfigError(
                "bash cannot read a command",
                where=f"slurm.setup[{number}]",
                found=problem.partition("line ")[2] or problem,
                expected="a command that is complete by itself",
                remedy="complete it",
            )
    if slurm.setup:
        found.append(good(f"the syntax of slurm.setup ({len(slurm.setup)}, not run here)"))
    if not_run:
        keys = [f"slurm.{name}" for name in ("modules", "python") if getattr(slurm, name)]
        return [*found, warn(f"{' and '.join(keys)}: not looked at, nor the packages there, since {not_run}")]
    if (slurm.modules or slurm.python) and (problem := _bash(["-c", setup_script(slurm, commands=False)])):
        raise ConfigError(
            "the ranks' environment cannot be loaded",
            where="slurm.modules" if slurm.modules else "slurm.python",
            found=problem.removeprefix("verl-slurm: "),
            remedy="`module avail` lists the modules of this machine",
        )
    if slurm.modules:
        found.append(good(f"modules {', '.join(slurm.modules)}"))
    if python := python_of(slurm):
        found.append(good(_check_python(config, python, ["verl-slurm", *packages])))
    return found


def _bash(words: list[str]) -> str:
    """Returns the last line of what bash complains about; empty: nothing."""
    done = run_to_end(["/bin/bash", "--noprofile", "--norc", *words], _TIMEOUT_S)
    return "" if done.exit_code == 0 else done.last_words


def _check_python(config: RunConfig, python: str, packages: list[str]) -> str:
    where, installed = f"slurm.python={config.slurm.python}", look(python)
    if not installed.python:
        raise ConfigError(
            "the Python does not answer", where=where, remedy=f"see what {python} says, from 3.11 on"
        )
    found = {name: installed.packages[name] for name in packages if name in installed.packages}
    missing = [name for name in packages if name not in found]
    if found.get("verl-slurm") != verl_slurm.__version__:
        raise ConfigError(
            "the ranks' Python has another version of verl-slurm",
            where=where,
            found=found.get("verl-slurm", "none"),
            expected=verl_slurm.__version__,
            remedy=install_command("trainer", python),
        )
    if missing:
        raise ConfigError(
            "the ranks' Python lacks a package",
            where=where,
            found=f"no {', '.join(missing)}",
            remedy=install_command("trainer", python),
        )
    return f"Python {python} with " + ", ".join(f"{name} {version}" for name, version in found.items())


def show_rank_environment(config: RunConfig) -> str:
    """Returns what each node does before its ranks start, as a script for people, without secrets; empty: nothing."""
    lines = [setup_script(config.slurm).rstrip("\n")]
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in config.env.items()]
    lines += [f"export {name}=...  # from {path}" for name, path in config.env_from_files.items()]
    return "\n".join(line for line in lines if line)

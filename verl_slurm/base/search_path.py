"""Keeps the working directory out of Python's module search path.

An empty element of PYTHONPATH means the working directory (`PYTHONPATH=$MINE:$PYTHONPATH` with an unset second part
has one), and `-P` and PYTHONSAFEPATH do not cover it: Python would run a module from another user's directory.

This module imports only what the interpreter has loaded before it: any other import could be the planted one.
"""

import os
import sys

PYTHONPATH = "PYTHONPATH"


def absolute_only(path: str) -> tuple[str, list[str]]:
    """Returns PYTHONPATH without its empty and relative elements, and those elements."""
    places = path.split(os.pathsep) if path else []
    # Python expands no `~`: it is relative, too.
    kept = [place for place in places if os.path.isabs(place)]
    return os.pathsep.join(kept), [place for place in places if not os.path.isabs(place)]


def clean_environment(environ: dict[str, str]) -> dict[str, str]:
    """Returns `environ` for a process that we start. PYTHONPATH is absent if nothing of it is left."""
    kept, dropped = absolute_only(environ.get(PYTHONPATH, ""))
    if not dropped:
        return environ
    rest = {name: value for name, value in environ.items() if name != PYTHONPATH}
    # Absent, not empty: an empty value would be an empty element.
    return rest | {PYTHONPATH: kept} if kept else rest


def leave_working_directory(program: str, module_name: str) -> None:
    """Restarts the program without those elements and prints one line about them; must be its first statement.

    Args:
        program: the name of the console script. A process that only imports the program's module is left alone.
        module_name: `__name__` of the caller.
    """
    as_module = module_name == "__main__"
    if not as_module and os.path.basename(sys.argv[0]) != program:
        return
    here = os.getcwd() if as_module and not sys.flags.safe_path else ""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ours = os.path.dirname(package)
    # Not in a checkout that is itself the working directory: it is where this package lies.
    if here and sys.path[:1] == [here] != [ours]:
        del sys.path[0]  # `python -m` put it there
    # Read from the environment, not from `sys.path`, where the elements can no longer be told from others.
    _, dropped = absolute_only(os.environ.get(PYTHONPATH, ""))
    if not dropped:
        return
    names = ", ".join(repr(place) for place in dropped)
    sys.stderr.write(
        f"{program}: warning: PYTHONPATH has {names}, which Python looks for in the working directory: left out;"
        f" write absolute paths, as in PYTHONPATH=/my/lib${{PYTHONPATH:+:$PYTHONPATH}}\n"
    )
    sys.stderr.flush()
    environ = clean_environment(dict(os.environ))
    if sys.flags.ignore_environment:  # this process ignored it, its children would not
        os.environ.pop(PYTHONPATH, None)
        os.environ.update(environ)
        return
    # Removing them from `sys.path` is not enough: entries of an editable install are in there once, from any
    # source.
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)  # noqa: S606 - no shell is wanted

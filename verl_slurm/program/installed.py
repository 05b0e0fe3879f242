"""Asks a Python what is installed in it, and where it looks for modules. Torch-free; imports nothing of the user's."""

import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from verl_slurm.base.search_path import clean_environment

_TIMEOUT_S = 60.0
# By the names of the directories that installers make (PEP 376, PEP 427): to parse the metadata of 200 packages takes
# half a second. `__editable__` modules are those by which setuptools finds packages of an editable install.
_LOOK = """
import importlib.util, json, os, platform, sys
found, roots = {}, [place for place in sys.path if os.path.isdir(place)]
for place in reversed(roots):
    for entry in os.listdir(place):
        stem, dot, kind = entry.rpartition(".")
        name, dash, version = stem.partition("-")
        if kind in ("dist-info", "egg-info") and dash:
            found[name.lower().replace("_", "-")] = version.partition("-")[0]
for name, module in list(sys.modules.items()):
    if name.startswith("__editable__"):
        roots += [os.path.dirname(place) for place in getattr(module, "MAPPING", {}).values()]
def lacks(name):
    try: return importlib.util.find_spec(name) is None
    except (ImportError, ValueError): return False
lacking = [name for name in sys.argv[1:] if lacks(name)]
print(json.dumps([platform.python_version(), found, list(dict.fromkeys(roots)), lacking]))
"""


class Installed(msgspec.Struct, frozen=True, array_like=True):
    """The answer."""

    python: str = ""
    """Version of Python; empty: it does not answer."""
    packages: dict[str, str] = {}
    search: tuple[str, ...] = ()
    """The directories in which it looks for modules."""
    lacking: tuple[str, ...] = ()
    """The modules that were asked for and that it does not find."""


def look(python: str, environ: Mapping[str, str] | None = None, modules: Sequence[str] = ()) -> Installed:
    """Asks the interpreter `python`. Takes a tenth of a second; a Python that does not answer gives an empty answer.

    Args:
        environ: of the ranks; None: this process's.
        modules: top-level modules to find. None of them is imported.
    """
    try:
        done = subprocess.run(
            # -P: the working directory is not searched for modules.
            [python, "-P", "-c", _LOOK, *modules],
            env=clean_environment(dict(os.environ if environ is None else environ)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        # The last line: a `sitecustomize` of the site's may print before it.
        return msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=Installed)
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError):
        return Installed()

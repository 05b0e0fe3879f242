"""Looks inside an image, before anything of ours is imported there, whether it fits the run: one line if it does not.

The look is a few lines of Python on the command line, as the image may have nothing of ours that could look.
"""

from collections.abc import Sequence

import verl_slurm
from verl_slurm.config.schema import RunConfig

RANK_PACKAGES = (
    "torch",
    "numpy",
    "msgspec",
    "ruamel.yaml",
    "zstandard",
    "msgpack",
    "stringzilla",
    "cryptography",
)
"""What ranks import with each training loop, by the names of modules."""
OWN_PACKAGES = ("transformers", "safetensors", "tensorboard")
"""What our own trainer's ranks import besides."""
AGENT_PACKAGES = ("psutil",)
"""What an agent inside an image imports besides."""

# Python 3.6 can read it. In the order of what a user has to do first.
_LOOK = """\
import sys
from importlib import util
image, version, packages = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
def refuse(what, found, expected, remedy):
    line = "ConfigError: %s: %s (found %s, expected %s); in the image: %s" % (what, image, found, expected, remedy)
    sys.exit(line)
if sys.version_info < (3, 11):
    found, remedy = "Python %d.%d" % sys.version_info[:2], "install one, and name it by slurm.container.python"
    refuse("the image's Python is too old", found, "3.11 or later", remedy)
from importlib import metadata
try: found = metadata.version("verl-slurm")
except metadata.PackageNotFoundError: found = "none"
pip = sys.executable + " -m pip install "
if found != version:
    refuse("the image has another version of verl-slurm", found, version, pip + "--no-deps verl-slurm==" + version)
def there(name):
    try: return util.find_spec(name) is not None
    except ModuleNotFoundError: return False
missing = [name for name in packages if not there(name)]
if missing:
    refuse("the image lacks what ranks import", "no " + ", no ".join(missing), "them", pip + " ".join(missing))
import runpy
sys.argv = sys.argv[4:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def probe_argv(config: RunConfig, inside: Sequence[str]) -> list[str]:
    """Returns a command that looks, and then becomes a module of ours.

    Args:
        config: with a container.
        inside: the module, and its arguments.
    """
    container = config.slurm.container
    assert container is not None
    packages = [*RANK_PACKAGES, *(() if config.trainer.is_guest else OWN_PACKAGES)]
    packages += AGENT_PACKAGES if container.runtime == "pyxis" else ()
    words = [container.image, verl_slurm.__version__, ",".join(packages)]
    return [container.python, "-P", "-c", _LOOK, *words, *inside]

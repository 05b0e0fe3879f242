"""Nothing in the package can run code that lies in a file: read off the source, call by call.

`torch.load` only with `weights_only=True`; `numpy.load` never with `allow_pickle`; YAML only by the safe loader; no
eval, no exec; no module that unpickles. That pickle and its kin are not even imported is tests/test_house.py's.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCES = [path for top in ("verl_slurm", "daemon") for path in sorted((ROOT / top).rglob("*.py"))]

_NEVER = {
    "eval", "exec", "compile", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
    "shelve.open", "dill.load", "dill.loads", "joblib.load", "cloudpickle.load", "cloudpickle.loads",
    "pandas.read_pickle", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "ruamel.yaml.load", "ruamel.yaml.load_all", "ruamel.yaml.unsafe_load",
    "torch.distributed.all_gather_object", "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object", "torch.distributed.scatter_object_list", "torch.hub.load",
}  # fmt: skip


_ASKED_FOR = {
    "verl_slurm/trainer/reward/python.py": ["exec", "compile"],
    "verl_slurm/loops/rendezvous/rank_start.py": ["compile", "exec"],
}
"""What is run because the user's own configuration names it: `model.reward: python:...`, and `trainer.command`."""


def _offences(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        words = {keyword.arg: getattr(keyword.value, "value", keyword.value) for keyword in node.keywords}
        name = _name(node.func, aliases)
        if name in _NEVER:
            yield f"line {node.lineno}: {name}"
        if name == "ruamel.yaml.YAML" and words.get("typ") != "safe":
            yield f"line {node.lineno}: ruamel.yaml.YAML without typ='safe'"
        if name == "torch.load" and words.get("weights_only") is not True:
            yield f"line {node.lineno}: torch.load without weights_only=True"
        if words.get("allow_pickle") not in (None, False):
            yield f"line {node.lineno}: allow_pickle"
        if words.get("trust_remote_code") not in (None, False):
            yield f"line {node.lineno}: trust_remote_code"


def _name(function: ast.expr, aliases: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    return ".".join([aliases.get(function.id, function.id), *reversed(parts)])


def test_nothing_in_a_file_can_make_us_run_it() -> None:
    offences = {str(path.relative_to(ROOT)): list(_offences(path.read_text())) for path in SOURCES}
    found = {name: [line.split(": ")[1] for line in lines] for name, lines in offences.items() if lines}
    assert found == _ASKED_FOR, offences


_SEEN = {
    "import torch\ntorch.load(x)": True,
    "import torch\ntorch.load(x, weights_only=False)": True,
    "import torch as t\nt.load(x)": True,
    "from torch import load as l\nl(x)": True,
    "import torch\ntorch.load(x, weights_only=True)": False,
    "import numpy as np\nnp.load(x, allow_pickle=True)": True,
    "import numpy as np\nnp.load(x, allow_pickle=flag)": True,
    "import numpy as np\nnp.load(x)": False,
    "import yaml\nyaml.load(x, Loader=yaml.Loader)": True,
    "import yaml\nyaml.safe_load(x)": False,
    "import yaml\nclass L(yaml.CSafeLoader):\n  pass\nyaml.load(x, Loader=L)": True,
    "from ruamel.yaml import YAML\nYAML(typ='safe', pure=True)": False,
    "from ruamel.yaml import YAML\nYAML(typ='unsafe')": True,
    "import ruamel.yaml\nruamel.yaml.YAML()": True,
    "import torch.distributed as dist\ndist.all_gather_object(a, b)": True,
    "eval(x)": True,
    "model.eval()": False,
}


def test_the_reader_of_sources_sees_it() -> None:
    assert {source: bool(list(_offences(source))) for source in _SEEN} == _SEEN

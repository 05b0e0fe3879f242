"""Ways out for a secret that no run takes by itself: a core file, a command line that somebody writes tomorrow."""

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.hostile.planted import KEY, found_in
from verl_slurm.base.files import private_dir, write_file

SOURCES = sorted([*(ROOT / "verl_slurm").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")])

# A process with a key in memory that somebody lets dump core all the same, and dies.
DYING = """
import os, resource, sys
from pathlib import Path
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.base.keys import load_keys, read_key_file
Path("/proc/self/coredump_filter").write_text("0x33")  # the kernel's default: the tests' own process has held keys
held = load_keys(EncryptionConfig(key_file=sys.argv[1])) if sys.argv[2] == "ours" else read_key_file(Path(sys.argv[1]))
if sys.argv[3] == "raised":
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
os.abort()
"""


def _writes_core_files() -> bool:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    return pattern.isalnum() and resource.getrlimit(resource.RLIMIT_CORE)[1] != 0


@pytest.mark.scenario("M08")
@pytest.mark.skipif(not _writes_core_files(), reason="NOT RUN: this kernel's core files go elsewhere")
@pytest.mark.parametrize(
    ("how", "limit", "in_it"),
    [("bare", "raised", True), ("ours", "raised", False), ("ours", "as it is", None)],
)
def test_a_core_file_holds_no_key(tmp_path: Path, how: str, limit: str, in_it: bool | None) -> None:
    """`bare` shows that it would be found. None: there is no core file at all."""
    key, place = private_dir(tmp_path / "keys") / "run.key", private_dir(tmp_path / "cwd")
    write_file(key, KEY.hex().encode() + b"\n")
    argv = [sys.executable, "-c", DYING, str(key), how, limit]
    done = subprocess.run(argv, cwd=place, capture_output=True, check=False)
    assert done.returncode == -6, done.stderr
    cores = [path.read_bytes() for path in place.iterdir()]
    if in_it is None:
        assert cores == []
    else:
        assert len(cores) == 1
        assert (found_in(cores[0], {"key": KEY}) == ["key"]) is in_it


# ---- what stands on a command line

STARTERS = {
    "subprocess": {"run", "Popen", "check_output", "check_call", "call"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "os": {"execv", "execve", "execvp", "posix_spawn", "system", "popen"},
}
SECRET = re.compile(
    r"token|secret|passw|credential|passphrase|(^|_)key(s|ring)?$|api_key|reveal|environ$", re.IGNORECASE
)
HARMLESS: set[str] = {
    "key_file",  # a path
    "tokenizer",
}


def _identifiers(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr


def _starts_a_process(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id=module), attr=attribute):
            return attribute in STARTERS.get(module, ())
    return False


class CommandLines:
    """All expressions that end up in the argv of a process, as far as names tell.

    From each call that starts one: its first arguments; what the names in them are set to in the same function; and
    the bodies of functions of ours that are called there (`launcher_argv`, `_command`, ...), and so on.
    """

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._functions = {
            node.name: node
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.suspicious: list[str] = []
        self.starts = 0
        self._seen: set[int] = set()
        for path, tree in trees.items():
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    for call in ast.walk(function):
                        if isinstance(call, ast.Call) and _starts_a_process(call):
                            self.starts += 1
                            # execve's last argument is the environment, which only the user's own processes read.
                            words = call.args[:-1] if ast.unparse(call.func) == "os.execve" else call.args
                            for argument in words:
                                self._follow(argument, function, f"{path}:{call.lineno}")

    def _follow(self, node: ast.AST, function: ast.AST, where: str) -> None:
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        names = set(_identifiers(node))
        self.suspicious += [f"{where}: {name}" for name in sorted(names - HARMLESS) if SECRET.search(name)]
        for inner in ast.walk(function):
            if isinstance(inner, ast.Assign | ast.AugAssign | ast.AnnAssign) and inner.value is not None:
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                if names & {name for target in targets for name in _identifiers(target)}:
                    self._follow(inner.value, function, where)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                called = set(_identifiers(inner.func)) & set(self._functions)
                for name in called:
                    if "argv" in name or "command" in name:
                        body = self._functions[name]
                        for statement in body.body:
                            self._follow(statement, body, f"{where} by {name}")


def test_the_reader_of_command_lines_sees_a_secret_in_one() -> None:
    for source, found in (
        ("def f(token):\n    subprocess.run(['x', token])", True),
        ("def f(self):\n    argv = ['x', '--k', self._token.hex()]\n    subprocess.Popen(argv)", True),
        ("def g_argv(api_key):\n    return ['x', api_key]\ndef f():\n    subprocess.run(g_argv(1))", True),
        ("async def f(a):\n    await asyncio.create_subprocess_exec('x', a.secret)", True),
        ("def f(path):\n    subprocess.run(['x', path], env={'TOKEN': path})", False),
        ("def f(config):\n    subprocess.run(['x', config.key_file])", False),
    ):
        lines = CommandLines({"x": ast.parse(source)})
        assert lines.starts == 1
        assert bool(lines.suspicious) is found, source


@pytest.mark.scenario("M08")
def test_no_secret_is_put_on_a_command_line_by_name() -> None:
    lines = CommandLines({str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES})
    assert lines.starts > 12
    assert lines.suspicious == []


@pytest.mark.scenario("M08")
def test_nothing_is_handed_to_slurm_where_others_read_it() -> None:
    """`--export=NAME=VALUE`, `--comment` and `--wrap` are shown to everybody; we use none, and a user sees his own."""
    for path in [*SOURCES, *(ROOT / "sbatch").glob("*.sbatch")]:
        if "devcluster" in (*path.parts, path.stem):
            continue  # its urgent job has no secret, and no user; its help shows one
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = re.findall(r"--(?:export|comment|wrap)\b[= ]?\S*", line)
            told = [word for word in words if not word.startswith(("--export`", "--wrap`", "--comment`"))]
            assert not told, f"{path}:{number}: {line.strip()}"

"""Looks at the user's programs without running them: a file's form, the names that it binds, what it imports.

What cannot be seen from here is a finding that was skipped.
"""

import ast
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from verl_slurm.base.bounded import SOURCE, TooMuch, open_regular, read_regular
from verl_slurm.base.errors import ConfigError, DataError, NotFound
from verl_slurm.base.files import read_private
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.packages import pip_install
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.search_path import clean_environment
from verl_slurm.checks import Finding, good, skipped
from verl_slurm.checks.probe_command import run_to_end
from verl_slurm.config.reward_spec import bindings, names_of
from verl_slurm.config.schema import HOOKS, RunConfig, ServiceConfig, SlurmConfig
from verl_slurm.program.git import work_tree
from verl_slurm.program.installed import look
from verl_slurm.program.listing import holds_other_things
from verl_slurm.slurm.rank_setup import python_of, setup_script

_PYTHON = r"python[\d.]*|pypy[\d.]*"
_SHELLS = r"(?:ba|da|z|k|c|tc|fi)?sh"
# Programs that start other programs. Ranks are started by the run itself.
_LAUNCHER = re.compile(
    rf"{_PYTHON}|{_SHELLS}|accelerate|torchrun|torchx|deepspeed|horovodrun|ft_launcher|composer|colossalai|msrun"
    r"|mpirun|mpiexec(?:\.\w+)?|srun|sbatch|salloc|ray|trl|llamafactory-cli|axolotl|swift|tune|lightning|fabric|uvx?"
    r"|poetry|pixi|pipenv|pdm|hatch|rye|conda|mamba|micromamba|apptainer|singularity|docker|podman|enroot|env|nohup"
    r"|nice|numactl|taskset|time|timeout|stdbuf|sudo|exec|source|jupyter|ipython|nsys|ncu|py-spy|gdb|xvfb-run"
)
_LAUNCHER_MODULES = re.compile(
    r"(?:torch\.distributed\.(?:run|launch|elastic\.\w+)|accelerate(?:\.\w+)*|deepspeed(?:\.\w+)*|torch\.multiprocessing"
    r"|horovod(?:\.\w+)*|colossalai(?:\.\w+)*|composer(?:\.\w+)*|ray(?:\.scripts\.\w+)?|trl(?:\.\w+)*|axolotl(?:\.\w+)*"
    r"|pdb|cProfile|trace|runpy|debugpy|viztracer|torch\.utils\.bottleneck)"
)
_SHELL_FILE = re.compile(r".+\.(?:sh|bash|zsh|ksh|csh|slurm|sbatch|job|sub)")
_TAKES_MODULES = re.compile(rf"{_PYTHON}|accelerate|torchrun|deepspeed|uvx?|composer|ft_launcher")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_MODULE = re.compile(r"[^\W\d]\w*(?:\.\w+)*")
_PLAIN = re.compile(r"[A-Za-z_./~-][\w./=@+:~-]*")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)", re.ASCII)
_UNBRACED = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
_OF_JOBS = ("SLURM_", "VERL_SLURM_")
_HEAD_BYTES = 1024
_FIT = good("program")
# Errors of reading and parsing a source; `TooMuch` is a ValueError.
_UNPARSED = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)


def unexpanded_words(config: RunConfig) -> list[ConfigError]:
    """Returns an error for each variable's value and each argument that names a variable, or begins with `~/`."""
    services = config.services.items()
    values = {"env": config.env, **{f"services.{name}.env": one.env for name, one in services}}
    commands = {
        "trainer.command": config.trainer.command,
        **{f"services.{name}.command": one.command for name, one in services},
        **{f"hooks.{hook}": getattr(config.hooks, hook) for hook in HOOKS},
    }
    if config.slurm.container is not None:
        commands["slurm.container.extra_args"] = config.slurm.container.extra_args
    # Another `$` may be meant, e.g. in a regular expression: only what is a variable here or in jobs is one.
    known = set(os.environ).union(*values.values())

    def named(text: object, form: re.Pattern[str] = _VARIABLE) -> str:
        names = form.findall(text) if isinstance(text, str) else []
        return next((f"${one}" for one in names if one in known or one.startswith(_OF_JOBS)), "")

    found = [
        (
            f"{key}.{name}",
            named(text),
            f"; or in its place slurm.setup: ['export {name}=...'], which bash expands",
        )
        for key, variables in values.items()
        for name, text in variables.items()
    ]
    found += [
        (f"{key}[{number}]", named(word) or _home(word) * bool(number), "")
        for key, words in commands.items()
        for number, word in enumerate(words)
        if not _of_shell(words[:number])
    ]
    options = {
        "slurm.extra": config.slurm.extra,
        **{f"services.{name}.slurm": one.slurm for name, one in services},
    }
    found += [
        (f"{key}.{name}", named(text), "") for key, words in options.items() for name, text in words.items()
    ]
    # `${...}` is a reference of Hydra's.
    found += [
        (f"verl.{name}", named(word, _UNBRACED), "")
        for name, value in config.verl.items()
        for word in (value if isinstance(value, list) else [value])
    ]
    return [
        ConfigError(
            "not expanded, since no shell reads it", where=key, found=name, remedy=f"write it out{remedy}"
        )
        for key, name, remedy in found
        if name
    ]


def _home(word: str) -> str:
    return "~/" if word.startswith("~/") or word.partition("=")[2].startswith("~/") else ""


def _of_shell(before: Sequence[str]) -> bool:
    """Returns whether the word after these is a text that a shell runs."""
    shells = [word for word in before if re.fullmatch(_SHELLS, Path(word).name)]
    return bool(shells and re.fullmatch("-[a-z]*c", before[-1]))


def check_program(config: RunConfig) -> list[Finding]:
    """Checks that `trainer.command` (paths absolute) is a Python program, is there, and has its imports installed.

    Raises:
        ConfigError: another program, a launcher or a shell, an option of Python's, a module that is not there.
        DataError: a file that cannot be parsed.
        NotFound: no such file.
    """
    words = config.trainer.command
    if not words:
        return []
    program = words[0]
    if program == "-m":
        return _module(config, words)
    path, starts_ranks = Path(program), config.trainer.backend == "command"
    if program.endswith(".py") and not path.is_file():
        raise NotFound(
            "no such program",
            where=program,
            expected="a Python file that the nodes see, too",
            remedy="set trainer.command"
            + ", or take the run's copy: --code run" * RunPaths(Path(config.run_dir)).code_record.exists(),
        )
    # Python itself also takes these; ranks are started through a program of ours, which does not.
    other = "an option of Python's" if program.startswith("-") else "a directory" if path.is_dir() else ""
    if other and not starts_ranks:
        return [skipped(f"trainer.command, which begins with {program}, {other}")]
    if why := other or _why_not_python(path):
        raise _no_program(words, why)
    return check_file(config, path, "trainer.command")


def check_file(config: RunConfig, path: Path, key: str) -> list[Finding]:
    """Checks a Python file that is a program: it parses and finds its imports.

    Raises:
        ConfigError: a module is missing, or a relative import cannot work.
        DataError: it cannot be parsed.
    """
    tree = _parsed(config, path, key)
    if isinstance(tree, Finding):
        return [tree]
    return [_FIT, *check_imports(config, path, tree, beside=[str(path.parent)])]


def check_executable(config: RunConfig, words: Sequence[str], key: str) -> list[Finding]:
    """Checks a command that the kernel starts: a script's interpreter is there, and its Python parses.

    Raises:
        ConfigError: a script without an interpreter, or a module that it imports is missing.
        DataError: its Python source cannot be parsed.
    """
    path = Path(shutil.which(words[0]) or words[0])
    if words[1:] and _LAUNCHER.fullmatch(path.name):
        return [skipped(f"{key}: what {words[0]} starts")]
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, TooMuch) as error:
        return [skipped(f"{key}: {path} ({error})")]
    # A binary, of this machine or of another kind.
    if not head.startswith(b"#!") and b"\0" in head:
        return [_FIT]
    first = os.fsdecode(head[2:].partition(b"\n")[0]).split() if head.startswith(b"#!") else []
    if first and Path(first[0]).name == "env":
        first = [word for word in first[1:] if not word.startswith("-") and not _ASSIGNED.fullmatch(word)]
    interpreter = shutil.which(first[0]) if first else None
    if interpreter is None:
        if first and (unseen := why_unseen(config)):
            return [skipped(f"{key}: whether {path} finds {first[0]}: {unseen}")]
        raise ConfigError(
            "a program cannot be started",
            where=f"{key}: {path}",
            found=f"no {first[0]}" if first else "text without an interpreter in its first line",
            expected="a binary, or a script that begins with #! and a program that is there",
            remedy="write its interpreter into its first line, e.g. #!/bin/sh",
        )
    if not re.fullmatch(_PYTHON, Path(interpreter).name):
        return [_FIT]
    ours = python_of(config.slurm) or sys.executable
    if os.path.realpath(interpreter) == os.path.realpath(ours):
        return check_file(config, path, key)
    tree = _parsed(config, path, key)
    if isinstance(tree, Finding):
        return [tree]
    return [_FIT, skipped(f"what {path} imports, which {interpreter} runs")]


def _why_not_python(path: Path) -> str:
    """Returns why a word is no Python source; empty: it is one."""
    name = path.name
    if name.endswith(".py"):
        return ""
    if _SHELL_FILE.fullmatch(name):
        return "a shell script"
    if not path.is_file():
        return "a launcher" if _LAUNCHER.fullmatch(name) else f"no Python file {path}"
    try:
        head = read_regular(path, SOURCE, follow=True)
        first = head.partition(b"\n")[0]
        if first.startswith(b"#!") and not re.search(rb"python|pypy", first):
            return f"a script for {os.fsdecode(first[2:]).strip()}"
        ast.parse(head)
    except _UNPARSED:
        return "a launcher" if _LAUNCHER.fullmatch(name) else "a file that is no Python source"
    return ""


def _no_program(words: Sequence[str], why: str) -> ConfigError:
    behind, (variables, rest) = program_behind(words), _given_to(words)
    script = _SHELL_FILE.fullmatch(rest[0]) or re.fullmatch(_SHELLS, Path(rest[0]).name) if rest else None
    if behind:
        shown = ", ".join(word if _PLAIN.fullmatch(word) else f'"{word}"' for word in behind[:6])
        more = ", ..." if len(behind) > 6 else ""
        remedy = f"trainer.command: [{shown}{more}]; distributed.dp_size is the number of ranks"
    elif script:
        remedy = (
            "set trainer.command to the Python program that the script starts; what it exports goes to env, "
            "what it loads to slurm.modules, what else it runs first to slurm.setup"
        )
    else:
        remedy = 'set trainer.command to your own program and its arguments, e.g. [train.py, --lr, "1e-4"]'
    if variables:
        shown = ", ".join(f"{name}: {json.dumps(value)}" for name, value in variables.items())
        remedy = f"env: {{{shown}}}, and {remedy}"
    return ConfigError(
        "no program that ranks can be started with",
        where="trainer.command",
        found=f"{' '.join(words[:4])}{' ...' if len(words) > 4 else ''}: {why}",
        expected="a Python file, or -m and a module: verl-slurm starts the ranks itself",
        remedy=remedy,
    )


def _given_to(words: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """Returns the variables that a command sets for its program, as `env` and shells do, and the words after the
    first.
    """
    end = len(words) - len(program_behind(words))
    rest = list(
        itertools.dropwhile(lambda word: Path(word).name == "env" or _ASSIGNED.fullmatch(word), words)
    )
    # Without a program that is recognised, a later `a=b` may be its argument.
    before = words[:end] if end < len(words) else words[: len(words) - len(rest)]
    return {match[1]: match[2] for word in before if (match := _ASSIGNED.fullmatch(word))}, rest


def program_behind(words: Sequence[str]) -> list[str]:
    """Returns the Python program and its arguments in the command of a launcher; empty: none is recognised. Pure."""
    starter = ""
    for number, word in enumerate(words):
        name = Path(word).name
        if _LAUNCHER.fullmatch(name):
            starter = name
        # To others, such as srun, -m means something else.
        elif word in ("-m", "--module") and _TAKES_MODULES.fullmatch(starter) and words[number + 1 :]:
            if not _LAUNCHER_MODULES.fullmatch(words[number + 1]):
                return ["-m", *words[number + 1 :]] if _MODULE.fullmatch(words[number + 1]) else []
        elif _PLAIN.fullmatch(word) and word.endswith(".py") and not word.startswith("-"):
            return list(words[number:])
    return []


def _module(config: RunConfig, words: Sequence[str]) -> list[Finding]:
    name = words[1] if len(words) > 1 else ""
    if not _MODULE.fullmatch(name):
        raise _no_program(words, "-m without a module")
    if _LAUNCHER_MODULES.fullmatch(name):
        raise _no_program(words, "a launcher")
    if config.trainer.backend == "command" and name.startswith("verl.trainer."):
        raise ConfigError(
            "verl's own trainers are not programs of yours",
            where="trainer.command",
            found=f"-m {name}",
            remedy=f"trainer: {{backend: verl, entry: {'sft' if 'sft' in name else 'ppo'}}}, with its settings below "
            "`verl:` or after `--`",
        )
    return check_module(config, name, "trainer.command")


def check_module(config: RunConfig, name: str, key: str) -> list[Finding]:
    """Checks a module that `-m` starts. Raises as `check_file`."""
    if found := check_modules(config, [name.partition(".")[0]], f"{key}: -m {name}"):
        return found
    entries: Sequence[str] | None = ranks_search(config)
    for part in name.split("."):
        spec = PathFinder.find_spec(part, entries) if entries else None
        if spec is None:
            # The first part is there: an importer of a package's own may find what is not in a directory.
            return [skipped(f"whether the module {name} is there")]
        origin, entries = spec.origin, spec.submodule_search_locations
        if entries is not None and not list(entries):
            entries = None
    package = name.rpartition(".")[0]
    if entries is not None:
        package, spec = name, PathFinder.find_spec("__main__", entries)
        if spec is None:
            raise ConfigError(
                "a package that is no program",
                where=f"{key}: -m {name}",
                found=f"no __main__.py in {next(iter(entries))}",
                remedy="name the module in it that is to run",
            )
        origin = spec.origin
    if origin is not None and origin.endswith(".py"):
        source = _parsed(config, Path(origin), key)
        if isinstance(source, Finding):
            return [source]
        return [_FIT, *check_imports(config, Path(origin), source, package=package)]
    return [_FIT]


_NOT_RUN: ContextVar[str] = ContextVar("why the ranks' Python is not run", default="")


@contextmanager
def python_not_run(reason: str) -> Iterator[None]:
    """Leaves the ranks' Python alone in all checks below for this reason (`why_not_run`); empty: it is run."""
    token = _NOT_RUN.set(reason)
    try:
        yield
    finally:
        _NOT_RUN.reset(token)


def is_copied_alone(config: RunConfig, file: Path) -> bool:
    """Returns whether the ranks get a copy of a reward's or verl's file without its neighbours: it is of no tree."""
    top = work_tree(file.parent).top if config.code.tree == "auto" else None
    return config.code.tree == "auto" and (top is None or holds_other_things(top))


def ranks_search(config: RunConfig) -> list[str]:
    """Returns the directories in which the ranks' Python looks for modules, as far as this machine can tell."""
    own = _own_python_path(config)
    if _NOT_RUN.get():
        return own
    return [*own, *look(python_of(config.slurm) or sys.executable, _environ(config)).search]


def _own_python_path(config: RunConfig, without: str = "") -> list[str]:
    places = str(config.env.get("PYTHONPATH", "")).split(os.pathsep)
    return [place for place in places if place.startswith("/") and os.path.realpath(place) != without]


def _environ(config: RunConfig, without: str = "") -> dict[str, str]:
    # The configuration's PYTHONPATH wins in the job. Here Python would run a `sitecustomize` from it, so its
    # directories are looked through without Python's help.
    found = {
        name: value for name, value in os.environ.items() if name not in config.env or name != "PYTHONPATH"
    }
    if without and "PYTHONPATH" in found:
        places = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(one for one in places if os.path.realpath(one) != without)
    return found


def answer_of_ranks_python(
    config: RunConfig, program: str, text: str, timeout_s: float = 120.0
) -> tuple[str, str]:
    """Runs a program of ours, with `text` as input, in the ranks' Python; returns its last line, or why there is
    none.
    """
    if reason := _NOT_RUN.get():
        return "", reason
    python = python_of(config.slurm) or sys.executable
    try:
        environment = clean_environment(_environ(config))
        done = run_to_end([python, "-P", "-c", program], timeout_s, text=text, env=environment)
    except (OSError, ValueError) as error:
        return "", f"{python} does not answer: {error}".partition("\n")[0]
    return done.last_line, "" if done.exit_code == 0 else f"{python}: {done.last_words}"


def why_unseen(config: RunConfig) -> str:
    """Returns why modules that are not found here may be there in the job; empty: nothing is known."""
    slurm = config.slurm
    if slurm.container is not None:
        return "they are the container's"
    if not_run := _NOT_RUN.get():
        return not_run
    if slurm.modules or slurm.setup:
        return f"{'slurm.modules' if slurm.modules else 'slurm.setup'} may bring them on the nodes"
    places = str((os.environ | config.env).get("PYTHONPATH", "")).split(os.pathsep)
    gone = [place for place in places if place.startswith("/") and not os.path.exists(place)]
    return f"PYTHONPATH has {gone[0]}, which is not on this machine" if gone else ""


def check_modules(
    config: RunConfig, names: Sequence[str], what: str, beside: Sequence[str] = (), without: str = ""
) -> list[Finding]:
    """Raises ConfigError for top-level modules, imported by `what`, that the ranks' Python does not find. Imports
    none.

    `beside`: further directories that are searched. `without`: one that is not, although PYTHONPATH names it.
    """
    unseen = why_unseen(config)
    if config.slurm.container is not None:
        return [skipped(f"the modules of {what} ({', '.join(names)}): {unseen}")] if names else []
    near = [*beside, *_own_python_path(config, without)]
    wanted = [name for name in dict.fromkeys(names) if not near or PathFinder.find_spec(name, near) is None]
    if not wanted:
        return []
    if not_run := _NOT_RUN.get():
        return [skipped(f"the modules of {what} ({', '.join(wanted)}): {not_run}")]
    python = python_of(config.slurm) or sys.executable
    answer = look(python, _environ(config, without), wanted)
    if not answer.python:
        return [skipped(f"the modules of {what} ({', '.join(wanted)}): {python} does not answer")]
    if not answer.lacking:
        return []
    if unseen:
        return [skipped(f"whether {what} finds {', '.join(answer.lacking)}: {unseen}")]
    raise ConfigError(
        "the ranks' Python lacks a module",
        where=what,
        found=f"no {', no '.join(answer.lacking)}",
        expected=f"modules that {python} finds",
        remedy=f"install what provides {'it' if len(answer.lacking) == 1 else 'them'} "
        f"({pip_install('...', python=python)}), or name its directory in PYTHONPATH",
    )


def check_imports(
    config: RunConfig,
    file: Path,
    tree: ast.Module,
    *,
    key: str = "",
    function: str = "",
    beside: Sequence[str] = (),
    package: str = "",
    alone: bool = False,
) -> list[Finding]:
    """Refuses a source whose imports the ranks' Python does not have.

    Args:
        key: of the configuration, that names the file.
        function: whose own imports count, too.
        beside: directories in which its neighbours are found.
        package: in which the file is loaded; empty: it is loaded by itself.
        alone: it `is_copied_alone`.

    Raises:
        ConfigError: a module is missing, or a relative import cannot work.
    """
    imports = list(_imports(tree.body, function))
    # A program may make itself part of a package.
    if not any(isinstance(node, ast.Name) and node.id == "__package__" for node in ast.walk(tree)):
        for node in imports:
            if isinstance(node, ast.ImportFrom) and node.level:
                _check_relative(file, node, package, beside)
    if any(map(_is_search_path, ast.walk(tree))):
        return [skipped(f"what {file} imports, since it changes sys.path")]
    names = []
    for node in imports:
        if isinstance(node, ast.Import):
            names += [alias.name.partition(".")[0] for alias in node.names]
        elif node.level == 0 and node.module:
            names.append(node.module.partition(".")[0])
    if not names:
        return []
    # In PYTHONPATH the copy takes the place of the folder, without the file's neighbours.
    without = os.path.realpath(file.parent) if alone else ""
    try:
        return check_modules(config, list(dict.fromkeys(names)), str(file), beside, without)
    except ConfigError as error:
        near = [
            name for name in names if (file.parent / f"{name}.py").exists() or (file.parent / name).is_dir()
        ]
        if not near:
            raise
        folder = shell_word(file.parent)
        # verl loads a file by itself, without a look at what lies beside it.
        also = f" env.PYTHONPATH={folder}" if key.startswith("verl.") else ""
        remedy = (
            f"set code.tree={folder}{also}: {near[0]} lies beside {file.name}, and is copied and found then"
        )
        raise ConfigError(
            error.what, where=error.where, found=error.found, expected=error.expected, remedy=remedy
        ) from None


def _check_relative(file: Path, node: ast.ImportFrom, package: str, beside: Sequence[str]) -> None:
    """Refuses a relative import that leads out of the package of its file, or to no module."""
    dots, depth = "." * node.level, len(package.split(".")) if package else 0
    wanted = [node.module] if node.module else [alias.name for alias in node.names]
    line = f"from {dots}{node.module or ''} import {', '.join(alias.name for alias in node.names)}"
    if depth < node.level:
        rest = f"from {node.module} import" if node.module else "import"
        raise ConfigError(
            "a relative import cannot work here",
            where=f"{file}:{node.lineno}",
            found=line,
            expected=f"at most {counted(depth, 'dot')}: it is loaded as part of {package}"
            if package
            else "no dots: the file is loaded by itself, and not as part of a package",
            remedy=f"write `{rest} ...`: modules beside the program are found"
            if beside
            else "write what it needs into the file itself, or name the module by its package, whose directory stands "
            "in env.PYTHONPATH; model.reward takes python:PACKAGE.MODULE:FUNCTION",
        )
    folder = file.parents[node.level - 1]
    for name in wanted:
        places: Sequence[str] | None = [str(folder)]
        for part in name.split("."):
            spec = PathFinder.find_spec(part, places) if places else None
            places = spec.submodule_search_locations if spec else None
            if spec is None and (node.module or not _binds(folder / "__init__.py", name)):
                raise ConfigError(
                    "a relative import finds no module",
                    where=f"{file}:{node.lineno}",
                    found=f"no {name} in {folder}",
                    expected=f"a module for `{line}`",
                    remedy="put it there, or correct the import",
                )


def _binds(file: Path, name: str) -> bool:
    """Returns whether a package itself has that name, or may have it."""
    try:
        tree = ast.parse(read_regular(file, SOURCE, follow=True))
    except _UNPARSED:
        return file.exists()
    return bool({name, "*", "__getattr__"} & set().union(*map(names_of, bindings(tree.body))))


def _is_search_path(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr="path"):
            return True
    return False


def _imports(body: Sequence[ast.stmt], function: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports that run in any case."""
    for node in body:
        # Those in `if` and `try` may have a way out.
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            yield from _imports(node.body, "")


def check_source(
    config: RunConfig,
    key: str,
    file: Path,
    name: str = "",
    package: str = "",
    beside: Sequence[str] = (),
    alone: bool = False,
) -> list[Finding]:
    """Checks a Python file that a program loads: it parses, binds `name` (empty: any), and finds its imports.

    `key` names the file, for messages; `package`, `beside` and `alone` are as of `check_imports`.

    Raises:
        ConfigError: it binds no such name, lacks a module, or has a relative import that cannot work.
        DataError: it cannot be read or parsed.
    """
    tree = _parsed(config, file, key)
    if isinstance(tree, Finding):
        return [tree]
    names, offered, found = set[str](), list[str](), list[Finding]()
    for node in bindings(tree.body):
        names |= names_of(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            offered.append(node.name)
    if name and name not in names:
        if "*" not in names:
            raise ConfigError(
                "a file lacks what is to be taken from it",
                where=f"{key}: {file}",
                found=f"nothing named {name!r}",
                expected=f"one of {', '.join(offered[:8])}" if offered else "a function at its top level",
                remedy=f"name one of them, or write {name} into it",
            )
        found.append(skipped(f"whether {file} has {name}, since it imports *"))
    return [
        *found,
        *check_imports(
            config, file, tree, key=key, function=name, beside=beside, package=package, alone=alone
        ),
    ]


def _parsed(config: RunConfig, file: Path, key: str) -> ast.Module | Finding:
    """Returns the syntax tree, or that this Python cannot tell."""
    try:
        return ast.parse(read_regular(file, SOURCE, follow=True), str(file))
    except _UNPARSED as error:
        # Another Python may know newer syntax than this one.
        other = config.slurm.python is not None or config.slurm.container is not None
        if isinstance(error, TooMuch) or (other and isinstance(error, SyntaxError)):
            return skipped(f"{file} ({error})")
        raise DataError(
            "a program's source cannot be read",
            where=f"{key}: {file}",
            found=error,
            remedy="correct the file",
        ) from None


def check_services(config: RunConfig) -> list[Finding]:
    """Checks that the programs of services are there and find what they import, and their secrets; paths absolute.

    Raises:
        ConfigError: a program, a module that it imports, or a secret is not there.
        DataError: a program's Python source cannot be parsed.
        PermissionRefused: a file with a secret is open to others.
    """
    looked = dict[str, list[Finding]]()
    for name, service in config.services.items():
        looked[name] = _check_service(config, f"services.{name}.command", service)
        for variable, path in service.env_from_files.items():
            check_secret(f"services.{name}.env_from_files.{variable}", path)
    return _of_all("services", looked)


def _of_all(kind: str, looked: Mapping[str, list[Finding]]) -> list[Finding]:
    fit = ", ".join(name for name, found in looked.items() if _FIT in found)
    rest = [one for found in looked.values() for one in found if one != _FIT]
    return [good(f"{kind} {fit}"), *rest] if fit else rest


def _check_service(config: RunConfig, key: str, service: ServiceConfig) -> list[Finding]:
    words, program = service.command, service.command[0]
    own = msgspec.structs.replace(config, env={**config.env, **service.env})
    if program == "-m" and words[1:] and _MODULE.fullmatch(words[1]):
        return check_module(own, words[1], key)
    is_python = program.endswith(".py")
    if Path(program).is_file() if is_python else shutil.which(program) is not None:
        return check_file(own, Path(program), key) if is_python else check_executable(own, words, key)
    # What is set up on the node, or is in an image, may bring programs of its own.
    in_image = config.slurm.container is not None
    if program != "-m" and (in_image or ("/" not in program and setup_script(config.slurm) != "")):
        where = "the container" if in_image else "slurm.modules or slurm.setup"
        return [skipped(f"{key}: no program {program} here; {where} may bring it")]
    raise ConfigError(
        "a service cannot be started",
        where=key,
        found="-m without a module" if program == "-m" else f"no program {program}",
        expected="a Python file, an executable file, or -m and a module, that the nodes see, too",
        remedy="give its path, with its arguments as further words",
    )


def check_secret(key: str, path: str) -> None:
    """Checks a file with a secret.

    Raises:
        ConfigError: it cannot be read, or is empty.
        PermissionRefused: it is open to others.
    """
    try:
        value = read_private(Path(path)).strip()
    except OSError as error:
        raise ConfigError(
            "a secret cannot be read",
            where=key,
            found=f"{path}: {error.strerror}",
            remedy="write the value into it, and chmod 600",
        ) from None
    if not value:
        raise ConfigError("a file holds no value", where=key, found=path)


def check_hooks(config: RunConfig) -> list[Finding]:
    """Checks that the programs of `hooks` can be started, and the token is private. Raises as `check_services`."""
    hooks, looked = config.hooks, dict[str, list[Finding]]()
    # The lead runs them, outside of an image and of what is set up for the ranks.
    plain = msgspec.structs.replace(config, slurm=SlurmConfig())
    for hook in HOOKS:
        if not (words := getattr(hooks, hook)):
            continue
        if shutil.which(words[0]) is None:
            raise ConfigError(
                "a hook cannot be run",
                where=f"hooks.{hook}",
                found=f"no program {words[0]}",
                remedy="give the path of an executable file (chmod +x), with its arguments as further words",
            )
        looked[hook] = check_executable(plain, words, f"hooks.{hook}")
    if hooks.webhook_token_file is not None:
        check_secret("hooks.webhook_token_file", hooks.webhook_token_file)
    unseen = [skipped("whether hooks.webhook answers")] if hooks.webhook else []
    return [*_of_all("hooks", looked), *unseen]

"""Writes the reference from the code: `python -m tests.reference_pages`. `test_docs.py` holds the pages to it.

The settings, the commands, the events of the journal, the environment variables and the series of Prometheus are pages
of docs/; `configs/schema.json` is the settings for an editor.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click
from prometheus_client.core import CounterMetricFamily, Metric
from verl_slurm_daemon.agent.node_metrics import AgentMetrics
from verl_slurm_daemon.lead.lead_metrics import LeadMetrics

from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.main import COMMANDS, cli
from verl_slurm.config.explain import Key, all_keys, json_schema, keys_of
from verl_slurm.config.schema import ObservabilityConfig, RunConfig
from verl_slurm.journal import events
from verl_slurm.journal.status import Status
from verl_slurm.wire import environment

ROOT = Path(__file__).parent.parent


def settings() -> str:
    """Returns docs/settings.md."""
    parts = [
        """# Every setting

For anyone who looks for a key of the configuration: all of them, with type, unit, default and meaning.

`verl-slurm config` prints the same list, `verl-slurm config SECTION` one section, and
`verl-slurm config explain KEY` one key. `python -m tests.reference_pages` makes this page from
`verl_slurm/config/schema.py`. Examples are in [configuration.md](configuration.md).
"""
    ]
    for section, keys in groupby(_in_sections(), key=_section):
        rows = [[f"`{key.key}`", _type(key), _code(key.default), _prose(key.meaning)] for key in keys]
        parts.append(f"## {section or 'Without a section'}\n")
        parts.append(_table(["key", "type", "default", "meaning"], rows))
    return "\n".join(parts)


def _in_sections() -> list[Key]:
    """Returns all keys: those without a section first, then as the schema has them."""
    keys = all_keys()
    order = ["", *dict.fromkeys(section for key in keys if (section := _section(key)))]
    return sorted(keys, key=lambda key: order.index(_section(key)))


def _type(key: Key) -> str:
    return f"{key.type} ({key.unit})" if key.unit else key.type


def _section(key: Key) -> str:
    return key.key.partition(".")[0].removesuffix("[]") if "." in key.key else ""


def commands() -> str:
    """Returns docs/reference-commands.md."""
    parts = [
        """# Every command

For anyone who looks for a command or an option: all of them. `verl-slurm COMMAND --help` says more, with examples.

What the exit codes mean is in [exit-codes.md](exit-codes.md).
`python -m tests.reference_pages` makes this page from `verl_slurm/cli`.

"""
        + _table(
            ["command", "what it is for"], [[f"[`{n}`](#{n})", _prose(e.help)] for n, e in COMMANDS.items()]
        )
    ]
    top = click.Context(cli, info_name="verl-slurm")
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        parts.extend(_command(command, name, top, "##"))
    return "\n".join(parts)


def _command(command: click.Command, name: str, above: click.Context, level: str) -> Iterator[str]:
    """Yields the parts of a command and of those below it."""
    context = click.Context(command, info_name=name, parent=above)
    yield f"{level} {context.command_path.removeprefix('verl-slurm ')}\n"
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```\n{usage}\n```\n"
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        rows = [[_spelled(each), _option_text(each)] for each in options]
        yield _table(["option", "meaning"], rows)
    codes = re.findall(r"^ *(\d+)  ", command.epilog or "", re.MULTILINE)
    if codes:
        yield f"Exit codes: {', '.join(codes)}.\n"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            inner = command.get_command(context, below)
            assert inner is not None
            yield from _command(inner, below, context, level + "#")


def _spelled(option: click.Option) -> str:
    words = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag or option.count:
        return f"`{words}`"
    # Not click's own word for a type, which differs between its releases.
    if isinstance(option.type, click.Choice):
        kind = f"[{'|'.join(option.type.choices)}]"
    else:
        kind = option.type.name.upper().removesuffix(" RANGE")
    return f"`{words} {option.metavar or kind}`"


def _option_text(option: click.Option) -> str:
    text = _prose(_here(" ".join((option.help or "").split())))
    if option.show_default and option.default is not None and not option.is_flag:
        text += f" Default: `{option.default}`."
    return text + (" Required." if option.required else "")


def journal() -> str:
    """Returns docs/reference-events.md."""
    inherited = {field.key for field in keys_of(events.Event)}
    rows = _fields(list(keys_of(events.Event)))
    parts = [
        f"""# Every event of the journal

For scripts and tools that read `RUN/events.jsonl`: each kind of event, with its fields.

A line of the file is one JSON object, and its `event` names the kind. Durations are in seconds, sizes in bytes, steps
count from 0. A field that has its default is left out. A kind is never removed, and a field is only added, with a
default. **Bold** kinds say that something is wrong. [run-directory.md](run-directory.md) says what else a run writes.

`python -m tests.reference_pages` makes this page from `verl_slurm/journal/events.py`.

## Of every event

{rows}"""
    ]
    source = inspect.getsource(events).splitlines()
    titles = {number: line[7:] for number, line in enumerate(source, 1) if line.startswith("# ---- ")}
    lines = {kind: inspect.getsourcelines(kind)[1] for kind in events.KINDS.values()}
    shown = ""
    for name, kind in sorted(events.KINDS.items(), key=lambda item: lines[item[1]]):
        title = titles[max(number for number in titles if number < lines[kind])]
        if title != shown:
            shown = title
            parts.append(f"## {title[0].upper()}{title[1:]}\n")
        parts.append(f"### {name}\n")
        loud = "**Something is wrong.** " if kind.loud else ""
        parts.append(f"{loud}{_prose(' '.join((inspect.getdoc(kind) or '').split()))}\n")
        own = [field for field in keys_of(kind) if field.key not in inherited]
        if own:
            parts.append(_fields(own))
    return "\n".join(parts)


def _fields(fields: Sequence[Key]) -> str:
    shown = [[f"`{f.key}`", f.type, _code(f.default or '""'), _prose(f.meaning)] for f in fields]
    return _table(["field", "type", "default", "meaning"], shown)


READ = (
    (
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        "Where AWS announces that it takes a machine back, as its own tools read it.",
    ),
    ("CONDA_ENVS_PATH", "`submit` looks there for the environment of conda's that `slurm.python` names."),
    ("CONDA_EXE", "The same: in `envs` above this program."),
    ("CUDA_VISIBLE_DEVICES", "The GPUs of a node's ranks; Slurm sets it."),
    ("GCE_METADATA_HOST", "Where Google Cloud announces that it takes a machine back."),
    ("MAMBA_ROOT_PREFIX", "The same: in `envs` below it."),
    ("PATH", "Programs of Slurm, of containers and of NVIDIA's driver."),
    (
        "PYTHONPATH",
        "Parts that are relative or empty are dropped: they would let others decide what is imported.",
    ),
    ("SLURM_CONF", "The cluster that Slurm's own commands talk to; `verl-slurm devcluster env` prints its."),
    ("SLURM_TMPDIR", "The first place in which an agent looks for room for its sockets."),
    (
        "XDG_CACHE_HOME",
        "In the place of `~/.cache`: digests of data files, built-in models, embedded clusters.",
    ),
    ("XDG_STATE_HOME", "In the place of `~/.local/state`: your list of bad nodes."),
)
"""What the programs read of a user's environment. `test_docs.py` compares it with the sources."""


def variables() -> str:
    """Returns docs/reference-environment.md."""
    return f"""# Every environment variable

For authors of training programs, services and hooks, and for anyone who asks which variables change what verl-slurm
does.

Settings of a run are in its configuration; no variable replaces one.
`python -m tests.reference_pages` makes this page from `verl_slurm/wire/environment.py`.

## Of verl-slurm

{_table(["variable", "meaning"], [[f"`{name}`", _prose(text)] for name, text in _defined()])}
Each rank also has what torchrun gives it (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, ...), and the run's `env` and
`env_from_files` ([configuration.md](configuration.md)). `_VERL_SLURM_COMPLETE` is the shell's question for a completion
([first-run.md](first-run.md#shell-completion)).

## Read from yours

Beside those of Slurm (`SLURM_JOB_ID` and the like) and of torchrun, these:

{_table(["variable", "what it is read for"], [[f"`{name}`", text] for name, text in READ])}"""


def _defined() -> Iterator[tuple[str, str]]:
    """Yields the variables of `wire/environment.py`, each with the text below it."""
    tree = ast.parse(inspect.getsource(environment))
    for statement, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(statement, ast.Assign) and isinstance(below, ast.Expr)):
            continue
        text = " ".join(ast.literal_eval(below.value).split())
        names = [each.value for each in ast.walk(statement.value) if isinstance(each, ast.Constant)]
        for name in names:
            # One that ends with an underline is the beginning of a name.
            if isinstance(name, str) and name.startswith("VERL_SLURM_"):
                yield name + ("NAME" if name.endswith("_") else ""), text


def series() -> str:
    """Returns docs/reference-metrics.md."""
    shown = ObservabilityConfig(metrics_port=0, token_file="/token")
    config, paths = RunConfig(observability=shown), RunPaths(ROOT / "runs" / "none")
    status = Status()
    status.metrics["reward"] = 0.0
    lead = LeadMetrics(paths, config, status, clock=lambda: 0.0)
    agent = AgentMetrics(paths, config, 0, up=lambda: True, clock=lambda: 0.0)
    return f"""# Every series of Prometheus

For anyone who writes a query, an alert or a panel: each series by name, with its type, its label and its help text.

[observability.md](observability.md) says how to scrape them, and more about some. `process_*`, of lead and agents, are
of the daemon's process itself: memory, CPU seconds, open files.

`python -m tests.reference_pages` makes this page from
`daemon/verl_slurm_daemon/lead/lead_metrics.py` and `agent/node_metrics.py` beside it.

## Of the lead

{_series(lead.families())}
## Of an agent

{_series(agent.families())}"""


def _series(families: Iterator[Metric]) -> str:
    rows = []
    for family in families:
        name = family.name + ("_total" if isinstance(family, CounterMetricFamily) else "")
        label = ", ".join(getattr(family, "_labelnames", ()))
        rows.append([f"`{name}`", family.type, _code(label), _prose(family.documentation)])
    return _table(["series", "type", "label", "help"], rows)


def schema() -> str:
    """Returns configs/schema.json."""
    return json.dumps(json_schema(), indent=1) + "\n"


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs/settings.md": settings,
    ROOT / "docs/reference-commands.md": commands,
    ROOT / "docs/reference-events.md": journal,
    ROOT / "docs/reference-environment.md": variables,
    ROOT / "docs/reference-metrics.md": series,
    ROOT / "configs/schema.json": schema,
}


def _here(text: str) -> str:
    """Returns help as the source has it: `cli.get_command` puts in where this checkout is."""
    return text.replace(f"{ROOT.resolve()}/", "")


def _code(text: str) -> str:
    return f"`{text}`" if text and text != "required" else text


def _prose(text: str) -> str:
    """Returns text of the code as Markdown: what would be markup outside of code is shown as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else _escaped(p) for p in parts)


def _escaped(text: str) -> str:
    return re.sub(r"([*\[\]]|(?<!\w)_)", r"\\\1", text).replace("<", "&lt;")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def main() -> None:
    for path, text in PAGES.items():
        path.write_text(text())


if __name__ == "__main__":
    main()

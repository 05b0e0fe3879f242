"""`verl-slurm plan`: what to expect of a run, and what a change would buy."""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import click

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.command_options import CONFIG, KEY_VALUE, RUN, Number, Whole, command, option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load, load_resolved
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_events
from verl_slurm.journal.history import History
from verl_slurm.journal.steps import every_row
from verl_slurm.plan.advice import Option, Plan, SimulatedSpread, make_plan
from verl_slurm.plan.calibrate import happened, measure, strikes_again
from verl_slurm.plan.plan_facts import from_slurm, from_storage
from verl_slurm.plan.plan_inputs import LABELS, Inputs, KnownValue, complete
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.submit.relative_paths import Places, absolute

# Inputs of the table. The others: --json.
_SHOWN = (
    *("steps", "nodes", "step_s", "state_bytes", "save_s", "durable_s", "emergency_s", "warning_s", "lead_s"),
    *("queue_s", "start_s", "in_place_s", "notices_per_day", "crashes_per_day", "losses_per_node_day"),
)
_COLUMNS = ("way to run", "goodput", "ETTR", "takes", "saves (mean)", "node hours")


@command("CONFIG DATA NOT_FOUND")
@click.argument("source", type=CONFIG, default="quickstart", metavar="[CONFIG | RUN]")
@click.argument("overrides", type=KEY_VALUE, nargs=-1, metavar="[KEY=VALUE]...")
@option("--like", RUN, "Take times from this run, e.g. a trial of ten steps.")
@option("--steps", Whole(1, 1_000_000), "How many; a loop of your own alone knows them.")
@option("--step-seconds", Number(min=0.001, max=1e7), "How long a step takes.", "step_s")
@option("--nodes", Whole(1, 100_000), "As if so many nodes trained, with the same times.")
@option("--preemptions-per-day", Number(min=0.0, max=10_000), "Of the job, while it runs.", "notices_per_day")
@option("--crashes-per-day", Number(min=0.0, max=10_000), "Of the ranks, while they run.")
@option("--queue-wait", Number(min=0.0, max=1e8), "Seconds in the queue after each requeue.", "queue_s")
@option(
    "--grace-seconds", Number(min=0.0, max=1e6), "From the warning of a preemption to its end.", "warning_s"
)
@option("--simulations", Whole(20, 10_000), "Of each way to run.", default=200)
@click.option("--ask/--no-ask", default=True, show_default=True, help="Ask Slurm, and try the storage.")
def plan(
    source: Path,
    overrides: tuple[str, ...],
    like: RunPaths | None,
    simulations: int,
    ask: bool,
    as_json: bool,
    **given: float | None,  # the inputs that have an option
) -> None:
    """Say what to expect of a run: goodput, duration; whether the warnings suffice; what a change would buy.

    The run is simulated from its first start to its end, some hundred times. Each input is shown with its source: this
    run's journal, the storage (tried as `doctor` tries it), Slurm and its accounting, the configuration, or an
    assumption. Options overrule all of them.

    Of a RUN that has been interrupted, a second table shows the same interruptions again: what the run would have
    been with a change.

    Goodput is the time of steps that count over the allocated time. A range is 5 to 95 % of the simulations.

    \b
    verl-slurm plan my.yaml --step-seconds 240 --preemptions-per-day 2
    verl-slurm plan my.yaml --like runs/trial distributed.nodes=8 distributed.dp_size=64
    verl-slurm plan runs/big
    """
    config, run = _configured(source, list(overrides))
    source_of_times = like or run
    history = History(read_events(source_of_times) if source_of_times else [])
    unread: list[str] = []
    rows = list(every_row(source_of_times, unread=unread)) if source_of_times else []
    for row in rows:
        history.feed_row(row)
    known = measure(history, rows, config.checkpoint.expected_mtbi_h)
    notes: list[str] = []
    if ask:
        told, notes = asyncio.run(from_slurm(config, SlurmClient()))
        # A save of this very run tells more of its storage than a trial.
        if "durable_s" not in known:
            stored, about_storage = from_storage(config, RunPaths(config.run_dir))
            told, notes = stored | told, about_storage + notes
        known = told | known
    known |= {name: KnownValue(float(value), "given") for name, value in given.items() if value is not None}
    notes = unread + notes
    inputs = complete(known, config)
    make = partial(make_plan, config=config, dice=Random, simulations=simulations)
    ahead = make(inputs)
    back = _looked_back(inputs, history, rows, make) if run and not like else None
    if as_json:
        render.json_value({"plan": ahead, "back": back, "notes": notes})
        return
    _print(ahead, notes)
    if back is not None:
        _print_back(back)


def _configured(source: Path, overrides: Sequence[str]) -> tuple[RunConfig, RunPaths | None]:
    """Returns the configuration, paths absolute, and the run that `source` is."""
    if source.is_dir():
        paths = RunPaths(source.resolve())
        if overrides:
            raise ConfigError(
                "a run is planned as it is",
                where=paths.root,
                found=" ".join(overrides),
                remedy=f"verl-slurm plan CONFIG --like {shell_word(paths.root)} plans another configuration "
                "by its times",
            )
        return load_resolved(paths.run_yaml), paths
    return absolute(load(source, overrides), Places(Path.cwd(), source)), None


def _looked_back(
    inputs: Inputs, history: History, rows: list[dict[str, Any]], make: Callable[..., Plan]
) -> dict[str, Any] | None:
    """Returns the run as it was, and its interruptions simulated again; None: it was never interrupted."""
    past, now = happened(history, rows), history.last_at or 0.0
    goodput = history.goodput(now)
    if goodput is None or not past.strikes or not past.steps:
        return None
    done = KnownValue(float(past.steps), "measured", "so far")
    # A limit that ended an attempt is among what happened.
    no_limit = KnownValue(math.inf, "measured", "its ends are among the interruptions")
    seen = inputs | {"steps": done, "limit_s": no_limit}
    again = make(seen, again=lambda least_s: strikes_again(past, least_s))
    measured = {
        "goodput": goodput,
        "allocated_s": history.allocated_seconds(now),
        "interruptions": len(past.strikes),
    }
    return {"measured": measured, "plan": again}


def _print(plan: Plan, notes: Sequence[str]) -> None:
    every = plan.inputs
    cells = [
        (LABELS[name][0], _value(every[name], LABELS[name][1]), every[name].source, every[name].basis)
        for name in _SHOWN
    ]
    render.table(
        ("input", "value", "source", "from"),
        cells,
        right=("value",),
        first_to_go=("from",),
        colours={"assumed": "yellow"},
    )
    render.line()
    guesses = sum(known.source == "assumed" for known in every.values())
    if not any(known.source == "measured" for known in every.values()):
        render.line(
            f"Nothing of this run was measured: {guesses} of {len(every)} inputs are assumptions. A trial of ten steps "
            "and --like RUN replace most of them."
        )
    for note in notes:
        render.line(note)
    for verdict in plan.verdicts:
        kind = "good" if verdict.good else "warning"
        render.finding(kind, f"{verdict.topic}: {verdict.found}", verdict.remedy)
    render.line()
    _print_options(plan, "as configured")
    first = plan.options[0]
    if first.finished < 1.0:
        render.finding("warning", f"only {first.finished:.0%} of the simulations came to their end")
    render.line(f"{plan.simulations} simulations of each; a range is 5 to 95 % of them")


def _print_back(back: dict[str, Any]) -> None:
    measured = back["measured"]
    render.line()
    render.line(
        f"Looking back: {counted(measured['interruptions'], 'interruption')}, a goodput of {measured['goodput']:.3f}, "
        f"{render.span(measured['allocated_s'])} of allocation. The same again:"
    )
    _print_options(back["plan"], "simulated as it was")


def _print_options(plan: Plan, first: str) -> None:
    rows = [_cells(option, first) for option in plan.options]
    render.table(_COLUMNS, rows, first_to_go=("ETTR", "node hours", "takes"))


def _cells(option: Option, first: str) -> tuple[str, ...]:
    base = not option.change
    return (
        option.change or first,
        _range(option.goodput, "{:.3f}".format),
        _range(option.ettr, "{:.3f}".format),
        _range(option.wall_s, render.span),
        "" if base else _signed(option.saved_s, render.span),
        _range(option.node_hours, "{:,.4g}".format),
    )


def _range(spread: SimulatedSpread, form: Callable[[float], str], center: float | None = None) -> str:
    low, high = form(spread.low), form(spread.high)
    middle = form(spread.median if center is None else center)
    return middle if low == middle == high else f"{middle} ({low} to {high})"


def _signed(spread: SimulatedSpread, form: Callable[[float], str]) -> str:
    def one(value: float) -> str:
        return form(value) if value >= 0 or form(-value) == form(0.0) else f"-{form(-value)}"

    # The mean: what seldom happens has a median of nothing.
    return _range(spread, one, spread.mean)


def _value(known: KnownValue, unit: str) -> str:
    if unit == "s":
        return f"{known.value * 1000:.0f} ms" if known.value < 0.1 else render.span(known.value)
    if unit == "bytes":
        if not known.value:
            return "not known"
        return f"{known.value / 1e9:.3g} GB" if known.value >= 1e9 else f"{known.value / 1e6:.3g} MB"
    shown = f"{known.value:,.0f}" if known.value == int(known.value) else f"{known.value:.3g}"
    return shown if unit in ("", "share") else f"{shown} {unit}"

"""Renders a report as one HTML page that needs no network, and the pages of the server. Facts in, text out.

All that is from outside (names, evidence, responses) is escaped by Jinja. The page's own policy (CSP) allows the
scripts and the style that are here, by their hashes, and nothing else: no request, no inline handler, no style
attribute. A page of the server (`report/serve.py`) may also ask that server.
"""

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2

from verl_slurm.base.one_line import counted, json_line, printable, span
from verl_slurm.journal.history import KINDS, PARTS
from verl_slurm.report.live_runs import RunRow
from verl_slurm.report.report_facts import Report, RunCurve, RunFacts

_ASSETS = files("verl_slurm.report") / "assets"
_SCRIPTS = ("echarts.min.js", "page.js")
LIVE_SCRIPTS = (*_SCRIPTS, "live.js")
LIST_SCRIPTS = ("list.js",)
# Lines of the table of curves.
_MOST_ROWS = 40
_MOST_CHECKPOINTS = 60
_KIND_TITLES = {kind: kind.capitalize() for kind in KINDS} | {"preempted": "Interrupted"}
_PART_TITLES = {
    "useful": "Steps that count",
    "repeated": "Steps thrown back and done again",
    "unfinished": "Between steps, and steps that have not ended",
    "saving": "Saving before an end",
    "starting": "Starting ranks and loading",
    "preempted": "Leaving nodes after an interruption",
    "hung": "Hanging",
    "requeued": "In the queue after an interruption",
    "queued": "In the queue before a first attempt",
}


def render_page(report: Report, events: str = "") -> str:
    """Returns the page's HTML; `events`: address of the server-sent events of newer facts, empty: a file."""
    scripts = LIVE_SCRIPTS if events else _SCRIPTS
    page = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            report=report,
            events=events,
            several=len(report.runs) > 1,
            panels=_panels(report.runs),
            step_tables=[_step_table(run) for run in report.runs],
            attempt_tables=[_attempt_table(run) for run in report.runs],
            timelines=[_timeline_summary(run) for run in report.runs],
            most_checkpoints=_MOST_CHECKPOINTS,
            part_titles=_PART_TITLES,
            terms=PARTS,
            kind_titles=_KIND_TITLES,
            # The template marks these three as safe: two are ours, and the JSON can end no block.
            style=_asset("page.css"),
            scripts=[_asset(name) for name in scripts],
            data=_as_block(chart_data(report)),
            policy=policy_of(scripts, live=bool(events)),
        )
    )
    return page.lstrip()


def render_list(rows: Sequence[RunRow], summary: str, version: int, where: str) -> str:
    """Returns the HTML of the table of runs below `where`; the page asks for rows that are newer than `version`."""
    return (
        _environment()
        .get_template("list.html.jinja")
        .render(
            rows=rows,
            summary=summary,
            version=version,
            where=where,
            style=_asset("page.css"),
            scripts=[_asset(name) for name in LIST_SCRIPTS],
            policy=policy_of(LIST_SCRIPTS, live=True),
        )
        .lstrip()
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Every value from outside passes here, on its way into the page.
        finalize=lambda value: _visible(value) if type(value) is str else value,
    )
    environment.filters |= {
        "span": span,
        "time": _time,
        "number": _number,
        "percent": _percent,
        "words": lambda text: text.replace("_", " "),
        "counted": counted,
    }
    return environment


@functools.cache
def policy_of(scripts: tuple[str, ...], *, live: bool) -> str:
    """Returns the policy (CSP) of a page with these scripts; `live`: it hears from the server that it came from."""
    hashes = " ".join(_hash(_asset(name)) for name in scripts)
    rules = [f"script-src {hashes}", f"style-src {_hash(_asset('page.css'))}"]
    rules += ["connect-src 'self'"] if live else []
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])


def chart_data(report: Report) -> dict[str, Any]:
    """Returns what the page's script (`page.js`) draws: intervals as (kind, from, to, attempt) with times in
    milliseconds, curves as (step, value), each further attempt with its first step, and the steps of another reward.
    """
    return {
        "kinds": [_KIND_TITLES[kind] for kind in KINDS],
        "names": [run.name for run in report.runs],
        "timelines": [
            [
                [KINDS.index(one.kind), round(one.began * 1000), round(one.ended * 1000), one.attempt]
                for one in run.timeline
            ]
            for run in report.runs
        ],
        "panels": [
            {"lines": [[run, curve.points] for run, curve in panel["lines"]], "replaced": panel["replaced"]}
            for panel in _panels(report.runs)
        ],
        # Of several runs these lines would not be told apart.
        "attempts": report.runs[0].attempts_at[1:] if len(report.runs) == 1 else [],
    }


def _panels(runs: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """One for each number that any run has: title, (number of the run, its curve), and the summary in words."""
    names = dict.fromkeys((curve.name, curve.title) for run in runs for curve in run.curves)
    found = []
    for name, title in names:
        lines = [
            (number, curve)
            for number, run in enumerate(runs)
            for curve in run.curves
            if (curve.name, curve.title) == (name, title)
        ]
        words = [_curve_summary(curve, runs[number], several=len(runs) > 1) for number, curve in lines]
        found.append(
            {
                "title": title,
                "lines": lines,
                "summary": "; ".join(words),
                "replaced": _replaced(runs[0], name) if len(runs) == 1 else [],
            }
        )
    return found


def _replaced(run: RunFacts, name: str) -> list[int]:
    # From there on the curve shows another reward, on a scale of its own.
    return [one.step for one in run.rewards] if name in ("reward", "eval") else []


def _curve_summary(curve: RunCurve, run: RunFacts, *, several: bool) -> str:
    of = f"{run.name}: " if several else ""
    steps = [f"; the reward was replaced at step {step}" for step in _replaced(run, curve.name)]
    begin, end = curve.points[0][0], curve.points[-1][0]
    return (
        f"{of}from {_number(curve.first)} at step {begin:.0f} to {_number(curve.last)} at step {end:.0f}, "
        f"between {_number(curve.least)} and {_number(curve.most)}{''.join(steps)}"
    )


def _step_table(run: RunFacts) -> dict[str, Any]:
    """The curves as a table of at most `_MOST_ROWS` steps, the first and the last among them."""
    columns = [dict(curve.points) for curve in run.curves]
    steps = sorted({step for column in columns for step in column})
    if len(steps) > _MOST_ROWS:
        steps = [steps[round(i * (len(steps) - 1) / (_MOST_ROWS - 1))] for i in range(_MOST_ROWS)]
    rows = [[f"{step:.0f}", *(_number(column.get(step)) for column in columns)] for step in steps]
    return {"headings": ["Step", *(curve.title for curve in run.curves)], "rows": rows}


def _attempt_table(run: RunFacts) -> list[list[str]]:
    """A line for each attempt: its number, when it began, its time of each kind. The wait after it is its own."""
    found: dict[int, list[str]] = {}
    sums: dict[int, dict[str, float]] = {}
    for one in run.timeline:
        found.setdefault(one.attempt, [str(one.attempt or "–"), _time(one.began)])
        of_kind = sums.setdefault(one.attempt, dict.fromkeys(KINDS, 0.0))
        of_kind[one.kind] += one.seconds
    return [
        [*row, *(span(value) if value else "–" for value in sums[attempt].values())]
        for attempt, row in found.items()
    ]


def _timeline_summary(run: RunFacts) -> str:
    sums = dict.fromkeys(KINDS, 0.0)
    for one in run.timeline:
        sums[one.kind] += one.seconds
    parts = [
        f"{_KIND_TITLES[kind].lower()} {span(seconds)}" for kind, seconds in sums.items() if seconds > 0.0
    ]
    return f"{counted(run.attempts, 'attempt')}: {', '.join(parts)}"


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_block(value: object) -> str:
    """JSON that can neither end the element that it stands in nor begin a comment there."""
    return re.sub(r"[<>&]", lambda match: f"\\u{ord(match[0]):04x}", json_line(value).decode())


def _visible(text: str) -> str:
    # Line feeds and tabs are kept by cutting the text at them: `printable` would escape them with all the rest.
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "–"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"

"""A run as tables, with words and numbers still apart from any layout. Pure."""

from dataclasses import dataclass

from benchmarks.save.figures import Figures, Spread
from benchmarks.save.records import Mode, Run
from benchmarks.save.registry import PEERS
from benchmarks.save.targets import verdicts

_NOTHING = "–"
_OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Title, what its columns mean, and the cells."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(run: Run) -> list[Table]:
    """Those that have rows; the targets first.

    Called by: report, page.
    """
    figures = Figures(run.samples)
    made = [_targets(run), _save(run, figures), _busy(run, figures), _dual(figures)]
    made += [_load(run, figures), _verify(figures), _memory(run, figures), _absent(run, figures)]
    return [table for table in made if table.rows]


def _targets(run: Run) -> Table:
    words = {True: "met", False: "NOT met", None: "not measured"}
    return Table(
        title="Targets",
        note="Against what was measured in the same processes; where there are several peers, the one closest counts.",
        columns=("figure", "target", "found", ""),
        rows=tuple((v.figure, v.target, v.found, words[v.met]) for v in verdicts(run)),
    )


def _save(run: Run, figures: Figures) -> Table:
    rows = []
    for group, name in _turns(figures):
        loop = figures.of(group, name, "loop", "stall")
        direct = figures.of(group, name, "direct", "stall")
        durable = figures.of(group, name, "direct", "durable")
        cpu = figures.of(group, name, "direct", "cpu")
        size = figures.of(group, name, "direct", "bytes")
        if not any((loop, direct, durable)):
            continue
        cold = figures.cold(group, name, "loop", "stall") or figures.cold(group, name, "direct", "stall")
        rows.append(
            (
                _label(run, group, name),
                _seconds(loop),
                _ours_over(figures, group, name, "loop", "stall"),
                _seconds(figures.of(group, name, "loop", "generation")),
                _seconds(direct),
                _NOTHING if cold is None else f"{cold:.3f}",
                _seconds(durable),
                _ours_over(figures, group, name, "direct", "durable"),
                _NOTHING if cpu is None else f"{cpu.median:.2f}",
                _NOTHING if size is None else f"{size.median / 2**20:.0f}",
                _exact(figures, name),
            )
        )
    return Table(
        title="Save",
        note="Seconds: median (least..greatest). Stall: the training thread is blocked, the fence before the update "
        "included; in a trainer's loop, and with the update right after the save. Generation: what the phase between "
        "save and fence took, with all that goes on beside it. First: the first save of all. "
        "Durable: everything written and fsynced. CPU: all processes of all ranks. Exact: checkpoints loaded and "
        "compared after the live state had been overwritten.",
        columns=(
            *(
                "",
                "stall, loop",
                "ours ÷ it",
                "generation",
                "stall, update at once",
                "first",
                "durable",
                "ours ÷ it",
            ),
            *("CPU s", "MiB", "exact"),
        ),
        rows=tuple(rows),
    )


def _busy(run: Run, figures: Figures) -> Table:
    rows = []
    for group, name in _turns(figures):
        lost = figures.of(group, name, "busy", "lost") or figures.of(group, name, "busy", "one_core")
        if lost is not None:
            rows.append((_label(run, group, name), _seconds(lost, 2)))
    return Table(
        title="Training seconds lost per save, both cores busy",
        note="Steps that read the whole state and update it in place go on while the save is under way; lost is what "
        "they take longer than undisturbed ones, the end of the save awaited. A difference of two noisy times.",
        columns=("", "lost"),
        rows=tuple(rows),
    )


def _dual(figures: Figures) -> Table:
    rows = []
    for name in figures.groups.get("dual", ()):
        durable = figures.of("dual", name, "dual", "durable")
        if durable is not None:
            rows.append((name, _seconds(durable)))
        rows += [
            (f"raw write + fsync: {medium}", _seconds(found))
            for medium in ("first", "second", "both")
            if (found := figures.of("dual", name, "dual", medium)) is not None
        ]
    return Table(
        title="Dual write",
        note="The same bytes into two directories, durable in both.",
        columns=("", "durable"),
        rows=tuple(rows),
    )


def _load(run: Run, figures: Figures) -> Table:
    rows = []
    for name in figures.groups.get("load", ()):
        took, plain = (figures.of("load", name, "load", figure) for figure in ("load", "plain_read"))
        if took is not None and plain is not None:
            ratio = f"{took.median / plain.median:.2f}"
            ours = _ours_over(figures, "load", name, "load", "load")
            rows.append((_label(run, "main", name), _seconds(took), _seconds(plain), ratio, ours))
    return Table(
        title="Load, cold, fresh process",
        note="Each load by processes that never loaded, and compared bit for bit; then a plain read of the same "
        "files, as many readers as ranks. Of the peers, none verifies a digest.",
        columns=("", "load", "plain read", "load ÷ read", "ours ÷ it"),
        rows=tuple(rows),
    )


def _verify(figures: Figures) -> Table:
    took, plain = (figures.of("verify", _OURS, "verify", name) for name in ("verify", "plain_read"))
    rows = []
    if took is not None and plain is not None:
        rows = [
            ("committed checkpoint", _seconds(took), _seconds(plain), f"{took.median / plain.median:.2f}")
        ]
    return Table(
        title="Verify, cold",
        note="Every byte read again and hashed by one process, a thread a core; the plain read has as many.",
        columns=("", "verify", "plain read", "verify ÷ read"),
        rows=tuple(rows),
    )


def _memory(run: Run, figures: Figures) -> Table:
    rows = []
    for name in figures.groups.get("memory", ()):
        extra = figures.of("memory", name, "memory", "extra")
        if extra is not None and run.state_bytes:
            share = extra.median / run.state_bytes
            rows.append((_label(run, "main", name), f"{extra.median / 2**20:.0f}", f"{share:.2f}"))
    return Table(
        title="Extra memory",
        note="Peak proportional set size of the ranks and all processes they start, above that before the first save. "
        "A fork counts what it has copied by then; the page cache is not counted.",
        columns=("", "MiB", "× state"),
        rows=tuple(rows),
    )


def _absent(run: Run, figures: Figures) -> Table:
    reasons = {**run.absent, **figures.errors}
    return Table(
        title="Not measured, or not to the end",
        note="",
        columns=("peer", "why"),
        rows=tuple((name, reason.replace("\n", " ")) for name, reason in reasons.items()),
    )


def _turns(figures: Figures) -> list[tuple[str, str]]:
    """(group, peer) of the groups in which peers take turns, `main` first."""
    apart = ("load", "memory", "keep", "dual", "verify", "commit")
    names = [group for group in figures.groups if group not in apart]
    return [(group, name) for group in names for name in figures.groups[group]]


def _label(run: Run, group: str, name: str) -> str:
    label = run.labels.get(name, "SHA-256 of the bytes, one core" if name == "sha256" else name)
    home = PEERS[name].apart if name in PEERS else "main"
    return label if group in ("main", home) else f"{label} (beside {group})"


def _ours_over(figures: Figures, group: str, name: str, mode: Mode, figure: str) -> str:
    ours, theirs = figures.of(group, _OURS, mode, figure), figures.of(group, name, mode, figure)
    if ours is None or theirs is None or name == _OURS or theirs.median <= 0:
        return _NOTHING
    return f"{ours.median / theirs.median:.2f}"


def _seconds(found: Spread | None, digits: int = 3) -> str:
    if found is None:
        return _NOTHING
    return f"{found.median:.{digits}f} ({found.low:.{digits}f}..{found.high:.{digits}f})"


def _exact(figures: Figures, name: str) -> str:
    compared, same = figures.exact(name)
    return f"{same} of {compared}" if compared else _NOTHING

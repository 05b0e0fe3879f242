"""A run on a terminal."""

from benchmarks.save.figures import Figures
from benchmarks.save.records import Run
from benchmarks.save.tables import Table, tables

_QUIET = 0.85


def text(run: Run) -> str:
    """All tables, aligned, with what they were measured on before them."""
    parts = ["\n".join(conditions(run)), *(_aligned(table) for table in tables(run))]
    return "\n\n".join(parts) + "\n"


def conditions(run: Run) -> list[str]:
    """What limits the figures: the machine, its load, what was not cold.

    Called by: page, too.
    """
    machine = run.environment
    gib = run.state_bytes / 2**30
    noisy = [sample for sample in run.samples if sample.idle < _QUIET]
    loads = ", ".join(f"{load:.1f}" for load in (machine.load_before[0], machine.load_after[0]))
    lines = [
        (
            f"{gib:.3f} GiB of FSDP2 model and AdamW state, {run.num_tensors} tensors, "
            f"{run.ranks} ranks (gloo, CPU), {run.reps} repetitions"
        ),
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, Linux {machine.kernel}",
        "; ".join(sorted(set(machine.file_systems.values()))),
        ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        (
            f"commit {machine.commit or 'unknown'}, {machine.started_utc}, load before and after: {loads}; "
            f"{len(noisy)} of {len(run.samples)} samples began on a machine that was less than 85 % idle"
        ),
    ]
    if run.stopped:
        lines.append("STOPPED by a signal: these are the samples that had been taken until then")
    short = {group: n for group, n in Figures(run.samples).repetitions().items() if n < run.reps}
    if short:
        lines.append(
            "CUT SHORT, fewer repetitions: " + ", ".join(f"{group} {n}" for group, n in short.items())
        )
    if not machine.caches_dropped:
        lines.append("NOT ROOT: the page cache was not dropped, so reads called cold were warm")
    if run.same_medium and "dual" in run.what:
        lines.append(
            "both directories of the dual write are on one device: its two writes share one bandwidth"
        )
    return lines


def _aligned(table: Table) -> str:
    cells = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([table.title, *lines])

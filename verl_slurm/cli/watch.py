"""`verl-slurm watch` and `logs`: what happens and what is printed, as it comes."""

from pathlib import Path
from typing import Any

import click

from verl_slurm.cli import render, story
from verl_slurm.cli.options import RUN, Whole, exits, json_option
from verl_slurm.errors import NotFound
from verl_slurm.exit_codes import ExitCode
from verl_slurm.paths import RunPaths

__all__ = ["logs", "tell_until_end", "watch"]


def tell_until_end(paths: RunPaths, offset: int, *, as_json: bool) -> int:
    """Tell a run's story from byte `offset` of its journal until it ends; its exit code."""
    from verl_slurm.submit.follow import follow_run

    if as_json:
        return follow_run(paths, offset, render.json_value)
    bottom = render.Progress()
    teller = story.Story()

    def on_event(event: dict[str, Any]) -> None:
        text = teller.tell(event)
        if text is not None:
            bottom.line(text)

    def on_status(status: dict[str, Any]) -> None:
        if status.get("state") in ("running", "saving", "checking"):
            bottom.show(int(status.get("step", 0)), story.progress(status))

    try:
        return follow_run(paths, offset, on_event, on_status)
    except KeyboardInterrupt:
        bottom.close()
        render.warning(f"no longer following; the run goes on. Again: verl-slurm watch {paths.root}")
        raise
    finally:
        bottom.close()


@click.command(epilog=exits(ExitCode.NOT_FOUND) + "\n\nOtherwise the exit code with which the run ended.")
@click.argument("run", type=RUN)
@json_option
def watch(run: RunPaths, as_json: bool) -> int:
    """Follow RUN from its first event until it ends, over all its requeues.

    Prints what the daemon wrote down (starts, causes, saves, verdicts, requeues), then each event as it happens
    and the step it is at. Ctrl-C ends the watching, not the run. With --json each event is one line.
    """
    from verl_slurm.submit.record import last_job

    last_job(run)
    return tell_until_end(run, 0, as_json=as_json)


@click.command(epilog=exits(ExitCode.NOT_FOUND))
@click.argument("run", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on printing as it grows; Ctrl-C ends it.")
@click.option("--node", type=Whole(min=0), help="What the ranks of this node (0, 1, ...) print.")
@click.option("--agent", is_flag=True, help="With --node: what the daemon's agent there saw and did instead.")
@click.option("--all", "list_all", is_flag=True, help="List the log files instead.")
def logs(run: RunPaths, follow: bool, node: int | None, agent: bool, list_all: bool) -> int:
    """What the daemon of RUN prints (its newest job), or with --node the ranks of one node (newest start).

    With --node N --agent it is the log of the daemon's agent on that node. Agents keep their own, because what they
    print is lost together with the node that the daemon runs on.
    """
    if agent and node is None:
        raise click.UsageError("--agent wants --node N: there is one agent a node")
    files = sorted(run.logs.glob("*.log")) + sorted(run.logs.glob("*_log.out"))
    if list_all:
        for path in files:
            render.line(path)
        return ExitCode.OK
    path = _lead_log(run) if node is None else _newest(files, node, agent, run)
    if follow:
        return _follow(path)
    with path.open("rb") as file:
        for raw in file:
            render.raw_line(raw.rstrip(b"\n"))
    return ExitCode.OK


def _lead_log(run: RunPaths) -> Path:
    from verl_slurm.submit.record import last_job

    path = run.logs / f"{last_job(run).job_id}_0_log.out"
    if not path.exists():
        raise NotFound(
            "the job has printed nothing yet", where=path, remedy=f"see `verl-slurm status {run.root}`"
        )
    return path


def _newest(files: list[Path], node: int, agent: bool, run: RunPaths) -> Path:
    suffix = f".node_{node:04d}.{'agent.' if agent else ''}log"
    mine = [path for path in files if path.name.endswith(suffix)]
    if not mine:
        raise NotFound(
            "no agent has written there" if agent else "no ranks have printed there",
            where=run.logs,
            expected=f"a file that ends in {suffix}",
            remedy=f"`verl-slurm logs --all {run.root}` lists what there is",
        )
    return mine[-1]  # epoch and generation are in the name, with leading zeros


def _follow(path: Path) -> int:
    from verl_slurm.submit.follow import follow_lines

    for line in follow_lines(path, silence_s=lambda: 3600.0):
        if line is not None:
            render.raw_line(line)
    return ExitCode.OK

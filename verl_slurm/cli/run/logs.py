"""`verl-slurm logs` and `samples`: what a run printed, and what its policy said."""

import os
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from verl_slurm.base.bounded import TooMuch, open_regular
from verl_slurm.base.errors import NotFound
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.cli.command_options import RUN, Whole, command, flag, key_option, option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.journal.files import read_history
from verl_slurm.runs.run_record import lead_log
from verl_slurm.runtime_state.samples import StepSamples, best_and_worst, read_samples

# Maximum bytes of a line that are read at once.
_LINE = 1 << 20
# Lines of other programs than the run's. In a healthy requeue srun and slurmstepd say "error", too.
_MARKS = re.compile(rb"^(?:slurmstepd|srun|slurmd|scontrol|sbatch): |^submitit [A-Z]+ ")


@command("NOT_FOUND")
@click.argument("run", type=RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on as it grows, over all requeues; Ctrl-C ends it.")
@click.option("-n", "--lines", "num_lines", type=Whole(min=0), help="Only the last N lines there are.")
@option("--node", Whole(min=0), "What the ranks of this node (0, 1, ...) print.")
@option("--rank", Whole(min=0), "The same, of the node that has this rank.")
@flag("--agent", "With --node: what the daemon's agent there saw and did instead.")
@click.option(
    "--service", metavar="NAME", help="What a service prints; with --node N, on its N-th node, from 0."
)
@flag("--all", "List the log files instead.", "list_all")
def logs(
    run: RunPaths,
    follow: bool,
    num_lines: int | None,
    node: int | None,
    rank: int | None,
    agent: bool,
    service: str | None,
    list_all: bool,
    as_json: bool,
) -> None:
    """What the daemon of RUN prints (its newest job), or with --node or --rank the ranks of one node (newest start).

    All ranks of a node print into one file, and each start has its own: with -f, a new start's file follows the last
    line of the one before. With --node N --agent it is the log of the daemon's agent on that node. Agents keep their
    own, because what they print is lost together with the node that the daemon runs on. Lines marked [Slurm] or
    [submitit] are theirs: when a job is requeued or cancelled, Slurm reports the steps it ends as errors. With
    --json each line is an object with its file.
    """
    if node is not None and rank is not None:
        raise click.UsageError("--node and --rank both name a node: give one of them")
    # All ranks of a node print into one file, so a rank stands for its node.
    if rank is not None:
        node = _node_of(run, rank)
    if service is not None and (agent or rank is not None):
        raise click.UsageError("--service goes with --node at most")
    if agent and node is None:
        raise click.UsageError("--agent wants --node N: there is one agent a node")
    if list_all:
        names = [str(path) for path in sorted(_rank_logs(run)) + sorted(run.logs.glob("*_log.out"))]
        if as_json:
            render.json_value(names)
        for name in () if as_json else names:
            render.line(name)
        return
    show = _shower(follow, as_json)
    if follow:
        from verl_slurm.runs.follow import follow_newest

        def newest() -> Path | None:
            try:
                return _newest(run, node, agent, service)
            except NotFound:
                # The ranks of a start that has just begun have printed nothing yet; -f waits for them.
                return None

        lead_log(run)  # raises if there is no job yet
        for path, line in follow_newest(run.logs, newest, num_lines):
            show(path, line)
        return
    path = _newest(run, node, agent, service)
    with _opened(path) as file:
        if num_lines is not None:
            file.seek(_last_lines(file, num_lines))
        # A line without an end is shown in pieces.
        for raw in iter(partial(file.readline, _LINE), b""):
            show(path, raw.rstrip(b"\n"))


def _opened(path: Path) -> BinaryIO:
    try:
        # Neither link nor FIFO: in a run that was handed over a log may be anything.
        return os.fdopen(open_regular(path), "rb")
    except TooMuch as error:
        raise NotFound("the log is not a file", where=path, found=error) from None


def _last_lines(file: BinaryIO, number: int) -> int:
    """Returns the offset of the last lines."""
    start = max(0, os.fstat(file.fileno()).st_size - (number + 1) * _LINE)  # enough for that many lines
    if start:
        file.seek(start)
        # The seek landed within a line, of which the rest is passed over.
        start += len(file.readline(_LINE))
    # Offsets and not lines, because each line may have a MiB.
    starts = deque([start], maxlen=number + 1)
    for raw in iter(partial(file.readline, _LINE), b""):
        starts.append(starts[-1] + len(raw))
    return starts[0]


def _shower(follow: bool, as_json: bool) -> Callable[[Path, bytes], None]:
    shown: list[Path] = []

    def show(path: Path, line: bytes) -> None:
        if as_json:
            render.json_value({"file": str(path), "line": line.decode("utf-8", errors="replace")})
            return
        if follow and shown[-1:] != [path]:
            if shown:
                render.line(f"==> {path.name} <==")
            shown[:] = [path]
        render.raw_line(_MARKS.sub(_mark, line, count=1))

    return show


def _mark(found: re.Match[bytes]) -> bytes:
    return (b"[submitit] " if found[0].startswith(b"submitit") else b"[Slurm] ") + found[0]


def _node_of(run: RunPaths, rank: int) -> int:
    shape = load_resolved(run.run_yaml).distributed
    if rank >= shape.world_size:
        raise NotFound(
            "the run has no such rank",
            where=run.root,
            found=rank,
            expected=f"0 to {shape.world_size - 1}",
            remedy="run.yaml has the shape of the run",
        )
    return rank // shape.ranks_per_node


def _newest(run: RunPaths, node: int | None, agent: bool, service: str | None) -> Path:
    if node is None and service is None:
        path = lead_log(run)
        if path.exists():
            return path
        raise NotFound(
            "the job has printed nothing yet",
            where=path,
            remedy=f"see `verl-slurm status {shell_word(run.root)}`",
        )
    suffix = f".node_{node or 0:04d}.{'agent.' if agent else ''}log"
    who = "agent has written" if agent else "ranks have printed"
    if service is not None:
        suffix, who = f".service_{service}.{node or 0:04d}.log", "service of this name has printed"
    # Attempt and restart are in the name, with leading zeros. Ranks that stand by have a file of the next one.
    last = read_history(run).restart
    newest = "b"
    if last is not None and service is None and not agent:
        newest = run.rank_log(last.attempt or 0, last.number, node or 0).name
    mine = [path for path in _rank_logs(run) if path.name.endswith(suffix) and path.name <= newest]
    if mine:
        return max(mine)
    raise NotFound(
        f"no {who} there",
        where=run.logs,
        expected=f"a file that ends in {suffix}",
        remedy=f"`verl-slurm logs --all {shell_word(run.root)}` lists what there is",
    )


def _rank_logs(run: RunPaths) -> list[Path]:
    return list(run.logs.glob("*.log"))


_MOST_LINES = 30


@command("KEY NOT_FOUND")
@click.argument("run", type=RUN)
@option("--step", Whole(min=1), "A step, as `status` counts them; default: the newest one.")
@option("--limit", Whole(min=1, max=10_000), "How many are shown: half of them the best.", default=6)
@key_option("The key to open them with, instead of what the run says.")
def samples(run: RunPaths, step: int | None, limit: int, key_file: Path | None, as_json: bool) -> None:
    """Prompts, responses and rewards of a step of RUN: what the policy says, and what it gets for it.

    Look at the best ones to see what the reward pays for, and at the worst ones to see what it does not: a reward
    that rises while the text gets no better is a reward that is being fooled.

    Of every step, `rollout.keep_samples` responses are kept as text (16: the 8 best and the 8 worst of those that
    data-parallel rank 0 sampled). The run may be running. --json prints one JSON object a response.

    \b
    verl-slurm samples runs/my
    verl-slurm samples runs/my --step 40 --limit 3
    verl-slurm samples runs/my --json --limit 100 | jq -r 'select(.reward < 0.1) | .response'
    """
    # Sealed like the run's checkpoints: they hold what the policy was asked and said.
    kept = read_samples(run, keys_for(run.root, key_file))
    if not kept:
        raise _none_kept(run)
    number = max(kept) if step is None else step
    # Steps go when the file is full, so one that was shown before may be gone.
    if number not in kept:
        raise NotFound(
            "no samples of that step",
            where=run.root,
            found=f"step {number}",
            expected=_steps(kept),
            remedy="older steps are dropped when their file is full, later ones have not ended",
        )
    found = kept[number]
    best, worst = best_and_worst(found.samples, -(-limit // 2), limit // 2)
    chosen = best + worst
    # One object a line and not one list, so that `jq` and `head` work on them as they come.
    if as_json:
        for sample in chosen:
            facts = {"step": found.step, "attempt": found.attempt, **msgspec.to_builtins(sample)}
            render.json_value(facts)
        return
    render.fields(
        [
            ("step", f"{number}, by attempt {found.attempt}; samples of {_steps(kept)} are kept"),
            ("shown", f"{len(chosen)} of {found.responses} responses, {len(found.samples)} of them kept"),
        ]
    )
    for sample in chosen:
        render.line()
        render.line(
            f"reward {sample.reward:.4g}   {sample.response_tokens} tokens   sample {sample.sample_id}"
            + (f"   answer {sample.answer}" if sample.answer else "")
        )
        _text("prompt", sample.prompt)
        _text("response", sample.response)


def _text(name: str, text: str) -> None:
    # By the line feed alone: `splitlines` would also cut at characters that the text may hold.
    # `render` makes each line harmless.
    lines = text.split("\n")
    for number, part in enumerate(lines[:_MOST_LINES]):
        render.line(f"  {name if number == 0 else '':<9} {part}")
    if len(lines) > _MOST_LINES:
        render.line(f"  {'':<9} ({len(lines) - _MOST_LINES} more lines: --json)")


def _steps(kept: dict[int, StepSamples]) -> str:
    first, last = min(kept), max(kept)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _none_kept(run: RunPaths) -> NotFound:
    config = load_resolved(run.run_yaml)
    if config.trainer.is_guest:
        found = f"trainer.backend: {config.trainer.backend}"
        remedy = "see what that program writes below the run's directory"
    elif not config.rollout.keep_samples:
        found = "rollout.keep_samples: 0"
        remedy = f"verl-slurm submit {shell_word(run.root)} rollout.keep_samples=16 keeps them from the next start on"
    else:
        found, remedy = "no step that has ended since samples are kept", "wait until the first step has ended"
    return NotFound("the run has no samples", where=run.root, found=found, remedy=remedy)

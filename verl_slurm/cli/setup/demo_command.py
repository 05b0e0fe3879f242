"""`verl-slurm demo`: the main job for real, on this machine, in a few minutes."""

import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec

from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import counted
from verl_slurm.base.shipped import shipped
from verl_slurm.cli.command_options import CONFIG, KEY_VALUE, command, option
from verl_slurm.cli.setup.demo_run import Teller, run_demo
from verl_slurm.cli.show import render
from verl_slurm.cli.show.story import Story, progress
from verl_slurm.journal.events import Event
from verl_slurm.slurm.devcluster.machine import real_gpus

_SHAPE = ("distributed.", "slurm.gpus_per_node=")


def _on_a_gpu() -> list[str]:
    """Returns the overrides for one rank on one GPU; none where that cannot be, which means two ranks on CPUs."""
    from importlib.metadata import version

    if not real_gpus() or version("torch").endswith("+cpu"):
        return []
    shape = ["distributed.dp_size=1", "distributed.nodes=1", "slurm.gpus_per_node=1"]
    return ["distributed.device=cuda", *shape]


def _voice(below: render.BottomLine) -> Teller:
    """What tells the demo's events as lines, and its progress in the line below them."""
    story = Story()

    def say_event(event: Event) -> None:
        text = story.tell(event)
        if text is not None:
            below.line(f"   {text}")

    def say_status(status: dict[str, Any]) -> None:
        below.show(int(status.get("step") or 0), f"   {progress(status)}")

    return Teller(say=below.line, event=say_event, status=say_status)


@command("PERMISSION DIFFERENT NO_SLURM CRASHED")
@click.argument("words", type=KEY_VALUE, nargs=-1, metavar="[KEY=VALUE]...")
@option("--config", CONFIG, "What is run, twice. [default: the shipped example quickstart]")
@option(
    "--dir",
    click.Path(path_type=Path, readable=False, file_okay=False),
    "Where the runs are made. [default: a new directory in runs/]",
    "directory",
)
@option(
    "--cluster",
    click.Choice(["auto", "local"]),
    "auto: a real Slurm where it is installed. local: on this machine without it.",
    default="auto",
)
def demo(
    words: tuple[str, ...], config: Path | None, directory: Path | None, cluster: str, as_json: bool
) -> int:
    """Submit a run to a real Slurm on this machine, preempt it in mid-step, and prove that nothing was lost.

    Starts the embedded cluster of four nodes, submits CONFIG, waits until the job is in the middle of a step's
    generation, lets a more urgent job preempt it, shows save, verdicts, requeue and resume, runs the same once more
    undisturbed, and compares all weights bit for bit. Without Slurm: the same on this machine alone. With a GPU the
    quick start runs on one; `demo distributed.device=cpu` does not.
    """
    chosen = [*words]
    # A shape of the user's own, or of their configuration, is not replaced.
    if config is None and not any(word.startswith(_SHAPE) for word in words):
        # The user's words come last, and so win over ours.
        chosen = [*_on_a_gpu(), *words]
    config = config or Path(shipped("configs/quickstart.yaml"))
    if directory is None:
        Path("runs").mkdir(exist_ok=True)
        # A new one each time: a second demo must not resume the runs of the first.
        directory = Path(tempfile.mkdtemp(prefix="demo-", dir="runs"))
    below = render.BottomLine()
    # With --json standard output is one value at the end; progress goes to standard error.
    quiet = Teller(say=render.warning, event=lambda _: None, status=lambda _: None)
    voice = quiet if as_json else _voice(below)
    # Absolute: the runs' jobs start in other directories.
    result = run_demo(config, chosen, directory.resolve(), voice, without_slurm=cluster == "local")
    below.close()
    if as_json:
        render.json_value(msgspec.to_builtins(result) | {"same": result.comparison.same})
        return ExitCode.OK if result.comparison.same else ExitCode.DIFFERENT
    timing = result.timing
    render.line()
    render.table(
        ("where the time of the interruption went", "seconds"),
        [
            ("from the cause to the committed checkpoint", timing.cause_to_saved),
            ("reading it back, every byte", timing.saved_to_verified),
            ("until Slurm had taken the requeue", timing.verified_to_requeued),
            ("in Slurm's queue", timing.requeued_to_started),
            ("from the batch process to the first safe point", timing.started_to_training),
            ("from the cause to the first new rollout, in all", timing.cause_to_first_rollout),
        ],
    )
    render.line()
    render.fields(
        [
            ("preempted at", result.preempted_at),
            ("saved as", result.checkpoint),
            (
                "mean reward",
                f"{result.first_reward:.3f} at the first step, {result.last_reward:.3f} at the last",
            ),
            ("interrupted run", f"{result.interrupted_s} s  {result.interrupted_run}"),
            ("undisturbed run", f"{result.undisturbed_s} s  {result.undisturbed_run}"),
        ]
    )
    found = result.comparison
    if found.same:
        size = found.num_bytes / 1e6
        render.line(
            f"PROVEN: all {counted(found.num_tensors, 'tensor')} ({size:.1f} MB) of the two are the same, bit for bit."
        )
        return ExitCode.OK
    render.line(f"DIFFERENT in {counted(len(found.differing), 'place')}, the first: {found.differing[0]}")
    return ExitCode.DIFFERENT

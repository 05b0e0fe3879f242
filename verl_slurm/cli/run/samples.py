"""`verl-slurm samples`: responses of the policy."""

from pathlib import Path

import click
import msgspec

from verl_slurm.base.errors import NotFound
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.run_config import keys_for
from verl_slurm.cli.options import RUN, Whole, exits, json_option, key_option
from verl_slurm.cli.show import render
from verl_slurm.config.load import load_resolved
from verl_slurm.runtime_state.samples import StepSamples, best_and_worst, read_samples

_MOST_LINES = 30


@click.command(epilog=exits(ExitCode.KEY, ExitCode.NOT_FOUND))
@click.argument("run", type=RUN)
@click.option("--step", type=Whole(min=1), help="A step, as `status` counts them; default: the newest one.")
@click.option("--best", "which", flag_value="best", help="Only those with the highest rewards.")
@click.option("--worst", "which", flag_value="worst", help="Only those with the lowest rewards.")
@click.option(
    "--limit", type=Whole(min=1, max=10_000), default=6, show_default=True, help="How many are shown."
)
@key_option("The key to open them with, instead of what the run says.")
@json_option
def samples(
    run: RunPaths, step: int | None, which: str | None, limit: int, key_file: Path | None, as_json: bool
) -> None:
    """Prompts, responses and rewards of a step of RUN: what the policy says, and what it gets for it.

    Look at the best ones to see what the reward pays for, and at the worst ones to see what it does not: a reward
    that rises while the text gets no better is a reward that is being fooled.

    Of every step, `rollout.keep_samples` responses are kept as text (16: the 8 best and the 8 worst of those that
    data-parallel rank 0 sampled). The run may be running. --json prints one JSON object a response.

    \b
    verl-slurm samples runs/my
    verl-slurm samples runs/my --step 40 --best --limit 3
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
    # Without a choice half of each kind; of an odd number one more of the best.
    most = {"best": (limit, 0), "worst": (0, limit), None: (-(-limit // 2), limit // 2)}[which]
    best, worst = best_and_worst(found.samples, *most)
    chosen = best + (worst[::-1] if which == "worst" else worst)
    # One object a line and not one list, so that `jq` and `head` work on them as they come.
    if as_json:
        for sample in chosen:
            facts = {"step": found.step, "attempt": found.epoch, **msgspec.to_builtins(sample)}
            render.json_value(facts)
        return
    render.fields(
        [
            ("step", f"{number}, by attempt {found.epoch}; samples of {_steps(kept)} are kept"),
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
    """Prints the text line by line under its name; `render` makes each harmless."""
    # By the line feed alone: `splitlines` would also cut at characters that the text may hold.
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
        found, remedy = (
            f"trainer.backend: {config.trainer.backend}",
            "see what that program writes below the run's directory",
        )
    elif not config.rollout.keep_samples:
        found = "rollout.keep_samples: 0"
        remedy = f"verl-slurm submit {shell_word(run.root)} rollout.keep_samples=16 keeps them from the next start on"
    else:
        found, remedy = "no step that has ended since samples are kept", "wait until the first step has ended"
    return NotFound("the run has no samples", where=run.root, found=found, remedy=remedy)

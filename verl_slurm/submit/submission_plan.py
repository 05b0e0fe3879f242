"""The decisions about a submission before anything is made, and words for them; the runs of a sweep. Pure."""

import itertools
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from verl_slurm.base.errors import ConfigError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.checkpoint.format.info import CheckpointInfo
from verl_slurm.config.schema import RunConfig
from verl_slurm.dataset.fingerprint.entries import Fingerprint
from verl_slurm.program.code_record import CodeRecord, CodeTree

Cluster = Literal["slurm", "local"]
_MOST_RUNS = 1000
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "\"'"


class CodeContent(msgspec.Struct, frozen=True, kw_only=True):
    """One tree of code, as it was read."""

    tree: CodeTree
    fingerprint: Fingerprint
    diff: bytes
    """Its difference from its commit."""
    notes: tuple[str, ...]


class CodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempts of the run will run of the user's code."""

    record: CodeRecord = CodeRecord()
    contents: tuple[CodeContent, ...] = ()
    """Of each tree of the record."""
    notes: tuple[str, ...] = ()
    kept: bool = False
    """The run has this record and its copies already."""

    def lines(self) -> list[str]:
        """Describes each tree in a line."""
        return [line + (", as submitted before" if self.kept else "") for line in self.record.lines()]


class SubmissionPlan(msgspec.Struct, kw_only=True):
    """The decisions about one submission before anything is made. `submission.plan_submission` fills it."""

    config: RunConfig
    """Paths absolute. `builtin:` stays, except what an existing run has built before."""
    cluster: Cluster
    new_run: bool
    begun: bool = False
    """The run has a checkpoint or rollouts; until then any of its keys may change."""
    resumes_from: str | None = None
    """The checkpoint that it goes on from: the one that the user named, its newest that verifies, or its newest, too
    large to be read here."""
    followed: str | None = "auto"
    """A `checkpoint.resume_from` of a file that the run has followed already; `config` has `auto` in its place."""
    resume_read: bool = False
    """Every byte of it was read and is as it was written."""
    begins_again: str = ""
    """What tells that the run had a checkpoint, where it has none and begins again because the user said so."""
    inputs: list[tuple[str, str]] = []
    """Model, data and reward that the run takes; empty for a guest."""
    code: CodePlan = CodePlan()
    checked: list[str] = []
    """The items that were checked and found good."""
    slurm: str = ""
    """Name of the Slurm cluster that was asked; empty: none was."""
    avoids: tuple[str, ...] = ()
    """Bad nodes of the user that the job is kept away from."""
    notes: list[str] = []
    """Notes for the user, e.g. that the local executor was chosen."""
    trains: str = ""
    """What will be trained, in one line (`trains_line`)."""
    done: str = ""
    """Why another job would end at once: all steps are done. Empty: they are not."""

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def require_steps_to_do(self) -> None:
        """Refuses a run that is done."""
        if self.done:
            raise ConfigError(
                "nothing is left to do, so no job is queued",
                where=self.run_dir,
                found=self.done,
                expected="steps to do",
                remedy="raise train.steps to go on, or begin a new run: name=NEW run_dir=NEW; "
                f"`verl-slurm verify {shell_word(self.run_dir)}` tells whether its checkpoints are whole",
            )


def trains_line(config: RunConfig, given: Collection[str], cluster: Cluster, of_verl: str = "") -> str:
    """Returns what will be trained, in numbers. `(default)` follows each value that was left out.

    `given`: dotted keys of the file and of the command line; `of_verl`: what verl will train.
    """
    train, shape = config.train, config.distributed

    def part(text: str, key: str) -> str:
        return text if key in given else f"{text} (default)"

    parts = []
    if not config.trainer.is_guest:
        responses = counted(shape.dp_size * train.batch_size_per_device, "response")
        steps = part(counted(train.steps, "step"), "train.steps")
        rates = {"lr": "actor_lr"} | ({"critic lr": "critic_lr"} if train.algorithm == "ppo" else {})
        parts += [
            part(train.algorithm, "train.algorithm"),
            f"{steps} of {part(responses, 'train.batch_size_per_device')}",
            part(f"{config.rollout.samples_per_prompt} to a prompt", "rollout.samples_per_prompt"),
            part(f"up to {counted(config.rollout.max_new_tokens, 'token')}", "rollout.max_new_tokens"),
            *(part(f"{name} {getattr(train, key):g}", f"train.{key}") for name, key in rates.items()),
        ]
    elif of_verl:
        parts.append(of_verl)
    else:
        parts.append(" ".join(config.trainer.command))
    parts.append(part(counted(shape.world_size, "rank"), "distributed.dp_size"))
    if cluster == "slurm":
        parts.append(part(f"{config.slurm.time_limit_min} min", "slurm.time_limit_min"))
    return ", ".join(parts)


def why_done(config: RunConfig, committed: Sequence[CheckpointInfo]) -> str:
    """Returns why another job of a run that has ended well would end at once; empty if it would not.

    `committed`: its checkpoints, newest first.
    """
    steps = config.train.steps
    # Loops that are not ours know their end themselves. Without the last checkpoint its steps are to be done again.
    if config.trainer.is_guest or config.checkpoint.resume_from != "auto" or not committed:
        return ""
    newest = committed[0]
    if newest.safe_point or newest.step < steps:
        return ""
    return f"all {counted(steps, 'step')} are done, and {newest.name} is their checkpoint"


def reshaped(before: RunConfig, now: RunConfig) -> str:
    """Returns the words for a run that goes on with another shape of its ranks."""
    old, new = before.distributed, now.distributed
    text = f"goes on with {counted(new.world_size, 'rank')} instead of {old.world_size};"
    if (old.tp_size, old.pp_size, new.tp_size, new.pp_size) != (1, 1, 1, 1):
        text = f"goes on with (dp, tp, pp) = {new.axes} instead of {old.axes};"
    return f"{text} {now.train.batch_size_per_device} responses a step on each"


class SweptRun(NamedTuple):
    """One combination."""

    label: str
    """The keys' last parts with their values; a directory's name."""
    words: tuple[str, ...]
    """All words, with one value for each key."""


def swept_runs(words: Sequence[str]) -> list[SweptRun]:
    """Returns all combinations, the last key's values changing first.

    `train.actor_lr=1e-6,3e-6 seed=0,1` are the runs `actor_lr1e-6-seed0`, `actor_lr1e-6-seed1`, and so on.

    Args:
        words: `KEY=VALUE`, or `KEY=VALUE,VALUE,...`. A comma in brackets or quotes separates nothing.

    Raises:
        ConfigError: no word has several values, one is empty, two combinations have the same name, or there are more
            than 1,000.
    """
    for word in words:
        if "=" not in word:
            raise ConfigError("not an override", where=word, expected="KEY=VALUE or KEY=VALUE,VALUE,...")
    keys = [word.partition("=")[0] for word in words]
    choices = [_values(word.partition("=")[2]) for word in words]
    swept = [number for number, values in enumerate(choices) if len(values) > 1]
    _require_good(words, choices, swept)
    short = {keys[number]: keys[number].rpartition(".")[2] for number in swept}
    # `rollout.micro_batch_size_per_device` and that of `train` would have one name.
    if len(set(short.values())) < len(short):
        short = {key: key for key in short}
    found = []
    for chosen in itertools.product(*choices):
        parts = [short[keys[number]] + _NOT_IN_NAMES.sub("_", chosen[number]).strip("_") for number in swept]
        found.append(SweptRun("-".join(parts), tuple(map("=".join, zip(keys, chosen, strict=True)))))
    labels = [run.label for run in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(
            "two runs of the sweep would have the same name",
            where="--sweep",
            found=twice,
            remedy="leave out the value that is there twice, or submit one of them by itself",
        )
    return found


def _require_good(words: Sequence[str], choices: Sequence[Sequence[str]], swept: Sequence[int]) -> None:
    if not swept:
        raise ConfigError(
            "nothing to sweep", where="--sweep", expected="KEY=VALUE,VALUE,..., e.g. seed=0,1,2"
        )
    if empty := next((words[number] for number in swept if "" in choices[number]), None):
        raise ConfigError("a value of the sweep is empty", where="--sweep", found=empty)
    count = 1
    for number in swept:
        count *= len(choices[number])
    if count > _MOST_RUNS:
        raise ConfigError(
            "the sweep has too many runs",
            where="--sweep",
            found=f"{count:,}",
            expected=f"at most {_MOST_RUNS:,}",
        )


def _values(text: str) -> list[str]:
    """Splits at the commas outside of brackets and quotes."""
    values, depth, quote, start = [], 0, "", 0
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth <= 0:
            values.append(text[start:at].strip())
            start = at + 1
    return [*values, text[start:].strip() if values else text]

"""A reward's files on disk: its digest, the copy that a run keeps, and the record of one that was replaced.

`start_reward` selects the reward at a start. The run's record, the checkpoint and the files on disk must agree.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from verl_slurm.base.errors import DataError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.reward_spec import parse_reward, source_file
from verl_slurm.dataset.fingerprint.data_record import Fingerprint, fingerprint, is_recorded
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer.reward.python import read_source
from verl_slurm.trainer.reward.scoring import Reward
from verl_slurm.trainer.state.position import Position
from verl_slurm.trainer.state.reward_state import RewardState
from verl_slurm.wire.reward_plan import RewardPlan, read_reward_plan

Keep = Callable[[Path, Fingerprint], None]
"""Copies a model directory (`checkpoint.store.frozen`)."""


def digest_and_keep(paths: RunPaths, reward: str, keep: Keep | None) -> str:
    """Returns the reward's present digest, and with `keep` copies it into the run's directory. Rank 0 only.

    Returns:
        Of a model directory its tree hash, of a function the SHA-256 of its source; empty for a rule.

    Raises:
        ConfigError, DataError: it is not there.
    """
    spec = parse_reward(reward)
    if spec is None or spec.kind == "rule":
        return ""
    if spec.kind == "classifier":
        # In full, at each start: a cached look is for comparing, and this digest is recorded.
        seen = fingerprint(Path(spec.name))
        if keep is not None:
            keep(Path(spec.name), seen)
        return seen.digest
    # Read once: what is hashed is what is kept.
    source = read_source(source_file(spec))
    digest = hashlib.sha256(source).hexdigest()
    copy = paths.reward_source(digest)
    # Named by its digest, so one that is there already has these bytes. Apart from RUN/frozen, which has directories.
    if keep is not None and not copy.is_file():
        private_dir(copy.parent, inside=paths.run)
        write_file(copy, source)  # the bytes that were hashed: the file may have changed since
    return digest


def write_light_snapshot(paths: RunPaths, number: int, former: Reward, state: RewardState) -> None:
    """Keeps a small record of the reward that the `number`-th replacement removes. Rank 0 only.

    The record is its head and tokenizer configuration, or its source, and rank 0's last scores.
    """
    # Small whatever the model's size: the whole model is in RUN/frozen.
    directory = private_dir(paths.reward_snapshot(number), inside=paths.run)
    # A rule has none: it is a function of this package.
    light: Callable[[], dict[str, bytes]] = getattr(former, "light", dict)
    for name, data in light().items():
        write_file(directory / name, data)
    cached = state.cached
    scores = {
        "reward": state.spec,
        "digest": state.digest,
        "sample_id": cached["sample_id"].tolist() if cached else [],
        "scores": cached["scores"].tolist() if cached else [],
    }
    write_file(directory / "last_scores.json", msgspec.json.encode(scores))


class _Found(msgspec.Struct, frozen=True):
    plan: RewardPlan
    digest: str


def start_reward(
    paths: RunPaths,
    ranks: Collective,
    state: RewardState,
    position: Position,
    *,
    first: str,
    recorded: Mapping[str, str] | None,
    keep: Keep | None,
) -> tuple[RewardPlan, RewardState]:
    """Returns the run's record of replaced rewards, and `state` with the reward in force. Collective.

    Args:
        first: the configuration's reward.
        recorded: the manifest's digests of all that does not train; None: nothing is resumed.

    Raises:
        RanksFailed: on all ranks; on rank 0 caused by `DataError` (a reward has changed, or checkpoint and record
            contradict each other), `CheckpointCorrupt` or the storage's error.
    """

    def look() -> _Found:
        # All of it on rank 0: the record, the checkpoint and the files must agree, and one rank has to judge.
        plan = read_reward_plan(paths)
        number = _number(plan, state, position)
        was = None if recorded is None else recorded.get("reward", "")
        digest = _same(paths, plan.in_force(number, first), was, keep)
        # Later replacements will be made again at their steps, so their files must still be what was recorded.
        for switch in plan.switches[number:]:
            _same(paths, switch.reward, switch.digest, keep)
        return _Found(plan, digest)

    found = ranks.on_first("checking the reward", look, _Found)
    number = min(state.number, len(found.plan.switches))
    return found.plan, replace(
        state, spec=found.plan.in_force(number, first), digest=found.digest, number=number
    )


def _number(plan: RewardPlan, state: RewardState, position: Position) -> int:
    """Returns how many replacements the checkpoint contains."""
    # A checkpoint from another run brings that run's number; the reward that trained it is checked by its
    # digest.
    number = min(state.number, len(plan.switches))
    here = position.step
    # A replacement counts from the step at which it was made: none of the later ones can be in this checkpoint.
    too_early = any(switch.step > here for switch in plan.switches[:number])
    started = position.phase != "step_end"
    # One at this very step is still ahead as long as the step has not started.
    missed = any(switch.step < here or (switch.step == here and started) for switch in plan.switches[number:])
    if too_early or missed:
        raise DataError(
            "the checkpoint and the record of replaced rewards contradict each other",
            where=position,
            found=f"{state.number} replacements in the checkpoint",
            expected=f"{plan.at(here)}: replaced at the steps {[switch.step for switch in plan.switches]}",
            remedy="put back the RUN/rewards.json that belongs to it, or resume from another checkpoint",
        )
    return number


def _same(paths: RunPaths, reward: str, was: str | None, keep: Keep | None) -> str:
    found = digest_and_keep(paths, reward, keep)
    # Another reward of the same name would go on training silently, with other scores.
    spec = parse_reward(reward)
    tree = spec.name if spec is not None and spec.kind == "classifier" else None
    if was is not None and found != was and not (tree and is_recorded(paths.frozen, was, found, tree)):
        raise DataError(
            "the reward is not what the run was trained with",
            where=reward,
            found=found or "a rule, with no digest",
            expected=was or "a rule, with no digest",
            remedy="put the former one back (RUN/frozen or RUN/rewards has it by digest), and change a reward with "
            "verl-slurm update-reward --checkpoint RUN --new-model NEW",
        )
    return found

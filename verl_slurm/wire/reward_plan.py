"""Which reward is in force at which step: the record of a run whose reward was replaced, and how one asks for that.

`RUN/control/reward_request.json` is the wish of an operator (`verl-slurm update-reward`), the newest one only.
`RUN/rewards.json` is what became of it: one entry a replacement, with the step from which on it counts. The entry is
durable before anything is scored with the new reward, so a run that is interrupted at any moment and goes on from any
checkpoint replaces its reward at the same step again. Where there is no such file, nothing was ever replaced.
"""

import errno
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, PermissionRefused
from verl_slurm.base.files import private_dir, read_private, write_file
from verl_slurm.base.paths import RunPaths

__all__ = [
    "RewardPlan",
    "RewardRequest",
    "RewardSwitch",
    "ask_for_reward",
    "read_reward_plan",
    "read_reward_request",
    "write_reward_plan",
]

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Spec = Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
_MAX_SWITCHES = 4096


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replace the reward, at the next end of a step."""

    number: _Positive
    """Grows by one a request."""
    reward: _Spec
    """As `model.reward`, paths absolute."""
    warm_start_steps: _Count
    """For so many steps its scores are mapped to the scale of the former one's, less and less. 0: never."""
    asked_utc: str


class RewardSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replacement."""

    request: _Positive
    step: _Count
    """The first step (counted from 0) whose responses are scored with it."""
    reward: _Spec
    digest: str
    """Of the model or of the source; empty for a rule."""
    warm_start_steps: _Count
    replaced: str
    """The reward before."""
    recorded_utc: str


class RewardPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of rewards.json."""

    version: int = 1
    handled: _Count = 0
    """The newest request that was answered, by a switch or a refusal."""
    refused: str = ""
    """Why the newest one was refused; empty: it was not."""
    switches: Annotated[tuple[RewardSwitch, ...], msgspec.Meta(max_length=_MAX_SWITCHES)] = ()

    def at(self, step: int) -> int:
        """How many replacements count for what `step` (from 0) scores."""
        return sum(switch.step <= step for switch in self.switches)

    def in_force(self, number: int, first: str) -> str:
        """The reward after `number` replacements; `first`: the configuration's."""
        return self.switches[number - 1].reward if number else first


def read_reward_plan(paths: RunPaths) -> RewardPlan:
    """What was replaced so far.

    Raises:
        CheckpointCorrupt: the file is not what `write_reward_plan` writes.
        PermissionRefused: it is a link, or not ours alone: like a request, it names code to be run.
        OSError: the storage did not answer.

    Runs on rank 0.
    """
    try:
        plan = msgspec.json.decode(
            _read_ours(paths.reward_plan, "the record of replaced rewards"), type=RewardPlan
        )
    except FileNotFoundError:
        return RewardPlan()
    except UNREADABLE as error:
        raise _unreadable(paths, error) from error
    steps = [switch.step for switch in plan.switches]
    if plan.version != 1 or steps != sorted(set(steps)):
        raise _unreadable(paths, f"version {plan.version}, replacements at steps {steps}")
    return plan


def write_reward_plan(paths: RunPaths, plan: RewardPlan) -> None:
    """Replace the record, durably. Runs on rank 0 of the attempt that owns the run."""
    write_file(paths.reward_plan, msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")


def ask_for_reward(paths: RunPaths, reward: str, warm_start_steps: int) -> RewardRequest:
    """Write a wish down; a former one that nobody has answered yet is forgotten."""
    before = read_reward_request(paths)
    handled = read_reward_plan(paths).handled
    request = RewardRequest(
        number=max(handled, before.number if before else 0) + 1,
        reward=reward,
        warm_start_steps=warm_start_steps,
        asked_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    private_dir(paths.control)
    write_file(paths.reward_request, msgspec.json.encode(request))
    return request


def read_reward_request(paths: RunPaths) -> RewardRequest | None:
    """The newest wish, answered or not; None: there never was one, or what is there is none.

    Raises:
        PermissionRefused: the file is a link, or not ours alone: it names code to be run.
    """
    try:
        data = _read_ours(paths.reward_request, "a request for another reward")
        return msgspec.json.decode(data, type=RewardRequest)
    except FileNotFoundError:
        return None
    except UNREADABLE:
        return None


def _read_ours(path: Path, what: str) -> bytes:
    try:
        return read_private(path)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PermissionRefused(
            f"a link lies where {what} belongs",
            where=path,
            expected="a plain file of ours, mode 0600",
            remedy="remove the link",
        ) from error


def _unreadable(paths: RunPaths, found: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the record of replaced rewards cannot be read",
        where=paths.reward_plan,
        found=found,
        remedy="put the file back as it was: from which step on which reward counts is written nowhere else",
    )

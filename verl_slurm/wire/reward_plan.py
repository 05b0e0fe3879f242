"""Records which reward is in force at which step of a run whose reward was replaced, and the request for a replacement.

`RUN/control/reward_request.json` holds an operator's newest request (`verl-slurm update-reward`). `RUN/rewards.json`
holds the replacements: one entry each, with its first step. The entry is durable before the new reward scores anything.
So a run that is interrupted at any moment and resumes from any checkpoint replaces its reward at the same step again.
Without that file, no reward was ever replaced.
"""

from datetime import UTC, datetime
from typing import Annotated

import msgspec

from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt
from verl_slurm.base.files import private_dir, read_private, write_file
from verl_slurm.base.paths import RunPaths

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Spec = Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
_MAX_SWITCHES = 4096


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks to replace the reward at the next end of a step."""

    number: _Positive
    """Grows by one with each request."""
    reward: _Spec
    """As `model.reward`, paths absolute."""
    warm_start_steps: _Count
    """Number of steps over which its scores are mapped, less and less, to the scale of the former reward. 0: none."""
    asked_utc: str


class RewardSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records one replacement."""

    request: _Positive
    step: _Count
    """The first step (counted from 0) that is scored with it."""
    reward: _Spec
    digest: str
    """Digest of the model or of the source; empty for a rule."""
    warm_start_steps: _Count
    replaced: str
    """The former reward."""
    recorded_utc: str


class RewardPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the content of rewards.json."""

    version: int = 1
    handled: _Count = 0
    """Number of the newest request that was answered, by a switch or a refusal."""
    refused: str = ""
    """Reason why the newest request was refused; empty: it was not."""
    switches: Annotated[tuple[RewardSwitch, ...], msgspec.Meta(max_length=_MAX_SWITCHES)] = ()

    def at(self, step: int) -> int:
        """Returns how many replacements count for the scores of `step` (from 0)."""
        return sum(switch.step <= step for switch in self.switches)

    def in_force(self, number: int, first: str) -> str:
        """Returns the reward after `number` replacements; `first` is the configuration's."""
        return self.switches[number - 1].reward if number else first


def read_reward_plan(paths: RunPaths) -> RewardPlan:
    """Reads the replacements so far. Runs on rank 0.

    Raises CheckpointCorrupt: the file is not what `write_reward_plan` writes. PermissionRefused: it is a
    link, or not ours alone. OSError: the storage did not answer.
    """
    try:
        # Read as a secret is: like a request, it names code to be run.
        plan = msgspec.json.decode(read_private(paths.reward_plan), type=RewardPlan)
    except FileNotFoundError:
        return RewardPlan()
    except UNREADABLE as error:
        raise _unreadable(paths, error) from error
    steps = [switch.step for switch in plan.switches]
    # `at` counts entries: that needs one replacement for each step at most, in order.
    if plan.version != 1 or steps != sorted(set(steps)):
        raise _unreadable(paths, f"version {plan.version}, replacements at steps {steps}")
    return plan


def write_reward_plan(paths: RunPaths, plan: RewardPlan) -> None:
    """Replaces the record durably. Runs on rank 0 of the attempt that owns the run."""
    # Durable when it returns, and then the reward scores: the other way round, a run that is thrown back would score
    # the step with the former reward.
    write_file(paths.reward_plan, msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")


def ask_for_reward(paths: RunPaths, reward: str, warm_start_steps: int) -> RewardRequest:
    """Writes a request; a former one that is not answered yet is dropped."""
    before = read_reward_request(paths)
    handled = read_reward_plan(paths).handled
    request = RewardRequest(
        # Greater than both: a number that was handled is not looked at again, and the file of the request may be gone.
        number=max(handled, before.number if before else 0) + 1,
        reward=reward,
        warm_start_steps=warm_start_steps,
        asked_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    private_dir(paths.control, inside=paths.run)
    write_file(paths.reward_request, msgspec.json.encode(request))
    return request


def read_reward_request(paths: RunPaths) -> RewardRequest | None:
    """Returns the newest request, answered or not; None if there is none, or if the file holds none.

    Raises PermissionRefused: the file is a link, or not ours alone.
    """
    try:
        # Read as a secret is: whoever may write this file has code of theirs run.
        data = read_private(paths.reward_request)
        return msgspec.json.decode(data, type=RewardRequest)
    except FileNotFoundError:
        return None
    except UNREADABLE:
        return None


def _unreadable(paths: RunPaths, found: object) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        "the record of replaced rewards cannot be read",
        where=paths.reward_plan,
        found=found,
        remedy="put the file back as it was: it records from which step on which reward counts",
    )

"""Explains what verl can do with another number of ranks than the checkpoint's, which is little. Pure.

verl's FSDP shards can be read by as many ranks as wrote them, and no other number: with others verl looks for
`model_world_size_W_rank_0.pt` and finds none. Its own merger makes a Hugging Face model of the shards (`python -m
verl.model_merger merge`, verl 0.9.1), the weights alone, in bfloat16. The optimizer, the schedule, the generators and
the place in the data are lost.
"""

import shlex
from pathlib import Path

__all__ = ["merge_command", "way_out"]


def merge_command(step: Path, entry: str, target: str = "MODEL_DIR") -> str:
    """Returns the command that makes a model of `global_step_N`.

    Args:
        step: the directory `global_step_N`.
        entry: of verl's trainers; PPO's policy is in actor/.
    """
    local = step if entry == "sft" else step / "actor"
    words = ("--backend", "fsdp", "--local_dir", str(local), "--target_dir", target)
    return shlex.join(["python", "-m", "verl.model_merger", "merge", *words])


def way_out(step: Path, entry: str, world_size: int | None) -> str:
    """Returns the options of a user, for an error's remedy."""
    model = "model.path" if entry == "sft" else "actor_rollout_ref.model.path"
    as_before = f"keep {world_size} ranks (distributed.dp_size={world_size}), or " if world_size else ""
    return (
        f"{as_before}begin a new run from its weights alone (optimizer, schedule and place in the data are lost): "
        f"`{merge_command(step, entry)}`, then verl.{model}=MODEL_DIR"
    )

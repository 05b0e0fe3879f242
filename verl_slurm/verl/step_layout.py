"""Interprets the names in a `global_step_N` of verl, lists the missing ones, and says what other ranks can do with it.
Pure.

As verl 0.9.1 writes it (`utils/checkpoint/fsdp_checkpoint_manager.py`, `trainer/ppo/v1/trainer_base.py`,
`utils/checkpoint/checkpoint_handler.py`), with W ranks:

```
DIR/latest_checkpointed_iteration.txt       the tracker: the number of the newest step, as text
DIR/global_step_N/actor/                    PPO and its kin; the SFT trainer writes the same without actor/
      model_world_size_W_rank_R.pt          each rank's part, for R = 0 .. W-1: read back by the same W ranks only
      optim_world_size_W_rank_R.pt
      extra_state_world_size_W_rank_R.pt    learning-rate schedule and generators
      fsdp_config.json huggingface/         for verl's merger
DIR/global_step_N/critic/                   the same, where there is a critic
DIR/global_step_N/data.pt                   position of the data loader; SFT: data_D.pt for each data-parallel rank
DIR/global_step_N/transfer_queue/           asynchronous trainers: prompts in flight, as pickles
```

With another number of ranks verl finds no `model_world_size_W_rank_0.pt`; `verl.reshard` divides the shards anew.
verl's merger (`python -m verl.model_merger merge`) makes a Hugging Face model of the weights alone, in bfloat16.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_slurm.checkpoint.format.info import Problem

Entry = Literal["ppo", "sft", "other"]
"""The trainer of verl that wrote it; other: none whose layout is known here."""

_KINDS = ("model", "optim", "extra_state")
"""Files that verl saves and reads back by default (`checkpoint.save_contents`); a resume needs all three."""
_STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,9})", re.ASCII)
_SHARD = re.compile(
    r"(?:(actor|critic)/)?(model|optim|extra_state)_world_size_([1-9][0-9]{0,5})_rank_(0|[1-9][0-9]{0,5})\.pt",
    re.ASCII,
)
_DATA = re.compile(r"data_(0|[1-9][0-9]{0,5})\.pt", re.ASCII)
_FOREIGN = ("dist_ckpt/", ".distcp", "/.metadata")
"""Of Megatron, Automodel and torchtitan: torch's or Megatron's distributed checkpoints."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The contents of one `global_step_N`, judged by its names.

    Attributes:
        world_size: ranks that wrote it, and the only number that verl reads it with; None: no shard tells it.
        roles: the models with shards: ("actor", "critic"), ("",) of SFT.
        num_data: data loader states: 1 of PPO, one per data-parallel rank of SFT.
        problems: missing or contradictory files; paths relative to the step's directory.
    """

    entry: Entry
    world_size: int | None
    roles: tuple[str, ...]
    num_data: int
    problems: tuple[Problem, ...]


def step_of(name: str) -> int | None:
    """Returns the N of `global_step_N`, spelt as verl spells it; None: another name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def shard_of(path: str) -> int | None:
    """Returns the number of ranks that a file of a step is a shard for; None: it is no shard."""
    match = _SHARD.fullmatch(path)
    return None if match is None else int(match[3])


def is_distributed(names: Collection[str]) -> bool:
    """Returns whether Megatron, Automodel or torchtitan wrote a step."""
    return any(word in name for name in names for word in _FOREIGN)


def read_layout(names: Collection[str]) -> StepLayout:
    """Sorts the files of one step into shards, and lists the missing ones. `names`: relative, with `/`."""
    shards: dict[str, dict[int, set[tuple[str, int]]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if match := _SHARD.fullmatch(name):
            # By number of ranks: a directory may hold the shards of two saves.
            shards[match[1] or ""][int(match[3])].add((match[2], int(match[4])))
    data = {int(match[1]) for name in names if (match := _DATA.fullmatch(name))}
    # SFT writes its shards without a folder for the model; a PPO step may have lost its shards and kept its data.pt.
    entry: Entry = "sft" if "" in shards else "ppo" if shards or "data.pt" in names else "other"
    problems: list[Problem] = []
    if entry == "other":
        return StepLayout(
            entry=entry, world_size=None, roles=(), num_data=0, problems=(_nothing_known(names),)
        )
    # verl removes the actor's directory and leaves the rest of a step where it lets older checkpoints go.
    if entry == "ppo" and "actor" not in shards:
        what = "no shard in it: verl removed it (trainer.max_actor_ckpt_to_keep), or never finished it"
        problems.append(Problem(path="actor", what=what))
    sizes: set[int] = set()
    # Each model by itself first, then across: verl reads actor and critic with the same ranks.
    for role in sorted(shards):
        sizes |= set(shards[role])
        problems += _missing_shards(role, shards[role])
    # Where one model alone has two numbers, `_missing_shards` has said so already.
    if len(sizes) > 1 and all(len(of_role) == 1 for of_role in shards.values()):
        problems.append(Problem(path=".", what=f"its models were saved by {_listed(sizes)} ranks"))
    world_size = next(iter(sizes)) if len(sizes) == 1 else None
    if entry == "ppo" and "data.pt" not in names:
        problems.append(
            Problem(path="data.pt", what="missing: verl would start the data over from its beginning")
        )
    if entry == "sft":
        problems += _missing_data(data, world_size)
    return StepLayout(
        entry=entry,
        world_size=world_size,
        roles=tuple(sorted(shards)),
        num_data=len(data) if entry == "sft" else int("data.pt" in names),
        problems=tuple(problems),
    )


def missing_beside(layout: StepLayout, others: Iterable[tuple[str, StepLayout]]) -> list[Problem]:
    """Lists files that other steps of the same trainer and number of ranks have and this one lacks.

    Args:
        others: (name, layout) of the directory's other steps.
    """
    # A save that was cut short may lack a whole model, or the last rank's data, and nothing in it says so.
    alike = [(name, o) for name, o in others if (o.entry, o.world_size) == (layout.entry, layout.world_size)]
    problems = []
    # Without the actor, whose absence `read_layout` reports by itself.
    for role in sorted({role for _, other in alike for role in other.roles} - set(layout.roles) - {"actor"}):
        name = next(name for name, other in alike if role in other.roles)
        problems.append(Problem(path=role or ".", what=f"no shard of this model, {name} has it"))
    more = max(alike, key=lambda one: one[1].num_data, default=None)
    # Fewer than one for each rank is right with ulysses, so the neighbours have to tell.
    if more is not None and layout.entry == "sft" and 0 < layout.num_data < more[1].num_data:
        what = f"{layout.num_data} data loader states, {more[0]} has {more[1].num_data}"
        problems.append(Problem(path=f"data_{layout.num_data}.pt", what=what))
    return problems


def _nothing_known(names: Collection[str]) -> Problem:
    if not names:
        return Problem(path=".", what="empty: a save that had only begun")
    # Beyond us is not damaged: such a step is not called broken by a reader that cannot judge it.
    if is_distributed(names):
        what = (
            "a distributed checkpoint (Megatron, torchtitan): only those of verl's FSDP engine can be judged"
        )
        return Problem(path=".", what=what, kind="version")
    return Problem(path=".", what="no shard of verl's FSDP engine in it")


def _missing_shards(role: str, by_size: dict[int, set[tuple[str, int]]]) -> list[Problem]:
    prefix = f"{role}/" if role else ""
    # verl loads those that fit its own number of ranks, and says nothing of the others.
    if len(by_size) > 1:
        what = f"shards of {_listed(by_size)} ranks: saved twice into one directory, and nothing says which counts"
        return [Problem(path=role or ".", what=what)]
    ((size, there),) = by_size.items()
    problems = []
    for kind in _KINDS:
        missing = sorted(set(range(size)) - {rank for what, rank in there if what == kind})
        problems += [
            Problem(path=f"{prefix}{kind}_world_size_{size}_rank_{rank}.pt", what="missing")
            for rank in missing[:_SHOWN]
        ]
        # A kind without any shard was never saved: a setting of the user's, and no damage.
        if len(missing) == size:
            what = f"no {kind} shard at all: saved with a checkpoint.save_contents that no resume can use"
            problems.append(Problem(path=role or ".", what=what))
        elif len(missing) > _SHOWN:
            problems.append(
                Problem(path=role or ".", what=f"{len(missing)} of {size} {kind} shards are missing")
            )
    strays = sorted(rank for _, rank in there if rank >= size)
    if strays:
        problems.append(Problem(path=role or ".", what=f"a shard of rank {strays[0]} of {size}"))
    return problems


def _missing_data(data: set[int], world_size: int | None) -> list[Problem]:
    """Lists missing states: W are wanted, or fewer where sequences are divided (ulysses), without a gap."""
    # By the largest number: a rank that is missing in the middle shows as a gap, one at the end by the division.
    count = max(data, default=-1) + 1
    missing = sorted(set(range(count)) - data) or ([0] if not data else [])
    if not missing and world_size is not None and world_size % count:
        missing = [count]
    what = "missing: verl would start this rank's data over from its beginning"
    return [Problem(path=f"data_{rank}.pt", what=what) for rank in missing[:_SHOWN]]


def _listed(sizes: Iterable[int]) -> str:
    return " and ".join(str(size) for size in sorted(sizes))


def merge_command(step: Path, entry: str, backend: str = "fsdp") -> str:
    """Returns the command that makes a model, MODEL_DIR, of a step that `backend` (fsdp, megatron) saved."""
    local = step if entry == "sft" else step / "actor"
    words = ("--backend", backend, "--local_dir", str(local), "--target_dir", "MODEL_DIR")
    return shlex.join(["python", "-m", "verl.model_merger", "merge", *words])


def way_out(step: Path, entry: str, world_size: int | None) -> str:
    """Returns the options of a user, for an error's remedy."""
    model = "model.path" if entry == "sft" else "actor_rollout_ref.model.path"
    as_before = f"keep {world_size} ranks (distributed.dp_size={world_size}), or " if world_size else ""
    return (
        f"{as_before}begin a new run from its weights alone (optimizer, schedule and place in the data are lost): "
        f"`{merge_command(step, entry)}`, then verl.{model}=MODEL_DIR"
    )

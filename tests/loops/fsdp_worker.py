"""accelerate's FSDP2, one rank of two: `fsdp_worker.py DIR huggingface|grpo|loop`, for the Hugging Face Trainer, for
TRL's GRPOTrainer, and for a loop that calls accelerate itself.

Three lives one after another: of a run that is not disturbed (DIR/straight), of one that is stopped (DIR/stopped), and
the next of that one. accelerate 1.15 leaves FSDP out on CPUs, without a word, and trains with DDP. All else of it
works there, so it is told here that it has it.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import verl_slurm
from tests.fakes.daemon import Daemon
from tests.loops.frames_kit import stop
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.paths import RunPaths
from verl_slurm.loops.huggingface import VerlSlurmCallback
from verl_slurm.loops.session import Session
from verl_slurm.save.ranks.collective import Collective

Sampled = list[tuple[str, str]]
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
_as_it_is = accelerate.state.AcceleratorState.__init__


def _with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    _as_it_is(self, *args, fsdp_plugin=fsdp_plugin, **options)
    self.fsdp_plugin = fsdp_plugin or getattr(self, "fsdp_plugin", None)
    # At each call: it is a look at what all share, and takes the type from the process group again.
    if self.fsdp_plugin is not None:
        self.distributed_type = accelerate.state.DistributedType.FSDP


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = (index + torch.arange(8)) % 16
        return {"input_ids": numbers, "labels": numbers}


def hugging_face(session: Session) -> tuple[Trainer, Sampled]:
    set_seed(3)
    shape = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    args = TrainingArguments(
        str(session.paths.root / "out"),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **SHARDED,
    )
    return Trainer(GPT2LMHeadModel(shape), args, train_dataset=Counting()), []


def grpo(session: Session) -> tuple[Trainer, Sampled]:
    from tests.loops.trl_kit import online

    life = online(session, steps_per_generation=4, max_steps=8, **SHARDED)
    return life.trainer, life.sampled


class Killed(Exception):
    pass


def loop(run_dir: Path, *, killed: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    with verl_slurm.run(run_dir=run_dir, save_every=2, model=model, optimizer=optimizer) as run:
        for step in run.steps(9):
            if killed and step == 5:
                raise Killed
            mine = torch.Generator().manual_seed(2 * step + accelerator.process_index)
            x = torch.randn(8, 4, generator=mine)
            accelerator.backward(((model(x) - x) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return _whole(model)


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    return [parameter.full_tensor() for parameter in parameters]


def live(
    root: Path, daemon: Daemon, ranks: Collective, make: Callable[[Session], tuple[Trainer, Sampled]]
) -> tuple[list[torch.Tensor], Sampled]:
    """Returns the trained weights (empty: it was stopped), and what was sampled."""
    paths = RunPaths(root)
    taken = ranks.on_first("", lambda: take_attempt(paths, job_id="1", restart=0).attempt, int)
    newest = sorted(paths.checkpoints.glob("step_*"))[-1:]
    session = Session(
        daemon,
        rank=ranks.rank,
        world_size=2,
        paths=paths,
        attempt=taken,
        resume=newest[0] if newest else None,
    )
    trainer, sampled = make(session)
    try:
        VerlSlurmCallback(session).train(trainer)
    except SystemExit as leave:
        if leave.code:
            raise
        return [], sampled
    return _whole(trainer.model_wrapped), sampled


def main() -> None:
    accelerate.state.AcceleratorState.__init__ = _with_fsdp
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    root, which = Path(sys.argv[1]), sys.argv[2]
    if which == "loop":
        weights = loop(root / "straight")
        with suppress(Killed):
            loop(root / "stopped", killed=True)
        resumed = loop(root / "stopped")
    else:
        ranks = Collective(dist.new_group(backend="gloo"))
        make = {"huggingface": hugging_face, "grpo": grpo}[which]
        weights, sampled = live(root / "straight", Daemon(), ranks, make)
        stopped, before = live(root / "stopped", Daemon({3: stop()}), ranks, make)
        assert not stopped
        resumed, after = live(root / "stopped", Daemon(), ranks, make)
        assert before + after == sampled
    assert weights
    assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

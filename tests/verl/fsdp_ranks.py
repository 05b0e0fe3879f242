"""verl's own FSDP checkpoint manager on CPU ranks that are forked from this process, which has imported torch and verl.

FSDP1 wants an accelerator. It takes the CPU if it is named as the device, and if nothing has to be sent at its start.
"""

import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tests.verl.cpu_platform  # noqa: F401 - before verl is imported

with warnings.catch_warnings():
    # About engines that are not installed. Here and not in the ranks: each would take ten seconds for it.
    warnings.simplefilter("ignore")
    import transformers
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict, get_fsdp_wrap_policy
    from verl.workers.engine.fsdp.utils import create_device_mesh, get_sharding_strategy


LAYERS = 2
_VOCABULARY = 263  # of no number of ranks a multiple


class Training:
    """A tiny model, its optimizer and its schedule, as verl wraps them, in one rank."""

    def __init__(self, strategy: str, *, tied: bool = False, original: bool = False) -> None:
        torch.manual_seed(0)
        shape = transformers.Qwen2Config(
            vocab_size=_VOCABULARY,
            hidden_size=20,
            intermediate_size=33,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
        mesh = create_device_mesh(dist.get_world_size(), -1)
        self.model: Any = transformers.Qwen2ForCausalLM(shape)
        wrap = self._wrapped_2 if strategy == "fsdp2" else self._wrapped_1
        self.model = wrap(mesh, original)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (step + 1))
        self.manager = FSDPCheckpointManager(self.model, self.optimizer, self.schedule)

    def _wrapped_1(self, mesh: Any, original: bool) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(
            self.model,
            auto_wrap_policy=get_fsdp_wrap_policy(self.model, {}),
            device_id=torch.device("cpu"),
            sharding_strategy=get_sharding_strategy(mesh),
            device_mesh=mesh,
            use_orig_params=original,
        )

    def _wrapped_2(self, mesh: Any, original: bool) -> Any:
        whole = self.model.state_dict()
        apply_fsdp2(self.model, {"mesh": mesh, "reshard_after_forward": True}, {})
        fsdp2_load_full_state_dict(self.model, whole, mesh, None)
        return self.model

    def train(self, steps: int) -> None:
        draw = torch.Generator().manual_seed(5 + dist.get_rank())
        for _ in range(steps):
            ids = torch.randint(0, _VOCABULARY, (2, 8), generator=draw)
            loss = self.model(input_ids=ids, labels=ids).loss
            assert torch.isfinite(loss)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def save(self, directory: Path) -> None:
        self.manager.save_checkpoint(str(directory), global_step=1)

    def load(self, directory: Path) -> None:
        self.manager.load_checkpoint(str(directory))

    def numbers(self) -> dict[str, Any]:
        """Every tensor put together by torch's own collectives, and the schedule."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        found: dict[str, Any] = {}
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model):
                found |= {name: value.clone() for name, value in self.model.named_parameters()}
            states = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)["state"]
        else:
            found |= {name: value.full_tensor() for name, value in self.model.state_dict().items()}
            states = self.optimizer.state_dict()["state"]
        for name, state in states.items():
            found |= {f"{name}.{key}": _whole(value) for key, value in state.items()}
        schedule = self.schedule.state_dict()
        return found | {"schedule": {key: value for key, value in schedule.items() if key != "lr_lambdas"}}


def _whole(value: Any) -> Any:
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    # FSDP1 gives the moments of a parameter in ShardedTensors or whole; `optim_state_dict` was asked for whole ones.
    return value.clone() if isinstance(value, torch.Tensor) else value


def on_ranks(count: int, work: Callable[[], object]) -> None:
    """Runs `work` in `count` forked processes, the ranks of one gloo group; raises if one of them fails."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            _be_rank(rank, count, port, work)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * count, f"ranks ended with {codes}"


def _be_rank(rank: int, count: int, port: int, work: Callable[[], object]) -> None:
    code = 1
    try:
        # pytest's make errors of torch's own.
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
        dist.init_process_group("gloo", rank=rank, world_size=count)
        work()
        dist.barrier()
        code = 0
    except BaseException:  # noqa: BLE001 - the root of this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No test of pytest's goes on in the child.
        os._exit(code)

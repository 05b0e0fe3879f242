"""What is saved: an FSDP2-sharded Qwen2 and its AdamW state on CPU ranks (gloo), with bytes known by seed.

Kept lean on purpose: no second copy of the state lies in the process, because a forking peer pays for every
page its parent has. A loaded state is compared by the SHA-256 of each tensor's bytes; it is put back without
a copy, because the update in place (a change of sign) undoes itself.
"""

import hashlib
import warnings
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.tensors import model_tensors, optimizer_tensors

# (hidden size, vocabulary, parameters of the embedding, parameters of one layer): the largest whose embedding
# leaves most of the wanted size to the layers.
_SHAPES = (
    (768, 16384, 12_600_000, 6_300_000),
    (384, 8192, 3_150_000, 1_720_000),
    (128, 2048, 262_000, 230_000),
)
_BYTES_PER_PARAMETER = 12
"""float32: the weight and AdamW's two moments."""


def start_ranks(store: Path, rank: int, ranks: int) -> Collective:
    """Join the process group; a rank that is alone for 5 minutes gives up."""
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    return Collective(dist.group.WORLD)


def local(tensor: Tensor) -> Tensor:
    """This rank's part; the memory itself, not a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class _Home:
    """The tensors the state lives in; loaders that put others in their place are undone."""

    state: dict[nn.Parameter, dict[str, Tensor]]


class Workload:
    """One rank's model and optimizer.

    Args:
        gib: size of weights and moments over all ranks, about.
        filled: False leaves the optimizer without state, as in a process that is about to load.
    """

    def __init__(self, gib: float, ranks: Collective, *, filled: bool = True) -> None:
        self.ranks = ranks
        self.model = _model(gib, ranks.world_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if filled:
            self.empty_state()
            self.home = _Home({p: dict(self.optimizer.state[p]) for p in self.model.parameters()})
            self.fill()
            self._expected = self.digests()
        self._odd = False

    def empty_state(self) -> None:
        """Give AdamW its state tensors without touching their memory: a load fills them."""
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.empty_like(parameter),
                "exp_avg_sq": torch.empty_like(parameter),
            }

    def fill(self) -> None:
        """The same bytes in every process of this rank."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                seed = zlib.crc32(f"{self.ranks.rank} {name}".encode())
                if name.endswith(".step"):
                    local(tensor).fill_(7.0)
                else:
                    local(tensor).normal_(std=0.02, generator=torch.Generator().manual_seed(seed))

    def domains(self) -> dict[str, dict[str, Tensor]]:
        """As this project's trainer hands them to a save."""
        return {
            "actor": model_tensors(self.model),
            "optimizer": optimizer_tensors({"actor": (self.model, self.optimizer)}),
        }

    def tensors(self) -> dict[str, Tensor]:
        """All of it by one name each; sharded ones are DTensors."""
        return {f"{domain}/{name}": t for domain, part in self.domains().items() for name, t in part.items()}

    def locals(self) -> dict[str, Tensor]:
        """This rank's part of each."""
        return {name: local(tensor).detach() for name, tensor in self.tensors().items()}

    @property
    def num_bytes(self) -> int:
        """On this rank."""
        return sum(tensor.nbytes for tensor in self.locals().values())

    def digests(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(t.reshape(-1).numpy().data).hexdigest() for name, t in self.locals().items()
        }

    def update(self) -> None:
        """Read and write every byte of the state in place, as an optimizer does; twice is not at all."""
        self._odd = not self._odd
        with torch.no_grad():
            torch._foreach_neg_(list(self.locals().values()))

    def undo(self) -> None:
        """Take the updates back, where nothing but updates happened."""
        if self._odd:
            self.update()

    def matches(self) -> bool:
        """Is the state, byte for byte, the one that was saved (on all ranks)?"""
        same = self.digests() == self._expected
        return self.ranks.max([int(not same)])[0] == 0

    def restore(self) -> None:
        """After a check: the live tensors are the ones from the beginning, with what they held then."""
        current = self.locals()
        for parameter, state in self.home.state.items():
            self.optimizer.state[parameter] = dict(state)
        with torch.no_grad():
            for name, tensor in self.locals().items():
                if tensor.data_ptr() != current[name].data_ptr():
                    tensor.copy_(current[name])
        if self.digests() != self._expected:
            self.update()  # an odd number of them, and no load
        if self.digests() != self._expected:
            self.fill()  # a peer lost something: the others shall not suffer
        self._odd = False


def _model(gib: float, ranks: int) -> nn.Module:
    parameters = gib * 2**30 / _BYTES_PER_PARAMETER
    hidden, vocabulary, embedding, layer = next((s for s in _SHAPES if s[2] < parameters / 3), _SHAPES[-1])
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=max(1, round((parameters - embedding) / layer)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: nn.Module = Qwen2ForCausalLM(config).float()  # type: ignore[no-untyped-call]
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

"""Sets up where a rank runs, before anything is loaded: number, device, threads, and the other ranks.

`check_product` and `check_sum` compute known results of small integers: exact in float32 in any order, and
with TF32. `write_on_request` writes torch's Flight Recorder as JSON when the agent asks through a pipe.

A wrong configuration is refused permanently. A node that lost a GPU which the run had before is a crash
instead: a later start, or another node, may fix it.
"""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from verl_slurm.base.errors import ConfigError, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checks import WrongProduct
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.trainer import determinism
from verl_slurm.trainer.state.orchestration import began_on_gpus
from verl_slurm.wire.hang_records import DUMP_VARIABLE, pipe_of

_PERIOD = 7
_BLOCKS = {"cpu": 64, "cuda": 585}
"""Width of the matrices in periods: 448, and 4095, which occupies all of a GPU's processors."""
_ROUNDS = {"cpu": 1, "cuda": 8}
_SUMMED = 1 << 20
_DUMPS = {"_dump_fr_trace_json": "gloo", "_dump_nccl_trace_json": "nccl"}
"""Torch's functions, by what a build of torch has (2.13), and the names of their files."""
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's rank, from torchrun's environment."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environ(cls, environ: "os._Environ[str] | dict[str, str]") -> "Place":
        """Reads torchrun's RANK, LOCAL_RANK and WORLD_SIZE. Raises `ConfigError` if they are not set."""
        try:
            rank, local, world = (int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "the trainer is not told its rank",
                found=error,
                expected="RANK, LOCAL_RANK and WORLD_SIZE",
                remedy="start it with `verl-slurm submit`, or with torchrun",
            ) from error
        return cls(rank=rank, local_rank=local, world_size=world)


@contextmanager
def process_group(config: RunConfig, place: Place) -> Iterator[tuple[torch.device, Collective]]:
    """Sets up device, threads and determinism, and joins the other ranks.

    Raises:
        ConfigError: another world size than the configuration's, or an operator that has no deterministic kernel.
        ConfigError, DeviceLost: `choose_device`.
    """
    expected = config.distributed.world_size
    # Before any process group: ranks that wait for one that nobody started would wait until a timeout.
    if place.world_size != expected:
        raise ConfigError(
            "another number of ranks was started than the run is configured for",
            where="distributed",
            found=place.world_size,
            expected=expected,
            remedy="start dp_size * tp_size * pp_size ranks",
        )
    device = choose_device(config, place.local_rank)
    # The critic's logits are a view of its head's output, and no code changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if config.distributed.threads_per_rank:
        # Sums of a CPU kernel are split by threads, so their number is a part of what makes two runs the same bits.
        torch.set_num_threads(config.distributed.threads_per_rank)
    determinism.settle(device, deterministic=config.deterministic)
    if device.type == "cuda":
        # Before NCCL and the first allocation: both would take GPU 0 on every rank.
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # from here on its generator is part of the state (save.ranks.rng)
        # gloo beside NCCL: agreements, records and saves go over the CPU (`Collective`).
        dist.init_process_group("cpu:gloo,cuda:nccl")
        group = dist.new_group(backend="gloo")
    else:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    try:
        with determinism.explaining():
            yield device, Collective(group)
    finally:
        # Without this the other ranks would take the end of this one for a network failure.
        dist.destroy_process_group()


class DeviceLost(VerlSlurmError):
    """This run has worked on GPUs, and this rank has none now: a crash that another start may fix."""

    exit_code = ExitCode.INTERNAL


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """Chooses the device of a rank, by its number on this node.

    Raises:
        ConfigError: a GPU is asked for, and this node has none or too few for its ranks.
        DeviceLost: the same, where there was one before.
    """
    wanted = config.distributed.device
    if wanted == "cpu":
        return torch.device("cpu")
    available = torch.cuda.is_available()
    # A run that had GPUs never falls back: on a CPU it would be a thousand times slower, in silence.
    if wanted == "auto" and not available and not _had_gpus(config):
        return torch.device("cpu")
    if available and local_rank < torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    if _had_gpus(config):
        raise DeviceLost(
            "this run began on GPUs, and there is none for this rank here",
            where="distributed.device",
            found=f"local rank {local_rank}, {_what_is_there()}",
            remedy="see nvidia-smi on this node; to go on without GPUs on purpose, set it to cpu",
        )
    if available:
        # NCCL would refuse two ranks on one GPU with a message that names neither.
        raise ConfigError(
            "this node has fewer GPUs than ranks",
            where="distributed.device",
            found=f"local rank {local_rank}, {_what_is_there()}",
            expected="a GPU for each rank of a node",
            remedy="set slurm.gpus_per_node, distributed.nodes or the shape, so that they fit",
        )
    raise ConfigError(
        "there is no GPU that torch could use here",
        where="distributed.device",
        found=f"cuda, {_what_is_there()}",
        remedy="ask Slurm for GPUs (slurm.gpus_per_node), install torch for CUDA, or set it to cpu",
    )


def _had_gpus(config: RunConfig) -> bool:
    return began_on_gpus(RunPaths(config.run_dir))


def _what_is_there() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__}, which is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"{torch.cuda.device_count()} GPUs for torch {torch.__version__}{hidden}"


class WrongSum(VerlSlurmError):
    """A sum over all ranks came out wrong here. Any of them, or the network, may be the cause."""

    exit_code = ExitCode.INTERNAL


def check_product(device: torch.device) -> None:
    """Multiplies two matrices on `device`; raises `WrongProduct` if the result is not the known one."""
    rows = torch.arange(_PERIOD, dtype=torch.float32)
    # Values from -3 to 3. Both matrices repeat a small block, so the product repeats the blocks' product.
    left = (rows[:, None] * 2 + rows[None, :] * 3) % _PERIOD - 3
    right = (rows[:, None] * 4 + rows[None, :]) % _PERIOD - 3
    blocks = _BLOCKS[device.type]
    expected = (left @ right * blocks).to(device).repeat(blocks, blocks)
    a, b = (block.to(device).repeat(blocks, blocks) for block in (left, right))
    for _ in range(_ROUNDS[device.type]):
        wrong = int((a @ b != expected).sum())
        if wrong:
            raise WrongProduct(
                "a product of matrices is wrong",
                where=device,
                found=f"{wrong} of {expected.numel()} values differ from the known result",
                remedy="the node is left; tell those who run it",
            )


def check_sum(device: torch.device, rank: int, world_size: int) -> None:
    """Sums over all ranks, on their default group; raises `WrongSum` on a wrong result. Collective."""
    places = torch.arange(_SUMMED, dtype=torch.float32, device=device) % _PERIOD
    summed = places * (rank + 1)
    dist.all_reduce(summed)
    wrong = int((summed != places * (world_size * (world_size + 1) // 2)).sum())
    if wrong:
        raise WrongSum(
            "a sum over all ranks is wrong",
            where=device,
            found=f"{wrong} of {_SUMMED} values differ from the known result",
        )


def write_on_request(control: Path, rank: int) -> None:
    """Starts the thread that answers; does nothing without a pipe or a place for the files."""
    prefix = os.environ.get(DUMP_VARIABLE)
    if not prefix:
        return
    with suppress(OSError):
        pipe = pipe_of(control, rank)
        os.mkfifo(pipe, 0o600)
        # For both directions: with a writer of its own, a read waits and never meets an end.
        fd = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        # A thread answers, since the main thread waits in a collective.
        threading.Thread(target=_serve, args=(fd, prefix, rank), name="flight", daemon=True).start()


def _serve(fd: int, prefix: str, rank: int) -> None:
    while os.read(fd, 1):
        for function, backend in _DUMPS.items():
            # NCCL's own answer is a pickle, which is never read.
            dump = getattr(torch._C._distributed_c10d, function, None)
            # It informs; nothing that fails here may reach the training.
            with suppress(Exception):
                data = bytes(dump()) if dump is not None else b""
                if 0 < len(data) <= _MOST_BYTES:
                    write_file(Path(f"{prefix}{rank}.{backend}.json"), data, durable=False)

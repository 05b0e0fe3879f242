"""How full the GPU is, as a rank says it: looked at rarely, and never in the way."""

from pathlib import Path

import pytest
import torch

from tests.fakes.daemon import Daemon
from verl_slurm.loops.session import Session
from verl_slurm.trainer.measures.stopwatch import GpuMemory
from verl_slurm.trainer.reporter import Reporter
from verl_slurm.trainer.state.position import Position
from verl_slurm.wire.messages import Progress

pytestmark = pytest.mark.torch
GPU = torch.device("cuda", 0)


def test_it_is_what_is_in_use_of_all_there_is_and_looked_at_once_a_second() -> None:
    now, free = [100.0], [60]
    looks: list[torch.device] = []

    def look(device: torch.device) -> tuple[int, int]:
        looks.append(device)
        return free[0], 80

    memory = GpuMemory(GPU, clock=lambda: now[0], look=look)
    assert memory.percent() == 25.0
    free[0], now[0] = 4, 100.9
    assert memory.percent() == 25.0
    now[0] = 101.0
    assert memory.percent() == 95.0
    assert looks == [GPU, GPU]


def test_a_rank_without_a_gpu_says_nothing_of_one() -> None:
    def look(device: torch.device) -> tuple[int, int]:
        raise AssertionError("there is none")

    assert GpuMemory(torch.device("cpu"), look=look).percent() is None


def test_a_driver_that_fails_stops_no_training() -> None:
    def look(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    assert GpuMemory(GPU, look=look).percent() is None


def test_every_safe_point_carries_it(tmp_path: Path) -> None:
    daemon = Daemon()
    session = Session(daemon, rank=1, world_size=2)
    reporter = Reporter(session, total_steps=2, tensorboard=tmp_path, first_step=0, gpu_memory=lambda: 91.5)
    reporter.at(Position(1, "generate", 2), new_rollouts=4)
    (message,) = daemon.told
    assert isinstance(message, Progress)
    assert message.gpu_memory_percent == 91.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_gpu_it_sees_what_is_allocated() -> None:
    times = iter(range(0, 100, 10))
    memory = GpuMemory(torch.device("cuda"), clock=lambda: float(next(times)))
    before = memory.percent()
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.empty(total // 4, dtype=torch.uint8, device="cuda")
    after = memory.percent()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(25.0, abs=1.0)
    del held

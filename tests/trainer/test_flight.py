"""Torch's Flight Recorder, asked for while a rank waits in a collective that no other rank comes to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_slurm.wire.hang_records import flight_environment, request_flights

pytestmark = [pytest.mark.torch, pytest.mark.slow]

# Two ranks; the second one never comes to the second sum.
RANK = """
import datetime, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from verl_slurm.trainer.place import write_on_request
rank, store, control, backend = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
device = f"cuda:{rank}" if backend == "nccl" else "cpu"
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
write_on_request(control, rank)
dist.all_reduce(torch.ones(3, device=device))
print("ready", flush=True)
if rank:
    threading.Event().wait()
dist.all_reduce(torch.ones(7, device=device))
torch.cuda.synchronize() if backend == "nccl" else None
"""


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_waits_in_a_collective_says_which_one(tmp_path: Path, backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NOT RUN: NCCL needs two GPUs")
    logs, control = tmp_path / "rank_", tmp_path / "control"
    control.mkdir(mode=0o700)
    environ = {**os.environ, **flight_environment(logs, control, 100)}
    words = [str(tmp_path / "store"), str(control), backend]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *words], env=environ, stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        entries: list[dict[str, object]] = []
        # The first rank may not have entered its last sum yet: then it is asked again.
        while not any(entry["input_sizes"] == [[7]] for entry in entries):
            assert request_flights(control) >= 2
            for path in tmp_path.glob(f"rank_0.{backend}.json"):
                entries = json.loads(path.read_bytes())["entries"]
        waits = entries[-1]
        assert (waits["profiling_name"], waits["collective_seq_id"]) == (f"{backend}:all_reduce", 2)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()


def test_without_ranks_that_listen_a_request_waits_for_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flight_0.pipe")
    (tmp_path / "nccl_1.pipe").symlink_to(tmp_path / "elsewhere")
    assert request_flights(tmp_path) == 0
    assert not (tmp_path / "elsewhere").exists()

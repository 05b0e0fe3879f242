"""How long a rollout engine of vLLM takes to be there again after a restart in place, beside vLLM's own warm start.

    .venv-vllm/bin/python benchmarks/engine_start.py [--rounds 3] [--json FILE]

On a CPU, with a tiny model, so that starting is all there is to it. Two engines on two cores each time:

* vllm: two new processes make `vllm.LLM` with our arguments; from their start to the later one's engine. vLLM's caches
  on disk are warm: one round goes before;
* cold, standby: a run of two ranks, each with its engine, loses a rank to SIGKILL; from the kill to the first safe
  point of both. That also counts the end of the other rank, the model, its optimizer, and the checkpoint.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.restart_in_place import ours
from benchmarks.save.machine import environment
from tests.processes import python_path
from verl_slurm.base.files import private_dir
from verl_slurm.trainer.quickstart.tiny_model import build_model

_SETTINGS = ("rollout.engine=vllm", "rollout.max_new_tokens=4")
_PEER = """
import os, sys
from pathlib import Path
import torch
from verl_slurm.config.load import load_own
from verl_slurm.trainer.rollout import vllm_rollout as ours
os.environ.update(ours._ENVIRONMENT | ours._GENTLE_ENVIRONMENT)
torch.set_num_threads(1)
from vllm import LLM
model = Path(sys.argv[1])
LLM(str(model), **ours._arguments(load_own(Path(sys.argv[2])), model, torch.device("cpu")))
print("ready", flush=True)
os._exit(0)
"""


def vllm(model: Path, config: Path) -> float:
    """Seconds until both of two new engines are ready."""
    argv = [sys.executable, "-c", _PEER, str(model), str(config)]
    environ = os.environ | python_path() | {"OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    both = [subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        assert one.stdout is not None
        while one.stdout.readline().strip() != "ready":
            if one.poll() not in (None, 0):
                raise RuntimeError("vLLM did not start")
    took = time.monotonic() - began
    for one in both:
        one.communicate()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = environment([Path(tempfile.gettempdir())])
    with tempfile.TemporaryDirectory(prefix="vs-engine-") as name:
        root = private_dir(Path(name))
        model = build_model(private_dir(root / "models") / "wide", head_dim=32)
        warm, memory = ours(model, root / "standby", options.rounds, standby=True, more=_SETTINGS)
        print("standby", [round(one, 2) for one in warm], flush=True)
        cold, _ = ours(model, root / "cold", options.rounds, standby=False, more=_SETTINGS)
        print("cold   ", [round(one, 2) for one in cold], flush=True)
        peer = [vllm(model, root / "cold/run.yaml") for _ in range(options.rounds + 1)][1:]
        print("vllm   ", [round(one, 2) for one in peer], flush=True)
    ratio = statistics.median(warm) / statistics.median(peer)
    print(f"standby / vllm: {ratio:.2f}")
    print(f"memory of a rank that stands by: {statistics.median(memory) / 1e6:.0f} MB (PSS)")
    if options.json:
        found = {"vllm_s": peer, "cold_s": cold, "standby_s": warm, "pss": memory}
        found |= {"cpu": machine.cpu, "cores": machine.cores}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.gpu`: figures of this machine's GPU, or of its CPU where there is none, and it says which.

Step time in float32 and bfloat16; an emergency save among the updates of a step, the resume from it, and whether the
end is bit for bit the undisturbed one; the stall of a save by size, the first one's too; the time of a sampled token.
"""

import argparse
import os
import re
import shutil
import socket
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import msgspec
import torch

from benchmarks.gpu.page import page
from benchmarks.gpu.records import Result, RunFigures, SamplingFigures, SaveFigures, Where
from benchmarks.gpu.runs import DTYPES, Precision, build_wide_model, make_config, measure_runs
from benchmarks.gpu.sampling import measure_sampling
from benchmarks.gpu.saves import measure_saves, why_not
from benchmarks.save.machine import environment
from verl_slurm.base.files import private_dir
from verl_slurm.config.schema import RunConfig
from verl_slurm.trainer.place import Place, process_group
from verl_slurm.trainer.quickstart.arithmetic_data import build_data
from verl_slurm.trainer.quickstart.tiny_model import build_model

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_DRIVER = Path("/proc/driver/nvidia/version")


def main(argv: list[str] | None = None) -> int:
    """0: measured, and every resume was exact; 1: one was not."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024 if has_gpu else 128, help="of the model's layers")
    parser.add_argument("--layers", type=int, default=24 if has_gpu else 2)
    parser.add_argument("--gib", type=float, nargs="*", default=[1, 4, 16] if has_gpu else [0.125, 0.5])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to save: the medium"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-DATE.json")
    parser.add_argument("--page", type=Path, metavar="JSON", help="only show what was measured before")
    options = parser.parse_args(argv)
    if options.page:
        sys.stdout.write(page(msgspec.json.decode(options.page.read_bytes(), type=Result)))
        return 0
    out = options.out or _RESULTS / f"gpu-{datetime.now(UTC):%Y-%m-%d}.json"
    command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:] if argv is None else argv)
    root = Path(tempfile.mkdtemp(prefix="vs-gpu-", dir=options.directory))
    try:
        result = _measure(options, root, command.strip())
    finally:
        shutil.rmtree(root, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    sys.stdout.write(f"{page(result)}\nwritten: {out}\n")
    sys.stdout.flush()
    return 0 if all(run.same_bits for run in result.runs) else 1


def _measure(options: argparse.Namespace, root: Path, command: str) -> Result:
    machine = environment([options.directory])
    tiny, data = build_model(private_dir(root / "models") / "tiny", head_dim=64), build_data(root / "sums")
    parameters = build_wide_model(tiny, root / "models" / "wide", width=options.width, layers=options.layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def config(name: str, precision: Precision) -> RunConfig:
        return make_config(root / name, root / "models" / "wide", data, device, precision)

    runs: list[RunFigures] = []
    saves: list[SaveFigures] = []
    sampling: list[SamplingFigures] = []
    left_out = [] if device == "cuda" else ["everything on a GPU: there is none here"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with process_group(config("any", "none"), Place.from_environ(os.environ)) as (place, ranks):
        for precision in cast(tuple[Precision, ...], ("none", "bfloat16")):
            pair = [config(f"{precision}-{name}", precision) for name in ("whole", "broken")]
            runs.append(measure_runs(pair, place, ranks))
            sampling.append(
                measure_sampling(root / "models" / "wide", DTYPES[precision], place, options.reps)
            )
        for gib in options.gib:
            reason = why_not(gib, place, options.directory)
            if reason:
                left_out.append(reason)
            else:
                saves.append(measure_saves(gib, place, root, options.reps))
        where = _where(place)
    machine = msgspec.structs.replace(machine, load_after=os.getloadavg())
    return Result(
        label=where.name if device == "cuda" else "no GPU here",
        command=command,
        where=where,
        environment=machine,
        parameters=parameters,
        runs=tuple(runs),
        saves=tuple(saves),
        sampling=tuple(sampling),
        left_out=tuple(left_out),
    )


def _where(device: torch.device) -> Where:
    if device.type != "cuda":
        return Where(device="cpu", name="no GPU: the CPU", driver="", cuda="", memory_gib=0.0)
    said = torch.cuda.get_device_properties(device)
    driver = re.search(r"\d+\.\d+[.\d]*", _DRIVER.read_text()) if _DRIVER.exists() else None
    return Where(
        device="cuda",
        name=said.name,
        driver=driver[0] if driver else "unknown",
        cuda=torch.version.cuda or "",
        memory_gib=said.total_memory / 2**30,
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch 2.13 may abort at the interpreter's own end: trainer.__main__.run_and_leave

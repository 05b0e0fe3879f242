"""A checkpoint of 10,000 ranks: the manifest, its commit, its verification, and what a rank reads of it at a load.

    python benchmarks/many_ranks.py [--ranks 16 256 1024 4096 10000] [--layers 2] [--in DIR] [--json]
    python benchmarks/many_ranks.py --drawn FILE [--before FILE] --to DIR      # pictures of what --json has printed

The ranks are not 10,000 processes. Their files are real: one process writes them, rank after rank, through the code
that ranks save with (`plan_layout`, `write_and_hash`, `seal_small`, `write_small`), and keeps the messages that each of
them would send. Only its fsyncs are left out, since ranks do theirs side by side. Then each part of the work runs as
the one process that does it in a real run, in a process of its own, on those files:

* lay out: what every rank computes at its start, `plan_layout`
* collect: rank 0 (and, beside it, any other rank) hears what was written; rank 0 makes the manifest
* commit: `checkpoint.store.commit.commit`, on rank 0
* verify: `checkpoint.store.verify.verify`, in the lead
* load: `read_tensors` and the runtime state, on the rank in the middle; the others' answers are copies of its own
* list, prune: `list_checkpoints` and `apply_prune`
* second copy: rank 0 hands the manifest to all nodes (`Collective.on_first`), as any other rank sees it
* messages: what the lead's policy takes for the words of all ranks about one save before the end

Memory is the peak above what the process held before. The model is a decoder with as many rows as Llama 3 70B, fewer
layers, and four numbers in each row: as many pieces, in small files. PPO trains two of it with AdamW. FSDP2 cuts
everything over all ranks. One of 80 layers has 34 times as many pieces as one of two; manifest and files are the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "daemon")]

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl_slurm_daemon.decide import inputs
from verl_slurm_daemon.decide.lead_model import Limits, Model, State
from verl_slurm_daemon.decide.policy import decide

from benchmarks.curves import lines
from benchmarks.rank_files import (
    COLUMNS,
    Alone,
    as_rank,
    box_of,
    domains_of,
    shapes,
    without_fsync,
    write_files,
)
from tests.builders import runtime_state
from tests.save.parts import contents, provenance
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.retention import PrunePlan, Reasoned
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST, FileEntry, Manifest, Topology
from verl_slurm.checkpoint.store import commit as door
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.pruning import apply_prune
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.schema import RunConfig
from verl_slurm.save.ranks import layout
from verl_slurm.save.ranks.boxes import local_part
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.loader import read_runtime_state, read_tensors
from verl_slurm.save.ranks.medium_results import write_to_medium
from verl_slurm.save.ranks.pending_save import Medium, PendingSave, manifest_of
from verl_slurm.save.writer.protocol import Write, Written
from verl_slurm.wire.messages import PartSaved, SaveStarted

Found = dict[int, dict[str, dict[str, Any]]]
"""Figures by the number of ranks and the part."""


# ---- the parts that are measured: each returns what is to be done, with all that it needs made before


def _said(root: Path) -> list[bytes]:
    return msgspec.msgpack.decode((root / "said.msgpack").read_bytes(), type=list[bytes])


def _pending(root: Path, rank: int, ranks: int) -> PendingSave:
    state = contents(1, runtime_state(rank=rank, world_size=ranks))
    save = PendingSave(
        paths=RunPaths(root / "run"),
        contents=state,
        components=(),
        local=None,
        started=time.monotonic(),
        seconds_left=None,
    )
    directory = save.paths.checkpoints / (root / "staging").read_text()
    save.directories[Medium.SHARED] = directory
    save.small.set_result([])
    save.request.set_result(Write(files=(), directories=(str(directory),)))
    # A rank without tensors; something stands in for its own word, which `Alone` replaces.
    entry = FileEntry(path="none", size=0, sha256="0" * 64)
    save.written[Medium.SHARED].set_result(Written(directory=str(directory), files=(entry,)))
    return save


def _collected(root: Path, ranks: int, rank: int = 0, said: list[bytes] | None = None) -> Manifest | None:
    save = _pending(root, rank, ranks)
    result = write_to_medium(
        Alone(rank, ranks, [said if said is not None else _said(root)]), save, Medium.SHARED
    )
    if rank:
        return None
    where = provenance(topology=Topology(dp=ranks))
    return sealed(manifest_of(save, where, result.entries, None))


def lay_out(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    words = msgspec.msgpack.decode((root / "layout.msgpack").read_bytes(), type=list[bytes])
    domains = domains_of(layers)

    def work() -> None:
        with as_rank(0, ranks):
            layout.plan_layout(domains, Alone(0, ranks, [words]))

    return work


def collect(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    said = _said(root)
    return lambda: _collected(root, ranks, said=said)


def collect_other(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    said = _said(root)
    return lambda: _collected(root, ranks, rank=1, said=said)


def commit(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    manifest = _collected(root, ranks)
    assert manifest is not None
    paths = RunPaths(root / "run")
    directory = paths.checkpoints / (root / "staging").read_text()
    final = paths.checkpoint(1, 0)
    staging = door.StagingDirectory(directory=directory, final=final, step=1, safe_point=0)

    def work() -> dict[str, int]:
        door.commit(staging, manifest, attempt_check=lambda: None)
        return {"manifest_bytes": (final / MANIFEST).stat().st_size}

    return work


def check(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    def work() -> None:
        verdict = verify(RunPaths(root / "run").checkpoint(1, 0))
        assert verdict.ok, verdict.one_line()

    return work


def load(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    rank = ranks // 2
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    live: dict[str, dict[str, torch.Tensor]] = {}
    for domain, tensors in shapes(layers).items():
        for name, rows in tensors.items():
            live.setdefault(domain, {})[name] = DTensor.from_local(
                torch.zeros(box_of(rows, rank, ranks).shape),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((rows, COLUMNS)),
                stride=(COLUMNS, 1),
            )
    directory = RunPaths(root / "run").checkpoint(1, 0)
    ours = Collective(dist.group.WORLD)

    def work() -> dict[str, int]:
        before = _read_bytes()
        CheckpointReader(directory)  # `check_manifest` looks at it before the models are built
        reader = CheckpointReader(directory)
        read_tensors(reader, live, ours)
        read_runtime_state(reader, rank, ranks)
        read = _read_bytes() - before
        held = [local_part(tensor)[0] for tensors in live.values() for tensor in tensors.values()]
        assert any(bool(tensor.any()) for tensor in held)
        return {"read_bytes": read, "own_bytes": sum(tensor.nbytes for tensor in held)}

    return work


def list_them(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    return lambda: list_checkpoints(RunPaths(root / "run"))


def prune(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    def reasoned(step: int) -> tuple[Reasoned, ...]:
        return (Reasoned(name=f"step_{step:06d}", reason="for the benchmark"),)

    # Assured, as after a save that was read back: nothing is verified once more.
    plan = PrunePlan(keep=reasoned(2), drop=reasoned(1), assured=True, working=frozenset())
    return lambda: apply_prune(RunPaths(root / "run"), plan)


def second_copy(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    manifest = _collected(root, ranks)
    assert manifest is not None
    data = render(manifest)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    ours = Collective(dist.group.WORLD)
    return lambda: len(ours.on_first("the second copy", lambda: data, bytes)) and None


def messages(root: Path, ranks: int, layers: int) -> Callable[[], Any]:
    limits = Limits.of(RunConfig())
    model = Model(limits, state=State.SAVING, world_size=ranks, request_id=1)
    words = [SaveStarted(rank=rank, request_id=1, step=1, safe_point=0) for rank in range(ranks)]
    words += [PartSaved(rank=rank, request_id=1) for rank in range(ranks)]  # type: ignore[misc]

    def work() -> dict[str, int]:
        now = model
        for word in words:
            now = decide(now, inputs.RankSaid(word)).model
        return {"longest_message_bytes": max(len(msgspec.msgpack.encode(word)) for word in words)}

    return work


_PARTS = {
    "lay out": lay_out,
    "collect, rank 0": collect,
    "collect, another rank": collect_other,
    "second copy, each rank": second_copy,
    "commit": commit,
    "verify": check,
    "load, each rank": load,
    "list": list_them,
    "prune": prune,
    "messages": messages,
}


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _kilobytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


def measured(work: Callable[[], Any]) -> dict[str, Any]:
    """Runs it; seconds, seconds of processors, and memory above what was there before."""
    # The peak of what was made before must not hide this one's.
    Path("/proc/self/clear_refs").write_text("5")
    base = _kilobytes("VmRSS")
    cpu, began = time.process_time(), time.perf_counter()
    more = work()
    found = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    found["mb"] = (_kilobytes("VmHWM") - base) / 1024
    return {name: round(value, 4) for name, value in found.items()} | (more if isinstance(more, dict) else {})


def run(ranks: int, layers: int, place: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each part's figures as it is done."""
    with tempfile.TemporaryDirectory(prefix="vs-ranks-", dir=place) as name:
        root = Path(name)
        for part in ("files", *_PARTS):
            argv = [sys.executable, __file__, "--part", part, str(root), str(ranks), str(layers)]
            done = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
            yield part, json.loads(done.stdout) if not done.returncode else {"failed": done.returncode}


def one_part(part: str, root: Path, ranks: int, layers: int) -> dict[str, Any]:
    """In the part's own process."""
    if part == "files":
        with without_fsync():
            return measured(lambda: write_files(root, ranks, layers))
    return measured(_PARTS[part](root, ranks, layers))


# ---- what is shown


_SHOWN = ("s", "cpu_s", "mb", "ranks", "part", "load")
"""Columns of their own, or of no row."""


def table(found: Found) -> str:
    """For people: seconds, processor seconds and MB of each part, a row for each number of ranks."""
    rows = ["ranks   part                        s    CPU s       MB  more"]
    for ranks, parts in found.items():
        for part, one in parts.items():
            more = ", ".join(f"{k} {v:,}" for k, v in one.items() if k not in _SHOWN)
            numbers = " ".join(f"{one.get(key, float('nan')):8.2f}" for key in ("s", "cpu_s", "mb"))
            rows.append(f"{ranks:<7,} {part:<22} {numbers}  {more}")
    return "\n".join(rows)


_PICTURES = (
    ("many-ranks-commit", "cpu_s", "Manifest, commit and verification of one checkpoint", "processor seconds",
     ("collect, rank 0", "commit", "verify", "list")),
    ("many-ranks-rank", "cpu_s", "What each rank computes at its start and at a load", "processor seconds",
     ("lay out", "load, each rank")),
    ("many-ranks-memory", "mb", "Memory that it takes of each rank", "MB", ("lay out", "load, each rank")),
)  # fmt: skip


def pictures(found: Found, before: Found) -> dict[str, str]:
    """SVGs by name.

    Args:
        before: of an earlier release, drawn beside; may be empty.
    """
    made = {}
    for name, key, title, y, parts in _PICTURES:
        curves = {
            f"{part}{words}": [
                (ranks / 1000, one[part][key]) for ranks, one in those.items() if key in one[part]
            ]
            for words, those in (("", found), (", before", before if len(parts) == 2 else {}))
            for part in parts
        }
        shown = {part: points for part, points in curves.items() if points}
        largest = max(value for points in shown.values() for _, value in points)
        # The axis has five steps of whole numbers.
        unit = 5 * 10 ** max(0, len(str(int(largest))) - 2)
        top = -(-largest // unit) * unit
        made[f"{name}.svg"] = lines(shown, title=title, x="thousand ranks", y=y, top=top)
    return made


def read(path: Path) -> Found:
    """Returns what `--json` has printed; the last of several lines of one part counts."""
    found: Found = {}
    for line in sorted(map(json.loads, path.read_text().splitlines()), key=lambda one: one["ranks"]):
        found.setdefault(line["ranks"], {})[line["part"]] = line
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 256, 1024, 4096, 10000])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--in", dest="place", help="a directory on the file system to be measured")
    parser.add_argument(
        "--drawn", type=Path, help="draw what --json has printed into this file, and measure nothing"
    )
    parser.add_argument("--before", type=Path, help="the same of an earlier release, to be drawn beside it")
    parser.add_argument("--to", type=Path, default=Path("docs"), help="where the pictures go")
    parser.add_argument("--json", action="store_true", help="a line for each part, as it is done")
    parser.add_argument("--part", nargs=4, metavar=("PART", "DIR", "RANKS", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.part:
        part, root, ranks, layers = options.part
        print(json.dumps(one_part(part, Path(root), int(ranks), int(layers))))
        return 0
    if options.drawn:
        for name, svg in pictures(
            read(options.drawn), read(options.before) if options.before else {}
        ).items():
            (options.to / name).write_text(svg)
        return 0
    found: Found = {}
    for ranks in options.ranks:
        for part, one in run(ranks, options.layers, options.place):
            found.setdefault(ranks, {})[part] = one
            line = {"ranks": ranks, "part": part, **one, "load": round(os.getloadavg()[0], 1)}
            print(json.dumps(line), flush=True, file=sys.stdout if options.json else sys.stderr)
    if not options.json:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The modes in which all peers of a group take turns in the same processes: loop, direct, busy, dual.

In each repetition every mode, in each mode every peer in an order drawn anew, so that none always follows the
same other. Before each turn rank 0 waits for a quiet machine; in the first and the last repetition the checkpoint
is loaded and compared, outside of every figure: the live state was overwritten meanwhile, so a snapshot that is
none is found.
"""

import hashlib
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.save.machine import fsync_tree, tree_bytes, tree_cpu_s
from benchmarks.save.peers.base import Peer
from benchmarks.save.peers.reference import Raw
from benchmarks.save.ranks import attempt, fresh, quiet, slowest, timed
from benchmarks.save.records import Answer, Job, Mode, Sample, part_of
from benchmarks.save.registry import COMPANIONS, entry, load_class
from benchmarks.save.workload import Workload
from verl_slurm.base.files import write_file
from verl_slurm.save.ranks.collective import Collective

_COMPARED_STEPS = 6
"""Undisturbed steps timed before and after a busy save."""


class Turns:
    """One rank's part. All methods are collective.

    Called by: worker.
    """

    def __init__(self, job: Job, ranks: Collective) -> None:
        self.job = job
        self.ranks = ranks
        self.work = Workload(job.gib, ranks)
        self.samples: list[Sample] = []
        self.state_bytes = int(ranks.sum([self.work.num_bytes])[0])
        self._peers: dict[str, Peer] = {}
        self._dead: set[str] = set()
        self._media = 2 if "dual" in job.modes else 1
        self._matrix = torch.rand(256, 256)
        self._passes = 1
        self._generate()
        one = slowest(ranks, s=timed(self._generate))["s"]
        self._passes = max(1, round(job.generation_s / one))
        began = time.process_time()
        for _ in range(4):  # an even number: the state is as before
            self.work.update()
        self._update_cpu_s = (time.process_time() - began) / 4

    def run(self) -> list[Sample]:
        for rep in range(self.job.reps + 1):
            if rep > 1 and self.ranks.max([int(time.monotonic() >= self.job.until)])[0]:
                break  # whole repetitions only: every peer has had its turn in each
            for mode in self.job.modes:
                order = [name for name in self.job.peers if mode in entry(name, self.job.plugins).modes]
                if self.job.group not in ("main", "dual") and not {*order} - {*COMPANIONS}:
                    continue  # company for nobody
                random.Random(f"{rep} {mode}").shuffle(order)
                for name in order:
                    if name not in self._dead:
                        self._turn(name, mode, rep)
                if mode == "busy" and order:
                    self._add("sha256", mode, rep, self._hash())
                if mode == "dual":
                    self._add("raw", mode, rep, self._raw())
        for name, peer in self._peers.items():
            attempt(self.ranks, f"closing {name}", peer.close)
        return self.samples

    def _add(self, name: str, mode: Mode, rep: int, values: dict[str, float], **more: Any) -> None:
        self.samples.append(
            Sample(peer=name, mode=mode, group=self.job.group, rep=rep, values=values, **more)
        )
        if self.ranks.rank == 0:  # between two turns, outside of every figure
            answer = Answer(
                state_bytes=self.state_bytes, num_tensors=len(self.work.tensors()), samples=self.samples
            )
            write_file(part_of(Path(self.job.answer)), msgspec.json.encode(answer))

    def _turn(self, name: str, mode: Mode, rep: int) -> None:
        values: dict[str, float] = {}
        idle, exact = 1.0, None
        checks = rep in (0, self.job.reps) and entry(name, self.job.plugins).checked
        directories = fresh(self.ranks, self.job, name, media=self._media)

        def measure() -> None:
            nonlocal idle
            if name not in self._peers:
                self._peers[name] = load_class(name, self.job.plugins)(self.work)
                values["open"] = timed(lambda: self._peers[name].open(directories))
            idle = quiet(self.ranks, self.job)
            modes = {"loop": self._loop, "direct": self._direct, "busy": self._busy, "dual": self._dual}
            found = modes[mode](self._peers[name], directories)
            only = entry(name, self.job.plugins).only
            values.update({key: value for key, value in found.items() if not only or key in only})

        error = attempt(self.ranks, f"{name}, {mode}", measure)
        if not error and checks:
            for directory in directories:
                if self.work.matches():
                    self.work.update()  # what is there already shall not pass for what was loaded
                error = error or attempt(
                    self.ranks,
                    f"{name}, loading",
                    lambda d=directory: self._peers[name].load(d),  # type: ignore[misc]
                )
                exact = exact is not False and not error and self.work.matches()
        if error or checks:
            self.work.restore()
        else:
            self.work.undo()
        if error:
            self._dead.add(name)
        self._add(name, mode, rep, values, bit_exact=exact, error=error, idle=round(idle, 3))
        if self.ranks.rank == 0:
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)
        dist.barrier()

    # The modes. Each returns its figures, the same on every rank.

    def _generate(self) -> None:
        """Read the whole state and compute, again and again; write nothing of it."""
        tensors = list(self.work.locals().values())
        for _ in range(self._passes):
            torch._foreach_norm(tensors)
            for _ in range(20):
                torch.mm(self._matrix, self._matrix)

    def _loop(self, peer: Peer, directories: tuple[Path, ...]) -> dict[str, float]:
        save = timed(lambda: peer.save(directories))
        generation = timed(self._generate)
        fence = timed(peer.fence)
        self.work.update()
        peer.wait()
        return slowest(self.ranks, stall=save + fence, save=save, fence=fence, generation=generation)

    def _direct(self, peer: Peer, directories: tuple[Path, ...]) -> dict[str, float]:
        cpu_before = tree_cpu_s(os.getpid())
        dist.barrier()
        began = time.perf_counter()
        peer.save(directories)
        peer.fence()
        stall = time.perf_counter() - began
        self.work.update()  # overwrites what is being saved: the copy must be one
        peer.wait()
        done = time.perf_counter() - began
        self._make_durable(directories)
        durable = time.perf_counter() - began
        cpu = tree_cpu_s(os.getpid()) - cpu_before - self._update_cpu_s
        size = tree_bytes(directories[0]) if self.ranks.rank == 0 else 0
        figures = slowest(self.ranks, stall=stall, done=done, durable=durable)
        return figures | {"cpu": self.ranks.sum([cpu])[0], "bytes": self.ranks.sum([size])[0]}

    def _busy(self, peer: Peer, directories: tuple[Path, ...]) -> dict[str, float]:
        """Training seconds lost: how much longer the same steps take, the end of the save awaited.

        A step is half reading and computing, half the update of everything in place. Undisturbed steps are
        timed right before and right after.
        """

        def step(fence: bool) -> None:
            torch._foreach_norm(list(self.work.locals().values()))
            if fence:
                peer.fence()
            self.work.update()

        def steps_in_turn(count: int, fence: bool) -> None:
            for _ in range(count):
                step(fence)

        def undisturbed() -> float:
            dist.barrier()
            took = slowest(self.ranks, s=timed(lambda: steps_in_turn(_COMPARED_STEPS, False)))
            return took["s"] / _COMPARED_STEPS

        before = undisturbed()
        steps = max(4, round(self.job.busy_s / before))
        dist.barrier()
        began = time.perf_counter()
        peer.save(directories)
        steps_in_turn(steps, True)
        peer.wait()
        wall = time.perf_counter() - began
        after = undisturbed()
        figures = slowest(self.ranks, wall=wall)
        base = steps * (before + after) / 2
        return {"lost": figures["wall"] - base, "undisturbed": base}

    def _dual(self, peer: Peer, directories: tuple[Path, ...]) -> dict[str, float]:
        """One save into both directories."""
        dist.barrier()
        began = time.perf_counter()
        peer.save(directories)
        peer.fence()
        self.work.update()
        peer.wait()
        self._make_durable(directories)
        return slowest(self.ranks, durable=time.perf_counter() - began)

    def _raw(self) -> dict[str, float]:
        """The raw write of the same bytes to each medium alone, and to both at once."""
        if "raw" not in self._peers:
            self._peers["raw"] = Raw(self.work)
            self._peers["raw"].open(())
        first, second = fresh(self.ranks, self.job, "raw", media=2)
        figures = {}
        for name, chosen in (("first", (first,)), ("second", (second,)), ("both", (first, second))):
            parts = tuple(directory / name for directory in chosen)
            if self.ranks.rank == 0:
                for part in parts:
                    part.mkdir()
            quiet(self.ranks, self.job)
            figures[name] = self._dual(self._peers["raw"], parts)["durable"]
        self.work.undo()
        if self.ranks.rank == 0:
            shutil.rmtree(first)
            shutil.rmtree(second)
        return figures

    def _hash(self) -> dict[str, float]:
        """SHA-256 of all bytes on one core: the ranks' own CPU times, added up; a full machine changes nothing."""
        parts = [tensor.reshape(-1).numpy().data for tensor in self.work.locals().values()]
        began = time.thread_time()
        for part in parts:
            hashlib.sha256(part)
        return {"one_core": self.ranks.sum([time.thread_time() - began])[0]}

    def _make_durable(self, directories: tuple[Path, ...]) -> None:
        dist.barrier()
        if self.ranks.rank == 0:
            for directory in directories:
                fsync_tree(directory)
        dist.barrier()

"""Starts the process groups of a run one after another and gathers what they measured. Torch-free.

The ranks are started without torchrun: its agent would use a core of the few, and its rendezvous a port. Each
rank leads a session of its own, so that whatever a peer leaves behind can be ended with it.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks.save.machine import drop_caches, tree_pss, wait_until_idle
from benchmarks.save.reading import files_of, read_all
from benchmarks.save.records import MODES, Answer, Job, Mode, Sample, part_of
from benchmarks.save.registry import entry, groups
from verl_slurm.checkpoint.store.verify import verify

_ROOT = Path(__file__).parent.parent.parent
_SAMPLING_MS = 30
_SHOWN_LOG = 3000
_FIRST = ("main", "dcp_threads")  # without them most targets cannot be judged


class _Stage(NamedTuple):
    """A part that is measured whole, or again."""

    name: str
    weight: float
    """About how long it takes, in turns of one peer."""
    work: Callable[[], object]
    is_first: bool = False
    """It is begun whatever the time."""


def _time_left(began: float, weight_done: float, left: Sequence[_Stage]) -> str:
    """Returns how long what is left will take, by what was done."""
    if not weight_done:
        return ""
    weight = sum(stage.weight for stage in left) - weight_done
    seconds = (time.monotonic() - began) * weight / weight_done
    return f", about {max(1, round(seconds / 60))} min left"


@dataclass(kw_only=True)
class Launcher:
    """One run.

    Attributes:
        directories: where to write, the second for the dual write.
        scratch: for jobs, logs and the ranks' rendezvous; not on the medium that is measured.
        until: CLOCK_MONOTONIC seconds from which on nothing further is begun, but for one repetition of the first.
        say: told what is going on, a line at a time.
        done: the parts that are measured, and how many samples there were behind each.
        keep: called behind each part.
        failed: a process group ended without an answer; its log has been said.

    Called by: __main__.
    """

    ranks: int
    gib: float
    reps: int
    peers: tuple[str, ...]
    plugins: dict[str, str]
    directories: tuple[Path, Path]
    scratch: Path
    generation_s: float
    busy_s: float
    quiet_s: float
    until: float
    say: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)
    state_bytes: int = 0
    num_tensors: int = 0
    done: dict[str, int] = field(default_factory=dict)
    keep: Callable[[], None] = lambda: None
    failed: bool = False

    def run(self, what: tuple[str, ...]) -> None:
        """Measures all of it that is not `done`, and fills `samples`, `state_bytes` and `num_tensors`."""
        stages = self._stages(what)
        left = [stage for stage in stages if stage.name not in self.done]
        began, weight_done = time.monotonic(), 0.0
        for stage in left:
            if not stage.is_first and not self._in_time(stage.name):
                continue
            self.say(
                f"[{stages.index(stage) + 1} of {len(stages)}{_time_left(began, weight_done, left)}] {stage.name}"
            )
            stage.work()
            weight_done += stage.weight
            self.done[stage.name] = len(self.samples)
            self.keep()

    def _stages(self, what: tuple[str, ...]) -> list[_Stage]:
        modes = {mode for name in what for mode in MODES[name]}
        together = tuple(mode for mode in ("loop", "direct", "busy") if mode in modes)
        turns = groups(self.peers, self.plugins) if together else {}

        def turn(group: str, names: tuple[str, ...], modes: tuple[Mode, ...]) -> _Stage:
            weight = len(names) * len(modes) * (self.reps + 1)
            return _Stage(group, weight, lambda: self._group(group, modes, names), group in _FIRST)

        found = [turn(group, names, together) for group, names in turns.items() if group in _FIRST]
        if "dual" in modes:
            names = tuple(n for n in self.peers if "dual" in entry(n, self.plugins).modes)
            found.append(turn("dual", names, ("dual",)))
        if "load" in modes:
            names = tuple(n for n in self.peers if entry(n, self.plugins).loads)
            found.append(_Stage("load", 3 * len(names) * (self.reps + 1), self._loads, True))
        if "commit" in modes:
            found.append(_Stage("verify", 2 * (self.reps + 1), self._verify, True))
        saving = [n for n in self.peers if entry(n, self.plugins).kind != "reference"]
        if "memory" in modes:
            ours_first = sorted(saving, key=lambda n: entry(n, self.plugins).kind != "ours")
            found += [_Stage(f"memory: {name}", 4, partial(self._memory, name)) for name in ours_first]
        return [
            *found,
            *(turn(group, names, together) for group, names in turns.items() if group not in _FIRST),
        ]

    def _in_time(self, what: str) -> bool:
        in_time = time.monotonic() < self.until
        if not in_time:
            self.say(f"no time left for {what}")
        return in_time

    def _group(self, group: str, modes: tuple[Mode, ...], names: tuple[str, ...], *, rep: int = 0) -> Answer:
        self.say(f"{', '.join(modes)}: {', '.join(names) or '-'}")
        answer = self._start(group, modes, names, rep=rep)
        self.samples += answer.samples
        for sample in answer.samples:
            if sample.error:
                self.say(f"  {sample.peer}, {sample.mode}: {sample.error}")
        return answer

    def _loads(self) -> None:
        """Each save kept by a process group of its own, then loaded by fresh ones in turn."""
        names = [name for name in self.peers if entry(name, self.plugins).loads]
        for name in list(names):
            if any(sample.error for sample in self._group(f"keep {name}", ("keep",), (name,)).samples):
                names.remove(name)
        for rep in range(1, self.reps + 1):
            if rep > 1 and not self._in_time(f"the {rep}th load"):
                break
            turn = rep % len(names) if names else 0
            for name in names[turn:] + names[:turn]:
                self._group(f"load {name}", ("load",), (name,), rep=rep)
        self._clear()

    def _verify(self) -> None:
        """A committed checkpoint read in full by this process, as the daemon does it, and plainly."""
        failed = any(sample.error for sample in self._group("commit", ("commit",), ()).samples)
        found = [] if failed else [*(self.directories[0] / "committed" / "checkpoints").glob("step_*")]
        for directory in found:
            files, threads = files_of(directory), os.cpu_count() or 1
            for rep in range(self.reps + 1):
                drop_caches()
                idle = wait_until_idle(at_most_s=self.quiet_s)
                began = time.perf_counter()
                verdict = verify(directory)
                took = time.perf_counter() - began
                drop_caches()
                wait_until_idle(at_most_s=self.quiet_s)
                began = time.perf_counter()
                read_all(files, threads)
                values = {"verify": took, "plain_read": time.perf_counter() - began}
                error = "" if verdict.ok else f"{verdict.problems[0].path}: {verdict.problems[0].what}"
                self.samples.append(
                    Sample(
                        peer="ours",
                        mode="verify",
                        group="verify",
                        rep=rep,
                        values=values,
                        error=error,
                        idle=idle,
                    )
                )
        self._clear()

    def _memory(self, name: str) -> None:
        """Peak proportional set size of the ranks and all they started, above what it was before any save."""
        seen: list[tuple[float, int]] = []
        answer = self._start(
            f"memory {name}",
            ("memory",),
            (name,),
            watch=lambda pids: seen.append((time.monotonic(), tree_pss(pids))),
        )
        began, saving, end = (answer.marks.get(mark, 0.0) for mark in ("baseline", "saving", "end"))
        before = [size for at, size in seen if began <= at < saving]
        during = [size for at, size in seen if saving <= at <= end]
        values = {}
        if before and during:
            values = {"before": median(before), "extra": max(during) - median(before)}
        self.samples += [msgspec.structs.replace(sample, values=values) for sample in answer.samples]

    def _start(
        self,
        group: str,
        modes: tuple[Mode, ...],
        names: tuple[str, ...],
        *,
        rep: int = 0,
        watch: Callable[[list[int]], None] | None = None,
    ) -> Answer:
        stem = self.scratch / group.replace(" ", "_")
        store, answer, log = (stem.with_suffix(end) for end in (".store", ".answer", ".log"))
        for path in (store, answer, part_of(answer)):
            path.unlink(missing_ok=True)
        job = Job(
            group=group,
            modes=modes,
            peers=names,
            plugins=self.plugins,
            reps=self.reps,
            gib=self.gib,
            directories=tuple(map(str, self.directories)),
            generation_s=self.generation_s,
            busy_s=self.busy_s,
            quiet_s=self.quiet_s,
            until=self.until,
            rep=rep,
            answer=str(answer),
        )
        stem.with_suffix(".job").write_bytes(msgspec.json.encode(job))
        argv = [sys.executable, "-m", "benchmarks.save.worker", str(stem.with_suffix(".job")), str(store)]
        common = self._environment()
        with log.open("wb") as output:
            processes = [
                subprocess.Popen(
                    argv,
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=_ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for rank in range(self.ranks)
            ]
            try:
                _wait(processes, watch)
            except KeyboardInterrupt:
                _end(processes)
                self._take_part(part_of(answer))
                raise
            finally:
                _end(processes)
        if not answer.exists():
            self.failed = True
            self.say(
                f"{group} gave no answer; the end of its log:\n{log.read_text(errors='replace')[-_SHOWN_LOG:]}"
            )
            lost = [
                Sample(peer=name, mode=modes[0], group=group, rep=rep, error="its processes gave no answer")
                for name in names
            ]
            return Answer(state_bytes=0, num_tensors=0, samples=lost)
        found = msgspec.json.decode(answer.read_bytes(), type=Answer)
        self.state_bytes = found.state_bytes or self.state_bytes
        self.num_tensors = found.num_tensors or self.num_tensors
        return found

    def _take_part(self, part: Path) -> None:
        """What a group that is stopped had measured so far."""
        if part.exists():
            found = msgspec.json.decode(part.read_bytes(), type=Answer)
            self.samples += found.samples
            self.state_bytes, self.num_tensors = found.state_bytes, found.num_tensors

    def _environment(self) -> dict[str, str]:
        with socket.socket() as probe:  # DCP's process backend asks for an address, not for this port
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        path = os.pathsep.join([str(_ROOT), str(_ROOT / "daemon"), os.environ.get("PYTHONPATH", "")])
        return dict(os.environ) | {
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.ranks)),
            "PYTHONPATH": path.rstrip(os.pathsep),
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
            "BYTECHECKPOINT_LOGGING_LEVEL": "ERROR",
        }

    def _clear(self) -> None:
        for directory in self.directories:
            for path in directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _wait(processes: list[subprocess.Popen[bytes]], watch: Callable[[list[int]], None] | None) -> None:
    """Return when all have ended, or one of them badly: the others would wait for it in a collective."""
    poller = select.poll()
    waiting = {os.pidfd_open(process.pid): process for process in processes}
    try:
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        left = len(waiting)
        while left:
            for fd, _ in poller.poll(_SAMPLING_MS if watch else None):
                poller.unregister(fd)
                left -= 1
                if waiting[fd].wait():
                    return
            if watch and left:
                watch([process.pid for process in processes])
    finally:
        for fd in waiting:
            os.close(fd)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks and all that is left in their sessions."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            process.wait()

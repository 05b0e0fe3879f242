"""Run directories as a daemon leaves them, made of nothing but their files: for tests and benchmarks of the fleet."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests.builders import make_manifest
from tests.journals import make_events
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import checkpoint_order, render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST, FileEntry
from verl_slurm.journal.history import History

Kind = Literal["running", "done", "queued", "cancelled", "failed"]
_BEGAN = datetime(2026, 11, 1, 8, tzinfo=UTC)
_SAVES_AN_ATTEMPT = 50


class Teller:
    """A journal in the making, with a clock of its own."""

    def __init__(self, job_id: str, cluster: str, host: str = "node1", *, has_rollouts: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self.has_rollouts = has_rollouts
        self.job_id, self.cluster, self.host = job_id, cluster, host
        self.now, self.attempt, self.step, self.last = _BEGAN, 0, 0, ""

    def say(self, event: str, after_s: float = 1.0, **fields: Any) -> None:
        self.now += timedelta(seconds=after_s)
        time = self.now.isoformat(timespec="milliseconds")
        mine = {"attempt": self.attempt, "job_id": self.job_id}
        self.events.append({"time": time, "event": event, **mine, **fields})

    def start(self, queued_s: float = 40.0) -> None:
        self.attempt += 1
        where = {
            "cluster": self.cluster,
            "host": self.host,
            "requeues": self.attempt - 1,
            "nodes": "node[1-2]",
        }
        self.say("started", queued_s, **where, pid=4242)
        self.say("resume", reason=f"{self.last or 'there'} is the newest checkpoint that verifies")
        self.say("restart", number=1, resume=self.last or None, progress=f"{self.last}+140004")
        self.go_on()

    def go_on(self, starts_s: float = 20.0, again_s: float = 5.0) -> None:
        phase = "update" if self.has_rollouts else "step_end"
        self.say("training", starts_s, step=self.step, phase=phase, index=8)
        if self.has_rollouts:
            self.say("first_rollout", again_s, step=self.step, phase="generate", index=1)

    def save(self, *, emergency: bool = False) -> None:
        self.step += not emergency
        self.last = f"step_{self.step:06d}" + ("_sp0088" if emergency else "")
        self.say("saved", 3.0, name=self.last, seconds=0.7, num_bytes=16_000_000_000, emergency=emergency)
        self.say("verified", 2.0, name=self.last, detail="16000000000 bytes in 1.9 s")

    def preempt(self) -> None:
        evidence = "SIGCONT to lead; JobState=RUNNING Reason=None Restarts=0 (ours 0) PreemptTime=2026-11-21"
        self.say("cause", 30.0, cause="preemption", evidence=evidence, seconds_left=29.3)
        self.say("save", 0.1, request=1, stop=True)
        self.save(emergency=True)
        self.say("requeue", 0.5, accepted=True, detail="requeued: JobState=COMPLETING Restarts=1")
        self.say("ended", exit_code=25, exit="REQUEUED", reason="requeued")


def make_run(
    root: Path,
    kind: Kind = "running",
    *,
    job_id: str = "7",
    cluster: str = "slurm",
    host: str = "node1",
    num_events: int = 60,
    num_checkpoints: int = 2,
) -> RunPaths:
    """One run with a journal of about so many events: attempts of fifty saves, with preemptions between them."""
    paths = RunPaths(root)
    paths.checkpoints.mkdir(parents=True)
    paths.run_yaml.write_text(f"name: {root.name}\nrun_dir: {root.absolute()}\n")
    teller = Teller(job_id, cluster, host)
    teller.say("submitted", cluster=cluster, host=host)
    teller.start()
    while len(teller.events) < num_events - 12:
        for _ in range(min(_SAVES_AN_ATTEMPT, (num_events - len(teller.events)) // 2)):
            teller.save()
        teller.preempt()
        if kind == "queued" and len(teller.events) >= num_events - 12:
            break
        teller.start()
    if kind in ("done", "cancelled", "failed"):
        code = {"done": 0, "cancelled": 23, "failed": 22}[kind]
        teller.say("ended", exit_code=code, exit="", reason="all steps are done")
    paths.events.write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in teller.events))
    _write_status(paths, teller, kind)
    first = max(teller.step - num_checkpoints + 1, 1)
    for step in range(first, first + num_checkpoints):
        # The journal's newest is there: in a run that was preempted, one of the middle of a step.
        newest = step == first + num_checkpoints - 1 and teller.last
        _write_checkpoint(paths, newest or f"step_{step:06d}")
    return paths


def _write_status(paths: RunPaths, teller: Teller, kind: Kind) -> None:
    history = History(make_events(teller.events))
    status = {
        "state": "running" if kind == "running" else "ended",
        **{"job_id": teller.job_id, "cluster": teller.cluster, "host": teller.host},
        **{"attempt": teller.attempt, "restart": 1, "requeues": teller.attempt - 1},
        **{"step": teller.step, "steps": 5000, "phase": "generate", "index": 3},
        "metrics": dict.fromkeys(("reward", "kl", "loss", "tokens_per_second", "step_s", "entropy"), 0.5),
        **{"last_checkpoint": teller.last, "cause": "", "updated": teller.now.isoformat()},
        "interruptions": len(history.outages),
        "interrupted_s": history.interrupted_s,
        "last_interruption": msgspec.to_builtins(history.outages[-1]) if history.outages else {},
    }
    paths.status.write_text(json.dumps(status))


def _write_checkpoint(paths: RunPaths, name: str) -> None:
    path = paths.checkpoints / name
    step, safe_point = checkpoint_order(name) or (0, 0)
    path.mkdir()
    names = [
        f"{domain}/rank_{rank:04d}.bin" for domain in ("actor", "critic", "optimizer") for rank in range(16)
    ]
    manifest = make_manifest(
        step,
        name=name,
        safe_point=safe_point,
        world_size=16,
        schema_id="0" * 64,
        files=tuple(FileEntry(path=name, size=333_333_333, sha256="0" * 64) for name in names),
    )
    (path / MANIFEST).write_bytes(render(sealed(manifest)))

"""Directories of runs with steps, samples and interruptions of several causes, made of nothing but their files."""

import json
import math
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.builders import new_run
from tests.journals import make_events
from tests.many_runs import Teller
from verl_slurm.base.one_line import json_line
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.files import to_json
from verl_slurm.runtime_state.samples import Sample, append_samples

HOSTILE = (
    "</script><script>window.harmed=1</script><img src=x onerror=window.harmed=1>"
    "--><svg/onload=window.harmed=1>{{ 7*7 }}${7*7}'\"&lt;\u202e\u2028\x1b[31m\x00\ufffe"
)
"""Text that does harm where it is not escaped: in HTML, in a script, in JSON, in a template, on a terminal."""
HOSTILE_NAME = "<!--<script><b onclick=window.harmed=1>"
"""The same as the name of a directory: in a script it hides the end of the element."""
_CAUSES = ("preemption", "preemption", "preemption", "time_limit", "crash", "hang", "node_lost", "lead_lost")


class _Life(Teller):
    """A run that trains `step_s` long steps, with rows of `steps.jsonl`."""

    def __init__(self, seed: int, text: str) -> None:
        super().__init__("7", "slurm")
        self.chance, self.text = random.Random(seed), text
        self.rows: list[dict[str, Any]] = []
        self.kept = 0
        """The step of the newest checkpoint."""

    def train(self, steps: int, columns: "dict[str, str]") -> None:
        for _ in range(steps):
            self.step += 1
            seconds = 55.0 + self.chance.uniform(0.0, 12.0)
            self.now += timedelta(seconds=seconds)
            self.rows.append(self.row(seconds, columns))
            if self.step % 10 == 0:
                self.say(
                    "saved",
                    1.0,
                    name=f"step_{self.step:06d}",
                    seconds=2.4,
                    num_bytes=16_000_000_000,
                    reason="a multiple of every_steps=10",
                )
                self.say("verified", 4.0, name=f"step_{self.step:06d}")
                self.last, self.kept = f"step_{self.step:06d}", self.step

    def row(self, seconds: float, columns: "dict[str, str]") -> dict[str, Any]:
        grown = 1.0 - math.exp(-self.step / 220)
        noise = self.chance.gauss(0.0, 0.02)
        numbers = {
            "reward": 0.18 + 0.66 * grown + noise,
            "kl": 4.0 * grown * (1.0 + noise),
            "policy_loss": 0.02 * math.exp(-self.step / 90) + noise / 8,
            "entropy": 0.3 + 1.1 * math.exp(-self.step / 150) + noise / 4,
            "response_tokens": 380.0 + 240.0 * grown + 300 * noise,
            "tokens_per_second": 128 * (380.0 + 240.0 * grown) / (0.6 * seconds),
            "generate_s": 0.6 * seconds,
            "score_s": 0.08 * seconds,
            "update_s": 0.26 * seconds,
            "stall_s": 0.4 if self.step % 10 == 1 else 0.0,
            "step_s": seconds,
        }
        time = self.now.isoformat(timespec="milliseconds")
        renamed = {
            columns.get(name, name): value for name, value in numbers.items() if columns.get(name, name)
        }
        return {"time": time, "attempt": self.attempt, "step": float(self.step), **renamed}

    def interrupt(self, cause: str) -> None:
        node = f"node{self.chance.randrange(1, 3)}"
        if cause in ("preemption", "time_limit"):
            evidence = f"SIGTERM to lead; JobState=RUNNING Reason=None Restarts={self.attempt} {self.text}"
            self.say("cause", 20.0, cause=cause, evidence=evidence, seconds_left=29.3)
            self.say("save", 0.1, request=1, stop=True)
            self.last = f"step_{self.step:06d}_sp0007"
            self.say(
                "saved",
                3.0,
                name=self.last,
                seconds=2.1,
                num_bytes=16_000_000_000,
                emergency=True,
                reason="the job ends",
            )
            self.say("verified", 4.0, name=self.last)
            self.kept = self.step
        elif cause == "node_lost":
            self.say("cause", 20.0, cause=cause, evidence=f"{node} does not answer {self.text}")
            self.say("avoid", 0.5, nodes=[node], detail=f"failed this job {self.text}")
            self.step = self.kept
        elif cause == "lead_lost":
            self.step = self.kept
            return
        else:
            detail = (
                f"rank 3 on {node}: {'no safe point for 300 s' if cause == 'hang' else 'killed by signal 9'}"
            )
            if cause == "hang":
                self.say("hang", 20.0, detail=f"{detail} {self.text}", node=node)
            self.say(
                "crash", 30.0, kind=cause, detail=f"{detail} {self.text}", node=node, crashes=1, budget=8
            )
            self.step = self.kept
            self.say("restart", 4.0, number=2, resume=self.last or None, progress=self.last)
            self.say("training", 25.0, step=self.step, phase="generate", index=1)
            self.say("first_rollout", 3.0, step=self.step, phase="generate", index=2)
            return
        self.say("requeue", 0.5, accepted=True)
        self.say("ended", exit_code=25, exit="REQUEUED", reason="requeued")


def make_interrupted_run(
    root: Path,
    interruptions: int = 200,
    *,
    seed: int = 0,
    text: str = "",
    columns: "dict[str, str] | None" = None,
    ended: bool = True,
    **config: Any,
) -> RunPaths:
    """One run, interrupted so many times, with a restart in place or a requeue after each.

    Args:
        text: comes with each evidence, note, node and sample.
        columns: our column -> its name in another loop; an empty name leaves it out.
        ended: all steps are done; otherwise the run trains.
        config: keys of `run_config`.
    """
    paths = new_run(root, **({"gpus_per_node": 8} | config))
    paths.checkpoints.mkdir()
    life = _Life(seed, text)
    life.say("submitted", cluster="slurm", host="login")
    life.start(queued_s=600.0)
    for number in range(interruptions):
        life.train(3 + life.chance.randrange(9), columns or {})
        cause = life.chance.choice(_CAUSES) if number else "preemption"
        life.interrupt(cause)
        if cause in ("crash", "hang"):
            continue
        life.start(queued_s=life.chance.choice((40.0, 120.0, 900.0, 3600.0)))
    life.train(12, columns or {})
    life.say("warning", topic="storage", text=f"a slow write {text}")
    if ended:
        life.say("ended", exit_code=0, exit="OK", reason="all steps are done")
    events = make_events(life.events)
    paths.events.write_bytes(b"".join(json_line(to_json(event)) + b"\n" for event in events))
    paths.steps.write_text("".join(json.dumps(row) + "\n" for row in life.rows))
    status = {
        "state": "ended" if ended else "running",
        "job_id": "7",
        "cluster": "slurm",
        "step": life.step,
        "steps": life.step if ended else 5000,
        "stragglers": [f"rank 3 on node2{text}"],
        "updated": life.now.isoformat(),
    }
    paths.status.write_text(json.dumps(status))
    samples = [
        Sample(
            sample_id=number,
            prompt=f"What is {number} + 4? {text}",
            response=f"It is {number + 4}.\n{text}",
            answer=str(number + 4),
            reward=1.0 - number / 8,
            response_tokens=6,
        )
        for number in range(8)
    ]
    append_samples(paths, life.attempt, life.step, 512, samples)
    return paths

"""How the client learns what a COMPLETING job ends as, and that no question outlasts its time."""

import asyncio
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from verl_slurm.base.errors import SlurmMissing
from verl_slurm.slurm import slurm_client as module
from verl_slurm.slurm.devcluster.cluster import DevCluster
from verl_slurm.slurm.requeue_rules import refuse_requeue
from verl_slurm.slurm.runner import Completed
from verl_slurm.slurm.slurm_client import SlurmClient

GOLDEN = Path(__file__).parent / "golden"
PARTITION = (
    "PartitionName=preemptible\n   Default=YES GraceTime={grace} MaxTime=UNLIMITED MaxNodes=UNLIMITED\n"
    "   State=UP TotalCPUs=8 TotalNodes=4\n"
)
Slurm = Callable[..., SlurmClient]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """A client whose scontrol shows that job, and what else it is asked; it notes the questions."""

    def make(
        job: str, *, json: str = "", grace: int = 0, kind: str = "preempt/partition_prio"
    ) -> SlurmClient:
        (tmp_path / "partition").write_text(PARTITION.format(grace=grace))
        (tmp_path / "config").write_text(f"PreemptType             = {kind}\n")
        shows = shlex.quote(str(GOLDEN / f"{job}.txt"))
        as_json = (
            f"exec cat {shlex.quote(str(GOLDEN / json))}"
            if json
            else "echo 'unrecognized option' >&2; exit 1"
        )
        program = tmp_path / "scontrol"
        program.write_text(
            f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase "$*" in\n*--json) {as_json};;\n'
            f'"show job"*) exec cat {shows};;\n*) exec cat {tmp_path}/$2;;\nesac\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return SlurmClient({"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    return make


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "asked").read_text().splitlines()


@pytest.mark.parametrize(
    "moment",
    ["running", "preempted_in_grace", "scancel_completing", "requeue_completing", "scancel_in_grace_over"],
)
def test_what_the_text_tells_is_asked_once(slurm: Slurm, tmp_path: Path, moment: str) -> None:
    assert asyncio.run(slurm(moment).job(1)).ended_as is None
    assert asked(tmp_path) == ["show job 1"]


@pytest.mark.parametrize(
    ("moment", "json", "end", "refusal"),
    [
        ("23.11.11/cancel_mode_6_completing", "PREEMPTED", "PREEMPTED", None),
        ("23.11.11/scancel_in_grace_completing", "CANCELLED", "CANCELLED", "cancelled"),
    ],
)
def test_json_tells_a_preemption_from_a_cancel(
    slurm: Slurm, tmp_path: Path, moment: str, json: str, end: str, refusal: str | None
) -> None:
    facts = asyncio.run(slurm(moment, json=f"{moment}.json").job(1))
    assert facts.ended_as == end == json
    found = refuse_requeue(facts, 0)
    assert (None if found is None else found.kind) == refusal
    assert asked(tmp_path) == ["show job 1", "show job 1 --json"]


@pytest.mark.parametrize(
    ("moment", "grace", "kind", "end"),
    [
        ("cancel_mode_preempted_completing", 0, "preempt/partition_prio", "PREEMPTED"),
        # in a grace time its user may have cancelled it in that very second
        ("cancel_mode_preempted_completing", 8, "preempt/partition_prio", None),
        # the grace time is the QOS's, and not shown
        ("cancel_mode_preempted_completing", 0, "preempt/qos", None),
        ("scancel_in_grace_completing", 0, "preempt/partition_prio", None),
    ],
)
def test_without_json_only_a_preemption_without_grace_time_is_certain(
    slurm: Slurm, moment: str, grace: int, kind: str, end: str | None
) -> None:
    facts = asyncio.run(slurm(moment, grace=grace, kind=kind).job(1))
    assert facts.ended_as == end
    found = refuse_requeue(facts, 0)
    assert (None if found is None else found.kind) == (None if end else "cancelled")


def test_an_answer_that_fails_on_the_way_costs_the_answer_only(slurm: Slurm, tmp_path: Path) -> None:
    client = slurm("cancel_mode_preempted_completing")
    (tmp_path / "partition").unlink()
    assert asyncio.run(client.job(1)).ended_as is None


class HungSlurm:
    """slurmctld answers, and from the given command on no more. Time is what the commands take."""

    def __init__(self, show: str, hangs_from: str) -> None:
        self.now, self.show, self.hangs_from, self.hung, self.commands = (
            0.0,
            show,
            hangs_from,
            False,
            list[str](),
        )

    def run(self, argv: list[str], env: Mapping[str, str], timeout_s: float, cwd: str | None) -> Completed:
        self.commands.append(argv[1])
        self.hung = self.hung or argv[1] == self.hangs_from
        if self.hung:
            self.now += timeout_s
            raise SlurmMissing("Slurm does not answer", found=f"no end within {timeout_s:g} s")
        return Completed(exit_code=0, stdout=self.show, stderr="", seconds=0.0)


@pytest.mark.scenario("L13")
@pytest.mark.parametrize(
    ("hangs_from", "at_most_s", "kind"),
    [
        ("show", 8.0, None),
        ("requeue", 8.0, None),
        ("update", 8.1, "unconfirmed"),
        ("nothing", 0.0, "unconfirmed"),
    ],
)
def test_a_requeue_takes_no_longer_than_killwait_wherever_slurmctld_hangs(
    monkeypatch: pytest.MonkeyPatch, hangs_from: str, at_most_s: float, kind: str | None
) -> None:
    hung = HungSlurm((GOLDEN / "running.txt").read_text(), hangs_from)
    monkeypatch.setattr(module, "run_command", hung.run)
    monkeypatch.setattr(module.time, "monotonic", lambda: hung.now)
    monkeypatch.setattr(module, "_READ_BACK_PAUSE_S", 0.0)
    monkeypatch.setattr(SlurmClient, "_program", lambda self, name: name)
    outcome = None
    try:
        outcome = asyncio.run(SlurmClient({}).requeue(1, 10, own_restarts=0))
    except SlurmMissing:
        assert hangs_from in ("show", "requeue")
    assert (None if outcome is None else outcome.kind) == kind
    assert hung.now <= at_most_s
    assert hung.commands.count("requeue") == (0 if hangs_from == "show" else 1)


INSIDE = """
import asyncio, os, signal, sys
from datetime import UTC, datetime
from verl_slurm.slurm.cause import decide_cause
from verl_slurm.slurm.slurm_client import SlurmClient
from verl_slurm.slurm.slurm_environment import SlurmJob
job = SlurmJob.from_environ(os.environ)
if job.restart_count:
    sys.exit(print("again", flush=True))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCONT])
print("ready", flush=True)
while signal.sigwait([signal.SIGTERM, signal.SIGCONT]) != signal.SIGTERM:
    pass
client = SlurmClient()
facts = asyncio.run(client.job(job.job_id))
print(decide_cause("term", facts, own_restarts=0, signal_lead_s=60, now=datetime.now(UTC)).kind, flush=True)
print(asyncio.run(client.requeue(job.job_id, 2, own_restarts=0)).kind, flush=True)
"""


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("ends_by", "said"), [("preemption", "preemption requeued"), ("scancel", "cancel cancelled")]
)
def test_a_job_that_slurm_would_cancel_for_another_comes_back_and_one_that_its_user_cancels_does_not(
    make_cluster: Callable[..., DevCluster], tmp_path: Path, ends_by: str, said: str
) -> None:
    """PreemptMode=CANCEL, GraceTime=0: Slurm does not requeue, and warns of nothing."""
    env = make_cluster(nodes=1).client_env()
    script, output = tmp_path / "inside.py", tmp_path / "out"
    script.write_text(f"#!{sys.executable}\n{INSIDE}")

    async def story() -> tuple[str, int]:
        client = SlurmClient(env)
        done = await client.run(
            ["scontrol", "update", "PartitionName=preemptible", "PreemptMode=CANCEL", "GraceTime=0"]
        )
        assert done.exit_code == 0, done.stderr
        mine = ["--requeue", "--exclusive", "--open-mode=append", f"--output={output}", str(script)]
        job = await client.submit(mine, "the job")
        async with asyncio.timeout(100):
            while "ready" not in (output.read_text() if output.exists() else ""):  # noqa: ASYNC110 - one has to ask
                await asyncio.sleep(0.2)
            if ends_by == "scancel":
                await client.cancel(job)
            else:
                await client.submit(
                    ["--partition=urgent", "--exclusive", "--wrap=exit 0", "--output=/dev/null"], "it"
                )
            while not (facts := await client.job(job)).is_over or facts.ended_as:  # noqa: ASYNC110 - one has to ask
                await asyncio.sleep(0.2)
        return facts.state, facts.restarts

    final = asyncio.run(story())
    words = " ".join(re.findall(r"^\w+$", output.read_text(), re.MULTILINE))
    assert words == f"ready {said}" + (" again" if ends_by == "preemption" else "")
    assert final == (("COMPLETED", 1) if ends_by == "preemption" else ("CANCELLED", 0))

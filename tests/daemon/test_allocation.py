"""What an allocation finds out from Slurm before the lead takes a run over. Slurm's answers are scripted."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import psutil
import pytest
from verl_slurm_daemon.allocation import slurm_job as slurm_allocation
from verl_slurm_daemon.allocation.local import LocalAllocation
from verl_slurm_daemon.allocation.slurm_job import SlurmAllocation
from verl_slurm_daemon.lead import attempt_start

from tests.builders import new_run, owner
from verl_slurm.base.errors import NotFound, SlurmMissing, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.processes import birth_of
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.journal.files import append_event
from verl_slurm.journal.history import History
from verl_slurm.slurm.facts import JobFacts
from verl_slurm.slurm.parse import parse_job, parse_node
from verl_slurm.slurm.slurm_environment import SlurmJob

OWNER = owner(cluster="slurm", job_id="37")
GOLDEN = Path(__file__).parent.parent / "slurm" / "golden" / "running.txt"
RECORD = re.sub(r"JobId=\d+", "JobId=37", GOLDEN.read_text())
SILENCE = SlurmMissing("Slurm does not answer")
FORGOTTEN = NotFound("no such job")


class _Slurm:
    """Answers with one state after the other; the last one for ever."""

    def __init__(self, *answers: str | VerlSlurmError) -> None:
        self._answers, self.asked = list(answers), 0

    async def job(self, job_id: int) -> object:
        assert job_id == 37
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if isinstance(answer, VerlSlurmError):
            raise answer
        return parse_job(re.sub(r"JobState=\S+", f"JobState={answer}", RECORD), job_id)


@pytest.mark.scenario("C04")
@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (("RUNNING",), "job 37 is RUNNING"),
        (("PENDING",), "job 37 is PENDING"),
        (("CANCELLED",), ""),
        (("COMPLETING", "COMPLETING", "CANCELLED"), ""),
        (("COMPLETING", FORGOTTEN), ""),
        (("COMPLETING", "PENDING"), "job 37 is PENDING"),
        (("COMPLETING",), "job 37 is COMPLETING"),
        ((SILENCE, "RUNNING"), "job 37 is RUNNING"),
        ((SILENCE,), None),  # not taken for its end: asked until it answers
        ((FORGOTTEN,), ""),
    ],
)
def test_a_former_job_holds_the_run_until_slurm_says_that_it_is_over(
    answers: tuple[str | VerlSlurmError, ...],
    verdict: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm_allocation, "_ASK_AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(slurm_allocation, "_LEAVING_S", (0.0, 0.0, 0.0))
    slurm = _Slurm(*answers)
    monkeypatch.setattr(slurm_allocation, "SlurmClient", lambda: slurm)
    job = SlurmJob.from_environ(
        {
            "SLURM_JOB_ID": "38",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURMD_NODENAME": "node1",
        }
    )
    assert job is not None
    mine = SlurmAllocation(job, RunConfig(), RunPaths(tmp_path))
    with pytest.raises(SlurmMissing) if verdict is None else contextlib.nullcontext():
        assert asyncio.run(mine.still_alive(OWNER)) == verdict
    assert slurm.asked <= 4


ENDED = ev.Ended(25, "REQUEUED", "x", attempt=1, job_id="38")
OVER = ev.Ended(22, "CRASHED", "x", attempt=1, job_id="38")


@pytest.mark.parametrize(
    ("last", "lives"),
    [
        ((), True),
        ((ENDED,), True),
        ((ENDED, ev.CancelAsked()), False),
        ((ev.CancelAsked(),), False),
        ((OVER,), False),
    ],
    ids=["works", "waits", "cancelled in the queue", "cancelled, and silent since", "over"],
)
def test_a_run_on_another_cluster_is_judged_by_its_journal_and_not_by_a_number(
    last: tuple[ev.Event, ...], lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_allocation, "_LEAVING_S", (0.0, 0.0))
    monkeypatch.setattr(slurm_allocation, "SlurmClient", lambda: _Slurm("RUNNING"))
    paths = new_run(tmp_path / "run")
    for event in (ev.Submitted(slurm="there", job_id="38"), ev.Started(slurm="there", attempt=1), *last):
        append_event(paths, event)
    environ = {"SLURM_JOB_ID": "38", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    job = SlurmJob.from_environ(environ | {"SLURMD_NODENAME": "n1", "SLURM_CLUSTER_NAME": "here"})
    assert job is not None
    mine = SlurmAllocation(job, RunConfig(), paths)
    # Its number is this job's own, or that of somebody's job here.
    for number in ("38", "37"):
        alive = asyncio.run(mine.still_alive(owner(cluster="slurm", job_id=number, slurm="there", attempt=1)))
        assert ("of Slurm cluster there has not ended, and this is here" in alive) is lives
    # A job that was requeued meanwhile began before the cluster was renamed.
    again = msgspec.structs.replace(job, restart_count=1)
    former = owner(cluster="slurm", job_id="38", slurm="there", attempt=1)
    assert asyncio.run(SlurmAllocation(again, RunConfig(), paths).still_alive(former)) == ""


def test_a_number_that_is_another_job_by_now_holds_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_allocation, "SlurmClient", lambda: _Slurm("RUNNING"))
    paths = new_run(tmp_path / "run")
    append_event(paths, ev.Submitted(job_id="37"))
    environ = {"SLURM_JOB_ID": "38", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    job = SlurmJob.from_environ(environ | {"SLURMD_NODENAME": "n1"})
    assert job is not None
    assert asyncio.run(SlurmAllocation(job, RunConfig(), paths).still_alive(OWNER)) == ""


@pytest.mark.scenario("C04", "K02")
@pytest.mark.parametrize("taken", ["1970-01-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00"])
def test_whether_a_local_lead_lives_is_asked_by_its_birth_and_not_by_dates(
    tmp_path: Path, taken: str
) -> None:
    mine = LocalAllocation(RunConfig(), RunPaths(tmp_path))
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        here, born = socket.gethostname(), birth_of(living.pid)
        lead = owner(host=here, pid=living.pid, taken=taken, born=born)
        assert f"process {living.pid} of job local-1 lives" in asyncio.run(mine.still_alive(lead))
        another = msgspec.structs.replace(lead, born=birth_of(os.getpid()))
        assert asyncio.run(mine.still_alive(another)) == "", "only its number is that of a living one"
    finally:
        living.kill()
        living.communicate()
    assert asyncio.run(mine.still_alive(lead)) == ""


def test_a_local_requeue_that_a_user_asked_for_is_no_preemption(tmp_path: Path) -> None:
    paths = new_run(tmp_path / "run")
    mine = LocalAllocation(RunConfig(), paths)
    told = []
    asked = ev.RequeueAsked(), ev.RequeueAsked(at_once=True)
    for event in (ev.Started(attempt=1), *asked, ev.Started(attempt=2)):
        append_event(paths, event)
        cause = asyncio.run(mine.cause("SIGUSR2 to lead"))
        told.append((cause.kind, cause.seconds_left))
    assert told == [
        ("preemption", 30.0),
        ("operator_requeue", None),
        ("requeued", 30.0),
        ("preemption", 30.0),
    ]


def test_sruns_shepherd_does_not_take_the_agents_with_it(tmp_path: Path) -> None:
    """It has Slurm KILL the step when srun has died: also where the lead was killed a moment before."""
    srun = tmp_path / "srun"
    shutil.copy("/bin/sh", srun)
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    environ |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_PARTITION": "p"}
    job = SlurmJob.from_environ(environ)
    assert job is not None
    mine = SlurmAllocation(job, RunConfig(), RunPaths(tmp_path))

    async def story() -> tuple[int | None, str]:
        script = f"exec 3<&0; '{srun}' -c 'read x <&3; :' & echo $!; wait $!; echo $?; read x"
        process = await asyncio.create_subprocess_exec(
            str(srun), "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        shepherd = int(await process.stdout.readline())
        assert psutil.Process(shepherd).name() == "srun"
        mine.keep_step([process])
        ended = (await process.stdout.readline()).decode().strip()
        lives = process.returncode
        process.kill()
        await process.wait()
        return lives, ended

    assert asyncio.run(story()) == (None, str(128 + 9))


@pytest.mark.scenario("USE01")
@pytest.mark.parametrize(
    ("moment", "refused", "said", "asked"),
    [
        ("running", "", "Requeue=0 is set: Slurm does not start this job again", 1),
        ("newer/25.11_running_expedited", "", "Requeue=0 is set: Slurm does not start this job again", 1),
        ("running", "no", "Slurm may start, or hold, the ended job again (scancel 1): ", 1),
        ("newer/25.11_node_lost_completing_expedited", "", "", 0),  # it is to come back
        ("scancel_completing", "", "", 0),
    ],
)
def test_a_run_that_is_over_is_neither_held_nor_started_again(
    moment: str, refused: str, said: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25.11 holds one that was expedited; 24.05 to 25.11 start one again that was preempted before."""
    told: list[int] = []
    record = (Path(__file__).parents[1] / "slurm" / "golden" / f"{moment}.txt").read_text()
    monkeypatch.setattr(slurm_allocation, "_WITHDRAW_S", 0.2)

    class Slurm:
        async def job(self, job_id: int) -> object:
            return parse_job(record, job_id)

        async def forbid_requeue(self, facts: JobFacts) -> str:
            told.append(facts.job_id)
            return refused

    monkeypatch.setattr(slurm_allocation, "SlurmClient", Slurm)
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n1",
    }
    job = SlurmJob.from_environ(environ)
    assert job is not None
    answer = asyncio.run(SlurmAllocation(job, RunConfig(), RunPaths(tmp_path)).withdraw())
    assert answer.startswith(said) if said else not answer
    assert len(told) == asked


def test_a_silent_slurm_does_not_keep_a_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = _Slurm(SILENCE)
    monkeypatch.setattr(slurm_allocation, "SlurmClient", lambda: slurm)
    environ = {
        "SLURM_JOB_ID": "37",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n1",
    }
    job = SlurmJob.from_environ(environ)
    assert job is not None
    mine = SlurmAllocation(job, RunConfig(), RunPaths(tmp_path))
    monkeypatch.setattr(slurm_allocation, "_WITHDRAW_S", 0.2)
    assert "Slurm may start, or hold, the ended job again" in asyncio.run(mine.withdraw())


ENVIRON = {
    "SLURM_JOB_ID": "37",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURMD_NODENAME": "n1",
}


def in_job_37(slurm: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: str) -> SlurmAllocation:
    monkeypatch.setattr(slurm_allocation, "SlurmClient", lambda: slurm)
    job = SlurmJob.from_environ(ENVIRON | more)
    assert job is not None
    return SlurmAllocation(job, RunConfig(), RunPaths(tmp_path))


def test_of_a_job_that_slurm_ends_already_nothing_is_asked_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are left: a slurmctld that hangs would take them."""
    record = (GOLDEN.parent / "scancel_completing.txt").read_text()
    asked = []

    class Slurm:
        async def job(self, job_id: int) -> object:
            asked.append(job_id)
            return parse_job(record, 1)

    mine = in_job_37(Slurm(), tmp_path, monkeypatch)
    assert asyncio.run(mine.cause("SIGTERM to lead")).kind == "cancel"
    assert asyncio.run(mine.withdraw()) == ""
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("conf", "codes"),
    [
        ({}, {0: 0, 21: 21, 25: 25}),
        ({"RequeueExit": "(null)", "RequeueExitHold": "(null)"}, {0: 0, 21: 21, 25: 25}),
        ({"RequeueExit": "0-24,30", "RequeueExitHold": "25,64-65"}, {0: 0, 21: 66, 25: 66, 26: 26}),
        ({"RequeueExit": "1-255"}, {0: 0, 21: 21}),
    ],
)
def test_a_job_leaves_with_a_code_that_the_site_neither_starts_again_nor_holds(
    conf: dict[str, str], codes: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slurm:
        async def config_and_time(self) -> tuple[dict[str, str], None]:
            return conf, None

    mine = in_job_37(Slurm(), tmp_path, monkeypatch)
    assert {code: asyncio.run(mine.exit_code(ExitCode(code))) for code in codes} == codes


def test_the_next_life_of_an_expedited_job_is_not_forbidden_its_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = (GOLDEN.parent / "newer/25.11_running_expedited.txt").read_text()

    class Slurm:
        async def job(self, job_id: int) -> object:
            return msgspec.structs.replace(parse_job(record, 1), job_id=job_id, restarts=1)

    assert asyncio.run(in_job_37(Slurm(), tmp_path, monkeypatch).withdraw()) == ""


@pytest.mark.parametrize(
    ("moment", "hastened"),
    [("newer/25.11_node_lost_completing_expedited", False), ("26.05.5/node_lost_completing", True)],
)
def test_a_job_that_slurm_expedites_is_given_no_start_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, hastened: bool
) -> None:
    record, starts = (GOLDEN.parent / f"{moment}.txt").read_text(), []

    class Slurm:
        async def job(self, _: int) -> object:
            return parse_job(record, 1)

        async def set_start(self, *_: object) -> None:
            starts.append(1)

    asyncio.run(in_job_37(Slurm(), tmp_path, monkeypatch).hasten(clean=True))
    assert bool(starts) is hastened


def test_a_start_that_slurm_overruled_makes_later_requeues_wait_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = (GOLDEN.parent / "time_limit_running.txt").read_text()
    wanted = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
    late: list[float] = []

    class Slurm:
        async def job(self, _: int) -> object:
            eligible = wanted + timedelta(seconds=late[-1])
            return msgspec.structs.replace(parse_job(record, 1), eligible_time=eligible)

    allocation = in_job_37(Slurm(), tmp_path, monkeypatch)
    assert allocation._delay_from_now(left=True) == 2
    events: list[ev.Event] = [ev.Ended(25, next_start=wanted.isoformat())]
    late.append(10.0)  # it waited for nodes
    assert asyncio.run(allocation.learn(History(events))) is None
    assert allocation._delay_from_now(left=True) == 2
    late.append(121.0)
    first, third = (
        ev.Started("slurm", requeues=n, attempt=n, job_id="37", time=wanted.isoformat()) for n in (0, 2)
    )
    twice = [first, *events, third]
    assert asyncio.run(allocation.learn(History(twice))) is None, (
        "the batch script asked for a start in between"
    )
    found = asyncio.run(allocation.learn(History(events)))
    assert found is not None
    assert allocation._delay_from_now(left=True) == 8
    # The journal remembers it for the attempts after this one.
    late.append(0.0)
    assert asyncio.run(allocation.learn(History([found, *events]))) is None
    assert allocation._delay_from_now(left=True) == 8
    assert asyncio.run(allocation.learn(History([found] * 9))) is None
    assert allocation._delay_from_now(left=True) == 60


def test_signals_without_end_ask_slurmctld_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_allocation, "ASK_EVERY_S", 3600.0)
    slurm = _Slurm("RUNNING", "RUNNING")
    mine = in_job_37(slurm, tmp_path, monkeypatch)

    async def story() -> None:
        await mine.cause("SIGUSR1 to lead")
        await asyncio.wait_for(mine.cause("SIGUSR1 to lead"), 0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(story())
    assert slurm.asked == 1


def test_what_slurm_takes_to_answer_is_no_time_left_of_killwait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = (GOLDEN.parent / "time_limit_completing.txt").read_text()
    clock = [100.0]

    class Slurm:
        async def job(self, _: int) -> object:
            clock[0] += 17.0
            return parse_job(record, 1)

    mine = in_job_37(Slurm(), tmp_path, monkeypatch)
    monkeypatch.setattr(slurm_allocation.time, "monotonic", lambda: clock[0])
    known = asyncio.run(mine.cause("SIGTERM to lead"))
    assert (known.kind, known.seconds_left) == ("time_limit", 13.0)


@pytest.mark.parametrize(
    ("found", "asks_again"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
        ("no end within 8 s", True),
        ("[Errno 11] Resource temporarily unavailable", False),  # here, not there: Slurm does end the job
    ],
)
def test_at_the_time_limit_a_slurmctld_that_is_away_is_waited_for(
    found: str, asks_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else ends the job; and when it is back it does so with KillWait, enough for the request."""
    record = (GOLDEN.parent / "time_limit_running.txt").read_text()
    facts = parse_job(record, 1)
    assert facts.end_time is not None
    clock = [100.0]

    class Slurm:
        async def job(self, _: int) -> object:
            return facts

        async def config_and_time(self) -> object:
            raise SlurmMissing("Slurm does not answer", found=found)

        async def requeue(self, *_: object, **__: object) -> object:
            raise SlurmMissing("Slurm does not answer", found=found)

    mine = in_job_37(Slurm(), tmp_path, monkeypatch)
    monkeypatch.setattr(mine._clock, "now", lambda: facts.end_time)
    monkeypatch.setattr(slurm_allocation.time, "monotonic", lambda: clock[0])
    assert asyncio.run(mine.cause("SIGUSR1 to lead")).kind == "time_limit"
    assert isinstance(asyncio.run(mine.requeue()), str)
    clock[0] += 600.0
    assert isinstance(asyncio.run(mine.requeue()), str) is asks_again


@pytest.mark.scenario("FLT-B")
def test_a_silent_slurm_does_not_tell_where_the_lead_is_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slurm:
        asked = 0

        async def config_and_time(self) -> object:
            raise SILENCE

        async def node_addr(self, _: str) -> str:
            self.asked += 1
            if self.asked == 1:
                raise SILENCE
            return "10.0.0.1"

    slurm, said = Slurm(), []
    mine = in_job_37(slurm, tmp_path, monkeypatch)
    monkeypatch.setattr(attempt_start, "IN_PLACE_S", (0.0,))
    calls = attempt_start.SignalsHeard(mine.cause)
    asked = attempt_start.patiently(
        mine.address, calls.are_final, lambda error, pause: said.append(str(error))
    )
    assert asyncio.run(asked) == "10.0.0.1"
    assert said == [str(SILENCE)]
    assert asyncio.run(mine.address()) == "10.0.0.1"
    assert slurm.asked == 2, "once it is known, nothing depends on an answer"


@pytest.mark.parametrize("known", ["without an address", "not at all"])
def test_a_node_without_an_address_has_its_name(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slurm:
        async def config_and_time(self) -> object:
            raise SILENCE

        async def node_addr(self, name: str) -> str:
            text = f"NodeName={name} State=ALLOCATED CPUTot=2\n" if known == "without an address" else ""
            return parse_node(text, name).addr

    mine = in_job_37(Slurm(), tmp_path, monkeypatch)
    assert asyncio.run(mine.address()) == mine._job.node_name


@pytest.mark.scenario("FLT-B")
@pytest.mark.parametrize(
    ("signal", "kind"), [("SIGUSR2 to lead", "operator_requeue"), ("SIGUSR1 to lead", "unknown")]
)
def test_a_wish_for_a_requeue_is_kept_while_slurm_says_nothing(
    signal: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = in_job_37(_Slurm(SILENCE), tmp_path, monkeypatch)
    assert asyncio.run(mine.cause(signal)).kind == kind


@pytest.mark.scenario("FLT-B")
def test_the_question_after_a_silence_finds_the_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slurm(_Slurm):
        async def job(self, job_id: int) -> object:
            await super().job(job_id)
            return parse_job((GOLDEN.parent / "preempted_in_grace.txt").read_text(), 1)

    monkeypatch.setattr(slurm_allocation, "ASK_EVERY_S", 0.0)
    mine = in_job_37(Slurm(SILENCE, "RUNNING"), tmp_path, monkeypatch)
    told = [asyncio.run(mine.cause("SIGTERM to node n1")).kind for _ in range(2)]
    assert told == ["unknown", "preemption"]


def test_a_job_with_fewer_nodes_than_the_run_needs_waits_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator made it smaller while it waited."""
    mine = in_job_37(_Slurm("RUNNING"), tmp_path, monkeypatch)
    assert mine.lacks().startswith(
        "the job has 1 of the 2 nodes that the run needs at least: scontrol update JobId=37 NumNodes=2"
    )
    whole = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert not in_job_37(_Slurm("RUNNING"), tmp_path, monkeypatch, **whole).lacks()


@pytest.mark.scenario("FLT-H")
@pytest.mark.parametrize(
    ("limit_s", "left_s", "kind", "lead_s"),
    [
        (60, 58, "operator", 30),  # Slurm's warning, as soon as it starts: 120 s are more than there is
        (60, 29, "time_limit", 30),
        (150, 100, "operator", 75),
        (600, 150, "time_limit", None),
    ],
)
def test_a_time_limit_that_is_shorter_than_the_lead_time_leaves_half_of_it_for_training(
    limit_s: int,
    left_s: int,
    kind: str,
    lead_s: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    end = now + timedelta(seconds=left_s)
    running = parse_job((GOLDEN.parent / "running.txt").read_text(), 1)
    facts = msgspec.structs.replace(running, end_time=end, start_time=end - timedelta(seconds=limit_s))

    class Slurm:
        async def job(self, _: int) -> object:
            return facts

    mine = in_job_37(Slurm(), tmp_path, monkeypatch)
    monkeypatch.setattr(mine._clock, "now", lambda: now)
    assert asyncio.run(mine.cause("SIGUSR1 to lead")).kind == kind
    outlook = asyncio.run(mine.outlook())
    assert (outlook.limit_s, outlook.lead_s) == (limit_s, lead_s)
    asyncio.run(mine.learn(History([ev.Saved("step_000001", seconds=40.0)])))
    if lead_s == 30:
        assert asyncio.run(mine.outlook()).lead_s == 43, "a save takes 40 s, and 3 s are its margin"

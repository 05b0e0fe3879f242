"""What a lead meets at its start: failing storage, edited files, a run that is done. Real leads, no Slurm, no torch."""

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import psutil
import pytest
from verl_slurm_daemon.lead import attempt_start
from verl_slurm_daemon.lead.attempt_start import require_mounted, storage_fault

from tests.builders import run_config, write_config
from tests.harness import ROOT
from tests.journals import append_event, read_events
from tests.local_runs import lead, until
from verl_slurm.base.errors import ConfigError, Fenced, KeyRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import read_owner, take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, clear_work, commit_tree
from verl_slurm.config.load import load_resolved
from verl_slurm.config.schema import ContainerConfig, EncryptionConfig
from verl_slurm.journal.events import Restart
from verl_slurm.journal.history import History
from verl_slurm.submit.submission import carry_out, plan_submission

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 30 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m,mode=700", "t", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("NOT RUN: mounting a file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def guest_run(root: Path) -> RunPaths:
    """A prepared run on two hosts, of which the second one never joins: a start gets as far as `restart`."""
    program = root.parent / "train.py"
    program.write_text("")
    (root.parent / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    shape = ("distributed.dp_size=2", "distributed.nodes=2", "daemon.requeue_delay_s=1")
    words = [f"run_dir={root}", "code.tree=null", f"trainer.command=[{program}]", *shape]
    plan = plan_submission(ROOT / "configs/pytorch_loop.yaml", words, cluster="local")
    carry_out(plan, prepare_only=True)
    return RunPaths(root)


def begin(paths: RunPaths, **environ: str) -> "subprocess.Popen[str]":
    return lead(paths, "--hostfile", str(paths.root.parent / "hosts"), environ=environ)


def outcome(process: "subprocess.Popen[str]") -> tuple[int | str, str]:
    """How a start came out: `ranks`, where it would have started them, or its exit code; and what it said."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "] restart " in line:
            process.terminate()
            process.communicate(timeout=300)
            return "ranks", "".join(said)
    process.communicate(timeout=300)
    return process.returncode, "".join(said)


def committed(paths: RunPaths, step: int) -> str:
    """A checkpoint as a guest of this run would have written it."""
    with patch("verl_slurm.base.fence.socket.gethostname", return_value="another-host"):
        attempt = (read_owner(paths) or take_attempt(paths, job_id="local-1", restart=0)).attempt
    work = clear_work(paths, attempt)
    private_dir(work / "guest")
    write_file(work / "guest" / "state", b"state")
    private_dir(paths.checkpoints)
    save = LoopSave(guest="loop", step=step, attempt=attempt, world_size=2)
    return commit_tree(paths, save, {"guest": work / "guest"}).name


def told(paths: RunPaths, kind: str) -> list[dict[str, object]]:
    return [event for event in read_events(paths) if event["event"] == kind]


@pytest.mark.long
@pytest.mark.scenario("FLT-N06")
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_start_on_storage_that_takes_nothing_waits_until_it_does(small_disk: Path, trouble: str) -> None:
    paths = guest_run(small_disk / "run")
    filler = small_disk / "fill"
    if trouble == "full":
        with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    process = begin(paths)
    line = until(process, "tries again")
    assert ("No space left" if trouble == "full" else "Read-only") in line
    if trouble == "full":
        filler.unlink()
    else:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert outcome(process)[0] == "ranks"


def test_a_start_of_a_run_whose_checkpoints_were_moved_and_linked_waits_until_they_are_back(
    tmp_path: Path,
) -> None:
    paths = guest_run(tmp_path / "run")
    committed(paths, 1)
    elsewhere = paths.checkpoints.rename(tmp_path / "large")
    paths.checkpoints.symlink_to(elsewhere)
    process = begin(paths)
    assert f"found a link to {elsewhere}" in until(process, "tries again")
    paths.checkpoints.unlink()
    elsewhere.rename(paths.checkpoints)
    assert outcome(process)[0] == "ranks"


@pytest.mark.long
@pytest.mark.scenario("FLT-N06")
def test_a_start_that_storage_stopped_asks_for_another_and_never_ends_with_22(small_disk: Path) -> None:
    """Slurm's part is played by `scontrol` and `srun` of the test: the job comes back after a delay."""
    paths = guest_run(small_disk / "run")
    tools = small_disk.parent / "bin"
    tools.mkdir()
    asked = tools / "asked"
    running = Path(__file__).parents[1] / "slurm" / "golden" / "running.txt"
    script = f"""#!{sys.executable}
import pathlib, sys
asked = pathlib.Path({str(asked)!r})
if sys.argv[1] == "show":
    text = pathlib.Path({str(running)!r}).read_text()
    if asked.exists() and "requeue" in asked.read_text():
        text = text.replace("Restarts=0", "Restarts=1").replace("JobState=RUNNING", "JobState=COMPLETING")
    print(text)
else:
    with asked.open("a") as file:
        print(*sys.argv[1:], file=file)
"""
    (tools / "scontrol").write_text(script)
    (tools / "scontrol").chmod(0o755)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n1",
    }
    process = lead(paths, environ={**job, "PATH": f"{tools}:{os.environ['PATH']}"})
    out, _ = process.communicate(timeout=300)
    assert process.returncode == ExitCode.REQUEUED, out
    said = asked.read_text().splitlines()
    assert said[0].startswith("requeue 1")
    assert any(line.startswith("update JobId=1 StartTime=uts") for line in said)
    assert not any("Requeue=0" in line for line in said)


@pytest.mark.scenario("FLT-N07")
@pytest.mark.parametrize(
    "known_by",
    [pytest.param("the ranks that were started", marks=pytest.mark.long), "the newest checkpoint alone"],
)
@pytest.mark.variant
def test_an_edited_run_yaml_is_refused_with_its_keys_before_ranks_start(
    tmp_path: Path, known_by: str
) -> None:
    paths = guest_run(tmp_path / "run")
    committed(paths, 2)
    if known_by.startswith("the ranks"):
        assert outcome(begin(paths))[0] == "ranks"
    starts = len(told(paths, "restart"))
    config = load_resolved(paths.run_yaml)
    edited = msgspec.structs.replace(
        config,
        seed=config.seed + 7,
        daemon=msgspec.structs.replace(config.daemon, backoff_s=0.1),
    )
    write_config(paths, edited)
    code, out = outcome(begin(paths))
    assert code == ExitCode.CONFIG, out
    assert f"seed: {config.seed} -> {config.seed + 7}" in out
    assert "backoff_s" not in out
    assert len(told(paths, "restart")) == starts
    again = [sys.executable, "-m", "verl_slurm.cli", "submit", str(paths.root), "--cluster", "local"]
    done = subprocess.run([*again, "--dry-run"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == ExitCode.CONFIG, done.stdout + done.stderr
    assert "seed: " in done.stderr
    write_config(paths, msgspec.structs.replace(edited, seed=config.seed))
    assert outcome(begin(paths))[0] == "ranks"  # what may change is taken


@pytest.mark.scenario("USE01")
def test_a_loop_that_is_done_is_started_again_by_its_job_without_ranks(tmp_path: Path) -> None:
    paths = guest_run(tmp_path / "run")
    name = committed(paths, 4)
    append_event(paths, "started", attempt=1, job_id="77", requeues=0)
    append_event(paths, "ended", attempt=1, job_id="77", exit_code=0, exit="OK", checkpoint=name)
    for _ in range(2):
        assert outcome(begin(paths, SUBMITIT_LOCAL_JOB_ID="77"))[0] == 0
        assert told(paths, "ended")[-1]["checkpoint"] == name
    # Of another job: the program may have been made longer.
    assert outcome(begin(paths, SUBMITIT_LOCAL_JOB_ID="78"))[0] == "ranks"


@pytest.mark.long
@pytest.mark.scenario("USE01")
@pytest.mark.variant
def test_a_done_loop_whose_last_checkpoint_is_damaged_is_trained_again(tmp_path: Path) -> None:
    paths = guest_run(tmp_path / "run")
    committed(paths, 2)
    name = committed(paths, 4)
    append_event(paths, "ended", attempt=1, job_id="77", exit_code=0, exit="OK", checkpoint=name)
    (paths.checkpoints / name / "guest" / "state").write_bytes(b"stat!")
    assert outcome(begin(paths, SUBMITIT_LOCAL_JOB_ID="77"))[0] == "ranks"
    assert told(paths, "restart")[0]["resume"] == "step_000002"


@pytest.mark.scenario("FLT-O2")
def test_a_fenced_lead_that_waits_leaves_within_seconds(tmp_path: Path) -> None:
    """Its second host never joins: nothing happens that it could learn by."""
    paths = guest_run(tmp_path / "run")
    process = begin(paths)
    until(process, "] restart ")
    while not any(" joined " in log.read_text() for log in paths.logs.glob("*.agent.log")):
        assert process.poll() is None
        time.sleep(0.05)  # its own agent's word that it is there: after it nothing comes
    take_attempt(paths, job_id="8", restart=0)
    since = time.monotonic()
    code, out = outcome(process)
    assert code == ExitCode.FENCED, out
    assert "a newer attempt owns the run" in out
    assert (
        time.monotonic() - since < 45
    )  # after 60 s the missing host is an event, by which it learned before


@pytest.mark.scenario("USE-SMALL")
def test_a_host_that_is_not_known_is_refused_by_its_name(tmp_path: Path) -> None:
    paths = guest_run(tmp_path / "run")
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nno-such-host.invalid slots=1\n")
    code, out = outcome(begin(paths))
    assert code == ExitCode.CONFIG, out
    assert "no-such-host.invalid" in out


@pytest.mark.scenario("USE-SMALL")
def test_a_step_that_falls_apart_before_all_came_blames_no_node(tmp_path: Path) -> None:
    """24.11's srun ends the agents that run, where a node cannot be reached."""
    paths = guest_run(tmp_path / "run")
    process = begin(paths)
    until(process, "] restart ")
    log = paths.agent_log(1, 0)
    deadline = time.monotonic() + 120
    while not log.exists() or " joined " not in log.read_text():  # the lead says nothing of it
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (agent,) = [p for p in psutil.Process(process.pid).children() if "agent" in p.cmdline()]
    agent.kill()
    until(process, " crash ")
    process.terminate()
    process.communicate(timeout=300)
    (crash,) = told(paths, "crash")
    assert (crash["kind"], crash["node"]) == ("environment", None)
    assert "1 of 2 agents had not come" in str(crash["detail"])


def test_a_start_that_waits_for_silent_storage_leaves_soon_after_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_start, "_LAST_WAIT_S", 0.0)
    said: list[Exception] = []

    async def story() -> None:
        signalled = asyncio.Event()

        async def interrupted() -> bool:
            return signalled.is_set()

        waiting = asyncio.create_task(
            attempt_start.patiently(asyncio.Event().wait, interrupted, lambda error, _: said.append(error))
        )
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done, "without a signal it waits"
        signalled.set()
        with pytest.raises(TimeoutError, match="storage did not answer, and a signal came"):
            await waiting

    asyncio.run(story())
    assert said == []


_AGAIN = History([Restart(1, None, "start+0")])


@pytest.mark.parametrize("away", ["data.root", "data.eval_root", "model.path"])
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_place_that_is_not_mounted_any_more_is_storage_that_is_away(
    tmp_path: Path, away: str, how: str
) -> None:
    places = {key: tmp_path / key for key in ("data.root", "data.eval_root", "model.path")}
    for place in places.values():
        place.mkdir()
        (place / "file").touch()
    data = {"root": str(places["data.root"]), "eval_root": str(places["data.eval_root"])}
    config = run_config(path=str(places["model.path"]), **data)
    require_mounted(config, _AGAIN)
    (places[away] / "file").unlink()
    if how == "missing":
        places[away].rmdir()
    require_mounted(config, History())
    with pytest.raises(FileNotFoundError, match=f"{away} was there when the run started"):
        require_mounted(config, _AGAIN)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EIO])
@pytest.mark.parametrize(("kind", "waits_first"), [(KeyRefused, False), (ConfigError, True)])
def test_a_key_or_an_image_that_cannot_be_read_is_wrong_at_the_first_start_alone(
    kind: type[VerlSlurmError], waits_first: bool, number: int
) -> None:
    config = run_config(container=ContainerConfig(image="/i.sif"))
    error, cause = kind("it cannot be read"), OSError(number, os.strerror(number), "/i.sif")
    error.__cause__ = cause
    assert storage_fault(error, config, _AGAIN) is cause
    first = number == errno.EIO or (waits_first and number == errno.EACCES)
    assert storage_fault(error, config, History()) is (cause if first else None)
    other = Fenced("another job has it")
    other.__cause__ = cause
    assert storage_fault(other, config, _AGAIN) is None


@pytest.mark.parametrize("away", ["key_file", "old_key_files"])
def test_a_key_that_was_there_before_is_storage_that_is_away(tmp_path: Path, away: str) -> None:
    keys = {"key_file": tmp_path / "key_file", "old_key_files": tmp_path / "old_key_files"}
    for place in (*keys.values(), tmp_path / "data"):
        place.write_text("any")
    encryption = EncryptionConfig(key_file=str(keys["key_file"]), old_key_files=[str(keys["old_key_files"])])
    config = run_config(path=str(tmp_path / "data"), root=str(tmp_path / "data"), encryption=encryption)
    require_mounted(config, _AGAIN)
    keys[away].rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=f"{away}.* was there when the run started"):
        require_mounted(config, _AGAIN)

"""An agent's log and its streams: whatever is wrong with the disk or with srun, the agent goes on."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from verl_slurm_daemon.agent.agent_log import AgentLog


def test_lines_are_the_leads_in_form_private_and_one_each(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for _ in range(2):  # the agents of two restarts
        log = AgentLog(path, "3 n2")
        log.say("joined", lead="h:1", nothing=None)
        log.say("failed", loud=True, error="two\nlines")
        log.say("odd", where=Path)  # no fact that can be written
        log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = path.read_text().splitlines()
    assert len(lines) == 6
    assert lines[0].endswith("verl-slurm[3 n2] joined     lead=h:1")
    assert lines[1].endswith('!! failed     error="two lines"')
    assert lines[2].endswith("odd        log=TypeError")


@pytest.mark.parametrize("where", ["/dev/full", "/nowhere/at/all.log", "/proc/self/status/x", "link"])
@pytest.mark.scenario("P10")
def test_a_log_that_cannot_be_written_is_done_without(tmp_path: Path, where: str) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    path = tmp_path / where  # an absolute one stays what it is
    if where == "link":
        path.symlink_to(other)
    log = AgentLog(path, "1 n")
    log.say("agent", pid=1)
    log.detach()
    log.say("alone")
    log.close()
    assert other.read_text() == "mine"


def test_storage_that_is_back_is_written_to_again_but_an_endless_story_is_cut_off(tmp_path: Path) -> None:
    log = AgentLog(tmp_path / "later" / "a.log", "1 n")
    log.say("agent")
    (tmp_path / "later").mkdir()
    log.say("joined")
    assert (tmp_path / "later/a.log").read_text().endswith("joined\n")
    log = AgentLog(tmp_path / "a.log", "1 n")
    for number in range(5000):
        log.say("signal", number=number)
    assert (tmp_path / "a.log").stat().st_size < 64 * 1024


@pytest.mark.scenario("P10")
def test_storage_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang, reached = threading.Event(), threading.Event()
    log = AgentLog(tmp_path / "a.log", "1 n")
    write = AgentLog._write

    def hanging(self: AgentLog, data: bytes) -> None:
        reached.set()
        assert hang.wait(60)
        write(self, data)

    monkeypatch.setattr(AgentLog, "_write", hanging)
    log.detach()
    log.say("alone")
    assert reached.wait(60)
    log.say("asking")  # comes back although the one before is still being written
    log.close(patience_s=0.0)
    assert not (tmp_path / "a.log").exists()
    hang.set()
    log.close()
    assert [line.split()[-1] for line in (tmp_path / "a.log").read_text().splitlines()] == ["alone", "asking"]


_PRINT = """
import sys
from verl_slurm_daemon.agent.agent_log import quiet_streams
quiet_streams()
for _ in range(4000):
    print("x" * 100)
print("error", file=sys.stderr, flush=True)
raise SystemExit(3)
"""


@pytest.mark.parametrize("nobody_reads", ["closed", "full"])
@pytest.mark.scenario("P10")
def test_printing_neither_ends_nor_stops_an_agent(nobody_reads: str) -> None:
    reader, writer = os.pipe()
    if nobody_reads == "closed":
        os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", _PRINT], stdout=writer, stderr=writer, timeout=60, check=False
    )
    os.close(writer)
    assert done.returncode == 3
    if nobody_reads == "full":
        os.close(reader)


def test_what_is_printed_arrives_where_somebody_reads() -> None:
    code = "from verl_slurm_daemon.agent.agent_log import quiet_streams; quiet_streams(); print('one'); 1 / 0"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "one\n"
    assert "ZeroDivisionError" in done.stderr
    assert done.returncode == 1

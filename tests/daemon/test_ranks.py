"""The launcher of a node's ranks, as a process, with small programs for ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.fakes.agent import Agent
from tests.processes import python_path
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.messages import RankStarted
from verl_slurm.wire.standing_by import Orders


def launch(
    tmp_path: Path, program: str, *place: str, timeout_s: float = 120
) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "program.py"
    script.write_text(program)
    argv = [sys.executable, "-P", "-m", "verl_slurm_daemon.agent.ranks", *place, str(script), "--word", "3"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_each_rank_gets_the_environment_that_torchrun_gives(tmp_path: Path) -> None:
    program = "import json, os, sys\nos.write(1, (json.dumps([sys.argv, dict(os.environ)]) + '\\n').encode())"
    done = launch(tmp_path, program, "2", "1", "2")
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(argv == [str(tmp_path / "program.py"), "--word", "3"] for argv, _ in seen)
    ranks = sorted((environ for _, environ in seen), key=lambda environ: environ["RANK"])
    assert [(e["RANK"], e["LOCAL_RANK"], e["GROUP_RANK"]) for e in ranks] == [
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["GROUP_WORLD_SIZE"]) for e in ranks} == {
        ("4", "2", "2")
    }
    assert {e["TORCHELASTIC_USE_AGENT_STORE"] for e in ranks} == {"True"}
    assert {e["MASTER_ADDR"] for e in ranks} == {"verl-slurm.invalid"}


def test_a_rank_that_fails_ends_the_others_a_second_later_and_is_named(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "if os.environ['RANK'] == '1': os._exit(7)\n"
        "try: time.sleep(600)\n"
        "finally: print('never')"
    )
    began = time.monotonic()
    done = launch(tmp_path, program, "1", "0", "3")
    assert done.returncode == 1
    assert "never" not in done.stdout
    assert "rank 1 (local rank 1, pid" in done.stderr.splitlines()[-1]
    assert "exitcode 7" in done.stderr.splitlines()[-1]
    assert 1.0 <= time.monotonic() - began < 60


def test_what_the_others_say_within_that_second_is_heard(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n"
        "while os.path.exists(f'/proc/{os.getppid()}') and time.sleep(0.2) is None:\n"
        "    print('a last word', flush=True); break"
    )
    done = launch(tmp_path, program, "1", "0", "2")
    assert done.returncode == 1
    assert "a last word" in done.stdout
    assert "Signal 9 (SIGKILL): " in done.stderr.splitlines()[-1]


COUNTED = """
import sys
from verl_slurm_daemon.agent import ranks
counts = iter({counts})
ranks.oom_kills = lambda: next(counts)
sys.exit(ranks.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("end", "counts", "said"),
    [
        ("kill", (1, 2), "Signal 9 (SIGKILL): lack of memory, the kernel's count"),
        ("kill", (1, 1), "Signal 9 (SIGKILL): not by the kernel, which counts no kill"),
        ("kill", (None, None), "Signal 9 (SIGKILL): most often that is lack of memory"),
        ("exit", (0, 1), "exitcode 3: lack of memory, the kernel's count"),
        ("exit", (1, 1), "exitcode 3"),
    ],
)
def test_lack_of_memory_is_named_by_the_kernels_count(
    tmp_path: Path, end: str, counts: tuple[int | None, int | None], said: str
) -> None:
    """Also where it killed a process of the rank's alone, such as a data loader's worker."""
    script = tmp_path / "program.py"
    script.write_text(f"import os; os.kill(os.getpid(), 9) if {end == 'kill'} else os._exit(3)")
    argv = [sys.executable, "-c", COUNTED.format(counts=counts), "1", "0", "1", str(script)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    last = done.stderr.splitlines()[-1]
    assert said in last
    assert ("slurm.mem_mb_per_node" in last) is not last.endswith("exitcode 3")
    assert "micro_batch" not in last, "a key of our own trainer, which a program of the user's refuses"


def test_ranks_die_with_their_launcher_and_not_of_slurms_warnings(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)")

    def ignore() -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    argv = [sys.executable, "-P", "-m", "verl_slurm_daemon.agent.ranks", "1", "0", "2", str(script)]
    environ = {**os.environ, "VERL_SLURM_CONTROL": str(tmp_path)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ, preexec_fn=ignore)
    assert process.stdout is not None
    ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    for one in [psutil.Process(process.pid), *ranks]:
        one.send_signal(signal.SIGTERM)
        one.send_signal(signal.SIGUSR1)
    assert [rank.is_running() for rank in ranks] == [True, True]
    assert process.poll() is None
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    process.stdout.close()
    assert (len(gone), alive) == (2, [])


@pytest.mark.parametrize("kind", ["file", "module"])
def test_a_traceback_begins_with_the_programs_own_first_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "broken.py").write_text("def f():\n    raise ValueError(__name__)\nf()\n")
    program = [str(tmp_path / "broken.py")] if kind == "file" else ["-m", "broken"]
    argv = [sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous", *program]
    environ = {**os.environ, **python_path(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path}/broken.py", line 3, in <module>'
    assert lines[-1] == "ValueError: __main__"


@pytest.mark.parametrize("role", ["of_a_guest", "of_our_trainer", "of_a_service", "of_rays_driver"])
def test_a_rank_is_heard_before_its_program_begins(tmp_path: Path, role: str) -> None:
    """A program that tokenized for five minutes before verl_slurm.run was ended, again and again."""
    (tmp_path / "prepares.py").write_text("import os\nos._exit(0)  # it never speaks itself\n")
    with Agent(RunPaths(private_dir(tmp_path / "run"))) as agent:
        absent = {"of_our_trainer": "VERL_SLURM_RUN", "of_a_service": "VERL_SLURM_CONTROL"}.get(role, "RANK")
        said = {
            name: value for name, value in agent.environ.items() if role == "of_a_guest" or name != absent
        }
        start = [sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous", str(tmp_path / "prepares.py")]
        # By a parent with the same environment: a rank without its launcher ends itself.
        launcher = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"]
        subprocess.run([*launcher, *start], env={**os.environ, **said}, timeout=60, check=True)
        heard = agent.heard() if agent.was_called else []
    assert [type(one) for one in heard] == [RankStarted][: role == "of_a_guest"]
    assert not any(one.by_program for one in heard if isinstance(one, RankStarted))


TERMINATES = """
import multiprocessing, signal, subprocess, time

if __name__ == "__main__":
    pool = multiprocessing.Pool(2)
    pool.map_async(time.sleep, [600, 600])
    pool.terminate()
    pool.join()
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    child.wait()
    # One that catches it is asked, as ever.
    catches = "trap 'exit 7' TERM; echo; while :; do sleep 0.1; done"
    child = subprocess.Popen(["env", "--default-signal=TERM", "bash", "-c", catches], stdout=subprocess.PIPE)
    child.stdout.readline()
    child.terminate()
    print(child.wait())
"""


@pytest.mark.parametrize("how", ["--ignore-signal=TERM", "--block-signal=TERM"])
def test_terminate_of_a_ranks_child_ends_it_although_slurms_warnings_do_not(tmp_path: Path, how: str) -> None:
    """A reward's pool, ended after its time, was waited for without end (a trial)."""
    (tmp_path / "terminates.py").write_text(TERMINATES)
    start = ["env", how, sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous"]
    done = subprocess.run(
        [*start, tmp_path / "terminates.py"], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "7\n"


LOADS = """
import os, signal, subprocess, sys
from torch.utils.data import DataLoader

class Rows:
    def __len__(self):
        return 40

    def __getitem__(self, row):
        return os.getpid()

if __name__ == "__main__":
    rows = iter(DataLoader(Rows(), batch_size=1, num_workers=1))
    worker = int(next(rows)[0])
    for _ in range(3):
        subprocess.run(["kill", "-TERM", str(worker)], check=True)  # not by its parent
    assert {int(row[0]) for row in rows} == {worker}
    rows = iter(DataLoader(Rows(), batch_size=1, num_workers=1, persistent_workers=True))
    next(rows)
    [child] = rows._workers
    child.terminate()
    child.join()
    print(child.exitcode)
    os._exit(0)  # the loader's complaint about its worker is not asked for
"""


@pytest.mark.torch
def test_a_loaders_worker_ends_by_its_ranks_signal_and_not_by_slurms(tmp_path: Path) -> None:
    """Slurm's SIGTERM ended the workers, and with them the step that was to be saved."""
    (tmp_path / "loads.py").write_text(LOADS)
    ignoring = ["env", "--ignore-signal=TERM", sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous"]
    done = subprocess.run(
        [*ignoring, str(tmp_path / "loads.py")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


# ---- ranks that stand by


def stand_by(tmp_path: Path, here: int, *modules: str, **environ: str) -> "subprocess.Popen[bytes]":
    imports = tmp_path / "imports"
    imports.write_text("".join(f"{name}\n" for name in modules))
    place = ["1", "0", str(here), str(imports)]
    argv = [sys.executable, "-P", "-m", "verl_slurm_daemon.agent.ranks", "--stand-by", *place]
    whole = {**os.environ, **python_path(tmp_path), **environ}
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=whole)


def ready(launcher: "subprocess.Popen[bytes]", count: int) -> list[int]:
    """The pids of those that stand by: `said.py` tells its own as it is imported."""
    assert launcher.stdout is not None
    return [int(launcher.stdout.readline()) for _ in range(count)]


@pytest.fixture
def said(tmp_path: Path) -> str:
    (tmp_path / "said.py").write_text("import os\nos.write(1, b'%d\\n' % os.getpid())")
    return "said"


PROGRAM = """
import json, os, sys
told = [os.getpid(), sys.argv, dict(os.environ), "said" in sys.modules, sys.stdin.read()]
os.write(1, (json.dumps(told) + "\\n").encode())
"""


def orders(tmp_path: Path, *place: str, **environ: str) -> bytes:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    whole = {"PATH": os.environ["PATH"], **python_path(tmp_path), **environ}
    return Orders.of([*place, str(program), "--word", "3"], whole).encode()


def test_ranks_that_stand_by_become_those_of_their_orders(tmp_path: Path, said: str) -> None:
    launcher = stand_by(tmp_path, 2, said, ONLY_BEFORE="1")
    pids = ready(launcher, 2)
    out, err = launcher.communicate(orders(tmp_path, "2", "1", "2", NEW="\udce9"), timeout=120)
    assert launcher.returncode == 0, err
    told = sorted((json.loads(line) for line in out.splitlines()), key=lambda one: one[2]["RANK"])
    assert [one[0] for one in told] == pids or sorted(one[0] for one in told) == sorted(pids)
    for (_, argv, environ, imported, stdin), rank in zip(told, ("2", "3"), strict=True):
        assert argv == [str(tmp_path / "program.py"), "--word", "3"]
        assert (environ["RANK"], environ["WORLD_SIZE"], environ["NEW"]) == (rank, "4", "\udce9")
        assert "ONLY_BEFORE" not in environ, "their environment is that of their orders, and no other"
        assert imported
        assert stdin == ""


@pytest.mark.parametrize("as_expected", [True, False])
def test_an_import_that_read_another_rank_is_made_anew(tmp_path: Path, said: str, as_expected: bool) -> None:
    """As Lightning's: it decides by RANK, while it is imported, which process writes."""
    (tmp_path / "asks.py").write_text("import os\nos.getenv('RANK'), os.environ.get('ABSENT')\n")
    launcher = stand_by(tmp_path, 1, "asks", said)
    (pid,) = ready(launcher, 1)
    out, err = launcher.communicate(orders(tmp_path, "2", "01"[not as_expected], "1"), timeout=120)
    assert launcher.returncode == 0, err
    (told,) = [json.loads(line) for line in out.splitlines()]
    assert (told[0], told[2]["RANK"], told[3]) == (pid, "01"[not as_expected], as_expected)
    assert (b"an import has read RANK" in err) is not as_expected


def test_one_that_stood_by_and_is_dead_is_started_anew(tmp_path: Path, said: str) -> None:
    launcher = stand_by(tmp_path, 2, said)
    killed, other = (psutil.Process(pid) for pid in ready(launcher, 2))
    killed.kill()
    while killed.status() != psutil.STATUS_ZOMBIE:  # its launcher looks when it has orders
        time.sleep(0.01)
    out, err = launcher.communicate(orders(tmp_path, "1", "0", "2"), timeout=120)
    assert launcher.returncode == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert sorted(one[2]["RANK"] for one in told) == ["0", "1"]
    assert [one[0] for one in told if one[3]] == [other.pid]


def test_without_orders_they_end_quietly(tmp_path: Path, said: str) -> None:
    launcher = stand_by(tmp_path, 2, said)
    processes = [psutil.Process(pid) for pid in ready(launcher, 2)]
    assert launcher.communicate(b"", timeout=60) == (b"", b"")
    assert launcher.returncode == 0
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def test_an_import_that_touches_cuda_makes_no_rank_that_stands_by(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: True)")
    launcher = stand_by(tmp_path, 1, "torch")
    assert launcher.stderr is not None
    assert b"CUDA" in launcher.stderr.readline()
    (ended,) = psutil.Process(launcher.pid).children()
    while ended.status() != psutil.STATUS_ZOMBIE:  # its launcher looks when it has orders
        time.sleep(0.01)
    out, err = launcher.communicate(orders(tmp_path, "1", "0", "1"), timeout=120)
    assert launcher.returncode == 0, err
    assert json.loads(out)[2]["RANK"] == "0", "it was started anew"


@pytest.mark.scenario("FLT-F")
def test_one_that_stood_by_and_is_stopped_is_made_anew_within_seconds(tmp_path: Path, said: str) -> None:
    launcher = stand_by(tmp_path, 2, said)
    stopped, other = (psutil.Process(pid) for pid in ready(launcher, 2))
    stopped.suspend()
    out, err = launcher.communicate(orders(tmp_path, "1", "0", "2"), timeout=120)
    assert launcher.returncode == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert sorted(one[2]["RANK"] for one in told) == ["0", "1"]
    assert [one[0] for one in told if one[3]] == [other.pid]
    assert b"stood by and does not answer" in err
    assert not stopped.is_running()

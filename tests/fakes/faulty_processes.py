"""The real lead and the real agent, as processes, with one thing bent; and a rank that saves without torch.

They stand for `verl_slurm_daemon` and for the trainer. The real ones neither die before a given write nor eat memory
when asked, and a real rank takes seconds to import torch. The rank computes nothing, and its tensors are no tensors.

Started as a script in place of `python -m verl_slurm_daemon`: `faulty_processes.py lead|agent ...`, and by that agent
`faulty_processes.py rank RUN ATTEMPT RESUME`. What is bent is said by `VS_HOSTILE`, a JSON object:

    dies_at      the lead kills itself with SIGKILL before so many of its calls that change a file
    eats         at `EAT` lead and agent take 64 MiB
    count        the lead writes how many there were into this file when it ends
    rank         what the rank does when it is asked to stop: see `_ASKED`
    saves        the rank makes so many saves by itself, and is done then
    no_forks     pids cgroup of the lead: just before the rank says that it saved, its limit becomes 1
    no_files     just before that, the lead may open no more files
    orphans      the rank leaves so many processes that end without anybody who waits for them
    strikes      not this rank, but the trainer's own, struck as `faulty_rank.py` says
    marks        a file into which is written how far it has come
    talks        the rank says more than a small disk holds
    dies         the rank dies after each of its saves but the last, from the moment when the file `go` is there
    quick        the lead's waits for storage and Slurm take a second where they take seconds

The rank is a real process on the real line; its checkpoints go through the real commit.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

BENT: dict[str, Any] = json.loads(os.environ.get("VS_HOSTILE", "{}"))
EAT = signal.SIGRTMIN + 9
CHANGES = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "fchmod")
"""What the lead asks the system to change or to make durable."""


def lead() -> None:
    _hungry()
    from verl_slurm_daemon.__main__ import main
    from verl_slurm_daemon.lead import restarts

    # The agents of those that train; those that stand by are as ever.
    daemon_argv = restarts.daemon_argv
    restarts.daemon_argv = lambda python, *more: [python, __file__, *daemon_argv(python, *more)[4:]]
    if "strikes" in BENT:
        _tell_what_is_heard()
    if "quick" in BENT:
        _hurry()
    if "dies_at" in BENT or "count" in BENT:
        _count_down(int(BENT.get("dies_at", 0)), BENT.get("count"))
    sys.exit(main())


def _hurry() -> None:
    from verl_slurm_daemon import journal
    from verl_slurm_daemon.decide import policy
    from verl_slurm_daemon.lead import attempt_start, lead_loop, restarts, resume

    for module in (policy, resume, attempt_start):
        module.IN_PLACE_S = (0.5,) * 20  # type: ignore[attr-defined]
    policy.SLURM_AWAY_S = attempt_start.SLURM_AWAY_S = 0.5
    attempt_start._LAST_WAIT_S = attempt_start._LAST_LOOK_S = journal._PATIENCE_S = 1.0
    attempt_start._FIRST_WORD_S, lead_loop._LOOK_SOON_S = 1.0, 0.5
    restarts.AGENTS_READY_S = 10.0


def _tell_what_is_heard() -> None:
    """What ranks say of their parts, once it is in the lead's queue."""
    from verl_slurm_daemon.lead.pace_watch import PaceWatch

    from verl_slurm.journal.events import Notice
    from verl_slurm.wire.messages import FromRank, PartSaved

    hear = PaceWatch.hear

    def heard(self: PaceWatch, node: str, message: FromRank) -> list[Notice]:
        news = hear(self, node, message)
        if isinstance(message, PartSaved):
            mark(f"part of rank {message.rank}")
        return news

    PaceWatch.hear = heard  # type: ignore[method-assign]


def _hungry() -> None:
    if "eats" in BENT:
        eaten: list[bytes] = []
        signal.signal(EAT, lambda *_: eaten.append(b"x" * (64 << 20)))


def _count_down(dies_at: int, count: str | None) -> None:
    seen = 0

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            nonlocal seen
            seen += 1
            if seen == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    for name in CHANGES:
        setattr(os, name, wrap(getattr(os, name)))
    leave = os._exit

    def end(code: int) -> NoReturn:
        if count is not None:
            Path(count).write_text(str(seen))
        leave(code)

    os._exit = end


def agent() -> None:
    _hungry()
    from verl_slurm_daemon.__main__ import main
    from verl_slurm_daemon.agent import rank_container as module

    if "strikes" in BENT:
        real = module.launcher_argv

        def struck(*args: Any) -> list[str]:
            argv = real(*args)
            at = argv.index("verl_slurm.trainer")
            assert argv[at - 1] == "-m"
            return [*argv[: at - 1], str(Path(__file__).with_name("faulty_rank.py")), *argv[at + 1 :]]

        module.launcher_argv = struck
        sys.exit(main())
    module.launcher_argv = lambda python, config, paths, launch, scratch: [
        python,
        __file__,
        "rank",
        str(paths.root),
        str(launch.attempt),
        launch.resume,
    ]
    sys.exit(main())


def mark(text: str) -> None:
    with open(BENT["marks"], "a") as file:
        file.write(f"{text}\n")


def await_go() -> None:
    while not Path(BENT["marks"]).with_name("go").exists():
        time.sleep(0.005)


def rank(root: str, attempt: str, resume: str) -> None:
    import numpy as np

    from verl_slurm.base.paths import RunPaths
    from verl_slurm.runtime_state.ledger import Ledger
    from verl_slurm.trainer.measures import console
    from verl_slurm.wire import messages as say
    from verl_slurm.wire.client import RankClient
    from verl_slurm.wire.environment import CONTROL_VARIABLE

    paths, step = RunPaths(root), int(resume[5:11]) if resume else 0
    line = RankClient.connect(Path(os.environ[CONTROL_VARIABLE]))
    line.send(say.RankStarted(rank=0, pid=os.getpid()))
    # A run that said it had rollouts, and has no ledger, does not begin again by itself.
    with Ledger(paths, int(attempt), 0) as ledger:
        ledger.append(step, 0, {"response": np.zeros(1, np.int32)})
    line.send(
        say.Progress(rank=0, step=step, phase="generate", index=0, safe_points=1, new_rollouts=1, metrics={})
    )
    if "talks" in BENT:
        for _ in range(200):
            console.say("x" * 100)
            console.complain("y" * 100)
    for _ in range(int(BENT.get("orphans", 0))):
        subprocess.run(["/bin/sh", "-c", "true & exit"], check=False)
    _see_them_buried(os.getppid())

    def saved(name: str, request_id: int) -> None:
        line.send(say.RankSaved(rank=0, request_id=request_id, name=name, seconds=0.1, num_bytes=1))

    while step < int(BENT.get("saves", 0)):
        step += 1
        saved(save(paths, step, int(attempt)), 0)
        if "dies" in BENT and step < int(BENT["saves"]):
            await_go()
            sys.exit(3)
    if "saves" in BENT:
        line.send(say.Finished(rank=0, step=step))
        return
    while (request := line.request()) is None or not request.stop:
        time.sleep(0.005)  # a rank looks at the page between two safe points; there is nothing to wait on
    line.send(say.SaveStarted(rank=0, request_id=request.request_id, step=step, safe_point=1))
    _ASKED[BENT.get("rank", "saves")](paths, step + 1, int(attempt), saved, request.request_id)
    line.send(say.Stopped(rank=0, request_id=request.request_id))


def _see_them_buried(agent: int) -> None:
    """Until the agent has no dead child that nobody waited for; a rank that sees one for long is a crash."""
    until = time.monotonic() + 20.0
    while _zombies(agent):
        if time.monotonic() > until:
            sys.exit("the agent keeps zombies")
        time.sleep(0.01)  # a burial is no event that another process could wait for


def _zombies(parent: int) -> int:
    found = 0
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                found += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
    return found


Saved = Callable[[str, int], None]


def _saves(paths: Any, step: int, attempt: int, saved: Saved, request_id: int) -> None:
    name = save(paths, step, attempt)
    if "no_forks" in BENT:
        (Path(BENT["no_forks"]) / "pids.max").write_text("1")
    if "no_files" in BENT:
        owner = json.loads((paths.root / "attempt").read_bytes())
        used = max(int(fd) for fd in os.listdir(f"/proc/{owner['pid']}/fd"))
        _, hard = resource.prlimit(owner["pid"], resource.RLIMIT_NOFILE)
        resource.prlimit(owner["pid"], resource.RLIMIT_NOFILE, (min(3, used), hard))
    saved(name, request_id)


def _saves_and_waits(paths: Any, step: int, attempt: int, saved: Saved, request_id: int) -> None:
    """What is read back fails from the commit on: the test arranges that in between."""
    name = save(paths, step, attempt)
    mark("saved")
    await_go()
    saved(name, request_id)


def _answers_wrongly_first(paths: Any, step: int, attempt: int, saved: Saved, request_id: int) -> None:
    """For another request, for a step that nobody saved; then rightly, twice, and then for another one again."""
    saved(f"step_{step + 7:06d}", request_id + 7)
    saved(f"step_{step + 8:06d}", request_id - 1)
    name = save(paths, step, attempt)
    saved(name, request_id)
    saved(name, request_id)
    saved(f"step_{step + 9:06d}", request_id - 1)


def _names_a_path(paths: Any, step: int, attempt: int, saved: Saved, request_id: int) -> None:
    """What is found damaged is set aside: of the run's own checkpoints, and nothing else."""
    saved("../../victim", request_id)


def _claims_what_is_not_there(paths: Any, step: int, attempt: int, saved: Saved, request_id: int) -> None:
    saved(f"step_{step + 7:06d}", request_id)


def _says_that_it_failed_and_then_saved(
    paths: Any, step: int, attempt: int, saved: Saved, request_id: int
) -> None:
    """An answer after the attempt was given up: nothing of it lies under a checkpoint's name."""
    from verl_slurm.wire.messages import RankSaveFailed

    line = saved.__closure__[0].cell_contents  # type: ignore[attr-defined]
    line.send(RankSaveFailed(rank=0, request_id=request_id, reason="RuntimeError: a rank raised"))
    saved(f"step_{step:06d}", request_id)


def _is_held_in_the_middle(paths: Any, step: int, attempt: int, saved: Saved, request_id: int) -> None:
    from verl_slurm.checkpoint.store import commit

    def hold(*_: object) -> None:
        mark("in the middle")
        os.kill(os.getpid(), signal.SIGSTOP)

    commit._rename = hold
    save(paths, step, attempt)


_ASKED = {
    "held": _is_held_in_the_middle,
    "saves": _saves,
    "waits": _saves_and_waits,
    "wrong": _answers_wrongly_first,
    "path": _names_a_path,
    "nothing": _claims_what_is_not_there,
    "late": _says_that_it_failed_and_then_saved,
}


def save(paths: Any, step: int, attempt: int) -> str:
    """A small whole checkpoint through the real commit; its name."""
    from tests.checkpoint.sealed import save_sealed
    from verl_slurm.base.fence import require_attempt

    return save_sealed(paths, step, None, attempt=attempt, fence=lambda: require_attempt(paths, attempt)).name


if __name__ == "__main__":
    match sys.argv[1]:
        case "lead":
            lead()
        case "agent":
            agent()
        case "rank":
            rank(*sys.argv[2:5])

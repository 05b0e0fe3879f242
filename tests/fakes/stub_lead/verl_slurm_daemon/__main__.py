"""`python -m verl_slurm_daemon lead --run RUN`, without ranks: found first where `fakes/stub_lead` is on PYTHONPATH.

It stands for the lead where a test is about submitting, following and cancelling a job, and would wait half a minute
for a training. It writes the first and last events of a run, and makes no checkpoint.

What it does is in RUN's name: `...-quick` ends at once, `...-crash` ends with 22, `...-mute` dies without a word,
anything else waits for a signal: TERM ends it as cancelled, USR2 (or USR1, or TERM where a requeue was asked for) as
requeued, after which it runs once more and ends well.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}


def main(run: Path) -> int:
    job_id = os.environ.get("SLURM_JOB_ID") or os.environ["SUBMITIT_LOCAL_JOB_ID"]
    restart = int(os.environ.get("STUB_RESTART") or os.environ.get("SLURM_RESTART_COUNT") or 0)

    def note(event: str, **fields: object) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        record = {"time": now, "event": event, "attempt": restart + 1, "job_id": job_id, **fields}
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def end(code: int) -> int:
        note("ended", exit_code=code, exit="", reason="stub")
        return code

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for number in SIGNALS:  # submitit's process ignored them for us; a pending one must not be thrown away
        signal.signal(number, lambda *_: None)
    (run / "pid").write_text(f"{os.getpid()} {os.getppid()} {' '.join(sys.argv)}\n")
    (run / "environment.json").write_text(json.dumps(dict(os.environ)))
    cluster = "slurm" if "SLURM_JOB_ID" in os.environ else "local"
    note(
        "started", requeues=restart, nodes="here", pid=os.getpid(), cluster=cluster, host=socket.gethostname()
    )
    print("the stub lead prints \x1b[31mred\x1b[0m", flush=True)
    if run.name.endswith("-quick") or restart:
        return end(0)
    if run.name.endswith("-crash"):
        return end(22)
    if run.name.endswith("-mute"):
        return 1
    while (got := signal.sigwait(SIGNALS)) is signal.SIGCONT:
        pass
    note("cause", cause=got.name, evidence="stub")
    if got is signal.SIGTERM and "requeue_asked" not in (run / "events.jsonl").read_text():
        return end(23)
    end(25)
    if "SLURM_JOB_ID" in os.environ:
        if got is signal.SIGUSR2:
            subprocess.run(["scontrol", "requeue", job_id], check=True)
        return 25
    os.environ["STUB_RESTART"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "verl_slurm_daemon", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[3])))

"""The memory and the processor time of `verl-slurm serve`: `python benchmarks/serve_idle.py [--runs 1000] [--json]`

The run directories are made for it (benchmarks/list_runs.py), with a stand-in for squeue. Measured from /proc: seconds
until it listens, and the resident memory and the share of one core over `--seconds` with no page open, with the table
open in one browser, and after the page of a run was opened. Children that make a page count as they end.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.list_runs import make_runs


def memory_mb(pid: int) -> float:
    """Resident memory of the process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def cpu_s(pid: int) -> float:
    """Seconds of a core that the process and its ended children took."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # utime, stime, cutime, cstime.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def over(pid: int, seconds: float) -> dict[str, float]:
    """The memory after so many seconds, and the share of a core in them."""
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    share = (cpu_s(pid) - before) / (time.monotonic() - began)
    return {"memory_mb": memory_mb(pid), "core_percent": round(100 * share, 2)}


def measure(place: Path, seconds: float) -> dict[str, object]:
    env = os.environ | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    command = [sys.executable, "-m", "verl_slurm.cli", "serve", str(place / "runs"), "--json"]
    began = time.monotonic()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["listening"]
        found: dict[str, object] = {"until_it_listens_s": round(time.monotonic() - began, 2)}
        host, _, entrance = address.removeprefix("http://").partition("/")

        def get(path: str, cookie: str = "") -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(host)
            connection.request("GET", path, headers={"Cookie": cookie} if cookie else {})
            return connection.getresponse()

        entered = get("/" + entrance)
        cookie = (entered.getheader("Set-Cookie") or "").partition(";")[0]
        folder = entered.getheader("Location") or ""
        found["no_page_open"] = over(process.pid, seconds)
        page = get(folder, cookie).read()
        found["table_kb"] = round(len(page) / 1000)
        events = get(f"{folder}events?since=0", cookie)
        events.readline()
        # The first question to the scheduler reads all that live, once; that is no idling.
        time.sleep(5.0)
        found["table_open"] = over(process.pid, seconds)
        began = time.monotonic()
        get(f"{folder}run/run-0000", cookie).read()
        found["page_of_a_run_s"] = round(time.monotonic() - began, 2)
        found["memory_after_it_mb"] = memory_mb(process.pid)
        events.close()
        process.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, default=65.0, help="more than a minute: Slurm is asked once a minute"
    )
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), chosen.runs, events=500, checkpoints=2)
        found = {"runs": chosen.runs, "load": os.getloadavg()[0], **measure(Path(folder), chosen.seconds)}
    if chosen.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<20} {value}")


if __name__ == "__main__":
    main()

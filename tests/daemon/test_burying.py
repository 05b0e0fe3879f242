"""Orphans that were adopted are waited for; our own children are left to those who started them."""

import sys

import pytest

from tests.processes import captured

# A child of ours that ends with 7, and one that leaves an orphan in a session of its own; says who is still there.
_UNDERTAKER = """
import asyncio, os, subprocess, sys
from verl_slurm_daemon import descendants as burying
from verl_slurm_daemon.descendants import bury_orphans
from verl_slurm.base.processes import become_subreaper

async def main():
    become_subreaper()
    burying._LATE_S = 1.0
    bury_orphans(asyncio.get_running_loop())
    told, tell = os.pipe()
    leaves = ["/bin/sh", "-c", sys.argv[1]]
    leader = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 8", start_new_session=True)
    told_by_leader = await leader.wait()
    burying._LATE_S = 0.0
    own = subprocess.Popen(["/bin/sh", "-c", "exit 7"])
    child = subprocess.Popen(leaves, stdin=told, stdout=subprocess.PIPE, start_new_session=True)
    orphan = int(child.stdout.readline())
    watch = os.pidfd_open(orphan)
    child.wait()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(watch, ended.set)
    os.close(told)
    os.close(tell)
    await ended.wait()
    while os.path.exists(f"/proc/{orphan}"):
        await asyncio.sleep(0)
    print("buried", own.wait(), told_by_leader, flush=True)

asyncio.run(main())
"""


@pytest.mark.scenario("P11")
@pytest.mark.parametrize("orphan", ["read line", "exec setsid /bin/sh -c 'read line'"])
def test_an_adopted_orphan_is_buried_and_a_child_of_ours_keeps_its_exit_code(orphan: str) -> None:
    """Be it in the session of what started it, or, as sandboxes are, in one of its own."""
    leaves = f"exec 3<&0; ({orphan} <&3) & echo $!; exit"
    done = captured([sys.executable, "-c", _UNDERTAKER, leaves], timeout=60)
    assert done.stdout == "buried 7 8\n", done.stderr

"""Runs `python -m verl_slurm.checkpoint.tiers` as a child of the lead: moves checkpoints to the run's tiers.

It is a process of its own with the lowest priority. So boto3 is not in the daemon's memory, an upload never
delays a decision, and a kill at any moment costs at most one part. The child writes its results to the
journal itself.
"""

import asyncio
import errno
import signal
import subprocess
import sys
from contextlib import suppress

import msgspec

from verl_slurm.base.errors import TierAway, TierError
from verl_slurm.base.paths import RunPaths
from verl_slurm.journal.events import Tiers
from verl_slurm_daemon.descendants import child_setup
from verl_slurm_daemon.lead.attempt import Attempt

_EVERY_S = 900.0
# Of the child's last words: with its places and the next command, an error has some hundred characters.
_SAID = 2000
_LAST_WAIT_S = 1.0


class TierMover:
    """Where there are tiers, makes a pass after each verified checkpoint and each quarter of an hour."""

    def __init__(self, attempt: Attempt) -> None:
        self._paths, self._journal, config = attempt.paths, attempt.journal, attempt.config
        self._every_s = _EVERY_S if config.tiers else None
        self._wanted, self._idle = asyncio.Event(), asyncio.Event()
        self._runs = False
        self._child: asyncio.subprocess.Process | None = None

    def wake(self) -> None:
        """Announces that there is something new to move."""
        self._wanted.set()
        if self._runs:  # otherwise that pass is never made
            self._idle.clear()

    @property
    def idle(self) -> asyncio.Event:
        """Set while no pass is due or under way."""
        return self._idle

    async def run(self) -> None:
        """Runs until cancelled; cancelling also ends the child."""
        if self._every_s is None:
            return
        self._runs = True
        try:
            while True:
                # Before the pass: what is announced while it runs wakes the next one.
                self._wanted.clear()
                await self._pass()
                if not self._wanted.is_set():
                    self._idle.set()
                try:
                    async with asyncio.timeout(self._every_s):
                        await self._wanted.wait()
                except TimeoutError:
                    self._idle.clear()
        finally:
            self._runs = False
            self._idle.set()
            self.interrupt()
            if self._child is not None:
                # One that waits for a dead mount does not even die.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._child.communicate(), _LAST_WAIT_S)

    def interrupt(self) -> None:
        """Ends a pass that is under way: a save needs the disks and the network now. The next pass continues it."""
        # KILL is safe at any moment: it costs at most one part of an upload.
        if self._child is not None and self._child.returncode is None:
            self._child.kill()

    async def _pass(self) -> None:
        try:
            self._child = await asyncio.create_subprocess_exec(
                *_command("sync", self._paths),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # Slurm's warnings reach each process of the job; and the child must not outlive its lead.
                preexec_fn=child_setup,
            )
        except OSError as error:  # no process left: no reason to end a training
            self._journal.write(Tiers(str(error)))
            return
        _, said = await self._child.communicate()
        # A failed copy is in the journal already, and prints nothing here.
        if self._child.returncode and said:
            self._journal.write(Tiers(said.decode("utf-8", "replace").strip()[-_SAID:]))


def restore_newest(paths: RunPaths, only: str = "", above: str = "") -> str:
    """Brings the newest checkpoint of any tier into the run, or `only` this one. Blocks until that is done.
    Returns its name; empty: no tier has one.

    `above`: the run's own newest; one that is newer, and of which its journal never told, comes, too.

    Raises OSError: a tier that has one does not answer: it is storage, and is waited for. TierError: it sent
    something else.
    """
    words = [
        *_command("restore", paths),
        *(("--name", only) if only else ()),
        *(("--above", above) if above else ()),
    ]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        found = done.stderr.strip()[-_SAID:]
        # The child limits its own time, by the bytes that it expects, and is ended by its alarm.
        if done.returncode == -signal.SIGALRM:
            found = "a tier did not give its bytes in time"
            # It did not even say what it has, and nothing tells that this is needed: no start waits for it.
            if above and not only and not done.stdout:
                raise TierError(
                    "no tier said in time whether it has a newer checkpoint", expected=f"than {above}"
                )
        if done.returncode in (TierAway.child_code, -signal.SIGALRM):
            raise OSError(errno.ETIMEDOUT, f"nothing could be brought back from the run's tiers: {found}")
        # Beginning afresh would throw away what is there.
        raise TierError("nothing could be brought back from the run's tiers", found=found)
    return str(msgspec.json.decode(done.stdout.splitlines()[-1])["name"] or "") if done.stdout else ""


def _command(what: str, paths: RunPaths) -> list[str]:
    return [sys.executable, "-P", "-m", "verl_slurm.checkpoint.tiers", what, "--run", str(paths.root)]

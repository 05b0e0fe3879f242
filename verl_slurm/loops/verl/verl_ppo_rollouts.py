"""Gives prompts their positions, tells of the ledger and prunes it, in verl's driver. No verl.

`verl_rollouts` is the workers' part.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from verl_slurm.base.errors import CheckpointCorrupt, VerlSlurmError
from verl_slurm.checkpoint.decide.retention import ASSURED_KEPT
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import guest_directory
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.config.load import load_own
from verl_slurm.loops.session import Session
from verl_slurm.runtime_state.ledger import prune
from verl_slurm.runtime_state.rollout_records import turn_paths
from verl_slurm.runtime_state.token_log import token_paths
from verl_slurm.verl.positions import Positions, positions_file, read_positions


class Account(NamedTuple):
    """What has become of responses since the start.

    Attributes:
        replayed: answered from the ledger.
        continued: turns that went on from logged tokens.
        recorded: written to the ledger.
        news: lines for people that tell of a problem.
        modes: how unfinished responses go on after an interruption: one line, unless engines differ.
    """

    replayed: int = 0
    continued: int = 0
    recorded: int = 0
    news: Sequence[str] = ()
    modes: Set[str] = frozenset()


class Recording:
    """What a manager of verl's that keeps responses has all of its workers do: `verl_rollouts.LedgerManager`."""

    # Here, because the driver cannot import that module: a process of Ray's imports it first, it imports verl, and verl
    # then imports the driver's module.
    agent_loop_workers: list[Any]
    alive: list[Any]
    """Of each worker, what ends with it."""

    def account(self) -> Account:
        """Returns what has become of responses since the start."""
        accounts = self._all("account")
        replayed, continued, recorded = (sum(one[part] for one in accounts) for part in range(3))
        news = list(dict.fromkeys(line for one in accounts for line in one.news))
        modes = frozenset[str]().union(*(one.modes for one in accounts))
        return Account(replayed, continued, recorded, news, modes)

    def require_workers(self) -> None:
        """Raises Ray's own error if a worker is dead."""
        # verl gives its workers prompts and asks no more, so that it would wait without end.
        import ray

        ended, _ = ray.wait(self.alive, timeout=0)
        ray.get(ended)

    def wait_for_engines(self) -> None:
        """Waits from here on where an engine has died: it will be replaced."""
        self._all("wait_for_engines")

    def stop(self) -> None:
        """Records nothing from here on: responses will be broken off."""
        self._all("stop")

    def forget(self, before: int) -> None:
        """Drops the records of prompts before this position."""
        self._all("forget", before)

    def _all(self, method: str, *args: Any) -> list[Any]:
        import ray

        calls = [getattr(worker, method).remote(*args) for worker in self.agent_loop_workers]
        answers: list[Any] = ray.get(calls)
        return answers


class Rollouts:
    """One start's, in verl's driver.

    Args:
        batch_size: prompts of a step, for an adopted checkpoint, which does not say how many were given out.
    """

    def __init__(self, session: Session, *, batch_size: int) -> None:
        self._session, self._said = session, Account()
        self._batch_size, self._next, self._pruned = batch_size, 0, 0
        self._open: dict[str, int] = {}
        self._noted = 0, Positions(0)
        self._keep = 0
        if session.has_run:
            self._keep = max(load_own(session.paths.run_yaml).checkpoint.keep_last, ASSURED_KEPT)

    def resume(self, step: int) -> None:
        """Continues after the checkpoint of `step` whole steps.

        Raises:
            CheckpointCorrupt: verl has found another step there, or no position in the data.
            DataError: its positions.json cannot be read.
        """
        resume = self._session.resume
        # verl begins with step 0, or with the first prompt, where it finds nothing, and says so in its log alone.
        if (
            resume is not None
            and checkpoint_order(resume.name) is not None
            and not (data := resume / guest_directory("verl", step) / "data.pt").is_file()
        ):
            raise CheckpointCorrupt(
                "verl did not resume from where it was told to",
                where=data,
                found="no such file",
                expected=f"the step of {resume.name}, and where in the data it is from",
                remedy="resume from an older one, or from another run's",
            )
        found = read_positions(resume) if resume is not None else None
        found = found or Positions(step * self._batch_size)
        self._next, self._open = found.next, dict(found.open)

    def say_what_is_lost(self, manager: str) -> None:
        """Tells that the user's own manager keeps no ledger."""
        self._session.notice(
            f"{manager} is in the place of verl-slurm's manager (agent_loop_manager_class): responses of a step that "
            "is interrupted are sampled again",
            topic="ledger",
            loud=True,
        )

    def tell(self, text: str, loud: bool) -> None:
        """Tells one line about the engines."""
        self._session.notice(text, topic="engine", loud=loud)

    def say_left(self, step: int, unfinished: int) -> None:
        """Tells what a step is left with."""
        self._session.notice(
            f"step {step} is left while it is sampled: {unfinished} of its prompts were not complete; their finished "
            "responses are in the ledger, and no update is lost",
            topic="ledger",
        )

    def positions(self, uids: Sequence[str]) -> list[int]:
        """Gives the next prompts their positions, by verl's `uid` of each."""
        first, self._next = self._next, self._next + len(uids)
        given = list(range(first, self._next))
        self._open.update(zip(uids, given, strict=True))
        return given

    def order(self, keys: Sequence[str]) -> list[int]:
        """Returns the order that sorts verl's keys, `<uid>_<session>_<number>`, by position and numbers."""

        def place(index: int) -> tuple[int, str, int, int]:
            uid, session, number = keys[index].split("_")
            # -1: a prompt that was given out before an adopted checkpoint.
            return self._open.get(uid, -1), uid, int(session), int(number)

        return sorted(range(len(keys)), key=place)

    def note(self, step: int, open_uids: Collection[str]) -> None:
        """Notes what was given out when `step` ends, and the prompts that verl's queue keeps beyond it."""
        self._open = {uid: place for uid, place in self._open.items() if uid in open_uids}
        self._noted = step, Positions(self._next, dict(self._open))

    def texts(self, step: int) -> Mapping[str, bytes]:
        """Returns the small file of the checkpoint of `step`, the last one that was noted."""
        noted, positions = self._noted
        assert noted == step, "the places of another step"
        return positions_file(positions)

    def step_end(self, manager: Recording) -> None:
        """Tells what the ledger has answered, and drops what no checkpoint needs."""
        if not self._session.has_run:
            return
        now, before = manager.account(), self._said
        for line in now.news:
            self._session.notice(line, topic="ledger", loud=True)
        for line in sorted(now.modes - before.modes):
            self._session.notice(line, topic="ledger")
        if more := now.replayed - before.replayed:
            self._session.notice(
                f"{more} responses came from the ledger, and were not sampled again", topic="ledger"
            )
        if more := now.continued - before.continued:
            self._session.notice(
                f"{more} unfinished responses went on from their logged tokens", topic="ledger"
            )
        self._said = now
        # A ledger that is too long costs room alone.
        with suppress(OSError, VerlSlurmError):
            self._prune(manager)

    def _prune(self, manager: Recording) -> None:
        paths = self._session.paths
        kept = [info for info in list_checkpoints(paths) if info.kind == "committed"][: self._keep]
        # An adopted checkpoint holds back all records, until it is none of the newest any more.
        oldest = min((_needed(info.path) for info in kept), default=0)
        if oldest > self._pruned:
            self._pruned = oldest
            for each in (paths, turn_paths(paths), token_paths(paths)):
                prune(each, oldest, current_attempt=self._session.attempt)
            manager.forget(oldest)


def _needed(checkpoint: Path) -> int:
    """Returns the first position whose responses a resume from this checkpoint may ask for."""
    found = read_positions(checkpoint)
    return 0 if found is None else min([found.next, *found.open.values()])

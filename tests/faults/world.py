"""A run directory and a node's disk beside it, what is done to them, and what a start finds afterwards."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.faults.disk import Tree
from tests.faults.tracing import InProcess, Tracer
from tests.save.parts import Parts, checkpoint_saver, contents
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.commit import sweep
from verl_slurm.checkpoint.store.local_copy import assemble, list_parts, send_home
from verl_slurm.checkpoint.store.recover import ResumeChoice, choose_resume
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.save.ranks import staging
from verl_slurm.save.ranks.saver import CheckpointSaver, LocalPlace, SavedCheckpoint

SHARED, LOCAL = "run", "nvme"
"""Names below a world's root: two media that fail one by one."""

_one_thread = partial(verify, threads=1)


def order(name: str) -> tuple[int, int]:
    """Of a checkpoint's name; before all of them for anything else."""
    return checkpoint_order(name) or (-1, -1)


class World:
    """A run that saves, and every whole checkpoint it ever had.

    Args:
        two_media: saves go to the node's disk, too.

    Attributes:
        truth: name → each content that was ever committed under it.
        tracer: of what is being done just now, if anything is.
    """

    def __init__(self, root: Path, saver: CheckpointSaver, parts: Parts, local: LocalPlace | None) -> None:
        self.root, self.paths, self.saver, self.parts, self.place = (
            root,
            RunPaths(root / SHARED),
            saver,
            parts,
            local,
        )
        self.local = root / LOCAL / "n1"
        self.truth: dict[str, list[Tree]] = {}
        self.tracer: Tracer | None = None

    @classmethod
    @contextmanager
    def at(cls, root: Path, *, two_media: bool) -> Iterator["World"]:
        for name in (SHARED, LOCAL):
            (root / name).mkdir(mode=0o700, parents=True)
        place = LocalPlace(directory=root / LOCAL / "n1", is_first=True, keep=2) if two_media else None
        parts = Parts()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "SaverProcess", InProcess)
            saver = checkpoint_saver(root / SHARED, parts, local=place)
        try:
            yield cls(root, saver, parts, place)
        finally:
            saver.close()

    def begin(
        self,
        step: int,
        *,
        seconds_left: float | None = None,
        on_kept: Callable[[SavedCheckpoint], None] | None = None,
    ) -> "Future[SavedCheckpoint]":
        """Begin a save of weights that no other save has."""
        with torch.no_grad():
            for parameter in self.parts.model.parameters():
                parameter += 1
        return self.saver.begin(contents(step), seconds_left=seconds_left, on_kept=on_kept)

    def save(self, step: int, *, seconds_left: float | None = None) -> SavedCheckpoint:
        """The same; what it answers is a promise."""
        done = self.begin(step, seconds_left=seconds_left).result()
        if self.tracer is not None:
            self.tracer.ack(done.name)
        self.remember()
        return done

    def remember(self) -> None:
        """Take what verifies now as the truth that recovery is measured by."""
        for path in [*self.paths.checkpoints.glob("step_*"), *self.local.glob("step_*")]:
            if _one_thread(path).ok and (tree := tree_of(path)) not in (
                known := self.truth.setdefault(path.name, [])
            ):
                known.append(tree)

    def trace(self, act: Callable[["World"], None]) -> Tracer:
        """Do `act` under a tracer."""
        with Tracer(self.root) as self.tracer:
            act(self)
        done, self.tracer = self.tracer, None
        self.remember()
        return done


def tree_of(directory: Path) -> Tree:
    """What lies below `directory`."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in directory.rglob("*")
    }


def plant(tree: Tree, root: Path) -> None:
    """Make `tree` real, with the modes of the real thing."""
    root.mkdir(mode=0o700)
    for path, content in tree.items():
        to = f"{root}/{path}"
        if content is None:
            os.mkdir(to, 0o700)
        else:
            fd = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, content)
            os.close(fd)


def recover(root: Path) -> ResumeChoice:
    """What a start does: tidy up, choose, bring home what the node's disk has that is newer, choose again.

    As `verl_slurm_daemon.lead.resume.find_resume_point` and `second_copy` do it.
    """
    paths, local = RunPaths(root / SHARED), root / LOCAL / "n1"
    sweep(paths)
    choice = choose_resume(paths, "auto", verifier=_one_thread)
    sent = [
        send_home(part, paths)
        for part in list_parts(local)
        if part.order > order(choice.name or "") and not (paths.checkpoints / part.name).exists()
    ]
    if sent:
        assemble(paths)
        choice = choose_resume(paths, "auto", verifier=_one_thread)
    return choice


def problems(root: Path, truth: dict[str, list[Tree]], acked: set[str], removable: set[str]) -> list[str]:
    """What is wrong after a crash left `root` as it is and a start has recovered it; empty: nothing.

    Args:
        truth: what whole checkpoints look like, byte for byte: the verifier itself is not believed.
        acked: names that were promised before the crash.
        removable: of those, the ones that the run was about to remove itself.
    """
    paths = RunPaths(root / SHARED)
    if acked - removable and not paths.checkpoints.is_dir() and not (root / LOCAL / "n1").is_dir():
        return ["the directory of all checkpoints is gone"]
    hint = paths.latest.read_text() if paths.latest.exists() else None
    choice = recover(root)
    found = []
    newest = max(acked - removable, key=order, default="")
    if newest and order(choice.name or "") < order(newest):
        found.append(
            f"{newest} was promised, the start goes on from {choice.name or 'nothing'}: {choice.reasons}"
        )
    if choice.path is not None and tree_of(choice.path) not in truth.get(choice.path.name, []):
        found.append(f"{choice.name} was chosen and is not what was committed")
    infos = list_checkpoints(paths)
    for info in infos:
        if info.kind == "committed" and info.path != choice.path:
            good = _one_thread(info.path).ok
            if good != (tree_of(info.path) in truth.get(info.name, [])):
                found.append(f"{info.name} is taken for {'good' if good else 'bad'}")
        name = info.name.split(".")[0]
        replaced = (paths.checkpoints / name).is_dir()  # by one of that name with another state
        if info.kind == "quarantined" and tree_of(info.path) in truth.get(name, []) and not replaced:
            found.append(f"{info.name} was set aside and is good")
        if info.kind == "torn":
            found.append(f"{info.name} was left: {info.detail}")
    if hint is not None and hint.removesuffix("\n") not in truth:
        found.append(f"latest says {hint!r}")
    return found

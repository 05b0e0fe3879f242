"""`latest_checkpointed_iteration.txt`: the file from which verl learns its last step, and verl's use of it.

verl reads the number in it and takes `global_step_<number>`, nothing else (`utils/checkpoint/checkpoint_manager.py`,
`find_latest_ckpt_path`). Seen with verl 0.9.1:

* empty or no number (its PPO trainers write it in place, so a kill can leave it so): it crashes, at every start;
* it points to nothing, or is missing while there are checkpoints: it trains from step 0 and writes over them;
* it points to a checkpoint that is damaged: it crashes, or loads the damage; it never takes an older one.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_slurm.base.files import write_file
from verl_slurm.base.one_line import printable
from verl_slurm.verl.shards import Judged

TRACKER = "latest_checkpointed_iteration.txt"

State = Literal["good", "absent", "missing", "empty", "garbage", "nowhere", "broken", "behind", "unreadable"]
"""absent: there is none, and no checkpoint either: verl starts from step 0, rightly. behind: good, but a newer
checkpoint is good, too: a save whose tracker was never written."""

_MAX_BYTES = 4096
_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """The content of a tracker, and the right content.

    Attributes:
        step: that it names; None: none.
        wanted: the newest step that is whole; None: there is none, so verl must find no tracker at all.
        line: what verl would do, for people.
    """

    state: State
    step: int | None
    wanted: int | None
    line: str

    @property
    def needs_repair(self) -> bool:
        return self.state not in ("good", "absent")


def tracker_file(step: int) -> dict[str, bytes]:
    """Returns the file beside `global_step_N` in a checkpoint, which makes its directory one that verl resumes from."""
    return {TRACKER: str(step).encode()}


def look_at_tracker(directory: Path, steps: Sequence[Judged]) -> Tracker:
    """Judges the tracker of `directory`, including an unreadable one."""
    try:
        return judge_tracker(read_tracker(directory), steps)
    except OSError as error:  # a link, a directory, another user's
        # Judged without its content: a repair replaces the name, whatever lies there.
        line = f"a tracker that is no file or cannot be read ({error.strerror})"
        return _tracker("unreadable", line, steps)


def read_tracker(directory: Path) -> bytes | None:
    """Returns the content of the tracker; None: there is none.

    Raises:
        OSError: it is a link, no regular file, or cannot be read.
    """
    try:
        # Without links, and O_NONBLOCK for a FIFO in its place: the directory may be another user's.
        fd = os.open(directory / TRACKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(_MAX_BYTES)


def judge_tracker(content: bytes | None, steps: Sequence[Judged]) -> Tracker:
    """Judges a tracker, as `read_tracker` gave it, beside all steps of the directory. Pure."""
    if content is None:
        # To make verl begin anew is right where there is nothing to resume from.
        if not any(one.ok for one in steps):
            return _tracker("absent", "no tracker" if steps else "no tracker and no checkpoint", steps)
        line = "no tracker: verl would train from step 0 and write over what is there"
        return _tracker("missing", line, steps)
    # verl's PPO trainers write it in place, so a kill can leave it empty.
    if not content.strip():
        return _tracker("empty", "an empty tracker: verl would crash at every start", steps)
    try:
        # As verl does: int() of the text, so blanks around it are fine.
        step = int(content.decode())
    except ValueError:
        # Others may have written it: what goes to the terminal is escaped.
        shown = printable(content[:_SHOWN].decode("utf-8", "replace"))
        line = f"a tracker that is no number ({shown}): verl would crash at every start"
        return _tracker("garbage", line, steps)
    named, points = next((one for one in steps if one.step == step), None), f"points to global_step_{step}"
    if named is None:
        line = f"a tracker that {points}, which is not there: verl would train from step 0"
        return _tracker("nowhere", line, steps, step)
    if not named.ok:
        return _tracker("broken", f"the tracker {points}, which is not whole", steps, step)
    # Behind is worth a repair, too: verl writes the tracker after the step, so a kill in between loses a whole one.
    if any(one.ok and one.step > step for one in steps):
        return _tracker("behind", f"the tracker {points}", steps, step)
    return _tracker("good", f"the tracker {points}, which is whole", steps, step)


def _tracker(state: State, line: str, steps: Sequence[Judged], step: int | None = None) -> Tracker:
    """Adds the content that would be right."""
    wanted = max((one.step for one in steps if one.ok), default=None)
    if state != "good" and (steps or state != "absent"):
        line += "; no step is whole" if wanted is None else f"; the newest whole one is global_step_{wanted}"
    return Tracker(state=state, step=step, wanted=wanted, line=line)


def write_tracker(directory: Path, step: int) -> None:
    """Points the tracker at `step`, atomically and durably. Its mode stays, but for others' write bits."""
    path = directory / TRACKER
    try:
        old = path.stat(follow_symlinks=False).st_mode
        mode = stat.S_IMODE(old) if stat.S_ISREG(old) else 0o600  # a link has all bits
    except FileNotFoundError:
        mode = 0o600
    # By a rename: a link in its place is replaced and not written through.
    write_file(path, str(step).encode())
    # Without the bits by which others could point verl, and the pickles that it loads, elsewhere.
    path.chmod(mode & 0o755)

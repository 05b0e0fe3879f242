"""Chooses the lines of a program's output that say why it ended, whatever the program is.

Errors that are near the end, with the lines beside them, and the last lines. A program may have gone on behind an error
for long, so one that lies further back counts only where no other is told.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from verl_slurm_daemon.descendants import tail

_TOLD_BYTES, _LINE_BEGIN, _LINE_END = 1 << 20, 400, 200
"""Bytes at the end of the log that are searched for the cause; characters that are told of a longer line."""
_NEAR_LINES, _LAST_LINES, _FIRST_TOLD, _LAST_TOLD = 30, 6, 4, 8
"""Behind an error, a program has gone on after so many lines. How many lines are told."""
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_MARGIN = re.compile(r"(?:(?:\[(?:rank|default)\d+\]:|\([\w.:]+ pid=[^)]*\)) ?)?(?:[ +|-]*[+|] )?")
"""What torch, Ray and groups of exceptions put before a line."""
_TRACE = re.compile(
    r"(.*?)(?:(?:Original |Exception Group )?Traceback \(most recent call last\)(?::| ─*╮)"
    r"|((?:Current t|T)hread 0x.* \(most recent call first\):))$"
)
_FRAME = ("  ", "> ", "│", "╭", "╰")
_PLACE = re.compile(r"..(File \"(?!<|.*/lib/python).*)|│ (/(?!.*/lib/python)\S+:\d+ in \S+)")
_ERROR = re.compile(r"(?i)(?:error|exception)\b|\b(?:fatal|critical|exitcode|signal)\b")
_SAYS_NOTHING = re.compile(
    r"[\W_]*$|[ +-]*\d+ -+$|The above exception was|During handling of|frame #\d|"
    r"Error executing job with overrides: |Set the environment variable HYDRA_FULL_ERROR"
)
_OURS = re.compile(r"verl-slurm: rank \d+ \(")
"""Begins the line of `ranks.py` that says how a rank ended."""


def last_words(log: Path) -> str:
    """Returns, on one line, what a program's log says of its end. Of ranks, the line of their launcher comes last."""
    lines = tail(log, _TOLD_BYTES).split("\n")
    ends = [line[: _LINE_BEGIN + _LINE_END] for line in lines if _OURS.match(line)][-_LAST_TOLD:]
    told = list(_statements(line for line in lines if not _OURS.match(line)))
    # Of a kill a program says nothing, but it may kill itself for what it has said just before.
    killed = bool(ends) and all("(SIGKILL)" in line for line in ends)
    errors, reached = list[int](), len(told)
    for at in reversed([at for at, (_, is_error) in enumerate(told) if is_error]):
        # Behind an error, libraries and launchers say this and that, and other ranks fail because of it.
        if reached - at > _NEAR_LINES and (errors or killed):
            break
        reached = at
        errors.append(at)
    last = max(len(told) - _LAST_LINES, errors[0] + 1 if errors else 0)
    near = {line for at in errors for line in range(max(at - 2, 0), min(at + 4, len(told)))}
    said = dict[str, str]()
    for line, _ in (told[at] for at in sorted(near.union(() if killed else range(last, len(told))))):
        # What ranks say alike but for their numbers counts once.
        if len(line) > _LINE_BEGIN + _LINE_END:
            line = f"{line[:_LINE_BEGIN]} ... {line[-_LINE_END:]}"
        said.setdefault(re.sub(r"\d+", "", _MARGIN.sub("", line, count=1)), line.strip())
    words = list(said.values())
    # The first error is the cause of the others, and the last words may be the clearest.
    del words[_FIRST_TOLD:-_LAST_TOLD]
    return " / ".join([*words, *ends])


def _statements(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields what a log says, line by line, and whether it is an error.

    Left out: warnings, exceptions that Python ignored, colours, progress bars that were written over, and frames. Of
    a traceback's frames, the last one in the user's own code is told; of a dump, the first one.
    """
    within, place = "", ""
    for raw in lines:
        line = _CONTROL.sub("", raw.rstrip().rpartition("\r")[2])
        body = _MARGIN.sub("", line, count=1)
        if _SAYS_NOTHING.match(body):
            continue
        if "Exception ignored in" in body:
            within = "ignored"
        elif trace := _TRACE.match(body):
            if re.search(r"\w", trace[1]):
                yield line, True
            if within != "ignored":
                within = "dump" if trace[2] else "trace"
            if not (trace[2] or "").startswith("T"):
                place = ""
        elif (within and body.startswith(_FRAME)) or body.startswith('  File "'):
            within = within or "trace"
            if (found := _PLACE.match(body)) and not (place and within == "dump"):
                place = found[1] or found[2]
        elif within in ("", "warning") and "Warning" in line:
            within = "warning"
        else:
            if within in ("trace", "dump") and place:
                yield place, False
            if within != "ignored":
                yield line, within in ("trace", "dump") or bool(_ERROR.search(line))
            within, place = "", ""
    if place:
        yield place, True

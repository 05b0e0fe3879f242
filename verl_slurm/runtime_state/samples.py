"""Keeps `RUN/samples.jsonl`: a few responses of every step as text, with their rewards, for people to read.

```
{"time": ..., "run": "...", "attempt": 3, "step": 12, "responses": 512, "samples": [{...}, ...]}     a step
{"time": ..., "run": "...", "attempt": 3, "step": 12, "responses": 512, "sealed": "..."}    the same of a run with a key
```

`run` is the run's id (`RUN/run_id`), `attempt` the attempt. `responses` counts the candidates for the samples: what
data-parallel rank 0 sampled in that step. `sealed` is the first form, sealed like a record of the ledger (`sealing.py`)
at a rank that no run has, in base64.

A step that is repeated after an interruption has one line per attempt; the newest counts. At 8 MiB the file becomes
`samples.old.jsonl` and replaces the previous one, so the older half of the kept lines goes.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from verl_slurm.base.bounded import open_regular
from verl_slurm.base.errors import UNREADABLE, CheckpointCorrupt, NotFound
from verl_slurm.base.files import append_line, rename
from verl_slurm.base.keys import Keyring
from verl_slurm.base.one_line import shell_word
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import RUN_ID, run_id
from verl_slurm.runtime_state.sealing import Place, open_record, seal_record

MAX_FILE_BYTES = 8 << 20
_MAX_LINE_BYTES = 4 << 20
_MAX_CHARS = 4000
# So that no record of the ledger opens as samples, and no samples as a record.
_NO_RANK = 0xFFFFFFFF

_RunId = Annotated[str, msgspec.Meta(pattern=rf"^{RUN_ID.pattern}\Z")]
_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One response."""

    sample_id: int
    prompt: str
    response: str
    answer: str
    reward: float
    response_tokens: int


class StepSamples(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The samples of one step, the best first; as a line of a run with a key, `sealed` in their place."""

    time: str
    run: _RunId
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    step: _Step
    responses: int
    samples: list[Sample] = []
    sealed: bytes = b""


_STEP = msgspec.json.Decoder(StepSamples)


def best_and_worst(samples: Sequence[Sample], best: int, worst: int) -> tuple[list[Sample], list[Sample]]:
    """Returns so many with the highest rewards, the best first, and of the others so many with the lowest, the worst
    last.
    """
    ordered = sorted(samples, key=lambda sample: -sample.reward)
    return ordered[:best], ordered[max(len(ordered) - worst, min(best, len(ordered))) :]


def clipped(text: str) -> str:
    """Returns `text`, without its middle if it is long: the answer is at the end of a response."""
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]} [{len(text) - _MAX_CHARS} characters left out] {text[-half:]}"


def append_samples(
    paths: RunPaths,
    attempt: int,
    step: int,
    responses: int,
    samples: Sequence[Sample],
    *,
    keys: Keyring | None = None,
) -> None:
    """Appends the samples of step `step` (from 1), sealed if there are `keys`. Raises OSError if cut short."""
    now, run = datetime.now(UTC).isoformat(timespec="milliseconds"), run_id(paths)
    told = StepSamples(time=now, run=run, attempt=attempt, step=step, responses=responses, samples=[*samples])
    plain = msgspec.json.encode(told)
    if keys is not None:
        sealed = seal_record(keys.current, _place(told), plain)
        plain = msgspec.json.encode(msgspec.structs.replace(told, samples=[], sealed=sealed))
    try:
        # Before the append: so a file stays within the limit.
        if paths.samples.stat().st_size + len(plain) > MAX_FILE_BYTES:
            rename(paths.samples, paths.old_samples, durable=False)
    except FileNotFoundError:
        pass
    # Nothing depends on these files, so they are not forced to disk.
    append_line(paths.samples, plain, durable=False)


def read_samples(paths: RunPaths, keys: Keyring | None = None) -> dict[int, StepSamples]:
    """Returns step → its samples, oldest first, without what is no longer part of the run; skips invalid lines.

    Raises:
        KeyRefused: they are sealed, and there is no key or another one.
        NotFound: there are samples of another run.
        OSError: a file cannot be read.
    """
    found: dict[int, StepSamples] = {}
    # A reader makes no id: without the file there is nothing to hold the lines to.
    own = run_id(paths) if paths.run_id.exists() else None
    # The older file first: the order of lines tells which attempt of a step is the newest.
    for path in (paths.old_samples, paths.samples):
        for line in _lines(path):
            step = _parse(line, keys, path, own)
            if step is not None:
                # An earlier attempt may have gone further: what it trained beyond this step is not part of the run. In
                # order, so that the newest are last: searching all of them for each line would take hours.
                while found and next(reversed(found)) >= step.step:
                    found.popitem()
                found[step.step] = step
    return found


def run_of_samples(paths: RunPaths) -> str:
    """Returns the id of the run that the newest valid line names; empty: there is none. OSError: as `read_samples`."""
    named = ""
    for path in (paths.old_samples, paths.samples):
        for line in _lines(path):
            with suppress(*UNREADABLE):
                named = _STEP.decode(line).run
    return named


def _lines(path: Path) -> Iterator[bytes]:
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return
    with open(fd, "rb") as file:
        # Bounded: a file of a run that was handed over may have any size.
        left = 2 * MAX_FILE_BYTES
        while left > 0 and (line := file.readline(_MAX_LINE_BYTES)):
            left -= len(line)
            yield line


def _parse(line: bytes, keys: Keyring | None, path: Path, own: str | None) -> StepSamples | None:
    try:
        outside = _STEP.decode(line)
        # Before the seal: the key of another run is not this one's, and that would name the wrong cause.
        if own is not None and outside.run != own:
            raise NotFound(
                "samples of another run",
                where=path,
                found=f"run id {outside.run}",
                expected=f"run id {own}, as {path.with_name('run_id')} says",
                remedy=f"move the file out of the run: mv {shell_word(path)} ELSEWHERE",
            )
        if not outside.sealed:
            # With a key, any writer of the file could have made a line without a seal.
            return outside if keys is None else None
        data = open_record(keys, _place(outside), outside.sealed, sealed=True, where=path)
        inside = _STEP.decode(data)
        # What is shown outside the seal is not trusted: the step orders the lines.
        return inside if _place(inside) == _place(outside) else None
    except (*UNREADABLE, CheckpointCorrupt):
        return None


def _place(step: StepSamples) -> Place:
    return step.run, step.attempt, _NO_RANK, step.step, 0

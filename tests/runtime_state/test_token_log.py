"""Tokens of unfinished responses: logged while they are sampled, continued after a kill, never mixed up."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.runtime_state import token_log
from verl_slurm.runtime_state.ledger import Ledger, entry
from verl_slurm.runtime_state.token_log import Call, Prefix, Prefixes, TokenLog, call_of, token_paths

CALL = Call(7, 2, 0, 100, "0badf00d")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(private_dir(tmp_path / "run"))


def read(paths: RunPaths) -> Prefixes:
    def report(line: str) -> None:
        raise AssertionError(line)

    return Prefixes(paths, report=report)


def logged(paths: RunPaths, *, attempt: int = 1, rank: int = 0) -> TokenLog:
    return TokenLog(paths, attempt, rank, every_s=0.001)


def test_a_request_id_says_whose_tokens_they_are() -> None:
    assert call_of(CALL.request_id) == CALL
    assert call_of("5f1c0de2") is None
    assert call_of(CALL.request_id + "-1") is None


_RUNS = st.lists(
    st.tuples(
        st.integers(0, 6), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=4,
)


@given(runs=_RUNS, ended=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_prefix_is_what_each_attempt_went_on_with_up_to_the_first_gap(
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[tuple[int, list[tuple[int, int]]]],
    ended: bool,
) -> None:
    """`runs`: of each attempt, the token that it began at, and the lengths of its calls, each on some engine.

    A response may move between engines, go on in a later attempt, or begin anew there, on one engine; tokens behind a
    gap stay out. Found: what an engine sampled after another one had the response in between was taken to follow its
    own.
    """
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    other = CALL._replace(session=3)
    expected: list[int] = []
    versions: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)
        for attempt, (start, calls) in enumerate(runs, start=1):
            logs = [logged(paths, attempt=attempt, rank=rank) for rank in range(3)]
            moves = start >= len(expected)
            for number, (length, engine) in enumerate(calls):
                rank = engine if moves else calls[0][1]
                ids = [1000 * attempt + at for at in range(start, start + length)]
                last = ended and attempt == len(runs) and number == len(calls) - 1
                logs[rank].add(CALL, start, ids, [-float(i) for i in ids], version=attempt, ended=last)
                logs[rank].add(other, start, [9] * length, [-0.25] * length)
                if start <= len(expected):
                    expected[start:] = ids
                    versions[start:] = [attempt] * length
                start += length
            for log in logs:
                log.close()
    found = read(paths).find(CALL)
    if not expected:
        assert found is None
        return
    assert found is not None
    assert (found.ids, found.log_probs) == (expected, [-float(i) for i in expected])
    assert found.version == versions[0]
    assert found.ended in (False, ended)


def test_tokens_of_several_writes_come_back_as_one_prefix(paths: RunPaths) -> None:
    log = logged(paths)
    other = CALL._replace(session=3)
    for start in range(0, 40, 4):
        log.add(CALL, start, range(start, start + 4), [-0.5] * 4, version=3)
        log.add(other, start, [9] * 4, [-0.25] * 4, version=3, ended=start == 36)
    log.close()
    found = read(paths)
    assert found.find(CALL) == Prefix(list(range(40)), [-0.5] * 40, 3, False)
    assert found.find(other) == Prefix([9] * 40, [-0.25] * 40, 3, True)


def test_another_prompt_or_setting_finds_nothing(paths: RunPaths) -> None:
    log = logged(paths)
    log.add(CALL, 0, [1], None)
    log.close()
    assert read(paths).find(CALL._replace(digest="feed")) is None
    assert read(paths).find(CALL._replace(turn=1)) is None
    assert read(paths).find(CALL) == Prefix([1], None, None, False)


@pytest.mark.parametrize("order", [1, -1])
def test_a_response_of_very_many_calls_takes_a_time_that_grows_with_their_number_alone(
    paths: RunPaths, order: int
) -> None:
    count = 100_000
    calls = [[7, 2, 0, "0badf00d", start, 1, 3, False] for start in range(count)][::order]
    columns = {"ids": np.arange(count)[::order], "log_probs": np.zeros(count, np.float32)}
    with Ledger(token_paths(paths), 1, 0) as ledger:
        ledger.append_many([entry(7, 1, columns, [1, calls])])
    begun = time.process_time()
    assert read(paths).find(CALL) == Prefix(list(range(count)), [0.0] * count, 3, False)
    # It was minutes, of this process's own time, which other load does not change.
    assert time.process_time() - begun < 10


GOOD = [7, 2, 0, "0badf00d", 0, 1, 3, False]


@pytest.mark.parametrize(
    "calls",
    [
        0,
        [1, [[[7], *GOOD[1:]]]],  # a position that is no key
        [1, [[*GOOD[:4], "0", *GOOD[5:]]]],
        [1, [[*GOOD[:5], -1, *GOOD[6:]]]],
        [1, [GOOD[:-1]]],
        [1, [[*GOOD[:5], 2, *GOOD[6:]]]],  # two tokens, and there is one
        {"1": [GOOD]},
        [[], [GOOD]],
    ],
)
def test_a_record_that_is_none_is_told_and_the_others_are_used(paths: RunPaths, calls: Any) -> None:
    log = logged(paths)
    log.add(CALL, 0, [1, 2], None)
    log.close()
    with Ledger(token_paths(paths), 2, 0) as ledger:
        ledger.append_many([entry(7, 1, {"ids": np.array([3], np.int64)}, calls)])
    told: list[str] = []
    assert Prefixes(paths, report=told.append).find(CALL) == Prefix([1, 2], None, None, False)
    [line] = told
    assert "token log" in line or "cannot be read" in line


@pytest.mark.parametrize(
    "columns",
    [
        {"ids": np.array([[3]], np.int64)},
        {"ids": np.array([3.5], np.float64)},
        {"ids": np.array([3], np.int64), "log_probs": np.zeros(0, np.float32)},
    ],
)
def test_tokens_of_another_form_are_told(paths: RunPaths, columns: Any) -> None:
    with Ledger(token_paths(paths), 2, 0) as ledger:
        ledger.append_many([entry(7, 1, columns, [1, [GOOD]])])
    told: list[str] = []
    assert Prefixes(paths, report=told.append).find(CALL) is None
    assert len(told) == 1


def test_tokens_of_another_run_are_not_used(paths: RunPaths, tmp_path: Path) -> None:
    other = RunPaths(private_dir(tmp_path / "other"))
    log = logged(other)
    log.add(CALL, 0, [1, 2], None)
    log.close()
    token_paths(paths).ledger.mkdir(parents=True)
    assert run_id(paths) != run_id(other)
    shutil.copy(token_paths(other).ledger_segment(1, 0), token_paths(paths).ledger)
    told: list[str] = []
    assert Prefixes(paths, report=told.append).find(CALL) is None
    assert f"run id {run_id(other)}" in told[0]


def test_a_log_that_grows_keeps_what_is_still_asked_for(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_log, "_COMPACT_BYTES", 2000)
    monkeypatch.setattr(token_log, "_KEPT_S", 0.0)
    segment = token_paths(paths).ledger_segment(1, 0)
    for position in range(40):
        # Closed each time, so that each is a write of its own; the segment is one.
        log = logged(paths)
        log.add(CALL._replace(position=position), 0, range(100), None, ended=True)
        log.add(CALL._replace(position=1000), position, [position], None)
        log.close()
    before = segment.stat().st_size
    log = logged(paths)
    for position in range(40, 80):
        log.add(CALL._replace(position=position), 0, range(100), None, ended=True)
        log.write()
    log.close()
    assert segment.stat().st_size < 2 * before
    assert read(paths).find(CALL._replace(position=1000)) == Prefix(list(range(40)), None, None, False)


_KILLED = """
import sys
import time
from pathlib import Path
from verl_slurm.base.paths import RunPaths
from verl_slurm.runtime_state import token_log
from verl_slurm.runtime_state.token_log import Call, TokenLog
log = TokenLog(RunPaths(Path(sys.argv[1])), 1, 0, every_s=0.05)
for start in range(10**6):
    log.add(Call(7, 2, 0, 100, "0badf00d"), start, [start], [-1.0])
    sys.stdout.write(f"{start}\\n"); sys.stdout.flush()
    sys.stdin.readline()
"""


def test_a_killed_engine_loses_what_it_sampled_since_the_last_write(paths: RunPaths) -> None:
    segment = token_paths(paths).ledger_segment(1, 0)
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(paths.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        # A token at a time, until some writes have been made: nothing here depends on how fast the machine is.
        given, sizes = -1, set[int]()
        while len(sizes) < 6:
            given = int(engine.stdout.readline())
            sizes.add(segment.stat().st_size)
            engine.stdin.write("\n")
        os.kill(engine.pid, signal.SIGKILL)
    found = read(paths).find(CALL)
    assert found is not None
    assert found.ids == list(range(len(found.ids)))
    assert 0 < len(found.ids) <= given + 2


_STEPS, _RESPONSES, _MOST, _BLOCK = 25, 80, 4096, 64


def _lengths(root: Path, *, killed: bool, continued: bool) -> np.ndarray:
    """Samples steps of responses of a long-tailed length, each step killed once; a kill costs what is not logged yet.

    Whether a response ends with its next token depends on how long it is, as with a model. A finished response is kept
    (it is in the ledger). Where nothing is continued, an unfinished one begins anew.
    """
    draw = np.random.default_rng(killed * 2 + continued)
    wanted = np.exp(np.random.default_rng(0).normal(6.5, 0.8, 200_000)).astype(int) + 1
    alive = np.bincount(np.minimum(wanted, _MOST), minlength=_MOST + 1)[::-1].cumsum()[::-1]
    ends = np.ones(_MOST + 1)  # probability that a response ends with its k-th token
    ends[:-1] = 1 - alive[1:] / np.maximum(alive[:-1], 1)
    lengths = []
    for step in range(_STEPS):
        paths = RunPaths(private_dir(root / str(step)))
        calls = [CALL._replace(position=number) for number in range(_RESPONSES)]
        length, going = np.zeros(_RESPONSES, int), np.arange(_RESPONSES)
        kill, tick, log = int(draw.integers(200, 1200)), 0, logged(paths)
        while len(going):
            tick += 1
            length[going] += 1
            going = going[draw.random(len(going)) >= ends[length[going]]]
            for number in going[length[going] % _BLOCK == 0] if continued else ():
                log.add(calls[number], int(length[number]) - _BLOCK, range(_BLOCK), None)
            if killed and tick == kill:
                log.close()
                prefixes, log = read(paths), logged(paths, attempt=2)
                for number in going:
                    prefix = prefixes.find(calls[number]) if continued else None
                    length[number] = 0 if prefix is None else len(prefix.ids)
        log.close()
        lengths.append(length)
    return np.sort(np.concatenate(lengths))


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Kolmogorov's and Smirnov's: the largest distance of the two cumulative distributions."""
    at = np.concatenate([one, other])
    below = [np.searchsorted(lengths, at, side="right") / len(lengths) for lengths in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def test_lengths_after_25_kills_are_those_of_an_undisturbed_run_with_the_log_alone(tmp_path: Path) -> None:
    twin = _lengths(tmp_path / "twin", killed=False, continued=False)
    with_log = _lengths(tmp_path / "with", killed=True, continued=True)
    without = _lengths(tmp_path / "without", killed=True, continued=False)
    # Two samples of one distribution are further apart than this once in a thousand times.
    critical = 1.95 * np.sqrt(2 / len(twin))
    assert _distance(twin, with_log) < critical
    assert _distance(twin, without) > 1.5 * critical
    assert without.mean() < 0.9 * twin.mean()

"""The benchmark of saving: what it computes from its samples, and that it runs at all. No time is asserted."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.save import check, report
from benchmarks.save.figures import Figures
from benchmarks.save.records import Environment, Mode, Run, Sample
from benchmarks.save.registry import PEERS, absent, groups
from benchmarks.save.targets import Verdict, verdicts
from tests.processes import captured, python_path

ROOT = Path(__file__).parent.parent.parent

STALL = "stall of the training thread, fence included, lazy staging"


def _samples(peer: str, mode: Mode, group: str = "main", **values: float) -> list[Sample]:
    """Three timed repetitions about `values`, and a cold one that is far off."""
    spread = ((0, 100.0), (1, 0.5), (2, 1.0), (3, 7.0))
    return [
        Sample(peer=peer, mode=mode, group=group, rep=rep, values={k: v * factor for k, v in values.items()})
        for rep, factor in spread
    ]


def _run(samples: list[Sample], what: tuple[str, ...] = ("stall", "durable", "busy")) -> Run:
    names = tuple(name for name in PEERS if any(sample.peer == name for sample in samples))
    return Run(
        command="python -m benchmarks.save",
        environment=Environment(
            cpu="a|b",
            cores=2,
            memory_gib=4,
            kernel="6",
            file_systems={"/x": "ext4 on /dev/x"},
            load_before=(0.0, 0.0, 0.0),
            caches_dropped=False,
            versions={},
            commit="",
            started_utc="2026-01-01T00:00:00Z",
        ),
        ranks=2,
        gib=1.0,
        reps=3,
        what=what,
        peers=names,
        labels={name: PEERS[name].label for name in names},
        kinds={name: PEERS[name].kind for name in names},
        absent={"bytecheckpoint": "not installed"},
        state_bytes=1 << 30,
        num_tensors=3,
        same_medium=True,
        samples=samples,
    )


def _verdict(run: Run, figure: str) -> Verdict:
    return next(v for v in verdicts(run) if v.figure == figure)


def test_a_figure_is_the_median_of_the_timed_repetitions() -> None:
    figures = Figures(_samples("dcp", "loop", stall=2.0))
    found = figures.of("main", "dcp", "loop", "stall")
    assert found is not None
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 14.0, 3)
    assert figures.cold("main", "dcp", "loop", "stall") == 200.0


def test_the_peer_that_comes_closest_decides_over_a_target() -> None:
    slow, fast = _samples("dcp", "loop", stall=1.0), _samples("nvrx_fork", "loop", stall=0.05)
    ours = _samples("ours", "loop", stall=0.02)
    assert _verdict(_run(slow + ours), STALL).met is True
    missed = _verdict(_run(slow + fast + ours), STALL)
    assert (missed.met, missed.found) == (False, "0.40 × nvrx_fork")
    assert "NOT met" in report.text(_run(slow + fast + ours))


def test_a_peer_is_compared_with_what_ran_in_its_own_processes() -> None:
    samples = _samples("ours", "loop", stall=9.0) + _samples("ours", "loop", "dcp_threads", stall=0.1)
    samples += _samples("dcp_async", "loop", "dcp_threads", stall=1.0)
    assert Figures(samples).ratio("ours", "dcp_async", "loop", "stall") == pytest.approx(0.1)


def test_a_reference_is_no_peer_to_win_against() -> None:
    samples = _samples("copy", "loop", stall=0.001) + _samples("dcp", "loop", stall=1.0)
    samples += _samples("ours", "loop", stall=0.01)
    assert _verdict(_run(samples), STALL).found == "0.01 × dcp"


def test_seconds_lost_may_be_those_of_the_best_peer_and_the_digests() -> None:
    def lost(ours: float) -> bool | None:
        samples = _samples("dcp", "busy", lost=1.0) + _samples("sha256", "busy", one_core=0.5)
        run = _run(samples + _samples("ours", "busy", lost=ours))
        return _verdict(run, "training seconds lost per save, both cores busy").met

    assert lost(1.5) is True
    assert lost(1.6) is False


def test_what_was_not_measured_is_neither_met_nor_hidden() -> None:
    run = _run(_samples("dcp", "loop", stall=1.0))
    assert {verdict.met for verdict in verdicts(run)} == {None}
    assert "not measured" in report.text(run)
    assert "not installed" in report.text(run)


def test_a_failed_peer_is_shown_with_its_reason() -> None:
    failed = Sample(peer="dcp", mode="loop", group="main", rep=0, error="a\nb")
    assert "a b" in report.text(_run([failed]))


def test_who_changes_a_process_gets_one_of_its_own_with_us_beside_it() -> None:
    found = groups(("dcp", "dcp_async", "ours", "dcp_default", "bytecheckpoint"), {"mine": "a:B"})
    assert found == {
        "main": ("dcp", "ours"),
        "dcp_threads": ("dcp_async", "dcp_default", "ours"),
        "bytecheckpoint": ("bytecheckpoint", "ours"),
    }


def test_what_is_not_installed_is_said() -> None:
    assert absent("dcp", {}) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS, "dcp", replace(PEERS["dcp"], needs="no_such_module"))
        assert "not installed" in absent("dcp", {})


def _checked(durable: float, *, cores: int = 2, verified: float = 1.0) -> Run:
    samples = _samples("ours", "direct", durable=durable) + _samples("raw", "direct", durable=1.0)
    samples += _samples("ours_eager", "loop", stall=1.1) + _samples("copy", "loop", stall=1.0)
    samples += _samples("ours", "verify", "verify", verify=verified, plain_read=1.0)
    run = _run(samples, check.OPTIONS["what"])
    return msgspec.structs.replace(run, environment=msgspec.structs.replace(run.environment, cores=cores))


def test_a_check_says_what_is_slower_than_in_earlier_ones_and_by_ratios_alone() -> None:
    earlier = [_checked(1.0), _checked(1.1), _checked(9.0)]  # one of them on a bad day
    compared = check.compare(_checked(1.5), earlier)
    assert [one.is_slower for one in compared] == [False, True, False]
    assert compared[1].before == (1.1, 3)
    assert "SLOWER" in check.text(compared)
    assert "no slower" in check.text(check.compare(_checked(1.2), earlier))


def test_checks_of_other_machines_and_stopped_ones_do_not_count() -> None:
    stopped = msgspec.structs.replace(_checked(1.0), stopped=True)
    compared = check.compare(_checked(9.0), [_checked(1.0, cores=64), stopped])
    assert [one.before for one in compared] == [None, None, None]
    assert "nothing to compare with" in check.text(compared)


def test_checks_are_kept_and_found_again(tmp_path: Path) -> None:
    check.keep(_checked(1.0), tmp_path)
    (tmp_path / "save-0000.json").write_text("{")
    assert check.earlier_runs(tmp_path) == [_checked(1.0)]
    assert check.earlier_runs(tmp_path / "none") == []


@pytest.mark.long
@pytest.mark.torch
def test_the_whole_harness_runs_at_a_tiny_size(tmp_path: Path) -> None:
    options = {"--gib": 0.004, "--reps": 1, "--quiet-s": 0, "--generation-s": 0.05, "--busy-s": 0.1}
    argv = [sys.executable, "-m", "benchmarks.save", *(str(x) for pair in options.items() for x in pair)]
    argv += ["--what", "stall,durable,busy", "--peers", "dcp,ours,ours_eager,copy,raw"]
    argv += ["--dir", str(tmp_path), "--json", "-"]
    done = captured(argv, cwd=ROOT, env=os.environ | python_path(), timeout=300)
    assert done.returncode == 0, done.stderr
    run: Any = msgspec.json.decode(done.stdout, type=Run)
    assert [sample.error for sample in run.samples if sample.error] == []
    compared = [sample.bit_exact for sample in run.samples if sample.bit_exact is not None]
    assert compared
    assert all(compared)
    measured = {(sample.peer, sample.mode) for sample in run.samples if sample.rep}
    for peer in ("dcp", "ours", "ours_eager"):
        assert measured >= {(peer, "loop"), (peer, "direct"), (peer, "busy")}
    assert list(tmp_path.iterdir()) == []

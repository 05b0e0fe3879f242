"""A place is judged by trying it, and nothing of the trial stays."""

from pathlib import Path

import msgspec
import pytest

from verl_slurm.checks.storage_probe import PlaceReport, judge_place, probe_place

GOOD = PlaceReport(path="/run", medium="xfs", free_bytes=10**12, write_bytes_per_s=1e9, sync_s=0.001)


def test_a_place_that_is_tried_is_left_as_it_was(tmp_path: Path) -> None:
    report = probe_place(tmp_path / "runs" / "one", num_bytes=1 << 20)
    assert (report.problem, report.keeps_modes, report.renames, report.locks) == ("", True, True, True)
    assert min(report.write_bytes_per_s, report.sync_s) > 0
    assert list(tmp_path.iterdir()) == []
    # One that cannot be written is a finding and no exception.
    report = probe_place(Path("/proc/nowhere/run"))
    (finding,) = judge_place("run_dir", report, must_outlive_node=True)
    assert finding.verdict == "bad"
    assert "/proc" in finding.found


@pytest.mark.parametrize(
    ("change", "verdict", "word"),
    [
        ({"medium": "tmpfs"}, "warning", "memory"),
        ({"keeps_modes": False}, "warning", "file modes"),
        ({"renames": False}, "bad", "atomically"),
        ({"locks": False}, "warning", "flock"),
        ({"sync_s": 0.08}, "warning", "80 ms"),
    ],
)
def test_what_a_place_does_not_keep_is_said(change: dict[str, object], verdict: str, word: str) -> None:
    found = judge_place("run_dir", msgspec.structs.replace(GOOD, **change), must_outlive_node=True)
    assert [f.verdict for f in found if word in f.found] == [verdict]
    own = judge_place("local", msgspec.structs.replace(GOOD, **change), must_outlive_node=False)
    assert ("tmpfs" in change.values()) is ([f.verdict for f in own] == ["good"]), (
        "good enough for a node's own copy"
    )

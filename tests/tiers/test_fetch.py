"""A checkpoint back from a tier: whole under its name, or nothing under it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import write_config, write_manifest
from tests.checkpoint.conftest import STREWN, leaves, strew
from tests.fakes.s3_server import StandIn
from tests.tiers.conftest import config_of, opened, posix_config, s3_config
from verl_slurm.base.errors import CheckpointCorrupt, NoRoom, NotFound, TierAway, TierError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.decide.storage import FreeSpace, judge_room
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.checkpoint.tiers import __main__ as child, fetch as fetch_module
from verl_slurm.checkpoint.tiers.fetch import fetch, fetch_newest
from verl_slurm.checkpoint.tiers.mover import sync
from verl_slurm.checkpoint.tiers.survey import OpenTier
from verl_slurm.config.schema import TierConfig

Save = Callable[..., Path]


def gone(path: Path) -> Path:
    """Out of the run, whole."""
    return path.rename(path.parents[2] / f"kept.{path.name}")


@pytest.fixture
def cold(tmp_path: Path) -> TierConfig:
    return posix_config(tmp_path / "cold", kind="archive")


@pytest.fixture
def tiers(paths: RunPaths, save: Save, cold: TierConfig) -> list[OpenTier]:
    """step_000010 and step_000020, in the archive and nowhere else."""
    saved = [save(10), save(20)]
    tiers = opened(paths, cold)
    assert sync(paths, config_of(), tiers=tiers).ok
    for path in saved:
        gone(path)
    return tiers


def stored(cold: TierConfig, name: str) -> Path:
    return next(Path(str(cold.path)).rglob(name))


def left(paths: RunPaths) -> list[str]:
    """The hint of the newest commit aside."""
    return sorted(path.name for path in paths.checkpoints.iterdir() if path != paths.latest)


def test_the_newest_that_verifies_comes_back(
    paths: RunPaths, tiers: list[OpenTier], cold: TierConfig
) -> None:
    (stored(cold, "step_000020") / "config.yaml").write_bytes(b"name: rUn\n")
    fetched = fetch_newest(paths, config_of(), tiers=tiers)
    assert (fetched.name, fetched.tier) == ("step_000010", "cold")
    assert "step_000020: the source is damaged" in fetched.reasons[0]
    assert verify(paths.checkpoints / "step_000010").ok
    assert left(paths) == ["step_000010"]


def test_another_runs_copy_in_our_tier_is_passed_over(
    paths: RunPaths, tiers: list[OpenTier], cold: TierConfig
) -> None:
    write_manifest(stored(cold, "step_000020"), 20, run_id="fedcba9876543210")
    fetched = fetch_newest(paths, config_of(), tiers=tiers)
    assert fetched.name == "step_000010"
    assert "of another run, fedcba9876543210" in fetched.reasons[0]


def test_one_that_is_there_and_verifies_is_left_alone(
    paths: RunPaths, tiers: list[OpenTier], save: Save
) -> None:
    before = save(20).stat()
    assert fetch(paths, config_of(), "step_000020", tiers=tiers).tier == ""
    after = (paths.checkpoints / "step_000020").stat()
    assert (after.st_ino, after.st_ctime_ns) == (
        before.st_ino,
        before.st_ctime_ns,
    )  # reading changes st_atime


def test_strays_cost_neither_a_copy_here_nor_one_in_a_tier(
    paths: RunPaths, tiers: list[OpenTier], cold: TierConfig, save: Save
) -> None:
    strew(stored(cold, "step_000010"))
    assert fetch_newest(paths, config_of(), only="step_000010", tiers=tiers).tier == "cold"
    assert leaves(stored(cold, "step_000010")) > STREWN
    strew(save(20))
    assert fetch(paths, config_of(), "step_000020", tiers=tiers).tier == ""
    for name in ("step_000010", "step_000020"):
        assert verify(paths.checkpoints / name).ok


@pytest.mark.parametrize("harm", ["longer", "shorter", "other", "missing", "link"])
def test_what_does_not_verify_leaves_nothing(
    paths: RunPaths, tiers: list[OpenTier], cold: TierConfig, harm: str
) -> None:
    file = stored(cold, "step_000020") / "actor" / "__0_0.distcp"
    data = file.read_bytes()
    changed = {"longer": data + b"x", "shorter": data[:-1], "other": data[:-1] + b"x"}.get(harm)
    if changed is not None:
        file.write_bytes(changed)
    else:
        target = file.rename(file.parents[4] / "elsewhere")
        if harm == "link":
            file.symlink_to(target)
    with pytest.raises((CheckpointCorrupt, NotFound, TierError)):
        fetch(paths, config_of(), "step_000020", tiers=tiers)
    assert left(paths) == []


def test_what_no_tier_has_is_not_found(paths: RunPaths, tiers: list[OpenTier]) -> None:
    with pytest.raises(NotFound, match="no tier that answers"):
        fetch(paths, config_of(), "step_000099", tiers=tiers)
    with pytest.raises(NotFound, match="not a checkpoint's name"):
        fetch(paths, config_of(), "../../etc", tiers=tiers)


def test_a_run_is_not_begun_afresh_while_a_tier_that_has_its_checkpoints_is_away(
    paths: RunPaths, tiers: list[OpenTier], cold: TierConfig
) -> None:
    Path(str(cold.path)).rename(f"{cold.path}.unmounted")
    for told in (paths.tier_records, paths.events):  # either of them is enough
        with pytest.raises(TierError, match="does not answer") as caught:
            fetch_newest(paths, config_of(), tiers=tiers)
        assert caught.value.expected == "step_000020"
        told.unlink()
    assert fetch_newest(paths, config_of(), tiers=tiers).name is None


def full(*_: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_full(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """`small`: a checkpoint does not fit. `filled`: the disk fills meanwhile, to the last byte."""
    if how == "small":
        monkeypatch.setattr(fetch_module, "room_for", lambda _, need: judge_room(FreeSpace(bytes=10), need))
    else:
        monkeypatch.setattr(os, "pwrite", full)
        monkeypatch.setattr(os, "write", full)


@pytest.mark.parametrize("how", ["small", "filled"])
def test_what_does_not_fit_here_is_waited_for_and_nothing_older_is_taken(
    paths: RunPaths, tiers: list[OpenTier], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with monkeypatch.context() as patch:
        make_full(patch, how)
        for lost in ({}, {"only": "step_000020", "above": "step_000010"}):
            with pytest.raises(TierAway, match=r"step_000020: no room .*; make room here") as caught:
                fetch_newest(paths, config_of(), **lost, tiers=tiers)
            assert "step_000010: " not in caught.value.one_line()
        with pytest.raises(NoRoom):
            fetch(paths, config_of(), "step_000020", tiers=tiers)
    assert left(paths) == []
    assert fetch_newest(paths, config_of(), tiers=tiers).name == "step_000020"


def test_a_journal_that_takes_no_line_keeps_nothing_from_coming_home(
    paths: RunPaths, tiers: list[OpenTier], cold: TierConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stored(cold, "step_000020") / "config.yaml").write_bytes(b"name: rUn\n")
    monkeypatch.setattr(fetch_module, "append_event", full)
    assert fetch_newest(paths, config_of(), tiers=tiers).name == "step_000010"


@pytest.mark.parametrize("how", ["small", "filled", "no answer"])
@pytest.mark.parametrize("lost", [(), ("--name", "step_000020", "--above", "step_000010")])
def test_a_fault_of_the_runs_own_storage_is_to_the_lead_as_a_tier_that_is_away(
    paths: RunPaths,
    tiers: list[OpenTier],
    cold: TierConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
    lost: tuple[str, ...],
) -> None:
    write_config(paths, config_of(cold))
    monkeypatch.setattr(child.signal, "alarm", lambda seconds: None)
    if how == "no answer":
        monkeypatch.setattr(child, "load_resolved", full)
    else:
        make_full(monkeypatch, how)
    assert child.main(["restore", "--run", str(paths.root), *lost]) == TierAway.child_code
    said = capsys.readouterr().err
    assert ("No space left" in said or "no room" in said, said.count("\n")) == (True, 1)


@pytest.mark.scenario("N07")
@pytest.mark.parametrize("fault", ["flip_down", "cut", "denied"])
def test_a_server_that_gives_back_something_else_gives_nothing(
    paths: RunPaths, save: Save, server: StandIn, fault: str
) -> None:
    path = save(10)
    tiers = opened(paths, s3_config(server))
    assert sync(paths, config_of(), tiers=tiers).ok
    gone(path)
    server.fault = lambda call: fault if call.op == "GetObject" and call.key.endswith(".distcp") else None
    with pytest.raises((CheckpointCorrupt, TierError)) as caught:
        fetch(paths, config_of(), "step_000010", tiers=tiers)
    assert "secret prose" not in caught.value.one_line()
    assert left(paths) == []


@pytest.mark.scenario("FLT-H03")
def test_what_a_tier_has_damaged_is_taken_from_the_copy_in_quarantine(
    paths: RunPaths, save: Save, cold: TierConfig
) -> None:
    here = save(10)
    tiers = opened(paths, cold)
    assert sync(paths, config_of(), tiers=tiers).ok
    paths.quarantine.mkdir(mode=0o700)
    aside = here.rename(paths.quarantine / f"{here.name}.20261122T000000")
    (aside / "metadata.json").write_bytes(b"damaged here")
    (stored(cold, here.name) / "config.yaml").write_bytes(b"name: rUn\n")
    assert fetch(paths, config_of(), here.name, tiers=tiers).tier == "cold"
    assert verify(here).ok

"""Passes over tiers: what is where afterwards, and after a death at any point of one."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.checkpoint.conftest import FILES
from tests.fakes.s3_server import StandIn
from tests.journals import read_events
from tests.tiers.conftest import (
    NOW,
    config_of,
    content,
    copies_of,
    opened,
    posix_config,
    s3_config,
    small_checkpoint,
)
from verl_slurm.base.errors import CheckpointCorrupt, TierError
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import checkpoint_order
from verl_slurm.checkpoint.format.specification import MANIFEST, FileEntry
from verl_slurm.checkpoint.store.copies import CopyPlace, ObjectInfo, Source
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.checkpoint.tiers import s3
from verl_slurm.checkpoint.tiers.fetch import fetch
from verl_slurm.checkpoint.tiers.mover import Pass, look, sync
from verl_slurm.checkpoint.tiers.run_copies import RunCopies
from verl_slurm.checkpoint.tiers.survey import Memory, OpenTier, mover_lock, open_run
from verl_slurm.config.schema import TierConfig

pytestmark = pytest.mark.slow

Save = Callable[..., Path]
BIG = FILES | {"actor/rank_0000.bin": content(5 << 20)}


def run_pass(paths: RunPaths, tiers: list[OpenTier], days: float = 0) -> Pass:
    return sync(paths, config_of(), tiers=tiers, now=lambda: NOW + timedelta(days=days))


def whole(tier: OpenTier) -> dict[str, int]:
    """The checkpoints that are whole there, every byte read: name → attempt."""
    copies = copies_of(tier)
    found = (name for name, objects in copies.objects().items() if MANIFEST in objects)
    return {name: copies.manifest(name)[1].attempt for name in found if not copies.problems(name)}


def states(paths: RunPaths, tiers: list[OpenTier]) -> dict[tuple[str, str], bool | None]:
    return {(s.name, c.name): c.verified for s in Memory(paths).survey(tiers) for c in s.copies}


# ---- any history


class Died(BaseException):
    """What a kill looks like from inside."""


class MemoryPlace:
    """A place in memory. All of a world die at the `die_at`-th change, before or after it took place, and store
    `num_wrong` objects wrong."""

    ticks, die_at, num_wrong = 0, 0, 0

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.is_away = False

    @classmethod
    def tick(cls) -> None:
        MemoryPlace.ticks += 1
        if MemoryPlace.ticks == MemoryPlace.die_at:
            raise Died

    def _answer(self) -> None:
        if self.is_away:
            raise TierError("the tier does not answer")

    def _set(self, key: str, data: bytes) -> None:
        self.tick()
        if MemoryPlace.num_wrong:
            MemoryPlace.num_wrong, data = MemoryPlace.num_wrong - 1, b"?" + data[1:]
        self.objects[key] = data, MemoryPlace.ticks
        self.tick()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._answer()
        for key, (data, stamp) in self.objects.items():
            if key.startswith(prefix):
                yield ObjectInfo(key=key, size=len(data), stamp=str(stamp))

    def stat(self, key: str) -> ObjectInfo | None:
        return next((info for info in self.list(key) if info.key == key), None)

    def read(self, key: str, offset: int = 0, size: int | None = None) -> Iterator[bytes]:
        self._answer()
        yield self.objects[key][0][offset : None if size is None else offset + size]

    def put(self, key: str, entry: FileEntry, source: Source) -> int:
        self._answer()
        data = b"".join(source(0))
        self._set(key, data)
        return len(data)

    def commit(self, key: str, data: bytes) -> bool:
        self._answer()
        if key in self.objects:
            return False
        self._set(key, data)
        return True

    def delete(self, key: str) -> None:
        self._answer()
        self.objects.pop(key, None)
        self.tick()

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        self.tick()
        return 0


class Histories(RuleBasedStateMachine):
    """A run and three tiers, with everything that happens to them. A pass never costs what is whole."""

    @initialize(die_at=st.integers(0, 4))
    def begin(self, die_at: int) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="tiers-")
        self.paths = RunPaths(private_dir(Path(self.scratch.name) / "run"))
        self.tiers = [
            OpenTier(
                config=TierConfig(name=name, kind="posix", path="/x", keep_days=days),
                copies=RunCopies(MemoryPlace(), "p/run/"),
            )
            for name, days in (("near", 7), ("store", 90), ("cold", None))
        ]
        self.places: list[MemoryPlace] = [copies_of(tier).place for tier in self.tiers]  # type: ignore[misc]
        self.now, self.step, self.attempt = NOW, 0, 1
        self.harmed = set[tuple[str, str]]()
        MemoryPlace.num_wrong = 0
        for days in (8, 0):
            self.save(0)
            self._pass(0)
            self.wait(days)
        self._pass(die_at)  # the first one is too old for the nearest tier

    @rule(back=st.integers(0, 3))
    def save(self, back: int) -> None:
        """Goes back by so many steps first, in another attempt."""
        if back:
            self.attempt, self.step = self.attempt + 1, max(1, self.step - back)
        else:
            self.step += 1
        shutil.rmtree(self.paths.checkpoints / f"step_{self.step:06d}", ignore_errors=True)
        final = small_checkpoint(self.paths, self.step, self.now, self.attempt)
        self.harmed.discard(("checkpoints", final.name))

    @rule()
    def prune(self) -> None:
        *old, _ = sorted(self.paths.checkpoints.iterdir())
        for path in old[:1]:
            shutil.rmtree(path)

    @rule(days=st.sampled_from([1, 8, 8, 100]))
    def wait(self, days: int) -> None:
        self.now += timedelta(days=days)

    @rule(tier=st.integers(0, 2), which=st.integers(0, 20), gone=st.booleans())
    def rot(self, tier: int, which: int, gone: bool) -> None:
        """The listing does not show it: the stamp stays."""
        objects = self.places[tier].objects
        for key in sorted(objects)[which : which + 1]:
            self.harmed.add((self.tiers[tier].config.name, key.split("/")[2]))
            data, stamp = objects.pop(key)
            if not gone:
                objects[key] = data[:-2] + bytes([data[-2] ^ 1]) + data[-1:], stamp

    @rule(which=st.integers(0, 3))
    def rot_in_the_run(self, which: int) -> None:
        for path in sorted(self.paths.checkpoints.iterdir())[which : which + 1]:
            self.harmed.add(("checkpoints", path.name))
            (path / "actor" / "rank_0000.bin").write_bytes(b"rot" * (50 << 10))

    @rule(num=st.integers(1, 3))
    def store_wrong(self, num: int) -> None:
        MemoryPlace.num_wrong = num

    @rule()
    def forget(self) -> None:
        self.paths.tier_records.unlink(missing_ok=True)

    @rule(tier=st.integers(0, 2), is_away=st.booleans())
    def go_away(self, tier: int, is_away: bool) -> None:
        self.places[tier].is_away = is_away

    @rule()
    def one_pass(self) -> None:
        before, after = self._pass(0)
        assert before["cold"].keys() <= after["cold"].keys(), "an archive has lost one"
        names = [tier.config.name for tier in self.tiers]
        for at, tier in enumerate(names):
            for name in before[tier].keys() - after[tier].keys():
                again = any(name in after[later] for later in names[at + 1 :])
                assert again or after[names[min(at + 1, 2)]].keys() - {name}, f"nothing stands in for {name}"
            if tier not in {where for where, _ in self.harmed}:
                assert after[tier] or not before[tier], f"{tier} has lost its last one"

    @rule(die_at=st.integers(1, 25))
    def a_pass_that_dies(self, die_at: int) -> None:
        self._pass(die_at)

    def _pass(self, die_at: int) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        before = self._whole()
        MemoryPlace.ticks, MemoryPlace.die_at = 0, die_at
        with contextlib.suppress(Died):
            sync(self.paths, config_of(), tiers=self.tiers, now=lambda: self.now)
        MemoryPlace.die_at = 0
        after = self._whole()
        ranks = {
            (attempt, checkpoint_order(name)) for found in before.values() for name, attempt in found.items()
        }
        kept = {
            (attempt, checkpoint_order(name)) for found in after.values() for name, attempt in found.items()
        }
        if ranks:
            assert max(ranks) in kept, "the newest whole one is gone"
        assert after["checkpoints"] == before["checkpoints"], "a pass changed the run's own directory"
        return before, after

    def _whole(self) -> dict[str, dict[str, int]]:
        away = [place.is_away for place in self.places]
        for place in self.places:
            place.is_away = False
        found = {}
        for tier in (open_run(self.paths), *self.tiers):
            found[tier.config.name] = whole(tier)
            self.harmed -= {(tier.config.name, name) for name in found[tier.config.name]}
            there = {name for name, objects in copies_of(tier).objects().items() if MANIFEST in objects}
            for name in there - found[tier.config.name].keys():
                assert (tier.config.name, name) in self.harmed, "half a checkpoint has a commit record"
        for place, was_away in zip(self.places, away, strict=True):
            place.is_away = was_away
        return found

    def teardown(self) -> None:
        """Passes come to rest, and then the archive has whatever the run has whole."""
        if not hasattr(self, "scratch"):
            return
        MemoryPlace.num_wrong = 0
        for place in self.places:
            place.is_away = False
        for _ in range(8):
            done = sync(self.paths, config_of(), tiers=self.tiers, now=lambda: self.now).done
        assert done == (), "the same is done again and again"
        found = self._whole()
        missing = {("cold", name) for name in found["checkpoints"].keys() - found["cold"].keys()}
        assert missing <= self.harmed
        self.scratch.cleanup()


TestHistories = pytest.mark.scenario("N05")(Histories.TestCase)
TestHistories.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# ---- on disks, and in a bucket


@pytest.fixture
def nvme(tmp_path: Path) -> TierConfig:
    return posix_config(tmp_path / "nvme", keep_days=7)


@pytest.fixture
def cold(tmp_path: Path) -> TierConfig:
    return posix_config(tmp_path / "cold", kind="archive")


def test_a_checkpoint_goes_through_all_tiers_and_back(
    paths: RunPaths,
    save: Save,
    nvme: TierConfig,
    cold: TierConfig,
    server: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "MIN_PART_BYTES", 1 << 20)
    final = save(10, files=BIG)
    tiers = opened(paths, nvme, s3_config(server, keep_days=90), cold)
    first = run_pass(paths, tiers)
    assert first.ok
    assert [(d.action.kind, d.action.tier) for d in first.done] == [
        ("copy", t) for t in ("nvme", "store", "cold")
    ]
    assert set(states(paths, tiers).values()) == {True}
    again = run_pass(paths, tiers)
    assert again.done == ()
    # A week later there is a newer one, and nvme lets go of the old one.
    save(20, files=FILES)
    run_pass(paths, tiers, days=1)
    later = run_pass(paths, tiers, days=8)
    assert [(d.action.kind, d.action.name, d.action.tier) for d in later.done] == [
        ("drop", "step_000010", "nvme")
    ]
    # The run's own copy rots; it comes back from the bucket.
    (final / "actor" / "rank_0000.bin").write_bytes(b"rot")
    fetched = fetch(paths, config_of(), "step_000010", tiers=tiers)
    assert fetched.tier == "store"
    assert verify(final).ok
    assert len(list(paths.quarantine.glob("step_000010.*"))) == 2
    events = [event["event"] for event in read_events(paths)]
    assert events.count("tier_copied") == 6
    assert events.count("tier_removed") == 1
    assert events.count("tier_fetched") == 1
    both = {"step_000010", "step_000020"}
    assert [set(whole(tier)) for tier in tiers] == [{"step_000020"}, both, both]


@pytest.mark.scenario("C03")
@pytest.mark.parametrize("mode", [0o700, 0o770], ids=["good", "not to be judged"])
def test_one_that_the_run_saves_while_it_is_fetched_is_not_set_aside(
    paths: RunPaths, save: Save, cold: TierConfig, mode: int
) -> None:
    """Also not where it cannot be judged now: what others may write is not trusted, and is no damage."""
    final = save(10)
    assert run_pass(paths, opened(paths, cold)).ok
    shutil.rmtree(final)
    saved: list[int] = []
    once = threading.Lock()

    class Meanwhile:
        def __init__(self, inner: CopyPlace) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def read(self, key: str, *where: int) -> Iterator[bytes]:
            with once:  # several files come at a time
                if not saved and not key.endswith(MANIFEST):
                    saved.append(save(10).stat().st_ino)
                    final.chmod(mode)
            return self._inner.read(key, *where)

    untrusted = pytest.raises(CheckpointCorrupt, match="left where it is")
    with contextlib.nullcontext() if mode == 0o700 else untrusted:
        fetch(paths, config_of(), "step_000010", tiers=opened(paths, cold, wrap=Meanwhile))  # type: ignore[arg-type]
    assert [final.stat().st_ino] == saved
    final.chmod(0o700)
    assert verify(final).ok
    assert not paths.quarantine.exists()
    assert {path.name for path in paths.checkpoints.iterdir()} <= {final.name, "latest"}


@pytest.mark.parametrize("bucket", [False, True])
def test_a_tier_without_anything_that_it_had_is_away_until_its_record_is_removed(
    paths: RunPaths, save: Save, cold: TierConfig, server: StandIn, bucket: bool
) -> None:
    """A mount point without its file system is a directory, and empty."""
    save(10)
    config = s3_config(server) if bucket else cold
    tiers = opened(paths, config)
    assert run_pass(paths, tiers).ok
    copies_of(tiers[0]).remove("step_000010")
    kept = save(20)
    seen = run_pass(paths, tiers)
    assert (seen.ok, seen.done) == (False, ())
    state = seen.states[1]
    assert "it is empty" in state.detail
    assert "(expected step_000010)" in state.detail
    assert f"rm {paths.tier_records} && verl-slurm tiers {paths.root} --offload" in state.detail
    assert read_events(paths)[-1]["event"] == "tier_unreachable"
    assert copies_of(tiers[0]).objects() == {}
    assert verify(kept).ok
    paths.tier_records.unlink()
    assert run_pass(paths, tiers).ok
    assert set(whole(tiers[0])) == {"step_000010", "step_000020"}


def test_there_is_one_mover_a_run_except_where_the_file_system_has_no_locks(
    paths: RunPaths, nvme: TierConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre without `-o flock`."""
    with mover_lock(paths), pytest.raises(TierError, match="another mover"):
        run_pass(paths, opened(paths, nvme))

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with mover_lock(paths):
        assert run_pass(paths, opened(paths, nvme)).ok


def test_nothing_is_dropped_on_the_word_of_a_copy_that_no_longer_verifies(
    paths: RunPaths, save: Save, nvme: TierConfig, cold: TierConfig
) -> None:
    save(10)
    save(20)
    tiers = opened(paths, nvme, cold)
    run_pass(paths, tiers)
    rotten = next(Path(str(cold.path)).rglob("step_000010/actor/__0_0.distcp"))
    stamp = rotten.stat()
    rotten.write_bytes(b"X" + rotten.read_bytes()[1:])
    os.utime(rotten, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    done = run_pass(paths, tiers, days=8)
    assert "no longer verifies" in done.done[0].problem
    # It is mended from nvme, and only then nvme lets go.
    passes = [*done.done, *(run_pass(paths, tiers, days=8).done[0] for _ in range(2))]
    assert [(d.action.kind, d.action.tier) for d in passes] == [
        ("drop", "nvme"),
        ("copy", "cold"),
        ("drop", "nvme"),
    ]
    assert [set(whole(tier)) for tier in tiers] == [{"step_000020"}, {"step_000010", "step_000020"}]


def test_what_was_saved_again_replaces_the_old_one_if_it_verifies(
    paths: RunPaths, save: Save, nvme: TierConfig
) -> None:
    tiers = opened(paths, nvme)
    for attempt, state in ((1, b"first"), (2, b"better"), (3, b"worse!")):
        shutil.rmtree(paths.checkpoints, ignore_errors=True)
        final = save(10, files=FILES | {"actor/__0_0.distcp": state}, attempt=attempt)
        if attempt == 3:
            (final / "actor" / "__0_0.distcp").write_bytes(b"rotten")
        done = run_pass(paths, tiers).done
    assert "successor does not verify" in done[0].problem
    assert whole(tiers[0]) == {"step_000010": 2}


def test_a_dry_run_says_what_the_pass_then_does(paths: RunPaths, save: Save, nvme: TierConfig) -> None:
    save(10, 8)
    save(20)
    config = msgspec.structs.replace(config_of(nvme), run_dir=str(paths.root))
    planned = look(paths, config, now=lambda: NOW)
    assert not any(Path(str(nvme.path)).iterdir())
    done = sync(paths, config, now=lambda: NOW)
    assert planned.plan == done.plan
    assert [d.action for d in done.done] == [a for a in planned.plan if a.kind in ("copy", "drop")]


@pytest.mark.scenario("N05")
def test_a_tier_that_is_away_is_said_and_its_mount_point_is_not_made(
    paths: RunPaths, save_small: Save, server: StandIn
) -> None:
    save_small(10)
    server.fault = lambda call: "cut"
    missing = TierConfig(name="gone", kind="posix", path="/nonexistent/place")
    done = run_pass(paths, opened(paths, s3_config(server), missing))
    assert not done.ok
    away = [event["tier"] for event in read_events(paths) if event["event"] == "tier_unreachable"]
    assert away == ["store", "gone"]
    assert "the tier's directory is not there" in done.states[2].detail
    assert not Path("/nonexistent").exists()

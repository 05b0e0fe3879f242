"""Passes over tiers: what is where afterwards, and after a death at any point of one."""

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from tests.checkpoint.conftest import FILES
from tests.fakes.s3_server import Call, StandIn
from tests.journals import read_events
from tests.tiers.conftest import NOW, config_of, content, opened, posix_config, s3_config
from verl_slurm.base.errors import CheckpointCorrupt, TierError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.specification import FileEntry
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.config.tiers_section import TierConfig
from verl_slurm.tiers import multipart
from verl_slurm.tiers.backend import Backend, ObjectInfo, Source
from verl_slurm.tiers.census import Memory, OpenTier, survey
from verl_slurm.tiers.fetch import fetch
from verl_slurm.tiers.mover import Pass, look, sync
from verl_slurm.tiers.opening import mover_lock, open_backend
from verl_slurm.tiers.tier_plan import TierState
from verl_slurm.tiers.transfer import verify_copy

pytestmark = pytest.mark.slow

Save = Callable[..., Path]
BIG = FILES | {"actor/rank_0000.bin": content(5 << 20)}


class Died(BaseException):
    """What a kill looks like from inside."""


class Mortal:
    """A backend that dies at its `at`-th change, before or after it took place, and in the middle of files."""

    def __init__(self, inner: Backend, clock: "Clock") -> None:
        self._inner, self._clock = inner, clock

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def stat(self, key: str) -> ObjectInfo | None:
        return self._inner.stat(key)

    def read(self, key: str, offset: int, size: int) -> bytes:
        return self._inner.read(key, offset, size)

    def blocks(self, key: str) -> Iterator[bytes]:
        return self._inner.blocks(key)

    def holds(self, key: str, entry: FileEntry) -> str:
        return self._inner.holds(key, entry)

    def put(self, key: str, source: Source, entry: FileEntry) -> int:
        self._clock.tick()
        sent = self._inner.put(key, _MortalSource(source, self._clock), entry)
        self._clock.tick()
        return sent

    def commit(self, key: str, data: bytes) -> bool:
        self._clock.tick()
        done = self._inner.commit(key, data)
        self._clock.tick()
        return done

    def delete(self, key: str) -> None:
        self._inner.delete(key)
        self._clock.tick()

    def forget(self, prefix: str, keep: Collection[str] = ()) -> int:
        self._clock.tick()
        return self._inner.forget(prefix, keep)


class _MortalSource:
    def __init__(self, inner: Source, clock: "Clock") -> None:
        self._inner, self._clock, self.size = inner, clock, inner.size

    def read(self, offset: int, size: int) -> bytes:
        self._clock.tick()
        return self._inner.read(offset, size)


class Clock:
    """Counts to `at`; 0: for ever."""

    def __init__(self, at: int = 0) -> None:
        self.now, self.at = 0, at

    def tick(self) -> None:
        self.now += 1
        if self.now == self.at:
            raise Died


def run_pass(paths: RunPaths, tiers: list[OpenTier], days: float = 0) -> Pass:
    return sync(paths, config_of(), tiers=tiers, now=lambda: NOW + timedelta(days=days))


def truth(paths: RunPaths, tiers: list[OpenTier]) -> dict[str, set[str]]:
    """The checkpoints that count as there, by tier. Every one of them is whole, or this fails."""
    found = {}
    for state in survey(paths, tiers, Memory(paths))[1:]:  # nothing is remembered
        assert state.reachable, state.detail
        tier = next(t for t in tiers if t.config.name == state.name)
        assert tier.backend is not None
        found[state.name] = {copy.name for copy in state.copies if copy.committed}
        for name in found[state.name]:
            assert verify_copy(tier.backend, tier.run, name) == []
    return found


def states(paths: RunPaths, tiers: list[OpenTier]) -> dict[tuple[str, str], bool | None]:
    seen: list[TierState] = survey(paths, tiers, Memory.load(paths))
    return {(s.name, c.name): c.verified for s in seen for c in s.copies}


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
    monkeypatch.setattr(multipart, "MIN_PART_BYTES", 1 << 20)
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
    assert truth(paths, tiers) == {"nvme": {"step_000020"}, "store": both, "cold": both}


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
        def __init__(self, inner: Backend) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def blocks(self, key: str) -> Iterator[bytes]:
            with once:  # several files come at a time
                if not saved:
                    saved.append(save(10).stat().st_ino)
                    final.chmod(mode)
            return self._inner.blocks(key)

    untrusted = pytest.raises(CheckpointCorrupt, match="left where it is")
    with contextlib.nullcontext() if mode == 0o700 else untrusted:
        fetch(paths, config_of(), "step_000010", tiers=opened(paths, cold, wrap=Meanwhile))  # type: ignore[arg-type]
    assert [final.stat().st_ino] == saved
    final.chmod(0o700)
    assert verify(final).ok
    assert not paths.quarantine.exists()
    assert {path.name for path in paths.checkpoints.iterdir()} <= {final.name, "latest"}


def test_without_locks_on_the_file_system_the_mover_works_all_the_same(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre without `-o flock`."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with mover_lock(paths), mover_lock(paths):
        pass


def test_a_death_at_any_point_leaves_no_half_checkpoint_and_the_next_pass_ends_the_work(
    paths: RunPaths, save_small: Save, tmp_path: Path
) -> None:
    """One checkpoint is copied, another mended, a third dropped: killed at every change, one after the other."""
    for step, days in ((10, 9), (20, 1), (30, 0)):
        save_small(step, days)
    config = posix_config(tmp_path / "tier", keep_days=7)
    tiers = opened(paths, config)
    backend, run = tiers[0].backend, tiers[0].run
    assert backend is not None
    number, done = 0, False
    while not done:
        number += 1
        shutil.rmtree(tmp_path / "tier")
        (tmp_path / "tier").mkdir()
        assert run_pass(paths, tiers, days=-8).ok
        for gone in ("manifest.json", "actor/rank_0000.bin"):
            backend.delete(f"{run}step_000030/{gone}")
        assert truth(paths, tiers) == {"tier": {"step_000010", "step_000020"}}
        mortal = [OpenTier(config=config, run=run, backend=Mortal(backend, Clock(number)))]
        try:
            run_pass(paths, mortal)
            done = True
        except Died:
            assert "step_000020" in truth(paths, tiers)["tier"]
        for _ in range(2):
            assert run_pass(paths, tiers).ok
        assert truth(paths, tiers) == {"tier": {"step_000020", "step_000030"}}
        assert [info for info in backend.list(run) if "step_000010" in info.key] == []
        assert backend.forget(run) == 0
    assert number >= 10, "fewer deaths than there are changes"


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
    assert [(d.action.kind, d.action.tier) for d in done.done] == [("drop", "nvme")]
    assert "no longer verifies" in done.done[0].problem
    assert not done.ok
    # It is mended from nvme, and only then nvme lets go.
    assert [(d.action.kind, d.action.tier) for d in run_pass(paths, tiers, days=8).done] == [("copy", "cold")]
    assert [(d.action.kind, d.action.tier) for d in run_pass(paths, tiers, days=8).done] == [("drop", "nvme")]
    assert truth(paths, tiers) == {"nvme": {"step_000020"}, "cold": {"step_000010", "step_000020"}}


def test_a_damaged_source_is_never_copied_and_is_remembered(
    paths: RunPaths, save: Save, nvme: TierConfig
) -> None:
    final = save(10)
    (final / "actor" / "__0_0.distcp").write_bytes(b"x" * 1300)
    tiers = opened(paths, nvme)
    assert "source is damaged" in run_pass(paths, tiers).done[0].problem
    assert truth(paths, tiers) == {"nvme": set()}
    assert states(paths, tiers)["checkpoints", "step_000010"] is False
    assert run_pass(paths, tiers).done == ()


def test_a_checkpoint_that_was_saved_again_replaces_the_old_one(
    paths: RunPaths, save: Save, nvme: TierConfig
) -> None:
    final = save(10)
    tiers = opened(paths, nvme)
    run_pass(paths, tiers)
    shutil.rmtree(final)
    save(10, files=FILES | {"actor/__0_0.distcp": b"better"}, attempt=2)
    done = run_pass(paths, tiers)
    assert done.ok
    assert done.done[0].action.reason == "saved again since: attempt 2, here attempt 1"
    stored = next(Path(str(nvme.path)).rglob("step_000010/actor/__0_0.distcp"))
    assert stored.read_bytes() == b"better"
    # A successor that does not verify replaces nothing.
    shutil.rmtree(final)
    final = save(10, files=FILES | {"actor/__0_0.distcp": b"worse!"}, attempt=3)
    (final / "actor" / "__0_0.distcp").write_bytes(b"rotten")
    assert "successor does not verify" in run_pass(paths, tiers).done[0].problem
    assert truth(paths, tiers) == {"nvme": {"step_000010"}}
    assert stored.read_bytes() == b"better"


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
def test_a_tier_that_is_away_is_said_and_keeps_nobody_from_the_others(
    paths: RunPaths, save_small: Save, nvme: TierConfig, server: StandIn
) -> None:
    save_small(10)
    server.fault = lambda call: "cut"
    tiers = opened(paths, s3_config(server), nvme)
    done = run_pass(paths, tiers)
    assert not done.ok
    assert truth(paths, tiers[1:]) == {"nvme": {"step_000010"}}
    away = [event for event in read_events(paths) if event["event"] == "tier_unreachable"]
    assert away[0]["tier"] == "store"
    missing = TierConfig(name="gone", kind="posix", path="/nonexistent/place")
    done = run_pass(paths, opened(paths, missing))
    assert "the tier's directory is not there" in done.states[1].detail
    assert not Path("/nonexistent").exists()


def test_a_lost_memory_costs_a_reading_and_nothing_else(
    paths: RunPaths, save: Save, nvme: TierConfig
) -> None:
    save(10)
    tiers = opened(paths, nvme)
    run_pass(paths, tiers)
    paths.tier_records.write_bytes(b"{")
    done = run_pass(paths, tiers)
    assert [(d.action.reason, d.sent) for d in done.done] == [("there, but nobody has read it back", 0)]
    assert run_pass(paths, tiers).done == ()


def test_there_is_one_mover_a_run(paths: RunPaths, nvme: TierConfig) -> None:
    with mover_lock(paths), pytest.raises(TierError, match="another mover"):
        run_pass(paths, opened(paths, nvme))


@pytest.mark.scenario("N09")
def test_what_is_not_ours_in_a_tier_is_neither_read_nor_removed(
    paths: RunPaths, save_small: Save, server: StandIn
) -> None:
    save_small(10, 100)
    save_small(20)
    config = s3_config(server, keep_days=7)
    tiers = opened(paths, config)
    backend, run = open_backend(config), tiers[0].run
    strange = ["", "../../x", "notes.txt", "step_000010/../../etc", "step_1/manifest.json", "step_000010/a b"]
    foreign = [f"verl-slurm/run-{'f' * 16}/step_000001/manifest.json", *(run + name for name in strange[1:])]
    for key in foreign:
        backend.commit(key, b"not ours")
    run_pass(paths, tiers)
    run_pass(paths, tiers, days=9)
    assert [key for key in foreign if backend.stat(key) is None] == []


@pytest.mark.scenario("N05", "N06")
@pytest.mark.parametrize(
    "op", ["PutObject", "UploadPart", "CompleteMultipartUpload", "CreateMultipartUpload"]
)
@pytest.mark.parametrize("fault", ["503", "cut", "lose"])
def test_one_fault_of_the_server_is_overcome_within_the_pass(
    paths: RunPaths, save_small: Save, server: StandIn, op: str, fault: str
) -> None:
    save_small(10)
    server.fault = once(op, fault)
    tiers = opened(paths, s3_config(server))
    assert run_pass(paths, tiers).ok
    assert truth(paths, tiers) == {"store": {"step_000010"}}
    run_pass(paths, tiers)
    assert tiers[0].backend is not None
    assert tiers[0].backend.forget(tiers[0].run) == 0 or (op, fault) == ("CreateMultipartUpload", "lose")


@pytest.mark.scenario("N07")
@pytest.mark.parametrize("op", ["PutObject", "UploadPart"])
def test_a_bit_that_the_server_stores_wrong_is_found_and_sent_again(
    paths: RunPaths, save_small: Save, server: StandIn, op: str
) -> None:
    save_small(10)
    server.fault = once(op, "flip", at=1)
    tiers = opened(paths, s3_config(server))
    assert run_pass(paths, tiers).ok
    assert server.count(op) > {"PutObject": 2, "UploadPart": 3}[op], "nothing was sent again"
    assert truth(paths, tiers) == {"store": {"step_000010"}}


@pytest.mark.scenario("N07")
def test_a_server_that_always_stores_something_else_never_gets_a_commit_record(
    paths: RunPaths, save_small: Save, server: StandIn
) -> None:
    save_small(10)
    server.fault = lambda call: "flip" if call.op == "PutObject" else None
    tiers = opened(paths, s3_config(server))
    assert "gives back other bytes" in run_pass(paths, tiers).done[0].problem
    assert not [key for key in server.objects if key.endswith("manifest.json")]
    assert states(paths, tiers)["checkpoints", "step_000010"] is not False, "the source is not to blame"


def test_neither_secrets_nor_a_servers_prose_reach_what_we_write(
    paths: RunPaths, save_small: Save, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-secret-token")
    save_small(10)
    for fault in ("denied", "503", "cut", None):
        server.fault = lambda call, fault=fault: fault if call.op == "PutObject" else None  # type: ignore[misc]
        run_pass(paths, opened(paths, s3_config(server)))
    written = b"".join(path.read_bytes() for path in paths.root.rglob("*") if path.is_file())
    written += b"".join(stored.data + repr(stored.metadata).encode() for stored in server.objects.values())
    assert b"tier_failed" in written
    assert b"canary-secret" not in written
    assert b"secret prose" not in written


def once(op: str, fault: str, at: int = 0) -> Callable[[Call], str | None]:
    """The fault at one request of that kind: the last file's, or the first."""
    number = at or (2 if op in ("PutObject", "UploadPart") else 1)
    calls: list[Call] = []

    def decide(call: Call) -> str | None:
        calls.extend([call] if call.op == op else [])
        return fault if call.op == op and len(calls) == number else None

    return decide

"""The journal with a key: sealed records load, others count as damage, a wrong key is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ledger_stats import ledger_stats
from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, NotFound
from verl_slurm.base.keys import Keyring, MasterKey
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.runtime_state.format import Arrays
from verl_slurm.runtime_state.ledger import Ledger, load
from verl_slurm.runtime_state.samples import Sample, append_samples, read_samples
from verl_slurm.runtime_state.sealing import OVERHEAD_BYTES, Place, open_record, seal_record

Batch = Callable[..., Arrays]
KEY, OTHER = MasterKey(bytes(range(32))), MasterKey(bytes(range(1, 33)))
KEYS = Keyring(KEY)
PLACE = ("00" * 8, 3, 1, 12, 7)


def fill(paths: RunPaths, batch: Batch, keys: Keyring | None, *records: tuple[int, int]) -> None:
    with Ledger(paths, 1, 0, keys=keys) as ledger:
        for step, j in records:
            ledger.append(step, j, batch(step * 10 + j))


def opened(data: bytes, place: Place = PLACE, keys: Keyring = KEYS) -> bytes:
    return open_record(keys, place, data, sealed=True, where="here")


def test_sealed_rollouts_load_bit_for_bit_also_after_a_restart_and_a_compaction(
    paths: RunPaths, batch: Batch
) -> None:
    fill(paths, batch, KEYS, (0, 0), (1, 0))
    fill(paths, batch, KEYS, (1, 1))
    with Ledger(paths, 1, 0, keys=KEYS) as ledger:
        assert ledger.compact(1) > 0
    found = load(paths, from_step=0, keys=KEYS)
    assert found.keys() == {(1, 0), (1, 1)}
    for (step, j), arrays in found.items():
        assert all((arrays[k] == v).all() for k, v in batch(step * 10 + j).items())
    assert ledger_stats(paths, keys=KEYS).records == 2


def test_nothing_of_a_rollout_is_on_the_disk(paths: RunPaths) -> None:
    import numpy as np

    text = np.frombuffer(b"SQUEAMISH OSSIFRAGE", dtype=np.uint8)
    fill(paths, lambda seed: {"prompt": text}, None, (0, 0))
    fill(paths, lambda seed: {"prompt": text}, KEYS, (0, 1))
    data = paths.ledger_segment(1, 0).read_bytes()
    assert data.count(b"SQUEAMISH") == 1
    assert data.count(b"VSRECRD1") == 1  # the start of a plain record


@pytest.mark.scenario("M12")
def test_a_plain_record_counts_as_damage_where_a_key_is_set(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, None, (0, 0))
    fill(paths, batch, KEYS, (0, 1))
    said: list[str] = []
    assert load(paths, from_step=0, keys=KEYS, report=said.append).keys() == {(0, 1)}
    assert len(said) == 1
    assert "not encrypted" in said[0]
    with pytest.raises(CheckpointCorrupt):
        load(paths, from_step=0, keys=KEYS)


@pytest.mark.parametrize("keys", [None, Keyring(OTHER)])
def test_no_key_or_a_wrong_one_is_said_and_is_no_damage(
    paths: RunPaths, batch: Batch, keys: Keyring | None
) -> None:
    fill(paths, batch, KEYS, (0, 0))
    said: list[str] = []
    with pytest.raises(KeyRefused, match=KEY.id):
        load(paths, from_step=0, keys=keys, report=said.append)
    assert not said


@pytest.mark.scenario("M12")
def test_an_old_key_reads_what_it_sealed(paths: RunPaths, batch: Batch) -> None:
    fill(paths, batch, KEYS, (0, 0))
    ring = Keyring(OTHER, (KEY,))
    fill(paths, batch, ring, (0, 1))
    assert load(paths, from_step=0, keys=ring).keys() == {(0, 0), (0, 1)}


@pytest.mark.scenario("M12")
def test_every_changed_bit_and_every_cut_is_noticed() -> None:
    data = seal_record(KEY, PLACE, b"payload")
    assert opened(data) == b"payload"
    assert len(data) == len(b"payload") + OVERHEAD_BYTES
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CheckpointCorrupt, KeyRefused)):
            opened(bytes(bad))
    for size in range(len(data)):
        with pytest.raises((CheckpointCorrupt, KeyRefused)):
            opened(data[:size])


@pytest.mark.scenario("M12")
@pytest.mark.parametrize("which", range(5))
def test_a_record_of_another_run_or_place_does_not_open(which: int) -> None:
    other: Any = ("0" * 15 + "1", 4, 2, 13, 8)
    place: Any = tuple(other[i] if i == which else value for i, value in enumerate(PLACE))
    with pytest.raises(CheckpointCorrupt):
        opened(seal_record(KEY, PLACE, b"payload"), place)


@pytest.mark.scenario("M12")
def test_the_same_payload_is_never_sealed_the_same() -> None:
    made = {seal_record(KEY, PLACE, b"payload") for _ in range(100)}
    assert len({data[8:40] for data in made}) == len({data[40:] for data in made}) == 100


@pytest.mark.parametrize("keys", [None, KEYS])
def test_samples_of_another_run_are_refused_by_its_name(
    paths: RunPaths, tmp_path: Path, keys: Keyring | None
) -> None:
    other = RunPaths(tmp_path / "other")
    sample = Sample(sample_id=1, prompt="1+1=", response="2", answer="2", reward=1.0, response_tokens=1)
    for run in (paths, other):
        run.root.mkdir()
        append_samples(run, 1, 3, 8, [sample], keys=keys)
    assert read_samples(paths, keys)[3].samples == [sample]
    paths.samples.write_bytes(other.samples.read_bytes())
    with pytest.raises(NotFound, match=run_id(other)):
        read_samples(paths, keys)
    if keys is not None:  # renamed, it does not open
        line = other.samples.read_bytes().replace(run_id(other).encode(), run_id(paths).encode())
        paths.samples.write_bytes(line)
        assert read_samples(paths, keys) == {}

"""The journal with a key: sealed records load, others count as damage, a wrong key is said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, NotFound
from verl_slurm.base.files import private_dir
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
def test_a_record_opens_as_it_was_sealed_and_in_its_place_alone() -> None:
    data = seal_record(KEY, PLACE, b"payload")
    assert opened(data) == b"payload"
    assert len(data) == len(b"payload") + OVERHEAD_BYTES
    others: Place = ("0" * 15 + "1", 4, 2, 13, 8)
    wrong = [(data, (*PLACE[:i], others[i], *PLACE[i + 1 :])) for i in range(5)]
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        wrong.append((bytes(changed), PLACE))
    wrong += [(data[:size], PLACE) for size in range(len(data))]
    for bad, place in wrong:
        with pytest.raises((CheckpointCorrupt, KeyRefused)):
            opened(bad, place)  # type: ignore[arg-type]


@pytest.mark.scenario("M12")
def test_the_same_payload_is_never_sealed_the_same() -> None:
    made = {seal_record(KEY, PLACE, b"payload") for _ in range(100)}
    assert len({data[8:40] for data in made}) == len({data[40:] for data in made}) == 100


@pytest.mark.parametrize("keys", [None, KEYS])
def test_samples_of_another_run_are_refused_by_its_name(
    paths: RunPaths, tmp_path: Path, keys: Keyring | None
) -> None:
    other = RunPaths(private_dir(tmp_path / "other"))
    sample = Sample(sample_id=1, prompt="1+1=", response="2", answer="2", reward=1.0, response_tokens=1)
    for run in (paths, other):
        append_samples(run, 1, 3, 8, [sample], keys=keys)
    assert read_samples(paths, keys)[3].samples == [sample]
    paths.samples.write_bytes(other.samples.read_bytes())
    with pytest.raises(NotFound, match=run_id(other)):
        read_samples(paths, keys)
    if keys is not None:  # renamed, it does not open
        line = other.samples.read_bytes().replace(run_id(other).encode(), run_id(paths).encode())
        paths.samples.write_bytes(line)
        assert read_samples(paths, keys) == {}

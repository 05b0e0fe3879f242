"""Encryption through the real saver: the round trip, what an attacker may do to it, the search for plaintext."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.builders import write_config
from tests.save.parts import load_runtime_state, load_tensors, provenance, runtime as plain_runtime
from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.base.keys import Keyring, MasterKey, new_key_file, read_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.encryption import TAG_BYTES
from verl_slurm.checkpoint.format.manifest import render, sealed
from verl_slurm.checkpoint.format.specification import (
    CHUNK_BYTES,
    MANIFEST,
    SCHEMA_VERSION,
    FileEntry,
)
from verl_slurm.checkpoint.format.state_schema import current_schema, render_schema
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.cli.__main__ import main
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.runtime_state.format import RuntimeState
from verl_slurm.save.ranks.collective import Collective, RanksFailed
from verl_slurm.save.ranks.loader import read_whole
from verl_slurm.save.ranks.saver import CheckpointSaver, SaveContents
from verl_slurm.save.ranks.tensors import Tensors

pytestmark = pytest.mark.torch

ALONE = Collective(None)
MARK = b"SQUEAMISH OSSIFRAGE "
ACTOR, CRITIC = "actor/rank_0000.bin", "critic/rank_0000.bin"
# Two chunks and a bit each; actor and critic of the same size.
FLOATS = (2 * CHUNK_BYTES + 8192) // 4


def marked(floats: int, *, seed: int) -> torch.Tensor:
    """Numbers of whose bytes many are MARK."""
    data = bytearray(np.random.default_rng(seed).bytes(4 * floats))
    for start in range(0, len(data) - len(MARK), 4096):
        data[start : start + len(MARK)] = MARK
    return torch.frombuffer(data, dtype=torch.int32)


def domains(seed: int = 1) -> dict[str, Tensors]:
    return {
        "actor": {"w": marked(FLOATS, seed=seed)},
        "critic": {"w": marked(FLOATS, seed=seed + 1)},
        "optimizer": {"confidential.exp_avg": marked(64, seed=seed + 2), "w.step": torch.tensor(3.0)},
    }


def runtime(step: int) -> RuntimeState:
    return plain_runtime(
        step,
        rng={"python": MARK},
        rollouts={"prompt": np.frombuffer(MARK * 3, dtype=np.uint8).copy()},
        rewards={"scores": np.frombuffer(MARK, dtype=np.float32).copy()},
    )


class Saves:
    """Checkpoints of one run, all by one saver."""

    def __init__(self, root: Path, encryption: EncryptionConfig | None) -> None:
        self.paths = RunPaths(private_dir(root))
        self._encryption = encryption

    def save(self, step: int = 2, tensors: dict[str, Tensors] | None = None, *more: int) -> Path:
        schema = current_schema()
        names = ("scheduler.json", "metadata.json", "config.yaml", "orchestration.json")
        texts = dict.fromkeys(names, b'{"x": "' + MARK + b'"}\n') | {SCHEMA_VERSION: render_schema(schema)}
        saver = CheckpointSaver(
            self.paths,
            tensors or domains(),
            provenance(),
            ALONE,
            attempt_check=lambda: None,
            encryption=self._encryption,
        )
        try:
            for number in (step, *more):
                done = saver.begin(SaveContents(runtime=runtime(number), texts=texts)).result()
        finally:
            saver.close()
        return self.paths.checkpoints / done.name


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EncryptionConfig:
    folder = tmp_path_factory.mktemp("keys")
    folder.chmod(0o700)
    new_key_file(folder / "run.key")
    return EncryptionConfig(key_file=str(folder / "run.key"))


@pytest.fixture(scope="module")
def keys(config: EncryptionConfig) -> Keyring:
    return Keyring(read_key_file(Path(config.key_file or "")))


@pytest.fixture(scope="module")
def originals(config: EncryptionConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3 of one run, never changed."""
    root = tmp_path_factory.mktemp("originals") / "run"
    Saves(root, config).save(2, None, 3)
    return root


@pytest.fixture
def run(originals: Path, tmp_path: Path) -> RunPaths:
    """A copy of them, to be tampered with."""
    shutil.copytree(originals, tmp_path / "run")
    return RunPaths(tmp_path / "run")


def directory(run: RunPaths, step: int = 2) -> Path:
    return run.checkpoints / f"step_{step:06d}"


def same(tensors: dict[str, Tensors], others: dict[str, Tensors]) -> bool:
    return all(
        torch.equal(tensor, others[domain][name])
        for domain in tensors
        for name, tensor in tensors[domain].items()
    )


def blank() -> dict[str, Tensors]:
    return {d: {n: torch.zeros_like(t) for n, t in ts.items()} for d, ts in domains().items()}


def test_what_was_encrypted_verifies_without_a_key_and_loads_bit_for_bit_with_it(
    run: RunPaths, keys: Keyring
) -> None:
    for step in (2, 3):
        assert verify(directory(run, step)).ok
        assert verify(directory(run, step), keys=keys).ok
        loaded = blank()
        load_tensors(directory(run, step), loaded, ALONE, keys)
        assert same(domains(), loaded)
        state = load_runtime_state(directory(run, step), 0, 1, keys)
        assert (state.step, state.rng["python"]) == (step, MARK)
        assert state.rollouts["prompt"].tobytes() == MARK * 3
    # A part in the middle of chunks, alone.
    found = read_whole(directory(run), "optimizer", ["w.step"], keys)["w.step"]
    assert torch.equal(found, torch.tensor(3.0))


@pytest.mark.scenario("M08")
def test_no_plaintext_no_key_and_no_marker_is_in_any_file_of_the_run(
    run: RunPaths, config: EncryptionConfig, tmp_path: Path
) -> None:
    secret = Path(config.key_file or "").read_bytes().strip()
    words = [MARK, MARK[::-1], secret, bytes.fromhex(secret.decode()), b"confidential", b"SQUEAMISH"]
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [(path, word) for path in files for word in words if word in path.read_bytes()]
    # The search would find it: without a key it is there.
    plain = Saves(tmp_path / "plain", None).save()
    assert all(MARK in (plain / name).read_bytes() for name in (ACTOR, "config.yaml"))
    assert b"confidential" in (plain / "optimizer" / "index.json").read_bytes()
    # In the open are the manifest and the schema alone.
    entries = read_manifest(directory(run)).files
    assert [e.path for e in entries if e.plain_size is msgspec.UNSET] == [SCHEMA_VERSION]


# ---- an attacker who can write the directory, and rewrites digests, but has not the key


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


def swap_files(run: RunPaths) -> None:
    a, b = directory(run) / ACTOR, directory(run) / CRITIC
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def chunk_of_another_checkpoint(run: RunPaths) -> None:
    other = (directory(run, 3) / ACTOR).read_bytes()

    def change(data: bytearray) -> None:
        plain = len(data) - 3 * TAG_BYTES
        data[:CHUNK_BYTES] = other[:CHUNK_BYTES]
        data[plain : plain + TAG_BYTES] = other[plain : plain + TAG_BYTES]

    edit(directory(run) / ACTOR, change)


def cut_at_a_border(run: RunPaths) -> None:
    def change(data: bytearray) -> None:
        tags = data[-3 * TAG_BYTES :]
        data[:] = data[: 2 * CHUNK_BYTES] + tags[: 2 * TAG_BYTES]

    edit(directory(run) / ACTOR, change)


TAMPERINGS: dict[str, Callable[[RunPaths], None]] = {
    "two files swapped": swap_files,
    "a chunk of another checkpoint, with its tag": chunk_of_another_checkpoint,
    "cut at the border of a chunk": cut_at_a_border,
    "a bit in the last chunk": lambda run: edit(directory(run) / ACTOR, flip(2 * CHUNK_BYTES + 100)),
    "a bit of the last tag": lambda run: edit(directory(run) / ACTOR, flip(-1)),
    "a bit of the runtime state": lambda run: edit(
        directory(run) / "runtime_state.rank_0000.msgpack.zst", flip(20)
    ),
    "a bit of an index": lambda run: edit(directory(run) / "actor" / "index.json", flip(7)),
}


def load_all(place: Path, keys: Keyring, into: dict[str, Tensors]) -> None:
    load_tensors(place, into, ALONE, keys)
    load_runtime_state(place, 0, 1, keys)


def forge_digests(place: Path, *, sizes: bool = False) -> None:
    """A manifest whose digests fit what lies there now, with the HMAC that was there."""
    manifest = read_manifest(place)
    files: list[FileEntry] = []
    for entry in manifest.files:
        found = entry_of(entry.path, (place / entry.path).read_bytes())
        plain: Any = entry.plain_size
        if sizes and found.size != entry.size:
            plain = 2 * CHUNK_BYTES
        files.append(msgspec.structs.replace(found, plain_size=plain))
    (place / MANIFEST).write_bytes(render(sealed(msgspec.structs.replace(manifest, files=tuple(files)))))


@pytest.mark.scenario("M12")
@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_is_found_by_verify_and_once_more_by_loading(
    what: str, run: RunPaths, keys: Keyring
) -> None:
    TAMPERINGS[what](run)
    place = directory(run)
    for with_keys in (None, keys):
        verdict = verify(place, keys=with_keys)
        assert not verdict.ok
        assert verdict.damaged
    # It may happen after the verification: loading relies on nothing but the key.
    into = blank()
    with pytest.raises((RanksFailed, CheckpointCorrupt)):
        load_all(place, keys, into)
    for domain, tensors in domains().items():  # of what does not open, not a byte gets through
        for name, tensor in tensors.items():
            assert bool(((into[domain][name] == tensor) | (into[domain][name] == 0)).all())
    assert verify(directory(run, 3), keys=keys).ok


@pytest.mark.scenario("M12")
@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_with_digests_that_fit_is_found_by_the_signature_and_by_the_tags(
    what: str, run: RunPaths, keys: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    TAMPERINGS[what](run)
    place = directory(run)
    forge_digests(place, sizes=True)
    assert verify(place).ok  # digests find accidents, not attackers
    verdict = verify(place, keys=keys)
    assert "not made with our key" in verdict.one_line()
    assert not verdict.damaged
    with pytest.raises(CheckpointCorrupt, match="not made with our key"):
        load_all(place, keys, blank())
    # And were there no signature, no chunk would open.
    monkeypatch.setattr("verl_slurm.checkpoint.store.verify.authenticate", lambda *_, **__: None)
    with pytest.raises((RanksFailed, CheckpointCorrupt)):
        load_all(place, keys, blank())


@pytest.mark.scenario("M12")
def test_an_older_manifest_of_the_same_name_is_found(
    config: EncryptionConfig, keys: Keyring, run: RunPaths, tmp_path: Path
) -> None:
    older = Saves(tmp_path / "older", config).save(2)
    shutil.copy(older / MANIFEST, directory(run) / MANIFEST)
    assert not verify(directory(run), keys=keys).ok
    with pytest.raises((RanksFailed, CheckpointCorrupt)):
        load_all(directory(run), keys, blank())


@pytest.mark.scenario("M12")
def test_a_whole_older_checkpoint_in_the_place_of_a_newer_one_is_found_by_its_name(
    run: RunPaths, keys: Keyring
) -> None:
    shutil.rmtree(directory(run, 3))
    shutil.copytree(directory(run, 2), directory(run, 3))
    verdict = verify(directory(run, 3), keys=keys)
    assert "the manifest is of step_000002" in verdict.one_line()


# ---- keys


def test_an_unencrypted_checkpoint_from_before_the_key_loads_when_it_is_named(
    tmp_path: Path, keys: Keyring
) -> None:
    old = Saves(tmp_path / "old", None).save()
    accepting = Keyring(keys.current, accept_unsigned=read_manifest(old).digest)
    into = blank()
    load_all(old, accepting, into)
    assert same(domains(), into)


@pytest.mark.scenario("M12")
@pytest.mark.parametrize("wrong", [None, Keyring(MasterKey(bytes(range(32))))])
def test_without_the_key_or_with_another_one_loading_and_comparing_say_so_in_one_line(
    run: RunPaths, wrong: Keyring | None
) -> None:
    into = blank()
    attempts: list[Callable[[], object]] = [
        lambda: load_tensors(directory(run), into, ALONE, wrong),
        lambda: load_runtime_state(directory(run), 0, 1, wrong),
        lambda: compare(directory(run), directory(run), wrong, wrong),
    ]
    for attempt in attempts:
        with pytest.raises(KeyRefused) as caught:
            attempt()
        line = caught.value.one_line()
        assert "\n" not in line
        assert "key id" in line
    assert not any(bool(t.any()) for t in into["actor"].values())


def test_comparing_encrypted_with_plain_compares_what_is_in_them(
    run: RunPaths, keys: Keyring, tmp_path: Path
) -> None:
    plain = Saves(tmp_path / "plain", None).save(2)
    result = compare(directory(run), plain, keys, None)
    assert result.same, result.differing
    other = Saves(tmp_path / "other", None).save(2, domains(seed=5))
    assert "actor/w" in compare(directory(run), other, keys, None).differing


@pytest.fixture
def configured(run: RunPaths, config: EncryptionConfig) -> RunPaths:
    write_config(run, encryption=config)
    return run


def test_the_command_finds_the_key_by_the_run_or_takes_it_by_hand(
    configured: RunPaths, config: EncryptionConfig, tmp_path: Path
) -> None:
    words = ["inspect", "--bits", str(directory(configured, 2)), str(directory(configured, 2))]
    assert main(words) == ExitCode.OK
    tmp_path.chmod(0o700)
    new_key_file(tmp_path / "other.key")
    assert main([*words, "--key-file", str(tmp_path / "other.key")]) == ExitCode.KEY
    configured.run_yaml.unlink()
    assert main(words) == ExitCode.KEY
    assert main([*words, "--key-file", str(config.key_file)]) == ExitCode.OK


def test_ranks_that_do_not_agree_on_the_key_save_nothing(
    config: EncryptionConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_slurm.save.ranks.saver.begin_sealing", lambda *_: None)
    with pytest.raises((RanksFailed, VerlSlurmError)):
        Saves(tmp_path / "run", config).save()
    assert list(RunPaths(tmp_path / "run").checkpoints.iterdir()) == []

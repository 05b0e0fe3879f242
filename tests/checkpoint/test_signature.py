"""A key configured: the manifest is signed, the files are sealed, and everything else is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.checkpoint.sealed import KEY, KEYS, OTHER, PLAIN, save_sealed
from verl_slurm.base.errors import CheckpointCorrupt, KeyRefused
from verl_slurm.base.keys import Keyring
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.encryption import CheckpointCipher
from verl_slurm.checkpoint.format.manifest import parse, render, sealed
from verl_slurm.checkpoint.format.signature import authenticate, sign
from verl_slurm.checkpoint.format.specification import MANIFEST, FileEntry, Manifest, Topology
from verl_slurm.checkpoint.store.commit import seal
from verl_slurm.checkpoint.store.reader import CheckpointReader
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import read_manifest, verify


@pytest.fixture
def save(paths: RunPaths) -> Callable[..., Path]:
    return lambda step, key=KEY: save_sealed(paths, step, key)


def test_an_encrypted_checkpoint_verifies_without_a_key_and_opens_with_it(save: Callable[..., Path]) -> None:
    directory = save(12)
    assert verify(directory).ok  # a scrub or a copy needs no key
    assert verify(directory, keys=KEYS).ok
    reader = CheckpointReader(directory, KEYS)
    assert {path: reader.read(path) for path in reader.entries} == PLAIN


def test_on_disk_is_neither_plaintext_nor_key(save: Callable[..., Path]) -> None:
    directory = save(12)
    everything = b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
    for secret in (bytes(range(32)), bytes(range(32)).hex().encode(), b"nobody's business", b"weights"):
        assert secret not in everything


@pytest.mark.scenario("M12")
def test_a_changed_file_fails_the_digest_and_with_a_forged_one_the_signature_and_the_tag(
    save: Callable[..., Path],
) -> None:
    directory = save(12)
    name = "actor/rank_0000.bin"
    data = bytearray((directory / name).read_bytes())
    data[0] ^= 1
    (directory / name).write_bytes(data)
    assert verify(directory).damaged
    reader, manifest = CheckpointReader(directory, KEYS), read_manifest(directory)
    entry = seal(directory, [name])[0]
    forged = sealed(
        msgspec.structs.replace(
            manifest,
            files=tuple(
                msgspec.structs.replace(entry, plain_size=e.plain_size) if e.path == name else e
                for e in manifest.files
            ),
        )
    )
    (directory / MANIFEST).write_bytes(render(forged))
    assert verify(directory).ok  # a digest finds accidents, not attackers
    verdict = verify(directory, keys=KEYS)
    assert not verdict.ok
    assert not verdict.damaged  # nothing of another key is ever moved away
    assert "not made with our key" in verdict.one_line()
    reader.entries |= {entry.path: entry for entry in forged.files}
    with pytest.raises(CheckpointCorrupt, match="not what was encrypted"):
        reader.read(name)


@pytest.mark.scenario("M12")
@pytest.mark.parametrize("field", [f for f in Manifest.__struct_fields__ if f != "format_version"])
def test_every_field_is_signed(save: Callable[..., Path], field: str) -> None:
    manifest = read_manifest(save(12))
    others: dict[str, object] = {
        "name": "step_000013",
        "phase": "generate",
        "topology": Topology(dp=2),
        "files": manifest.files[:-1],
        "frozen": {"reference": "0"},
        "hmac": "0" * 64,
        "encryption": CheckpointCipher.begin(KEY, manifest.name).record,
        "save_seconds": 0.25,
    }
    value = getattr(manifest, field)
    other = others.get(field, value + 1 if isinstance(value, int) else "other")
    changed = msgspec.structs.replace(manifest, **{field: other})
    authenticate(manifest, KEYS, where="")
    if field == "digest":  # of the same bytes, and checked by `parse`
        with pytest.raises(CheckpointCorrupt):
            parse(render(changed), where="")
        return
    with pytest.raises(CheckpointCorrupt):
        authenticate(changed, KEYS, where="")


@pytest.mark.scenario("SEC05")
def test_files_beyond_number_are_strays_in_bounded_memory_and_damage_nothing(
    save: Callable[..., Path],
) -> None:
    directory = save(12)
    for number in range(5000):
        (directory / f"{number}").touch(0o600)
    ours, without, another = (verify(directory, keys=keys) for keys in (KEYS, None, Keyring(OTHER)))
    assert ours.has_strays
    assert without.has_strays
    assert len(ours.problems) == 4097
    assert ours.problems[0].what == "904 more that are not in the manifest"
    assert another.needs_key  # not set aside


@pytest.mark.scenario("M12")
def test_another_key_is_one_clear_line_and_an_old_one_still_reads(save: Callable[..., Path]) -> None:
    manifest = read_manifest(save(12))
    for attempt in (
        lambda: authenticate(manifest, Keyring(OTHER), where="step_000012"),
        lambda: CheckpointCipher.of(manifest, Keyring(OTHER), where="step_000012"),
    ):
        with pytest.raises(KeyRefused) as caught:
            attempt()
        assert f"found key id {KEY.id}, expected key id {OTHER.id}" in caught.value.one_line()
    authenticate(manifest, Keyring(OTHER, (KEY,)), where="")
    with pytest.raises(KeyRefused, match="no key is configured"):
        CheckpointCipher.of(manifest, None, where="")


@pytest.mark.scenario("M12")
def test_an_unsigned_manifest_is_refused_where_a_key_is_set_unless_named(save: Callable[..., Path]) -> None:
    directory = save(12, None)
    digest = read_manifest(directory).digest
    assert verify(directory).ok
    verdict = verify(directory, keys=KEYS)
    assert not verdict.ok
    assert not verdict.damaged
    assert digest in verdict.one_line()
    assert verify(directory, keys=Keyring(KEY, accept_unsigned=digest)).ok
    assert not verify(directory, keys=Keyring(KEY, accept_unsigned="0" * 64)).ok


@pytest.mark.scenario("M12")
def test_a_signature_that_was_taken_off_is_refused(save: Callable[..., Path]) -> None:
    directory = save(12)
    manifest = msgspec.structs.replace(read_manifest(directory), hmac=msgspec.UNSET)
    (directory / MANIFEST).write_bytes(render(manifest))
    assert verify(directory).ok
    assert not verify(directory, keys=KEYS).ok


@pytest.mark.scenario("M12")
def test_a_plain_file_in_an_encrypted_checkpoint_is_refused_by_the_manifest_alone(
    save: Callable[..., Path],
) -> None:
    manifest = read_manifest(save(12))
    plain = FileEntry(path="config.yaml", size=1, sha256="0" * 64)
    wrong_size = FileEntry(path="config.yaml", size=18, sha256="0" * 64, plain_size=1)
    needless = FileEntry(path="schema_version.json", size=17, sha256="0" * 64, plain_size=1)
    for bad in (plain, wrong_size, needless):
        files = tuple(bad if e.path == bad.path else e for e in manifest.files)
        with pytest.raises(CheckpointCorrupt):
            parse(render(sealed(msgspec.structs.replace(manifest, files=files))), where="")
    alone = msgspec.structs.replace(manifest, encryption=msgspec.UNSET)
    with pytest.raises(CheckpointCorrupt):
        parse(render(sealed(alone)), where="")


def test_a_manifest_without_a_key_has_no_trace_of_encryption(save: Callable[..., Path]) -> None:
    text = json.loads((save(12, None) / MANIFEST).read_text())
    assert not {"encryption", "hmac"} & text.keys()
    assert not any("plain_size" in entry for entry in text["files"])


def test_a_commit_with_a_key_of_files_sealed_with_another_is_a_bug_of_ours(save: Callable[..., Path]) -> None:
    manifest = read_manifest(save(12))
    for bad in (manifest, msgspec.structs.replace(manifest, encryption=msgspec.UNSET)):
        with pytest.raises(ValueError):
            sign(bad, OTHER)


def test_resume_passes_over_what_is_not_signed_and_leaves_it_where_it_is(
    paths: RunPaths, save: Callable[..., Path]
) -> None:
    save(12)
    planted = save(13, None)
    choice = choose_resume(paths, "auto", verifier=lambda path: verify(path, keys=KEYS))
    assert choice.name == "step_000012"
    assert planted.is_dir()

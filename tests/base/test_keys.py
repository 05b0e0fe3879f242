"""Keys: where they come from, what is refused, and that they never show."""

import copy
import logging
import os
import pickle
import resource
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_slurm.base.errors import KeyRefused, PermissionRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import Keyring, MasterKey, Secret, load_keys, new_key_file, read_key_file
from verl_slurm.config.schema import EncryptionConfig

RAW = bytes(range(200, 232))


@pytest.fixture(autouse=True)
def core_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.key"
    path.write_text(RAW.hex() + "\n")
    path.chmod(0o600)
    return path


def shows(text: str) -> bool:
    """Whether any form of the key, or 8 bytes of it, is in `text`."""
    lowered = text.lower()
    forms = [RAW.hex()[i : i + 16] for i in range(0, 49)]
    return any(form in lowered for form in forms) or repr(RAW)[2:20] in text


def test_a_new_key_is_private_random_and_reads_back(tmp_path: Path) -> None:
    first, second = new_key_file(tmp_path / "a"), new_key_file(tmp_path / "b")
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o600
    assert first.id != second.id
    assert read_key_file(tmp_path / "a").id == first.id


def test_a_new_key_never_replaces_a_file_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("there", "link"):
        with pytest.raises(KeyRefused):
            new_key_file(tmp_path / name)
    assert (tmp_path / "there").read_bytes() == b"precious"
    assert not (tmp_path / "nowhere").exists()


def test_hex_and_raw_bytes_are_the_same_key(tmp_path: Path, key_file: Path) -> None:
    raw = tmp_path / "raw.key"
    raw.write_bytes(RAW)
    raw.chmod(0o600)
    assert read_key_file(raw).id == read_key_file(key_file).id == MasterKey(RAW).id


@pytest.mark.scenario("M08")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        RAW[:31],
        RAW + b"\n",
        RAW.hex().encode()[:-1],
        RAW.hex().encode() + b"\n\n",
        b" " + RAW.hex().encode()[:-1],
        b"correct horse battery staple 123",
        RAW.hex().encode()[:32],
        b"0" * 64,
        b"00ff" * 16,
        RAW.hex().encode()[:-1] + b"g",
        RAW.hex().encode()[:-2] + "٣".encode(),
    ],
)
def test_what_is_no_key_is_refused_and_not_quoted(key_file: Path, content: bytes) -> None:
    key_file.write_bytes(content)
    with pytest.raises(KeyRefused) as caught:
        read_key_file(key_file)
    assert caught.value.exit_code is ExitCode.KEY
    assert caught.value.__cause__ is None
    text = "".join(traceback.format_exception(caught.value, chain=True))
    assert not shows(text)
    assert "correct horse" not in text


@pytest.mark.scenario("M08")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o610])
def test_a_key_open_to_others_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(PermissionRefused):
        read_key_file(key_file)


@pytest.mark.scenario("M08")
def test_a_link_a_second_name_a_folder_and_a_fifo_are_refused(tmp_path: Path, key_file: Path) -> None:
    (tmp_path / "link").symlink_to(key_file)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "folder", "fifo"):  # which is not waited for
        with pytest.raises(PermissionRefused):
            read_key_file(tmp_path / name)
    with pytest.raises(KeyRefused):
        read_key_file(tmp_path / "missing")
    os.link(key_file, tmp_path / "second")
    with pytest.raises(PermissionRefused):
        read_key_file(key_file)


@pytest.mark.scenario("M08")
def test_a_key_in_a_folder_where_others_may_rename_is_refused(tmp_path: Path, key_file: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(PermissionRefused):
        read_key_file(key_file)
    with pytest.raises(PermissionRefused):
        new_key_file(tmp_path / "new")
    tmp_path.chmod(0o700)


@pytest.mark.scenario("M08")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_or_a_folder_of_another_user_is_refused(tmp_path: Path, key_file: Path) -> None:
    os.chown(key_file, 65534, -1)
    with pytest.raises(PermissionRefused):
        read_key_file(key_file)
    os.chown(key_file, 0, -1)
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(PermissionRefused):
        read_key_file(key_file)


def test_the_configuration_names_a_file_or_a_variable(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_keys(None) is None
    from_file = load_keys(EncryptionConfig(key_file=str(key_file)))
    monkeypatch.setenv("RUN_KEY", RAW.hex())
    from_variable = load_keys(EncryptionConfig(key_env="RUN_KEY"))
    assert from_file is not None
    assert from_variable is not None
    assert from_file.current.id == from_variable.current.id
    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
    for value in (None, "", "short", "é" * 64):
        monkeypatch.delenv("RUN_KEY") if value is None else monkeypatch.setenv("RUN_KEY", value)
        with pytest.raises(KeyRefused):
            load_keys(EncryptionConfig(key_env="RUN_KEY"))


def test_old_keys_are_read_with_and_an_unknown_one_is_one_clear_line(tmp_path: Path, key_file: Path) -> None:
    new = new_key_file(tmp_path / "new.key")
    ring = load_keys(EncryptionConfig(key_file=str(tmp_path / "new.key"), old_key_files=[str(key_file)]))
    assert ring is not None
    assert ring.current.id == new.id
    assert ring.find(MasterKey(RAW).id, where="x").id == MasterKey(RAW).id
    with pytest.raises(KeyRefused) as caught:
        Keyring(new).find(MasterKey(RAW).id, where="step_000012")
    line = caught.value.one_line()
    assert f"found key id {MasterKey(RAW).id}" in line
    assert f"expected key id {new.id}" in line


def test_what_is_derived_differs_by_purpose_salt_and_key() -> None:
    key, other = MasterKey(RAW), MasterKey(RAW[::-1])
    made = [key.derive(b"a"), key.derive(b"b"), key.derive(b"a", b"salt"), other.derive(b"a")]
    assert len({secret.reveal() for secret in made}) == 4
    assert RAW not in {secret.reveal() for secret in made}


@pytest.mark.scenario("M08")
def test_nothing_secret_shows_in_repr_format_log_or_exception(caplog: pytest.LogCaptureFixture) -> None:
    key, secret = MasterKey(RAW), Secret(RAW)
    ring = Keyring(key)
    logging.getLogger("x").error("%s %r %s %r", key, secret, ring, {"k": [key, secret]})
    error = VerlSlurmError("x", where=key, found=secret, expected=ring)
    texts = [repr(key), str(secret), f"{ring}", caplog.text, error.one_line(), key.id]
    texts += ["".join(traceback.format_exception(error)), str(getattr(key, "__dict__", ""))]
    assert not any(shows(text) for text in texts)


@pytest.mark.scenario("M08")
@pytest.mark.parametrize("thing", [Secret(RAW), MasterKey(RAW), Keyring(MasterKey(RAW))])
def test_a_key_is_neither_pickled_nor_copied(thing: object) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(thing)
    with pytest.raises(TypeError):
        copy.deepcopy(thing)


def test_a_key_has_exactly_32_bytes() -> None:
    for size in (0, 31, 33):
        with pytest.raises(ValueError):
            MasterKey(bytes(size))

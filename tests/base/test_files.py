"""A name that only one of many gets, with all of its content at once."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_slurm.base.errors import PermissionRefused
from verl_slurm.base.files import create_file, private_dir, write_new


@pytest.mark.parametrize("links", [True, False])
def test_the_first_gets_the_name_and_nothing_is_left_of_the_second(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    assert create_file(tmp_path / "name.0", b"first")
    assert not create_file(tmp_path / "name.0", b"second")
    assert [path.name for path in tmp_path.iterdir()] == ["name.0"]
    assert (tmp_path / "name.0").read_bytes() == b"first"
    assert (tmp_path / "name.0").stat().st_mode & 0o777 == 0o600


def test_a_storage_that_refuses_is_no_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space"):
        create_file(tmp_path / "name", b"mine")
    with pytest.raises(FileNotFoundError):
        create_file(tmp_path / "no folder" / "name", b"mine")
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output"):
        write_new(tmp_path / "name", blocks())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", [True, False])
def test_a_name_that_is_taken_keeps_what_it_has(tmp_path: Path, link: bool) -> None:
    kept, name = tmp_path / "kept", tmp_path / "name"
    kept.write_bytes(b"kept")
    (name.symlink_to if link else name.hardlink_to)(kept)
    with pytest.raises(FileExistsError):
        write_new(name, [b"mine"])
    assert kept.read_bytes() == b"kept"
    assert name.exists()


def test_a_link_in_the_place_of_a_directory_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        PermissionRefused, match="a link to .*/elsewhere, expected a directory.*move the real one here"
    ):
        private_dir(tmp_path / "checkpoints")


def test_a_run_that_has_gone_is_not_made_again_by_what_belongs_inside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="run"):
        private_dir(run / "partial" / "checkpoints", inside=run)
    assert not run.exists()
    run.mkdir()
    assert private_dir(run / "partial" / "checkpoints", inside=run).is_dir()

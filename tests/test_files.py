"""A name that only one of many gets, with all of its content at once."""

import errno
import os
from pathlib import Path

import pytest

from verl_slurm.files import create_file


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

"""The page between an agent and its ranks."""

import stat
from pathlib import Path

import pytest

from verl_slurm.errors import WireError
from verl_slurm.wire.control_page import ControlPage, Request


def test_a_fresh_page_asks_for_nothing(tmp_path: Path) -> None:
    ControlPage.create(tmp_path / "page")
    assert ControlPage.open(tmp_path / "page").request() is None


def test_a_reader_sees_the_newest_request(tmp_path: Path) -> None:
    writer = ControlPage.create(tmp_path / "page")
    reader = ControlPage.open(tmp_path / "page")
    writer.post(Request(1, False, 0))
    writer.post(Request(2, True, 12345))
    assert reader.request() == Request(2, True, 12345)


def test_the_page_is_ours_alone(tmp_path: Path) -> None:
    ControlPage.create(tmp_path / "page")
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"NOTAPAGE" + bytes(4088)])
def test_what_is_not_a_page_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "page").write_bytes(content)
    with pytest.raises(WireError, match="not a control page"):
        ControlPage.open(tmp_path / "page")


@pytest.mark.scenario("M06")
def test_a_link_in_the_place_of_a_page_is_not_followed(tmp_path: Path) -> None:
    ControlPage.create(tmp_path / "real")
    (tmp_path / "page").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        ControlPage.open(tmp_path / "page")

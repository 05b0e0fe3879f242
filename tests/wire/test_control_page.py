"""The page between an agent and its ranks."""

import mmap
import stat
from pathlib import Path

import pytest

from verl_slurm.base.errors import WireError
from verl_slurm.wire.control_page import ControlPage
from verl_slurm.wire.messages import SaveRequest


def test_a_fresh_page_asks_for_nothing_and_is_ours_alone(tmp_path: Path) -> None:
    ControlPage.create(tmp_path / "page")
    assert ControlPage.open(tmp_path / "page").request() is None
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o600


def test_a_reader_sees_the_newest_request(tmp_path: Path) -> None:
    writer = ControlPage.create(tmp_path / "page")
    reader = ControlPage.open(tmp_path / "page")
    writer.post(SaveRequest(request_id=1, stop=False))
    assert reader.request() == SaveRequest(request_id=1, stop=False)
    writer.post(SaveRequest(request_id=2, stop=True, seconds_left=60.0))
    read = reader.request()
    assert read is not None
    assert (read.request_id, read.stop) == (2, True)


def test_a_deadline_is_a_moment_and_is_read_as_what_is_left_until_then() -> None:
    now = [5_000_000_000]
    page = ControlPage(mmap.mmap(-1, 4096), clock_ns=lambda: now[0])
    page.post(SaveRequest(request_id=1, stop=True, seconds_left=30.0))
    for passed_s, left in ((0, 30.0), (10, 20.0), (31, -1.0)):
        now[0] = 5_000_000_000 + passed_s * 1_000_000_000
        assert page.request() == SaveRequest(request_id=1, stop=True, seconds_left=left)
    page.post(SaveRequest(request_id=2, stop=True, seconds_left=0.0))  # as leads of before said "no deadline"
    assert page.request() == SaveRequest(request_id=2, stop=True)


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

"""The staging arena under a device's tensors: what is saved is what was there when the save began, whatever follows."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from verl_slurm.save.ranks.collective import Collective
from verl_slurm.save.ranks.staging import Staging
from verl_slurm.save.writer.handle import SaverProcess
from verl_slurm.save.writer.protocol import Write

pytestmark = pytest.mark.torch

_BIG = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of the largest tensor: on a GPU a copy of it takes some milliseconds."""


def _tensors(device: str) -> dict[str, Tensor]:
    """Every type that training has, rows that lie apart, and AdamW's counter, which is on the CPU always."""
    torch.manual_seed(0)
    return {
        "weight": torch.randn(_BIG[device], device=device),
        "half": torch.randn(1023, device=device).to(torch.bfloat16),
        "apart": torch.randn(64, 64, device=device).t(),
        "count": torch.arange(5, device=device),
        "step": torch.zeros(()),
        "flag": torch.tensor([True, False], device=device),
    }


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def tensors(device: str) -> dict[str, Tensor]:
    return _tensors(device)


@pytest.fixture
def staging(tensors: dict[str, Tensor]) -> Iterator[Staging]:
    made = Staging({"actor": tensors}, Collective(None))
    yield made
    made.close()


def _saved(staging: Staging, directory: Path) -> list[bytes]:
    """Of each tensor, what lies in the file; in the order of the tensors."""
    (file,) = staging.layout.files
    data = (directory / file.path).read_bytes()
    slots = staging.layout.slots
    return [data[s.at - file.at :][: s.tensor.numel() * s.tensor.element_size()] for s in slots]


def _write_to(staging: Staging, directory: Path) -> "Future[Write]":
    """The request for all files below `directory`."""
    known: Future[Write] = Future()
    known.set_result(Write(files=staging.layout.files, directories=(str(directory),)))
    return known


def _new(directory: Path) -> Path:
    directory.mkdir(mode=0o700)
    return directory


def test_every_type_is_saved_as_it_is(
    staging: Staging, tensors: dict[str, Tensor], tmp_path: Path, device: str
) -> None:
    """Pinned staging: float32, bfloat16, integers, rows that lie apart, scalars of the CPU among them."""
    where = _new(tmp_path / "save")
    staging.begin(_write_to(staging, where)).result()
    assert _saved(staging, where) == [_bytes(tensor) for tensor in tensors.values()]
    assert staging.pinned == (device == "cuda")


def test_what_is_queued_before_a_save_is_in_it_and_what_follows_the_fence_is_not(
    staging: Staging, tensors: dict[str, Tensor], tmp_path: Path, device: str
) -> None:
    """The order of the copy stream and the training's: an update that is still queued when the save begins."""
    weight = tensors["weight"]
    expected = (weight + 1).cpu()
    busy = torch.randn(2048, 2048, device=device) if device == "cuda" else None
    for turn in range(3):
        where = _new(tmp_path / f"save{turn}")
        if busy is not None:
            for _ in range(50):  # the GPU has this to do before it comes by the update
                busy = busy @ busy / busy.norm()
        weight.add_(1)
        saving = staging.begin(_write_to(staging, where))
        staging.fence()
        weight.add_(1)
        saving.result()
        assert _saved(staging, where)[0] == _bytes(expected)
        expected = expected + 1 + 1


def test_an_arena_can_be_made_again_where_one_was(
    tensors: dict[str, Tensor], tmp_path: Path, device: str
) -> None:
    """Unpinning: the driver refuses memory at an address that it still has for pinned."""
    for turn in range(3):
        staging = Staging({"actor": tensors}, Collective(None))
        where = _new(tmp_path / f"save{turn}")
        staging.begin(_write_to(staging, where)).result()
        assert staging.pinned == (device == "cuda")
        staging.close()


def test_how_long_a_save_holds_the_training_up_is_said(
    staging: Staging, tensors: dict[str, Tensor], tmp_path: Path, device: str
) -> None:
    """The stall of a save, in milliseconds for each GiB: a figure, and no limit."""
    warm, where = _new(tmp_path / "warm"), _new(tmp_path / "save")
    staging.begin(_write_to(staging, warm)).result()
    began = time.perf_counter()
    saving = staging.begin(_write_to(staging, where))
    returned = time.perf_counter() - began
    waited = staging.fence()
    saving.result()
    durable = time.perf_counter() - began
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(
        f"\n{device}: {size / 2**20:.0f} MiB: begin {1e3 * returned:.2f} ms, then at most {1e3 * waited:.2f} ms until "
        f"the tensors may change, durable after {1e3 * durable:.0f} ms"
    )
    assert staging.fence() == 0.0


@pytest.mark.scenario("GPU4")
def test_the_first_save_lets_go_of_the_tensors_before_its_writer_is_up(
    tensors: dict[str, Tensor], tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preemption may come with the first step: training waits for the copy, and not for another process's start."""
    may_be_up, wait_ready = threading.Event(), SaverProcess.wait_ready

    def late(saver: SaverProcess) -> None:
        assert may_be_up.wait(120)
        wait_ready(saver)

    monkeypatch.setattr(SaverProcess, "wait_ready", late)
    staging = Staging({"actor": tensors}, Collective(None))
    watchdog = threading.Timer(60, may_be_up.set)  # else the test would hang where it fails
    watchdog.start()
    try:
        expected, where = _bytes(tensors["weight"]), _new(tmp_path / "save")
        saving = staging.begin(_write_to(staging, where))
        staging.fence()
        assert not may_be_up.is_set()
        assert staging.pinned == (device == "cuda")
        tensors["weight"].zero_()
        may_be_up.set()
        saving.result()
        assert _saved(staging, where)[0] == expected
    finally:
        watchdog.cancel()
        may_be_up.set()
        staging.close()


@pytest.mark.scenario("GPU4")
def test_how_long_a_first_save_takes_is_said(tensors: dict[str, Tensor], tmp_path: Path, device: str) -> None:
    """Right after the start, after what the loading of data takes, and later ones: figures, and no limit."""
    told = []
    for beside_s in (0.0, 3.0):
        staging = Staging({"actor": tensors}, Collective(None))
        time.sleep(beside_s)  # what is loaded meanwhile; a figure of it is what is asked for
        for turn in ("first", "second"):
            where = _new(tmp_path / f"{turn}{beside_s}")
            began = time.perf_counter()
            saving = staging.begin(_write_to(staging, where))
            waited = staging.fence()
            saving.result()
            told.append(
                f"{turn} save {beside_s:.0f} s after the start: {1e3 * waited:.1f} ms until the tensors may"
            )
            told[-1] += f" change, durable after {1e3 * (time.perf_counter() - began):.0f} ms"
        staging.close()
    print(f"\n{device}:", *told, sep="\n")

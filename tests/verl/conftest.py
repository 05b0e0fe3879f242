"""What the tests with verl itself share."""

import importlib.util
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("verl") is not None:
        return
    for item in items:
        if item.get_closest_marker("verl"):
            item.add_marker(pytest.mark.skip(reason="NOT RUN: verl is not in this environment (make verl)"))


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The section `verl` of a run that learns sums: 8 steps an epoch, each long enough to be struck in its middle."""
    from tests.verl.tiny import make_model, make_sums, sft_words

    place: Path = tmp_path_factory.mktemp("sums")
    model, data = make_model(place / "model"), make_sums(place / "sums.parquet", 512)
    return sft_words(model, data, save_freq=4, batch=64, micro_batch=8)


@pytest.fixture
def verl_dir(tmp_path: Path) -> Path:
    """Two whole steps of the SFT trainer, 4 and 6, of two ranks, and a tracker that says 6."""
    from tests.verl.verl_steps import make_directory

    return make_directory(tmp_path / "verl", 4, 6)

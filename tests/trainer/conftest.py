"""One tiny model and data set for all tests of the trainer."""

from pathlib import Path

import pytest

from tests.made_once import made_once


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, hardly trained: as good as any for mechanics, and built in a second."""
    from verl_slurm.trainer.quickstart import tiny_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "_WARM_STEPS", 20)
        return (
            made_once(tmp_path_factory, "tiny", lambda place: tiny_model.build_model(place / "tiny")) / "tiny"
        )


@pytest.fixture(scope="session")
def sums_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in data's train root."""
    from verl_slurm.trainer.quickstart.arithmetic_data import build_data

    return made_once(tmp_path_factory, "sums", lambda place: build_data(place / "sums")) / "sums/train"

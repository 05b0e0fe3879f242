"""Every test of this directory in two forms: on the CPU, always, and on a GPU, where there is one.

The second form is skipped where there is none, and its line of the summary says what was not covered.
"""

from pathlib import Path

import pytest

_FORMS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # here, for it takes seconds that a run without it should not pay

    if not torch.cuda.is_available():
        assert isinstance(item, pytest.Function)
        what = (item.function.__doc__ or item.name).strip().splitlines()[0].rstrip(".")
        pytest.skip(f"NOT RUN: no GPU here; not covered on one: {what}")


@pytest.fixture(scope="module", params=_FORMS)
def device(request: pytest.FixtureRequest) -> str:
    """`cpu` or `cuda`."""
    form: str = request.param
    return form


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, hardly trained, with heads of 64: every engine and kernel takes those."""
    from verl_slurm.trainer.quickstart import tiny_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "_WARM_STEPS", 20)
        return tiny_model.build_model(tmp_path_factory.mktemp("tiny") / "tiny", head_dim=64)


@pytest.fixture(scope="session")
def sums_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in data's train root."""
    from verl_slurm.trainer.quickstart.arithmetic_data import build_data

    return build_data(tmp_path_factory.mktemp("sums") / "sums")

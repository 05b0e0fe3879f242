"""verl's settings where no Hydra is installed. `test_composing.py` has the real composing."""

from collections.abc import Iterable

import pytest

from verl_slurm.verl.composing import Composed
from verl_slurm.verl.overrides import Setting
from verl_slurm.verl.releases import Entry
from verl_slurm.verl.verl_inputs import said_settings

_DEFAULTS = {"data.train_files": "~/data/train.parquet"}


def without_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose the settings that are said over a few defaults."""
    monkeypatch.setattr("verl_slurm.verl.composing.composed", _compose)
    monkeypatch.setattr(Composed, "as_yaml", lambda _: "")


def _compose(_: Entry, settings: Iterable[Setting]) -> Composed:
    defaults = {key: Setting("", key, value) for key, value in _DEFAULTS.items()}
    said = {setting.key: setting for setting in settings}
    unset = tuple(key for key, setting in said.items() if setting.value == "???")
    return Composed([], None, said_settings(defaults | said), unset)

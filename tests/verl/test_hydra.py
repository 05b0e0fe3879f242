"""Hydra itself reads back what `verl.overrides` writes."""

import pytest

pytest.importorskip("hydra", reason="hydra comes with verl: make verl")

from hydra.core.override_parser.overrides_parser import OverridesParser

from verl_slurm.verl.overrides import check_overrides

pytestmark = pytest.mark.verl

VALUES = [
    None, True, False, 0, -3, 1e-6, 2.5, "", "null", "1e-6", "010", "a b", "a,b", "x=y", "it's", 'say "hi"', "ends\\", "a\\'b",
    "\\\\server\\share\\", "[1,2]", "{a:b}", "(x)", "/data/train.parquet", "org/model-7B", "a:b", "  padded ", "~x", "+x",
    "ünïcode", [], {}, [1, "x y", None, [True]], {"k": {"j": "it's"}}, ["a\\", "b"],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_hydra_reads_back_what_was_said(value: object) -> None:
    (override,) = check_overrides({"+group.key": [value]})
    parsed = OverridesParser.create().parse_override(override.word)
    assert parsed.is_add()
    assert parsed.key_or_group == "group.key"
    assert parsed.value() == [value] or _plain(parsed.value()) == [value]


def _plain(value: object) -> object:
    """Hydra keeps text that was quoted as an object of its own."""
    if hasattr(value, "text"):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    return value

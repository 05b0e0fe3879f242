import msgspec
import pytest

from verl_slurm.base.errors import CheckpointCorrupt, SchemaMismatch
from verl_slurm.checkpoint.format import state_schema
from verl_slurm.checkpoint.format.state_schema import (
    OLDER_LAYOUTS,
    OlderLayout,
    check_schema,
    current_schema,
    differences,
    parse_schema,
    render_schema,
    schema_of,
)


def test_our_schema_equals_itself_after_a_round_trip() -> None:
    ours = current_schema()
    assert parse_schema(render_schema(ours), where="x") == ours
    assert differences(ours, ours) == []
    check_schema(ours, ours, where="x")
    assert ours.classes["RuntimeState"]["rollouts"] == "dict[str, ndarray]"


def test_differences_name_every_class_field_and_type() -> None:
    old = schema_of({"A": {"x": "int", "y": "str"}, "Gone": {}})
    new = schema_of({"A": {"x": "float", "z": "str"}, "New": {}})
    assert differences(old, new) == [
        "A.x: int in the checkpoint, float here",
        "A.y: only in the checkpoint (str)",
        "A.z: not in the checkpoint (str)",
        "Gone: only in the checkpoint",
        "New: not in the checkpoint",
    ]


def test_a_mismatch_tells_the_differences_and_the_remedy() -> None:
    classes = {"A": {"x": "int"}}
    check_schema(schema_of(classes, "1"), schema_of(classes, "2"), where="x")
    with pytest.raises(SchemaMismatch) as caught:
        check_schema(schema_of(classes, "0.0.1"), schema_of({"A": {"x": "str"}}, "0.1"), where="ckpt")
    assert "A.x: int in the checkpoint, str here" in str(caught.value)
    assert "resume with verl-slurm 0.0.1" in str(caught.value)


def test_an_older_layout_is_read_by_the_code_that_says_so_and_by_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, ours, later = (schema_of({"A": {"x": kind}}) for kind in ("int", "float", "str"))
    monkeypatch.setattr(state_schema, "OLDER_LAYOUTS", (OlderLayout(old.schema_id, ours.schema_id, "why"),))
    check_schema(old, ours, where="x")
    for saved, current in ((ours, old), (old, later), (ours, later)):
        with pytest.raises(SchemaMismatch):
            check_schema(saved, current, where="x")


def test_a_schema_file_whose_id_is_not_that_of_its_classes_is_refused() -> None:
    wrong = msgspec.structs.replace(current_schema(), schema_id="0" * 64)
    for data in (render_schema(wrong), b"{}", b"[]", b"", b"\xff", b'{"a":1,"a":2}', b" " * (2 << 20)):
        with pytest.raises(CheckpointCorrupt):
            parse_schema(data, where="x")


def test_the_older_layouts_are_those_that_this_code_reads() -> None:
    """Whoever changes a saved class says anew which older checkpoints are read as they are."""
    assert {older.read_by for older in OLDER_LAYOUTS} <= {current_schema().schema_id}

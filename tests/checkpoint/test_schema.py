from typing import Any

import msgspec
import pytest

from verl_slurm.checkpoint.schema import (
    MIGRATIONS,
    Migration,
    check_schema,
    current_schema,
    differences,
    migration_path,
    parse_schema,
    render_schema,
    schema_of,
    upgrade_for,
)
from verl_slurm.errors import CheckpointCorrupt, SchemaMismatch


def step(source: str, target: str) -> Migration:
    def upgrade(header: dict[str, Any]) -> dict[str, Any]:
        return header | {"way": header.get("way", "") + target}

    return Migration(source=source, target=target, what=f"{source} to {target}", upgrade=upgrade)


def test_our_schema_equals_itself_after_a_round_trip() -> None:
    schema = current_schema()
    assert parse_schema(render_schema(schema), where="x") == schema
    assert differences(schema, schema) == []
    assert check_schema(schema, schema, where="x") == ()
    assert schema.classes["RuntimeState"]["rng"] == "dict[str, bytes | ndarray]"


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


def test_the_code_version_alone_is_no_difference() -> None:
    classes = {"A": {"x": "int"}}
    check_schema(schema_of(classes, "1"), schema_of(classes, "2"), where="x")


def test_a_mismatch_tells_the_differences_and_the_remedy() -> None:
    with pytest.raises(SchemaMismatch) as caught:
        check_schema(
            schema_of({"A": {"x": "int"}}, "0.0.1"), schema_of({"A": {"x": "str"}}, "0.1"), where="ckpt"
        )
    assert "A.x: int in the checkpoint, str here" in str(caught.value)
    assert "resume with verl-slurm 0.0.1" in str(caught.value)


def test_the_shortest_chain_of_migrations_is_found_and_applied_in_order() -> None:
    table = [step("a", "b"), step("b", "c"), step("c", "d"), step("b", "d"), step("d", "a")]
    chain = migration_path("a", "d", table)
    assert chain is not None
    assert [m.target for m in chain] == ["b", "d"]
    upgrade = upgrade_for(chain)
    assert upgrade is not None
    assert upgrade({}) == {"way": "bd"}
    assert migration_path("a", "a", table) == ()
    assert upgrade_for(()) is None
    assert migration_path("z", "a", table) is None


def test_a_schema_file_whose_id_is_not_that_of_its_classes_is_refused() -> None:
    schema = msgspec.structs.replace(current_schema(), schema_id="0" * 64)
    for data in (render_schema(schema), b"{}", b"[]", b"", b"\xff", b'{"a":1,"a":2}', b" " * (2 << 20)):
        with pytest.raises(CheckpointCorrupt):
            parse_schema(data, where="x")


def test_the_last_migration_leads_to_the_layout_of_this_code() -> None:
    """Whoever changes a saved class registers how older checkpoints are read, or says that they are not."""
    assert MIGRATIONS[-1].target == current_schema().schema_id

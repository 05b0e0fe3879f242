import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.base.errors import CheckpointCorrupt, SchemaMismatch
from verl_slurm.checkpoint.format.info import Verdict
from verl_slurm.checkpoint.format.manifest import canonical
from verl_slurm.checkpoint.store.verify import read_manifest, verify

Save = Callable[..., Path]
VICTIM = "actor/__0_0.distcp"


def problems(verdict: Verdict) -> dict[str, str]:
    assert not verdict.ok
    return {p.path: p.what for p in verdict.problems}


def rewrite(final: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the digest that fits: what somebody with bad intent would do."""
    raw = json.loads((final / "manifest.json").read_text())
    change(raw)
    raw.pop("digest", None)
    raw["digest"] = hashlib.sha256(canonical(raw)).hexdigest()
    (final / "manifest.json").write_text(json.dumps(raw))


def test_an_untouched_checkpoint_verifies_and_every_byte_was_read(save: Save) -> None:
    final = save(1)
    verdict = verify(final)
    assert verdict.ok
    assert verdict.problems == ()
    assert verdict.manifest == read_manifest(final)
    assert verdict.num_bytes == read_manifest(final).num_bytes > 0


@pytest.mark.parametrize("bit", [0, 7 * 8 + 3, -1])
def test_one_flipped_bit_anywhere_is_found_and_the_file_named(save: Save, bit: int) -> None:
    final = save(1)
    for entry in read_manifest(final).files:
        data = bytearray((final / entry.path).read_bytes())
        at = bit % (len(data) * 8)
        data[at // 8] ^= 1 << at % 8
        (final / entry.path).write_bytes(data)
        assert list(problems(verify(final))) == [entry.path]
        data[at // 8] ^= 1 << at % 8
        (final / entry.path).write_bytes(data)
    assert verify(final).ok


def test_one_flipped_bit_anywhere_in_the_manifest_is_found(save: Save) -> None:
    final = save(1)
    good = (final / "manifest.json").read_bytes()
    parsed = json.loads(good)
    for at in range(0, len(good) * 8, 61):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        try:
            same = json.loads(data) == parsed  # a space that became another space says the same
        except ValueError:
            same = False
        (final / "manifest.json").write_bytes(data)
        assert verify(final).ok == same


def test_what_is_truncated_missing_or_extra_is_named(save: Save) -> None:
    final = save(1)
    (final / VICTIM).write_bytes((final / VICTIM).read_bytes()[:-1])
    (final / "critic/__0_0.distcp").unlink()
    (final / "actor/extra.bin").write_bytes(b"")
    (final / "empty").mkdir(mode=0o700)
    found = problems(verify(final))
    assert found.keys() == {VICTIM, "critic/__0_0.distcp", "actor/extra.bin", "empty"}
    assert found[VICTIM] == "size 1299, expected 1300"
    assert found["critic/__0_0.distcp"] == "missing"
    assert found["actor/extra.bin"] == "extra: not in the manifest"


def test_a_link_in_the_place_of_a_file_or_folder_is_refused(save: Save, tmp_path: Path) -> None:
    final = save(1)
    (final / VICTIM).rename(tmp_path / "same_bytes")
    (final / VICTIM).symlink_to(tmp_path / "same_bytes")
    (final / "critic").rename(tmp_path / "critic")
    (final / "critic").symlink_to(tmp_path / "critic")
    found = problems(verify(final))
    assert {VICTIM, "critic", "critic/__0_0.distcp"} <= found.keys()


def test_a_checkpoint_directory_that_is_a_link_is_refused(save: Save, tmp_path: Path) -> None:
    final = save(1)
    final.rename(tmp_path / "moved")
    final.symlink_to(tmp_path / "moved")
    assert "." in problems(verify(final))


@pytest.mark.scenario("M06")
def test_a_pipe_in_the_place_of_a_file_does_not_hang_it(save: Save) -> None:
    final = save(1)
    (final / VICTIM).unlink()
    os.mkfifo(final / VICTIM, 0o600)
    (final / "manifest.json").rename(final / "m")
    os.mkfifo(final / "manifest.json", 0o600)
    assert "manifest.json" in problems(verify(final))
    (final / "manifest.json").unlink()
    (final / "m").rename(final / "manifest.json")
    assert VICTIM in problems(verify(final))


@pytest.mark.parametrize(
    "path",
    [
        "../../secret",
        "/etc/passwd",
        "actor/../../x",
        "actor//x",
        "./x",
        "",
        "a\0b",
        "a\\b",
        "x" * 4096,
        "a/" * 9 + "b",
        "manifest.json",
        "new\nline",
    ],
)
def test_a_manifest_with_a_path_that_is_not_plain_is_refused(save: Save, path: str) -> None:
    final = save(1)
    rewrite(
        final, lambda raw: raw["files"].append({"path": path, "size": 0, "sha256": "0" * 64, "leaves": []})
    )
    verdict = verify(final)
    assert "manifest.json" in problems(verdict)
    assert verdict.num_bytes == 0
    assert "\n" not in verdict.one_line()


@pytest.mark.parametrize("path", [VICTIM, VICTIM.upper().replace("ACTOR", "actor")])
def test_a_manifest_that_names_a_file_twice_or_in_two_cases_is_refused(save: Save, path: str) -> None:
    final = save(1)
    rewrite(
        final, lambda raw: raw["files"].append({"path": path, "size": 0, "sha256": "0" * 64, "leaves": []})
    )
    assert "two files of one name" in problems(verify(final))["manifest.json"]


def test_a_manifest_whose_digest_is_not_its_own_is_refused(save: Save) -> None:
    final = save(1)
    raw = json.loads((final / "manifest.json").read_text())
    raw["attempt"] = 99
    (final / "manifest.json").write_text(json.dumps(raw))
    assert "manifest digest is" in problems(verify(final))["manifest.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a":1,"a":1}',
        b'{"save_seconds":NaN}',
        b'{"save_seconds":1e5000}',
        b'{"step":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_manifest_that_is_no_manifest_is_refused(save: Save, text: bytes) -> None:
    final = save(1)
    (final / "manifest.json").write_bytes(text)
    assert "manifest.json" in problems(verify(final))


def test_unknown_missing_and_mistyped_keys_of_a_manifest_are_refused(save: Save) -> None:
    def unknown(raw: dict[str, Any]) -> None:
        raw["run_this"] = "x"

    def missing(raw: dict[str, Any]) -> None:
        del raw["schema_id"]

    def mistyped(raw: dict[str, Any]) -> None:
        raw["step"] = True

    def other_digest(raw: dict[str, Any]) -> None:
        raw["files"][0]["sha256"] = raw["files"][0]["sha256"].upper() + "\n"

    for step, change in enumerate((unknown, missing, mistyped, other_digest), start=1):
        final = save(step)
        rewrite(final, change)
        assert "manifest.json" in problems(verify(final))


def test_a_manifest_that_leaves_out_a_required_part_is_refused(save: Save) -> None:
    final = save(1)
    (final / "runtime_state.rank_0001.msgpack.zst").unlink()
    rewrite(final, lambda raw: raw.update(files=[f for f in raw["files"] if "rank_0001" not in f["path"]]))
    found = problems(verify(final))
    assert found == {"runtime_state.rank_0001.msgpack.zst": "a required part is not in the manifest"}


def test_a_checkpoint_under_another_name_is_refused(save: Save, tmp_path: Path) -> None:
    final = save(1)
    other = final.with_name("step_000009")
    final.rename(other)
    assert problems(verify(other)) == {".": "the manifest is of step_000001"}


def test_another_format_version_is_told_apart_from_damage(save: Save) -> None:
    final = save(1)
    rewrite(final, lambda raw: raw.update(format_version=9, unheard_of=True))
    verdict = verify(final)
    assert [p.kind for p in verdict.problems] == ["version"]
    assert not verdict.damaged
    with pytest.raises(SchemaMismatch):
        read_manifest(final)


def test_what_others_may_write_is_not_trusted_but_not_damaged_either(save: Save) -> None:
    final = save(1)
    (final / "actor/.metadata").chmod(0o666)
    verdict = verify(final)
    assert problems(verdict) == {"actor/.metadata": "may be written by others (mode 0666)"}
    assert not verdict.damaged


@pytest.mark.scenario("M06")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_is_not_trusted(save: Save) -> None:
    final = save(1)
    os.chown(final / "actor/.metadata", 65534, -1)
    assert problems(verify(final)) == {"actor/.metadata": "belongs to uid 65534, expected 0"}


def test_no_manifest_and_no_directory_are_verdicts_and_no_exceptions(save: Save, tmp_path: Path) -> None:
    final = save(1)
    (final / "manifest.json").unlink()
    assert problems(verify(final))["manifest.json"] == "missing: this was never committed"
    assert problems(verify(tmp_path / "nowhere")) == {".": "missing"}
    with pytest.raises(FileNotFoundError):
        read_manifest(final)


@pytest.mark.scenario("M11")
def test_hostile_file_names_cannot_forge_a_line(save: Save) -> None:
    final = save(1)
    (final / "x\nstep_000002: verified\x1b[2J").write_bytes(b"")
    (final / os.fsdecode(b"\xff")).write_bytes(b"")
    line = verify(final).one_line()
    assert line.isprintable()
    line.encode()


def test_a_read_error_is_not_called_damage(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    final = save(1)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    verdict = verify(final)
    assert not verdict.ok
    assert not verdict.damaged
    assert {p.kind for p in verdict.problems} == {"unreadable"}


def test_reading_a_manifest_that_does_not_verify_raises_with_its_path(save: Save) -> None:
    final = save(1)
    (final / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CheckpointCorrupt, match="manifest.json"):
        read_manifest(final)

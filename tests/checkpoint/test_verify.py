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


def test_a_link_in_the_place_of_a_file_or_a_folder_or_the_checkpoint_is_refused(
    save: Save, tmp_path: Path
) -> None:
    final = save(1)
    (final / VICTIM).rename(tmp_path / "same_bytes")
    (final / VICTIM).symlink_to(tmp_path / "same_bytes")
    (final / "critic").rename(tmp_path / "critic")
    (final / "critic").symlink_to(tmp_path / "critic")
    found = problems(verify(final))
    assert {VICTIM, "critic", "critic/__0_0.distcp"} <= found.keys()
    final = save(2)
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


def _naming(path: str) -> Callable[[dict[str, Any]], None]:
    """One more file, of that path."""
    entry = {"path": path, "size": 0, "sha256": "0" * 64, "leaves": []}
    return lambda raw: raw["files"].append(entry)


_UPPER = VICTIM.upper().replace("ACTOR", "actor")
_PATHS = (
    *("../../secret", "/etc/passwd", "actor/../../x", "actor//x", "./x", "", "a\0b", "a\\b", "x" * 4096),
    *("a/" * 9 + "b", "manifest.json", "new\nline"),
)
REWRITTEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    **{f"a path {path!r:.20}": (_naming(path), "path") for path in _PATHS if path != "manifest.json"},
    "itself": (_naming("manifest.json"), "names itself"),
    "a file twice": (_naming(VICTIM), "two files of one name"),
    "a file in two cases": (_naming(_UPPER), "two files of one name"),
    "an unknown key": (lambda raw: raw.update(run_this="x"), "run_this"),
    "a missing key": (lambda raw: raw.pop("schema_id"), "schema_id"),
    "another type": (lambda raw: raw.update(step=True), "step"),
    "another digest": (lambda raw: raw["files"][0].update(sha256="A" * 64 + "\n"), "sha256"),
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_a_manifest_that_breaks_its_specification_is_refused_with_its_path(save: Save, what: str) -> None:
    """Its digest fits: what somebody with bad intent would do."""
    final, (change, says) = save(1), REWRITTEN[what]
    rewrite(final, change)
    verdict = verify(final)
    assert says in problems(verdict)["manifest.json"]
    assert verdict.num_bytes == 0
    assert "\n" not in verdict.one_line()
    with pytest.raises(CheckpointCorrupt, match="manifest.json"):
        read_manifest(final)


_ATTEMPT_CHANGED = b"digest"


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b"[]",
            b"null",
            b"{",
            b"{}",
            b'{"a":1,"a":1}',
            b'{"save_seconds":NaN}',
            b'{"save_seconds":1e5000}',
        ),
        *(b'{"step":' + b"9" * 5000 + b"}", b"[" * 100_000, b"\xff\xfe", _ATTEMPT_CHANGED),
    ],
)
def test_a_manifest_that_is_none_or_has_another_digest_is_refused(save: Save, text: bytes) -> None:
    final = save(1)
    if text == _ATTEMPT_CHANGED:
        raw = json.loads((final / "manifest.json").read_text())
        text = json.dumps(raw | {"attempt": 99}).encode()
    (final / "manifest.json").write_bytes(text)
    found = problems(verify(final))["manifest.json"]
    assert ("manifest digest is" in found) is (b"attempt" in text)


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


@pytest.mark.scenario("M06")
def test_what_others_own_or_may_write_is_not_trusted_but_not_damaged_either(save: Save) -> None:
    final = save(1)
    (final / "actor/.metadata").chmod(0o666)
    verdict = verify(final)
    assert problems(verdict) == {"actor/.metadata": "may be written by others (mode 0666)"}
    assert not verdict.damaged
    if os.geteuid() == 0:  # only root can give a file away
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

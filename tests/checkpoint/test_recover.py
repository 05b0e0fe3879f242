import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.conftest import STREWN, leaves, strew
from verl_slurm.base.errors import CheckpointCorrupt, NotFound, PermissionRefused, SchemaMismatch
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.state_schema import SchemaVersion, current_schema, schema_of
from verl_slurm.checkpoint.store import recover, verify as verify_module
from verl_slurm.checkpoint.store.quarantine import is_set_aside
from verl_slurm.checkpoint.store.recover import choose_resume, set_aside
from verl_slurm.checkpoint.store.verify import verify

Save = Callable[..., Path]


@pytest.fixture
def older_schema() -> SchemaVersion:
    """Ours with a field less, a field more, a type changed and a class more."""
    classes = {name: dict(fields) for name, fields in current_schema().classes.items()}
    del classes["RuntimeState"]["kl_window"]
    classes["RuntimeState"]["kl_sum"] = "float"
    classes["RuntimeState"]["step"] = "str"
    classes["Sampler"] = {"offset": "int"}
    return schema_of(classes, "0.0.9")


def test_auto_takes_the_newest_that_verifies_whatever_the_hint_says(save: Save, paths: RunPaths) -> None:
    assert choose_resume(paths, "auto").name is None
    save(1)
    assert choose_resume(paths, None).name is None
    save(2)
    newest = save(2, 5)
    paths.latest.write_text("step_000001\n")
    choice = choose_resume(paths, "auto")
    assert (choice.name, choice.path) == ("step_000002_sp0005", newest)
    assert choice.manifest is not None
    assert choice.manifest.safe_point == 5
    assert choice.reasons[-1] == "step_000002_sp0005 is the newest checkpoint that verifies"


@pytest.mark.parametrize("fault", ["truncated", "bit", "removed", "manifest"])
def test_a_damaged_newest_is_set_aside_with_its_reason_and_the_one_before_is_taken(
    save: Save, paths: RunPaths, fault: str
) -> None:
    save(1)
    newest = save(2)
    name = "manifest.json" if fault == "manifest" else "actor/__0_0.distcp"
    victim = newest / name
    data = bytearray(victim.read_bytes())
    if fault in {"removed", "manifest"}:
        victim.unlink()
    elif fault == "bit":
        data[17] ^= 4
        victim.write_bytes(data)
    else:
        victim.write_bytes(data[:100])
    choice = choose_resume(paths, "auto")
    assert choice.name == "step_000001"
    assert choice.reasons[0].startswith(f"step_000002: {name}")
    assert not newest.exists()
    (moved,) = choice.set_aside
    assert moved.parent == paths.quarantine
    assert (moved / "config.yaml").exists()
    reason = json.loads((paths.quarantine / f"{moved.name}.reason.json").read_text())
    assert any(name in line for line in reason["reasons"])


@pytest.mark.parametrize("older", [False, True])
def test_what_is_extra_in_the_newest_costs_no_checkpoint_and_is_moved_aside(
    save: Save, paths: RunPaths, older: bool
) -> None:
    if older:
        save(1)
    newest = save(2)
    strew(newest)
    looked = choose_resume(paths, "auto", move_damaged=False)
    assert looked.path == newest
    assert f"the next start moves them to {paths.quarantine}" in looked.strays
    assert leaves(newest) > STREWN
    choice = choose_resume(paths, "auto")
    assert (choice.path, choice.set_aside) == (newest, ())
    assert verify(newest).ok
    aside, note = sorted(paths.quarantine.iterdir())
    assert leaves(aside) == STREWN
    assert is_set_aside(aside), "`prune --quarantined` removes it"
    assert f"moved to {aside}" in choice.strays
    assert choice.strays == choice.reasons[-1]
    assert "critic/new\\nline: extra special file: not in the manifest" in "".join(
        json.loads(note.read_text())["reasons"]
    )
    assert choose_resume(paths, "step_000002").strays == ""


def test_more_strays_than_a_verdict_names_are_all_moved(
    save: Save, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "_MOST_EXTRA", 2)
    newest = save(2)
    strew(newest)
    assert "2 more that are not in the manifest" in choose_resume(paths, "step_000002").strays
    assert verify(newest).ok


@pytest.mark.parametrize("harm", ["a flipped bit", "a folder for a file", "a file for a folder", "a link"])
def test_what_is_extra_hides_no_damage(save: Save, paths: RunPaths, harm: str) -> None:
    save(1)
    newest = save(2)
    strew(newest)
    victim = newest / ("critic" if harm == "a file for a folder" else "actor/__0_0.distcp")
    if harm == "a flipped bit":
        data = bytearray(victim.read_bytes())
        data[17] ^= 4
        victim.write_bytes(data)
    else:
        victim.rename(newest / "elsewhere")
        if harm == "a folder for a file":
            victim.mkdir()
        elif harm == "a file for a folder":
            victim.touch()
        else:
            victim.symlink_to("../elsewhere")
    choice = choose_resume(paths, "auto")
    assert choice.name == "step_000001"
    assert [path.name[:11] for path in choice.set_aside] == [newest.name]


def test_what_is_extra_in_one_that_others_may_write_moves_nothing(save: Save, paths: RunPaths) -> None:
    save(1)
    newest = save(2)
    strew(newest)
    (newest / "actor").chmod(0o777)
    with pytest.raises(PermissionRefused, match="chmod -R go-w"):
        choose_resume(paths, "auto")
    assert leaves(newest) > STREWN


def test_looking_only_moves_nothing(save: Save, paths: RunPaths) -> None:
    save(1)
    newest = save(2)
    (newest / "config.yaml").write_bytes(b"")
    choice = choose_resume(paths, "auto", move_damaged=False)
    assert choice.name == "step_000001"
    assert newest.exists()
    assert choice.set_aside == ()


def test_when_everything_is_damaged_the_run_starts_over_and_says_so(save: Save, paths: RunPaths) -> None:
    for step in (1, 2):
        (save(step) / "config.yaml").unlink()
    choice = choose_resume(paths, "auto")
    assert choice.name is None
    assert choice.reasons[-1] == "no checkpoint verifies"
    assert len(choice.set_aside) == 2


def test_a_newest_that_others_may_write_is_refused_with_the_way_on_and_not_passed_over(
    save: Save, paths: RunPaths
) -> None:
    save(1)
    newest = save(2)
    (newest / "config.yaml").chmod(0o622)
    with pytest.raises(PermissionRefused, match=f"chmod -R go-w {paths.root}"):
        choose_resume(paths, "auto")
    (newest / "config.yaml").chmod(0o600)
    assert choose_resume(paths, "auto").path == newest


def test_an_explicit_path_or_name_is_taken_when_it_verifies(
    save: Save, paths: RunPaths, tmp_path: Path
) -> None:
    older = save(1)
    save(2)
    assert choose_resume(paths, str(older)).name == "step_000001"
    assert choose_resume(paths, "step_000001").path == older
    (tmp_path / "link").symlink_to(older)
    assert choose_resume(paths, str(tmp_path / "link")).path == older


def test_an_explicit_one_that_does_not_verify_is_an_error_and_stays(save: Save, paths: RunPaths) -> None:
    save(1)
    newest = save(2)
    (newest / "config.yaml").write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match=r"config\.yaml: size 0, expected 10"):
        choose_resume(paths, str(newest))
    assert newest.exists()
    with pytest.raises(NotFound):
        choose_resume(paths, "step_000077")


def test_another_schema_is_refused_with_its_exact_differences(
    save: Save, paths: RunPaths, older_schema: SchemaVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    newer = schema_of(dict(older_schema.classes), "0.2.0")
    monkeypatch.setattr(recover, "current_schema", lambda: newer)
    with pytest.raises(SchemaMismatch) as caught:
        choose_resume(paths, "auto")
    assert str(caught.value.found).split(": ", 1)[1].split("; ") == [
        "RuntimeState.kl_sum: not in the checkpoint (float)",
        "RuntimeState.kl_window: only in the checkpoint (list[float])",
        "RuntimeState.step: int in the checkpoint, str here",
        "Sampler: not in the checkpoint",
    ]
    assert paths.checkpoint(1).exists()


def test_a_schema_file_that_is_not_the_manifests_is_refused(save: Save, paths: RunPaths) -> None:
    save(1, schema_id="0" * 64)
    with pytest.raises(CheckpointCorrupt, match="disagree"):
        choose_resume(paths, "auto")


def test_setting_aside_by_name_moves_it_and_a_second_time_is_nothing(save: Save, paths: RunPaths) -> None:
    save(1)
    moved = set_aside(paths, "step_000001", "did not read back")
    assert moved is not None
    assert {p.path for p in verify(moved).problems} == {"."}  # only its name is another
    assert set_aside(paths, "step_000001", "did not read back") is None
    with pytest.raises(ValueError, match="no checkpoint's name"):
        set_aside(paths, "../step_000001", "x")


def test_a_thousand_directories_without_a_manifest_hold_up_no_start(
    save: Save, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover, "_MOST_MOVED", 2)
    good = save(1)
    for step in range(11, 18):
        (paths.checkpoints / f"step_{step:06d}").mkdir(mode=0o700)
    choice = choose_resume(paths, "auto")
    assert choice.name == good.name
    assert [path.name[:11] for path in choice.set_aside] == ["step_000017", "step_000016"]
    assert (
        choice.reasons[-2] == "5 more, step_000011 to step_000015, have no manifest that verifies: left there"
    )
    assert len(choice.reasons) == 5

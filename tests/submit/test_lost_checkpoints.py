"""A run that has lost its checkpoints, submitted again."""

import re
import shlex
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.builders import cold_tier, run_config, write_manifest
from tests.checkpoint.conftest import FILES, STREWN, leaves, manifest_of, owns_it, stage, strew
from tests.harness import ROOT
from tests.journals import append_event, read_events
from verl_slurm.base.errors import (
    CheckpointCorrupt,
    CheckpointsAbsent,
    CheckpointsLost,
    ConfigError,
    DataError,
    DatasetDrift,
    Fenced,
    NotFound,
    PermissionRefused,
    TierError,
)
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.checkpoint.store.run_config import note_trained_with
from verl_slurm.checkpoint.tiers.mover import sync
from verl_slurm.checkpoint.tiers.survey import open_tiers
from verl_slurm.config.load import load_own, load_resolved
from verl_slurm.dataset.fingerprint.data_record import Drift, fingerprint
from verl_slurm.dataset.fingerprint.stored_tree import record_tree
from verl_slurm.runtime_state.segment import frame, head
from verl_slurm.submit.checks import resume_point
from verl_slurm.submit.checks.run_directory import check_run_dir
from verl_slurm.submit.submission import carry_out, check_drift, plan_submission
from verl_slurm.submit.submission_plan import SubmissionPlan
from verl_slurm.submit.undoing import only_submitter


def plan(paths: RunPaths, *words: str, **options: Any) -> SubmissionPlan:
    given = [f"run_dir={paths.root}", "code.tree=null", *words]
    return plan_submission(ROOT / "configs/pytorch_loop.yaml", given, cluster="local", **options)


def save(paths: RunPaths, step: int) -> Path:
    """A checkpoint of such a loop."""
    staging = stage(paths, step, files=FILES | {"guest/state": b"state"})
    return commit(staging, manifest_of(staging, guest="loop"), attempt_check=owns_it)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Two checkpoints."""
    paths = RunPaths(tmp_path / "run")
    carry_out(plan(paths), prepare_only=True)
    append_event(paths, "started", attempt=1)
    for step in (1, 2):
        save(paths, step)
        append_event(paths, "verified", attempt=1, name=f"step_{step:06d}")
    return paths


def test_a_run_that_lost_its_id_is_not_submitted(run: RunPaths) -> None:
    private_dir(run.ledger)
    run.ledger_segment(1, 0).write_bytes(head(1, 0) + frame("0" * 16, 2, 0, b"x"))
    run.run_id.unlink(missing_ok=True)
    with pytest.raises(TierError, match=f"echo {'0' * 16} > "):
        plan(run)


def test_a_journal_of_another_run_is_named_and_the_run_goes_on_from_its_checkpoint(run: RunPaths) -> None:
    lines, own = run.events.read_text(), run.run_id.read_text().strip()
    assert lines.count(own) == 3
    run.events.write_text(lines.replace(own, "0" * 16))
    found = plan(run)
    assert (found.resumes_from, found.begins_again) == ("step_000002", "")
    assert any(f"3 lines of run {'0' * 16}, not of this run ({own})" in note for note in found.notes)
    more = plan(run, "distributed.dp_size=3", "distributed.nodes=1").notes
    assert any("goes on with 3 ranks instead of 2: the start refuses that unless" in note for note in more)


def damage(paths: RunPaths, step: int) -> None:
    next(paths.checkpoint(step).glob("actor/*")).write_bytes(b"?")


def test_a_run_with_damaged_checkpoints_alone_is_refused_and_they_stay(run: RunPaths) -> None:
    damage(run, 2)
    found = plan(run)
    assert (found.resumes_from, found.resume_read) == ("step_000001", True)
    assert any("step_000002" in note and "goes back to step_000001" in note for note in found.notes)
    damage(run, 1)
    with pytest.raises(CheckpointsLost, match="step_000002: actor.*--force-resume"):
        plan(run)
    assert sorted(path.name for path in run.checkpoints.glob("step_*")) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("only", [False, True])
def test_strays_in_the_newest_checkpoint_are_said_and_the_run_goes_on_from_it(
    run: RunPaths, only: bool
) -> None:
    if only:
        shutil.rmtree(run.checkpoint(1))
    strew(run.checkpoint(2))
    found = plan(run)
    assert (found.resumes_from, found.begins_again) == ("step_000002", "")
    [note] = [note for note in found.notes if "step_000002: .DS_Store" in note]
    assert f"the next start moves them to {run.quarantine}" in note
    assert "goes back" not in note
    assert leaves(run.checkpoint(2)) > STREWN


def test_a_newest_checkpoint_that_others_may_write_is_refused_with_the_way_on(run: RunPaths) -> None:
    run.checkpoint(2).chmod(0o770)
    with pytest.raises(PermissionRefused, match=f"chmod -R go-w {run.root}") as caught:
        plan(run)
    assert caught.value.exit_code is ExitCode.PERMISSION
    run.checkpoint(2).chmod(0o700)
    assert plan(run).resumes_from == "step_000002"


def test_a_checkpoint_that_a_link_has_replaced_is_named_with_the_way_on(
    run: RunPaths, tmp_path: Path
) -> None:
    for step in (2, 1):
        moved = run.checkpoint(step).rename(tmp_path / f"disk_{step}")
        run.checkpoint(step).symlink_to(moved)
        linked = f"{run.checkpoint(step)} \\(found a link to {moved}, .*move the real one here"
        if step == 2:
            [note] = [note for note in plan(run).notes if "goes back to step_000001" in note]
            assert re.search(linked, note)
    run.events.unlink()
    with pytest.raises(CheckpointsLost, match=linked.replace("_000001", "_000002").replace("k_1", "k_2")):
        plan(run)


@pytest.mark.parametrize("large", [False, True])
def test_a_newest_checkpoint_that_is_gone_is_said_with_the_steps_done_again(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(resume_point, "MOST_READ", 1)
        found = plan(run)
        assert (found.resumes_from, found.resume_read) == ("step_000002", False), "not called good"
    shutil.rmtree(run.checkpoint(2))
    said = "step_000002 was verified and is gone: the run goes back to step_000001, and does step 2 again"
    assert any(said in note for note in plan(run).notes)
    config = run_config(tiers=(cold_tier(tmp_path / "cold"),))
    assert "looks for it in the tiers; without it" in resume_point.find_resume(config, run, [], None).note


def test_a_run_whose_checkpoints_are_gone_is_refused_and_keeps_its_configuration(
    run: RunPaths, tmp_path: Path
) -> None:
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointsAbsent, match="verified step_000002.*mount its file system"):
        plan(run)
    with pytest.raises(ConfigError):
        plan(run, "seed=77", begin_again=lambda _: True)
    found = resume_point.find_resume(run_config(tiers=(cold_tier(tmp_path / "cold"),)), run, [], None)
    assert "looks for one in the tiers, and ends with 17 without one" in found.note


def test_a_run_that_was_put_back_is_told_what_its_tier_has_of_its_own_future(
    run: RunPaths, tmp_path: Path
) -> None:
    config = run_config(tiers=(cold_tier(private_dir(tmp_path / "cold")),))
    newer = save(run, 6)
    assert sync(run, config, tiers=open_tiers(run, config)).ok
    shutil.rmtree(newer)
    found = resume_point.find_resume(config, run, [], None)
    assert (found.name, found.note) == ("step_000002", "")  # copied from here: the journal tells of it
    lines = [line for line in run.events.read_text().splitlines() if "step_000006" not in line]
    run.events.write_text("".join(f"{line}\n" for line in lines))
    found = resume_point.find_resume(config, run, [], None)
    assert found.note.startswith("the next start takes step_000006 from tier cold, newer than step_000002: ")


def test_a_run_begins_again_where_the_user_says_so(run: RunPaths) -> None:
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointsLost):
        plan(run, begin_again=lambda _: False)
    confirmed = plan(run, begin_again=lambda _: True)
    assert not run.from_nothing.exists()
    carry_out(confirmed, prepare_only=True)
    assert run.from_nothing.exists()
    assert read_events(run)[-1]["lost"] == "the journal: verified step_000002"
    assert plan(run).begins_again == "", "said once, and it has saved nothing since"


def test_a_directory_that_another_submit_is_making_is_no_stranger(tmp_path: Path) -> None:
    private_dir(tmp_path / "run/logs")
    with pytest.raises(PermissionRefused, match="something that is not a run"):
        check_run_dir(tmp_path / "run")
    with only_submitter(RunPaths(tmp_path / "run")), pytest.raises(Fenced, match="another submit is at work"):
        check_run_dir(tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"# nothing\n", b"name: [\n"])
def test_a_damaged_run_yaml_is_refused_with_the_copy_that_restores_it(run: RunPaths, content: bytes) -> None:
    written = run.run_yaml.read_bytes()
    run.run_yaml.write_bytes(b"")
    for load in (load_own, load_resolved):  # a process of the run
        with pytest.raises(
            ConfigError, match="configuration is empty.*config.yaml in one of its checkpoints"
        ):
            load(run.run_yaml)
    run.run_yaml.write_bytes(written)
    note_trained_with(run, load_resolved(run.run_yaml))
    run.run_yaml.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        plan_submission(run.root, [], cluster="local")
    command = str(caught.value.remedy).partition("`")[2].partition("`")[0]
    subprocess.run(shlex.split(command), check=True)
    assert plan_submission(run.root, [], cluster="local").resumes_from == "step_000002"


def test_data_that_is_accepted_without_its_record_is_shown_by_its_digests(tmp_path: Path) -> None:
    paths, data = RunPaths(tmp_path / "run"), tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text("{}\n")
    carry_out(plan(paths, f"data.root={data}"), prepare_only=True)
    append_event(paths, "started", attempt=1)
    staging = stage(paths, 1)
    commit(staging, manifest_of(staging, dataset_fingerprint="ab" * 32), attempt_check=owns_it)
    paths.fingerprint.unlink()
    shown: list[Drift] = []
    with pytest.raises(DatasetDrift):
        check_drift(plan(paths, f"data.root={data}"), lambda drift: bool(shown.append(drift)))
    assert re.search(r"digest \w{16} now, (ab){8} in the newest checkpoint", shown[0].changed[0])
    with pytest.raises(DatasetDrift, match="expected digest (ab){8}"):
        check_drift(plan(paths, f"data.root={data}"))
    carry_out(plan(paths, f"data.root={data}"), prepare_only=True, confirm_drift=lambda drift: True)
    [accepted] = [event for event in read_events(paths) if event["event"] == "force_resume"]
    assert accepted["changed"] == list(shown[0].changed)


@pytest.mark.parametrize("content", [b"", b"\0" * 9, b"[]"])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("attempt", "then `rm .*/attempt`"),
        ("rewards.json", "put the file back as it was"),
        ("orchestration.json", "cp -f .*/step_000002/orchestration.json .*/orchestration.json"),
    ],
)
def test_a_damaged_record_is_refused_before_a_job_is_queued(
    run: RunPaths, name: str, way: str, content: bytes
) -> None:
    write_file(run.root / name, content)
    (run.checkpoint(2) / "orchestration.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=way):
        plan(run)


def test_what_does_not_train_and_has_changed_is_refused_before_it_waits_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, model, reward = RunPaths(tmp_path / "run"), tmp_path / "model", tmp_path / "reward.py"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(b"1234")
    (model / "config.json").write_text("{}")
    reward.write_text("def f(): pass\n")
    (tmp_path / "template").write_text("{{ messages }}")
    was = fingerprint(model)
    checkpoint = paths.checkpoints / "step_000001"
    checkpoint.mkdir(parents=True)
    template = tmp_path / "template"
    shas = [sha256(path.read_bytes()).hexdigest() for path in (reward, template)]
    write_manifest(checkpoint, frozen={"reference": was.digest, "reward": shas[0], "chat_template": shas[1]})
    config = run_config(path=str(model), reward=f"python:{reward}:f", chat_template=str(template))

    def check() -> list[str]:
        return resume_point.check_frozen_inputs(config, paths, checkpoint.name)

    assert check() == []
    for path, other in ((weights, b"1235"), (reward, b"def f(): return 1\n"), (template, b"{{ other }}")):
        before = path.read_bytes()
        path.write_bytes(other)
        role = {weights: "reference", reward: "reward", template: "chat_template"}[path]
        with pytest.raises(DataError, match=f"is not what the run was trained with: {role}:"):
            check()
        path.write_bytes(before)
    # As `hf download` writes it anew.
    for beside in ("README.md", ".gitattributes", ".cache/huggingface/download/config.json.metadata"):
        (model / beside).parent.mkdir(parents=True, exist_ok=True)
        (model / beside).write_text("new\n")
    assert check() == []
    # Of a file that was copied, the run's copy has the former one; of a new run nothing has.
    reward.write_text("def f(): return 1\n")
    write_file(paths.code_record, b"")
    with pytest.raises(DataError, match="; --code run goes on .*update-reward.* and then --code run"):
        check()
    [branched] = resume_point.check_frozen_inputs(config, RunPaths(tmp_path / "new"), str(checkpoint))
    assert f"is not what the run was trained with: reward: {reward} has SHA-256" in branched
    ruled = run_config(path=str(model), reward="rule:arithmetic", chat_template=str(template))
    with pytest.raises(DataError, match=f"found rule:arithmetic, expected {shas[0]}"):
        resume_point.check_frozen_inputs(ruled, paths, checkpoint.name)
    reward.write_text("def f(): pass\n")
    private_dir(paths.frozen)
    record_tree(paths.frozen, was)
    (model / "generation_config.json").write_text("{}")
    with pytest.raises(DataError, match="generation_config.json is another, or new"):
        check()
    (model / "generation_config.json").unlink()
    # Too large to be read: the sizes of the record tell, and what they do not tell is said.
    monkeypatch.setattr(resume_point, "MOST_READ", 1)
    weights.write_bytes(b"1235")
    assert "not looked at: whether each byte of" in check()[0]
    weights.write_bytes(b"12345")
    with pytest.raises(DataError, match="has 5 bytes, not 4"):
        check()


def test_a_run_whose_run_yaml_is_gone_goes_on_after_the_named_command(run: RunPaths) -> None:
    note_trained_with(run, load_resolved(run.run_yaml))
    run.run_yaml.unlink()
    with pytest.raises(NotFound, match="configuration is gone") as caught:
        plan(run)
    subprocess.run((caught.value.remedy or "").split("`")[1], shell=True, check=True)
    assert plan(run).resumes_from == "step_000002"


@pytest.mark.parametrize("named", ["null", "step_000001", "PATH"])
def test_a_checkpoint_that_is_named_is_gone_back_to_once_for_each_word(
    run: RunPaths, tmp_path: Path, named: str
) -> None:
    if named == "PATH":
        named = str(save(RunPaths(private_dir(tmp_path / "other")), 1))
        private_dir(run.ledger)
        run.ledger_segment(1, 0).write_bytes(head(1, 0))
    word = f"checkpoint.resume_from={named}"

    def follow(found: SubmissionPlan) -> None:
        carry_out(found, prepare_only=True)
        note_trained_with(run, load_resolved(run.run_yaml))  # as the lead does at the start
        run.resume_once.unlink(missing_ok=True)

    went_back = plan_submission(run.root, [word], cluster="local")
    [note] = [note for note in went_back.notes if note.startswith(word)]
    assert f"step_000002 will be moved to {run.quarantine}" in note
    assert ("ledger" in note) is ("other" in named)
    carry_out(went_back, prepare_only=True)
    waiting = plan_submission(run.root, [], cluster="local")
    assert waiting.config.checkpoint.resume_from == went_back.config.checkpoint.resume_from, (
        "not followed yet"
    )
    follow(waiting)
    save(run, 6)
    shutil.copy(run.run_yaml, tmp_path / "my.yaml")
    for source in (run.root, tmp_path / "my.yaml", run.root):
        found = plan_submission(source, [], cluster="local")
        assert found.resumes_from == "step_000006"
        assert any(f"{word} was followed already" in note for note in found.notes)
        assert carry_out(found, prepare_only=True).changed == ()
        assert not run.resume_once.exists()
        follow(found)
    carry_out(plan_submission(run.root, [word], cluster="local"), prepare_only=True)
    assert run.resume_once.exists(), "a word goes back again"
    carry_out(plan_submission(run.root, ["checkpoint.resume_from=auto"], cluster="local"), prepare_only=True)
    assert not run.resume_once.exists()

"""Which code a submission takes into the run, and what the ranks are given of it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.journals import append_event
from tests.program.repos import git, new_repo
from verl_slurm.base.errors import ConfigError, DataError, SlurmRefused
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.show.story import tell
from verl_slurm.config.load import load
from verl_slurm.config.schema import RunConfig
from verl_slurm.journal.files import read_events
from verl_slurm.program.code_record import CodeRecord, read_record
from verl_slurm.program.programs import Moves
from verl_slurm.submit import submission
from verl_slurm.submit.checks import code_trees as checks
from verl_slurm.submit.checks.code_trees import plan_code
from verl_slurm.submit.relative_paths import Places, absolute
from verl_slurm.submit.submission import carry_out, plan_submission
from verl_slurm.submit.submission_plan import CodePlan, SubmissionPlan

pytestmark = pytest.mark.slow

CONFIG = "trainer: {backend: command, command: [CODE/train.py]}\ndistributed: {device: cpu}\n"


class Place:
    """A repository, a configuration beside it, and a run."""

    def __init__(self, root: Path) -> None:
        self.root, self.repo = root, new_repo(root / "repo", train="import parts\n", parts__loop="one\n")
        self.paths = RunPaths(root / "run")
        self.yaml = root / "my.yaml"
        self.yaml.write_text(CONFIG.replace("CODE", str(self.repo)))

    def plan(self, *words: str, **options: Any) -> SubmissionPlan:
        given = [f"run_dir={self.paths.root}", *words]
        return plan_submission(self.yaml, given, cluster="local", **options)

    def submit(self, *words: str, **options: Any) -> SubmissionPlan:
        plan = self.plan(*words, **options)
        carry_out(plan, prepare_only=True)
        return plan

    def begin(self) -> None:
        """Gives the run a rollout: it has something to lose."""
        self.paths.ledger.mkdir(mode=0o700)
        self.paths.ledger_segment(1, 0).write_bytes(bytes(100))
        append_event(self.paths, "started", attempt=1)

    def record(self) -> CodeRecord:
        record = read_record(self.paths)
        assert record is not None
        return record

    def ranks(self) -> Path:
        """Where the ranks' program is."""
        return Path(Moves.of(self.paths).config(load(self.paths.run_yaml)).trainer.command[0])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_ranks_get_the_copy_and_the_record_says_what_it_is(place: Place) -> None:
    (place.repo / "parts/loop.py").write_text("two\n")
    plan = place.submit()
    record = place.record()
    [tree] = record.trees
    assert (tree.root, tree.branch, tree.dirty) == (str(place.repo), "main", True)
    assert tree.commit == git(place.repo, "rev-parse", "HEAD")
    assert b"-one\n+two\n" in place.paths.code_diff(tree.diff).read_bytes()
    assert place.paths.code_diff(tree.diff).stat().st_mode & 0o777 == 0o600
    assert record.packages["msgspec"]
    assert record.python == sys.version.split()[0]
    assert plan.code.lines() == [
        f"{place.repo}, commit {tree.commit[:12]} (changed since), 2 files, 1 KB",
    ]
    assert place.ranks() == place.paths.code_tree(tree.digest) / "train.py"
    [told] = read_events(place.paths)
    assert tell(told).endswith(f"code: copied into the run from {plan.code.lines()[0]}")


def test_a_run_that_has_begun_asks_which_code_it_goes_on_with(place: Place) -> None:
    place.submit()
    first = place.ranks().parent
    place.begin()
    assert place.submit().code.kept
    (place.repo / "train.py").write_text("import verl_slurm\n")
    (place.repo / "parts/new.py").write_text("")
    with pytest.raises(ConfigError, match=r"1 added \(parts/new.py\).*--code run.*--code new") as refused:
        place.plan()
    assert "1 changed (train.py)" in str(refused.value)
    assert place.submit(code="run").code.kept
    assert place.ranks().parent == first
    notes = place.submit(code="new").code.notes
    assert [note.partition(":")[0] for note in notes] == ["takes the code as it is now"]
    assert place.ranks().read_text() == "import verl_slurm\n"
    assert (first / "train.py").read_text() == "import parts\n"  # checkpoints were trained with it
    assert len(read_events(place.paths)) == 3, "the start, and each copy"


def test_what_a_run_wrote_beside_its_program_is_no_change_of_its_code(place: Place) -> None:
    place.submit("code.max_mb=1")
    place.begin()
    (place.repo / "final").mkdir()
    (place.repo / "final" / "config.json").write_text("{}")
    (place.repo / "final" / "model.safetensors").write_bytes(bytes(1_500_000))
    code = place.submit("code.max_mb=1").code
    assert code.kept
    assert any("final/config.json" in note and "--code new takes it" in note for note in code.notes)
    with pytest.raises(ConfigError, match="too large"):
        place.plan("code.max_mb=1", code="new")
    (place.repo / "parts/new.py").write_text("")
    with pytest.raises(ConfigError, match=r"1 added \(parts/new.py\)"):
        place.plan("code.max_mb=1")


def test_before_a_run_has_begun_its_code_may_change(place: Place) -> None:
    with pytest.raises(ConfigError, match="leave out --code"):
        place.plan(code="run")  # a new one has none of its own to go on with
    place.submit()
    (place.repo / "train.py").write_text("edited\n")
    place.submit()
    assert place.ranks().read_text() == "edited\n"


def test_a_run_goes_on_with_its_copy_if_the_code_outside_is_gone(place: Place) -> None:
    place.submit()
    place.begin()
    place.repo.rename(place.root / "elsewhere")
    assert place.submit(code="run").notes
    assert place.ranks().is_file()


def test_nothing_is_copied_where_the_user_does_not_want_it(place: Place) -> None:
    place.submit("code.tree=null")
    assert place.record().trees == ()
    assert place.record().packages
    assert place.ranks() == place.repo / "train.py"
    assert not place.paths.code.exists()


def test_a_refused_submission_takes_its_copy_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise SlurmRefused("sbatch refused the job")

    place.submit()
    place.begin()
    before = sorted(place.paths.code.iterdir()), place.paths.code_record.read_bytes()
    (place.repo / "train.py").write_text("edited\n")
    monkeypatch.setattr(submission, "submit_job", refuse)
    with pytest.raises(SlurmRefused):
        carry_out(place.plan(code="new"))
    assert (sorted(place.paths.code.iterdir()), place.paths.code_record.read_bytes()) == before


def test_packages_that_have_changed_are_said_or_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.submit()
    place.begin()
    found = checks.look(sys.executable)
    other = type(found)(found.python, {**found.packages, "msgspec": "0.0.1"}, found.search)
    monkeypatch.setattr(checks, "look", lambda python: other)
    assert "msgspec" in place.plan().code.notes[0]
    assert "-> 0.0.1" in place.plan().code.notes[0]
    with pytest.raises(ConfigError, match="msgspec .* -> 0.0.1"):
        place.plan("code.on_drift=refuse")
    place.submit("code.on_drift=refuse", code="new")
    assert place.record().packages["msgspec"] == "0.0.1"


def test_secrets_of_the_configuration_the_run_and_its_data_are_never_copied(place: Place) -> None:
    for name in ("wandb_login", "hook_login", "data/rows.jsonl"):
        path = place.repo / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("sesame")
        path.chmod(0o600)
    git(place.repo, "add", "wandb_login")
    place.paths = RunPaths(place.repo / "out")
    words = (
        f"env_from_files.WANDB_API_KEY={place.repo}/wandb_login",
        f"hooks.webhook_token_file={place.repo}/hook_login",
        "hooks.webhook=https://example.org/x",
        f"data.root={place.repo}/data",
    )
    place.submit(*words)
    place.submit(*words)  # the run lies in the tree now
    [tree] = place.record().trees
    assert [*place.plan(*words).code.contents[0].fingerprint.files] == ["parts/loop.py", "train.py"]
    assert tree.diff == ""
    for folder, _, names in os.walk(place.paths.code):
        assert all(b"sesame" not in Path(folder, name).read_bytes() for name in names)


def test_where_the_command_prints_to_is_no_code(place: Place) -> None:
    words = ["submit", str(place.yaml), f"run_dir={place.paths.root}", "--cluster", "local", "--dry-run"]
    with (place.repo / "said.txt").open("wb") as said:
        argv = [sys.executable, "-m", "verl_slurm.cli", *words]
        subprocess.run(argv, check=True, stdout=said, stderr=said, timeout=60)
    assert ", 2 files, " in (place.repo / "said.txt").read_text()


def test_a_program_that_git_ignores_is_copied_with_its_directory(place: Place) -> None:
    (place.repo / ".gitignore").write_text("mine\n")
    (place.repo / "mine").mkdir()
    for name in ("go.py", "near.py"):
        (place.repo / "mine" / name).write_text("")
    place.submit(
        f"trainer.command=[{place.repo}/mine/go.py]", f"services.judge.command=[{place.repo}/mine/near.py]"
    )
    [tree] = place.record().trees
    assert (tree.root, tree.num_files, tree.commit) == (f"{place.repo}/mine", 2, "")
    # The program of a service is the submitted one, too.
    (place.repo / "mine/near.py").write_text("second")
    moved = Moves.of(place.paths).config(load(place.paths.run_yaml))
    assert Path(moved.services["judge"].command[0]).read_text() == ""


def test_a_repository_of_the_whole_home_is_not_the_programs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place.repo))
    (place.repo / "mine").mkdir()
    (place.repo / "mine/go.py").write_text("")
    place.submit(f"trainer.command=[{place.repo}/mine/go.py]")
    assert [tree.root for tree in place.record().trees] == [f"{place.repo}/mine"]
    with pytest.raises(ConfigError, match="holds other things"):
        place.plan()


def test_a_root_of_the_users_holds_its_programs(place: Place) -> None:
    place.submit(f"code.tree={place.root}/repo")
    assert place.record().trees[0].root == str(place.repo)
    (place.root / "other").mkdir()
    with pytest.raises(
        ConfigError, match="is not in the code that is copied: .*set code.tree to a directory"
    ):
        place.plan(f"code.tree={place.root}/other")
    left_out = [f"code.tree={place.root}/repo", "code.exclude=[train.py]"]
    with pytest.raises(ConfigError, match="is not in the code that is copied: .*; name it in code.include$"):
        place.plan(*left_out)
    assert place.plan(*left_out, "code.include=[train.py]").code.record.trees
    (place.repo / ".git/HEAD").unlink()
    with pytest.raises(ConfigError, match="git does not tell"):
        place.plan()
    place.plan(f"code.tree={place.repo}")
    with pytest.raises(ConfigError, match="no such directory"):
        place.plan(f"code.tree={place.root}/nowhere")


def test_a_word_of_the_command_that_is_not_copied_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.repo / ".gitignore").write_text("*.jsonl\n")
    (place.repo / "rows.jsonl").write_text("")
    (place.repo / "a.json").write_text("")
    monkeypatch.chdir(place.repo)
    for word in ("rows.jsonl", "--data=./rows.jsonl"):
        with pytest.raises(ConfigError, match=f"trainer.command.*write {place.repo}/rows.jsonl"):
            place.plan(f"trainer.command=[{place.repo}/train.py, {word}]")
    words = (f"{place.repo}/rows.jsonl", "a.json", "--lr=1", "parts", "out/new.txt", "..", ".")
    place.plan(f"trainer.command=[{place.repo}/train.py, {', '.join(words)}]")
    monkeypatch.chdir(place.root)
    place.plan(f"trainer.command=[{place.repo}/train.py, repo/rows.jsonl]")


def planned(config: RunConfig, tmp_path: Path) -> CodePlan:
    return plan_code(config, tmp_path, RunPaths(tmp_path / "run"), begun=False)


def config_of(tmp_path: Path, text: str) -> RunConfig:
    (tmp_path / "my.yaml").write_text(text)
    return load(tmp_path / "my.yaml")


def test_code_include_is_taken_beside_a_lone_reward(tmp_path: Path) -> None:
    for name in ("reward.py", "units.json"):
        (tmp_path / name).write_text("")
    text = f"model: {{path: m, reward: 'python:{tmp_path}/reward.py:f'}}\ndata: {{root: d}}\ncode: {{include: ['u*']}}"
    [content] = planned(config_of(tmp_path, text), tmp_path).contents
    assert [*content.fingerprint.files] == ["reward.py", "units.json"]


def test_the_runs_of_a_sweep_have_the_same_code(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="one")
    config = config_of(tmp_path, f"trainer: {{backend: command, command: [{repo}/train.py]}}")
    known: checks.TreesRead = {}
    plans = []
    for number in range(2):
        run = RunPaths(tmp_path / f"run{number}")
        plans.append(plan_code(config, tmp_path, run, begun=False, known=known))
        (repo / "train.py").write_text("edited meanwhile")
    assert plans[0].contents[0] is plans[1].contents[0]


@pytest.mark.parametrize(
    ("files", "trainer", "warned"),
    [
        ({"train": "Trainer().train()\n# no verl_slurm yet\n"}, "command: [CODE/train.py]", True),
        ({"train": "from verl_slurm import run\n"}, "command: [CODE/train.py]", False),
        (
            {"train": "import parts.loop\n", "parts__loop": "import verl_slurm\n"},
            "command: [CODE/train.py]",
            False,
        ),
        ({"train": ""}, "command: [CODE/train.py, --callback, verl_slurm.loops.lightning.X]", False),
        ({"train": "#" * 300_000}, "command: [CODE/train.py]", False),
        ({"train": ""}, "command: [-m, msgspec]", False),
        ({"train": ""}, "backend: ray, command: [CODE/train.py]", False),
        ({"train": ""}, "backend: verl, command: [CODE/train.py]", False),
    ],
)
def test_a_program_of_which_no_file_names_verl_slurm_is_warned_of(
    tmp_path: Path, files: dict[str, str], trainer: str, warned: bool
) -> None:
    """It was trained whole, up to four times, before anything was said."""
    repo = new_repo(tmp_path / "repo", **files)
    trainer = trainer if "backend" in trainer else f"backend: command, {trainer}"
    config = config_of(tmp_path, f"trainer: {{{trainer.replace('CODE', str(repo))}}}")
    notes = [note for note in planned(config, tmp_path).notes if "names verl_slurm" in note]
    assert len(notes) == warned
    assert all("verl_slurm.run, VerlSlurmCallback" in note and "installed package" in note for note in notes)


def test_a_reward_outside_of_a_work_tree_is_copied_by_itself(tmp_path: Path) -> None:
    for name in ("score.py", "huge.bin"):
        (tmp_path / name).write_text("")
    plan = planned(config_of(tmp_path, f"model: {{reward: 'python:{tmp_path}/score.py:f'}}"), tmp_path)
    assert [[*content.fingerprint.files] for content in plan.contents] == [["score.py"]]


def test_files_of_verls_settings_are_programs(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", score="", tools="")
    text = f"""
trainer: {{backend: verl}}
verl:
  custom_reward_function: {{path: score.py, name: f}}
  data: {{custom_cls: {{path: 'file://{repo}/tools.py'}}, train_files: /data/x.parquet}}
"""
    (repo / "my.yaml").write_text(text)
    config = absolute(load(repo / "my.yaml"), Places(tmp_path, repo / "my.yaml"))
    plan = planned(config, tmp_path)
    paths = RunPaths(tmp_path / "run")
    digest = plan.record.trees[0].digest
    moved = Moves(paths, plan.record).config(config).verl
    assert moved["custom_reward_function.path"] == f"{paths.code}/{digest}/score.py"
    assert moved["data.custom_cls.path"] == f"file://{paths.code}/{digest}/tools.py"
    assert moved["data.train_files"] == "/data/x.parquet"


def test_a_module_of_the_users_is_found_by_the_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = new_repo(tmp_path / "repo", mine__train="", mine____init__="")
    monkeypatch.setenv("PYTHONPATH", f"/opt/lib:{repo}")
    config = config_of(tmp_path, "trainer: {backend: command, command: [-m, mine.train, --lr, '1']}")
    plan = planned(config, tmp_path)
    assert [tree.root for tree in plan.record.trees] == [str(repo)]
    paths = RunPaths(tmp_path / "run")
    copy = paths.code_tree(plan.record.trees[0].digest)
    copy.mkdir(parents=True)
    moves = Moves(paths, plan.record)
    # In its place: what comes before it on the path still does.
    assert moves.search_path(f"/opt/lib:{repo}:/opt/more") == f"/opt/lib:{copy}:/opt/more"
    assert moves.config(config).trainer.command == config.trainer.command
    # An error names the file to correct, not its copy.
    assert (
        moves.as_submitted(f'File "{copy}/mine/train.py", line 3') == f'File "{repo}/mine/train.py", line 3'
    )
    # In an image they are found by PYTHONPATH alone, and the packages are the image's.
    text = "trainer: {backend: command, command: [-m, mine.train]}\nslurm: {container: {image: x.sif}}"
    record = planned(config_of(tmp_path, text), tmp_path).record
    assert [tree.root for tree in record.trees] == [str(repo)]
    assert (record.python, record.packages) == ("", {})
    installed = config_of(tmp_path, "trainer: {backend: command, command: [-m, msgspec]}")
    plan = planned(installed, tmp_path)
    assert plan.record.trees == ()
    assert plan.notes == (
        "msgspec is not copied: it is part of an installed package, or the nodes alone have it",
    )


def test_an_editable_install_is_searched_in_the_copy(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="", src__mine="")
    paths = RunPaths(tmp_path / "run")
    config = config_of(tmp_path, f"trainer: {{backend: command, command: [{repo}/train.py]}}")
    installed = checks.Installed("3", {}, (f"{repo}/src", "/opt/lib"))
    record = checks._present(config, [tmp_path], installed, {}, {}).record
    assert record.search == (f"{repo}/src",)
    copy = paths.code_tree(record.trees[0].digest)
    (copy / "src").mkdir(parents=True)
    assert Moves(paths, record).search_path("/opt/lib") == f"/opt/lib:{copy}/src"


def test_a_link_that_is_turned_after_the_submission_changes_nothing(tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        new_repo(tmp_path / name, train=name)
    (tmp_path / "current").symlink_to("v1")
    config = config_of(tmp_path, f"trainer: {{backend: command, command: [{tmp_path}/current/train.py]}}")
    plan = planned(config, tmp_path)
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("v2")
    paths = RunPaths(tmp_path / "run")
    [program] = Moves(paths, plan.record).config(config).trainer.command
    assert program == f"{paths.code}/{plan.record.trees[0].digest}/train.py"
    assert plan.record.trees[0].root == f"{tmp_path}/v1"


@pytest.mark.parametrize("damage", [Path.unlink, lambda record: record.write_text("{")])
def test_a_record_that_is_gone_or_damaged_is_made_again_where_the_user_says_so(
    place: Place, damage: Callable[[Path], object]
) -> None:
    place.submit()
    place.begin()
    (place.repo / "train.py").write_text("edited\n")
    damage(place.paths.code_record)
    for choice in (None, "run"):
        with pytest.raises(DataError, match="--code new"):
            place.plan(code=choice)
    place.submit(code="new")
    assert place.ranks().read_text() == "edited\n"


def run_again(place: Place) -> SubmissionPlan:
    """Submits the run by its directory, as days later."""
    plan = plan_submission(place.paths.root, [], cluster="local")
    carry_out(plan, prepare_only=True)
    return plan


@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "begun"])
def test_a_run_that_is_submitted_from_another_directory_works_where_it_did(
    place: Place, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.chdir(place.repo / "parts")
    (place.repo / "loop.py").write_text("import verl_slurm")
    place.submit()
    if begun:
        place.begin()
    for elsewhere in (place.root, place.repo):
        monkeypatch.chdir(elsewhere)
        assert run_again(place).code.notes == ()
        assert place.record().directory == f"{place.repo}/parts"
        assert Moves.of(place.paths).working_directory(copied=True) == f"{place.ranks().parent}/parts"
        assert Moves.of(place.paths).working_directory(copied=False) == f"{place.repo}/parts"


def test_a_new_run_from_another_directory_works_beside_its_configuration_where_that_is_copied(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.yaml = place.repo / "my.yaml"
    place.yaml.write_text("trainer: {backend: command, command: [train.py, --config=a.json, b.json]}")
    (place.repo / "a.json").write_text("{}")
    (place.repo / "loop.py").write_text("import verl_slurm")
    (place.root / "elsewhere").mkdir()
    monkeypatch.chdir(place.root / "elsewhere")
    [note] = place.submit().code.notes
    assert (
        note
        == f"the program works in {place.repo}, beside the configuration: {Path.cwd()} is not copied with it"
    )
    assert place.record().directory == str(place.repo)
    (Path.cwd() / "b.json").write_text("{}")
    # The words were written for this directory, or the command line has them.
    [note] = place.submit().code.notes
    assert f"works in {Path.cwd()}; --config=a.json of trainer.command: beside the configuration" in note
    assert "b.json of trainer.command: there and not beside" in note
    assert place.submit(f"trainer.command=[{place.repo}/train.py, a.json]").code.notes == ()
    assert place.record().directory == str(Path.cwd())
    [note] = place.submit("code.tree=null").code.notes
    assert f"write absolute paths, or submit in {place.repo}" in note


def test_a_working_directory_that_is_gone_from_another_directory_is_said_before_the_queue(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.root / "work").mkdir()
    monkeypatch.chdir(place.root / "work")
    place.submit()
    place.begin()
    monkeypatch.chdir(place.root)
    (place.root / "work").rmdir()
    assert any(
        f"{place.root}/work, where the program works, is not here" in note
        for note in run_again(place).code.notes
    )

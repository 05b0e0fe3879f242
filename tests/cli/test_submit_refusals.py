"""Bad input: one clear line with its remedy, its exit code, and nothing left behind."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from verl_slurm.exit_codes import ExitCode

pytestmark = pytest.mark.usefixtures("nothing_left")
Cli = Callable[..., Any]
User = Callable[[], AbstractContextManager[None]]


def test_a_missing_configuration_is_refused(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "confg.yaml", "--cluster", "local")
    assert result.code == ExitCode.CONFIG
    assert "no such configuration: confg.yaml" in result.error
    assert "config.yaml" in result.error


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train.stepz=3"], "no such key: override train.stepz=3: train.stepz (expected train.steps)"),
        (["train.steps=many"], "wrong value: override train.steps=many (found 'many', text, expected int)"),
        (
            ["model.path=builtin:huge"],
            "no such built-in: model.path (found builtin:huge, expected builtin:tiny)",
        ),
        (["model.reward=rule:vibes"], "expected rule:arithmetic"),
        (["distributed.dp_size=3"], "the same number of ranks on every node"),
    ],
)
def test_a_wrong_configuration_is_refused(workplace: Path, cli: Cli, words: list[str], part: str) -> None:
    result = cli("submit", "config.yaml", *words, "--cluster", "local")
    assert result.code == ExitCode.CONFIG
    assert part in result.error


def test_a_refusal_is_json_where_json_was_asked_for(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "train.stepz=3", "--json")
    assert result.json["exit_code"] == ExitCode.CONFIG
    assert "train.steps" in result.json["error"]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda root: None, "no such data directory"),
        (lambda root: root.touch(), "found a file"),
        (lambda root: root.mkdir(), "the data directory is empty"),
        (lambda root: (root.mkdir(), (root / "a.jsonl").touch()), "the data is empty"),
        (lambda root: (root.mkdir(), (root / "a.jsonl").write_text("{nonsense\n")), "not JSON: "),
        (
            lambda root: (root.mkdir(), (root / "a.jsonl").write_text('{"question": "1"}\n')),
            "text under 'prompt'",
        ),
        (lambda root: (root.mkdir(), (root / "a.jsonl").write_text("3\n")), "found int"),
    ],
    ids=["missing", "a file", "empty", "an empty file", "not JSON", "another key", "no object"],
)
def test_missing_or_empty_data_is_refused(
    workplace: Path,
    cli: Cli,
    tmp_path_factory: pytest.TempPathFactory,
    make: Callable[[Path], object],
    part: str,
) -> None:
    root = tmp_path_factory.mktemp("bad") / "data"
    make(root)
    result = cli("submit", "config.yaml", f"data.root={root}", "--cluster", "local")
    assert result.code == ExitCode.DATA
    assert part in result.error
    assert "set data." in result.error


@pytest.mark.parametrize(
    ("files", "part"),
    [([], "not a model directory"), (["config.json"], "has no weights")],
    ids=["no config", "no weights"],
)
def test_a_directory_that_is_no_model_is_refused(
    workplace: Path, cli: Cli, tmp_path_factory: pytest.TempPathFactory, files: list[str], part: str
) -> None:
    root = tmp_path_factory.mktemp("model")
    for name in files:
        (root / name).touch()
    for key in ("model.path=", "model.reward=classifier:"):
        result = cli("submit", "config.yaml", f"{key}{root}", "--cluster", "local")
        assert result.code == ExitCode.DATA
        assert part in result.error


def test_a_missing_model_is_refused(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "model.path=/nowhere", "--cluster", "local")
    assert result.code == ExitCode.DATA
    assert "no such model directory: /nowhere" in result.error


@pytest.fixture
def closed_place() -> Iterator[Path]:
    """A directory below which an ordinary user may neither write nor read."""
    base = Path(tempfile.mkdtemp(prefix="vs-closed-"))
    base.chmod(0o755)
    (base / "locked").mkdir()
    (base / "locked" / "a.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (base / "locked" / "my.yaml").write_text("seed: 1\n")
    (base / "locked" / "a.jsonl").chmod(0)
    (base / "locked" / "my.yaml").chmod(0)
    (base / "locked").chmod(0o555)
    try:
        yield base / "locked"
    finally:
        (base / "locked").chmod(0o755)
        shutil.rmtree(base)


def test_no_write_permission_is_refused_before_anything_is_made(
    workplace: Path, cli: Cli, closed_place: Path, ordinary_user: User
) -> None:
    from verl_slurm.errors import PermissionRefused
    from verl_slurm.submit.preflight import check_run_dir

    with ordinary_user(), pytest.raises(PermissionRefused, match="no write permission in") as caught:
        check_run_dir(closed_place / "runs" / "demo")
    assert caught.value.exit_code is ExitCode.PERMISSION
    assert "choose another run_dir" in caught.value.one_line()
    assert not (closed_place / "runs").exists()


def test_a_kernel_file_system_is_no_place_for_a_run_even_for_root(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "run_dir=/proc/self/run", "--cluster", "local")
    assert result.code == ExitCode.PERMISSION
    assert "the run directory cannot be written: /proc/self/run" in result.error


def test_an_unreadable_configuration_and_unreadable_data_are_refused(
    workplace: Path, closed_place: Path, ordinary_user: User
) -> None:
    import msgspec

    from verl_slurm.config.load import load
    from verl_slurm.config.schema import DataConfig, RunConfig
    from verl_slurm.errors import ConfigError, DataError
    from verl_slurm.submit.inputs import check_data

    config = msgspec.structs.replace(RunConfig(), data=DataConfig(root=str(closed_place)))
    with ordinary_user():
        with pytest.raises(ConfigError, match=r"cannot be read.*Permission denied"):
            load(closed_place / "my.yaml")
        with pytest.raises(DataError, match=r"cannot be read.*Permission denied.*chmod u\+r"):
            check_data(config)


def test_a_file_in_the_way_of_the_run_directory_is_refused(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "run_dir=config.yaml/run", "--cluster", "local")
    assert result.code == ExitCode.PERMISSION
    assert "a file is in the way" in result.error


def test_a_directory_of_something_else_is_not_taken_for_a_run(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "run_dir=data", "--cluster", "local")
    assert result.code == ExitCode.PERMISSION
    assert "holds something that is not a run" in result.error


@pytest.mark.usefixtures("without_slurm")
def test_no_slurm_is_refused_where_slurm_was_asked_for(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "--cluster", "slurm")
    assert result.code == ExitCode.NO_SLURM
    assert "Slurm's commands are not here" in result.error
    assert "--cluster local" in result.error


@pytest.mark.slurm
def test_a_slurm_that_does_not_answer_is_never_replaced_by_this_machine(
    workplace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("no Slurm installed")
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
    result = cli("submit", "config.yaml")
    assert result.code == ExitCode.NO_SLURM
    assert "Slurm does not answer" in result.error


def test_an_unwritten_directory_for_a_status_is_not_a_run(workplace: Path, cli: Cli) -> None:
    for command in ("status", "watch", "logs", "cancel", "requeue", "checkpoints"):
        result = cli(command, "data")
        assert result.code == ExitCode.NOT_FOUND
        assert "not a run directory" in result.error


def test_a_mistyped_command_is_answered_with_the_nearest(workplace: Path, cli: Cli) -> None:
    result = cli("stauts", "data")
    assert result.code == ExitCode.USAGE
    assert "Did you mean status?" in result.err


def test_a_dry_run_leaves_nothing_behind(workplace: Path, cli: Cli) -> None:
    result = cli("submit", "config.yaml", "--cluster", "local", "--dry-run")
    assert result.code == 0
    assert "-m submitit.core._submit" in result.out

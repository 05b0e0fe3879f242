"""What the lead finds of the user's code and packages before the ranks start."""

import sys
from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.lead.attempt_start import check_code

from tests.journals import append_event
from verl_slurm.base.errors import ConfigError, DataError, PermissionRefused
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import CodeConfig, RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.program.code_record import CodeRecord, CodeTree, read_record
from verl_slurm.program.copying import copy_tree, read_tree
from verl_slurm.program.installed import look
from verl_slurm.program.programs import Moves


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir(mode=0o700)
    return RunPaths(tmp_path / "run")


def write(paths: RunPaths, record: CodeRecord) -> None:
    paths.code_record.write_bytes(msgspec.json.encode(record))


def test_a_run_without_a_record_is_left_alone(paths: RunPaths) -> None:
    assert check_code(paths, RunConfig()) == []


@pytest.mark.scenario("L17")
def test_a_damaged_copy_is_refused_and_a_further_module_is_told(paths: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    digest = copy_tree(paths, tmp_path, read_tree(tmp_path, ["train.py"]))
    write(paths, CodeRecord(trees=(CodeTree(root=str(tmp_path), digest=digest, num_files=1, num_bytes=0),)))
    assert check_code(paths, RunConfig()) == []
    (paths.code_tree(digest) / "random.py").touch()
    [told] = check_code(paths, RunConfig())
    assert isinstance(told, ev.Warned)
    assert "1 file beside the submitted ones that Python may import: random.py" in told.text
    (paths.code_tree(digest) / "train.py").unlink()
    with pytest.raises(DataError, match=r"1 removed \(train\.py\)"):
        check_code(paths, RunConfig())


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"format": 2}', '{"unknown": 1}', '{"programs": {"/x": "../x"}}'),
        '{"trees": [{"root": "/", "digest": "../x", "num_files": 1, "num_bytes": 1}]}',
    ],
)
def test_a_record_that_cannot_be_read_is_refused(paths: RunPaths, text: str) -> None:
    paths.code_record.write_text(text)
    with pytest.raises(DataError, match="record of the run's code"):
        check_code(paths, RunConfig())


def test_a_record_that_others_could_have_written_is_not_run_by(paths: RunPaths) -> None:
    write(paths, CodeRecord())
    paths.code_record.chmod(0o666)
    with pytest.raises(PermissionRefused, match="programs are not started"):
        check_code(paths, RunConfig())
    assert read_record(paths, to_look=True) == CodeRecord()


@pytest.mark.slow
def test_packages_are_compared_with_those_of_the_submission(paths: RunPaths) -> None:
    now = look(sys.executable)
    write(paths, CodeRecord(python=now.python, packages=now.packages))
    assert check_code(paths, RunConfig()) == []
    write(paths, CodeRecord(python=now.python, packages=now.packages | {"msgspec": "0.1", "gone": "2"}))
    [told] = check_code(paths, RunConfig())
    assert isinstance(told, ev.Warned)
    changed = f"gone 2 -> none; msgspec 0.1 -> {now.packages['msgspec']}"
    assert (told.topic, told.text) == ("packages", f"not those of the submission: {changed}")
    with pytest.raises(ConfigError, match="gone 2 -> none"):
        check_code(paths, RunConfig(code=CodeConfig(on_drift="refuse")))


def test_packages_that_the_submission_could_not_ask_for_are_not_compared(paths: RunPaths) -> None:
    write(paths, CodeRecord())
    assert check_code(paths, RunConfig(code=CodeConfig(on_drift="refuse"))) == []


@pytest.mark.scenario("L17")
@pytest.mark.parametrize("left", ["the copy", "the journal"])
def test_a_record_that_is_gone_lets_nothing_else_run_where_code_was_copied(
    paths: RunPaths, tmp_path: Path, left: str
) -> None:
    if left == "the copy":
        (tmp_path / "train.py").write_text("")
        copy_tree(paths, tmp_path, read_tree(tmp_path, ["train.py"]))
    else:
        append_event(paths, "notice", topic="code", text=f"copied into the run from {tmp_path}, 1 file, 1 KB")
    for read in (Moves.of, lambda run: check_code(run, RunConfig())):
        with pytest.raises(DataError, match=f"submit {paths.root} --code new"):
            read(paths)

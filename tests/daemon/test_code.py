"""What the lead finds of the user's code and packages before the ranks start."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
from verl_slurm_daemon.agent import node_start
from verl_slurm_daemon.agent.agent_log import AgentLog
from verl_slurm_daemon.agent.node_start import NodeStart
from verl_slurm_daemon.lead.attempt_start import check_code

from tests.builders import run_config
from tests.journals import append_event
from verl_slurm.base.errors import ConfigError, DataError, PermissionRefused
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import CodeConfig, RunConfig
from verl_slurm.journal import events as ev
from verl_slurm.program.code_record import CodeRecord, CodeTree, read_record
from verl_slurm.program.copying import copy_tree, read_tree
from verl_slurm.program.installed import look
from verl_slurm.program.programs import Moves
from verl_slurm.wire.lead_file import LeadAddress
from verl_slurm.wire.messages import Launch


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


@pytest.mark.parametrize("copied", [True, False], ids=["in the copy", "where nothing was copied"])
def test_a_program_works_where_it_was_first_submitted(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    first, later = private_dir(tmp_path / "first"), private_dir(tmp_path / "later")
    (first / "train.py").write_text("")
    digest = copy_tree(paths, first, read_tree(first, ["train.py"]))
    trees = [CodeTree(root=str(first), digest=digest, num_files=1, num_bytes=0)] * copied
    write(paths, CodeRecord(trees=tuple(trees), directory=str(first)))
    config = run_config(backend="command", command=("train.py",))
    for folder in (paths.control, paths.logs):
        private_dir(folder)
    monkeypatch.chdir(later)
    monkeypatch.setattr(node_start, "ranks_argv", lambda *_: ["/bin/sh", "-c", "pwd; echo $PWD"])
    address = LeadAddress(attempt=1, restart=0, host="127.0.0.1", port=1, token="00" * 32)
    start = NodeStart(paths, config, address, 0, paths.control, AgentLog(tmp_path / "said", "agent"), print)

    async def works_in() -> list[str]:
        launch = Launch(restart=1, attempt=1, node_rank=0, master_addr="", master_port=0, resume="")
        await (await start.launch(launch)).wait()
        return start.log.read_text().split()

    assert asyncio.run(works_in()) == [str(paths.code_tree(digest) if copied else first)] * 2


def test_a_working_directory_that_is_not_there_is_told(paths: RunPaths) -> None:
    write(paths, CodeRecord(directory="/nowhere"))
    assert check_code(paths, RunConfig()) == [], "the trainer reads nothing by a relative name"
    [told] = check_code(paths, run_config(backend="command", command=("train.py",)))
    assert isinstance(told, ev.Warned)
    assert (
        told.text
        == "/nowhere, where the program works, is not here: relative names go by the job's directory"
    )

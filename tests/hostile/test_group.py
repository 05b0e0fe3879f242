"""`group`: what its members can read of a run is its status, numbers and logs. A real lead and agent, no torch."""

import grp
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.run_without_torch import Stage
from tests.harness import ROOT
from tests.hostile.another_user import NOBODY, WITH_OUR_PACKAGES, needs_another_user, python_with
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import append_line, open_log, open_to_group, private_dir, write_file
from verl_slurm.config.load import parse_config
from verl_slurm.submit.checks.run_directory import check_group

GROUP = "users"
LOOK = """
import json, os, sys
found = []
for folder, _, names in os.walk("."):
    for name in names:
        path = os.path.join(folder, name)
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            found.append(os.path.relpath(path))
        except OSError:
            pass
        assert not os.access(path, os.W_OK), path
    assert not os.access(folder, os.W_OK), folder
print(json.dumps(sorted(found)))
"""


def _seen_by_a_member(run: Path) -> set[str]:
    """What another user with the group `GROUP` can open; from inside, as the directories above are the test's own."""
    argv = ["setpriv", f"--reuid={NOBODY}", f"--regid={grp.getgrnam(GROUP).gr_gid}", "--clear-groups"]
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    done = subprocess.run(
        [*argv, python, "-I", "-S", "-c", LOOK], cwd=run, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def _run_that_was_ended(tmp_path: Path, *words: str) -> Path:
    stage = Stage(tmp_path, *words)
    log = os.open(stage.paths.logs / "7_0_log.out", os.O_WRONLY | os.O_CREAT, 0o600)  # as slurmstepd has it
    (stage.paths.logs / "7_submitted.pkl").write_bytes(b"")
    (stage.paths.logs / "7_submitted.pkl").chmod(0o600)
    try:
        lead = stage.lead(stdout=log)
        # The lead's own name for its job, which nobody knows before.
        begun = stage.wait("first_rollout")
        (stage.paths.logs / "7_0_log.out").rename(stage.paths.logs / f"{begun['job_id']}_0_log.out")
        lead.terminate()
        stage.end()
    finally:
        os.close(log)
        stage.close()
    return stage.paths.root


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that others can pass through, unlike the test's own."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o711)
    yield place
    shutil.rmtree(place)


@needs_another_user
@pytest.mark.scenario("M08")
def test_members_read_status_numbers_and_logs_and_nothing_else_and_strangers_nothing(reachable: Path) -> None:
    (reachable / "stage").mkdir()
    run = _run_that_was_ended(reachable / "stage", f"group={GROUP}")
    (reachable / "stage").chmod(0o711)
    seen = _seen_by_a_member(run)
    assert {"events.jsonl", "run.yaml", "status.json"} <= seen
    for ending in ("_0_log.out", ".agent.log", ".log"):
        assert any(name.endswith(ending) for name in seen), ending
    assert {name.partition("/")[0] for name in seen if "/" in name} == {"logs"}
    assert not [name for name in seen if name.startswith(".") or name.endswith(".pkl")]
    for command in (["status"], ["logs"], ["watch", "--json"]):
        _only_members_may(command, run)
    # Without the key nobody reads anything, not even of a run that had it.
    for folder in (run, run / "logs"):
        open_to_group(folder, None)
    for path in (run, *run.rglob("*")):
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path


def _only_members_may(command: list[str], run: Path) -> None:
    program = (
        f"{WITH_OUR_PACKAGES}sys.path.append({str(ROOT)!r})\n"
        f"from verl_slurm.cli.__main__ import main; sys.exit(main({[*command, str(run)]!r}))"
    )
    found = []
    for group in (grp.getgrnam(GROUP).gr_gid, NOBODY):
        argv = python_with("msgspec", "click")
        words = [f"--regid={group}" if word.startswith("--regid=") else word for word in argv]
        done = subprocess.run(
            [*words, "-c", program], cwd="/", capture_output=True, text=True, check=False, timeout=120
        )
        found.append((done.returncode, done.stdout + done.stderr))
        assert "Traceback" not in done.stderr, done.stderr
    member, stranger = found
    assert member[0] in (ExitCode.OK, ExitCode.CANCELLED), member
    assert "step_000001" in member[1]
    assert stranger[0] == ExitCode.PERMISSION, stranger


def test_files_take_their_mode_from_a_folder_that_was_opened_on_purpose(tmp_path: Path) -> None:
    folder = private_dir(tmp_path / "folder")
    gid = os.getegid()
    write_file(folder / "before.json", b"")
    (folder / "a.pkl").touch(mode=0o600)
    open_to_group(folder, gid)
    private_dir(folder)  # each start does so
    write_file(folder / "after.json", b"")
    write_file(folder / ".hidden", b"")
    append_line(folder / "lines.jsonl", b"{}")
    os.close(open_log(folder / "some.log"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    shared = dict.fromkeys(("before.json", "after.json", "lines.jsonl", "some.log"), 0o640)
    assert modes == shared | {".hidden": 0o600, "a.pkl": 0o600}
    assert {path.stat().st_gid for path in folder.iterdir()} == {gid}


@pytest.mark.parametrize("mode", [0o750, 0o770, 0o2770, 0o755])
def test_a_folder_that_is_open_by_accident_is_closed(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    private_dir(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    write_file(folder / "a.json", b"")
    assert stat.S_IMODE((folder / "a.json").stat().st_mode) == 0o600


def test_a_group_that_is_not_there_is_refused_with_the_users_own() -> None:
    with pytest.raises(ConfigError) as caught:
        check_group(parse_config(b"", "my.yaml", ["group=no-such-group"]))
    mine = grp.getgrgid(os.getegid()).gr_name
    assert caught.value.one_line().startswith("no such group: group (found no-such-group, expected one of ")
    assert mine in caught.value.one_line()


def test_a_group_of_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = next(group for group in grp.getgrall() if group.gr_gid not in {os.getegid(), *os.getgroups()})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="you are no member of the group"):
        check_group(parse_config(b"", "my.yaml", [f"group={other.gr_name}"]))


def test_a_webhook_whose_address_is_the_secret_is_not_shown_to_a_group(tmp_path: Path) -> None:
    words = [f"group={grp.getgrgid(os.getegid()).gr_name}", "hooks.webhook=https://example.org/sesame"]
    with pytest.raises(ConfigError, match="members of the group would read the webhook's address") as refused:
        check_group(parse_config(b"", "my.yaml", words))
    assert "sesame" not in refused.value.one_line()
    check_group(parse_config(b"", "my.yaml", [*words, f"hooks.webhook_token_file={tmp_path}/token"]))
    check_group(parse_config(b"", "my.yaml", words[1:]))


def test_a_folder_on_the_way_that_keeps_the_members_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    name = grp.getgrgid(os.getegid()).gr_name
    config = parse_config(b"", "my.yaml", [f"group={name}", f"run_dir={tmp_path}/mine/run"])
    checked, note = [one.line for one in check_group(config)]
    assert checked == f"group {name}"
    assert "will not reach the run: " in note

"""What a child of ours takes from its surroundings: its search path, and where it makes its private directory."""

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from verl_slurm_daemon.agent.rank_socket import RankSocket

from tests.hostile.another_user import NOBODY, python_with
from tests.many_runs import make_run
from verl_slurm.base.errors import WireError
from verl_slurm.wire.client import SOCKET_NAME, RankClient
from verl_slurm.wire.control_page import PAGE_NAME, ControlPage
from verl_slurm.wire.messages import StoreCall
from verl_slurm.wire.store_line import StoreLine

pytestmark = pytest.mark.scenario("SEC13")

RESTORE = """
import sys
from pathlib import Path
from verl_slurm_daemon.lead.tier_child import restore_newest
from verl_slurm.base.paths import RunPaths
try:
    restore_newest(RunPaths(Path(sys.argv[1])))
except Exception as error:
    print(error)
"""


def test_what_brings_checkpoints_back_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    planted, witness = tmp_path / "planted", tmp_path / "witness"
    planted.mkdir()
    for name in ("msgspec", "json", "argparse", "ruamel"):
        (planted / f"{name}.py").write_text(f"open({str(witness)!r}, 'a').write(__name__)\n")
    paths = make_run(tmp_path / "run")
    # -P is handed down by no interpreter; PYTHONSAFEPATH, which a lead sets, would hide what is asked here.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    argv = [sys.executable, "-P", "-c", RESTORE, str(paths.root)]
    done = subprocess.run(
        argv, cwd=planted, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert not witness.exists(), witness.read_text()
    assert "No module named" not in done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("whose", ["another user's", "writable by everybody", "below such a one"])
def test_an_agent_makes_no_directory_where_others_could_exchange_it(
    whose: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = short_dir / "o" / "t"
    place.mkdir(parents=True)
    monkeypatch.setenv("SLURM_TMPDIR", str(place))
    door = RankSocket(lambda _: None, 1)
    assert door.directory.parent == place, "a place of ours is taken"
    door.close()
    if whose == "another user's":
        os.chown(place, NOBODY, NOBODY)
    else:
        (place.parent if whose == "below such a one" else place).chmod(0o777)
    door = RankSocket(lambda _: None, 1)
    try:
        assert door.directory.parent != place
        assert list(place.iterdir()) == []
    finally:
        door.close()


@pytest.mark.parametrize("length", [42, 43, 59, 90])
def test_an_agent_s_socket_has_a_name_that_fits_whatever_tmpdir_is(
    length: int, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's own scratch is often deep. The agents failed there, and the run said "did not start in time".

    vLLM's sockets lie in the same directory and have the longest names: a UUID's 36 characters.
    """
    (deep := short_dir / ("9" * (length - len(str(short_dir)) - 1))).mkdir(mode=0o700)
    for variable in ("TMPDIR", "SLURM_TMPDIR"):
        monkeypatch.setenv(variable, str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what tempfile has found out before
    door = RankSocket(lambda _: None, 1)
    try:
        assert (deep in door.directory.parents) == (length == 42)
        assert len(f"{door.directory}/{uuid.uuid4()}") <= 107
        assert (door.directory / SOCKET_NAME).is_socket()
    finally:
        door.close()


ANSWERS = """
import os, socket, sys, time
for name, kind in (("store.sock", socket.SOCK_STREAM), ("agent.sock", socket.SOCK_SEQPACKET)):
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(f"{sys.argv[1]}/{name}")
    os.chmod(f"{sys.argv[1]}/{name}", 0o777)
    listener.listen()
    globals()[name] = listener
print("listens", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_rank_says_nothing_to_another_users_agent(short_dir: Path) -> None:
    control = short_dir / "c"
    control.mkdir()
    short_dir.chmod(0o755)
    control.chmod(0o777)
    argv = [*python_with("socket"), "-c", ANSWERS, str(control)]
    eve = subprocess.Popen(argv, cwd="/", stdout=subprocess.PIPE, text=True)
    try:
        assert eve.stdout is not None
        assert eve.stdout.readline() == "listens\n"
        with pytest.raises(WireError, match="another user answers"):
            StoreLine(control).call(StoreCall(call=0, op="count", keys=()))
        ControlPage.create(control / PAGE_NAME)
        with pytest.raises(WireError, match="another user answers"):
            RankClient.connect(control)
        os.chown(control / PAGE_NAME, NOBODY, NOBODY)
        with pytest.raises(WireError, match="control page"):
            RankClient.connect(control)
    finally:
        eve.kill()
        eve.communicate()

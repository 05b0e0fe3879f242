"""What a child of ours takes from its surroundings: its search path, and where it makes its private directory."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from verl_slurm_daemon.rank_socket import RankSocket

from tests.hostile.another_user import NOBODY
from tests.many_runs import make_run
from verl_slurm.wire.client import SOCKET_NAME

pytestmark = pytest.mark.scenario("SEC13")

RESTORE = """
import sys
from pathlib import Path
from verl_slurm_daemon.tier_child import restore_newest
from verl_slurm.paths import RunPaths
try:
    restore_newest(RunPaths(Path(sys.argv[1])))
except Exception as error:
    print(error)
"""


def test_what_brings_checkpoints_back_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    planted, witness = tmp_path / "planted", tmp_path / "witness"
    planted.mkdir()
    for name in ("msgspec", "json", "argparse", "yaml"):
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
@pytest.mark.parametrize("whose", ["another user's", "writable by everybody"])
def test_an_agent_makes_no_directory_where_others_could_exchange_it(
    whose: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = short_dir / "t"
    place.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(place))
    door = RankSocket(lambda _: None, 1)
    assert door.directory.parent == place, "a place of ours is taken"
    door.close()
    place.chmod(0o777)
    if whose == "another user's":
        place.chmod(0o755)
        os.chown(place, NOBODY, NOBODY)
    door = RankSocket(lambda _: None, 1)
    try:
        assert door.directory.parent != place
        assert list(place.iterdir()) == []
    finally:
        door.close()


def test_an_agent_s_socket_has_a_name_that_fits_whatever_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's own scratch is often deep. The agents failed there, and the run said "did not start in time"."""
    (deep := tmp_path / ("scratch-of-the-job-" + "9" * 60)).mkdir(mode=0o700)
    for variable in ("TMPDIR", "SLURM_TMPDIR"):
        monkeypatch.setenv(variable, str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what tempfile has found out before
    door = RankSocket(lambda _: None, 1)
    try:
        assert deep not in door.directory.parents
        assert (door.directory / SOCKET_NAME).is_socket()
    finally:
        door.close()

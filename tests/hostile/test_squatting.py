"""Names that another user has made before us: refused by owner, nothing followed, nothing removed.

He is uid 65534 (`setpriv`). Each place is one in which others may make names, 1777 as /tmp is. `fs.protected_symlinks`
may be 0: nothing here relies on it.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from verl_slurm_daemon.agent import rank_socket
from verl_slurm_daemon.agent.rank_socket import RankSocket
from verl_slurm_daemon.lead.nodes_copies import run_bring_home

from tests.cli.conftest import (
    Cli,
    cli as cli,  # a fixture
    workplace as workplace,
)
from tests.cli.test_checkpoints import save
from tests.daemon.test_second_copy import Node, node as node
from tests.hostile.another_user import NOBODY, PYTHON_OF_NOBODY, needs_another_user
from tests.local_runs import lead, until
from verl_slurm.base.errors import KeyRefused, PermissionRefused, TierError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import append_line, make_private, private_dir, read_private, write_file
from verl_slurm.base.keys import new_key_file, read_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.local_copy import list_parts, prune_parts
from verl_slurm.submit.checks.run_directory import check_run_dir
from verl_slurm.wire.control_page import ControlPage
from verl_slurm.wire.http import read_token

pytestmark = [pytest.mark.scenario("M06"), needs_another_user, pytest.mark.slow]

KINDS = ("directory", "open directory", "link", "dangling link", "fifo", "file")

# Run as that user: what he makes is his.
SQUAT = """
import os, sys
os.umask(0)
kind, name, to = sys.argv[1:]
if kind == "directory":
    os.mkdir(name, 0o755)
elif kind == "open directory":
    os.mkdir(name, 0o777)
elif kind in ("link", "dangling link"):
    os.symlink(to if kind == "link" else to + "-not-there", name)
elif kind == "fifo":
    os.mkfifo(name, 0o666)
else:
    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
"""


def squat(kind: str, name: Path, to: Path) -> None:
    subprocess.run(
        [
            *PYTHON_OF_NOBODY,
            *("-c", SQUAT, kind, str(name), str(to)),
        ],
        check=True,
        cwd="/",
    )


def facts(path: Path) -> tuple[int, int, int, str]:
    """Who owns it, what it is, and where it leads: what a squatter would see of our having touched it."""
    info = path.lstat()
    return info.st_uid, info.st_mode, info.st_ino, os.readlink(path) if path.is_symlink() else ""


def inventory(root: Path) -> dict[str, tuple[int, int, int, str]]:
    return {str(path): facts(path) for path in (root, *root.rglob("*"))}


@pytest.fixture
def scratch(short_dir: Path) -> Path:
    """A place as /tmp is; the way there is open."""
    short_dir.chmod(0o711)
    place = short_dir / "scratch"
    place.mkdir()
    place.chmod(0o1777)
    return place


@pytest.fixture
def precious(short_dir: Path) -> Path:
    """Something of ours that a link would lead to."""
    place = private_dir(short_dir / "precious")
    write_file(place / "kept", b"precious")
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_ours_is_none_of_another_user_s(kind: str, scratch: Path, precious: Path) -> None:
    name = scratch / "run"
    squat(kind, name, precious)
    before = facts(name), inventory(precious)
    for make in (private_dir, lambda path: make_private(path / ".step_000001.0123.tmp")):
        with pytest.raises((PermissionRefused, OSError)):
            make(name)
    assert (facts(name), inventory(precious)) == before
    assert not name.with_name("run-not-there").exists()


@pytest.mark.parametrize("kind", ["directory", "open directory", "link"])
def test_a_directory_below_another_user_s_holds_nothing_of_a_save(
    kind: str, scratch: Path, precious: Path
) -> None:
    """He could put one of his own in its place while we write; the names of second copies can be guessed."""
    outer = scratch / "demo-0123abcd"
    squat(kind, outer, precious)
    with pytest.raises(OSError):
        make_private(outer / "node1" / ".step_000001.0123.tmp")
    if kind == "link":
        assert (precious / "kept").read_bytes() == b"precious"
    assert not list(outer.rglob(".step*"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["append", "page", "secret", "key", "new key", "token"])
def test_a_file_of_ours_is_none_of_another_user_s(kind: str, way: str, scratch: Path, precious: Path) -> None:
    name = scratch / "file"
    to = precious / "kept" if kind == "link" else precious
    squat(kind, name, to)
    before = facts(name), inventory(precious), (precious / "kept").read_bytes()
    use: dict[str, Callable[[Path], object]] = {
        "page": ControlPage.create,
        "append": lambda path: append_line(path, b"x"),
        "secret": read_private,
        "key": read_key_file,
        "new key": new_key_file,
        "token": read_token,
    }
    if way == "append" and kind == "file":
        pytest.skip("0666 in a directory of ours alone: nobody else can have made it")
    with pytest.raises((PermissionRefused, KeyRefused, OSError)):
        use[way](name)
    assert (facts(name), inventory(precious), (precious / "kept").read_bytes()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_replaces_a_file_follows_nothing(kind: str, scratch: Path, precious: Path) -> None:
    """`write_file` renames over a name: it is the name that goes, not what it leads to."""
    name = scratch / "status.json"
    squat(kind, name, precious / "kept" if kind == "link" else precious)
    try:
        write_file(name, b"ours")
    except OSError:
        assert "directory" in kind
    else:
        assert (name.read_bytes(), name.lstat().st_uid) == (b"ours", os.geteuid())
    assert (precious / "kept").read_bytes() == b"precious"
    assert [path.name for path in scratch.iterdir()] == ["status.json"], "no temporary file is left"


@pytest.mark.parametrize("kind", KINDS)
def test_submit_refuses_a_run_directory_that_somebody_made_before(
    kind: str, workplace: Path, cli: Cli, scratch: Path, precious: Path
) -> None:
    run = scratch / "demo"
    shutil.rmtree(precious)
    private_dir(precious)
    squat(kind, run, precious)
    before = facts(run), inventory(precious)
    done = cli("submit", "config.yaml", f"run_dir={run}", "--cluster", "local")
    assert done.code == ExitCode.PERMISSION, done
    assert str(run) in done.error
    assert (facts(run), inventory(precious)) == before
    assert not Path(f"{precious}-not-there").exists()


def test_a_link_of_another_user_s_on_the_way_to_the_run_is_refused_and_one_of_our_own_is_not(
    scratch: Path, precious: Path
) -> None:
    squat("link", scratch / "theirs", precious)
    (scratch / "ours").symlink_to(precious)
    with pytest.raises(PermissionRefused, match="link of another user"):
        check_run_dir(scratch / "theirs" / "demo")
    check_run_dir(scratch / "ours" / "demo")


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_passes_over_what_looks_like_a_dead_agent_s(
    kind: str, scratch: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes what killed agents of ours left, by a name that anybody can use."""
    monkeypatch.setattr(rank_socket, "_control_root", lambda: str(scratch))
    theirs = scratch / "verl-slurm-999999999-abc"
    squat(kind, theirs, precious)
    (ours := scratch / "verl-slurm-999999998-abc").mkdir(0o700)
    (link := scratch / "verl-slurm-999999997-abc").symlink_to(precious)
    before = facts(theirs), inventory(precious)
    door = RankSocket(lambda _: None, 1)
    try:
        info = door.directory.lstat()
        assert (info.st_uid, info.st_mode & 0o7777) == (os.geteuid(), 0o700)
        assert all(path.lstat().st_mode & 0o077 == 0 for path in door.directory.iterdir() if path.is_file())
    finally:
        door.close()
    assert (facts(theirs), inventory(precious)) == before
    assert (ours.exists(), link.is_symlink(), door.directory.exists()) == (False, True, False)


@pytest.mark.parametrize("variable", ["unset", "another user's", "a link of another user's"])
def test_an_agent_s_directory_is_its_own_wherever_it_is_made(
    variable: str, scratch: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    if variable != "unset":
        squat("open directory" if variable == "another user's" else "link", scratch / "t", precious)
        monkeypatch.setenv("SLURM_TMPDIR", str(scratch / "t"))
    door = RankSocket(lambda _: None, 1)
    try:
        # Ours to enter alone. Who owns what is around it can take it away, and read or write nothing.
        info = door.directory.lstat()
        assert (info.st_uid, info.st_mode & 0o7777) == (os.geteuid(), 0o700)
        assert len(door.directory.name) > len("verl-slurm-") + 8
    finally:
        door.close()


# ---- the nodes' own disks


@pytest.mark.parametrize("level", ["node", "run"])
@pytest.mark.parametrize("how", ["another user's", "0777"])
def test_a_checkpoint_that_somebody_left_on_a_node_s_disk_does_not_come_home(
    level: str, how: str, node: Node
) -> None:
    """It would be resumed from: its manifest fits, and without a key nobody has signed it."""
    place = node.directory if level == "node" else node.directory.parent
    if how == "0777":
        place.chmod(0o777)
    else:
        os.chown(place, NOBODY, NOBODY)
    before = inventory(node.directory)
    with pytest.raises(PermissionRefused, match="second copies"):
        run_bring_home(node.paths.root, node.attempt, "step_000010")
    with pytest.raises(PermissionRefused):
        prune_parts(node.directory, 1)
    assert inventory(node.directory) == before
    assert [path.name for path in node.paths.checkpoints.glob("step_*")] == ["step_000010"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dangling link"])
def test_names_on_a_node_s_disk_that_others_made_are_refused(
    kind: str, node: Node, scratch: Path, precious: Path
) -> None:
    outer = scratch / "demo-0123abcd"
    squat(kind, outer, node.directory.parent)
    with pytest.raises((PermissionRefused, OSError)):
        assert list_parts(outer / node.directory.name) == []
        raise PermissionRefused("nothing is there, and nothing was taken")
    assert (node.directory / "step_000020").is_dir()


# ---- a tier that is a directory


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dangling link"])
def test_a_place_in_a_tier_that_somebody_made_before_is_refused(
    kind: str, scratch: Path, precious: Path, tmp_path: Path
) -> None:
    from tests.tiers.conftest import Bytes, entry
    from verl_slurm.checkpoint.store.copies import DirectoryPlace

    squat(kind, scratch / "verl-slurm", precious)
    before = facts(scratch / "verl-slurm"), inventory(precious)
    place = DirectoryPlace(scratch, "tier nvme")
    with pytest.raises(TierError):
        place.put("verl-slurm/run/actor.bin", entry(b"data", "actor.bin"), Bytes(b"data"))
    with pytest.raises(TierError):
        place.commit("verl-slurm/run/COMMIT", b"{}")
    assert (facts(scratch / "verl-slurm"), inventory(precious)) == before


# ---- the run's own directories, once it is there


@pytest.mark.parametrize("name", ["control", "checkpoints", "ledger", "logs"])
def test_a_lead_does_not_work_in_a_directory_of_another_user_s(name: str, node: Node, precious: Path) -> None:
    place = node.paths.root / name
    private_dir(place)
    shutil.rmtree(place)
    place.mkdir(0o777)
    os.chown(place, NOBODY, NOBODY)
    before = facts(place)
    process = lead(node.paths)
    try:
        assert "belongs to another user" in until(process, "tries again")
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert facts(place) == before


def test_a_checkpoint_of_another_user_s_is_not_resumed_from(node: Node) -> None:
    from verl_slurm_daemon.lead.resume import find_resume_point

    planted = save(node.paths, 30)
    for path in (planted, *planted.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    # Nor is an older one in its place: who can put it there can stop the run anyway (mode 0000 is waited for), and
    # root's restore of a backup looks the same.
    with pytest.raises(
        PermissionRefused, match=f"step_000030: .*uid {NOBODY}.*mv {planted} {planted}.theirs"
    ):
        find_resume_point(node.paths, "auto", node.attempt)
    planted.rename(f"{planted}.theirs")
    assert find_resume_point(node.paths, "auto", node.attempt).name == "step_000010"


def test_the_run_paths_name_nothing_outside_the_run() -> None:
    """What could be guessed lies in a directory that is ours alone."""
    paths = RunPaths("/run/of/ours")
    for name in dir(RunPaths):
        if not name.startswith("_") and isinstance(getattr(RunPaths, name), property):
            value = getattr(paths, name)
            root = value.root if isinstance(value, RunPaths) else value
            assert root.is_relative_to("/run/of/ours"), name

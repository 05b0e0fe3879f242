"""Which files of a tree are the user's code."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.program.repos import git, new_repo
from verl_slurm.base.errors import ConfigError
from verl_slurm.program import git as git_module, listing
from verl_slurm.program.git import commit_of, diff_of
from verl_slurm.program.listing import Listing, list_code

pytestmark = pytest.mark.slow  # git


def listed(root: Path, **options: Any) -> Listing:
    return list_code(root, **{"max_mb": 1, **options})


def test_of_a_work_tree_git_says_what_belongs_to_it(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="", parts__loop="", gone="")
    (repo / ".gitignore").write_text("build\n*.bin\n")
    (repo / "new.py").write_text("")
    (repo / "weights.bin").write_text("")
    (repo / "gone.py").unlink()
    assert listed(repo).names == [".gitignore", "new.py", "parts/loop.py", "train.py"]
    assert listed(repo).of_git
    (repo / "build").mkdir()
    (repo / "build/ext.so").write_text("")
    assert "build/ext.so" in listed(repo, include=["build/*.so"]).names


def test_submodules_and_repositories_inside_are_listed_too(tmp_path: Path) -> None:
    inner = new_repo(tmp_path / "inner", recipe="")
    repo = new_repo(tmp_path / "repo", train="")
    git(repo, "submodule", "add", "-q", str(inner), "sub")
    new_repo(repo / "beside", other="")
    (repo / "empty").mkdir()
    assert listed(repo).names == [".gitmodules", "beside/other.py", "sub/recipe.py", "train.py"]


def test_a_directory_without_git_is_taken_without_hidden_names(tmp_path: Path) -> None:
    for name in (
        "train.py",
        "parts/loop.py",
        ".cache/x.py",
        ".env",
        "__pycache__/train.pyc",
        "parts/old.pyc",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert listed(tmp_path).names == ["parts/loop.py", "train.py"]
    assert not listed(tmp_path).of_git


@pytest.mark.parametrize("of_git", [True, False])
def test_runs_environments_and_what_the_user_excludes_are_left_out(tmp_path: Path, of_git: bool) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    for name in (
        "venv/pyvenv.cfg",
        "venv/lib/x.py",
        "conda/conda-meta/y",
        "runs/a/run.yaml",
        "runs/a/control/z",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    for name in ("train.py", "notes.ipynb", "assets/deep/logo.py", "data/rows.py", "runs/README.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    if of_git:
        git(root, "init", "-q")
    found = listed(root, exclude=["*.ipynb", "assets"], left_out=[root / "data"])
    assert found.names == ["runs/README.py", "train.py"]


def test_files_with_the_name_of_a_secret_are_left_out_and_said(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="")
    for name in (".env", "id_ed25519", "cloud.pem"):
        (repo / name).write_text("sesame")
    git(repo, "add", ".")
    found = listed(repo)
    assert found.names == ["train.py"]
    assert found.notes == [
        "left out of the copy of the code, since its name is of a secret: .env, cloud.pem, id_ed25519"
    ]
    assert diff_of(repo, found.names) == b""


def test_logs_are_left_out_and_said(tmp_path: Path) -> None:
    for name in ("train.py", "a.log", "nohup.out", "slurm-7.out"):
        (tmp_path / name).write_text("")
    found = listed(tmp_path)
    assert found.names == ["train.py"]
    assert "since its name is of a log (code.include takes it): " in found.notes[0]


def test_links_are_not_followed_and_pipes_are_no_code(tmp_path: Path) -> None:
    root, outside = tmp_path / "code", tmp_path / "outside"
    outside.mkdir()
    (outside / "big.py").write_text("")
    root.mkdir()
    (root / "train.py").write_text("")
    (root / "there").symlink_to(outside)
    (root / "same.py").symlink_to("train.py")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as place:
        place.bind(str(root / "socket"))
    found = listed(root)
    assert found.names == ["same.py", "there", "train.py"]
    assert found.notes == [
        "left out of the copy of the code, since it is no file: pipe, socket",
        "not in the copy of the code: it is behind a link that leads out of the tree: there",
    ]


def test_a_tree_that_is_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with open(tmp_path / "rows.bin", "wb") as file:
        file.truncate(3_000_000)
    with pytest.raises(ConfigError, match=r"3 MB; the largest: rows\.bin 3\.0 MB"):
        listed(tmp_path)
    assert listed(tmp_path, max_mb=4).names == ["rows.bin", "train.py"]


@pytest.mark.parametrize("of_git", [True, False])
def test_a_tree_with_too_many_files_is_refused_with_the_directory_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_git: bool
) -> None:
    monkeypatch.setattr(listing, "MOST_FILES", 3)
    (tmp_path / "code/rows").mkdir(parents=True)
    for name in ("train.py", "rows/1", "rows/2", "rows/3"):
        (tmp_path / "code" / name).touch()
    if of_git:
        git(tmp_path / "code", "init", "-q")
    with pytest.raises(ConfigError, match=r"found 4, of which 3 in rows, expected at most 3"):
        listed(tmp_path / "code")


@pytest.mark.parametrize("place", ["/", "/tmp", "home", "above"])
def test_a_home_directory_or_one_above_it_is_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    git(home, "init", "-q")
    root = {"home": home, "above": tmp_path}.get(place, Path(place))
    with pytest.raises(ConfigError, match="not copied from a directory that holds other things"):
        listed(root)


# Of the keys that `git help --config` lists, those that name a program, a helper, or a place to fetch from.
PROGRAMS = re.compile(
    r"^(alias\.|credential\.|gui?tool\.|(browser|difftool|man|mergetool)\.<.*\.(cmd|path)$|pager\.|include)|"
    r"(askpass|alternaterefscommand|attributesfile|excludesfile|editor|pager|fsmonitor|gitproxy|hookspath|sshcommand"
    r"|program|defaultkeycommand|external|\.textconv|\.command|\.clean|\.smudge|\.process|\.driver|difffilter|\.helper"
    r"|packobjectshook|uploadpack|receivepack|vcs|\.url|\.update|insteadof|templatedir|cccmd|tocmd|eventtarget)$"
)
# Known to git and its companions, and not in that list.
MORE = (
    *("filter.<driver>.process", "remote.<name>.promisor", "lfs.extension.<name>.clean"),
    "lfs.customtransfer.<name>.path",
)
VALUES = {
    "remote.<name>.promisor": "true",
    "remote.<name>.url": "ext::{trap}",
    "remote.<name>.vcs": "ext",
    "submodule.<name>.update": "!{trap}",
    "alias.*": "!{trap}",
    "credential.<url>.*": "!{trap}",
    "credential.helper": "!{trap}",
}


def names_of_programs() -> list[str]:
    known = subprocess.run(["git", "help", "--config"], check=True, capture_output=True, text=True).stdout
    found = [
        key
        for key in known.split()
        if PROGRAMS.search(key.lower()) and not key.startswith(("advice", "color"))
    ]
    assert {"filter.<driver>.clean", "core.sshCommand", "diff.<driver>.textconv", "gpg.program"} <= set(found)
    return [*found, *MORE]


def set_traps(repo: Path, traps: Path) -> str:
    """Has each key name a program of its own, which tells that it was run; returns the configuration."""
    traps.mkdir()
    for number, key in enumerate(names_of_programs()):
        trap = traps / f"{number}.sh"
        trap.write_text(f"#!/bin/sh\necho '{key}' >> {traps}/sprung\ncat\n")
        trap.chmod(0o755)
        value = VALUES.get(key, "{trap}").format(trap=trap)
        if key.startswith("include"):
            value = f"{traps}/{number}.config"
            Path(value).write_text(f'[core]\n\tfsmonitor = {trap}\n[filter "x"]\n\tclean = {trap}\n')
        name = key.replace("<condition>", f"gitdir:{repo}/").replace("*", "x")
        git(repo, "config", re.sub("<.*?>", "x", name), value)
    hooks = traps / "hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman"):
        (hooks / hook).write_text(f"#!/bin/sh\necho {hook} >> {traps}/sprung\n")
        (hooks / hook).chmod(0o755)
        shutil.copy(hooks / hook, repo / ".git/hooks")
    git(repo, "config", "core.hooksPath", str(hooks))
    return (repo / ".git/config").read_text()


@pytest.mark.parametrize("of", ["the repository", "the work tree", "the user"])
def test_no_program_that_a_configuration_of_gits_names_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    inner = new_repo(tmp_path / "inner", part="one\n")
    repo = new_repo(tmp_path / "repo", train="one\n", gone="three\n")
    git(repo, "submodule", "add", "-q", str(inner), "sub")
    (repo / ".gitattributes").write_text("*.py filter=x diff=x merge=x\n")
    with (repo / ".gitmodules").open("a") as file:
        file.write("\tupdate = !false\n\tignore = none\n")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "second")
    # As in a partial clone: the content of a file that was removed is not here.
    blob = git(repo, "rev-parse", "HEAD:gone.py")
    (repo / ".git/objects" / blob[:2] / blob[2:]).unlink()
    (repo / "gone.py").unlink()
    (repo / "train.py").write_text("two\n")
    (repo / "sub/part.py").write_text("two\n")
    (repo / "sub/.gitattributes").write_text("*.py filter=x diff=x\n")
    before = (repo / ".git/index").read_bytes()
    traps, config = set_traps(repo, tmp_path / "traps"), repo / ".git/config"
    with (repo / ".git/modules/sub/config").open("a") as file:
        file.write(traps)
    if of == "the work tree":
        config.rename(repo / ".git/config.worktree")
        config.write_text("[core]\n\trepositoryformatversion = 1\n[extensions]\n\tworktreeConfig = true\n")
    elif of == "the user":
        (tmp_path / "home").mkdir()
        config.rename(tmp_path / "home/.gitconfig")
        config.write_text("")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
    names = listed(repo).names
    assert names == [".gitattributes", ".gitmodules", "sub/.gitattributes", "sub/part.py", "train.py"]
    assert commit_of(repo).dirty
    diff = diff_of(repo, names)
    assert diff is None or b"-one\n+two\n" in diff
    assert not (tmp_path / "traps/sprung").exists(), (tmp_path / "traps/sprung").read_text()
    assert (repo / ".git/index").read_bytes() == before


def test_a_tree_with_git_lfs_is_as_committed_without_its_filter(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="")
    data, pointer = b"weights" * 100, repo / "model.bin"
    digest = hashlib.sha256(data).hexdigest()
    (repo / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    pointer.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "second")
    (repo / "model.bin").write_bytes(data)
    git(repo, "config", "filter.lfs.clean", "git-lfs clean -- %f")
    git(repo, "config", "filter.lfs.process", f"touch {tmp_path}/sprung")
    git(repo, "config", "filter.lfs.required", "true")
    assert "model.bin" in listed(repo).names
    assert not commit_of(repo).dirty
    assert diff_of(repo, listed(repo).names) == b""
    (repo / "model.bin").write_bytes(data + b"more")
    assert commit_of(repo).dirty
    assert not (tmp_path / "sprung").exists()


def test_a_removed_file_leaves_none_of_its_content_in_the_diff(tmp_path: Path) -> None:
    repo = new_repo(tmp_path / "repo", train="", config="password = 'sesame'\n")
    (repo / "config.py").unlink()
    diff = diff_of(repo, listed(repo).names)
    assert diff is not None
    assert b"deleted file" in diff
    assert b"sesame" not in diff


@pytest.mark.parametrize("kind", ["empty", "another user's"])
def test_a_repository_above_that_is_not_ours_is_passed_over_and_said(tmp_path: Path, kind: str) -> None:
    if kind != "empty" and os.geteuid() != 0:
        pytest.skip("NOT RUN: only root can give a directory away")
    repo = new_repo(tmp_path / "shared/mine/repo", train="")
    (tmp_path / "shared/mine/alone").mkdir()
    (tmp_path / "shared/mine/alone/go.py").write_text("")
    if kind == "empty":
        (tmp_path / "shared/.git").mkdir()
    else:
        new_repo(tmp_path / "hers", her="")
        shutil.move(tmp_path / "hers/.git", tmp_path / "shared/.git")
        for path in (tmp_path / "shared/.git", *(tmp_path / "shared/.git").rglob("*")):
            os.chown(path, 1234, 1234)
        os.chown(tmp_path / "shared", 1234, 1234)
    assert listed(repo).of_git
    found = listed(tmp_path / "shared/mine/alone")
    assert (found.names, found.of_git) == (["go.py"], False)
    assert found.notes[0].startswith(f"{tmp_path}/shared/.git was passed over")


def test_a_work_tree_that_git_does_not_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/.git").write_text("gitdir: /nowhere\n")
    with pytest.raises(ConfigError, match="git does not tell which files the code has.*code.tree"):
        listed(tmp_path / "code")


@pytest.mark.parametrize(
    "name",
    [
        ".gitignore",
        "deep/.gitignore",
        ".gitattributes",
        ".git/info/exclude",
        ".git/index",
        ".git/HEAD",
        "include.path",
        "core.excludesfile",
    ],
)
def test_a_pipe_in_the_place_of_a_file_that_git_opens_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(git_module, "STILL_S", 1.0)
    repo = new_repo(tmp_path / "repo", train="", deep__loop="")
    pipe = repo / name
    if name.startswith((".", "deep")):
        pipe.unlink(missing_ok=True)
        found = f"{pipe} is no regular file"
    else:
        pipe = tmp_path / "pipe"
        git(repo, "config", name, str(pipe))
        found = "maybe a file that .git/config names"
    os.mkfifo(pipe)
    with pytest.raises(
        ConfigError, match=f"git [a-z-]+ has waited for 1 s and done nothing.*{re.escape(found)}"
    ):
        listed(repo)
        commit_of(repo)


def test_a_signal_that_ends_git_is_said_with_the_file_that_may_be_too_much_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As git 2.39 does on a .gitignore of 2.5 GB, without the memory.
    own = tmp_path / "bin/git"
    own.parent.mkdir()
    own.write_text(
        f'#!/bin/sh\ncase "$*" in *ls-files*) kill -SEGV $$;; *) exec {shutil.which("git")} "$@";; esac\n'
    )
    own.chmod(0o755)
    repo = new_repo(tmp_path / "repo", train="")
    monkeypatch.setenv("PATH", f"{own.parent}:{os.environ['PATH']}")
    with (repo / ".gitignore").open("w") as file:
        file.truncate(100 << 20)
    with pytest.raises(ConfigError, match=r"git ls-files was ended by SIGSEGV: \S+/\.gitignore has 100 MiB"):
        listed(repo)


def test_a_difference_that_never_ends_is_read_to_its_limit_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_module, "MOST_DIFF", 100_000)
    repo = new_repo(tmp_path / "repo", train="")
    (repo / "train.py").write_text("x\n" * 30_000)
    assert len(diff_of(repo, ["train.py"]) or b"") > 90_000
    (repo / "train.py").write_text("x\n" * 4_000_000)
    tracemalloc.start()
    assert diff_of(repo, ["train.py"]) is None
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_glob_that_finds_nothing_or_leads_out_is_refused(tmp_path: Path) -> None:
    for pattern in ("build/*.so", "../*", "/etc/*"):
        with pytest.raises(ConfigError, match="code.include"):
            listed(tmp_path, include=[pattern])

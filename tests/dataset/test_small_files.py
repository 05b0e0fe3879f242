import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_slurm.dataset.fingerprint import small_files
from verl_slurm.dataset.fingerprint.small_files import digests, parse_answer, request
from verl_slurm.dataset.fingerprint.walk import walk

PROGRAM = [sys.executable, "-I", "-S", "-X", "utf8", small_files.__file__]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b with\na line", "\u00e9"):
        (tmp_path / name).write_text(name)
    return tmp_path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_each_file_gets_the_digest_of_what_it_holds(root: Path) -> None:
    (root / "empty").write_bytes(b"")
    (root / "link").symlink_to("a")
    lines = walk(root)
    assert digests(f"{root}/", lines) == [sha256(root / line.split(" ", 6)[6]) for line in lines]


@pytest.mark.parametrize("change", ["gone", "longer", "shorter", "another file", "a pipe", "unreadable"])
def test_what_is_not_the_file_that_was_seen_gets_none(root: Path, change: str) -> None:
    lines = [line for line in walk(root) if line.endswith(" a")]
    path = root / "a"
    if change in ("longer", "shorter"):
        path.write_text("aa" if change == "longer" else "")
    elif change == "another file":
        (root / "new").write_text("a")
        (root / "new").rename(path)
    elif change == "unreadable":
        path.unlink()
        path.symlink_to("a")
    else:
        path.unlink()
        if change == "a pipe":
            os.mkfifo(path)
    assert digests(f"{root}/", lines) == [None]


def test_a_large_file_is_left_to_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "SMALL_BYTES", 2)
    lines = sorted(walk(root), key=len)
    assert [digest is None for digest in digests(f"{root}/", lines)] == [False, False, True]


def test_the_program_answers_batch_for_batch_what_the_function_says(root: Path) -> None:
    lines = walk(root)
    (root / "a").unlink()
    done = subprocess.run(
        PROGRAM, cwd=root, input=request(lines) + request(lines[:1]), stdout=subprocess.PIPE, check=True
    )
    expected = digests(f"{root}/", lines)
    assert expected.count(None) == 1
    assert parse_answer(done.stdout, 4) == [*expected, expected[0]]


@pytest.mark.parametrize("answer", [b"", b"0" * 63, b"0" * 65, b"0" * 63 + b"\n", b"\xff" * 64])
def test_an_answer_that_is_not_whole_is_none(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_answer(answer, 1)


def test_the_program_imports_nothing_that_takes_long(root: Path) -> None:
    argv = [*PROGRAM[:1], "-X", "importtime", *PROGRAM[1:]]
    done = subprocess.run(argv, cwd=root, input=b"", stderr=subprocess.PIPE, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert "hashlib" in imported
    assert not imported & {"typing", "collections", "re", "enum", "subprocess", "threading", "site"}

"""What a lead has read is not read again for the next restart, unless anything was touched."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from verl_slurm_daemon.lead import resume as module
from verl_slurm_daemon.lead.resume import Verdicts

from tests.checkpoint.conftest import manifest_of, owns_it, stage
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.commit import commit


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    paths = RunPaths(tmp_path / "run")
    private_dir(paths.root)
    staging = stage(paths, 2, 0)
    return commit(staging, manifest_of(staging), attempt_check=owns_it)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    done: list[Path] = []
    real = module.read_all

    def read(path: Path, keys: object) -> object:
        done.append(path)
        return real(path, None)

    monkeypatch.setattr(module, "read_all", read)
    return done


def test_a_good_checkpoint_is_read_once_for_its_save_and_the_next_restart(
    saved: Path, reads: list[Path]
) -> None:
    verdicts = Verdicts()
    assert verdicts.read(saved, None).ok
    assert verdicts.recall(saved, None).ok
    assert reads == [saved]


def test_a_second_restart_from_it_reads_it_again(saved: Path, reads: list[Path]) -> None:
    verdicts = Verdicts()
    for _ in range(2):
        verdicts.read(saved, None)
        verdicts.recall(saved, None)
    verdicts.recall(saved, None)
    assert len(reads) == 3


def _flip(file: Path) -> None:
    times = file.stat()
    with open(file, "r+b") as opened:
        first = opened.read(1)[0]
        opened.seek(0)
        opened.write(bytes([first ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had been written


def _replace(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes()[::-1])
    os.rename(other, file)


@pytest.mark.parametrize(
    "damage", [_flip, _replace, Path.unlink, lambda file: file.with_name("more").touch()]
)
def test_one_that_was_touched_is_read_again(
    saved: Path, reads: list[Path], damage: Callable[[Path], object]
) -> None:
    verdicts = Verdicts()
    verdicts.read(saved, None)
    damage(next(file for file in sorted(saved.rglob("*")) if file.is_file()))
    assert not verdicts.recall(saved, None).ok
    assert len(reads) == 2


def test_a_bad_one_is_not_remembered(saved: Path, reads: list[Path]) -> None:
    _flip(next(file for file in sorted(saved.rglob("*")) if file.is_file()))
    verdicts = Verdicts()
    assert not verdicts.read(saved, None).ok
    assert not verdicts.recall(saved, None).ok
    assert len(reads) == 2

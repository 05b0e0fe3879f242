"""The saver process: serves, survives what is not meant for it, and dies with its rank."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_slurm.checkpoint.store.chunks import entry_of
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.handle import SaverDied, SaverProcess
from verl_slurm.save.writer.protocol import ArenaFile, Write

FILE = ArenaFile(path="actor/rank_0000.bin", at=4096, size=8192)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(16384)
    made.view[:] = bytes(range(256)) * 64
    yield made
    made.close()


@pytest.fixture
def saver(arena: Arena) -> Iterator[SaverProcess]:
    process = SaverProcess(arena)
    process.wait_ready()
    yield process
    process.close()


def _save(saver: SaverProcess, directory: Path) -> bytes:
    directory.mkdir(mode=0o700)
    (written,) = saver.write(Write(files=(FILE,), directories=(str(directory),)))
    assert written.error is None
    data = (directory / FILE.path).read_bytes()
    assert written.files == (entry_of(FILE.path, data),)
    return data


def test_what_is_in_the_arena_when_asked_is_written(
    saver: SaverProcess, arena: Arena, tmp_path: Path
) -> None:
    assert _save(saver, tmp_path / "a") == bytes(arena.view[4096:12288])
    arena.view[4096] = 99
    assert _save(saver, tmp_path / "b")[0] == 99


def test_signals_for_the_whole_step_leave_it_working(saver: SaverProcess, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(saver.pid, number)
    _save(saver, tmp_path / "a")


def test_a_process_that_the_rank_forks_later_does_not_keep_it_from_ending(arena: Arena) -> None:
    saver = SaverProcess(arena)
    saver.wait_ready()
    ends, told = os.pipe()
    # As a worker of a data loader: it has all that its rank has open, and outlives the rank's last save.
    if (worker := os.fork()) == 0:
        os.close(told)
        os.read(ends, 1)
        os._exit(0)
    try:
        saver.close()
    finally:
        os.close(told)
        os.close(ends)
        os.waitpid(worker, 0)


def test_a_saver_that_is_gone_is_said_and_nothing_hangs(saver: SaverProcess, tmp_path: Path) -> None:
    os.kill(saver.pid, signal.SIGKILL)
    with pytest.raises(SaverDied, match="saver process"):
        saver.write(Write(files=(FILE,), directories=(str(tmp_path),)))


RANK = """
import sys, time
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.handle import SaverProcess
saver = SaverProcess(Arena(4096))
saver.wait_ready()
print(saver.pid, flush=True)
sys.stdin.read()
"""


def test_it_dies_with_its_rank() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        watch = os.pidfd_open(int(rank.stdout.readline()))
        rank.kill()
    try:
        # Readable once the process is gone; its new parent may be any.
        poll = select.poll()
        poll.register(watch)
        assert poll.poll(20_000)
    finally:
        os.close(watch)

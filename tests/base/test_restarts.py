"""Which errors another start may cure."""

import errno
import os

import pytest

from verl_slurm.base.errors import (
    CheckpointCorrupt,
    DataError,
    VerlSlurmError,
    WireError,
    is_transient_storage_error,
    restart_may_help,
    underlying,
)


def _behind(number: int) -> DataError:
    try:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise DataError("a data file cannot be read") from error
    except DataError as error:
        return error


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS])
def test_storage_may_recover(number: int) -> None:
    assert restart_may_help(_behind(number))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EPERM, errno.ELOOP])
def test_what_stays_until_somebody_acts_ends_the_run(number: int) -> None:
    assert not restart_may_help(_behind(number))


def test_the_error_that_was_being_handled_counts_unless_it_was_dismissed() -> None:
    stale = OSError(errno.ESTALE, "Stale file handle")
    handling = DataError("a data file cannot be read")
    handling.__context__ = PermissionError(errno.EACCES, "no")
    handling.__context__.__context__ = stale
    assert is_transient_storage_error(handling)
    handling.__suppress_context__ = True  # `raise ... from None`
    assert not is_transient_storage_error(handling)


def test_a_circle_of_causes_comes_to_an_end() -> None:
    error = DataError("x")
    error.__cause__ = error
    assert not is_transient_storage_error(error)


def test_defects_and_lost_connections_are_crashes_and_verdicts_are_final() -> None:
    assert restart_may_help(VerlSlurmError("a defect"))
    assert restart_may_help(WireError("the agent does not listen"))
    assert not restart_may_help(CheckpointCorrupt("x"))


def test_an_error_of_all_ranks_gives_way_to_its_cause_on_this_rank() -> None:
    corrupt, told = CheckpointCorrupt("x"), VerlSlurmError("checking failed")
    told.__cause__ = corrupt
    assert underlying(told) is corrupt
    corrupt.__cause__ = DataError("y")
    assert underlying(corrupt) is corrupt

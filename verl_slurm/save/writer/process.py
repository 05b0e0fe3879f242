"""The saver process of a rank: `python -P -m verl_slurm.save.writer.process --arena FD --size BYTES`.

A process, so that hashing and writing take neither the rank's interpreter lock nor its page cache. It ends when
the rank closes the pipe, and the kernel ends it when the rank dies: half a checkpoint is of no use to anyone.
"""

import argparse
import os
import signal
import sys
from functools import partial

import msgspec

from verl_slurm.base.errors import KeyRefused, VerlSlurmError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import load_keys
from verl_slurm.base.processes import die_with_parent
from verl_slurm.checkpoint.hashing import process_hasher
from verl_slurm.config.schema import EncryptionConfig
from verl_slurm.save.writer.arena import Arena
from verl_slurm.save.writer.file_sealing import SealedFiles, Sealer
from verl_slurm.save.writer.protocol import FromSaver, SaverReady, Write, Written
from verl_slurm.save.writer.writing import write_and_hash

# What Slurm sends to a whole step is meant for the daemon; the rank decides how long we live.
_NOT_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main(argv: list[str] | None = None) -> int:
    """Serve one rank until it closes the pipe."""
    # First of all, before the arguments: a signal that Slurm sends to the step may come while Python starts.
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
    # A saver that outlives its rank would go on writing into a staging directory that the next start removes.
    die_with_parent()
    parser = argparse.ArgumentParser(
        prog="verl_slurm.save.writer.process", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--arena", type=int, required=True, metavar="FD", help="descriptor of the arena")
    parser.add_argument("--size", type=int, required=True, help="bytes of it")
    parser.add_argument("--hashers", type=int, default=1, help="threads that hash")
    parser.add_argument("--encryption", help="where the key is to encrypt with, as JSON")
    options = parser.parse_args(argv)
    # Before any file is made: weights must not be readable to others even for a moment.
    os.umask(0o077)
    arena = Arena(options.size, fd=options.arena)
    try:
        # The saver reads the key itself: the arena holds plaintext, and what leaves this process has to be sealed.
        source = options.encryption and msgspec.json.decode(options.encryption, type=EncryptionConfig)
        keys = load_keys(source)
        sealer = None if keys is None else Sealer(keys.current)
        # The same pages as the rank's, mapped into this process: otherwise the first save pays for its page faults.
        arena.fault_in()
    except VerlSlurmError as error:
        sys.stderr.write(f"{error.one_line()}\n")
        return int(error.exit_code)
    if sealer is None:
        process_hasher()  # now, and not in the first save: a network file system may take its time to give stringzilla
    # The rank sends nothing before this word, so a saver that could not start is noticed before the first save.
    _say(SaverReady())
    decoder = msgspec.json.Decoder(Write)
    for line in sys.stdin.buffer:
        # A request that does not decode ends the process with a traceback; the rank reads the end of its output.
        request = decoder.decode(line)
        try:
            sealed = _sealed(sealer, request, arena)
        # Ends the process: a save that should be sealed and is not must fail as a whole.
        except KeyRefused as error:
            sys.stderr.write(f"{error.one_line()}\n")
            return int(error.exit_code)
        write_and_hash(
            arena.view,
            request.files,
            request.directories,
            hashers=options.hashers,
            sealed=sealed,
            on_done=partial(_answer, request.save),
        )
    return int(ExitCode.OK)


def _sealed(sealer: Sealer | None, request: Write, arena: Arena) -> SealedFiles | None:
    if (sealer is None) != (request.sealing is None):
        raise KeyRefused(
            "the rank and its saver do not agree on whether to encrypt",
            found="a key" if sealer is not None else "no key",
            remedy="start the job again; if it stays so, report it",
        )
    if sealer is None or request.sealing is None:
        return None
    return sealer.begin(request.sealing, arena.view, request.files)


def _answer(save: int, written: Written) -> None:
    _say(msgspec.structs.replace(written, save=save))


def _say(message: FromSaver) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    # One line, at once: the rank commits on it. Answers come from one thread, so lines do not mix.
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Saving and loading measured, this project beside its peers, interleaved in one run.

    python -m benchmarks.save                                     everything, 1 GiB, 5 repetitions (make bench)
    python -m benchmarks.save --quick                             1/8 GiB, 2 repetitions: no figures to quote
    python -m benchmarks.save --what stall --peers ours,dcp,nvrx_fork --json RUN.json
    python -m benchmarks.save --check                             did the save path get slower? (three minutes)
    python -m benchmarks.save --resume RUN.json.partial           go on where a run was stopped
    python -m benchmarks.save --show RUN.json                     the tables of a run again
    python -m benchmarks.save --page RUN.json > RUN.md

It says how far it is and about how long the rest takes. What it has measured is in OUT.partial (save.json.partial
without --json) behind each part, and when it is stopped by Ctrl-C or SIGTERM.
Peers that are not installed are left out, and said. As root the page cache is dropped before every cold read;
else reads are warm, and that is said. Compare within one run only: page cache, balloon and neighbours of a
virtual machine move all figures together.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from benchmarks.save import check
from benchmarks.save.launcher import Launcher
from benchmarks.save.machine import environment
from benchmarks.save.page import page
from benchmarks.save.records import MODES, Run
from benchmarks.save.registry import DEFAULT, PEERS, absent, entry
from benchmarks.save.report import text
from verl_slurm.base.files import write_file

_QUICK = {"gib": 0.125, "reps": 2, "generation_s": 0.3, "busy_s": 0.8, "quiet_s": 0.0}
_EVERYTHING = tuple(MODES)
_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: measured, whether targets were met or not; 1: a process group failed; 2: usage; 3: a check found
    the save path slower than before; 130: stopped."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(**_QUICK)
        options = parser.parse_args(argv)
    if options.check:
        parser.set_defaults(**check.OPTIONS)
        options = parser.parse_args(argv)
    former = _former(parser, options.resume) if options.resume else None
    if former is not None:
        for name in ("gib", "reps", "ranks", "what", "peers"):
            setattr(options, name, getattr(former, name))
        options.json = options.json or options.resume.with_name(options.resume.name.removesuffix(".partial"))
    for path, render in ((options.show, text), (options.page, page)):
        if path is not None:
            print(render(msgspec.json.decode(path.read_bytes(), type=Run)), end="")
            return 0
    plugins = dict(item.split("=", 1) for item in options.plugin)
    asked = tuple(dict.fromkeys((*options.peers, *plugins)))
    missing = {name: reason for name in asked if (reason := absent(name, plugins))}
    peers = tuple(name for name in asked if name not in missing)
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="vs-bench-") as scratch:
        # Made with a name of their own, so that nothing that lies there is touched.
        media = (options.dir, options.second_dir or options.dir)
        first, second = (Path(tempfile.mkdtemp(prefix="vs-bench-", dir=medium)) for medium in media)
        launcher = Launcher(
            ranks=options.ranks,
            gib=options.gib,
            reps=options.reps,
            peers=peers,
            plugins=plugins,
            directories=(first, second),
            scratch=Path(scratch),
            generation_s=options.generation_s,
            busy_s=options.busy_s,
            quiet_s=options.quiet_s,
            until=time.monotonic() + 60 * options.minutes,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        if former is not None:
            launcher.done = dict(former.done)
            # Those behind the last whole part are measured again, with it.
            launcher.samples = former.samples[: max(former.done.values(), default=0)]
            launcher.state_bytes, launcher.num_tensors = former.state_bytes, former.num_tensors
        try:
            machine = environment((first, second))
            same = first.stat().st_dev == second.stat().st_dev

            def result(*, stopped: bool) -> Run:
                asked = shlex.join(
                    ["python", "-m", "benchmarks.save", *(sys.argv[1:] if argv is None else argv)]
                )
                return Run(
                    command=asked if former is None else former.command,
                    environment=msgspec.structs.replace(machine, load_after=os.getloadavg()),
                    ranks=options.ranks,
                    gib=options.gib,
                    reps=options.reps,
                    what=options.what,
                    peers=peers,
                    labels={name: entry(name, plugins).label for name in peers},
                    kinds={name: entry(name, plugins).kind for name in peers},
                    absent=missing,
                    state_bytes=launcher.state_bytes,
                    num_tensors=launcher.num_tensors,
                    same_medium=same,
                    samples=launcher.samples,
                    stopped=stopped,
                    done=launcher.done,
                )

            partial = _partial(options.json)
            launcher.keep = lambda: write_file(partial, _encoded(result(stopped=True)))
            stopped = not _to_its_end(launcher, options.what)
        finally:
            shutil.rmtree(first)
            shutil.rmtree(second)
    run = result(stopped=stopped)
    if stopped:
        return _keep(run, partial)
    partial.unlink(missing_ok=True)
    data = _encoded(run)
    if options.check:
        compared = check.compare(run, check.earlier_runs())
        print(check.text(compared) + f"kept in {check.keep(run)}")
        return int(launcher.failed) or 3 * any(one.is_slower for one in compared)
    if options.json == Path("-"):
        print(data.decode(), end="")
    else:
        if options.json:
            options.json.write_bytes(data)
        print(text(run), end="")
    return int(launcher.failed)


def _to_its_end(launcher: Launcher, what: tuple[str, ...]) -> bool:
    """Measure; False: a signal stopped it. SIGTERM does what Ctrl-C does, once."""

    def stop(_number: int, _frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, stop)
    try:
        launcher.run(what)
    except KeyboardInterrupt:
        return False
    finally:
        signal.signal(signal.SIGTERM, former)
    return True


def _partial(asked: Path | None) -> Path:
    """Returns the file for a run that is not whole; it is not taken for one."""
    path = Path("save.json") if asked in (None, Path("-")) else asked
    assert path is not None
    return path.with_name(f"{path.name}.partial")


def _encoded(run: Run) -> bytes:
    return msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n"


def _keep(run: Run, partial: Path) -> int:
    """Keeps a stopped run; returns the exit code of Ctrl-C."""
    partial.write_bytes(_encoded(run))
    print(
        f"stopped; {len(run.samples)} samples are in {partial}; tables: --show {partial}; go on: --resume {partial}",
        file=sys.stderr,
    )
    return _INTERRUPTED


def _former(parser: argparse.ArgumentParser, path: Path) -> Run:
    """Returns the run to go on with."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError) as error:
        parser.error(f"--resume {path}: {error}")
    now = environment(()).commit
    if run.environment.commit != now:
        parser.error(
            f"--resume {path}: measured at commit {run.environment.commit}, and this is {now}: begin anew"
        )
    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="peers: " + ", ".join(f"{name} ({known.label})" for name, known in PEERS.items()),
    )
    add = parser.add_argument
    add("--gib", type=float, default=1.0, help="size of model and optimizer state over all ranks (default 1)")
    add("--reps", type=int, default=5, help="timed repetitions, a cold one before them (default 5)")
    add("--ranks", type=int, default=2, help="processes the model is sharded over (default 2)")
    add("--what", type=_among(tuple(MODES)), default=_EVERYTHING, help=f"some of {','.join(MODES)}")
    add("--peers", type=_among(tuple(PEERS)), default=DEFAULT, help="some of those below (default: all)")
    add("--plugin", action="append", default=[], metavar="NAME=MODULE:CLASS", help="one more, a Peer")
    add("--dir", type=Path, default=Path.cwd(), help="medium to write to (default: here)")
    add("--second-dir", type=Path, default=None, help="second medium of the dual write (default: the same)")
    add("--generation-s", type=float, default=1.0, help="length of the phase that only reads (default 1 s)")
    add(
        "--busy-s", type=float, default=3.0, help="how long training goes on during a busy save (default 3 s)"
    )
    add("--quiet-s", type=float, default=3.0, help="wait so long for an idle machine, at most (default 3 s)")
    add(
        "--quick",
        action="store_true",
        help="other defaults: " + ", ".join(f"{k} {v}" for k, v in _QUICK.items()),
    )
    add("--minutes", type=float, default=90.0, help="begin nothing further after that (default 90)")
    add("--check", action="store_true", help="did the save path get slower on this machine? (three minutes)")
    add("--resume", type=Path, metavar="PARTIAL", help="go on with a run that was stopped, with its settings")
    add("--json", type=Path, metavar="OUT", help="write the whole run there; -: instead of the tables")
    add("--show", type=Path, metavar="RUN", help="print the tables of a run, measure nothing")
    add("--page", type=Path, metavar="RUN", help="print a run as Markdown, measure nothing")
    return parser


def _among(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(value: str) -> tuple[str, ...]:
        names = tuple(value.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())

"""Tokens per second of a whole GRPO step, this project's beside TRL's, in one run.

    make bench-step [BENCH="--rounds 20"]      installs TRL (constraints/trl.txt) beside this project, and runs
    python -m benchmarks.tokens_per_second [--ranks 1 2] [--rounds 9] [--pieces 64 8] [--json FILE] [--small]

`make bench-step` puts TRL and what it imports (280 MB, no torch) into `.venv-trl`, which sees `.venv`. By hand, from
the root of the repository: `python -m venv ENV`; in a `.pth` file of ENV the line `import site; site.addsitedir(
"OURS/site-packages")`; `ENV/bin/pip install --no-deps -r constraints/trl.txt`; `ENV/bin/python -m
benchmarks.tokens_per_second`. (Not `pip install --target`: dill pickles all of what is in no site-packages by value.)

Both sides train the same model directory (`builtin:tiny`) on the same prompts in the same order, with the same group
size, responses, optimizer updates, new tokens, temperature, learning rate, clip and KL coefficient (so both have a
reference model), reward (`rule:arithmetic`), float32, and number of processes and of CPU threads. All are started and
do a first step that is not measured; then they take turns step by step, in an order drawn anew each round, while the
others sleep. A step is from "go on" until all its ranks have said "done" (`benchmarks.whole_step.gate`), so whatever a
system does between two steps counts too. Tokens are those sampled, up to and including the end token.

What is not the same: `benchmarks/whole_step/ours.py` and `theirs.py` say what is on and off. TRL samples a step's
responses all at once and cannot be stopped in between; this project does so in the first row, and in the other rows
has a safe point behind each `--pieces` of them. Two ranks: FSDP2 here, DDP there.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NoReturn

from benchmarks.save.machine import environment, wait_until_idle
from benchmarks.whole_step import ours
from benchmarks.whole_step.gate import Said, Settings

_ROOT = Path(__file__).parent.parent
_PEER = "TRL"
_PHASES = ("generate_s", "score_s", "update_s")
_PATIENCE_S = 300.0

Row = dict[str, Any]
"""One step of one system: seconds, CPU seconds of all ranks, tokens, reward, and the phases of its slowest rank."""


class System:
    """The ranks of one system, each at its gate."""

    def __init__(self, name: str, given: Settings, module: str) -> None:
        self.name, self._directory = name, Path(given.directory)
        self._directory.parent.mkdir(mode=0o700, exist_ok=True)
        if module == ours.__name__:
            ours.prepare(given)
        gate = self._directory.parent / f"{self._directory.name}.sock"
        self._log = (self._directory.parent / f"{self._directory.name}.log").open("w+")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(gate))
            listener.listen(given.ranks)
            listener.settimeout(1.0)
            argv = [sys.executable, "-m", module, given.dump(), str(gate)]
            places = _places(given.ranks, alone=module == ours.__name__)
            self._ranks = [
                subprocess.Popen(
                    argv, cwd=_ROOT, env=_environ(given) | place, stdout=self._log, stderr=self._log
                )
                for place in places
            ]
            self._lines: list[IO[str]] = []
            while len(self._lines) < given.ranks:
                with contextlib.suppress(TimeoutError), listener.accept()[0] as connection:
                    connection.settimeout(_PATIENCE_S)
                    self._lines.append(connection.makefile("rw"))  # which keeps it open
                self._require_alive()

    def first(self) -> None:
        """Wait until the first step is done."""
        self._said()

    def step(self) -> Row:
        """One step of all ranks."""
        began = time.perf_counter()
        self._go()
        said = self._said()
        seconds = time.perf_counter() - began
        phases = {name: max(getattr(one, name) for one in said) for name in _PHASES}
        reward = statistics.fmean(one.reward for one in said)
        tokens, cpu_s = sum(one.tokens for one in said), sum(one.cpu_s for one in said)
        return {"seconds": seconds, "tokens": tokens, "reward": reward, "cpu_s": cpu_s, **phases}

    def finish(self) -> None:
        """Let the ranks go to their end, and see that it is a good one."""
        self._go()
        for rank in self._ranks:
            rank.wait(_PATIENCE_S)
        self._require_alive()

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        for line in self._lines:
            with contextlib.suppress(OSError):  # what nobody will read any more
                line.close()
        self._log.close()

    def _go(self) -> None:
        for line in self._lines:
            line.write("go on\n")
            line.flush()

    def _said(self) -> list[Said]:
        said = []
        for line in self._lines:
            text = line.readline()
            if not text:
                self._fail()  # it has ended, so its last words are in the log
            said.append(Said(**json.loads(text)))
        return said

    def _require_alive(self) -> None:
        if any(rank.poll() for rank in self._ranks):
            self._fail()

    def _fail(self) -> NoReturn:
        self._log.seek(0)
        raise SystemExit(f"{self.name} failed:\n{self._log.read()[-4000:]}")


def _environ(given: Settings) -> dict[str, str]:
    threads = str(given.threads)
    return os.environ | {
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _places(ranks: int, *, alone: bool) -> list[dict[str, str]]:
    """The variables of each rank. TRL's only process is told nothing: it is no distributed job then."""
    if ranks == 1 and not alone:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@contextlib.contextmanager
def _systems(given: Settings, pieces: Sequence[int], directory: Path) -> Iterator[list[System]]:
    wanted = {"verl-slurm, all at once": (given.responses, ours.__name__)}
    wanted |= {f"verl-slurm, a safe point each {piece}": (piece, ours.__name__) for piece in pieces}
    # Not imported here: it brings TRL.
    wanted[_PEER] = (given.responses, "benchmarks.whole_step.theirs")
    systems: list[System] = []
    try:
        for number, (name, (piece, module)) in enumerate(wanted.items()):
            its = replace(given, piece=piece, directory=str(directory / f"{given.ranks}-{number}"))
            systems.append(System(name, its, module))
        for system in systems:
            system.first()
        yield systems
        for system in systems:
            system.finish()
    finally:
        for system in systems:
            system.end()


def summary(rows: dict[str, list[Row]]) -> dict[str, Row]:
    """Of each system: the median of every figure, tokens per second, and its ratio to TRL's.

    The ratio is the median over rounds of the quotient in one round, with the least and the greatest.
    """
    found: dict[str, Row] = {}
    theirs = [row["tokens"] / row["seconds"] for row in rows[_PEER]]
    for name, steps in rows.items():
        rates = [row["tokens"] / row["seconds"] for row in steps]
        ratios = [mine / other for mine, other in zip(rates, theirs, strict=True)]
        found[name] = {key: statistics.median(row[key] for row in steps) for key in steps[0]}
        found[name] |= {"tokens_per_s": statistics.median(rates), "ratio": statistics.median(ratios)}
        found[name] |= {"least": min(ratios), "greatest": max(ratios)}
    return found


def page(found: dict[str, Row]) -> str:
    """The summary as a table."""
    lines = [
        "| | tokens/s | × TRL | (least, greatest) | step s | generate | score | update | CPU s | tokens | reward |"
    ]
    lines += ["|" + " --- |" * 11]
    for name, row in found.items():
        phases = " | ".join(f"{row[phase]:.3f}" for phase in _PHASES)
        lines.append(
            f"| {name} | {row['tokens_per_s']:.0f} | {row['ratio']:.2f} | {row['least']:.2f}, {row['greatest']:.2f} |"
            f" {row['seconds']:.3f} | {phases} | {row['cpu_s']:.3f} | {row['tokens']:.0f} | {row['reward']:.3f} |"
        )
    return "\n".join(lines)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes of each system")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one process")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each system that are measured")
    parser.add_argument(
        "--patience", type=float, default=3.0, help="seconds a round waits for an idle machine"
    )
    parser.add_argument("--responses", type=int, default=512, help="of one process and step")
    parser.add_argument("--group", type=int, default=8, help="responses to one prompt")
    parser.add_argument("--mini", type=int, default=64, help="responses of one optimizer update")
    parser.add_argument("--tokens", type=int, default=12, help="new tokens at most")
    parser.add_argument(
        "--pieces", type=int, nargs="*", default=[64, 8], help="a safe point behind each so many"
    )
    parser.add_argument("--directory", type=Path, help="where the runs and their ledgers lie for the time")
    parser.add_argument("--json", type=Path, help="every step of every system")
    parser.add_argument("--small", action="store_true", help="only shows that it runs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    if find_spec("trl") is None:
        sys.exit("TRL is not here: make bench-step, or see `python -m benchmarks.tokens_per_second --help`")
    if options.small:
        options.ranks, options.rounds, options.responses, options.mini, options.pieces = [1], 2, 16, 8, []
        options.patience = 0.0
    from verl_slurm.trainer.quickstart.__main__ import resolve_data, resolve_model
    from verl_slurm.trainer.quickstart.arithmetic_data import sums

    directory = Path(tempfile.mkdtemp(prefix="tokens_per_second.", dir=options.directory))
    draw, record = random.Random(0), {}
    try:
        shown = environment([directory])
        machine = f"{shown.cpu}, {shown.cores} cores, {shown.file_systems[str(directory)]}"
        print(f"{machine}, load {shown.load_before[0]:.1f}")
        given = Settings(
            model=str(resolve_model("builtin:tiny", directory / "builtin")),
            data=str(resolve_data("builtin:arithmetic", directory / "builtin")),
            directory="",
            ranks=1,
            threads=options.threads,
            steps=1 + options.rounds,
            responses=options.responses,
            piece=options.responses,
            group=options.group,
            mini=options.mini,
            max_new_tokens=options.tokens,
            prompt_tokens=max(len(prompt) for prompt, _ in sums(held_out=False)),  # one token a byte
        )
        for ranks in options.ranks:
            with _systems(replace(given, ranks=ranks), options.pieces, directory) as systems:
                rows: dict[str, list[Row]] = {system.name: [] for system in systems}
                idle = []
                for _ in range(options.rounds):
                    idle.append(wait_until_idle(at_most_s=options.patience))
                    for system in draw.sample(systems, len(systems)):
                        rows[system.name].append(system.step())
            record[ranks] = {"idle": idle, "rows": rows, "summary": summary(rows)}
            of_each = f"{options.responses} responses in groups of {options.group}, {given.updates} updates"
            print(
                f"\nprocesses {ranks}, threads of each {options.threads}, of each {of_each}; {options.rounds} rounds;"
            )
            print(f"before a round {statistics.median(idle):.0%} idle\n\n{page(summary(rows))}", flush=True)
    finally:
        shutil.rmtree(directory)
    if options.json:
        about = {
            "machine": machine,
            "argv": sys.argv[1:],
            "commit": shown.commit,
            "started_utc": shown.started_utc,
        }
        options.json.write_text(json.dumps({"about": about, "by_processes": record}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

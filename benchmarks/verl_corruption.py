"""What damaged checkpoints do to verl alone, and what they do under verl-slurm: docs/verl-corruption.md.

    make verl && .venv-verl/bin/python -m benchmarks.verl_corruption [--case NAME ...] [--out FILE]

Real verl, its SFT trainer on two CPU ranks. Before: one run with checkpoints of steps 2, 4 and 6; for each case a copy
of it is damaged and verl is started again, to go on to step 7. After: the same run under verl-slurm, its copies damaged
alike; what a start would resume from is asked of the lead's own code, and one damaged copy is started for real, to its
end, and compared with the run that nothing happened to.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "daemon")]

from tests.verl.damage import CASES, TRACKER, Case
from tests.verl.plain import VERLS, Ended, cpu_environ, run_sft
from tests.verl.runs import write_config
from tests.verl.same import differences
from tests.verl.tiny import make_model, make_sums, sft_words
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.fence import read_owner
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.loop_checkpoint import for_ranks, require_guest
from verl_slurm.checkpoint.store.recover import choose_resume
from verl_slurm.checkpoint.store.verify import read_manifest
from verl_slurm.verl.reshard.checkpoint import prepare_ranks
from verl_slurm.verl.reshard.dividing import this_python

_LAST, _FURTHER, _EPOCH = 6, 7, 8
_ASKED = "not started"
_ENOENT = "[Errno 2] No such file or directory: "  # as FileNotFoundError says already
_SOMEWHERE = re.compile(r"/\S*?/(?=global_step)")
_ERROR = re.compile(r"(?m)^(?:\[rank\d\]: )?((?:\w+\.)*\w*(?:Error|Exception): .*)$")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    before: str
    after: str
    ends: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="*", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "verl-corruption.md")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if not options.case or case.name in options.case]
    with tempfile.TemporaryDirectory(prefix="verl-corruption-") as place:
        rows = _all(Path(place), cases)
    options.out.write_text(page(rows))
    print(f"wrote {options.out}: {len(rows)} cases")
    return 0


def _all(place: Path, cases: Sequence[Case]) -> list[Row]:
    section = sft_words(make_model(place / "model"), make_sums(place / "sums.parquet"))
    plain = place / "plain"
    _plain(section, plain, _LAST)
    runs = _Served(section, place, _LAST)
    rows = []
    for case in cases:
        copy = place / f"plain-{case.name}"
        shutil.copytree(plain, copy)
        case.strike(copy / f"global_step_{_LAST}", copy / TRACKER)
        before = said_of(_plain(section, copy, _FURTHER, ranks=case.ranks))
        if case.silent and before.startswith("exit 0: goes on"):
            before += ", **with the damaged weights, and says nothing**"
        after, ends = runs.after(case)
        rows.append(Row(case.what, before, after, ends))
        print(f"{case.what}\n  verl alone: {before}\n  verl-slurm: {after}: {ends}", flush=True)
        shutil.rmtree(copy)
    rows.append(_at_an_epochs_end(section, place, plain))
    return rows


def _at_an_epochs_end(section: dict[str, object], place: Path, plain: Path) -> Row:
    """No damage at all: the newest checkpoint is that of an epoch's last step."""
    _plain(section, plain, _EPOCH)
    before = said_of(_plain(section, plain, _EPOCH + 1))
    tracker = (plain / TRACKER).read_text()
    whole = place / "whole"
    whole.mkdir()
    after, ends = _Served(section, whole, _EPOCH).after(Case("", "", lambda newest, tracker: None))
    what = f"none; the newest is of the last step of an epoch (step {_EPOCH})"
    return Row(what, f"{before}; the tracker still says {tracker}; so at every start", after, ends)


def _plain(section: dict[str, object], directory: Path, last: int, ranks: int = 2) -> Ended:
    words = [f"trainer.default_local_dir={directory}", f"trainer.total_training_steps={last}"]
    directory.mkdir(exist_ok=True)
    ended = run_sft(VERLS, section, words, cwd=directory.parent, ranks=ranks)
    if last == _LAST and ended.exit_code:
        raise SystemExit(f"verl does not run here:\n{ended.output[-4000:]}")
    return ended


def said_of(ended: Ended) -> str:
    """One line about a start of verl alone on a damaged directory whose newest step was 6."""
    if ended.exit_code:
        # The rank that failed says why; the others, that their peer has gone.
        said = [e for e in _ERROR.findall(ended.output) if "Connection" not in e and "ChildFailed" not in e]
        why = said[0] if said else ended.output.strip().splitlines()[-1]
        why = _SOMEWHERE.sub(".../", why).replace(_ENOENT, "").split(". ")[0][:110]
        return f"exit {ended.exit_code}: `{why}`"
    if not ended.steps:
        return "exit 0, without a single step"
    if ended.steps[0] == 1:
        return f"exit 0: **trains from step 0 again**, over the same directory ({len(ended.steps)} steps)"
    story = f"exit 0: goes on with step {ended.steps[0]}"
    if "No dataloader state found" in ended.output:
        return f"{story}, and **the data begins from its start**"
    return story


class _Served:
    """The run under verl-slurm, and its damaged copies."""

    def __init__(self, section: dict[str, object], place: Path, newest: int) -> None:
        self._newest, self._further = newest, newest + 1
        # A run's configuration names its directory, so each copy of it has to lie where the run was.
        self._root, self._base = place / "run", place / "run-interrupted"
        self._config = write_config(place / "run.yaml", self._root, section, self._further)
        if exit_code := self._start():
            logs = "\n".join(path.read_text()[-3000:] for path in sorted((self._root / "logs").glob("*.log")))
            raise SystemExit(f"the run ended with {exit_code}:\n{logs}")
        self._root.rename(self._base)
        checkpoints = self._base / "checkpoints"
        self._straight = place / "straight"
        (checkpoints / f"step_{self._further:06d}").rename(self._straight)
        self._started_for_real = False

    def after(self, case: Case) -> tuple[str, str]:
        """(what a start does, how the run ends)."""
        shutil.copytree(self._base, self._root, symlinks=True)
        try:
            return self._strike(case)
        finally:
            shutil.rmtree(self._root)

    def _strike(self, case: Case) -> tuple[str, str]:
        paths = RunPaths(self._root)
        newest = paths.checkpoints / f"step_{self._newest:06d}"
        case.strike(newest / f"global_step_{self._newest}", newest / TRACKER)
        real = case.ranks == 2 and not self._started_for_real
        try:
            if case.ranks != 2:
                owner = read_owner(paths)
                assert owner is not None
                prepare_ranks(paths, owner.attempt, read_manifest(newest), case.ranks, this_python)
                copy = for_ranks(paths, newest.name, case.ranks)
                require_guest(copy, "verl", world_size=case.ranks)
                return (
                    f"on from `{newest.name}`, divided for {case.ranks} rank",
                    "every tensor has the same bits",
                )
            choice = choose_resume(paths, "auto", move_damaged=not real)
        except VerlSlurmError as error:
            return f"refused: exit {int(error.exit_code)}", error.one_line().replace(str(self._root), "RUN")
        story = f"on from `{choice.name}`"
        if choice.name != newest.name:
            moved = real or (choice.set_aside and not newest.exists())
            story = f"`{newest.name}` {'is quarantined' if moved else 'STAYS'}, {story}"
        if not real:
            return story, _ASKED
        self._started_for_real = True
        exit_code = self._start()
        aside = list(paths.quarantine.glob(f"{newest.name}.*/"))
        assert len(aside) == int(choice.name != newest.name), "not set aside, or for nothing"
        inner = f"global_step_{self._further}"
        ours = paths.checkpoints / f"step_{self._further:06d}" / inner
        found = differences(ours, self._straight / inner) if ours.exists() else ["nothing"]
        same = "bit for bit the undisturbed run" if not found else f"DIFFERENT: {found[:3]}"
        return story, f"started for real: exit {exit_code}, step {self._further}, {same}"

    def _start(self) -> int:
        """One lead without Slurm, to the end; its exit code."""
        argv = [sys.executable, "-P", "-m", "verl_slurm.cli", "submit", str(self._config)]
        done = subprocess.run(
            [*argv, "--cluster", "local", "--wait"],
            env=cpu_environ(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode


def page(rows: Sequence[Row]) -> str:
    """The document. Cases with the same outcome, with verl alone and under verl-slurm, share a line."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("verl", "torch", "transformers"))
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        alike[row.before, row.after, row.ends].append(row.what)
    lines: list[str] = []
    above = ""
    for (before, after, ends), damage in alike.items():
        end = "the same" if (after, ends) == (above, _ASKED) else f"{after}; {ends}"
        lines.append(f"| {'; '.join(damage)} | {before} | {end} |")
        above = after
    return "\n".join([_HEAD.format(versions=versions), *lines, _TAIL])


_HEAD = """# Damaged checkpoints: verl alone, and under verl-slurm

For users of verl who ask what damaged checkpoints do to their run.

`python -m benchmarks.verl_corruption` made this page, with {versions}.
verl's SFT trainer saved steps 2, 4 and 6 on two CPU ranks. The newest checkpoint was damaged, and the run started
again: to its end where the last column says "for real", else up to the choice of a checkpoint.

| damage | verl alone | under verl-slurm |
|---|---|---|"""
_TAIL = """
verl takes no older checkpoint, so an exit with 1 comes at every start. It finds only damage that unpickling meets.
Under verl-slurm a manifest has the size and SHA-256 of every file. A checkpoint that does not verify moves to
`checkpoints/quarantine`, with the reason, and the run resumes from the newest that does. verl's tracker must verify,
too, and decides nothing.
"""


if __name__ == "__main__":
    sys.exit(main())

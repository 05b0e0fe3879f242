"""Something else than a file, in the place of any file of a run: each command names it, or does without it."""

import os
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import manifest_of, owns_it, stage
from tests.harness import ROOT
from tests.journals import append_event
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.commit import commit
from verl_slurm.submit.submission import carry_out, plan_submission

pytestmark = [pytest.mark.scenario("SEC17"), pytest.mark.slow]


def unix_socket(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, closing(socket.socket(socket.AF_UNIX)) as one:
        patch.chdir(path.parent)  # the address has room for 107 characters
        one.bind(path.name)


def hole(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, 1 << 40)


KINDS: dict[str, Callable[[Path], None]] = {
    "link": lambda path: path.symlink_to("/dev/zero"),
    "circle": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "socket": unix_socket,
    "hole": hole,
}
FILES = [
    *("run.yaml", "events.jsonl", "status.json", "steps.jsonl", "samples.jsonl", "attempt", "run_id"),
    *("code.json", "orchestration.json", "rewards.json", ".dataset_fingerprint", ".dataset_hashes"),
    *(
        "control",
        "control/trained_with.yaml",
        "control/tiers.json",
        "control/lead.json",
        "control/resume_once",
    ),
    *("control/attempt_000001.claim", "control/parts_since", "control/reward_request.json"),
    *("ledger", "ledger/attempt_000001.rank_0000.ledger", "logs", "logs/local-1_0_log.out", "code"),
    *(
        "checkpoints",
        "checkpoints/latest",
        "checkpoints/step_000002",
        "checkpoints/step_000002/manifest.json",
    ),
]
COMMANDS = [
    *("status RUN", "list RUN", "list PLACE", "report RUN --out PAGE", "logs RUN"),
    *("samples RUN", "cancel RUN", "requeue RUN", "watch RUN", "watch PLACE"),
    "submit RUN --dry-run --cluster local",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run that has ended, with two checkpoints. No command of this file changes it."""
    paths = RunPaths(tmp_path_factory.mktemp("runs") / "a")
    words = [f"run_dir={paths.root}", "code.tree=null"]
    carry_out(plan_submission(ROOT / "configs/pytorch_loop.yaml", words, cluster="local"), prepare_only=True)
    job = {"job_id": "local-1", "cluster": "local", "host": socket.gethostname()}
    append_event(paths, "submitted", **job)
    append_event(paths, "started", attempt=1, **job)
    for step in (1, 2):
        staging = stage(paths, step)
        commit(staging, manifest_of(staging), attempt_check=owns_it)
        append_event(paths, "verified", attempt=1, name=f"step_{step:06d}")
    append_event(paths, "ended", attempt=1, exit_code=0, exit="OK")
    return paths


Answers = Callable[[], dict[str, Any]]


@pytest.fixture
def answers(cli: Callable[..., Any], run: RunPaths, tmp_path: Path, without_slurm: None) -> Answers:
    """What each command does with the run, where there is no Slurm."""
    places = {"RUN": run.root, "PLACE": run.root.parent, "PAGE": tmp_path / "page.html"}

    def ask() -> dict[str, Any]:
        signal.alarm(60)  # it ends the tests: a command waits
        try:
            return {
                command: cli(*(places.get(word, word) for word in command.split())) for command in COMMANDS
            }
        finally:
            signal.alarm(0)

    return ask


@pytest.fixture(scope="module")
def usual() -> dict[str, int]:
    """The exit codes with files in all places, once they are known."""
    return {}


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        *((file, "pipe") for file in FILES),
        *(("status.json", kind) for kind in KINDS if kind != "pipe"),
        ("events.jsonl", "circle"),
        ("events.jsonl", "hole"),
        ("code.json", "link"),
        ("rewards.json", "directory"),
    ],
)
def test_each_command_names_what_is_no_file_or_does_without_it(
    answers: Answers, usual: dict[str, int], run: RunPaths, tmp_path: Path, file: str, kind: str
) -> None:
    usual |= usual or {command: done.code for command, done in answers().items()}
    path, away = run.root / file, tmp_path / "away"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(away)
    KINDS[kind](path)
    try:
        found = answers()
    finally:
        shutil.rmtree(path) if kind == "directory" else path.unlink()
        if away.exists():
            away.rename(path)
    for command, done in found.items():
        if done.code != usual[command]:
            assert done.code != ExitCode.INTERNAL
            # Without its run.yaml a directory is no run.
            assert (path.name if file != "run.yaml" else str(run.root.parent)) in done.error, (command, done)

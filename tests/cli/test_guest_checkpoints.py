"""What the commands say of a checkpoint that another loop saved: one clear line, and no traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run_config, write_config
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, clear_work, commit_tree
from verl_slurm.config.schema import GuestConfig, RunConfig
from verl_slurm.submit.checks.preflight import check_resume_from

Cli = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Two steps of a loop: their shards differ, what the ranks have in common does not."""
    paths = RunPaths(private_dir(tmp_path / "run"))
    write_config(paths, backend="command", command=("train.py",))
    attempt = take_attempt(paths, job_id="1", restart=0).attempt
    for step in (1, 2):
        work = clear_work(paths, attempt)
        (work / "guest").mkdir()
        (work / "guest" / "common.pt").write_bytes(b"common")
        (work / "guest" / "rank_0000.pt").write_bytes(b"own" * step)
        save = LoopSave(guest="loop", step=step, attempt=attempt, world_size=1)
        commit_tree(paths, save, {"guest": work / "guest"})
    return paths


def test_inspect_shows_what_is_known_and_opens_nothing(cli: Cli, run: RunPaths) -> None:
    shown = cli("inspect", str(run.root))
    assert shown.code == ExitCode.OK
    assert "the user's own (verl_slurm.run)" in shown.out
    assert "it is verified, not opened here" in shown.out
    assert "KL" not in shown.out
    facts = cli("inspect", str(run.root), "--json").json
    assert (facts["guest"], facts["step"], facts["domains"], facts["ranks"]) == ("loop", 2, [], [])


def test_diff_names_files_and_compare_their_bytes(cli: Cli, run: RunPaths) -> None:
    a, b = (str(run.checkpoint(step)) for step in (1, 2))
    found = cli("inspect", a, b, "--json").json["differences"]
    assert [(row["subject"], row["key"]) for row in found] == [
        ("position", "step"),
        ("tensors", "guest/rank_0000.pt"),
    ]
    compared = cli("inspect", "--bits", a, b, "--json")
    assert compared.code == ExitCode.DIFFERENT
    assert compared.json["differing"] == ["guest/rank_0000.pt"]
    assert "the same: 2 files" in cli("inspect", "--bits", a, a).out


def test_compare_believes_only_what_verifies(cli: Cli, run: RunPaths) -> None:
    (run.checkpoint(2) / "guest" / "common.pt").write_bytes(b"c0mmon")
    said = cli("inspect", "--bits", str(run.checkpoint(1)), str(run.checkpoint(2)))
    assert said.code == ExitCode.CORRUPT
    assert "does not verify" in said.error


def test_export_says_where_the_files_are_that_there_are(cli: Cli, run: RunPaths, tmp_path: Path) -> None:
    said = cli("export", str(run.root), "--to", "hf", "--out", str(tmp_path / "out"))
    assert said.code == ExitCode.CONFIG
    assert f"its own files are in {run.checkpoint(2) / 'guest'}" in said.error
    assert not (tmp_path / "out").exists()


def test_another_kind_of_loop_is_refused_before_anything_is_queued(run: RunPaths) -> None:
    place = run.checkpoint(1)

    def config(backend: str, command: tuple[str, ...]) -> RunConfig:
        trainer = GuestConfig(backend=backend, command=command)  # type: ignore[arg-type]
        return run_config(trainer=trainer, resume_from=place)

    check_resume_from(config("command", ("train.py",)))
    for backend in ("native", "verl"):
        with pytest.raises(
            ConfigError, match=f"found trainer.backend={backend}, expected trainer.backend=command"
        ):
            check_resume_from(config(backend, ()))


def test_status_has_no_reward_of_a_loop_that_is_not_ours(cli: Cli, run: RunPaths) -> None:
    told = [line.split()[0] for line in cli("status", str(run.root)).out.splitlines()]
    assert "checkpoint" in told
    assert "reward" not in told
    assert cli("status", str(run.root), "--json").json["reward"] is None

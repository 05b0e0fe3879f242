"""verl's own SFT trainer on two CPU ranks, disturbed, and at its end bit for bit what it is undisturbed."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hostile.runs_of_ranks import require_nothing_listens_but_lead_and_gloo
from tests.journals import Line, read_events
from tests.local_runs import finish, lead, until
from tests.verl.plain import OURS, VERLS, cpu_environ, run_sft
from tests.verl.runs import write_config
from tests.verl.same import differences
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import list_checkpoints
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.submit.submission import carry_out, plan_submission

pytestmark = [pytest.mark.verl, pytest.mark.torch]

LAST = 11
EPOCH = 8
"""Steps in one; `trainer.save_freq` is half of it."""


def prepared(root: Path, section: dict[str, object], **more: Any) -> RunPaths:
    config = write_config(root.with_suffix(".yaml"), root, section, LAST, **more)
    carry_out(plan_submission(config, [], cluster="local"), prepare_only=True)
    return RunPaths(root)


def started(paths: RunPaths) -> Any:
    return lead(paths, environ=cpu_environ(os.environ))


def last_of(paths: RunPaths) -> Path:
    return paths.checkpoints / f"step_{LAST:06d}" / f"global_step_{LAST}"


def events(paths: RunPaths, name: str) -> list[Line]:
    return [event for event in read_events(paths) if event["event"] == name]


def story(paths: RunPaths) -> str:
    logs = [path.read_text()[-3000:] for path in sorted(paths.logs.glob("*.log"))]
    return "\n".join([*(str(event) for event in read_events(paths)), *logs])


def ranks(paths: RunPaths) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            argv, environ = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if "verl_slurm.loops.verl.verl_sft" in argv and str(paths.root) in argv and "RANK" in environ:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, sums: dict[str, object]) -> RunPaths:
    """The run, undisturbed."""
    paths = prepared(tmp_path_factory.mktemp("straight") / "run", sums)
    assert finish(started(paths)) == 0, story(paths)
    assert [info.name for info in list_checkpoints(paths)] == ["step_000011", "step_000008", "step_000004"]
    return paths


@pytest.mark.variant
def test_asked_in_mid_step_and_killed_behind_an_epochs_end_it_ends_bit_for_bit_alike(
    straight: RunPaths, sums: dict[str, object], tmp_path: Path
) -> None:
    """Preempted within a step, it saves at that step's end; killed after the last save of an epoch, it goes on with the
    next epoch, where verl alone would end without a step."""
    paths = prepared(tmp_path / "run", sums)
    process = started(paths)
    until(process, "training")
    process.send_signal(signal.SIGUSR2)  # without Slurm: a preemption
    until(process, f"name=step_{EPOCH:06d}")
    ranks(paths)[1].send_signal(signal.SIGKILL)
    assert finish(process) == 0, story(paths)
    [asked] = [event for event in events(paths, "saved") if event["emergency"]]
    assert asked["name"] not in ("step_000004", "step_000008", "step_000011"), (
        "verl alone would not have saved it"
    )
    resumed = [event["resume"] for event in events(paths, "restart")]
    assert resumed == [None, asked["name"], f"step_{EPOCH:06d}"], story(paths)
    assert differences(last_of(paths), last_of(straight)) == []
    assert all(verify(info.path).ok for info in list_checkpoints(paths))
    assert not (paths.root / "work").exists() or not list((paths.root / "work").glob("*/global_step_*"))


@pytest.mark.soak  # what verl does alone
def test_verl_alone_ends_at_an_epochs_end_and_our_entry_in_front_goes_on(
    straight: RunPaths, sums: dict[str, object], tmp_path: Path
) -> None:
    """The trap that the work-around is for: should verl have closed it, this fails and the work-around may go."""
    saved = straight.checkpoints / f"step_{EPOCH:06d}"
    words = [
        f"trainer.total_training_steps={EPOCH + 1}",
        f"trainer.default_local_dir={tmp_path / 'work'}",
        "trainer.resume_mode=resume_path",
    ]
    # Past the check of the words that a run of ours may say.
    words.append(f"trainer.resume_from_path={saved / f'global_step_{EPOCH}'}")
    plain = run_sft(VERLS, sums, words, cwd=tmp_path)
    assert (plain.exit_code, plain.steps) == (0, ()), plain.output[-3000:]
    ours = run_sft(OURS, sums, words, cwd=tmp_path)
    assert (ours.exit_code, ours.steps) == (0, (EPOCH + 1,)), ours.output[-3000:]


def test_steps_that_the_data_does_not_have_are_refused_at_the_start(
    sums: dict[str, object], tmp_path: Path
) -> None:
    """verl would train to the data's end, leave what is behind the last save, and exit with 0."""
    words = ["trainer.total_training_steps=100", f"trainer.default_local_dir={tmp_path / 'work'}"]
    ended = run_sft(OURS, sums, words, cwd=tmp_path)
    assert ended.steps == ()
    assert "the data ends before the last step" in ended.output, ended.output[-3000:]
    assert "found 100 steps, and 16 in trainer.total_epochs=2" in ended.output
    assert "exitcode  : 10 " in ended.output


@pytest.mark.scenario("SEC01")
def test_nothing_of_verls_sft_listens_but_gloo_on_the_nodes_own_interface(
    tmp_path: Path, sums: dict[str, object]
) -> None:
    require_nothing_listens_but_lead_and_gloo(prepared(tmp_path / "run", sums), cpu_environ(os.environ))

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import tokens_per_second as bench
from benchmarks.whole_step import ours
from benchmarks.whole_step.gate import Gate, Said, Settings
from verl_slurm.config.load import load_resolved
from verl_slurm.trainer.state.position import StepShape

STUB = "tests.benchmarks.stub_rank"


@pytest.fixture
def given(tmp_path: Path) -> Settings:
    return Settings(
        model="tiny",
        data="data",
        directory=str(tmp_path / "systems" / "one"),
        ranks=2,
        threads=1,
        steps=2,
        responses=32,
        piece=8,
        group=4,
        mini=8,
        max_new_tokens=12,
        prompt_tokens=6,
    )


def _row(seconds: float, tokens: int) -> bench.Row:
    named = {"reward": 0.5, "cpu_s": 1.0, "generate_s": 0.1, "score_s": 0.2, "update_s": 0.3}
    return {"seconds": seconds, "tokens": tokens, **named}


def test_the_ratio_is_that_of_the_same_round_and_its_spread_is_said() -> None:
    # A machine that is ten times slower in the last round slows both.
    rows = {
        "ours": [_row(1.0, 300), _row(1.0, 100), _row(10.0, 2000)],
        "TRL": [_row(1.0, 200), _row(1.0, 200), _row(10.0, 1000)],
    }
    found = bench.summary(rows)
    assert found["ours"]["ratio"] == 1.5
    assert (found["ours"]["least"], found["ours"]["greatest"]) == (0.5, 2.0)
    assert found["ours"]["tokens_per_s"] == 200
    assert found["TRL"]["ratio"] == 1.0
    assert "| ours | 200 | 1.50 | 0.50, 2.00 | 1.000 | 0.100 | 0.200 | 0.300 | 1.000 |" in bench.page(found)


def test_a_step_ends_with_its_last_rank_and_sums_the_tokens_of_all(given: Settings) -> None:
    system = bench.System("stub", given, STUB)
    try:
        system.first()
        row = system.step()
        system.finish()
    finally:
        system.end()
    assert row["tokens"] == 11 + 12
    assert row["generate_s"] == 0.2  # of the slowest
    assert row["reward"] == 0.5
    assert row["seconds"] > 0.0


def test_a_rank_that_dies_ends_the_benchmark_with_its_last_words(given: Settings) -> None:
    system = bench.System("stub", replace(given, model="broken"), STUB)
    try:
        system.first()
        with pytest.raises(SystemExit, match="stub failed:\nno more"):
            system.step()
    finally:
        system.end()


def test_what_a_rank_hears_at_the_gate_is_all_that_lets_it_go_on(tmp_path: Path) -> None:
    passed = threading.Event()
    said = Said(tokens=7, generate_s=0.1, score_s=0.2, update_s=0.3, reward=0.4)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "gate"))
        listener.listen(1)
        gate = Gate(tmp_path / "gate")
        waiting = threading.Thread(target=lambda: (gate.wait(said), passed.set()), daemon=True)
        waiting.start()
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as line:
            assert '"tokens": 7' in line.readline()
            assert not passed.is_set()
            line.write("go on\n")
            line.flush()
            waiting.join(10.0)
    gate.close()
    assert passed.is_set()


def test_our_run_is_one_that_the_trainer_takes_and_does_what_the_settings_say(given: Settings) -> None:
    Path(given.directory).parent.mkdir(parents=True)
    ours.prepare(given)
    written = load_resolved(Path(given.directory) / "run.yaml")
    assert written == ours.config(given)
    assert StepShape.of(written).updates == given.updates == 4
    assert os.stat(given.directory).st_mode & 0o777 == 0o700


def test_both_sides_are_told_the_same(given: Settings) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: make bench-step")
    from benchmarks.whole_step import theirs

    told, run = theirs.arguments(given), ours.config(given)
    assert told["max_steps"] == run.train.steps * given.updates
    assert (
        told["per_device_train_batch_size"] * told["steps_per_generation"] == run.train.batch_size_per_device
    )
    assert told["num_generations"] == run.rollout.samples_per_prompt
    assert told["beta"] == run.train.kl_coef > 0.0
    assert told["learning_rate"] == run.train.actor_lr
    assert told["temperature"] == run.rollout.temperature
    assert told["max_completion_length"] == run.rollout.max_new_tokens

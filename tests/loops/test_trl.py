"""TRL's own trainers as guests, in this process: stopped in the middle of a cycle of completions, and resumed."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.fakes.daemon import Daemon
from tests.lanes import with_variants
from tests.loops.frames_kit import Run, stop, two_ranks
from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.runtime_state.codec import decode
from verl_slurm.save.ranks.collective import Collective
from verl_slurm.wire.messages import Finished, RankSaveFailed

datasets = pytest.importorskip("datasets", reason="NOT RUN: TRL is not installed: make trl")
pytest.importorskip("trl", reason="NOT RUN: TRL is not installed: make trl")
pytestmark = [pytest.mark.torch, pytest.mark.trl]

from transformers import TrainerCallback  # noqa: E402
from trl import BEMACallback, GRPOTrainer, RLOOTrainer  # noqa: E402

from tests.loops.trl_kit import distillation, dpo, kto, logged, model, online, reward, sft  # noqa: E402
from verl_slurm.loops.trl_state import TrlState  # noqa: E402

# Each case: the trainer, its settings, and where it is stopped; cycles are of 4 optimizer steps.
CYCLES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "slices": (GRPOTrainer, {"steps_per_generation": 4, "max_steps": 10}, (1, 4)),
    "iterations-and-accumulation": (
        GRPOTrainer,
        {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 10},
        (7,),
    ),
    # 16 prompts are two cycles: an epoch is of 8 steps, and the second and third have another order.
    "epochs": (GRPOTrainer, {"steps_per_generation": 4, "prompts": 16, "max_steps": 20}, (8, 18)),
    "rloo": (RLOOTrainer, {"steps_per_generation": 4, "max_steps": 8, "beta": 0.0}, (6,)),
}


@pytest.mark.parametrize(
    ("kind", "settings", "stops"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.soak] if name in ("epochs", "rloo") else [])
        for name, case in CYCLES.items()
    ],
)
def test_stopped_within_a_cycle_it_samples_nothing_twice_and_ends_bit_for_bit_alike(
    tmp_path: Path, kind: Any, settings: dict[str, Any], stops: tuple[int, ...]
) -> None:
    straight = online(Run(tmp_path / "straight").life(Daemon()), kind, **settings).train()
    for step in stops:
        run = Run(tmp_path / str(step))
        first = online(run.life(Daemon({step: stop()})), kind, **settings).train()
        assert first.stopped
        [checkpoint] = run.checkpoints()
        assert verify(checkpoint).ok
        ended = Daemon()
        resumed = online(run.life(ended), kind, **settings).train()
        assert ended.steps()[:2] == [step, step + 1]
        assert first.sampled + resumed.sampled == straight.sampled, f"stopped at {step}"
        assert torch.equal(resumed.weights, straight.weights), f"stopped at {step}"
        assert [message.step for message in ended.heard(Finished)] == [settings["max_steps"]]


def test_what_it_logs_after_a_resume_is_what_it_would_have_logged(tmp_path: Path) -> None:
    settings = {
        "steps_per_generation": 4,
        "max_steps": 9,
        "logging_strategy": "steps",
        "logging_steps": 3,
        "log_completions": True,
        "num_completions_to_print": 0,
    }
    straight = online(Run(tmp_path / "straight").life(Daemon()), **settings).train()
    run = Run(tmp_path / "run")
    assert online(run.life(Daemon({5: stop()})), **settings).train().stopped
    resumed = online(run.life(Daemon()), **settings).train()
    assert logged(resumed) == logged(straight)
    assert "num_tokens" in logged(straight)[-2], "counted on, in the cycle after the resumed one"
    tables = "out/completions/completions_00006.parquet"
    one, other = (
        datasets.Dataset.from_parquet(str(tmp_path / name / tables)) for name in ("straight", "run")
    )
    assert len(one) == 16
    assert one.to_dict() == other.to_dict()


def test_killed_while_it_samples_it_samples_again_what_came_after_the_last_checkpoint(tmp_path: Path) -> None:
    class Killed(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 7:
                raise KeyboardInterrupt

    settings = {"steps_per_generation": 2, "max_steps": 8}
    straight = online(Run(tmp_path / "straight").life(Daemon()), **settings).train()
    run = Run(tmp_path / "run", every_steps=3)
    with pytest.raises(KeyboardInterrupt):
        online(run.life(Daemon()), more=[Killed()], **settings).train()
    resumed = online(run.life(Daemon()), **settings).train()
    assert torch.equal(resumed.weights, straight.weights)
    # Three cycles came before the checkpoint of step 6, which is the end of the third.
    assert resumed.sampled == straight.sampled[3 * 8 :]


def test_a_reference_that_follows_the_policy_is_saved_with_it(tmp_path: Path) -> None:
    files = tmp_path / "model"
    model().save_pretrained(files)
    settings = {
        "policy": str(files),
        "steps_per_generation": 2,
        "max_steps": 6,
        "beta": 0.5,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    }
    straight = online(Run(tmp_path / "straight").life(Daemon()), **settings).train()
    run = Run(tmp_path / "run")
    assert online(run.life(Daemon({3: stop()})), **settings).train().stopped
    assert torch.equal(online(run.life(Daemon()), **settings).train().weights, straight.weights)


def test_another_cycle_is_refused_in_the_middle_of_one_and_not_at_its_end(tmp_path: Path) -> None:
    run, settings = Run(tmp_path / "run"), {"max_steps": 8}
    online(run.life(Daemon({3: stop()})), steps_per_generation=4, **settings).train()
    daemon = Daemon()
    with pytest.raises(VerlSlurmError, match="steps_per_generation=2"):
        online(run.life(daemon), steps_per_generation=2, **settings).train()
    assert daemon.kinds() == ["RankRefused"]
    online(run.life(Daemon({4: stop()})), steps_per_generation=4, **settings).train()
    assert not online(run.life(Daemon()), steps_per_generation=2, **settings).train().stopped


class Strange(GRPOTrainer):
    """Has what only a pickle could save among its completions."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs) | {"words": [object() for _ in inputs]}


def test_completions_that_cannot_be_saved_cost_themselves_and_not_the_checkpoint(tmp_path: Path) -> None:
    run, daemon = Run(tmp_path / "run"), Daemon({3: stop()})
    settings = {"steps_per_generation": 4, "max_steps": 4}
    first = online(run.life(daemon), Strange, **settings).train()
    assert first.stopped
    assert not daemon.heard(RankSaveFailed)
    [said] = daemon.notices("ledger")
    assert "the completions of this cycle are not in the checkpoint of step 3" in said
    assert "found object" in said
    resumed = online(run.life(Daemon()), Strange, **settings).train()
    assert len(resumed.sampled) == len(first.sampled) == 16, "sampled again"


class OtherRankCannot(Collective):
    """Another rank has said, when asked first, that it cannot save its completions."""

    asked = 0

    def max(self, values: Sequence[int]) -> list[int]:
        self.asked += 1
        return [1] if self.asked == 1 else super().max(values)


def test_completions_that_another_rank_cannot_save_are_left_out_here_too(tmp_path: Path) -> None:
    session = Run(tmp_path / "run").life(Daemon({3: stop()}))
    life = online(session, steps_per_generation=4, max_steps=4).train()
    kept = []
    for name, ranks in (("alone", Collective(None)), ("two", OtherRankCannot(None))):
        (tmp_path / name).mkdir()
        _, problem = TrlState(life.trainer).write(tmp_path / name, 3, ranks)
        state = decode((tmp_path / name / "trl/runtime_state.rank_0000.msgpack.zst").read_bytes())
        tree = msgspec.msgpack.decode(state.loop["tree"].tobytes())
        kept.append((tree["trainer"]["completions"] is not None, problem))
    assert kept == [(True, ""), (False, "another rank cannot save its own")]


class Buffering(GRPOTrainer):
    """Prepares its batches by a rule of its own."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return super()._prepare_inputs(generation_batch)


def test_a_trainer_that_keeps_completions_in_another_way_is_said_to_lose_them(tmp_path: Path) -> None:
    daemon = Daemon()
    online(Run(tmp_path / "run").life(daemon), Buffering, max_steps=1).train()
    [said] = daemon.notices("ledger")
    assert said.startswith("Buffering keeps completions in a way that is not known here")


def test_averages_that_no_checkpoint_has_are_said_to_start_anew(tmp_path: Path) -> None:
    daemon = Daemon()
    online(Run(tmp_path / "run").life(daemon), more=[BEMACallback()], max_steps=1).train()
    assert daemon.notices("ledger") == ["the averages of BEMACallback start anew after an interruption"]


def test_a_checkpoint_without_trls_state_is_resumed_and_its_loss_said(tmp_path: Path) -> None:
    run, settings = Run(tmp_path / "run"), {"steps_per_generation": 4, "max_steps": 4}
    online(run.life(Daemon({3: stop()})), **settings).train()
    shutil.rmtree(run.checkpoints()[-1] / "guest/trl")
    daemon = Daemon()
    online(run.life(daemon), **settings).train()
    [said] = daemon.notices("ledger")
    assert "the checkpoint has no state of TRL's" in said


@pytest.mark.parametrize("at", with_variants(2, 5, 8))
def test_sft_ends_bit_for_bit_alike(tmp_path: Path, at: int) -> None:
    settings = {"max_steps": 9, "logging_strategy": "steps", "logging_steps": 3}
    straight = sft(Run(tmp_path / "straight").life(Daemon()), **settings).train()
    run = Run(tmp_path / "run")
    assert sft(run.life(Daemon({at: stop()})), **settings).train().stopped
    resumed = sft(run.life(Daemon()), **settings).train()
    assert torch.equal(resumed.weights, straight.weights)
    assert logged(resumed) == logged(straight), "num_tokens counted on"


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(dpo, {}, id="dpo"),
        pytest.param(
            dpo,
            {"sync_ref_model": True, "ref_model_sync_steps": 2},
            id="dpo-synced",
            marks=pytest.mark.variant,
        ),
        pytest.param(dpo, {"precompute_ref_log_probs": True}, id="dpo-precomputed", marks=pytest.mark.soak),
        pytest.param(kto, {}, id="kto", marks=pytest.mark.soak),
        pytest.param(reward, {}, id="reward"),
        pytest.param(distillation, {}, id="distillation", marks=pytest.mark.soak),
    ],
)
def test_its_other_trainers_end_bit_for_bit_alike(
    tmp_path: Path, make: Any, settings: dict[str, Any]
) -> None:
    files = tmp_path / "model"
    model().save_pretrained(files)
    settings = {"max_steps": 9, **settings}
    straight = make(Run(tmp_path / "straight").life(Daemon()), files, **settings).train()
    run = Run(tmp_path / "run")
    assert make(run.life(Daemon({3: stop()})), files, **settings).train().stopped
    assert torch.equal(make(run.life(Daemon()), files, **settings).train().weights, straight.weights)


@pytest.mark.variant
def test_sharded_by_accelerate_it_samples_nothing_twice_and_ends_bit_for_bit_alike(tmp_path: Path) -> None:
    Run(tmp_path / "straight"), Run(tmp_path / "stopped")
    two_ranks(Path(__file__).with_name("fsdp_worker.py"), str(tmp_path), "grpo")
    files = {path.name for path in (tmp_path / "stopped/checkpoints/step_000003/guest/trl/own").iterdir()}
    assert {"rank_0000.bin", "rank_0001.bin"} <= files


STREAMS = """
import json, sys
import datasets

rows = [{"id": n} for n in range(6)]
def new():
    return datasets.IterableDataset.from_generator(lambda: iter(rows))

first = new()
passes = iter(first)
read = [next(passes)["id"] for _ in range(2)]
resumed = new()
resumed.load_state_dict(first.state_dict())
next(iter(resumed))  # a look, as TRL's constructors take
print(json.dumps([read, [row["id"] for row in resumed], [row["id"] for row in resumed]]))
"""


def test_a_stream_that_was_resumed_begins_its_later_passes_at_its_beginning(tmp_path: Path) -> None:
    """By datasets alone each later pass begins where the first one was resumed (a trial)."""
    (tmp_path / "streams.py").write_text(STREAMS)
    argv = [sys.executable, "-P", "-m", "verl_slurm.loops.rendezvous", str(tmp_path / "streams.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[[0, 1], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]\n"

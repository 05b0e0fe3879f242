"""GRPO from end to end: interrupted anywhere it ends with the same bits, and nothing of a critic is anywhere.

The safe points of a process of this configuration, by number:

    0 step 0    1 generate     2-3 score     4 advantage    5-8 update
    9 step 1    10 generate    11-12 score   13 advantage   14-17 update   18 the end
"""

import json
from pathlib import Path

import msgspec
import pytest

from tests.builders import new_training, train_config, write_config
from tests.ledger_stats import ledger_stats
from tests.processes import torchrun
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.inspect.compare import compare
from verl_slurm.checkpoint.inspect.describe import describe
from verl_slurm.checkpoint.store.verify import read_manifest, verify
from verl_slurm.config import load
from verl_slurm.config.elastic import keep_step
from verl_slurm.config.schema import DistributedConfig, TrainConfig
from verl_slurm.trainer.resuming import check_manifest
from verl_slurm.trainer.state.train_state import update_metrics

pytestmark = [pytest.mark.torch, pytest.mark.long]

STEPS, GROUP = 2, 4
GRPO = train_config(
    algorithm="grpo",
    steps=STEPS,
    sizes=(16, 8, 8),
    clip_ratio_high=0.28,
    loss_aggregation="sequence_mean",
    kl_in="loss",
)
PPO = msgspec.structs.replace(GRPO, algorithm="ppo", loss_aggregation="fixed_length", kl_estimator="k3")
Lives = list[tuple[int | None, str]]
TO_THE_END: Lives = [(None, "")]


class Runs:
    """Makes runs and gives them their lives."""

    def __init__(self, root: Path, model: Path, data: Path) -> None:
        self._root, self._model, self._data = root, model, data

    def make(self, name: str, train: TrainConfig) -> RunPaths:
        return new_training(
            self._root / name,
            self._model,
            self._data,
            max_new_tokens=5,
            samples_per_prompt=GROUP,
            train=train,
            ranks=2,
            every_steps=2,
            keep_last=2,
            components=("actor",),
            partial_every_steps=1,
        )

    def live(self, plan: list[tuple[RunPaths, Lives]]) -> str:
        """Give each run its lives, all with the same ranks; what they said."""
        world = load.load_resolved(plan[0][0].run_yaml).distributed.world_size
        words = json.dumps([(str(paths.root), lives) for paths, lives in plan])
        ranks = torchrun("-m", "tests.trainer.lives_worker", words, ranks=world)
        assert ranks.returncode == 0, ranks.stderr[-4000:]
        return ranks.stdout


def _final(paths: RunPaths) -> Path:
    return paths.checkpoint(STEPS)


# Numbers count from where each life begins.
INTERRUPTED: dict[str, Lives] = {
    # generate, score, advantage, update of step 0; then dead in step 1
    "stopped_in_every_phase": [(1, "stop"), (2, "stop"), (1, "stop"), (3, "stop"), (8, "die")],
    "with_its_ledger_alone": [(2, "die"), (14, "die")],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Path, sums_root: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("grpo"), tiny, sums_root)


@pytest.fixture(scope="module")
def lived(runs: Runs) -> dict[str, RunPaths]:
    """Every run of this page, in one start of the ranks: by the names of INTERRUPTED, and undisturbed."""
    plan = [(runs.make("undisturbed", GRPO), TO_THE_END)]
    plan += [(runs.make(name, GRPO), [*lives, *TO_THE_END]) for name, lives in INTERRUPTED.items()]
    plan += [(runs.make("ppo", PPO), TO_THE_END)]
    plan += [(runs.make("ppo_interrupted", PPO), [(4, "stop"), *TO_THE_END])]
    plan += [(runs.make("resharded", GRPO), [(5, "stop")])]
    runs.live(plan)
    return {paths.root.name: paths for paths, _ in plan}


def _assert_nothing_changed(paths: RunPaths, undisturbed: RunPaths) -> None:
    result = compare(_final(undisturbed), _final(paths))
    assert result.same, result.differing
    journal = ledger_stats(paths)
    assert (journal.duplicates, journal.problems) == ((), ())


@pytest.mark.parametrize("name", INTERRUPTED)
def test_grpo_interrupted_at_any_safe_point_ends_with_the_same_bits(
    lived: dict[str, RunPaths], name: str
) -> None:
    _assert_nothing_changed(lived[name], lived["undisturbed"])


@pytest.mark.variant
def test_so_does_ppo_with_several_responses_to_a_prompt_and_the_kl_in_its_loss(
    lived: dict[str, RunPaths],
) -> None:
    _assert_nothing_changed(lived["ppo_interrupted"], lived["ppo"])


def test_the_comparison_can_fail(lived: dict[str, RunPaths]) -> None:
    result = compare(_final(lived["undisturbed"]), _final(lived["ppo"]))
    assert "critic/ (only in one)" in result.differing
    assert any(name.startswith("actor/") for name in result.differing)


def test_there_is_no_critic_in_a_checkpoint_of_grpo(lived: dict[str, RunPaths]) -> None:
    directory = _final(lived["undisturbed"])
    verdict = verify(directory)
    assert verdict.ok, verdict.problems
    assert verdict.manifest is not None
    assert verdict.manifest.roles == ("actor",)
    assert not any("critic" in path.name for path in directory.rglob("*"))
    facts = describe(directory)
    assert [domain["domain"] for domain in facts["domains"]] == ["actor", "optimizer"]
    assert not any(tensor["name"].startswith("critic.") for tensor in facts["tensors"])
    assert list(msgspec.json.decode((directory / "scheduler.json").read_bytes())) == ["actor"]
    partial = verify(lived["undisturbed"].partial.checkpoint(1))
    assert partial.ok, partial.problems


def _history(paths: RunPaths) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = msgspec.json.decode((_final(paths) / "metadata.json").read_bytes())[
        "history"
    ]
    return rows


def test_the_row_of_a_step_has_the_columns_of_its_algorithm(lived: dict[str, RunPaths]) -> None:
    row = _history(lived["undisturbed"])[-1]
    assert set(update_metrics(GRPO)) <= row.keys()
    assert not [name for name in row if name.startswith(("value_", "critic_"))]
    assert row["kl_loss"] > 0
    assert {"value_loss", "critic_grad_norm", "kl_loss"} <= _history(lived["ppo"])[-1].keys()


def test_a_checkpoint_of_one_algorithm_is_refused_by_the_other(lived: dict[str, RunPaths]) -> None:
    grpo, ppo = (load.load_resolved(lived[name].run_yaml) for name in ("undisturbed", "ppo"))
    for name, config, expected in (
        ("ppo", grpo, "found train.algorithm=grpo, which trains actor; expected train.algorithm=ppo"),
        ("undisturbed", ppo, "found train.algorithm=ppo, which trains actor and critic"),
    ):
        directory = _final(lived[name])
        frozen = read_manifest(directory).frozen
        with pytest.raises(ConfigError) as caught:
            check_manifest(directory, config, frozen, lived[name])
        assert expected.replace("; expected", ",").split(",")[0] in caught.value.one_line()


@pytest.mark.variant
def test_a_run_of_two_ranks_goes_on_with_one_and_keeps_its_groups(
    runs: Runs, lived: dict[str, RunPaths]
) -> None:
    paths = lived["resharded"]
    old = load.load_resolved(paths.run_yaml)
    narrower = msgspec.structs.replace(old, distributed=DistributedConfig(dp_size=1, nodes=1, device="cpu"))
    write_config(paths, keep_step(old, narrower))
    said = runs.live([(paths, TO_THE_END)])
    # All 32 responses of step 0, to 8 prompts, had their advantages; none was sampled again.
    assert "resumed step_000000_sp0005: step 0 update 0, 8 prompts consumed" in said
    assert verify(_final(paths)).ok
    first, undisturbed = _history(paths)[0], _history(lived["undisturbed"])[0]
    for name in ("reward", "kl", "response_tokens", "sampler_gap"):
        assert first[name] == pytest.approx(undisturbed[name], rel=1e-9)
    journal = ledger_stats(paths)
    assert (journal.duplicates, journal.problems) == ((), ())

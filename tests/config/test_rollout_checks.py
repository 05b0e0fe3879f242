"""Rollout engines in a configuration: what is refused before anything is queued."""

import msgspec
import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.checks import rollout as rollout_checks
from verl_slurm.config.checks.rollout import check_engine, max_model_len, model_complaints, require_engine
from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.schema import RunConfig

GOOD = {"num_attention_heads": 4, "hidden_size": 128, "max_position_embeddings": 128}


def config(dp_size: int = 4, nodes: int = 2, device: str = "cpu", **rollout: object) -> RunConfig:
    return run_config(**({"engine": "vllm"} | rollout), dp_size=dp_size, nodes=nodes, device=device)


def test_the_defaults_and_a_pair_of_ranks_on_each_node_are_accepted() -> None:
    for good in (RunConfig(), config(), config(tensor_parallel_size=2)):
        assert complaints(good) == []
    check_engine(config(tensor_parallel_size=2), "m", GOOD)


@pytest.mark.parametrize(
    ("run", "change", "key"),
    [
        (config(nodes=1, tensor_parallel_size=4), {"num_attention_heads": 6}, "rollout.tensor_parallel_size"),
        (config(), {"hidden_size": 64}, "rollout.engine"),
        (config(), {"head_dim": 48}, "rollout.engine"),
        (config(max_new_tokens=113), {}, "rollout.max_new_tokens"),
        (config(), {"text_config": GOOD | {"hidden_size": 64}}, "rollout.engine"),
    ],
)
def test_a_model_that_vllm_would_refuse_is_refused_before(
    run: RunConfig, change: dict[str, object], key: str
) -> None:
    described = GOOD | change
    if run.rollout.tensor_parallel_size == 4:
        described["hidden_size"] = 6 * 32
    assert [complaint.key for complaint in model_complaints(run, described)] == [key]
    with pytest.raises(ConfigError, match="vLLM cannot sample from this model: /m: rollout"):
        check_engine(run, "/m", described)
    rollout = msgspec.structs.replace(run.rollout, engine="hf")
    check_engine(msgspec.structs.replace(run, rollout=rollout), "/m", described)


def test_what_vllm_may_be_able_to_do_is_left_to_it() -> None:
    assert not list(model_complaints(config(device="auto"), GOOD | {"hidden_size": 64})), "heads on a GPU"
    long = config(max_new_tokens=300)
    assert list(model_complaints(long, GOOD))
    assert not list(model_complaints(long, GOOD | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}))
    assert max_model_len(config(max_new_tokens=112)) == 128, "prompt and response"
    assert not list(model_complaints(config(max_new_tokens=112), GOOD))


def test_an_engine_that_is_not_installed_is_one_line_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_checks, "find_spec", lambda _: None)
    require_engine(RunConfig())
    with pytest.raises(ConfigError) as caught:
        require_engine(config())
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "vLLM is not installed here" in caught.value.one_line()
    assert "docs/rollout-engines.md" in caught.value.one_line()

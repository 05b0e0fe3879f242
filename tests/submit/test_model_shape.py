"""Which models divide into which shapes."""

from typing import Any

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.schema import DistributedConfig
from verl_slurm.submit.checks.model_files import BUILTIN_MODELS, check_model_shape, shape_complaints

TINY = BUILTIN_MODELS["tiny"]


@pytest.mark.parametrize(
    ("tp", "pp", "changes", "expected"),
    [
        (1, 1, {"model_type": "gpt2"}, ""),
        (2, 2, {}, ""),
        (4, 1, {}, "num_key_value_heads=2"),
        (3, 1, {}, "num_attention_heads=4"),
        (4, 1, {"num_key_value_heads": None, "intermediate_size": 190}, "intermediate_size=190"),
        (1, 3, {}, "num_hidden_layers=2"),
        (1, 2, {"tie_word_embeddings": True}, "cannot share a weight"),
        (2, 1, {"model_type": "gpt2"}, "a family with tp in docs/models.md"),
        (1, 2, {"model_type": "gpt2"}, "a family with pp in docs/models.md"),
        (2, 1, {"model_type": "qwen3"}, ""),
        (1, 2, {"model_type": "cohere"}, "a family with pp"),
        (2, 1, {"model_type": "cohere"}, ""),
        (2, 1, {"model_type": "cohere", "use_qk_norm": True}, "a family with tp"),
        (1, 2, {"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "a family with pp"),
        (2, 1, {"model_type": "never-heard-of"}, "a family with tp"),
    ],
)
def test_what_does_not_divide_is_said_with_the_numbers(
    tp: int, pp: int, changes: dict[str, Any], expected: str
) -> None:
    found = list(shape_complaints(DistributedConfig(tp_size=tp, pp_size=pp), {**TINY, **changes}))
    assert [expected in complaint.expected for complaint in found[:1]] == ([True] if expected else [])


def test_a_plan_that_cannot_be_followed_is_named_with_its_word_and_its_family() -> None:
    said = {**TINY, "model_type": "mixtral"}
    with pytest.raises(ConfigError, match="mixtral: moe_tp_experts in transformers' tensor-parallel plan"):
        check_model_shape(DistributedConfig(tp_size=2), "/models/mixtral", said)
    said = {**TINY, "num_attention_heads": 6}
    check_model_shape(DistributedConfig(), "/models/six", said)
    with pytest.raises(ConfigError, match=r"tp_size, /models/six.*found 4, expected a divisor of .*heads=6"):
        check_model_shape(DistributedConfig(tp_size=4), "/models/six", said)
    with pytest.raises(ConfigError, match="builtin:tiny"):
        check_model_shape(DistributedConfig(tp_size=4), "builtin:tiny", TINY)

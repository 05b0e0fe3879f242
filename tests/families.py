"""One tiny model of each family, with random weights and the built-in tokenizer, as a Hugging Face directory.

`python -m tests.families` writes docs/models.md from `verl_slurm.config.families`; a test compares them.
"""

import shutil
from pathlib import Path
from typing import Any

from verl_slurm.config.families import FAMILIES, REFUSED, Family

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

_USUAL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_FEW_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_GPT: dict[str, Any] = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LATENT: dict[str, Any] = {
    **_USUAL,
    **_FEW_EXPERTS,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_LINEAR: dict[str, Any] = {
    **_USUAL,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

TINY: dict[str, dict[str, Any]] = {
    "apertus": _USUAL,
    "bloom": {"vocab_size": 264, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": _USUAL,
    "cohere2": {**_USUAL, "sliding_window": 8},
    "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "falcon": {
        "vocab_size": 264,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "exaone4": {**_USUAL, "sliding_window": 8, "sliding_window_pattern": 2},
    "falcon-alibi": {
        "vocab_size": 264,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "alibi": True,
        "multi_query": False,
    },
    "gemma": {**_USUAL, "head_dim": 8},
    # A cap that is as low as the scores of so small a model: whoever leaves it out computes something else.
    "gemma2": {**_USUAL, "head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 1.0},
    "gemma3_text": {**_USUAL, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
    "glm4": {**_USUAL, "head_dim": 8},
    "glm4_moe": {
        **_USUAL,
        **_FEW_EXPERTS,
        "head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {
        "vocab_size": 264,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 64,
    },
    "gpt_neox": {key: value for key, value in _USUAL.items() if key != "num_key_value_heads"},
    "gpt_oss": {
        **_USUAL,
        **_FEW_EXPERTS,
        "num_local_experts": 4,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": _USUAL,
    "granitemoe": {**_USUAL, **_FEW_EXPERTS, "num_local_experts": 4},
    "lfm2": {**_USUAL, "layer_types": ["conv", "full_attention"]},
    "llama": _USUAL,
    "llama-tied": {**_USUAL, "tie_word_embeddings": True},
    "mistral": {**_USUAL, "sliding_window": 8},
    "mixtral": {**_USUAL, **_FEW_EXPERTS, "num_local_experts": 4},
    "mpt": {"vocab_size": 264, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "nemotron": _USUAL,
    "olmo": _USUAL,
    "olmo2": _USUAL,
    "olmo3": {**_USUAL, "sliding_window": 8},
    "olmoe": {**_USUAL, **_FEW_EXPERTS, "num_experts": 4},
    "opt": {**_USUAL, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "phi": {**_USUAL, "num_key_value_heads": 4},
    "phi3": _USUAL,
    "phimoe": {**_USUAL, **_FEW_EXPERTS, "num_local_experts": 4},
    "qwen2": _USUAL,
    "qwen2_moe": {
        **_USUAL,
        **_FEW_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3": {**_USUAL, "head_dim": 8},
    "qwen3_5_text": _LINEAR,
    "qwen3_moe": {**_USUAL, **_FEW_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "qwen3_next": {
        **_LINEAR,
        **_FEW_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "seed_oss": _USUAL,
    "smollm3": {**_USUAL, "pad_token_id": None},
    "stablelm": _USUAL,
    "starcoder2": _USUAL,
}
"""Name of the specimen → what its config differs in from the default. A word behind `-` is a variant of a family."""


def tiny_config(name: str) -> Any:
    """The configuration of a specimen; token ids are those of the built-in tokenizer."""
    from transformers import AutoConfig

    words = {"pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258, **TINY[name]}
    return AutoConfig.for_model(name.partition("-")[0], **words)


def build_family(name: str, directory: Path, tokenizer: Path, *, std: float = 0.2) -> Path:
    """Write a specimen with random weights to `directory`, with the tokenizer of another model directory.

    Args:
        std: ten times as spread as usual, so that a wrong mask or position shows in the numbers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=std)
    model.save_pretrained(str(directory))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, directory / file)
    return directory


_HEAD = """# Models that this trainer trains

For users who choose a base model: which families train, with which parallelism and attention.

`model.path` is a directory with `config.json`, safetensors and a tokenizer. `model_type` in config.json names the
family. `verl-slurm submit` reads it on the login node, and refuses what cannot work before it is queued. PPO and GRPO
train every family of the table.

`make families` builds each family small with random weights, and trains it on two ranks of FSDP2. The log probabilities
of sampling are those of scoring, a row scores the same alone and in a padded batch, and an interrupted run ends with
the same bits. All 562 tests passed in 11 minutes on two cores, on CPUs, in float32, with transformers 5.10.4.
`flash_attention_2` has not been run.

* **tp**, **pp**: whether `distributed.tp_size` and `pp_size` may be above 1. `tp_size` may not if config.json sets
  `use_qk_norm` or `qk_layernorm`, `pp_size` not if embedding and head share their weight (`tie_word_embeddings`).
* **Attention**: `model.attn_implementation` may be `sdpa`, `eager` or `flash_attention_2`, but for the remarks. The
  default `auto` takes `sdpa`, or `eager` for a family without it. `flash_attention_2` needs GPUs, the package
  `flash_attn`, bfloat16 and `deterministic: false`. Attention kernels that config.json names are ignored.
* **Length**: the key of config.json that limits prompt and response together. Other families compute positions, so
  longer sequences run; `submit` says when they are longer than the model was made for.
* **MoE**: the router trains without its auxiliary loss. **Hybrid**: some layers keep a state, not keys and values.
"""

_TAIL = """
Refused ("{why}"):
{refused}.

A `model_type` that this page does not name is accepted if its class is a causal language model of transformers.
`submit` then says that it has not been tried. Encoders, and encoders with a decoder (T5, BART, BERT), are refused.

## Weights

* Weights must be safetensors: `model.safetensors`, or the shards that `model.safetensors.index.json` names; a directory
  with both is refused. Pickled weights (`pytorch_model.bin`) are refused with the command that converts them.
* Quantized weights (`quantization_config`) and adapters (`adapter_config.json`, `adapter_model.*`) are refused, also
  beside a model's files: dequantize or merge them.

## End tokens

A response ends at each `eos_token_id` of `generation_config.json` (of `config.json` where that file is missing), and at
the tokenizer's `eos_token`. Nothing else of `generation_config.json` counts, such as temperature, `top_p` and `top_k`.
`submit` refuses a tokenizer without an `eos_token`, one that is not in its vocabulary, and an end token beyond
`vocab_size`.

## The critic

The critic of PPO is the family's own transformer with a linear layer of width 1 in place of the output head:
`score.weight` [1, H] and `score.bias` [1] in checkpoints and exports. `verl-slurm export --role critic --to hf` writes
`XForTokenClassification` in config.json where transformers has such a class with the same tensors. For the other
families it names the transformer alone, which `AutoModel.from_pretrained` loads: put the linear layer on its last
hidden state.
"""


def _remarks(family: Family) -> str:
    missing = ["sdpa"] * (not family.sdpa) + ["flash_attention_2"] * (not family.flash)
    attention = f"no {' or '.join(missing)}" if missing else ""
    length = f"length: `{family.positions[0]}`" if family.positions else ""
    return "; ".join(filter(None, (attention, length, family.remark)))


def page() -> str:
    """docs/models.md, whole."""
    lines = [_HEAD, "| family | `model_type` | tp | pp | remarks |", "| --- | --- | --- | --- | --- |"]
    for kind, family in sorted(FAMILIES.items(), key=lambda item: item[1].name.lower()):
        cells = [
            family.name,
            f"`{kind}`",
            "no" if family.tp else "yes",
            "yes" if family.pp else "no",
            _remarks(family),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    refused = ", ".join(f"{name} (`{kind}`)" for kind, (name, _) in sorted(REFUSED.items()))
    (why,) = {why for _, why in REFUSED.values()}
    return "\n".join(lines) + "\n" + _TAIL.format(refused=refused, why=why)


if __name__ == "__main__":
    PAGE.write_text(page())

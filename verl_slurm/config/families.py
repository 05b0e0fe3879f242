"""Declares the tested model families, by `model_type` of config.json, and checks configurations against them.

Declared, so that a login node can answer without torch; a test compares every field with what transformers does.
docs/models.md is generated from this table.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from verl_slurm.config.checks import Complaint
from verl_slurm.config.checks.rollout import max_model_len, sampling_dtype
from verl_slurm.config.schema import Attention, RunConfig


class Family(NamedTuple):
    """Describes one `model_type`."""

    name: str
    sdpa: bool = True
    """torch's scaled dot product computes its attention in each allowed release of transformers. False: `auto` means
    eager.
    """
    flash: bool = True
    """transformers offers flash_attention_2."""
    tp: str = ""
    """The part of transformers' tensor-parallel plan that `trainer/parallel/tensor.py` does not follow. Empty:
    tp_size may be above 1.
    """
    pp: bool = True
    """pp_size may be above 1: the model is embedding, layers, norm and head, run one after the other."""
    positions: tuple[str, int] | None = None
    """The key of config.json that limits the length of a sequence, and its value if config.json lacks it. None:
    positions are computed, and any length runs.
    """
    remark: str = ""


_NO_PLAN = "no plan"
_MOE = "MoE"
_HYBRID = "hybrid"

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2, 3"),
    "qwen2": Family("Qwen2, Qwen2.5"),
    "mistral": Family("Mistral"),
    "apertus": Family("Apertus", tp="mlp.act_fn"),
    "bloom": Family("Bloom", tp=_NO_PLAN, pp=False, sdpa=False, flash=False, remark="ALiBi"),
    "cohere": Family("Cohere Command R", pp=False),
    "cohere2": Family("Cohere Command R7B", pp=False),
    "deepseek_v2": Family("DeepSeek-V2", tp="mla_kv_a_proj", remark=_MOE),
    "deepseek_v3": Family(
        "DeepSeek-V3, R1", tp="moe_tp_experts", remark=f"{_MOE}; its e_score_correction_bias stays as it was"
    ),
    "exaone4": Family("EXAONE 4"),
    "falcon": Family("Falcon", tp=_NO_PLAN, pp=False, remark="rotary positions, or ALiBi with sdpa alone"),
    "gemma": Family("Gemma"),
    "gemma2": Family("Gemma 2", pp=False, sdpa=False),
    "gemma3_text": Family("Gemma 3, text"),
    "glm4": Family("GLM-4"),
    "glm4_moe": Family("GLM-4.5", tp="moe_tp_experts", remark=_MOE),
    "gpt2": Family("GPT-2", tp=_NO_PLAN, pp=False, positions=("n_positions", 1024)),
    "gpt_bigcode": Family("GPT-BigCode, StarCoder", tp=_NO_PLAN, pp=False, positions=("n_positions", 1024)),
    "gpt_neo": Family(
        "GPT-Neo", tp=_NO_PLAN, pp=False, sdpa=False, positions=("max_position_embeddings", 2048)
    ),
    "gpt_neox": Family("GPT-NeoX, Pythia", pp=False),
    "gpt_oss": Family("gpt-oss", tp=_NO_PLAN, sdpa=False, remark=f"dequantize MXFP4 weights first; {_MOE}"),
    "gptj": Family("GPT-J", tp=_NO_PLAN, pp=False, sdpa=False, positions=("n_positions", 2048)),
    "granite": Family("Granite", pp=False),
    "granitemoe": Family("Granite MoE", tp=_NO_PLAN, pp=False, remark=_MOE),
    "lfm2": Family("LFM2", tp=_NO_PLAN, pp=False, remark=_HYBRID),
    "mixtral": Family("Mixtral", tp="moe_tp_experts", remark=_MOE),
    "mpt": Family(
        "MPT", tp=_NO_PLAN, pp=False, sdpa=False, flash=False, positions=("max_seq_len", 2048), remark="ALiBi"
    ),
    "nemotron": Family("Nemotron", tp=_NO_PLAN, pp=False),
    "olmo": Family("OLMo"),
    "olmo2": Family("OLMo 2"),
    "olmo3": Family("OLMo 3"),
    "olmoe": Family("OLMoE", tp="moe_tp_experts", pp=False, remark=_MOE),
    "opt": Family("OPT", tp=_NO_PLAN, pp=False, positions=("max_position_embeddings", 2048)),
    "phi": Family("Phi-1, Phi-2", pp=False),
    "phi3": Family("Phi-3, Phi-4"),
    "phimoe": Family("Phi-3.5 MoE", tp=_NO_PLAN, pp=False, remark=_MOE),
    "qwen2_moe": Family("Qwen2 MoE", tp="mlp.gate", remark=_MOE),
    "qwen3": Family("Qwen3"),
    "qwen3_5_text": Family("Qwen3.5, text", tp="linear_attn.conv1d", remark=_HYBRID),
    "qwen3_moe": Family("Qwen3 MoE", tp="moe_tp_experts", remark=_MOE),
    "qwen3_next": Family("Qwen3-Next", tp="moe_tp_experts", remark=f"{_HYBRID}; {_MOE}"),
    "seed_oss": Family("Seed-OSS"),
    "smollm3": Family("SmolLM3"),
    "stablelm": Family("StableLM", tp=_NO_PLAN, pp=False),
    "starcoder2": Family("StarCoder2"),
}

_STATES = "its state is no cache of keys and values, which rollouts need"
REFUSED: dict[str, tuple[str, str]] = {
    "mamba": ("Mamba", _STATES),
    "mamba2": ("Mamba-2", _STATES),
    "falcon_mamba": ("Falcon Mamba", _STATES),
    "rwkv": ("RWKV", _STATES),
    "xlstm": ("xLSTM", _STATES),
}
"""`model_type` → name, and the reason why it cannot be trained here."""
_EXPECTED = "a decoder that predicts the next token"
_OTHER = "set model.path to a model of a family in docs/models.md"
_NEXT_TOKEN = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def family_complaints(config: RunConfig, said: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yields the reasons against training the model whose config.json holds `said` as configured. Pure."""
    kind = str(said.get("model_type"))
    if kind in REFUSED:
        name, why = REFUSED[kind]
        yield Complaint("model.path", f"{name} (model_type {kind}): {why}", _EXPECTED, _OTHER)
    # A family that is not listed is taken if it predicts the next token; `family_notes` says that it is untried.
    elif kind not in FAMILIES and (what := _not_causal(said)):
        yield Complaint("model.path", f"model_type {kind}, {what}", _EXPECTED, _OTHER)
    # A shared head is there under the name of the embedding, whatever class was saved.
    elif kind in FAMILIES and said.get("tie_word_embeddings") is False and (what := _not_causal(said)):
        yield Complaint("model.path", f"{what}, saved without the head for tokens", _EXPECTED, _OTHER)
    if said.get("quantization_config"):
        found = "quantized weights (quantization_config in config.json)"
        remedy = "dequantize the model and save it again"
        yield Complaint("model.path", found, "float32 or bfloat16 weights", remedy)
    yield from _attention(config, said)
    family = FAMILIES.get(kind)
    if family and family.positions:
        key, usual = family.positions
        # transformers takes its default for a key that config.json lacks.
        limit = said.get(key, usual)
        if isinstance(limit, int) and max_model_len(config) > limit:
            found = f"{max_model_len(config)} tokens with data.max_prompt_tokens"
            expected = f"at most {limit}: the model has embeddings for {key}={limit} positions"
            remedy = "lower rollout.max_new_tokens or data.max_prompt_tokens"
            yield Complaint("rollout.max_new_tokens", found, expected, remedy)


def max_positions(said: Mapping[str, Any]) -> int | None:
    """Returns the tokens of the longest sequence that a model was made for; None: it is not known. Pure."""
    family = FAMILIES.get(str(said.get("model_type")))
    key, usual = family.positions if family and family.positions else ("max_position_embeddings", None)
    limit = said.get(key, usual)
    return limit if isinstance(limit, int) else None


def _not_causal(said: Mapping[str, Any]) -> str:
    if said.get("is_encoder_decoder"):
        return "an encoder with a decoder"
    for key, what in (("vision_config", "images"), ("audio_config", "sound")):
        if said.get(key):
            return f"a model that also takes {what} ({key} in config.json), which the trainer does not load"
    # By the names of classes: a login node has no transformers to ask.
    names = said.get("architectures")
    classes = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if classes and not any(name.endswith(_NEXT_TOKEN) for name in classes):
        return f"a {classes[0]}"
    return ""


def right_attentions(said: Mapping[str, Any]) -> list[Attention]:
    """Returns the attentions that compute a model as it was made; `auto` takes the first that its class has. Pure."""
    kind = str(said.get("model_type"))
    # Its eager attention adds the bias of ALiBi twice (transformers 5.10 and 5.24), and the flash one refuses it.
    if kind == "falcon" and said.get("alibi"):
        return ["sdpa"]
    # An unknown family is offered all: the ranks ask its class.
    # A class may offer more: an attention drops silently what it does not know, such as a cap of the scores,
    # so an offer is no proof that the numbers are right.
    family, right = FAMILIES.get(kind, Family(kind)), list[Attention]()
    # torch's scaled dot product has no cap of the scores. transformers 5.10 leaves the cap out, 5.24 raises.
    if family.sdpa and not said.get("attn_logit_softcapping"):
        right.append("sdpa")
    right.append("eager")
    if family.flash:
        right.append("flash_attention_2")
    return right


def _attention(config: RunConfig, said: Mapping[str, Any]) -> Iterator[Complaint]:
    wanted, kind = config.model.attn_implementation, str(said.get("model_type"))
    key, remedy = "model.attn_implementation", "set model.attn_implementation=auto"
    offered = ["auto", *right_attentions(said)]
    if wanted not in offered:
        yield Complaint(key, f"{wanted}, with model_type {kind}", f"one of {', '.join(offered)}", remedy)
    elif wanted == "flash_attention_2":
        if config.distributed.device == "cpu":
            yield Complaint(key, f"{wanted}, with distributed.device=cpu", "auto, sdpa or eager", remedy)
        if sampling_dtype(config) == "float32":
            to_set = "set distributed.mixed_precision=bfloat16 or model.dtype=bfloat16"
            expected = "bfloat16: FlashAttention has no kernel for float32"
            yield Complaint(key, f"{wanted}, in float32", expected, to_set)
        if config.deterministic:
            expected = "auto: its backward pass adds up in another order each time"
            found, remedy = f"{wanted}, with deterministic=true", f"{remedy}, or deterministic=false"
            yield Complaint(key, found, expected, remedy)


def family_notes(config: RunConfig, said: Mapping[str, Any]) -> list[str]:
    """Returns notes for the user about a model that is not refused. Pure."""
    kind = str(said.get("model_type"))
    family, notes = FAMILIES.get(kind), []
    if family is None:
        notes.append(
            f"model_type {kind} has not been tried with this trainer (docs/models.md has those that were)"
        )
    if config.model.attn_implementation == "auto" and "sdpa" not in right_attentions(said):
        notes.append(
            f"{family.name if family else kind} has no sdpa: "
            "its attention is computed by eager (model.attn_implementation)"
        )
    limit, longest = max_positions(said), max_model_len(config)
    # With embeddings for positions a longer sequence is refused above; computed ones run, beyond what was trained.
    computed = family is None or family.positions is None
    if computed and limit is not None and longest > limit:
        notes.append(
            f"data.max_prompt_tokens and rollout.max_new_tokens allow {longest} tokens; the model was made for {limit}"
        )
    return notes

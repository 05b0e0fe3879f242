"""Which models `submit` and its dry run refuse on the login node, and what they say of those they take."""

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.journals import append_event
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths

Cli = Callable[..., Any]
DRY = ("submit", "config.yaml", "--cluster", "local", "--dry-run")


def _says(workplace: Path, **config: object) -> None:
    (workplace / "model" / "config.json").write_text(json.dumps(config))


@pytest.mark.scenario("USE04")
@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
            "(found model_type t5, an encoder with a decoder, expected a decoder that predicts the next token)",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "(found model_type bert, a BertForMaskedLM, expected a decoder",
        ),
        ({"model_type": "mamba"}, "found Mamba (model_type mamba): its state is no cache of keys and values"),
        (
            {
                "model_type": "gemma3",
                "vision_config": {"x": 1},
                "architectures": ["Gemma3ForConditionalGeneration"],
            },
            "a model that also takes images (vision_config in config.json)",
        ),
        (
            {"model_type": "qwen2", "tie_word_embeddings": False, "architectures": ["Qwen2Model"]},
            "a Qwen2Model, saved without the head for tokens",
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "dequantize the model and save it again",
        ),
    ],
    ids=["T5", "BERT", "Mamba", "images", "no head", "quantized"],
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_line(
    workplace: Path, cli: Cli, config: dict[str, object], part: str
) -> None:
    _says(workplace, **config)
    for words in (DRY, DRY[:-1]):
        result = cli(*words)
        assert result.code == ExitCode.DATA
        assert part in result.error
        assert len(result.error) < 400
    assert not RunPaths(workplace / "runs" / "demo").root.exists()


@pytest.mark.scenario("USE04")
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "gemma3_text", "olmo2", "opt", "bloom", "gpt_oss"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_family_of_the_table_is_taken(workplace: Path, cli: Cli, kind: str, algorithm: str) -> None:
    _says(workplace, model_type=kind)
    group = "rollout.samples_per_prompt=" + ("4" if algorithm == "grpo" else "1")
    result = cli(*DRY, f"train.algorithm={algorithm}", group)
    assert result.code == 0, result.err
    assert "not been tried" not in result.out + result.err


@pytest.mark.scenario("USE04")
def test_an_unknown_family_is_taken_with_a_warning(workplace: Path, cli: Cli) -> None:
    _says(workplace, model_type="brandnew", architectures=["BrandNewForCausalLM"])
    result = cli(*DRY)
    assert result.code == 0
    assert "model_type brandnew has not been tried with this trainer" in result.out + result.err
    # One that transformers has is taken, also beside code of its own.
    for kind, code in (("brandnew", ExitCode.DATA), ("xglm", 0)) if find_spec("transformers") else ():
        own = {"auto_map": {"AutoModelForCausalLM": "modeling_brandnew.BrandNewForCausalLM"}}
        _says(workplace, model_type=kind, architectures=["BrandNewForCausalLM"], **own)
        result = cli(*DRY)
        assert result.code == code, result.err
        assert ("made by code in its directory" in result.err) is (code != 0)


@pytest.mark.scenario("USE06")
def test_a_family_without_sdpa_is_computed_by_eager_and_told_so(workplace: Path, cli: Cli) -> None:
    _says(workplace, model_type="gpt_oss")
    result = cli(*DRY)
    assert result.code == 0
    assert "gpt-oss has no sdpa: its attention is computed by eager" in result.out + result.err
    result = cli(*DRY, "model.attn_implementation=eager")
    assert result.code == 0
    result = cli(*DRY, "model.attn_implementation=sdpa")
    assert result.code == ExitCode.CONFIG
    assert (
        "found sdpa, with model_type gpt_oss, expected one of auto, eager, flash_attention_2" in result.error
    )


@pytest.mark.scenario("USE06")
@pytest.mark.parametrize(
    ("said", "wrong", "offered"),
    [
        ({"model_type": "gemma2"}, "sdpa", "auto, eager, flash_attention_2"),
        (
            {"model_type": "brandnew", "attn_logit_softcapping": 50.0},
            "sdpa",
            "auto, eager, flash_attention_2",
        ),
        ({"model_type": "falcon", "alibi": True}, "eager", "auto, sdpa"),
    ],
)
def test_an_attention_that_would_compute_another_model_is_refused(
    workplace: Path, cli: Cli, said: dict[str, object], wrong: str, offered: str
) -> None:
    _says(workplace, **said)
    result = cli(*DRY)
    assert result.code == 0
    assert ("its attention is computed by eager" in result.out + result.err) == (wrong == "sdpa")
    result = cli(*DRY, f"model.attn_implementation={wrong}")
    assert result.code == ExitCode.CONFIG
    assert f"found {wrong}, with model_type {said['model_type']}, expected one of {offered}" in result.error


@pytest.mark.scenario("USE06")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["distributed.device=cpu"], "flash_attention_2, with distributed.device=cpu"),
        (["distributed.device=cuda", "slurm.gpus_per_node=1"], "flash_attention_2, in float32"),
        (
            ["distributed.device=cuda", "slurm.gpus_per_node=1", "model.dtype=bfloat16"],
            "flash_attention_2, with deterministic=true",
        ),
    ],
)
def test_flash_attention_is_refused_where_it_cannot_run(
    workplace: Path, cli: Cli, words: list[str], part: str
) -> None:
    result = cli(*DRY, "model.attn_implementation=flash_attention_2", *words)
    assert result.code == ExitCode.CONFIG
    assert any(part in line for line in result.errors)


@pytest.mark.scenario("USE05")
def test_a_run_longer_than_the_models_positions_is_refused(workplace: Path, cli: Cli) -> None:
    _says(workplace, model_type="gpt2", n_positions=32)
    assert cli(*DRY, "data.max_prompt_tokens=26", "rollout.max_new_tokens=6").code == 0
    result = cli(*DRY, "data.max_prompt_tokens=27", "rollout.max_new_tokens=6")
    assert result.code == ExitCode.CONFIG
    assert "found 33 tokens with data.max_prompt_tokens, expected at most 32" in result.error
    # Rotary positions are computed: any length runs, and the user is told.
    _says(workplace, model_type="gpt_neox", max_position_embeddings=32)
    result = cli(*DRY, "data.max_prompt_tokens=27", "rollout.max_new_tokens=6")
    assert result.code == 0
    assert "allow 33 tokens; the model was made for 32" in result.out + result.err


@pytest.mark.scenario("USE10")
@pytest.mark.parametrize("key", ["model.path", "model.reward"])
def test_pickled_weights_are_refused_with_a_command_that_converts_them(
    workplace: Path, cli: Cli, key: str
) -> None:
    pickled = workplace / "a model"
    pickled.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (pickled / name).write_bytes((workplace / "model" / name).read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"PK")
    word = f"{key}={pickled}" if key == "model.path" else f"{key}=classifier:{pickled}"
    result = cli(*DRY, word)
    assert result.code == ExitCode.DATA
    assert "the model's weights are pickled" in result.error
    command = shlex.split(result.error.partition("convert them once: ")[2])
    assert command[:2] == [sys.executable, "-c"]
    assert repr(str(pickled)) in command[2]
    ast.parse(command[2])


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.scenario("USE10")
@pytest.mark.variant
def test_the_command_of_the_refusal_makes_a_model_that_is_taken(workplace: Path, cli: Cli) -> None:
    build = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=264, eos_token_id=258, n_embd=16, n_layer=1, n_head=2))
model.config.architectures = ["GPT2LMHeadModel"]
model.config.save_pretrained(sys.argv[1])
torch.save(model.state_dict(), sys.argv[1] + "/pytorch_model.bin")
"""
    model = workplace / "model"
    (model / "model.safetensors").unlink()
    subprocess.run([sys.executable, "-c", build, str(model)], check=True, capture_output=True, timeout=300)
    result = cli(*DRY)
    assert result.code == ExitCode.DATA
    command = shlex.split(result.error.partition("convert them once: ")[2])
    done = subprocess.run(
        [sys.executable, *command[1:]], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert cli(*DRY).code == 0


@pytest.mark.scenario("USE10")
def test_a_missing_shard_is_named_before_queueing(workplace: Path, cli: Cli) -> None:
    model = workplace / "model"
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"metadata": {}, "weight_map": {f"layer.{n}": name for n, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names[:2]:
        (model / name).write_bytes(whole)
    result = cli(*DRY)
    assert result.code == ExitCode.DATA
    assert f"found no {names[2]} (1 of 3 shards missing)" in result.error
    (model / names[2]).write_bytes(whole)
    assert cli(*DRY).code == 0
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    assert cli(*DRY).code == ExitCode.DATA
    (model / "model.safetensors.index.json").write_text("{")
    assert "the index of the weights cannot be read" in cli(*DRY).error


def test_weights_that_are_there_twice_are_refused(workplace: Path, cli: Cli) -> None:
    model = workplace / "model"
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert cli(*DRY).code == 0
    # A library loads the one, another the other: shards of a newer save that were copied over a base model.
    shard = model / "model-00001-of-00001.safetensors"
    shard.write_bytes((model / "model.safetensors").read_bytes())
    index.unlink()
    assert f"found model.safetensors, and shards beside it: {shard.name}" in cli(*DRY).error
    index.write_text(json.dumps({"weight_map": {"a": shard.name}}))
    assert f"found model.safetensors, and {index.name}, which names {shard.name}" in cli(*DRY).error
    (model / "model.safetensors").unlink()
    assert cli(*DRY).code == 0


@pytest.mark.scenario("USE10")
def test_an_adapter_and_weights_of_another_name_are_refused(workplace: Path, cli: Cli) -> None:
    model = workplace / "model"
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    result = cli(*DRY)
    assert result.code == ExitCode.DATA
    assert "found consolidated.safetensors, which transformers does not look for" in result.error
    (model / "consolidated.safetensors").rename(model / "model.safetensors")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (model / name).write_text("{}")
        assert re.search(f"an adapter beside a model.*merge.*or remove {name}", cli(*DRY).error)
        (model / name).unlink()
    # As PEFT saves one: without a config.json, which the other refusals ask for.
    adapter = workplace / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for key in ("model.path=", "model.reward=classifier:", "checkpoint.resume_from="):
        result = cli(*DRY, f"{key}{adapter}")
        assert result.code == ExitCode.DATA
        assert re.search(f"an adapter, not a model.*merge.*set {key.partition('=')[0]}", result.error)


@pytest.mark.scenario("USE06")
def test_another_attention_is_another_run(workplace: Path, cli: Cli) -> None:
    words = ("submit", "config.yaml", "--prepare-only")
    assert cli(*words).code == 0
    paths = RunPaths(workplace / "runs" / "demo")
    paths.ledger.mkdir(exist_ok=True)
    (paths.ledger / "attempt_000001.rank_0000.ledger").write_bytes(bytes(4096))
    append_event(paths, "started", attempt=1)
    result = cli(*words, "model.attn_implementation=eager")
    assert result.code == ExitCode.CONFIG
    assert "model.attn_implementation: 'auto' -> 'eager'" in result.error
    # A run of an older version has no such key, and goes on.
    text = paths.run_yaml.read_text()
    paths.run_yaml.write_text(re.sub(r".*attn_implementation.*\n", "", text))
    assert paths.run_yaml.read_text() != text
    assert cli(*words).code == 0


@pytest.mark.scenario("USE04")
@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"config": {}, "tokenizer_config": {}}, "the tokenizer has no end-of-sequence token"),
        ({"tokenizer_config": {"eos_token": None}}, "found eos_token_id 1 in the model's own files"),
        ({"config": {}, "tokenizer_config": {"eos_token": ""}}, "set eos_token there to the token that ends"),
        ({"tokenizer_config": {"eos_token": "<gone>"}}, "found eos_token '<gone>', expected a token of"),
        ({"generation_config": {"eos_token_id": [8, 9]}}, "found token 8, expected below vocab_size=3"),
        ({"generation_config": {"eos_token_id": [1, 9]}}, ""),
        ({"tokenizer_config": {"eos_token": "<far>"}}, "use the tokenizer that belongs to this model"),
        (
            {"tokenizer_config": {"eos_token": "<end>", "pad_token": "<far>"}},
            "found '<far>', token 3, expected below vocab_size=3",
        ),
        ({}, ""),
        ({"config": {}, "tokenizer_config": {"eos_token": {"content": "<end>"}}}, ""),
        ({"config": {}, "tokenizer_config": {}, "special_tokens_map": {"eos_token": "<end>"}}, ""),
    ],
)
def test_a_model_that_cannot_end_a_response_is_refused(
    workplace: Path, cli: Cli, files: dict[str, dict[str, object]], part: str
) -> None:
    _says(workplace, model_type="qwen2", vocab_size=3, **files.pop("config", {"eos_token_id": 1}))
    added = [{"content": "<end>", "id": 1}, {"content": "<far>", "id": 3}]
    files = {"tokenizer": {"model": {"vocab": {"a": 0}}, "added_tokens": added}} | files
    for name, said in files.items():
        (workplace / "model" / f"{name}.json").write_text(json.dumps(said))
    result = cli(*DRY)
    assert result.code == (ExitCode.DATA if part else 0), result.err
    assert part in result.err

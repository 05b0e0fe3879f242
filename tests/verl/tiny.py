"""A model of a few thousand weights, its tokenizer and 64 sums to learn: what verl's trainers are run on in tests."""

import importlib
import random
from pathlib import Path
from typing import Any

_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_model(directory: Path, head_dim: int = 16, most_positions: int = 128) -> Path:
    """Qwen2, two layers, one token a byte.

    transformers 5 loads the tokenizer of any `model_type=qwen2` as Qwen2Tokenizer, so it has to be one.
    """
    import torch

    qwen: Any = importlib.import_module("transformers")  # its types are not to be had

    alphabet = sorted(importlib.import_module("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: at for at, char in enumerate(alphabet)}
    vocab |= {word: 256 + at for at, word in enumerate(_SPECIAL)}
    tokenizer = qwen.Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=_SPECIAL,
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    shape = qwen.Qwen2Config(
        vocab_size=264,
        hidden_size=2 * head_dim,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=most_positions,
        pad_token_id=256,
        bos_token_id=None,
        eos_token_id=258,
    )
    qwen.Qwen2ForCausalLM(shape).save_pretrained(directory)
    return directory


def make_critic(directory: Path, model: Path) -> Path:
    """The critic of such a model, with its head: one that verl made for want of it would be another in each run."""
    import torch

    qwen: Any = importlib.import_module("transformers")
    torch.manual_seed(1)
    qwen.AutoModelForTokenClassification.from_pretrained(model, num_labels=1).save_pretrained(directory)
    qwen.AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return directory


def make_sums(path: Path, num_rows: int = 64) -> Path:
    """Conversations of two turns, as verl's SFT data set wants them, in a parquet file."""
    draw = random.Random(0)
    rows = []
    for _ in range(num_rows):
        a, b, c = (draw.randint(0, 50) for _ in range(3))
        said = (f"{a}+{b}=", str(a + b), f"-{c}=", str(a + b - c))
        turns = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said)]
        rows.append({"messages": turns})
    importlib.import_module("pandas").DataFrame(rows).to_parquet(path)
    return path


def sft_words(
    model: Path, data: Path, *, epochs: int = 2, save_freq: int = 2, batch: int = 8, micro_batch: int = 4
) -> dict[str, object]:
    """The section `verl` of a run of 8 steps an epoch on CPUs."""
    return {
        "model": {
            "path": str(model),
            "use_remove_padding": False,
            "+override_config": {"attn_implementation": "sdpa"},
        },
        "engine": {"strategy": "fsdp2", "use_torch_compile": False, "dtype": "float32"},
        "optim": {"lr": 1e-3},
        "data": {
            "train_files": str(data),
            "train_batch_size": batch,
            "micro_batch_size_per_gpu": micro_batch,
            "use_dynamic_bsz": False,
            "max_length": 128,
            "num_workers": 0,
        },
        "trainer": {"device": "cpu", "logger": ["console"], "total_epochs": epochs, "save_freq": save_freq},
    }

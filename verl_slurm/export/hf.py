"""Writes a role's weights as a Hugging Face model directory, which `from_pretrained` and vLLM load.

```
config.json  generation_config.json           of the base model; architectures and dtype as they are now, and the end
                                              tokens that ended a response in training
tokenizer.json tokenizer_config.json ...      copied from the base model, byte for byte
chat_template.jinja                           of the run, where the base model's own is another
model.safetensors                             or, above 5 GB, model-00001-of-0000N.safetensors with
model.safetensors.index.json                  the shard of each tensor
```

Shards are made one after the other: at most one shard and one group of tensors is in memory at a time. A tied weight is
written once, under its first name; config.json says that it is tied.
"""

import errno
import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from verl_slurm.base.errors import CheckpointCorrupt, DataError
from verl_slurm.config.roles import Role
from verl_slurm.dataset.prompts.chat_template import same_template
from verl_slurm.export.causal_lm import end_tokens
from verl_slurm.export.model_dir import TOKENIZER_FILES, put_template
from verl_slurm.export.skeleton import Skeleton, bounded_work
from verl_slurm.export.source import ExportSource, cast_dtype

SHARD_BYTES = 5_000_000_000
"""Of one safetensors file: Hugging Face's own old default, small enough for any loader and object store."""

# For a tokenizer.json of 35 MB and the imports that it needs.
_TOKENIZER_BYTES = 3 << 29
_INDEX = "model.safetensors.index.json"


def plan_shards(
    source: ExportSource, role: Role, skeleton: Skeleton, dtype: torch.dtype | None
) -> dict[str, list[str]]:
    """Maps each file to its tensors, cut by Hugging Face's own rule, without reading any."""
    entries = source.entries(role)
    shapes = {
        # On the meta device: sizes without memory.
        name: torch.empty(shape, dtype=cast_dtype(entries[name], dtype), device="meta")
        for name, shape in skeleton.shapes.items()
    }
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    return dict(split.filename_to_tensors)


def write_hf(
    source: ExportSource,
    role: Role,
    skeleton: Skeleton,
    model_dir: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    where: Path | None = None,
    template: str | None = None,
) -> None:
    """Fills the directory `out`, with floating-point weights in `dtype` (None: as saved).

    Args:
        model_dir: small files of the base model (`model_dir.take_small_files`), which errors call `where`; changed.
        template: the chat template that the tokenizer must render by; None: its own.

    Raises:
        DataError: the base model has no tokenizer that loads.
        CheckpointCorrupt: the written files do not read back with the names and shapes of the model.
        OSError: the storage refused.
    """
    # First the part that may be refused, then the slow part.
    tokenizer = _copy_tokenizer(model_dir, out, where or model_dir, template)
    _write_configs(source, role, skeleton, model_dir, out, dtype, tokenizer)
    shards = plan_shards(source, role, skeleton, dtype)
    total = 0
    for file, names in shards.items():
        tensors = dict(source.tensors(role, names, dtype))
        total += sum(tensor.nbytes for tensor in tensors.values())
        _save_shard(tensors, out / file)
        # Before the next shard is read: one is in memory at a time.
        del tensors
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    # By the headers: the bytes were checked on their way from the checkpoint, and the names decide whether a reader
    # finds them.
    _read_back(out, shards, skeleton)


def _save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        # As `save_pretrained` of transformers marks its own files.
        save_file(tensors, str(path), metadata={"format": "pt"})
    except SafetensorError as error:
        # Names and types were checked before, so this is a storage error, reported as text.
        raise OSError(errno.EIO, str(error), str(path)) from error


def _copy_tokenizer(model_dir: Path, out: Path, where: Path, template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = _tokenizer(model_dir, where)
    if template is not None and not _renders_by(tokenizer, template):
        put_template(model_dir, template)
        # Loaded again: which of several places wins is the library's to say.
        if not _renders_by(_tokenizer(model_dir, where), template):
            raise DataError(
                "the tokenizer does not take the run's chat template",
                where=where,
                found=f"{tokenizer.chat_template!r:.80}",
                expected=f"{template!r:.80}",
                remedy="name a directory with tokenizer files of another form with --model DIR",
            )
    vocabulary = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    there = [name for name in sorted({*TOKENIZER_FILES, *vocabulary}) if (model_dir / name).is_file()]
    if vocabulary.isdisjoint(there):
        # Otherwise transformers makes an empty tokenizer of the right class, silently.
        raise DataError(
            "the base model has no tokenizer",
            where=where,
            expected=" or ".join(sorted(vocabulary)),
            remedy="name a directory with the tokenizer's files with --model DIR",
        )
    for name in there:
        # Copied, not saved anew: a round trip may rewrite them.
        (out / name).write_bytes((model_dir / name).read_bytes())
    return tokenizer


def _tokenizer(model_dir: Path, where: Path) -> PreTrainedTokenizerBase:
    try:
        with bounded_work(_TOKENIZER_BYTES):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(model_dir), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise DataError(
            "the base model has no tokenizer that loads",
            where=where,
            found=f"{type(error).__name__}: {error}",
            remedy="name a directory with the tokenizer's files with --model DIR",
        ) from error
    return tokenizer


def _renders_by(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    own = tokenizer.chat_template
    return same_template(own.get("default") if isinstance(own, dict) else own, template)


def _write_configs(
    source: ExportSource,
    role: Role,
    skeleton: Skeleton,
    model_dir: Path,
    out: Path,
    dtype: torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    first = source.entries(role)[skeleton.parameters[0]]
    # Of the first parameter: an export has one type for all floating-point weights, unless it keeps them as saved.
    skeleton.config.dtype = cast_dtype(first, dtype)
    skeleton.config.save_pretrained(str(out))
    # A critic generates nothing.
    if role == "actor":
        if (model_dir / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(str(model_dir), local_files_only=True)
        else:
            generation = GenerationConfig.from_model_config(skeleton.config)
        # `generate` stops at these alone; the run's rollouts stopped at the tokenizer's, too.
        if tokenizer.eos_token_id is not None:
            ends = end_tokens(model_dir, tokenizer)
            generation.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
        generation.save_pretrained(str(out))


def _read_back(out: Path, shards: dict[str, list[str]], skeleton: Skeleton) -> None:
    found: dict[str, tuple[int, ...]] = {}
    try:
        for file in shards:
            with safe_open(str(out / file), framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - no mapping, it only has keys()
                    found[name] = tuple(shard.get_slice(name).get_shape())
    except SafetensorError as error:
        raise CheckpointCorrupt("the export does not read back", where=out, found=error) from error
    if found != skeleton.shapes:
        wrong = sorted(
            name for name in {*found, *skeleton.shapes} if found.get(name) != skeleton.shapes.get(name)
        )
        raise CheckpointCorrupt("the export does not read back", where=out, found=f"wrong: {wrong[:3]}")

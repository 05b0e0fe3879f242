"""Checks a model without torch: its directory, its family, and whether it divides as `distributed` asks."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from verl_slurm.base.bounded import (
    ADAPTER_FILES,
    SAFETENSORS_HEADER,
    TOKENIZER,
    TooMuch,
    decode_json,
    open_regular,
    read_end_tokens,
    read_model_config,
    read_regular,
    vocabulary_of,
)
from verl_slurm.base.errors import UNREADABLE, ConfigError, DataError, VerlSlurmError
from verl_slurm.base.one_line import counted, shell_word
from verl_slurm.config.checks import Complaint
from verl_slurm.config.families import FAMILIES, family_complaints, family_notes
from verl_slurm.config.schema import BUILTIN, DistributedConfig, RunConfig
from verl_slurm.export.safetensors_file import read_header, safetensors_problem
from verl_slurm.program.git import is_lfs_pointer

T = TypeVar("T")

# The names that quickstart and the trainer offer. These import torch, so the names are repeated here; a test compares
# them.
BUILTIN_MODELS: dict[str, dict[str, Any]] = {
    name: {
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "tie_word_embeddings": False,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
    }
    for name, head_dim in (("tiny", 16), ("tiny32", 32))
}
"""Maps a name to the content of its config.json once it is built."""
# The names that `from_pretrained` looks for.
_WHOLE, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
# Files of vocabularies. Without one transformers makes an empty tokenizer, which takes every text and has no token.
_VOCABULARY = re.compile(r"tokenizer\.json|vocab.*|tekken.*|.+\.tiktoken|.+\.model(\.v\d+)?")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d{1,9})\.")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _AddedToken(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []

    def ids(self) -> dict[str, int]:
        vocab = self.model.vocab
        own = vocab if isinstance(vocab, dict) else {text: row for row, (text, _) in enumerate(vocab)}
        return own | {token.content: token.id for token in self.added_tokens}


class _SpecialTokens(msgspec.Struct):
    """tokenizer_config.json, and special_tokens_map.json of older tokenizers."""

    eos_token: str | _AddedToken | msgspec.UnsetType | None = msgspec.UNSET
    pad_token: str | _AddedToken | msgspec.UnsetType | None = msgspec.UNSET
    added_tokens_decoder: dict[int, _AddedToken] = {}


def check_model(key: str, directory: Path, written: str = "") -> None:
    """Checks a Hugging Face model directory: weights, config, tokenizer. `builtin:` is not checked here.

    Args:
        key: `model.path` or `model.reward`, for the remedy.
        written: the path as the user wrote it; `directory` is absolute.

    Raises:
        DataError: missing, without one of these, or one of them is damaged.
    """
    remedy = _remedy(key)
    if not directory.is_dir():
        # As written, since the absolute path of `org/name` looks like any other.
        if _HUB_NAME.fullmatch(written):
            # Taken for a hub's name by its form alone: nothing here asks the hub.
            remedy = (
                "names of the Hugging Face hub are not downloaded: "
                f"`hf download {written} --local-dir DIR` first, then set {key} to DIR"
            )
        raise DataError("no such model directory", where=directory, remedy=remedy)
    require_model(key, directory, remedy)
    # Names first, then the contents of small files, and the headers of large ones last.
    _check_weights(key, directory, remedy)
    named = _check_config(directory / "config.json", remedy)
    if not any(_VOCABULARY.fullmatch(path.name) and path.is_file() for path in directory.iterdir()):
        raise DataError(
            "the model directory has no tokenizer",
            where=directory,
            expected="tokenizer.json, or the vocabulary of an older kind (tokenizer.model, vocab.json)",
            remedy=f"save the tokenizer there too (tokenizer.save_pretrained), or {remedy}",
        )
    if key == "model.path":
        _check_end_tokens(directory, named)
    require_whole_weights(directory)


def require_model(key: str, directory: Path, remedy: str) -> None:
    """Raises DataError if a file is a pointer of Git LFS, there is an adapter, or there is no config.json."""
    refuse_pointers(path for path in directory.iterdir() if path.is_file())
    refuse_adapter(key, directory)
    if not (directory / "config.json").is_file():
        raise DataError("not a model directory", where=directory, expected="config.json in it", remedy=remedy)


def require_whole_weights(directory: Path) -> None:
    """Raises DataError for the first safetensors file whose header and length do not agree."""
    for path in sorted(directory.glob("*.safetensors")):
        # Links are followed: users name models by them.
        if complaint := _of_weights(path, safetensors_problem):
            raise DataError(
                "the weights are damaged",
                where=path,
                found=complaint,
                remedy="copy or download that file again",
            )


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raises DataError for files of a clone without Git LFS that are pointers: the first, and how many."""
    pointers = [file for file in files if is_lfs_pointer(file)]
    if pointers:
        raise DataError(
            "a file is a pointer of Git LFS, without its content",
            where=pointers[0],
            found=counted(len(pointers), "such file"),
            remedy=f"git -C {shell_word(pointers[0].parent)} lfs pull",
        )


def _of_weights(path: Path, look: Callable[[int], T]) -> T | str:
    try:
        fd = open_regular(path, follow=True)
    except TooMuch as error:
        return str(error)
    try:
        return look(fd)
    finally:
        os.close(fd)


def weights_of(directory: Path) -> dict[str, int]:
    """Maps the name of each tensor to its number of elements, by the headers of safetensors files; empty: unknown.
    May raise OSError."""
    found: dict[str, int] = {}
    files: list[Path] = []
    with suppress(DataError):
        names = weight_files(directory, "")
        files = [directory / name for name in names if name.endswith(".safetensors")]
    for path in files:
        header = _of_weights(path, read_header)
        # A file that cannot be understood makes all unknown, and not less.
        if isinstance(header, str):
            return {}
        entries = header.entries.items()
        found |= {name: math.prod(one.shape or ()) for name, one in entries if name != "__metadata__"}
    return found


def layers_left_out(directory: Path) -> list[str]:
    """Returns a note on layers of the weights that the model does not take. DataError: it has more than they have."""
    said, there = read_model_config(directory), 0
    layers = said.get("num_hidden_layers")
    with suppress(OSError):
        there = max(
            (int(at[1]) + 1 for name in weights_of(directory) if (at := _LAYER.search(name))), default=0
        )
    if not there or not isinstance(layers, int) or layers == there:
        return []
    found = f"num_hidden_layers={layers} in config.json, and {counted(there, 'layer')} in the weights"
    if layers > there and said.get("model_type") in FAMILIES:
        remedy = "set it to the number of layers that there are, or download the weights again"
        raise DataError("the model lacks layers", where=directory, found=found, remedy=remedy)
    # Heads that predict further tokens are layers of the weights, and not of the model.
    further = said.get("num_nextn_predict_layers")
    taken = layers + (further if isinstance(further, int) else 0)
    return [f"{directory}: {found}: the last ones are left out"] if taken < there else []


def num_parameters(directory: Path) -> int | None:
    """Counts the numbers in the weights; None: unknown. May raise OSError."""
    return sum(weights_of(directory).values()) or None


def _remedy(key: str) -> str:
    if key == "model.reward":
        return (
            "set model.reward to classifier:DIR, a directory made by save_pretrained, or to rule:arithmetic"
        )
    return f"set {key} to a directory made by save_pretrained, or to builtin:tiny"


def refuse_adapter(key: str, directory: Path) -> None:
    """Raises DataError for an adapter (LoRA), by itself or beside a model's files."""
    adapter = next((name for name in ADAPTER_FILES if (directory / name).is_file()), None)
    if adapter is None:
        return
    # Beside a model's files it would be left out in silence.
    beside = any((directory / name).is_file() for name in (_WHOLE, _INDEX))
    raise DataError(
        "an adapter beside a model" if beside else "an adapter, not a model",
        where=directory,
        found=adapter,
        expected="whole weights and no adapter",
        remedy=f"merge it into its base model (PEFT's merge_and_unload), save that, and set {key} to it"
        + (f"; or remove {adapter} to use the model without it" if beside else ""),
    )


def _check_weights(key: str, directory: Path, remedy: str) -> None:
    found = weight_files(directory, remedy)
    if found and found[0].endswith(".safetensors"):
        return
    # Each likely cause has its own words and remedy: pickles, a file of another name.
    pickled = found or [path.name for path in sorted(directory.glob("pytorch_model*.bin"))]
    expected = f"{_WHOLE} or {_INDEX}"
    if pickled:
        raise DataError(
            "the model's weights are pickled",
            where=directory,
            found=pickled[0],
            expected=expected,
            remedy="pickles are not read here; with a Python that has transformers, convert them once: "
            f"{_conversion(key, directory)}",
        )
    there = [path.name for path in sorted(directory.glob("*.safetensors"))]
    raise DataError(
        "the model directory has no weights",
        where=directory,
        found=f"{there[0]}, which transformers does not look for" if there else None,
        expected=expected,
        remedy=remedy,
    )


def weight_files(directory: Path, remedy: str) -> list[str]:
    """Returns the names of the files that `from_pretrained` loads; empty: there is none that it looks for. DataError:
    a shard is missing, or weights are there twice."""
    for whole, index in ((_WHOLE, _INDEX), (_PICKLED, f"{_PICKLED}.index.json")):  # in its order
        shards = _shards(directory / index, remedy) if (directory / index).is_file() else []
        if not (directory / whole).is_file():
            if shards:
                return shards
            continue
        stem, suffix = whole.split(".")
        others = shards or sorted(path.name for path in directory.glob(f"{stem}-*-of-*.{suffix}"))
        if others not in ([], [whole]):
            raise DataError(
                "the model's weights are there twice",
                where=directory,
                found=f"{whole}, and {f'{index}, which names' if shards else 'shards beside it:'} {others[0]}",
                expected="one of the two: libraries differ in which they load",
                remedy=f"see which are the model's, and move the others away, with their {index}",
            )
        return [whole]
    return []


def _conversion(key: str, directory: Path) -> str:
    kind = "AutoModelForCausalLM" if key == "model.path" else "AutoModelForSequenceClassification"
    code = f"from transformers import {kind} as M; d = {str(directory)!r}; M.from_pretrained(d).save_pretrained(d)"
    return f"{shell_word(sys.executable)} -c {shell_word(code)}"


def _shards(path: Path, remedy: str) -> list[str]:
    """Returns the files that an index of weights names. DataError: one is missing, and no whole file is there."""
    try:
        data = read_regular(path, SAFETENSORS_HEADER, follow=True)
        index = decode_json(data, _Index, SAFETENSORS_HEADER, doubles=False)
        shards = sorted(set(index.weight_map.values()))
    except UNREADABLE as error:
        raise DataError(
            "the index of the weights cannot be read", where=path, found=error, remedy=remedy
        ) from None
    # A name with a directory in it leads out of the model's.
    missing = [name for name in shards if Path(name).name != name or not (path.parent / name).is_file()]
    if (missing or not shards) and not (path.parent / path.name.removesuffix(".index.json")).is_file():
        raise DataError(
            "the weights are incomplete",
            where=path.parent,
            found=f"no {missing[0]} ({len(missing)} of {len(shards)} shards missing)"
            if shards
            else "no shards",
            expected=f"every file that {path.name} names",
            remedy="copy or download the missing files",
        )
    return shards


def _check_config(path: Path, remedy: str) -> tuple[int, ...]:
    """Returns the end tokens that the model's configuration names."""
    try:
        config = read_model_config(path.parent)
    except UNREADABLE as error:
        raise DataError(
            "the model's config.json is not JSON", where=path, found=error, remedy=remedy
        ) from None
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise DataError(
            "the model's config.json names no model",
            where=path,
            expected="text under 'model_type'",
            remedy=remedy,
        )
    try:
        return read_end_tokens(path.parent)
    except UNREADABLE as error:
        raise DataError(
            "the model's end tokens cannot be read",
            where=path.parent,
            found=error,
            remedy="fix eos_token_id in that file",
        ) from None


def _check_end_tokens(directory: Path, named: tuple[int, ...]) -> None:
    """Refuses a model without an end token, or with one that it cannot sample."""
    # Each response would be cut at its greatest length.
    token, pad, known = _special_tokens(directory)
    # Without the key, a class of tokenizers may have an end token of its own. The model's files then name it, too.
    if not token and (token is not msgspec.UNSET or not named):
        raise DataError(
            "the tokenizer has no end-of-sequence token",
            where=directory,
            found=f"eos_token_id {', '.join(map(str, named))} in the model's own files" if named else None,
            expected="eos_token in tokenizer_config.json; without it every response is cut at its greatest length",
            remedy='set eos_token there to the token that ends a text, e.g. "eos_token": "<|im_end|>"',
        )
    if token and known and token not in known:
        raise DataError(
            "the tokenizer's end token is not in its vocabulary",
            where=directory / "tokenizer_config.json",
            found=f"eos_token {token!r}",
            expected="a token of tokenizer.json",
            remedy="set eos_token to one that the model was trained with",
        )
    size = vocabulary_of(directory)
    if pad and size is not None and known.get(pad, -1) >= size:
        raise DataError(
            "the padding token is outside the model's vocabulary",
            where=directory,
            found=f"{pad!r}, token {known[pad]}",
            expected=f"below vocab_size={size} of config.json",
            remedy="set pad_token in tokenizer_config.json to one that the model has, e.g. its eos_token, or save the "
            "model after resize_token_embeddings",
        )
    own = known.get(token, -1) if token else -1
    # One of the model's that can be sampled is enough: a configuration may keep its class's default beside it.
    first = own if own >= 0 else min(named, default=-1)
    if size is not None and first >= size:
        raise DataError(
            "the end token is outside the model's vocabulary",
            where=directory,
            found=f"token {first}",
            expected=f"below vocab_size={size} of config.json: the model cannot sample another",
            remedy="fix eos_token_id in generation_config.json or config.json"
            if own < 0
            else "use the tokenizer that belongs to this model",
        )


def _special_tokens(
    directory: Path,
) -> tuple[str | msgspec.UnsetType | None, str | msgspec.UnsetType | None, dict[str, int]]:
    """Returns the tokenizer's end token and padding (UNSET: no file has the key), and the numbers of tokens."""

    def read(name: str, form: type[T]) -> T | None:
        path = directory / name
        if not path.is_file():
            return None
        data = read_regular(path, TOKENIZER, follow=True)
        try:
            return decode_json(data, form, TOKENIZER, doubles=False)
        except msgspec.ValidationError:  # of a form that is not known here
            raise
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                "a file of the tokenizer is damaged",
                where=path,
                found=error,
                expected="JSON",
                remedy="copy or download that file again",
            ) from error

    try:
        special = read("tokenizer_config.json", _SpecialTokens) or _SpecialTokens()
        older = read("special_tokens_map.json", _SpecialTokens) or _SpecialTokens()
        tokenizer = read("tokenizer.json", _Tokenizer)
    # Not said here: loading the tokenizer says it with its reason.
    except DataError:
        raise
    except (OSError, *UNREADABLE):
        return "unreadable", None, {}
    added = {one.content: number for number, one in special.added_tokens_decoder.items()}
    end, pad = (
        token.content if isinstance(token, _AddedToken) else token
        for token in (
            older.eos_token if special.eos_token is msgspec.UNSET else special.eos_token,
            older.pad_token if special.pad_token is msgspec.UNSET else special.pad_token,
        )
    )
    return end, pad, tokenizer.ids() | added if tokenizer else {}


def said_of(path: str) -> dict[str, Any]:
    """Returns the content of the config.json of `model.path`, now or once a `builtin:` is built."""
    if path.startswith(BUILTIN):
        return BUILTIN_MODELS[path.removeprefix(BUILTIN)]
    return read_model_config(Path(path))


def check_family(config: RunConfig) -> list[str]:
    """Refuses a checked model that cannot be trained as configured; otherwise returns notes for the user.

    Raises:
        DataError: the first complaint, about the model itself.
        ConfigError: the first complaint, about another key that does not go with it.
    """
    said = said_of(config.model.path)
    for found in family_complaints(config, said):
        # Whose fault it is decides the exit code: the model's (DATA), or a key that does not go with it (CONFIG).
        by_itself = found.key == "model.path"
        refusal: type[VerlSlurmError] = DataError if by_itself else ConfigError
        raise refusal(
            "this model cannot be trained here" if by_itself else "the model cannot be trained as configured",
            where=config.model.path if by_itself else f"{found.key}, {config.model.path}",
            found=found.found,
            expected=found.expected,
            remedy=found.remedy,
        )
    directory = Path(config.model.path)
    return [*family_notes(config, said), *(layers_left_out(directory) if directory.is_dir() else [])]


# Keys of config.json that put a norm beside the cut projections, with a weight for each head (Cohere, Phi).
_NORMS_OF_ALL_HEADS = ("use_qk_norm", "qk_layernorm")


def check_model_shape(distributed: DistributedConfig, model_path: str, said: Mapping[str, Any]) -> None:
    """Raises ConfigError for a shape that a model with this config.json (`said`) cannot be cut into."""
    # Each rank has the whole model then, whatever its sizes.
    if distributed.tp_size == distributed.pp_size == 1:
        return
    for found in shape_complaints(distributed, said):
        raise ConfigError(
            "the model cannot be divided like that",
            where=f"{found.key}, {model_path}",
            found=found.found,
            expected=found.expected,
            remedy=found.remedy,
        )


def shape_complaints(distributed: DistributedConfig, said: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yields the parts of `distributed` that do not go with a model whose config.json holds `said`. Pure."""
    tp, pp = distributed.tp_size, distributed.pp_size
    kind = str(said.get("model_type"))
    whole = _kept_whole(kind, said)
    # A family that stays whole ends the questions: its sizes need not mean what they mean elsewhere.
    for key, parts in (("tp_size", tp), ("pp_size", pp)):
        if parts > 1 and whole[key]:
            yield Complaint(
                f"distributed.{key}",
                f"a model of type {kind}: {whole[key]}",
                f"a family with {key[:2]} in docs/models.md",
                f"set {key}=1, and raise dp_size",
            )
            return
    heads = said.get("num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        # Models without grouped heads have no such key.
        "num_key_value_heads": said.get("num_key_value_heads") or heads,
        "intermediate_size": said.get("intermediate_size"),
    }
    for name, size in sizes.items():
        # Heads and the MLP's columns are what a tensor-parallel plan deals out; a rank takes whole ones.
        if isinstance(size, int) and size % tp:
            yield Complaint(
                "distributed.tp_size", str(tp), f"a divisor of the model's {name}={size}", "lower it"
            )
    layers = said.get("num_hidden_layers")
    # Each stage has at least one layer.
    if isinstance(layers, int) and layers < pp:
        yield Complaint(
            "distributed.pp_size", str(pp), f"at most the model's num_hidden_layers={layers}", "lower it"
        )
    if pp > 1 and said.get("tie_word_embeddings"):
        yield Complaint(
            "distributed.pp_size",
            f"{pp}, with tie_word_embeddings",
            "1: the first and the last stage cannot share a weight",
            "set distributed.pp_size=1 and raise tp_size or dp_size",
        )


def _kept_whole(kind: str, said: Mapping[str, Any]) -> dict[str, str]:
    """Returns why a model cannot be cut by tensors, and why not into stages; empty: it can."""
    family = FAMILIES.get(kind)
    if family is None:
        return dict.fromkeys(("tp_size", "pp_size"), "it has not been tried")
    # By the model's own config.json, since the same family has models with and without it.
    norm = next((key for key in _NORMS_OF_ALL_HEADS if said.get(key)), "")
    softcap = "final_logit_softcapping" if said.get("final_logit_softcapping") else ""
    tp = f"{family.tp} in transformers' tensor-parallel plan" if family.tp else norm
    pp = softcap if family.pp else "something besides embedding, layers, norm and head"
    return {"tp_size": tp, "pp_size": pp}

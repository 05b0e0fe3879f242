"""Prompts: read once, tokenised once, handed out in an order that is a function of (seed, epoch).

`sample_id` counts the responses asked for over the whole run, n to each prompt, one after the other
(`rollout.samples_per_prompt`): it names an epoch, a prompt (`sample_id // n`) and which of its responses it is, so an
offset is all the state there is, and a response's noise needs no other name.
"""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_slurm.config.schema import DataConfig
from verl_slurm.errors import UNREADABLE, DataError
from verl_slurm.trainer.counter_rng import Purpose, permutation
from verl_slurm.trainer.split import Row, Sides, drop_shared, first_by_digest, split_by_digest

__all__ = ["Batch", "PromptData", "load_tokenizer", "read_sides"]

Batch = dict[str, torch.Tensor]
"""Column name to CPU tensor; the first dimension is the sample."""


def load_tokenizer(model_path: Path) -> PreTrainedTokenizerBase:
    """The model's own tokenizer; a pad token is chosen where it has none.

    Raises:
        DataError: none there, or one without an end-of-sequence token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(model_path), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise DataError(
            "the tokenizer cannot be loaded",
            where=model_path,
            found=error,
            expected="a Hugging Face model directory with its tokenizer",
            remedy="set model.path",
        ) from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token",
            where=model_path,
            expected="eos_token in tokenizer_config.json",
            remedy="set eos_token in the model directory",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read_rows(root: Path, config: DataConfig, *, key: str = "data.root") -> list[Row]:
    """All (prompt, answer) of `root/*.jsonl`, by file name, then line."""
    files = sorted(root.glob("*.jsonl"))
    rows: list[Row] = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            where = f"{file}:{number}"
            remedy = "mend or remove the line"
            try:
                item = json.loads(line)
            except UNREADABLE as error:
                raise DataError("a line is not JSON", where=where, found=error, remedy=remedy) from error
            if not isinstance(item, dict):
                raise DataError(
                    "a line is not an object", where=where, found=type(item).__name__, remedy=remedy
                )
            pair = item.get(config.prompt_key), item.get(config.answer_key)
            for key, value in zip((config.prompt_key, config.answer_key), pair, strict=True):
                if not isinstance(value, str) or (key == config.prompt_key and not value):
                    raise DataError(
                        f"a line has no text under {key!r}",
                        where=where,
                        found=f"keys {sorted(item)}",
                        expected=f"a string under {key!r}",
                        remedy="set data.prompt_key and data.answer_key",
                    )
            rows.append((str(pair[0]), str(pair[1])))
    if not rows:
        raise DataError(
            "the data root holds no prompts",
            where=root,
            found=f"{len(files)} .jsonl files, 0 lines",
            expected="at least one line",
            remedy=f"set {key}",
        )
    return rows


def read_sides(root: Path, config: DataConfig) -> Sides:
    """What trains, and what is held out (`trainer.split`).

    Raises:
        DataError: as `PromptData`, for either root; or one of the two sides is empty.
    """
    rows = _read_rows(root, config)
    if config.eval_root is not None:
        held_out = _read_rows(Path(config.eval_root), config, key="data.eval_root")
        train = drop_shared(rows, held_out)
    elif config.eval_fraction:
        train, held_out = split_by_digest(rows, config.eval_fraction)
    else:
        return rows, []
    if not train or not held_out:
        raise DataError(
            "the split leaves one side empty",
            where=root,
            found=f"{len(train)} prompts to train on, {len(held_out)} held out",
            expected="at least one on both sides",
            remedy="set data.eval_fraction or data.eval_root",
        )
    return train, held_out


class PromptData:
    """All prompts of a run that train, or those of its evaluation.

    Args:
        root: directory of `*.jsonl`.
        tokenizer: the model's.
        config: names of the keys, longest prompt, whether to shuffle.
        seed: the run's seed; it alone decides the order of every epoch.
        held_out: at most so many of the held-out prompts, never shuffled; None: those that train.
        samples_per_prompt: n.

    Raises:
        DataError: no file, no line, a broken line, or a prompt longer than `max_prompt_tokens`
            (cutting it would silently change the question).

    Called by: trainer.__main__ once, trainer.step each step.
    """

    def __init__(
        self,
        root: Path,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        seed: int,
        *,
        held_out: int | None = None,
        samples_per_prompt: int = 1,
    ) -> None:
        train, rest = read_sides(root, config)
        rows = train if held_out is None else first_by_digest(rest, held_out)
        self._prompts = [prompt for prompt, _ in rows]
        self._answers = [answer for _, answer in rows]
        self._seed, self._shuffle = seed, config.shuffle and held_out is None
        self._per_prompt = samples_per_prompt
        self._order: tuple[int, list[int]] = (-1, [])
        length = config.max_prompt_tokens
        encoded: list[list[int]] = tokenizer(self._prompts, add_special_tokens=False)["input_ids"]
        longest = max(range(len(encoded)), key=lambda row: len(encoded[row]))
        if len(encoded[longest]) > length:
            raise DataError(
                "a prompt is too long",
                where=f"{root}, prompt {self._prompts[longest][:40]!r}",
                found=f"{len(encoded[longest])} tokens",
                expected=f"at most data.max_prompt_tokens={length}",
                remedy="raise data.max_prompt_tokens",
            )
        self._ids = torch.full((len(rows), length), int(tokenizer.pad_token_id), dtype=torch.int64)
        self._mask = torch.zeros((len(rows), length), dtype=torch.bool)
        for row, ids in enumerate(encoded):
            if ids:
                self._ids[row, -len(ids) :] = torch.tensor(ids, dtype=torch.int64)
                self._mask[row, -len(ids) :] = True

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def row(self, sample_id: int) -> int:
        """Which line (counted over all files) the `sample_id`-th response of the run answers."""
        epoch, position = divmod(sample_id // self._per_prompt, len(self))
        if not self._shuffle:
            return position
        if self._order[0] != epoch:
            order = permutation(self._seed, Purpose.DATA_ORDER, (epoch,), len(self))
            self._order = epoch, order.tolist()
        return self._order[1][position]

    def batch(self, offset: int, num: int) -> Batch:
        """What the responses `offset .. offset + num` of the run answer.

        Returns:
            sample_id int64 [N]; prompt_ids int64 [N, P], left-padded; prompt_mask bool [N, P];
            P is always `max_prompt_tokens`, so a batch's shape never depends on its prompts.
        """
        rows = [self.row(sample_id) for sample_id in range(offset, offset + num)]
        return {
            "sample_id": torch.arange(offset, offset + num, dtype=torch.int64),
            "prompt_ids": self._ids[rows],
            "prompt_mask": self._mask[rows],
        }

    def prompts(self, sample_ids: torch.Tensor) -> list[str]:
        """The prompts' text, one for each sample id."""
        return [self._prompts[self.row(int(sample_id))] for sample_id in sample_ids]

    def answers(self, sample_ids: torch.Tensor) -> list[str]:
        """The right answers, one for each sample id."""
        return [self._answers[self.row(int(sample_id))] for sample_id in sample_ids]

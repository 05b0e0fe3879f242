"""Prompts: read, divided into training and held out, rendered, tokenised once, and handed out in a fixed order.

The order is a function of (seed, epoch). `sample_id` counts the responses of the whole run, n consecutive ones for each
prompt (`rollout.samples_per_prompt`). It identifies an epoch, a prompt (`sample_id // n`) and one of its responses. So
an offset is the whole state, and the noise of a response needs no other key.

The prompt's text alone decides on which side of the division it is, the same on every machine and for every
seed. A held-out prompt never trains, evaluated or not.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_slurm.base.errors import DataError
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.prompts.chat_template import (
    no_conversations,
    no_template,
    processor_template,
    refuses,
    require_asked,
    template_refuses,
    tokens_of,
)
from verl_slurm.dataset.prompts.directory import Content, prompts_below, refuse_empty_side
from verl_slurm.dataset.prompts.rows import Prompt, is_held_out, number_of
from verl_slurm.trainer.objective.counter_rng import Purpose, permutation


def plain_text(where: str, prompt: Prompt) -> str:
    """Returns the prompt unchanged. Raises `DataError` for a conversation."""
    if isinstance(prompt, str):
        return prompt
    raise no_conversations(where)


def as_text(
    tokenizer: PreTrainedTokenizerBase, template: str | None, clock: datetime | None = None
) -> Callable[[str, Prompt], str]:
    """Returns a function (place, prompt) → the text whose tokens the policy sees.

    Args:
        template: a chat template; None: the tokenizer's own.
        clock: what a template takes for now; None: now.

    Raises (when called):
        DataError: no template for a conversation, or the template refuses it.
    """

    # Without a clock of the run's, each day would have prompts of its own.
    given: dict[str, Any] = {} if clock is None else {"strftime_now": clock.strftime}

    def render(where: str, prompt: Prompt) -> str:
        # Text is used as it is: its author has written the model's markup into it.
        if isinstance(prompt, str):
            return prompt
        if template is None and not tokenizer.chat_template:
            raise no_template(where)
        try:
            text = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, chat_template=template, **given
            )
        # Templates are programs, and unexpected input surfaces as any error.
        except Exception as error:
            if not refuses(error):
                raise
            raise template_refuses(where, error) from error
        return require_asked(where, prompt, str(text))

    return render


Row = tuple[str, str]
"""Prompt and answer."""
Sides = tuple[list[Row], list[Row]]
"""The rows to train on and the held-out rows, each in the given order."""


def split_by_digest(rows: Sequence[Row], fraction: float) -> Sides:
    """Holds out about `fraction` (0 to 1) of the different prompts."""
    # By the text of the prompt: an added line moves no other one, and a doubled prompt is on one side both times.
    chosen = {prompt for prompt, _ in rows if is_held_out(number_of(prompt), fraction)}
    return [row for row in rows if row[0] not in chosen], [row for row in rows if row[0] in chosen]


def drop_shared(rows: Sequence[Row], held_out: Sequence[Row]) -> list[Row]:
    """Returns the rows whose prompt is not among the held-out ones."""
    chosen = {prompt for prompt, _ in held_out}
    return [row for row in rows if row[0] not in chosen]


def first_by_digest(rows: Sequence[Row], most: int) -> list[Row]:
    """Returns at most `most` different prompts, in the order of their digests."""
    # By the digest, not by the file's order: a sorted file would be evaluated on its beginning.
    different = {prompt: (prompt, answer) for prompt, answer in reversed(rows)}  # the first of each stays
    return sorted(different.values(), key=lambda row: (number_of(row[0]), row[0]))[:most]


Batch = dict[str, torch.Tensor]
"""Column name to CPU tensor; the first dimension is the sample."""
Recorded = Mapping[str, Mapping[str, Content]]
"""Maps `data.root` and `data.eval_root` to the size and SHA-256 of their files by relative path."""

_ENCODED_AT_ONCE = 1024


def load_tokenizer(model_path: Path) -> PreTrainedTokenizerBase:
    """Loads the model's own tokenizer, and chooses a pad token if it has none.

    Raises:
        DataError: there is none, or it has no end-of-sequence token.
    """
    try:
        # No code of the directory runs, and nothing is asked of the hub.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(model_path), local_files_only=True, trust_remote_code=False
        )
    # Libraries raise anything for a broken file, the tokenizers plain `Exception`.
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        raise DataError(
            "the tokenizer cannot be loaded",
            where=model_path,
            found=error,
            expected="a Hugging Face model directory with its tokenizer",
            remedy="set model.path",
        ) from error
    # Every response would run to its greatest length, and its mask is made from this token.
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token",
            where=model_path,
            expected="eos_token in tokenizer_config.json",
            remedy="set eos_token in the model directory",
        )
    # A template that a processor saved. The tokenizer does not look for that file.
    if not tokenizer.chat_template:
        tokenizer.chat_template = processor_template(model_path)
    if tokenizer.pad_token_id is None:
        # Masks tell padding from the end token, so the two may share a number.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def begin_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the token that the tokenizer itself puts before a text (BOS); None: it puts none."""
    ids: list[int] = tokenizer("x")["input_ids"]
    first = tokenizer.bos_token_id
    return int(first) if first is not None and ids[:1] == [first] else None


def _read_rows(
    root: Path,
    config: DataConfig,
    recorded: Recorded | None,
    render: Callable[[str, Prompt], str],
    key: str = "data.root",
) -> list[Row]:
    """Reads all (prompt, answer) below `root`, by file name, then row."""
    files = None if recorded is None else recorded[key]
    found = prompts_below(root, config, files, key=key)
    return [(render(where, prompt), answer) for where, prompt, answer in found]


def _place_of(
    text: str, root: Path, config: DataConfig, recorded: Recorded | None, render: Callable[[str, Prompt], str]
) -> str:
    """Returns the file and row of the first prompt with that text; the root if it is not found again."""
    roots = {"data.root": root, "data.eval_root": config.eval_root}
    for key, place in roots.items():
        if place is not None:
            files = None if recorded is None else recorded[key]
            for where, prompt, _ in prompts_below(Path(place), config, files, key=key):
                if render(where, prompt) == text:
                    return where
    return str(root)


def read_sides(
    root: Path,
    config: DataConfig,
    *,
    recorded: Recorded | None = None,
    render: Callable[[str, Prompt], str] = plain_text,
) -> Sides:
    """Returns the prompts that train and the held-out ones (`trainer.data`).

    Args:
        recorded: what the files must be; None: any files are accepted.
        render: place and prompt → text, for prompts that are conversations.

    Raises:
        DatasetDrift, DataError: as `PromptData`, for either root; or one of the two sides is empty.
    """
    rows = _read_rows(root, config, recorded, render)
    if config.eval_root is not None:
        held_out = _read_rows(Path(config.eval_root), config, recorded, render, "data.eval_root")
        # Another root may hold some of the same prompts, and a held-out one never trains.
        train = drop_shared(rows, held_out)
    elif config.eval_fraction:
        train, held_out = split_by_digest(rows, config.eval_fraction)
    else:
        # Without a split nothing is held out, and no prompt is missing from the training.
        return rows, []
    refuse_empty_side(root, config, len(train), len(held_out))
    return train, held_out


class PromptData:
    """All prompts of a run that train, or those of its evaluation.

    Args:
        seed: the run's seed; it alone decides the order of every epoch.
        held_out: at most this many of the held-out prompts, never shuffled; None: those that train.
        samples_per_prompt: n.
        recorded: what the files must be; None: any files are accepted.
        template: the text of a chat template, instead of the tokenizer's.
        vocabulary: number of the model's tokens; None: not known.
        clock: of chat templates; None: now.

    Attributes:
        template: the chat template that rendered prompts; None: all of them were text.

    Raises:
        DatasetDrift: a file is not the recorded one.
        DataError: no file, no row, a broken row, or a prompt longer than `max_prompt_tokens`.
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
        recorded: Recorded | None = None,
        template: str | None = None,
        vocabulary: int | None = None,
        clock: datetime | None = None,
    ) -> None:
        # Before the split: it goes by the text that the policy sees.
        render = plain_text if config.chat_template == "none" else as_text(tokenizer, template, clock)
        rendered = set[str]()

        def text_of(where: str, prompt: Prompt) -> str:
            text = render(where, prompt)
            if not isinstance(prompt, str):
                rendered.add(text)
            return text

        def encode(texts: list[str]) -> list[list[int]]:
            ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
            return ids

        def place_of(text: str) -> str:
            # Read again for an error's sake: the places of a million rows are not kept.
            return _place_of(text, root, config, recorded, render)

        train, rest = read_sides(root, config, recorded=recorded, render=text_of)
        rows = train if held_out is None else first_by_digest(rest, held_out)
        self.template = (
            None if not rendered else tokenizer.get_chat_template() if template is None else template
        )
        self._prompts = [prompt for prompt, _ in rows]
        self._answers = [answer for _, answer in rows]
        self._seed, self._shuffle = seed, config.shuffle and held_out is None
        self._per_prompt = samples_per_prompt
        self._order: tuple[int, list[int]] = (-1, [])
        self._length, self._pad = config.max_prompt_tokens, int(tokenizer.pad_token_id)
        # Token ids are stored end to end: padded, a data set of a million prompts would take gigabytes on every rank.
        parts, lengths, begin = [], [], begin_token(tokenizer)
        for start in range(0, len(rows), _ENCODED_AT_ONCE):
            texts = self._prompts[start : start + _ENCODED_AT_ONCE]
            encoded = tokens_of(encode, texts, place_of, vocabulary)
            if begin is not None:
                # As the tokenizer does it for text, but without an end token, behind which nothing would follow. A
                # chat template has written its special tokens itself, and so may the author of a text.
                encoded = [
                    ids if text in rendered or ids[:1] == [begin] else [begin, *ids]
                    for text, ids in zip(texts, encoded, strict=True)
                ]
            lengths += [len(ids) for ids in encoded]
            parts.append(torch.tensor([token for ids in encoded for token in ids], dtype=torch.int32))
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        # Refused rather than cut: that would silently change the question.
        if lengths[longest] > self._length:
            raise DataError(
                "a prompt is too long",
                where=f"{place_of(self._prompts[longest])}, prompt {self._prompts[longest][:40]!r}",
                found=f"{lengths[longest]} tokens",
                expected=f"at most data.max_prompt_tokens={self._length}",
                remedy="raise data.max_prompt_tokens",
            )
        self._ids = torch.cat(parts)
        self._ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)

    def __len__(self) -> int:
        """Returns the number of prompts in one epoch."""
        return len(self._prompts)

    def row(self, sample_id: int) -> int:
        """Returns which of these prompts the `sample_id`-th response of the run answers."""
        # A function of the sample id alone: the offset is all that a resume needs, on any number of ranks.
        epoch, position = divmod(sample_id // self._per_prompt, len(self))
        if not self._shuffle:
            return position
        # One epoch's order is kept: consecutive samples ask for the same one.
        if self._order[0] != epoch:
            order = permutation(self._seed, Purpose.DATA_ORDER, (epoch,), len(self))
            self._order = epoch, order.tolist()
        return self._order[1][position]

    def batch(self, offset: int, num: int) -> Batch:
        """Returns the prompts that the responses `offset .. offset + num` of the run answer.

        Returns:
            sample_id int64 [N]; prompt_ids int64 [N, P], left-padded; prompt_mask bool [N, P]. P is always
            `max_prompt_tokens`.
        """
        rows = [self.row(sample_id) for sample_id in range(offset, offset + num)]
        # Always as wide as the longest allowed: kernels may round by shape, so a batch's shape must not vary.
        ids = torch.full((num, self._length), self._pad, dtype=torch.int64)
        mask = torch.zeros((num, self._length), dtype=torch.bool)
        for place, row in enumerate(rows):
            start, end = int(self._ends[row - 1]) if row else 0, int(self._ends[row])
            # Left-padded, so that all rows of a batch end, and sampling begins, at the same column.
            if end > start:
                ids[place, start - end :] = self._ids[start:end]
                mask[place, start - end :] = True
        sample_id = torch.arange(offset, offset + num, dtype=torch.int64)
        return {"sample_id": sample_id, "prompt_ids": ids, "prompt_mask": mask}

    def prompts(self, sample_ids: torch.Tensor) -> list[str]:
        """Returns the text of the prompt for each sample id."""
        return [self._prompts[self.row(int(sample_id))] for sample_id in sample_ids]

    def answers(self, sample_ids: torch.Tensor) -> list[str]:
        """Returns the right answer for each sample id."""
        return [self._answers[self.row(int(sample_id))] for sample_id in sample_ids]

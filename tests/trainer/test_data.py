"""Prompts in an order that is a function of seed and offset, and which of them are held out: by their text alone."""

import copy
import json
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from tests.builders import run_config
from verl_slurm.base.bounded import vocabulary_of
from verl_slurm.base.errors import DataError
from verl_slurm.config.schema import DataConfig
from verl_slurm.submit.checks.prompt_data import check_data
from verl_slurm.trainer.data import (
    PromptData,
    begin_token,
    drop_shared,
    first_by_digest,
    load_tokenizer,
    split_by_digest,
)

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in (1, 22, 333, 4444, 55555)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    return tmp_path


def test_files_are_read_by_name_and_prompts_padded_on_the_left(
    root: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = PromptData(root, tokenizer, DataConfig(max_prompt_tokens=8, shuffle=False), 0)
    batch = data.batch(1, 3)
    assert batch["sample_id"].tolist() == [1, 2, 3]
    assert data.prompts(batch["sample_id"]) == ["22=", "333=", "4444="]
    assert data.answers(batch["sample_id"]) == ["22", "333", "4444"]
    assert batch["prompt_mask"].sum(dim=1).tolist() == [3, 4, 5]
    assert batch["prompt_mask"].int().diff(dim=1).min() >= 0
    assert tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0]]) == "22="
    assert (batch["prompt_ids"][~batch["prompt_mask"]] == tokenizer.pad_token_id).all()


def test_held_out_prompts_never_train_and_are_never_shuffled(
    root: Path, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> None:
    apart = tmp_path_factory.mktemp("apart")
    (apart / "x.jsonl").write_text('{"prompt": "22=", "answer": "22"}\n{"prompt": "7=", "answer": "7"}\n')
    config = DataConfig(max_prompt_tokens=8, eval_root=str(apart))
    train, held_out = (PromptData(root, tokenizer, config, 0, held_out=most) for most in (None, 9))
    every = torch.arange(4)
    assert sorted(train.prompts(every)) == ["1=", "333=", "4444=", "55555="]
    assert len(train) == 4
    assert sorted(held_out.prompts(torch.arange(2))) == ["22=", "7="]
    again = PromptData(root, tokenizer, config, 99, held_out=9)  # another seed
    assert again.prompts(torch.arange(2)) == held_out.prompts(torch.arange(2))
    assert len(PromptData(root, tokenizer, config, 0, held_out=1)) == 1


def test_a_split_that_leaves_nothing_to_train_on_or_to_evaluate_is_refused(
    root: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    for config in (DataConfig(eval_root=str(root)), DataConfig(eval_fraction=1e-9)):
        with pytest.raises(DataError, match="the split leaves one side empty"):
            PromptData(root, tokenizer, config, 0)


def test_each_epoch_shows_each_prompt_once_in_an_order_of_its_own(
    root: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = PromptData(root, tokenizer, DataConfig(), 3)
    epochs = [[data.row(k * 5 + n) for n in range(5)] for k in range(6)]
    assert all(sorted(rows) == [0, 1, 2, 3, 4] for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) > 1


def test_an_offset_is_all_the_state_there_is(sums_root: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    whole = PromptData(sums_root, tokenizer, DataConfig(), 1)
    end = len(whole)
    batch = whole.batch(end - 3, 6)  # over the end of an epoch
    again = PromptData(sums_root, tokenizer, DataConfig(), 1)
    parts = [again.batch(end + 1, 2), again.batch(end - 3, 4)]  # in any order, cut anywhere
    for column, values in batch.items():
        assert torch.equal(values, torch.cat([parts[1][column], parts[0][column]]))
    other = PromptData(sums_root, tokenizer, DataConfig(), 2).batch(end - 3, 6)
    assert not torch.equal(batch["prompt_ids"], other["prompt_ids"])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "holds no prompts"),
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"prompt": "1="}', "no text under 'answer'"),
        ('{"prompt": "", "answer": "1"}', "no text under 'prompt'"),
        ('{"prompt": 5, "answer": "1"}', "no text under 'prompt'"),
        (json.dumps({"prompt": "1" * 17, "answer": "1"}), r"too long: \S+x\.jsonl:1"),
        (json.dumps({"prompt": "1=\ud83d", "answer": "1"}), "'prompt' holds half of a surrogate pair"),
        (json.dumps({"prompt": "1=", "answer": "\ud83d"}), "'answer' holds half of a surrogate pair"),
    ],
)
def test_what_is_wrong_with_the_data_is_said_with_its_place(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, content: str, what: str
) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(DataError, match=what) as caught:
        PromptData(tmp_path, tokenizer, DataConfig(), 0)
    assert str(tmp_path) in caught.value.one_line()


class Refusing:
    """A tokenizer that fails on one text, as those that are libraries do: for the whole batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, error: BaseException) -> None:
        self._tokenizer, self._text, self._error = tokenizer, text, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: str | list[str], **options: Any) -> Any:
        if self._text in texts:
            raise self._error
        return self._tokenizer(texts, **options)


class PanicException(BaseException):
    """As pyo3 calls the panic of a tokenizer that is written in Rust."""


@pytest.mark.parametrize("error", [TypeError("odd"), RecursionError("odd"), PanicException("odd")], ids=repr)
def test_a_row_that_the_tokenizer_refuses_is_named(
    root: Path, tokenizer: PreTrainedTokenizerBase, error: BaseException
) -> None:
    refusing: Any = Refusing(tokenizer, "4444=", error)
    with pytest.raises(DataError, match="the tokenizer refuses a prompt") as caught:
        PromptData(root, refusing, DataConfig(), 0)
    assert str(caught.value.where) == f"{root}/b.jsonl:2, prompt '4444='"
    assert str(caught.value.found) == f"{type(error).__name__}: odd"
    refusing = Refusing(tokenizer, "4444=", MemoryError())  # of the machine: another start may help
    with pytest.raises(MemoryError):
        PromptData(root, refusing, DataConfig(), 0)


def test_a_token_that_the_model_lacks_is_refused_with_its_row_at_submit_and_in_the_ranks(
    tiny: Path, tmp_path: Path
) -> None:
    """Tokens were added, and the model's embeddings not made larger."""
    model, root = tmp_path / "model", tmp_path / "data"
    shutil.copytree(tiny, model)
    root.mkdir()
    larger, size = load_tokenizer(model), vocabulary_of(model)
    assert size is not None
    larger.add_tokens([f"<{number}>" for number in range(size)])
    larger.save_pretrained(model)
    (root / "b.jsonl").write_text(json.dumps({"prompt": f"1+1=<{size - 1}>", "answer": "2"}))
    refused = rf"b\.jsonl:1, .* expected below vocab_size={size}"
    with pytest.raises(DataError, match=refused):
        PromptData(root, larger, DataConfig(), 0, vocabulary=size)
    with pytest.raises(DataError, match=refused):
        check_data(run_config(path=str(model), root=str(root)))


def test_a_prompt_without_a_token_and_a_broken_tokenizer_are_refused(
    root: Path, tokenizer: PreTrainedTokenizerBase, tiny: Path, tmp_path: Path
) -> None:
    """Without its vocabulary transformers makes a tokenizer that has no token for any text."""
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model/tokenizer.json"
    file.unlink()
    with pytest.raises(DataError, match=r"no token of a prompt: \S+a\.jsonl:1, prompt"):
        PromptData(root, load_tokenizer(tmp_path / "model"), DataConfig(), 0)
    file.write_text('{"model": {"type": "of another release"}, "added_tokens": []}')
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path / "model")


def test_a_row_that_the_chat_template_refuses_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "1"} for text in ("1", "22")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for failure in ("1 // 0", "raise_exception('odd')", "messages[1].content"):
        template = "{% if messages[0].content == '22' %}{{ " + failure + " }}{% endif %}1="
        with pytest.raises(DataError, match=r"the chat template refuses a prompt: \S+a\.jsonl:2"):
            PromptData(tmp_path, tokenizer, DataConfig(), 0, template=template)


def test_a_template_that_writes_the_date_writes_that_of_the_runs_first_start(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": [{"role": "user", "content": "1="}], "answer": "1"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    clock = datetime(2024, 7, 26, tzinfo=UTC)
    template = "{{ strftime_now('%d.%m.%Y') }} {{ messages[0].content }}"
    data = PromptData(tmp_path, tokenizer, DataConfig(), 0, template=template, clock=clock)
    assert data.prompts(torch.tensor([0])) == ["26.07.2024 1="]


def test_the_template_that_rendered_prompts_is_known_and_none_where_all_were_text(
    tmp_path: Path, root: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert PromptData(root, tokenizer, DataConfig(), 0, template="unused").template is None
    (root / "c.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1="}], "answer": "1"}))
    template = "{{ messages[0].content }}"
    assert PromptData(root, tokenizer, DataConfig(), 0, template=template).template == template
    own = copy.deepcopy(tokenizer)
    own.chat_template = {"default": template + "1", "tool_use": template}  # type: ignore[assignment]
    assert PromptData(root, own, DataConfig(), 0).template == template + "1"


def test_a_missing_root_and_a_missing_tokenizer_are_data_errors(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match="no such data directory"):
        PromptData(tmp_path / "none", tokenizer, DataConfig(), 0)
    with pytest.raises(DataError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_line_nested_too_deeply_is_refused_in_one_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        PromptData(tmp_path, tokenizer, DataConfig(), 0)


def test_the_responses_to_a_prompt_lie_together_and_each_has_a_name_of_its_own(
    root: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = DataConfig(max_prompt_tokens=8)
    one = PromptData(root, tokenizer, config, seed=4)
    three = PromptData(root, tokenizer, config, seed=4, samples_per_prompt=3)
    batch = three.batch(6, 12)
    assert batch["sample_id"].tolist() == list(range(6, 18))
    prompts = three.prompts(batch["sample_id"])
    assert prompts == [prompt for prompt in one.prompts(one.batch(2, 4)["sample_id"]) for _ in range(3)]
    assert torch.equal(batch["prompt_ids"], one.batch(2, 4)["prompt_ids"].repeat_interleave(3, dim=0))
    # Five prompts in an epoch: the sixteenth response answers the first of the next.
    assert three.row(15) == one.row(5)


def test_a_text_begins_as_the_models_tokenizer_begins_it(
    tmp_path: Path, tiny: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert begin_token(tokenizer) is None
    model = tmp_path / "model"
    changed = load_tokenizer(tiny)
    changed.add_special_tokens({"bos_token": "<begin>"})
    special = [("<begin>", changed.bos_token_id), (changed.eos_token, changed.eos_token_id)]
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<begin> $A {changed.eos_token}", special_tokens=special
    )
    changed.save_pretrained(model)
    rows: list[object] = ["1=", "<begin>22=", [{"role": "user", "content": "333="}]]
    root = tmp_path / "data"
    root.mkdir()
    (root / "x.jsonl").write_text("".join(json.dumps({"prompt": row, "answer": "1"}) + "\n" for row in rows))
    config = DataConfig(root=str(root), max_prompt_tokens=5, shuffle=False)
    template = "{{ messages[0].content }}"
    batch = PromptData(root, load_tokenizer(model), config, 0, template=template).batch(0, 3)
    decoded = [
        changed.decode(ids[mask]) for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    assert decoded == ["<begin>1=", "<begin>22=", "333="]
    # submit counts it as well, and says it.
    (root / "x.jsonl").write_text('{"prompt": "123=", "answer": "1"}\n')
    for most, found in ((5, ""), (4, "found 5 tokens")):
        run = run_config(root=str(root), path=str(model), max_prompt_tokens=most)
        with pytest.raises(DataError, match=found) if found else nullcontext():
            assert check_data(run)[0].endswith("1 file, 1 prompt; each begins with <begin>")
    with pytest.raises(DataError, match="found 5 tokens"):
        PromptData(root, load_tokenizer(model), DataConfig(max_prompt_tokens=4), 0)


ROWS = [(f"{a}+{b}=", str(a + b)) for a in range(40) for b in range(40)]


def test_every_prompt_is_on_one_side_and_the_order_stays() -> None:
    train, held_out = split_by_digest([*ROWS, *ROWS[::7]], 0.1)
    assert not set(train) & set(held_out)
    assert sorted([*train, *held_out]) == sorted([*ROWS, *ROWS[::7]])
    assert train[: len(ROWS) // 2] == [row for row in ROWS if row in set(train)][: len(ROWS) // 2]
    assert 0.08 < len(held_out) / len(train) < 0.14


def test_a_side_is_of_the_text_alone_so_other_lines_move_nothing() -> None:
    _, held_out = split_by_digest(ROWS, 0.1)
    _, later = split_by_digest([("new", "1"), *reversed(ROWS)], 0.1)
    assert set(held_out) <= set(later) <= {*held_out, ("new", "1")}
    # Frozen: another split would be another experiment.
    assert [row for row, _ in held_out[:4]] == ["0+10=", "0+14=", "1+5=", "1+14="]


def test_a_larger_share_holds_out_what_a_smaller_one_did() -> None:
    assert set(split_by_digest(ROWS, 0.1)[1]) < set(split_by_digest(ROWS, 0.2)[1])
    assert split_by_digest(ROWS, 0.0) == (ROWS, [])


def test_what_is_held_out_elsewhere_does_not_train_whatever_its_answer() -> None:
    assert drop_shared([("a", "1"), ("b", "2"), ("a", "3")], [("a", "9")]) == [("b", "2")]


def test_a_cap_takes_each_prompt_once_and_the_same_ones_in_any_order() -> None:
    few = first_by_digest([*ROWS, *ROWS], 10)
    assert len(set(few)) == 10
    assert first_by_digest(list(reversed(ROWS)), 10) == few
    assert len(first_by_digest(ROWS, 5000)) == len(ROWS)
    assert first_by_digest([("a", "first"), ("a", "second")], 5) == [("a", "first")]

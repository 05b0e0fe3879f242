"""A prompt or an answer that is missing, in every spelling a table can have: refused, or said."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import DataError
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.prompts.look import PromptsLook, PromptsRequest, look_at
from verl_slurm.submit.checks.prompt_data import check_data

GOOD = {"prompt": "1+1=", "answer": "2"}


def look(root: Path, rows: list[dict[str, Any]], kind: str = "jsonl") -> PromptsLook:
    root.mkdir(exist_ok=True)
    if kind == "jsonl":
        (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        lines = [",".join(f'"{value}"' for value in row.values()) for row in rows]
        (root / "a.csv").write_text("prompt,answer\n" + "\n".join(lines) + "\n")
    else:
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), root / "a.parquet")
    config = DataConfig(root=str(root))
    return look_at(
        PromptsRequest(
            data=config, root=str(root), key="data.root", tokenizer=None, has_template=True, seconds=60
        )
    )


@pytest.mark.parametrize("key", ["prompt", "answer"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("value", [None, "", " \t", float("nan")], ids=["null", "empty", "blank", "NaN"])
def test_a_missing_value_is_refused_with_place_and_count(
    tmp_path: Path, kind: str, key: str, value: Any
) -> None:
    good: dict[str, Any] = GOOD
    if isinstance(value, float):
        if kind == "csv" or (kind, key) == ("parquet", "prompt"):
            return  # text has no NaN, and a column of numbers no prompts
        good = GOOD | {key: 1.5} if kind == "parquet" else GOOD
    rows = [GOOD | {key: "" if value is None and kind == "csv" else value} for _ in range(2)]
    rows = [good, *rows, good]
    with pytest.raises(DataError) as caught:
        look(tmp_path / "data", rows, kind)
    assert caught.value.what == f"2 of 4 rows have no text under {key!r}"
    place = {"jsonl": "a.jsonl:2", "csv": "a.csv:3", "parquet": "a.parquet: row 2"}[kind]
    assert str(caught.value.where).endswith(place)
    assert "fix or remove them" in str(caught.value.remedy)


WORDS = ["nan", "NaN", "None", "null", "NULL", "N/A", "n/a", "<NA>", "NaT", "#N/A", " nan "]


UNSEEN = ["\u200b\u200c", "\ufeff", " \u2060\t", "\u3164", "\ufe0f"]


@pytest.mark.parametrize("text", [*WORDS, *UNSEEN, "[]", "\u200bnull"])
def test_a_tables_word_for_a_missing_value_and_text_of_which_nothing_is_seen_are_no_prompts(
    tmp_path: Path, text: str
) -> None:
    for prompt in (text, [{"role": "user", "content": text}], [{"role": "system", "content": ""}]):
        with pytest.raises(DataError, match="a row has no text under 'prompt'"):
            look(tmp_path / "data", [GOOD, GOOD | {"prompt": prompt}])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("value", [[], {}, {"x": None}, [None], [[], [" "]], *UNSEEN])
def test_an_answer_that_says_nothing_is_refused(tmp_path: Path, value: Any, kind: str) -> None:
    if (kind, value) == ("parquet", {}):
        return  # a column of objects without a key cannot be written
    with pytest.raises(DataError) as caught:
        look(tmp_path / "data", [GOOD | {"answer": value}] * 2, kind)
    assert caught.value.what == "2 of 2 rows have no text under 'answer'"
    assert ("as text where that is the answer" in str(caught.value.remedy)) is not isinstance(value, str)


@pytest.mark.parametrize("word", [*WORDS, ["null"], "[]", "{}"])
def test_an_answer_that_reads_like_a_missing_value_is_said(tmp_path: Path, word: Any) -> None:
    rows = [GOOD, GOOD | {"answer": word}, GOOD | {"answer": "no"}]
    # Those with something in them are taken.
    rows += [GOOD | {"answer": value} for value in (0, False, [0], {"x": None, "y": False}, "\u200b7")]
    assert look(tmp_path / "data", rows).doubtful == 1
    notes = check_data(run_config(data=DataConfig(root=str(tmp_path / "data"))))[1]
    assert any("1 answer read like a missing value" in note and "a.jsonl:2" in note for note in notes)


def test_a_mark_for_an_image_is_said_to_be_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n")
    root = run_config(data=DataConfig(root=str(tmp_path)))
    assert check_data(root).notes == []
    asked = [{"role": "user", "content": "<image>What is it?"}]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.writelines(json.dumps(GOOD | {"prompt": prompt}) + "\n" for prompt in ("see: <video>", asked))
    (model := tmp_path / "model").mkdir()
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    root = run_config(path=str(model), data=DataConfig(root=str(tmp_path), files="a.jsonl"))
    [note] = check_data(root).notes
    assert "no image, video or sound is given to the model" in note
    assert note.endswith("a.jsonl:2")


def test_data_beside_the_files_that_are_read_is_named(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "train-2.jsonl.gz", "train-3.csv", "README.md", "dataset_info.json"):
        (tmp_path / name).write_text(json.dumps(GOOD) + "\n")
    [note] = check_data(run_config(data=DataConfig(root=str(tmp_path))))[1]
    assert note.endswith("belong to it: train-2.jsonl.gz, train-3.csv")


def test_a_pattern_that_reaches_into_a_test_split_is_said(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(GOOD) + "\n")
    config = run_config(data=DataConfig(root=str(tmp_path), files="*.jsonl"))
    assert "data.files takes files of several splits: test, train" in check_data(config)[1]

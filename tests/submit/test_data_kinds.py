"""The data as `submit` looks at it: every kind of file, every row, bounded, and one clear line for what is wrong."""

import csv
import datetime
import io
import json
import os
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.harness import ROOT
from tests.hostile.measured import measured
from tests.lanes import with_variants
from tests.processes import captured, python_path
from tests.submit.test_preflight import POINTER
from verl_slurm.base.errors import DataError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.files import private_dir
from verl_slurm.cli.__main__ import main
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.dataset.prompts.directory import prompts_below
from verl_slurm.trainer.data import read_sides

pytestmark = pytest.mark.slow

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]
Submit = Callable[..., tuple[int, str]]


@pytest.fixture
def submit(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Submit:
    """`submit("data.limit=3")`: a dry run of the quick start on tmp_path/data; exit code, and what it said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    quickstart = str(ROOT / "configs/quickstart.yaml")

    def run(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["submit", quickstart, "--dry-run", "--cluster", "local", "data.root=data", *words])
        _, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, err

    return run


def jsonl(path: Path, rows: list[Any] = ROWS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(path: Path, rows: list[Any] = ROWS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def arrow(path: Path, rows: list[Any] = ROWS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)


def table(path: Path, rows: list[Any] = ROWS, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def saved_dataset(root: Path) -> None:
    """As `datasets.Dataset.save_to_disk` writes it, with a cache file of a later `map` beside it."""
    arrow(root / "data-00000-of-00002.arrow", ROWS[:3])
    arrow(root / "data-00001-of-00002.arrow", ROWS[3:])
    arrow(root / "cache-1234.arrow", [{"x": 1}])
    files = [{"filename": f"data-0000{n}-of-00002.arrow"} for n in range(2)]
    (root / "state.json").write_text(
        json.dumps({"_data_files": files, "_fingerprint": "x", "_split": "train"})
    )
    (root / "dataset_info.json").write_text("{}")


def hub_snapshot(root: Path) -> None:
    """As `hf download` lays it out: links into a store of blobs."""
    parquet(root.parent / "blobs" / "abc", ROWS)
    (root / "data").mkdir()
    (root / "data" / "train-00000-of-00001.parquet").symlink_to("../../blobs/abc")
    (root / "README.md").write_text("A data set.")


KINDS: dict[str, Callable[[Path], object]] = {
    "parquet": lambda root: parquet(root / "a.parquet"),
    "arrow file": lambda root: arrow(root / "a.arrow"),
    "saved data set": saved_dataset,
    "hub snapshot": hub_snapshot,
    "csv": lambda root: table(root / "a.csv"),
    "tsv": lambda root: table(root / "a.tsv", delimiter="\t"),
    "csv of a spreadsheet": lambda root: (root / "a.csv").write_bytes(
        b'\xef\xbb\xbfprompt,answer\r\n"1, 2\r\nor 3?",3\r\n' + b"1,2\r\n" * 4
    ),
    "json array": lambda root: (root / "a.json").write_text(json.dumps(ROWS, indent=1)),
    "json lines in .json": lambda root: jsonl(root / "a.json"),
    "jsonl beside other files": lambda root: (jsonl(root / "a.jsonl"), table(root / "b.csv")),
    "jsonl with a mark at its start": lambda root: (root / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    ),
    "numbers and sections as answers": lambda root: jsonl(
        root / "a.jsonl", [row | {"answer": {"n": 1} if n else 7} for n, row in enumerate(ROWS)]
    ),
}


@pytest.mark.scenario("USE08")
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_data_set_of_any_usual_kind_is_read(tmp_path: Path, submit: Submit, kind: str) -> None:
    KINDS[kind](tmp_path / "data")
    code, said = submit()
    assert (code, "5 prompts" in said) == (ExitCode.OK, True), said


@pytest.mark.scenario("USE08")
def test_conversations_and_nested_answers_as_verl_writes_them_are_read(
    tmp_path: Path, submit: Submit
) -> None:
    rows = [
        {
            "prompt": CHAT,
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": n, "answer": "two"},
        }
        for n in range(3)
    ]
    parquet(tmp_path / "data" / "train.parquet", rows)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chat = "data.chat_template=chat.jinja"
    for key in ("reward_model.ground_truth", "extra_info.answer", "extra_info.index", "null"):
        code, said = submit(f"data.answer_key={key}", chat)
        assert (code, "3 conversations" in said) == (ExitCode.OK, True), said
    code, said = submit(chat)
    assert code == ExitCode.DATA
    assert "reward_model.ground_truth" in said  # the keys there are
    code, said = submit("data.answer_key=reward_model.ground_truth")
    assert code == ExitCode.DATA
    assert "the tokenizer has no chat template" in said
    code, said = submit("data.answer_key=reward_model.ground_truth", "data.chat_template=none")
    assert code == ExitCode.DATA
    assert "data.chat_template is none" in said
    code, said = submit("data.answer_key=reward_model.ground_truth", "data.chat_template=gone.jinja")
    assert code == ExitCode.DATA
    assert "no such chat template" in said
    for name, value in {
        "p.jinja": "data.chat_template=p.jinja",
        "p.py": "model.reward=python:p.py:score",
    }.items():
        (tmp_path / name).write_text(POINTER)
        code, said = submit("data.answer_key=reward_model.ground_truth", chat, value)
        assert (code, f"pointer of Git LFS, without its content: {tmp_path / name}" in said) == (
            ExitCode.DATA,
            True,
        )


@pytest.mark.scenario("USE08")
def test_files_and_limit_say_which_rows_train(tmp_path: Path, submit: Submit) -> None:
    for split, rows in (("train", ROWS), ("test", [{"prompt": "9+1=", "answer": "10"}])):
        parquet(tmp_path / "data" / "data" / f"{split}-00000-of-00001.parquet", rows)
    code, said = submit()
    assert code == ExitCode.DATA
    assert "several splits" in said
    assert "set data.files='data/train*.parquet'" in said
    code, said = submit("data.files=data/train*.parquet", "data.limit=3")
    assert (code, "1 file, 3 prompts" in said) == (ExitCode.OK, True), said
    more = ("data.eval_root=data", "data.eval_files=data/test-*.parquet", "train.eval_every_steps=1")
    code, said = submit("data.files=data/train*.parquet", *more)
    assert (code, "held out " in said) == (ExitCode.OK, True), said
    for pattern in ("../other/*.jsonl", "/etc/*.json", "a//b"):
        assert submit(f"data.files={pattern}")[0] == ExitCode.CONFIG


def chat_of(rows: list[Any]) -> list[Any]:
    return [row | {"prompt": [{"role": "user", "content": f"  {row['prompt']} "}]} for row in rows]


def test_what_lies_at_the_root_of_a_volume_is_no_data(tmp_path: Path, submit: Submit) -> None:
    for folder in ("", ".snapshot/hourly", "lost+found"):
        private_dir(tmp_path / "data" / folder)
        jsonl(tmp_path / "data" / folder / "train.jsonl")
    code, said = submit()
    assert (code, "1 file, 5 prompts" in said) == (ExitCode.OK, True), said
    assert set(fingerprint(tmp_path / "data").files) == {"train.jsonl"}
    # What the glob cannot take is not entered.
    (tmp_path / "data" / "unreadable").symlink_to(".")
    code, said = submit()
    assert (code, "or name the files: data.files" in said) == (ExitCode.DATA, True), said
    assert submit("data.files=train.jsonl")[0] == ExitCode.OK


FRACTION = "data.eval_fraction=0.5"
APART = ("data.eval_root=data", "data.files=train.jsonl")


@pytest.mark.parametrize("kind", [list, chat_of], ids=["texts", "conversations"])
def test_a_split_that_both_roots_leave_a_side_of_empty_is_refused_before_the_queue(
    tmp_path: Path, submit: Submit, kind: Callable[[list[Any]], list[Any]]
) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}")
    chat = "data.chat_template=chat.jinja"
    jsonl(tmp_path / "data" / "train.jsonl", kind(ROWS))
    jsonl(tmp_path / "data" / "test.jsonl", kind([*ROWS[:2], ROWS[0], {"prompt": "9+1=", "answer": "10"}]))
    code, said = submit(*APART, "data.eval_files=*.jsonl", chat)
    assert code == ExitCode.DATA
    assert "the split leaves one side empty" in said
    assert "found 0 prompts to train on, 9 held out" in said
    assert "set data.eval_files or data.eval_root" in said
    code, said = submit(*APART, "data.eval_files=test.jsonl", chat)
    assert (code, "; 3 train, 2 are held out" in said) == (ExitCode.OK, True), said
    jsonl(tmp_path / "data" / "test.jsonl", [{"question": "9+1=", "answer": "10"}])
    code, said = submit(*APART, "data.eval_files=test.jsonl", chat)
    assert "write what is held out under the keys of the training rows" in said
    jsonl(tmp_path / "data" / "test.jsonl", kind([*ROWS[:2], ROWS[0], {"prompt": "9+1=", "answer": "10"}]))
    # As the ranks: a row behind the limit never trains.
    code, said = submit(*APART, "data.eval_files=test.jsonl", "data.limit=2", chat)
    assert (code, "0 prompts to train on, 4 held out" in said) == (ExitCode.DATA, True), said


def test_a_fraction_that_leaves_a_side_empty_is_refused_and_its_prompts_are_counted(
    tmp_path: Path, submit: Submit
) -> None:
    jsonl(tmp_path / "data" / "train.jsonl")
    code, said = submit("data.eval_fraction=1e-9")
    assert (code, "5 prompts to train on, 0 held out" in said) == (ExitCode.DATA, True), said
    train, held_out = read_sides(tmp_path / "data", DataConfig(eval_fraction=0.5))
    code, said = submit(FRACTION)
    counts = f"; {len(train)} train, {len(held_out)} are held out"
    assert (code, counts in said) == (ExitCode.OK, True), said
    # The text that decides has the tokenizer's special tokens, which are not known here.
    jsonl(tmp_path / "data" / "train.jsonl", chat_of(ROWS))
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    code, said = submit(FRACTION, "data.chat_template=chat.jinja")
    assert (code, "the ranks find which of them are held out" in said) == (ExitCode.OK, True), said


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "another kind": (
        lambda root: (root / "train.txt").write_text("x"),
        "no prompts in the data directory: .*found train.txt, expected .*parquet.*convert it",
    ),
    "a directory below": (
        lambda root: jsonl(root / "x" / "a.jsonl"),
        r"found x/a.jsonl, .*set data.root=.*/x, or data.files='\*\*/\*.jsonl'",
    ),
    "several kinds": (
        lambda root: (table(root / "a.csv"), parquet(root / "b.parquet")),
        "several kinds: .*found a.csv, b.parquet",
    ),
    "all splits": (
        lambda root: (
            (root / "dataset_dict.json").write_text('{"splits": ["train", "test"]}'),
            (root / "train").mkdir(),
            saved_dataset(root / "train"),
        ),
        "several splits: .*set data.root=.*/train",
    ),
    "a lost part": (
        lambda root: (saved_dataset(root), (root / "data-00001-of-00002.arrow").unlink()),
        "is not whole: .*no data-00001-of-00002.arrow",
    ),
    "half a file": (
        lambda root: (parquet(root / "a.parquet"), os.truncate(root / "a.parquet", 100)),
        "a.parquet .*expected a whole Parquet file",
    ),
    "UTF-16": (
        lambda root: (root / "a b.jsonl").write_text(json.dumps(ROWS[0]), encoding="utf-16"),
        "not UTF-8: .*found UTF-16.*iconv -f UTF-16 -t UTF-8 '.*a b.jsonl' > NEW, and NEW in its place",
    ),
    "UTF-16 without a mark": (
        lambda root: (root / "a.csv").write_text("prompt,answer\n1,2\n", encoding="utf-16-le"),
        "not UTF-8: ",
    ),
    "Latin 1": (
        lambda root: (root / "a.csv").write_bytes(b"prompt,answer\n\xe4,2\n"),
        "a.csv:.*expected UTF-8",
    ),
    "a bad row behind good ones": (
        lambda root: jsonl(root / "a.jsonl", [*ROWS * 80, {"prompt": "1"}]),
        "no text under 'answer': .*a.jsonl:401 .*found keys prompt,",
    ),
    "another key": (
        lambda root: jsonl(root / "a.jsonl", [{"question": "1", "meta": {"solution": "2"}}]),
        "no text under 'prompt': .*found keys question, meta.solution",
    ),
    "too few fields": (
        lambda root: (root / "a.csv").write_text("prompt,answer\n1,2\n1\n"),
        "a.csv:3 .*found 1, expected 2",
    ),
    "an answer at the end": (
        lambda root: jsonl(
            root / "a.jsonl", [{"prompt": [{"role": "assistant", "content": "2"}], "answer": ""}]
        ),
        "ends with the assistant's message",
    ),
    "pictures": (
        lambda root: jsonl(
            root / "a.jsonl",
            [{"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}], "answer": ""}],
        ),
        "images and other media are not served",
    ),
    "two columns of one name": (
        lambda root: (root / "a.csv").write_text("prompt,answer,answer\n1,2,3\n"),
        "a column stands twice .*a.csv:1 .*found answer",
    ),
    "two arrays in one file": (
        lambda root: (root / "a.json").write_text(f"{json.dumps(ROWS)}\n{json.dumps(ROWS)}\n"),
        r"text behind the array: .*a.json .*found \[, expected one array",
    ),
    "half an array": (lambda root: (root / "a.json").write_text(json.dumps(ROWS)[:-3]), "a.json: element 5"),
    "an array without commas": (lambda root: (root / "a.json").write_text("[{} {}]"), "a.json: element 1"),
}


@pytest.mark.scenario("USE16", "USE-TABLE", "USE-SMALL")
@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_with_data_is_said_before_queueing(tmp_path: Path, submit: Submit, name: str) -> None:
    import re

    make, expected = WRONG[name]
    make(tmp_path / "data")
    code, said = submit()
    assert code == ExitCode.DATA
    assert len(said.splitlines()) == 1
    assert re.search(expected, said), said


OLDER = [{"from": "human", "value": "1+1?"}]
PARTS = "array([{'text': '1?', 'type': 'text'}, {'text': '2?', 'type': 'text'}],\n      dtype=object)"
AS_TEXT = {
    "Python": repr(CHAT),
    "JSON": json.dumps(CHAT, indent=1),
    "one message": json.dumps(CHAT[1]),
    "an older form": repr(OLDER),
    "NumPy": f"[{CHAT[0]}\n {CHAT[1]}]",
    "NumPy, with parts": f"[{{'content': {PARTS}, 'role': 'user'}}]",
}


@pytest.mark.scenario("USE16")
@pytest.mark.parametrize("write", [table, parquet, jsonl])
@pytest.mark.parametrize("form", list(AS_TEXT))
def test_a_conversation_that_is_written_as_text_is_no_prompt(
    tmp_path: Path, submit: Submit, form: str, write: Callable[[Path, list[Any]], None]
) -> None:
    suffix = {table: "csv", parquet: "parquet", jsonl: "jsonl"}[write]
    write(tmp_path / "data" / f"a.{suffix}", [ROWS[0], {"prompt": AS_TEXT[form], "answer": "2"}])
    code, said = submit()
    assert code == ExitCode.DATA
    assert len(said.splitlines()) == 1
    assert "a conversation that is written as text: " in said
    assert "write it as a list into .jsonl or Parquet" in said


LITERALS = {
    "a question behind it": f"{CHAT} What is wrong with it?",
    "code": '[{"role": "user", "content": text} for text in texts]',
    "other objects": '[{"role": "admin", "content": "none"}, {"from": "USD", "value": 3}]',
    "within an object": json.dumps({"user": {"role": "x"}, "page": {"content": "y"}}),
    "deep": "[{'role': 'user', 'content': " + "(" * 5000,
    "deep JSON": '{"role": "user", "content": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "an odd escape": "[{'role': '\\d', 'content': x}]",
    "an odd key": "[{'role': 'x', 'content': {[]: 1}}]",
    "a character that no source has": "[{'role': 'x', 'content': '\0'}]",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(LITERALS))
def test_a_prompt_that_begins_like_a_conversation_stays_a_prompt(tmp_path: Path, name: str) -> None:
    jsonl(tmp_path / "a.jsonl", [{"prompt": LITERALS[name], "answer": "2"}])
    [(_, prompt, _)] = prompts_below(tmp_path, DataConfig())
    assert prompt == LITERALS[name]


AT_NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("value", "kind", "answer"),
    [
        (Decimal(42), pa.decimal128(18, 0), "42"),
        (Decimal("1.50"), pa.decimal128(10, 2), "1.50"),
        (Decimal(0), pa.decimal128(38, 18), "0.000000000000000000"),
        (AT_NOON.date(), pa.date32(), "2026-01-02"),
        (AT_NOON.time(), pa.time64("us"), "12:00:00"),
        (AT_NOON, pa.timestamp("us", "UTC"), "2026-01-02 12:00:00+00:00"),
        (datetime.timedelta(seconds=90), pa.duration("s"), "0:01:30"),
        ("42", pa.dictionary(pa.int8(), pa.string()), "42"),
        (42.0, pa.float64(), "42.0"),
        ({"n": Decimal(42), "x": [Decimal("1.50")], "d": AT_NOON.date()}, None, ""),
    ],
)
def test_an_answer_of_a_table_reaches_the_reward_without_quotes(
    tmp_path: Path, value: object, kind: Any, answer: str
) -> None:
    pq.write_table(pa.table({"prompt": ["1?"], "answer": pa.array([value], kind)}), tmp_path / "a.parquet")
    [(_, _, found)] = prompts_below(tmp_path, DataConfig())
    assert found == (answer or '{"n": 42, "x": [1.5], "d": "2026-01-02"}')


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("prompt", b"1?", pa.binary()),
        ("answer", b"42", pa.binary()),
        ("answer", UUID(int=42).bytes, pa.binary(16)),
        ("answer", {"n": [b"42"]}, None),
    ],
)
def test_binary_data_is_refused_by_its_name(tmp_path: Path, key: str, value: object, kind: Any) -> None:
    columns = {"prompt": ["1?"], "answer": ["2"], key: pa.array([value], kind)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"'{key}' holds binary data.*row 1 .*cast the column to text"):
        list(prompts_below(tmp_path, DataConfig()))


@pytest.mark.scenario("USE-TABLE")
def test_a_prompt_that_is_too_long_is_refused_before_queueing(tmp_path: Path, submit: Submit) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-untyped]

    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(4)  # as some tokenizers on the hub have it
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"model_type": "qwen2", "num_attention_heads": 4, "eos_token_id": 0}')
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    jsonl(tmp_path / "data" / "a.jsonl", [*ROWS * 80, {"prompt": "a " * 21, "answer": "1"}])
    words = ("model.path=model", "data.max_prompt_tokens=20")
    code, said = submit(*words)
    assert code == ExitCode.DATA
    assert "a prompt is too long: " in said
    assert "a.jsonl:401" in said
    assert "found 21 tokens, expected at most data.max_prompt_tokens=20" in said
    assert submit(words[0], "data.max_prompt_tokens=21")[0] == ExitCode.OK


@pytest.mark.scenario("USE08")
def test_without_pyarrow_the_install_line_is_given(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "a.parquet")
    (tmp_path / "pyarrow.py").write_text("raise ImportError('none')")
    words = ["submit", str(ROOT / "configs/quickstart.yaml"), "--dry-run", "--cluster", "local"]
    words += [f"data.root={tmp_path}/data", f"run_dir={tmp_path}/run"]
    done = captured([sys.executable, "-m", "verl_slurm.cli", *words], env=os.environ | python_path(tmp_path))
    assert done.returncode == ExitCode.DATA
    assert "pyarrow is not installed" in done.stderr
    assert f"pip install '{ROOT}[data]'" in done.stderr


@pytest.mark.scenario("USE08")
def test_nothing_in_an_arrow_file_is_unpickled(tmp_path: Path, submit: Submit) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Evil()),
    }
    schema = pa.schema([pa.field("prompt", pa.string(), metadata=metadata), pa.field("answer", pa.string())])
    rows = pa.table({"prompt": ["1"], "answer": ["2"]}, schema=schema)
    with pa.ipc.new_stream(tmp_path / "data" / "a.arrow", schema) as stream:
        stream.write_table(rows)
    code, _ = submit()
    (tmp_path / "data" / "a.arrow").unlink()
    pq.write_table(rows, tmp_path / "data" / "a.parquet")
    code_of_parquet, _ = submit()
    assert {code, code_of_parquet} <= {ExitCode.OK, ExitCode.DATA}
    assert not (tmp_path / "pwned").exists()


def _bomb_parquet(root: Path) -> None:
    """A row of 400 MB of text, which compresses to a few kilobytes."""
    text = "a" * (400 << 20)
    pq.write_table(pa.table({"prompt": [text], "answer": ["1"]}), root / "a.parquet", compression="zstd")


BOMBS: dict[str, Callable[[Path], object]] = {
    "parquet": _bomb_parquet,
    "a line of brackets": lambda root: (root / "a.jsonl").write_bytes(b"[" + b"[]," * (20 << 20) + b"[]]\n"),
    "an array of brackets": lambda root: (root / "a.json").write_bytes(b"[" + b"[]," * (20 << 20) + b"[]]"),
    "an element of brackets": lambda root: (root / "a.json").write_bytes(
        b"[[" + b"[]," * (20 << 20) + b"[]]]"
    ),
    "an open quote": lambda root: (root / "a.csv").write_bytes(b'prompt,answer\n"' + b"a\n" * (40 << 20)),
    "a row of commas": lambda root: (root / "a.csv").write_bytes(b"prompt,answer\n" + b"," * (80 << 20)),
    "a hole": lambda root: ((root / "a.jsonl").write_text("x"), os.truncate(root / "a.jsonl", 8 << 30)),
}


@pytest.mark.long
@pytest.mark.scenario("USE08")
@pytest.mark.parametrize("name", with_variants(*BOMBS))
def test_a_file_that_claims_to_be_large_takes_no_memory(tmp_path: Path, name: str) -> None:
    """More than a good file needs: at most 300 MB."""
    (tmp_path / "data").mkdir()
    BOMBS[name](tmp_path / "data")
    quickstart = ROOT / "configs/quickstart.yaml"
    words = ("--dry-run", "--cluster", "local", f"data.root={tmp_path}/data", f"run_dir={tmp_path}/run")
    done = measured("submit", quickstart, *words)
    assert done.code == ExitCode.DATA, done.err
    assert len(done.err.splitlines()) == 1
    assert done.peak_mb < 420  # 120 MB are Python, pyarrow and the code


@pytest.mark.scenario("USE-TABLE")
def test_of_data_that_takes_long_a_part_is_looked_at_and_that_is_said(tmp_path: Path, submit: Submit) -> None:
    line = json.dumps({"prompt": "1+1=", "answer": "2", "more": list(range(500))}) + "\n"
    (tmp_path / "data" / "a.jsonl").write_bytes(line.encode() * 200_000)
    began = time.monotonic()
    code, said = submit()
    assert code == ExitCode.OK
    assert "rows were looked at; the ranks read them all" in said
    assert time.monotonic() - began < 60


@pytest.mark.scenario("USE07")
def test_a_configuration_without_model_data_or_reward_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = {
        "model.path": "builtin:tiny",
        "model.reward": "rule:arithmetic",
        "data.root": "builtin:arithmetic",
    }
    for text in ("", "name: x\n", "model:\n"):
        Path("my.yaml").write_text(text)
        capfd.readouterr()
        assert main(["submit", "my.yaml", "--cluster", "local", "--dry-run"]) == ExitCode.CONFIG
        said, unseen = capfd.readouterr().err.splitlines()
        assert "model, data and reward" in unseen
        assert "found no model.path, no model.reward, no data.root" in said
    for missing in sections:
        words = [f"{key}={value}" for key, value in sections.items() if key != missing]
        assert main(["submit", "my.yaml", "--cluster", "local", *words]) == ExitCode.CONFIG
        assert f"found no {missing}," in capfd.readouterr().err
    assert not Path("runs").exists()
    words = [f"{key}={value}" for key, value in sections.items()]
    assert main(["submit", "my.yaml", "--cluster", "local", "--dry-run", "--json", *words]) == ExitCode.OK
    assert json.loads(capfd.readouterr().out)["inputs"] == {
        "model": "builtin:tiny",
        "data": "builtin:arithmetic",
        "reward": "rule:arithmetic",
    }


@pytest.mark.scenario("USE08")
def test_the_rows_of_all_formats_come_in_the_order_of_their_files(tmp_path: Path) -> None:
    """What a rank reads; no command prints rows."""
    root, rows = tmp_path / "data", [row | {"id": n} for n, row in enumerate(ROWS * 300)]
    for name, write in {"b": parquet, "a": parquet}.items():
        write(root / f"{name}.parquet", rows if name == "a" else rows[::-1])
    expected = [row["prompt"] for row in (*rows, *rows[::-1])]
    assert [prompt for _, prompt, _ in prompts_below(root, DataConfig())] == expected
    whole = [prompt for _, prompt, _ in prompts_below(root, DataConfig(limit=1502))]
    assert whole == expected[:1502]
    (root / "c.jsonl").write_text(io.StringIO(json.dumps(ROWS[0])).getvalue())
    assert len(list(prompts_below(root, DataConfig()))) == 1

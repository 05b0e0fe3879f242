"""A row that UTF-8, the tokenizer or the chat template refuses is named before the run is queued."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.builders import run_config
from verl_slurm.base.errors import DataError
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.prompts.directory import prompts_below
from verl_slurm.dataset.prompts.look import PromptsRequest, WantedRows, look_at, look_at_rows
from verl_slurm.submit.checks.prompt_data import check_data, recognize

BAD = "bad \ud83d text"
GOOD = {"prompt": "1+1=", "answer": "2"}
ASKED = {"role": "user", "content": "1+1="}
CALL = {"type": "function", "function": {"name": "add", "arguments": {BAD: 1}}}
ROWS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": BAD, "answer": "2"},
    "content": {"prompt": [{"role": "user", "content": BAD}], "answer": "2"},
    "part": {"prompt": [{"role": "user", "content": [{"type": "text", "text": BAD}]}], "answer": "2"},
    "role": {"prompt": [{"role": BAD, "content": "1"}, ASKED], "answer": "2"},
    "tool call": {"prompt": [{"role": "assistant", "tool_calls": [CALL]}, ASKED], "answer": "2"},
    "answer": {"prompt": "1+1=", "answer": BAD},
    "nested answer": {"prompt": "1+1=", "answer": {"chosen": [BAD], "rejected": "3"}},
}


def look(root: Path, *, template: str | None = None, limit: int | None = None) -> None:
    wanted = PromptsRequest(
        data=DataConfig(root=str(root), limit=limit),
        root=str(root),
        key="data.root",
        tokenizer=None,
        has_template=True,
        template=template,
    )
    look_at(wanted)


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("name", ROWS)
def test_half_of_a_surrogate_pair_is_refused_with_its_row_at_submit_and_in_the_ranks(
    tmp_path: Path, name: str, kind: str
) -> None:
    rows = [json.dumps(row) for row in (GOOD, ROWS[name], GOOD)]
    (tmp_path / f"a.{kind}").write_text("\n".join(rows) if kind == "jsonl" else f"[{','.join(rows)}]")
    for read in (look, lambda root: list(prompts_below(root, DataConfig()))):
        with pytest.raises(DataError) as caught:
            read(tmp_path)
        assert str(caught.value.where).endswith("a.jsonl:2" if kind == "jsonl" else "a.json: element 2")
        key = "answer" if "answer" in name else "prompt"
        assert caught.value.what == f"{key!r} holds half of a surrogate pair"
        assert caught.value.found == r"\ud83d in 'bad \ud83d text'"


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_half_of_a_surrogate_pair_is_named_when_a_program_wrote_it_as_bytes(
    tmp_path: Path, kind: str
) -> None:
    row = json.dumps(ROWS["answer"], ensure_ascii=False)
    text = f"{json.dumps(GOOD)}\n{row}" if kind == "jsonl" else f"[{row}]"
    (tmp_path / f"a.{kind}").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(DataError, match=r"(:2|element 1) .*ud83d in 'bad"):
        look(tmp_path)


def test_a_row_behind_the_limit_is_not_asked_for_text_that_can_be_encoded(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in (GOOD, ROWS["prompt"])))
    look(tmp_path, limit=1)
    assert len(list(prompts_below(tmp_path, DataConfig(limit=1)))) == 1


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_bytes_that_are_not_utf_8_are_refused_with_their_row(tmp_path: Path, kind: str) -> None:
    prompts = [b"1+1="] * 400 + [BAD.encode(errors="surrogatepass")] + [b"1+1="] * 400
    place = tmp_path / f"a.{kind}"
    if kind == "csv":
        place.write_bytes(b"prompt,answer\n" + b"".join(prompt + b',"2\n"\n' for prompt in prompts))
        where = "a.csv:802"
    else:
        pa = pytest.importorskip("pyarrow")
        answers = pa.array(["2"] * len(prompts))
        column = pa.Array.from_buffers(pa.string(), len(prompts), pa.array(prompts, pa.binary()).buffers())
        table = pa.table({"prompt": column, "answer": answers})
        if kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, place)
        else:
            with pa.ipc.new_stream(place, table.schema) as stream:
                stream.write_table(table)
        where = f"a.{kind}: row 401"
    with pytest.raises(DataError, match="can't decode") as caught:
        look(tmp_path)
    assert str(caught.value.where).endswith(where)


@pytest.mark.parametrize("column", ["prompt", "extra_info"])
def test_rows_of_verls_with_half_of_a_surrogate_pair_are_refused(tmp_path: Path, column: str) -> None:
    row = {"prompt": [ASKED], "extra_info": {"index": 1}}
    odd = {"prompt": ROWS["content"]["prompt"], "extra_info": {BAD: 1}}
    place = tmp_path / "a.json"
    place.write_text("\n".join(json.dumps(one) for one in (row, row | {column: odd[column]})))
    with pytest.raises(DataError, match="half of a surrogate pair") as caught:
        look_at_rows(WantedRows(files=[str(place)], keys=["prompt"], messages="prompt"))
    assert str(caught.value.where) == f"{place}:2"


def test_a_column_that_verls_rewards_may_read_has_to_be_utf_8(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    buffers = pa.array([b"1", BAD.encode(errors="surrogatepass")], pa.binary()).buffers()
    table = pa.table({"prompt": [[ASKED]] * 2, "extra_info": pa.Array.from_buffers(pa.string(), 2, buffers)})
    place = tmp_path / "a.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(table, place)
    with pytest.raises(DataError, match=r"a\.parquet: row 2 .*can't decode"):
        look_at_rows(
            WantedRows(files=[str(place)], keys=["prompt"], messages="prompt", also=["extra_info", "none"])
        )


REFUSING = {
    "raise_exception": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
    "UndefinedError": "{% if messages[0].role == 'system' %}{{ messages[9].content }}{% endif %}",
    "TypeError": "{% if messages[0].role == 'system' %}{{ messages[0].content + 1 }}{% endif %}",
    "ZeroDivisionError": "{% if messages[0].role == 'system' %}{{ 1 // 0 }}{% endif %}",
    "RecursionError": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{% if messages[1] %}{{ f(1) }}{% endif %}",
    "TemplateSyntaxError": "{{ messages[0].content }",
}


@pytest.mark.parametrize("name", REFUSING)
def test_a_conversation_that_the_chat_template_refuses_is_named(tmp_path: Path, name: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [{"prompt": messages, "answer": "2"} for messages in ([ASKED], [system, ASKED])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="the chat template refuses a prompt") as caught:
        look(tmp_path, template="{{ messages[-1].content }}" + REFUSING[name])
    assert str(caught.value.where).endswith("a.jsonl:1" if name == "TemplateSyntaxError" else "a.jsonl:2")
    assert ("no system role" if name == "raise_exception" else name) in str(caught.value.found)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token + messages[0].content + eos_token }}{{ strftime_now('%Y') }}",
        "{% if tools is not none %}{{ raise_exception('tools') }}{% endif %}{{ messages[0].content | tojson | upper }}",
        "{% for m in messages %}{% generation %}{{ m | tojson(indent=2) }}{% endgeneration %}{% break %}{% endfor %}",
        "{% a_tag_of_the_future %}",
    ],
)
def test_a_template_that_takes_the_row_in_the_ranks_takes_it_at_submit(tmp_path: Path, template: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [ASKED], "answer": "2"}))
    look(tmp_path, template=template)


@pytest.mark.parametrize("role", ["human", "user"])
def test_a_template_that_leaves_out_what_is_asked_is_refused_at_submit_and_in_the_ranks(
    tmp_path: Path, role: str
) -> None:
    """Every row would be the same prompt."""
    asked = [{"role": "user", "content": "Say:"}, {"role": role, "content": "twelve"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": asked, "answer": "2"}))
    template = "{% for m in messages if m.role == 'user' %}{{ m.content | upper }}{% endfor %}"
    if role == "user":
        look(tmp_path, template=template)
        return
    with pytest.raises(DataError, match=r"leaves out the last message: \S+a.jsonl:1 .*role 'human'"):
        look(tmp_path, template=template)
    data = pytest.importorskip("verl_slurm.trainer.data")
    with pytest.raises(DataError, match="leaves out the last message"):
        data.as_text(RendersNothing(), None)("a.jsonl:1", asked)


class RendersNothing:
    """A tokenizer."""

    chat_template = "any"

    def apply_chat_template(self, *_: object, **__: object) -> str:
        return ""


@pytest.mark.parametrize("source", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_submit_renders_with_the_template_of_the_model(tmp_path: Path, source: str) -> None:
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    template = "{{ raise_exception('not this row') }}"
    if source == "chat_template.jinja":
        (model / source).write_text(template)
    else:
        named = [{"name": "tool_use", "template": ""}, {"name": "default", "template": template}]
        text = json.dumps({"chat_template": named if source == "list" else template})
        (model / "tokenizer_config.json").write_text(text)
    (data / "a.jsonl").write_text(json.dumps({"prompt": [ASKED], "answer": "2"}))
    with pytest.raises(DataError, match=r"a\.jsonl:1 .*not this row"):
        check_data(run_config(path=str(model), root=str(data)))


@pytest.mark.parametrize(
    ("script", "found", "expected"),
    [
        ("echo 'TypeError: odd' >&2; exit 1", "TypeError: odd", None),
        ("exit 3", "exit code 3", None),
        ("kill -9 $$", "more than 352 MiB", "rows of moderate size"),
        ("echo 'memory allocation of 99 bytes failed' >&2; kill -6 $$", "352 MiB", "rows of moderate size"),
        ("""echo '{"error": null}'""", "352 MiB", "rows of moderate size"),
    ],
)
def test_only_a_look_that_ran_out_of_memory_asks_for_smaller_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str, expected: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    python.chmod(0o700)
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    config = run_config(root=str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DataError) as caught:
        check_data(config)
    assert caught.value.exit_code is ExitCode.DATA
    assert found in str(caught.value.found)
    assert caught.value.expected == expected
    (tmp_path / "chat.jinja").write_text("{% for one in range(99999) %}x{% endfor %}")
    of_chats = msgspec.structs.replace(config.data, chat_template=str(tmp_path / "chat.jinja"))
    with pytest.raises(DataError, match=r"see whether the chat template .*chat\.jinja ends, and which row"):
        check_data(msgspec.structs.replace(config, data=of_chats))


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_row_with_a_key_twice_is_refused(tmp_path: Path, kind: str) -> None:
    row = '{"prompt": "1+1=", "answer": "2", "answer": "3"}'
    (tmp_path / f"a.{kind}").write_text(row if kind == "jsonl" else f"[{row}]")
    with pytest.raises(DataError, match=r"(:1|element 1) .*the key 'answer' twice"):
        look(tmp_path)


def test_a_row_in_a_file_whose_name_is_not_utf_8_is_named(tmp_path: Path) -> None:
    place = tmp_path / "a\udcff.jsonl"
    place.write_text(json.dumps(ROWS["answer"]))
    with pytest.raises(DataError, match=r"a\\udcff\.jsonl:1 .*ud83d"):
        check_data(run_config(root=str(tmp_path)))


def test_a_prompt_column_whose_first_row_is_refused_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": BAD, "answer": "2"}))
    with pytest.raises(DataError, match="'question' holds half of a surrogate pair"):
        recognize(run_config(root=str(tmp_path)))

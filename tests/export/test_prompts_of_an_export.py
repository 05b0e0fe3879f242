"""What an export carries beside the weights: it renders and ends as the run did, or says that it does not."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.export.conftest import fill_here, wish
from verl_slurm.base.errors import DataError
from verl_slurm.base.paths import RunPaths
from verl_slurm.cli.__main__ import main
from verl_slurm.config.load import dump
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.dataset.fingerprint.stored_tree import record_tree
from verl_slurm.export.exporting import RECORD, export as export_checkpoint

pytestmark = pytest.mark.torch

# Ends of lines as an editor of another system writes them.
MINE = (
    "{% for m in messages %}\r\n1{{ m.content }}=\r\n{% endfor %}{% if add_generation_prompt %}+{% endif %}"
)
ANOTHER = "2{{ messages[0].content }}"
TALK = [{"role": "user", "content": "27+15"}]


def rendered(model: Path) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    return str(tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True))


def as_the_run(base: Path, template: str | None) -> str:
    """What the trainer makes of the conversation."""
    from verl_slurm.trainer.data import as_text, load_tokenizer

    return as_text(load_tokenizer(base), template)("", TALK)


def embed(model: Path, template: object) -> None:
    said = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": template}))


def record(out: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((out / RECORD).read_text())["beside_weights"]
    return said


@pytest.mark.parametrize("place", ["embedded", "named", "jinja", "processor", "none"])
def test_an_export_renders_by_the_runs_template_whatever_the_base_model_has(
    place: str, make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_here(monkeypatch)
    mine = make_trained(tied=False)
    if place in ("embedded", "named"):
        embed(mine.base, ANOTHER if place == "embedded" else [{"name": "default", "template": ANOTHER}])
    elif place != "none":
        name = "chat_template.jinja" if place == "jinja" else "chat_template.json"
        (mine.base / name).write_text(ANOTHER if place == "jinja" else json.dumps({"chat_template": ANOTHER}))
    # The file is gone: the checkpoint has the text.
    config = msgspec.structs.replace(mine.config, data=DataConfig(chat_template="/gone/mine.jinja"))
    out = tmp_path / "out"
    done = export_checkpoint(mine.save(config=config, template=MINE), wish(out, mine.base))
    assert rendered(out) == as_the_run(mine.base, MINE)
    assert (out / "chat_template.jinja").read_bytes() == MINE.encode()
    # A program that knows no chat_template.jinja finds no other one.
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert not (out / "chat_template.json").exists()
    assert done.prompts == "as in training, by the chat template of data.chat_template (/gone/mine.jinja)"
    assert record(out)["template"] == "data.chat_template (/gone/mine.jinja)"
    assert record(out)["template_sha256"] == sha256(MINE.encode()).hexdigest()


def test_the_base_models_own_template_is_kept_byte_for_byte_and_one_of_a_processor_is_found(
    make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_here(monkeypatch)
    mine = make_trained(tied=False)
    embed(mine.base, MINE)
    export_checkpoint(mine.save(template=MINE), wish(tmp_path / "own", mine.base))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "own" / name).read_bytes() == (mine.base / name).read_bytes()
    embed(mine.base, None)
    (mine.base / "chat_template.json").write_text(json.dumps({"chat_template": ANOTHER}))
    done = export_checkpoint(mine.save(3, template=ANOTHER), wish(tmp_path / "of", mine.base))
    assert rendered(tmp_path / "of") == as_the_run(mine.base, None)
    assert done.prompts == "as in training, by the chat template of the base model"


def test_training_without_a_template_and_one_that_writes_the_date_are_said(
    trained: Any, checkpoint: Path, make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_here(monkeypatch)
    done = export_checkpoint(checkpoint, wish(tmp_path / "text", trained.base))
    assert done.prompts == "text in training, by no chat template"
    assert record(tmp_path / "text")["template_sha256"] is None
    mine = make_trained(tied=False)
    embed(mine.base, ANOTHER)
    done = export_checkpoint(mine.save(), wish(tmp_path / "unused", mine.base))
    assert done.prompts == "text in training, by no chat template; the tokenizer has one"
    dated = mine.save(3, template="{{ strftime_now('%d') }}" + ANOTHER)
    done = export_checkpoint(dated, wish(tmp_path / "dated", mine.base))
    assert done.prompts.endswith("the base model, whose date was 2024-07-26 in training")
    done = export_checkpoint(dated, wish(tmp_path / "pt", mine.base, to="single-file"))
    assert "this layout has none" in done.prompts
    assert len(record(tmp_path / "pt")["template_sha256"]) == 64


@pytest.mark.long
def test_a_model_that_the_user_names_keeps_its_template_and_the_difference_is_said(
    make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    mine = make_trained(tied=False)
    tree = fingerprint(mine.base)
    path = mine.save(template=MINE, frozen={"reference": tree.digest})
    (path.parent.parent / "run.yaml").write_bytes(dump(mine.config))
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(mine.base, copy)
    shutil.copytree(mine.base, other, ignore=shutil.ignore_patterns("*.safetensors"))
    embed(other, ANOTHER)

    out = tmp_path / "kept"
    argv = ["export", str(path), "--to", "hf", "--dtype", "bfloat16", "--model", str(other), "--out"]
    assert main([*argv, str(out)]) == 0
    said = capfd.readouterr().out
    assert "NOT as in training" in said
    assert "not the run's: digest" in said
    assert "bfloat16; float32 in training" in said
    assert rendered(out) == ANOTHER.replace("{{ messages[0].content }}", "27+15")
    assert record(out)["model"].startswith("not the run's")

    # With the run's record of its model the files are named, and a copy without weights is the run's.
    frozen = RunPaths(path.parent.parent).frozen
    frozen.mkdir()
    record_tree(frozen, tree)
    fill_here(monkeypatch)
    done = export_checkpoint(path, wish(tmp_path / "named", other, is_first_model=False))
    assert done.model == "not the run's: other tokenizer_config.json"
    (copy / "model.safetensors").unlink()
    done = export_checkpoint(path, wish(tmp_path / "same", copy, is_first_model=False))
    assert (done.model, rendered(tmp_path / "same")) == ("", as_the_run(mine.base, MINE))


def test_a_tokenizer_that_has_changed_is_refused_with_the_runs_own_copy(
    make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_here(monkeypatch)
    mine = make_trained(tied=False)
    tree = fingerprint(mine.base)
    path = mine.save(frozen={"reference": tree.digest})
    frozen = RunPaths(path.parent.parent).frozen
    shutil.copytree(mine.base, frozen / tree.digest)
    record_tree(frozen, tree)
    embed(mine.base, ANOTHER)
    with pytest.raises(DataError, match=f"other tokenizer_config.json.*--model {frozen / tree.digest}"):
        export_checkpoint(path, wish(tmp_path / "out", mine.base))
    done = export_checkpoint(path, wish(tmp_path / "out", frozen / tree.digest, is_first_model=False))
    assert done.model == ""


def test_generate_stops_at_every_token_that_ended_a_response_in_training(
    make_trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationConfig

    from verl_slurm.export.causal_lm import end_tokens
    from verl_slurm.trainer.data import load_tokenizer

    fill_here(monkeypatch)
    mine = make_trained(tied=False)
    tokenizer = load_tokenizer(mine.base)
    (mine.base / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    ends = end_tokens(mine.base, tokenizer)
    assert ends == (tokenizer.eos_token_id, 7)
    export_checkpoint(mine.save(), wish(tmp_path / "out", mine.base))
    assert GenerationConfig.from_pretrained(str(tmp_path / "out")).eos_token_id == list(ends)

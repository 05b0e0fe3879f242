"""What is trained on is what was fingerprinted, whatever becomes of the files meanwhile."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from tests.journals import read_events
from tests.local_runs import lead, prepared
from verl_slurm.base.errors import DatasetDrift
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import DataConfig
from verl_slurm.dataset.fingerprint.data_record import fingerprint
from verl_slurm.trainer.data import PromptData, load_tokenizer
from verl_slurm.trainer.models import load_causal_lm
from verl_slurm.trainer.reward.scoring import build_reward
from verl_slurm.trainer.state.pinned_model import pinned_model

pytestmark = [pytest.mark.torch, pytest.mark.scenario("SEC02")]

_TRUE = '{"prompt": "1+1=", "answer": "2"}\n' * 200
_FALSE = '{"prompt": "EVE", "answer": "poison"}\n' * 200


def _wait_for(paths: RunPaths, name: str) -> None:
    """Until the journal has an event of that name, or the run ended."""
    for _ in range(60_000):
        if {name, "ended"} & {event["event"] for event in read_events(paths)}:
            return
        time.sleep(0.005)
    raise AssertionError(f"no {name}")


def test_data_swapped_after_the_fingerprint_and_put_back_ends_the_run_with_16(tmp_path: Path) -> None:
    """At `restart` the daemon has held the data to its fingerprint, and the ranks have not read it yet."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.jsonl").write_text(_TRUE)
    paths = prepared(tmp_path / "run", f"data.root={root}")
    process = lead(paths)
    try:
        _wait_for(paths, "restart")
        (root / "a.jsonl").write_text(_FALSE)
        _wait_for(paths, "training")
        (root / "a.jsonl").write_text(_TRUE)
        out, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == ExitCode.DATASET_DRIFT, out
    ended = read_events(paths)[-1]
    assert f"not the one that was fingerprinted: {root}/a.jsonl" in str(ended)
    assert not paths.checkpoints.is_dir() or not any(paths.checkpoints.iterdir())


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def _sum(model: torch.nn.Module) -> float:
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def _other_weights(model: Path) -> bytes:
    """A whole file of the same tensors with other numbers."""
    tensors = load((model / "model.safetensors").read_bytes())
    return save({name: tensor + 1 for name, tensor in tensors.items()}, {"format": "pt"})


def test_weights_swapped_by_rename_while_they_are_loaded_are_never_seen(model: Path) -> None:
    """No internals would do: between hashing and loading there is no event that another process could wait for."""
    true = _sum(load_causal_lm(model))
    weights = model / "model.safetensors"
    with pinned_model(model, fingerprint(model).digests()) as pinned:
        pinned.fill()
        other = _other_weights(model)
        weights.rename(model / "kept")
        weights.write_bytes(other)
        (model / "config.json").write_text("{}")
        assert _sum(load_causal_lm(pinned.path)) == true
        weights.unlink()
        (model / "kept").rename(weights)
        with pytest.raises(DatasetDrift, match="renamed"):  # which changes its ctime
            pinned.verify()
    assert not pinned.path.exists()


def test_weights_written_to_while_they_are_loaded_and_put_back_are_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    true, stamp = weights.read_bytes(), weights.stat()
    with (
        pytest.raises(DatasetDrift, match=r"model\.safetensors"),
        pinned_model(model, fingerprint(model).digests()) as pinned,
    ):
        pinned.fill()
        weights.write_bytes(_other_weights(model))
        load_causal_lm(pinned.path)
        weights.write_bytes(true)
        os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        pinned.verify()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_file_swapped_after_the_fingerprint_is_refused_by_name(model: Path, name: str) -> None:
    recorded = fingerprint(model).digests()
    (model / name).write_bytes(b"[]")
    with pytest.raises(DatasetDrift, match=name) as caught, pinned_model(model, recorded) as pinned:
        pinned.fill()
        load_causal_lm(pinned.path)
    assert str(caught.value.where) == str(model / name)


def test_held_out_prompts_and_a_reward_model_are_held_to_their_digests(tmp_path: Path, tiny: Path) -> None:
    for name in ("data", "held"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"prompt": name, "answer": "2"}) + "\n")
    config = DataConfig(eval_root=str(tmp_path / "held"))
    roots = {"data.root": "data", "data.eval_root": "held"}
    recorded = {
        key: {
            "a.jsonl": (
                len(data := (tmp_path / name / "a.jsonl").read_bytes()),
                hashlib.sha256(data).hexdigest(),
            )
        }
        for key, name in roots.items()
    }
    tokenizer = load_tokenizer(tiny)
    PromptData(tmp_path / "data", tokenizer, config, 0, recorded=recorded)
    (tmp_path / "held" / "b.jsonl").write_text(_FALSE)  # not of the fingerprint: not read
    assert len(PromptData(tmp_path / "data", tokenizer, config, 0, held_out=9, recorded=recorded)) == 1
    (tmp_path / "held" / "a.jsonl").write_text(_FALSE)
    with pytest.raises(DatasetDrift, match=r"held/a\.jsonl"):
        PromptData(tmp_path / "data", tokenizer, config, 0, recorded=recorded)
    with pytest.raises(DatasetDrift, match="reward model"):
        build_reward(f"classifier:{tiny}", digest="0" * 64)

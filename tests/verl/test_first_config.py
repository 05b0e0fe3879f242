"""`init --for verl` writes what verl itself composes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.builders import write_verl_rows
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.cli.__main__ import main

pytestmark = [
    pytest.mark.verl,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs verl and vLLM together: make test-verl-vllm"),
]


def test_verl_takes_the_first_configuration_and_what_it_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "data").mkdir()
    for name in ("train.parquet", "test.parquet"):
        write_verl_rows(tmp_path / "data" / name, 2048, data_source="openai/gsm8k")
    words = ["--for", "verl", "--model", "model", "--data", "data", "--nodes", "1", "--ranks", "2"]
    assert main(["init", "first.yaml", *words]) == ExitCode.OK
    dry_run = ["submit", "first.yaml", "--dry-run", "--cluster", "local", "--"]
    assert main(dry_run) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "found no flash_attn" in said
    words = ["++actor_rollout_ref.model.override_config.attn_implementation=sdpa"]
    assert words[0] in said
    assert main([*dry_run, *words]) == ExitCode.OK
    assert "not looked at: verl's own judgement" not in capsys.readouterr().err
    actor = "actor_rollout_ref.actor"
    words += [f"{actor}.use_dynamic_bsz=false", f"{actor}.ppo_micro_batch_size_per_gpu=null"]
    assert main([*dry_run, *words]) == ExitCode.CONFIG
    assert f"verl refuses its settings: verl.{actor}" in capsys.readouterr().err

"""An exported model in vLLM: the same greedy tokens as the trained model's.

Runs in an environment that has vLLM: `make vllm`, or inside `make test-all`.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import with_variants
from tests.processes import captured
from verl_slurm.export.exporting import Wish, export as export_checkpoint

pytestmark = [
    pytest.mark.torch,
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="no vLLM here: make vllm, then .venv-vllm/bin/python"
    ),
]

NUM_TOKENS = 6
SCRIPT = f"""
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, seed=0)
wanted = SamplingParams(temperature=0.0, max_tokens={NUM_TOKENS}, ignore_eos=True)
prompts = [{{"prompt_token_ids": ids}} for ids in json.loads(sys.argv[2])]
found = [list(done.outputs[0].token_ids) for done in llm.generate(prompts, wanted)]
print("TOKENS " + json.dumps(found))
"""


@pytest.mark.parametrize("tied", with_variants(True, False))
def test_vllm_loads_an_export_and_samples_what_the_trained_model_says(
    tied: bool, make_trained: Any, tmp_path: Path
) -> None:
    import torch

    trained = make_trained(tied=tied)
    out = tmp_path / "out"
    asked = Wish(
        to="hf",
        out=out,
        roles=("actor",),
        dtype="keep",
        model=trained.base,
        is_first_model=True,
        weight_decay=0.0,
    )
    export_checkpoint(trained.save(), asked)
    expected = []
    for prompt in trained.ids:
        ids = prompt[None]
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                ids = torch.cat([ids, trained.actor(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        expected.append(ids[0, prompt.numel() :].tolist())
    assert len({token for row in expected for token in row}) > NUM_TOKENS  # else equality would say little
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = captured(
        [sys.executable, "-c", SCRIPT, str(out), json.dumps(trained.ids.tolist())],
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if "TOKENS " in line)
    assert json.loads(said.partition("TOKENS ")[2]) == expected

"""The examples for Hugging Face and Lightning under a real lead, two ranks: preempted, and as if they had not been."""

import signal
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT
from tests.journals import read_events
from tests.local_runs import finish, lead, until
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.catalog import newest_checkpoint
from verl_slurm.checkpoint.store.verify import verify
from verl_slurm.submit.submission import carry_out, plan_submission

pytestmark = [pytest.mark.torch, pytest.mark.long]

STEPS = 24
EXAMPLES = [
    ("huggingface_trainer", "accelerate", "model.safetensors"),
    ("lightning_trainer", "lightning", "lightning.ckpt"),
]


def _prepared(root: Path, example: str, pause: str) -> RunPaths:
    program = str(ROOT / f"configs/{example}.py")
    overrides = [
        f'trainer.command=["{program}", "--steps", "{STEPS}", "--pause", "{pause}"]',
        "code.tree=null",
        "checkpoint.every_steps=10",
        "daemon.requeue_delay_s=1",
        f"run_dir={root}",
    ]
    plan = plan_submission(ROOT / f"configs/{example}.yaml", overrides, cluster="local")
    carry_out(plan, prepare_only=True)
    return RunPaths(root)


def _weights(paths: RunPaths, file: str) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(paths.root)
    assert newest.name == f"step_{STEPS:06d}"
    path = newest / "guest" / file
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return found


@pytest.mark.parametrize(
    ("example", "library", "file"),
    # The same on a real Slurm with TRL's Trainer: tests/slurm_cluster/test_trl.py.
    [
        pytest.param(*EXAMPLES[0], id="huggingface", marks=pytest.mark.soak),
        pytest.param(*EXAMPLES[1], id="lightning"),
    ],
)
def test_a_preemption_is_saved_at_the_end_of_the_step_and_the_next_life_ends_bit_for_bit_alike(
    tmp_path: Path, example: str, library: str, file: str
) -> None:
    pytest.importorskip(library, reason=f"NOT RUN: {library} is not installed (pip install '.[dev]')")
    straight = _prepared(tmp_path / "straight", example, "0")
    struck = _prepared(tmp_path / "struck", example, "0.1")
    process = lead(struck)
    until(process, "training ")
    process.send_signal(signal.SIGUSR2)
    beside = lead(straight)
    assert (finish(process), finish(beside)) == (0, 0)

    events = read_events(struck)
    assert [e["cause"] for e in events if e["event"] == "cause"] == ["preemption"]
    asked = [e for e in events if e["event"] == "saved" and e["emergency"]]
    assert len(asked) == 1
    assert {e["attempt"] for e in events if e["event"] == "started"} == {1, 2}
    [resumed] = [e["resume"] for e in events if e["event"] == "restart" and e["attempt"] == 2]
    assert resumed == asked[0]["name"]
    assert all(verify(path).ok for path in struck.checkpoints.glob("step_*"))
    assert [e["reason"] for e in events if e["event"] == "ended"][-1] == "all steps are done"

    once, twice = _weights(straight, file), _weights(struck, file)
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)

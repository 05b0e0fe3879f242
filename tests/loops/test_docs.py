"""docs/guests.md does what it says: its programs run, and its commands name what is there."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT
from tests.processes import captured
from verl_slurm.checkpoint.inspect.describe import describe
from verl_slurm.config.load import load

TEXT = (ROOT / "docs/guests.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
READS = next(block for block in BLOCKS if "read_whole" in block)


def test_the_example_is_a_whole_configuration() -> None:
    config = load(ROOT / "configs/pytorch_loop.yaml")
    assert (ROOT / "configs" / config.trainer.command[0]).is_file(), "beside the YAML"


@pytest.mark.torch
@pytest.mark.parametrize("block", [b for b in BLOCKS if "with verl_slurm.run" in b])
def test_a_loop_of_the_page_runs_as_it_stands(block: str) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    done: list[int] = []

    def train_one_step(step: int) -> float:
        done.append(step)
        return 0.0

    names = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "train_one_step": train_one_step,
    }
    exec("import verl_slurm\n" + block, names)
    assert done == list(range(1000))


@pytest.mark.torch
def test_the_command_by_hand_trains_saves_and_its_weights_are_read_as_the_page_says(tmp_path: Path) -> None:
    command = next(line for line in TEXT.splitlines() if line.startswith("python configs/"))
    words = command.replace("runs/by-hand", str(tmp_path / "run")).split()
    done = captured([sys.executable, *words[1:], "--steps", "3"], cwd=ROOT, timeout=120)
    assert done.stdout == "done: 3 steps\n", done.stderr
    names: dict[str, object] = {}
    exec(
        READS.replace('"RUN/checkpoints/step_000040"', repr(str(tmp_path / "run/checkpoints/step_000003"))),
        names,
    )
    weights = names["weights"]
    assert isinstance(weights, dict)
    assert weights["model/0.weight"].shape == (64, 1)
    facts = describe(tmp_path / "run/checkpoints/step_000003")
    assert [domain["tensors"] for domain in facts["domains"]] == [len(weights), 0]

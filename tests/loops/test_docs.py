"""docs/guests.md does what it says: its programs run, and its commands name what is there."""

import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("kind", ["CosineAnnealingLR", "OneCycleLR", "LinearLR"])
def test_a_schedule_goes_on_by_its_new_length_as_the_page_says(kind: str) -> None:
    def made(length: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        first = {"OneCycleLR": (0.1, length), "LinearLR": (0.5, 1.0, length)}.get(kind, (length,))
        return optimizer, getattr(torch.optim.lr_scheduler, kind)(optimizer, *first)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    former, begun = made(8), made(16)
    straight = rates(*begun, 15)
    rates(*former, 7)
    optimizer, scheduler = made(16)
    block = next(block for block in BLOCKS if "scheduler.load_state_dict" in block)
    before, rest = block.split("with verl_slurm.run", 1)
    inside = textwrap.dedent(rest.split("\n", 1)[1]).split("for step in run.steps")[0]
    names = {"optimizer": optimizer, "scheduler": scheduler, "run": SimpleNamespace(step=7)}
    exec(before, names)
    optimizer.load_state_dict(former[0].state_dict())
    scheduler.load_state_dict(former[1].state_dict())
    exec(inside, names)
    assert rates(optimizer, scheduler, 8) == straight[7:]


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

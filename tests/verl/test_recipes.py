"""A recipe's own classes derive from ours below `trainer.command`, and from verl's alone elsewhere."""

import json
import os
import subprocess
import sys

import pytest

from tests.lanes import with_variants
from tests.processes import python_path
from verl_slurm.wire.environment import RECIPE_VARIABLE

pytestmark = [pytest.mark.verl, pytest.mark.torch]

_ASKED = """
import json
import verl
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSync, get_trainer_cls

class Recipe(PPOTrainerSync):
    pass

found = [Recipe, PPOTrainerColocateAsync, get_trainer_cls("sync"), get_trainer_cls("colocate_async")]
print(json.dumps([[base.__name__ for base in cls.__mro__] for cls in found]))
"""


@pytest.mark.parametrize("recipe", with_variants(True, False))
def test_verls_trainers_are_ours_below_a_recipe_alone(recipe: bool) -> None:
    environ = os.environ | python_path() | {"VERL_USE_EXTERNAL_MODULES": "verl_slurm.loops.verl.verl_ppo"}
    environ |= {RECIPE_VARIABLE: "1"} if recipe else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ASKED],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for names in json.loads(done.stdout.splitlines()[-1]):
        assert ("_Interruptible" in names) is recipe, names
        assert "PPOTrainer" in names

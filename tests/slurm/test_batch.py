"""What is asked of sbatch for a run; that Slurm takes it: tests/slurm_cluster/test_templates.py."""

import pytest

from tests.builders import run_config
from tests.harness import ROOT
from verl_slurm.config.container import ContainerConfig
from verl_slurm.slurm.batch import batch_script


@pytest.mark.parametrize(
    ("nodes", "container", "script"),
    [
        (1, None, "single_node.sbatch"),
        (2, None, "multi_node.sbatch"),
        (1, ContainerConfig(image="/images/a.sif"), "single_node.sbatch"),
        (2, ContainerConfig(image="/a+b.sqsh", runtime="pyxis"), "pyxis.sbatch"),
    ],
)
def test_each_run_has_the_script_that_can_start_it(
    nodes: int, container: ContainerConfig | None, script: str
) -> None:
    config = run_config(nodes=nodes, container=container)
    assert batch_script(config) == script
    assert (ROOT / "sbatch" / script).is_file()

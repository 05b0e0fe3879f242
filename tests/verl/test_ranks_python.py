"""The command of a program in the ranks' Python: after their set-up on a node, in their image, or refused."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import ContainerConfig, RunConfig
from verl_slurm.containers.runtimes import contained_argv
from verl_slurm.verl.reshard.dividing import ranks_python


def answered(config: RunConfig, **how: Any) -> list[str]:
    """What `platform`, a module that prints a line, has said on standard output and on the other."""
    command = ranks_python(config, contained_argv, ["platform", "--terse"], [], **how)
    done = subprocess.run(command.argv, env=command.environ, capture_output=True, text=True, check=True)
    return [done.stdout, done.stderr]


@pytest.mark.slow
def test_what_the_set_up_prints_is_not_an_answer_and_it_runs_on_nodes_alone() -> None:
    config = run_config(setup=["echo loaded; echo $SAID; set -- lost"], env={"SAID": "by the user"})
    plain = answered(run_config())
    assert plain[0].startswith("Linux")
    assert answered(config, on_node=True) == [plain[0], "loaded\nby the user\n"]
    assert answered(config) == plain


def test_the_image_is_started_as_for_ranks_and_sees_what_is_read_and_written(tmp_path: Path) -> None:
    text = f"trainer: {{backend: verl}}\nrun_dir: {tmp_path}/run\n"
    text += f"slurm: {{container: {{runtime: podman, image: 'rl@sha256:{'0' * 64}', python: /py}}}}\n"
    config = parse_config(text.encode(), "x.yaml", [])
    command = ranks_python(
        config, contained_argv, ["some.module", "3"], [tmp_path / "source", tmp_path / "out"]
    )
    assert command.argv[:2] == ["podman", "run"]
    for place in ("run", "source", "out"):
        assert f"--volume={tmp_path}/{place}:{tmp_path}/{place}:rw" in command.argv
    at = command.argv.index("/py")
    assert command.argv[at : at + 3] == ["/py", "-P", "-c"]
    assert command.argv[-2:] == ["some.module", "3"]


def test_an_image_that_srun_alone_starts_is_started_in_a_job_and_elsewhere_refused_with_a_way() -> None:
    config = run_config(container=ContainerConfig(runtime="pyxis", image="/x.sqsh"))
    argv = ranks_python(config, contained_argv, ["some.module"], [], on_node=True).argv
    assert argv[:4] == ["srun", "--nodes=1", "--ntasks=1", "--overlap"]
    assert "--container-image=/x.sqsh" in argv
    assert argv[-1] == "some.module"
    with pytest.raises(ConfigError, match=r"pyxis.*no job.*distributed\.dp_size"):
        ranks_python(config, contained_argv, ["some.module"], [])

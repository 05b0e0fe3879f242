"""What a configuration may say of the ranks' environment."""

from typing import Any

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.changes import may_change
from verl_slurm.config.load import dump, load, parse_config

GOOD = {
    "env.NCCL_DEBUG": "WARN",
    "env.lower_case": "1",
    "env": "{A: 1, B: ''}",
    "env_from_files.WANDB_API_KEY": "~/key",
    "slurm.modules": "[cuda/12.4, gcc]",
    "slurm.setup": "['source /opt/site.sh']",
    "slurm.python": "rl",
}


@pytest.mark.parametrize("key", GOOD)
def test_it_is_taken_from_the_command_line_and_kept_in_run_yaml(key: str, tmp_path: Any) -> None:
    config = parse_config(b"", "x.yaml", [f"{key}={GOOD[key]}"])
    (tmp_path / "run.yaml").write_bytes(dump(config))
    assert load(tmp_path / "run.yaml") == config != parse_config(b"", "x.yaml")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("env.SLURM_JOB_ID=1", "a variable that Slurm or the daemon sets"),
        ("env.RANK=1", "a variable that Slurm or the daemon sets"),
        ("env.OMP_NUM_THREADS=4", "set distributed.threads_per_rank"),
        ("env_from_files.WORLD_SIZE=/x", "a variable that Slurm or the daemon sets"),
        ("env={9X: 1}", "not a variable's name"),
        ("env={X: [1]}", "env"),
        ("env={X: 1.5}", "env"),
        ("env={X: true}", "env"),
        ("slurm.modules=['a b']", "a module's name"),
        ("slurm.modules=['-f']", "a module's name"),
        ("slurm.setup=['']", "a command for bash"),
        ("slurm.python=-c", "slurm.python"),
        ("slurm.pythn=x", "no such key"),
    ],
)
def test_bad_values_get_one_line(word: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(b"", "x.yaml", [word])
    assert told in caught.value.one_line()
    assert "\n" not in caught.value.one_line()


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "db_password", "AWS_SECRET_ACCESS_KEY"])
def test_a_secret_in_the_configuration_is_refused_and_not_shown(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"env: {{{name}: sesame}}".encode(), "x.yaml")
    assert "sesame" not in caught.value.one_line()
    assert f"env_from_files: {{{name}: PATH}}" in caught.value.one_line()


def test_a_variable_has_one_source() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        parse_config(b"env: {A: 1}\nenv_from_files: {A: /x}", "x.yaml")


def test_an_image_brings_its_own_python() -> None:
    with pytest.raises(ConfigError, match=r"slurm.container.python"):
        parse_config(b"slurm: {python: rl, container: {image: /i.sif}}", "x.yaml")


def test_it_may_change_between_two_submissions() -> None:
    assert all(
        may_change(key)
        for key in ("env.A", "env_from_files.A", "slurm.setup", "slurm.modules", "slurm.python")
    )

"""Ports in a configuration: what is refused before anything is queued."""

from typing import Any

import pytest

from verl_slurm.base.errors import ConfigError
from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.load import parse_config
from verl_slurm.config.schema import ObservabilityConfig, RunConfig


@pytest.mark.scenario("M13")
def test_no_port_is_open_unless_asked_for() -> None:
    config = parse_config(b"name: run", "my.yaml")
    assert config.observability.metrics_port is None
    assert config.observability.metrics_host == "127.0.0.1"


def test_the_section_of_the_documentation_is_accepted() -> None:
    config = parse_config(b"observability:\n  metrics_port: 9464\n", "my.yaml")
    assert config.observability.metrics_port == 9464


@pytest.mark.scenario("M13")
@pytest.mark.parametrize(
    ("wanted", "key"),
    [
        ({"metrics_port": 80}, "metrics_port"),
        ({"metrics_port": 0, "metrics_host": "0.0.0.0"}, "metrics_host"),
        ({"metrics_port": 0, "token_file": "token"}, "token_file"),
        ({"metrics_port": 0, "targets_dir": "targets\n"}, "targets_dir"),
    ],
)
def test_what_cannot_work_or_is_open_to_all_is_refused(wanted: dict[str, Any], key: str) -> None:
    (complaint,) = complaints(RunConfig(observability=ObservabilityConfig(**wanted)))
    assert complaint.key == f"observability.{key}"


def test_every_interface_is_allowed_with_a_token() -> None:
    wanted = ObservabilityConfig(metrics_port=0, metrics_host="0.0.0.0", token_file="/keys/metrics")
    assert complaints(RunConfig(observability=wanted)) == []


@pytest.mark.parametrize("port", ["65535", "-1", "70000", "yes"])
def test_a_port_that_has_none_behind_it_for_the_agents_is_refused(port: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(f"observability:\n  metrics_port: {port}\n".encode(), "my.yaml")

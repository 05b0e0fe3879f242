"""The section `services`: what is refused, which nodes each service gets, and what may change later."""

import pytest

from tests.builders import run_config
from verl_slurm.base.errors import ConfigError
from verl_slurm.config.changes import may_change
from verl_slurm.config.checks.shared import complaints
from verl_slurm.config.load import dump, parse_config
from verl_slurm.config.schema import RunConfig, ServiceConfig, nodes_of_components, nodes_of_services


def with_service(name: str = "judge", /, **keys: object) -> RunConfig:
    return run_config(services={name: ServiceConfig(command=("judge.py",), **keys)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (with_service("Judge"), "services.Judge"),
        (with_service("judge-1"), "services.judge-1"),
        (with_service("token"), "services.token"),
        (with_service("index"), "services.index"),
        (with_service(probe="health"), "services.judge.probe"),
        (with_service(probe="/a b"), "services.judge.probe"),
        (with_service(port=80), "services.judge.port"),
        (with_service(gpus=1), "services: gpus of judge"),
        (with_service(cpus=1), "services: cpus of judge"),
        (with_service(nodes=1, cpus=2), "services.judge.cpus"),
        (with_service(nodes=1, gpus=1), "services.judge.gpus"),
        (with_service(slurm={"partition": "cpu"}), "services.judge.slurm"),
        (with_service(nodes=1, slurm={"nodes": 2}), "services.judge.slurm.nodes"),
        (with_service(nodes=1, slurm={"comment": "a\n#SBATCH -N 9"}), "services.judge.slurm.comment"),
        (with_service(env={"API_KEY": "x"}), "services.judge.env.API_KEY"),
        (with_service(env={"VERL_SLURM_PORT": 1}), "services.judge.env.VERL_SLURM_PORT"),
    ],
)
def test_a_service_that_could_not_work_is_refused_by_its_key(config: RunConfig, key: str) -> None:
    assert [complaint.key for complaint in complaints(config)] == [key]


def test_two_services_beside_the_ranks_have_ports_of_their_own() -> None:
    both = {name: ServiceConfig(command=("x",), port=8000) for name in ("a", "b")}
    assert [complaint.found for complaint in complaints(run_config(services=both))] == [
        "port 8000 twice on one node"
    ]
    apart = {name: ServiceConfig(command=("x",), port=8000, nodes=1) for name in ("a", "b")}
    assert not list(complaints(run_config(services=apart)))


def test_nodes_of_another_kind_may_have_what_the_ranks_nodes_have_not() -> None:
    assert not list(
        complaints(with_service(nodes=1, gpus=4, cpus=64, slurm={"partition": "gpu", "mem": "1T"}))
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("judge: {command: [x], nodes: one}", "services.judge.nodes"),
        ("judge: {command: [x], nods: 1}", "no `nods` in it"),
        ("judge: {nodes: 1}", "`command` in it"),
    ],
)
def test_a_wrong_value_is_told_with_the_name_of_its_service(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(f"services:\n  sandbox: {{command: [y]}}\n  {text}\n".encode(), "my.yaml")
    assert "services.judge" in str(refused.value)
    assert said in str(refused.value)


def test_a_word_of_the_command_line_sets_one_key_of_one_service() -> None:
    config = parse_config(b"services: {judge: {command: [x]}}", "my.yaml", ["services.judge.nodes=2"])
    assert config.services["judge"] == ServiceConfig(command=("x",), nodes=2)
    assert parse_config(dump(config), "again") == config


def test_the_ranks_have_the_first_nodes_and_components_of_their_own_come_last() -> None:
    services = {
        "judge": ServiceConfig(command=("x",), nodes=2, slurm={"partition": "gpu"}),
        "beside": ServiceConfig(command=("x",)),
        "sandbox": ServiceConfig(command=("x",), nodes=3),
    }
    assert nodes_of_services(4, services) == {
        "beside": range(1),
        "sandbox": range(4, 7),
        "judge": range(7, 9),
    }
    assert nodes_of_components(4, services) == [7, 2]
    assert run_config(nodes=4, services=services).all_nodes == 9


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("services.judge.nodes", True),
        ("services.judge.slurm.partition", True),
        ("services.judge.env_from_files.KEY", True),
        ("services.judge.command", False),
        ("services.judge.env.MODEL", False),
    ],
)
def test_where_a_service_runs_may_change_and_what_it_is_may_not(key: str, may: bool) -> None:
    assert may_change(key) == may

"""How Ray is started on a job's nodes."""

from pathlib import Path

import pytest

from verl_slurm.loops.verl.ray_nodes import (
    object_store_bytes,
    ray_argv,
    ray_environment,
    ray_token,
    temp_fits,
)

MiB = 1 << 20


def argv(*, is_head: bool, ranks: int = 4, cpus: int = 64, store: int | None = None) -> list[str]:
    return ray_argv(
        "python",
        head="10.0.0.1:4001",
        is_head=is_head,
        own_address="10.0.0.1" if is_head else "10.0.0.2",
        temp=Path("/tmp/x/r"),
        ranks=ranks,
        cpus=cpus,
        store_bytes=store,
        free_port=4002 if is_head else 0,
    )


def environment(nodes: int = 2, **environ: str) -> dict[str, str]:
    return ray_environment(environ, Path("/s/ray.token"), "10.0.0.1:4001", nodes)


def test_the_head_listens_where_the_lead_has_told_all_nodes_and_the_others_go_there() -> None:
    head, other = argv(is_head=True), argv(is_head=False)
    assert {"--head", "--port=4001", "--node-ip-address=10.0.0.1"} <= set(head)
    assert {"--address=10.0.0.1:4001", "--node-ip-address=10.0.0.2"} <= set(other)
    assert not {"--head", "--port=4001"} & set(other)


def test_no_port_is_a_fixed_one_and_there_is_no_dashboard() -> None:
    head = argv(is_head=True)
    assert {"--include-dashboard=false", "--ray-client-server-port=4002"} <= set(head)
    for words in (head, argv(is_head=False)):
        assert {"--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"} <= set(words)


def test_ray_counts_a_gpu_for_each_rank_and_enough_cpus_for_verls_actors() -> None:
    assert {"--num-gpus=4", "--num-cpus=64"} <= set(argv(is_head=True))
    assert {"--num-gpus=1", "--num-cpus=16"} <= set(argv(is_head=False, ranks=1, cpus=2))


def test_the_object_store_is_a_share_of_what_slurm_gives_and_fits_where_it_lies() -> None:
    assert object_store_bytes(0, 10**12) is None
    assert object_store_bytes(100_000, 10**12) == int(100_000 * MiB * 0.3)
    assert object_store_bytes(100_000, 1000 * MiB) == 900 * MiB
    assert object_store_bytes(10, 10**12) == 80 * MiB
    assert "--object-store-memory=5" in argv(is_head=True, store=5)
    assert not any(word.startswith("--object-store") for word in argv(is_head=True))


def test_ray_asks_for_a_token_that_stands_in_a_file_and_nowhere_else() -> None:
    found = environment(RAY_AUTH_TOKEN="of-the-user", RAY_AUTH_MODE="disabled")
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_AUTH_TOKEN_PATH"] == "/s/ray.token"
    assert "RAY_AUTH_TOKEN" not in found
    assert not any("token" in word.lower() for word in argv(is_head=True))


def test_the_token_is_another_one_in_each_restart_and_does_not_tell_the_leads_secret() -> None:
    tokens = {ray_token("ab" * 32, attempt, restart) for attempt in (1, 2) for restart in (1, 2)}
    assert len(tokens) == 4
    assert all(len(token) == 64 and "abab" not in token for token in tokens)
    assert ray_token("ab" * 32, 1, 2) == ray_token("ab" * 32, 1, 2), "every node has the same"


def test_verl_loads_our_module_behind_the_users_own_once() -> None:
    assert environment()["VERL_USE_EXTERNAL_MODULES"] == "verl_slurm.loops.verl.verl_ppo"
    mine = environment(VERL_USE_EXTERNAL_MODULES="mine,verl_slurm.loops.verl.verl_ppo,")
    assert mine["VERL_USE_EXTERNAL_MODULES"] == "mine,verl_slurm.loops.verl.verl_ppo"


def test_what_the_user_has_said_about_ray_and_his_loggers_stays() -> None:
    found = environment(WANDB_RUN_ID="mine", RAY_memory_monitor_refresh_ms="250", HF_HUB_OFFLINE="1")
    assert (found["WANDB_RUN_ID"], found["RAY_memory_monitor_refresh_ms"]) == ("mine", "250")
    assert found["HF_HUB_OFFLINE"] == "1"


def test_a_directory_whose_sockets_would_have_names_too_long_is_known() -> None:
    assert temp_fits(Path("/tmp/verl-slurm-4194304-abcdefgh/r"))
    assert not temp_fits(Path("/run/user/1000123/verl-slurm-4194304-abcdefgh/r"))


@pytest.mark.scenario("SEC01")
def test_pythons_below_ray_start_with_our_rendezvous_and_on_one_node_gloo_stays_on_it() -> None:
    first, second = environment(PYTHONPATH="/mine")["PYTHONPATH"].split(":")
    assert (Path(first) / "sitecustomize.py").is_file()
    assert second == "/mine"
    assert "GLOO_SOCKET_IFNAME" not in environment()
    assert environment(nodes=1)["GLOO_SOCKET_IFNAME"] == "lo"

"""What a node's launcher decides before it starts anything."""

import argparse
import asyncio
import os
import socket
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from tests.builders import write_manifest
from tests.hostile.another_user import NOBODY, needs_another_user
from tests.hostile.test_services import Eve
from tests.processes import free_port
from verl_slurm.base.errors import ConfigError, Fenced, PermissionRefused, WireError
from verl_slurm.base.fence import take_attempt
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.store.loop_checkpoint import LoopSave, commit_tree
from verl_slurm.config.schema import RunConfig
from verl_slurm.loops.verl import ray_node as node
from verl_slurm.loops.verl.verl_settings import resume_point
from verl_slurm.wire.lead_file import LeadAddress, write_lead_address
from verl_slurm.wire.messages import FromStoreClient, StoreAnswer, StrangerMet
from verl_slurm.wire.store_line import StoreLine


def arguments(paths: RunPaths) -> argparse.Namespace:
    scratch = private_dir(paths.root / "scratch")
    words = ["--run", str(paths.root), "--attempt", "1", "--node-rank", "0", "--nodes", "2"]
    return node._parser().parse_args([*words, "--head", "127.0.0.1:4001", "--scratch", str(scratch)])


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(private_dir(tmp_path / "run"))
    for directory in (found.checkpoints, found.control):
        private_dir(directory)
    write_file(found.run_yaml, b"name: run\n")
    take_attempt(found, job_id="1", restart=0)
    return found


def config(ranks: int = 2, entry: str = "ppo") -> RunConfig:
    return msgspec.convert(
        {"distributed": {"dp_size": ranks, "nodes": 2}, "trainer": {"entry": entry}}, RunConfig
    )


def saved(paths: RunPaths, *, part: str = "actor", ranks: int = 2) -> str:
    directory = paths.work(1) / "global_step_7"
    (directory / part).mkdir(parents=True)
    (directory / part / "x.pt").write_bytes(b"x")
    save = LoopSave(guest="verl", step=7, attempt=1, world_size=ranks)
    return commit_tree(paths, save, {"global_step_7": directory}).name


def lead(paths: RunPaths, attempt: int = 1) -> None:
    write_lead_address(paths, LeadAddress(attempt=attempt, restart=1, host="h", port=1, token="ab" * 32))


def test_a_resume_names_what_verl_wrote_within_the_verified_checkpoint(paths: RunPaths) -> None:
    found = resume_point(config(), paths, saved(paths))
    assert found == (paths.checkpoints / "step_000007" / "global_step_7", 7)


def test_a_checkpoint_of_another_number_of_ranks_is_refused_before_verl_starts(paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match="another number of ranks"):
        resume_point(config(4), paths, saved(paths))


def test_a_copy_that_was_divided_for_these_ranks_is_read_in_its_place(paths: RunPaths) -> None:
    name = saved(paths)
    copy = paths.resharded.checkpoints / name
    (copy / "global_step_7" / "actor").mkdir(parents=True)
    write_manifest(copy, 7, world_size=4, guest="verl")
    assert resume_point(config(4), paths, name)[0] == copy / "global_step_7"
    # With the former number of ranks what was saved counts.
    assert resume_point(config(), paths, name)[0] == paths.checkpoints / name / "global_step_7"


@pytest.mark.parametrize(("entry", "part"), [("ppo", "shards"), ("sft", "actor")])
def test_a_checkpoint_of_verls_other_trainer_is_refused(paths: RunPaths, entry: str, part: str) -> None:
    with pytest.raises(ConfigError, match="another of verl's trainers"):
        resume_point(config(entry=entry), paths, saved(paths, part=part))


def test_the_token_is_written_for_this_user_alone(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    lead(paths)
    monkeypatch.setenv("VERL_SLURM_RESTART", "3")
    file = node._write_token(paths, arguments(paths))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64


def test_another_attempts_lead_a_broken_file_and_one_open_to_others_are_refused(paths: RunPaths) -> None:
    lead(paths, attempt=2)
    with pytest.raises(Fenced):
        node._write_token(paths, arguments(paths))
    write_file(paths.lead_address, b"{")
    with pytest.raises(WireError):
        node._write_token(paths, arguments(paths))
    lead(paths)
    paths.lead_address.chmod(0o644)
    with pytest.raises(PermissionRefused):
        node._write_token(paths, arguments(paths))


def test_a_driver_that_was_killed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    kills = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert asyncio.run(node._run_driver(kills, os.environ)) == -9
    assert capsys.readouterr().err == "RayError: the run's driver was ended by SIGKILL\n"


class Store(StoreLine):
    """The ranks' store, as the lead keeps it for all nodes; a call that waits is over at once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.met: list[str] = []

    def call(self, message: FromStoreClient) -> StoreAnswer:
        if isinstance(message, StrangerMet):
            self.met.append(message.peers)
        elif message.op == "set":
            self.values[message.keys[0]] = message.values[0]
        elif not set(message.keys) <= self.values.keys():
            return StoreAnswer(call=0, outcome="timeout")
        return StoreAnswer(call=0, outcome="ok")


def test_nodes_wait_for_the_first_ones_word_before_they_go_to_rays_head() -> None:
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as ray:
        head = f"127.0.0.1:{ray.getsockname()[1]}"
        with pytest.raises(WireError, match="has not begun to listen"):
            node._await_head(head, config(), store)
        asyncio.run(node._publish_head(head, store))
    node._await_head(head, config(), store)
    assert store.met == []


@needs_another_user
def test_another_user_at_the_port_of_rays_head_is_met_before_ray_and_nobody_is_sent_there() -> None:
    store, eve, port = Store(), Eve(), free_port()
    eve.listen(port)
    head = f"127.0.0.1:{port}"
    with pytest.raises(WireError, match=f"at the port of Ray's head.*uid {NOBODY}"):
        asyncio.run(node._publish_head(head, store))
    assert [f"uid {NOBODY}" in line for line in store.met] == [True]
    with pytest.raises(WireError, match="has not begun to listen"):
        node._await_head(head, config(), store)
    assert eve.end() == []

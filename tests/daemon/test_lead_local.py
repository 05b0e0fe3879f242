"""Lead, agents and ranks for real, without Slurm: what a laptop or a bare machine gets."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest

from tests.harness import same_weights, wait_until_gone
from tests.hostile.netlab import ADDRESS, netlab
from tests.journals import read_events
from tests.ledger_stats import ledger_stats
from tests.local_runs import finish, lead, prepared, undisturbed, until
from verl_slurm.base.exit_codes import ExitCode
from verl_slurm.base.keys import new_key_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.checkpoint.format.manifest import parse, render, sealed
from verl_slurm.checkpoint.format.specification import MANIFEST, SCHEMA_VERSION
from verl_slurm.checkpoint.format.state_schema import parse_schema, render_schema, schema_of
from verl_slurm.checkpoint.store.catalog import newest_checkpoint
from verl_slurm.journal.status import read_status
from verl_slurm.wire.lead_file import read_lead_address

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return undisturbed(tmp_path_factory)


@pytest.mark.long
@pytest.mark.scenario("N02")
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ss") is None, reason="NOT RUN: ss -K (iproute2) needs root"
)
@pytest.mark.variant
def test_a_link_that_the_kernel_ends_costs_a_start_and_nothing_of_the_training(
    straight: RunPaths, tmp_path: Path
) -> None:
    """The ranks of a lost link are ended, and their work is not done twice: the ledger has it."""
    paths = prepared(tmp_path / "run")
    process = lead(paths)
    until(process, "first_rollout")
    port = read_lead_address(paths).port
    told = ["ss", "-K", "-t", "state", "established", "dst", "127.0.0.1", "dport", "=", str(port)]
    killed = subprocess.run(told, capture_output=True, text=True, check=True).stdout
    if str(port) not in killed:
        process.kill()
        finish(process)
        pytest.skip("NOT RUN: this kernel ends no connections (INET_DIAG_DESTROY)")
    assert finish(process) == 0
    events = read_events(paths)
    assert [e["kind"] for e in events if e["event"] == "crash"] == ["node"]
    assert [e["number"] for e in events if e["event"] == "restart"] == [1, 2]
    same, said = same_weights(paths.root, straight.root)
    assert same, said
    assert ledger_stats(paths).duplicates == ()
    wait_until_gone(str(paths.root))


@pytest.mark.usefixtures("ranks_without_torch")
def test_a_term_is_the_users_cancel_saved_and_final(tmp_path: Path) -> None:
    paths = prepared(tmp_path / "run")
    process = lead(paths)
    until(process, "first_rollout")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 23
    events = read_events(paths)
    assert any(e["event"] == "verified" for e in events)
    assert not any(e["event"] == "requeue" for e in events)


@pytest.mark.long
@pytest.mark.scenario("P02")
def test_nothing_is_left_of_a_run_whose_lead_was_killed(tmp_path: Path) -> None:
    paths = prepared(tmp_path / "run")
    process = lead(paths)
    until(process, "first_rollout")
    process.kill()
    finish(process)
    wait_until_gone(str(paths.root))


_STALE_ONCE = """
import errno, sys
from unittest.mock import patch
from verl_slurm_daemon.__main__ import main
stale = OSError(errno.ESTALE, "Stale file handle", "/data")
with patch("verl_slurm.dataset.fingerprint.data_record.list_tree", side_effect=stale):
    sys.exit(main())  # the next life is a program of its own, and finds the storage well
"""


@pytest.mark.long
@pytest.mark.variant
@pytest.mark.usefixtures("ranks_without_torch")
def test_storage_that_is_away_at_the_start_costs_one_start_and_not_the_job(tmp_path: Path) -> None:
    paths = prepared(tmp_path / "run", "train.steps=1")
    argv = [sys.executable, "-c", _STALE_ONCE, "lead", "--run", str(paths.root)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(paths)
    assert [e["detail"] for e in events if e["event"] == "start_failed"] == [
        "[Errno 116] Stale file handle: '/data'"
    ]
    assert [e["exit"] for e in events if e["event"] == "ended"] == ["REQUEUED", "OK"]


def test_a_lead_without_its_key_says_so_and_ends_before_any_rank_starts(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    key = tmp_path / "run.key"
    new_key_file(key)
    paths = prepared(tmp_path / "run", f"checkpoint.encryption.key_file={key}")
    key.unlink()
    process = lead(paths)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == ExitCode.KEY
    assert "run.key" in said
    events = read_events(paths)
    assert [e["exit"] for e in events if e["event"] == "ended"] == ["KEY"]
    assert not any(e["event"] == "restart" for e in events)


@pytest.mark.long
@pytest.mark.scenario("C01")
def test_a_second_lead_of_a_living_run_is_refused_and_harms_nothing(
    straight: RunPaths, tmp_path: Path
) -> None:
    paths = prepared(tmp_path / "run")
    first = lead(paths)
    until(first, "first_rollout")
    second = lead(paths)
    out, _ = second.communicate(timeout=300)
    assert second.returncode == 20, out
    assert "another job works on this run" in out
    assert finish(first) == 0
    assert same_weights(paths.root, straight.root)[0]


@pytest.mark.long
@pytest.mark.variant
def test_lead_and_agent_show_their_numbers_while_they_live(tmp_path: Path) -> None:
    one = ("distributed.nodes=1", "distributed.dp_size=1", "observability.metrics_port=0")
    paths = prepared(tmp_path / "run", *one)
    process = lead(paths)
    until(process, "first_rollout")
    with socket.create_connection(("127.0.0.1", read_lead_address(paths).port), timeout=30) as stranger:
        stranger.sendall(bytes(64))
        while stranger.recv(64):
            pass
    pages = {}
    for file in paths.metrics.iterdir():
        (entry,) = json.loads(file.read_bytes())
        with urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics", timeout=30) as answer:
            pages[entry["labels"]["instance"]] = answer.read().decode()
    assert set(pages) == {"lead", "node_0000"}
    assert 'verl_run_state{state="running"} 1.0' in pages["lead"]
    assert re.search(r"^verl_rollout_queue_length [1-9]", pages["lead"], re.MULTILINE)
    assert re.search(r"^verl_runtime_state_age_seconds \d", pages["lead"], re.MULTILINE)
    assert 'verl_control_refused_total{reason="token"} 1.0' in pages["lead"]
    assert [(e["reason"], e["total"]) for e in read_events(paths) if e["event"] == "stranger"] == [
        ("token", 1)
    ]
    assert "verl_agent_ranks_heard 1.0" in pages["node_0000"]
    assert finish(process) == 0
    assert list(paths.metrics.iterdir()) == []


def _reseal(checkpoint: Path, name: str, data: bytes) -> None:
    """Change a file and make the manifest fit again: a checkpoint of another version, not a damaged one."""
    (checkpoint / name).write_bytes(data)
    manifest = parse((checkpoint / MANIFEST).read_bytes(), where=checkpoint)
    schema_id = json.loads(data)["schema_id"]
    files = tuple(
        msgspec.structs.replace(f, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        if f.path == name
        else f
        for f in manifest.files
    )
    manifest = msgspec.structs.replace(manifest, files=files, schema_id=schema_id)
    (checkpoint / MANIFEST).write_bytes(render(sealed(manifest)))


@pytest.mark.long
def test_a_checkpoint_of_another_schema_is_refused_with_the_differences(
    straight: RunPaths, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(straight.root, root)
    paths = RunPaths(root)
    checkpoint = newest_checkpoint(root)
    classes = dict(parse_schema((checkpoint / SCHEMA_VERSION).read_bytes(), where=checkpoint).classes)
    classes["RuntimeState"] = {k: v for k, v in classes["RuntimeState"].items() if k != "episode_id"}
    _reseal(checkpoint, SCHEMA_VERSION, render_schema(schema_of(classes, "0.0.9")))
    before = sorted(p.name for p in paths.checkpoints.iterdir())
    process = lead(paths)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 15, out
    assert "episode_id" in out
    assert "0.0.9" in out
    assert sorted(p.name for p in paths.checkpoints.iterdir()) == before, "nothing was touched"


@pytest.mark.long
@pytest.mark.variant
def test_two_hosts_of_a_hostfile_train_are_interrupted_and_end_bit_for_bit_alike(
    straight: RunPaths, tmp_path: Path
) -> None:
    paths = prepared(tmp_path / "run")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    command = [sys.executable, "-m", "verl_slurm_daemon", "join", "--run", str(paths.root)]
    joined = subprocess.Popen([*command, "--hostfile", str(hosts), "--host", "127.0.0.2"])
    try:
        process = lead(paths, "--hostfile", str(hosts))
        until(process, "first_rollout")
        process.send_signal(signal.SIGUSR2)
        assert finish(process) == 0
        assert joined.wait(timeout=300) == 0
    finally:
        joined.kill()
        joined.wait()
    assert {e["attempt"] for e in read_events(paths) if e["event"] == "started"} == {1, 2}
    assert read_status(paths)["train_nodes"], "the snapshot names the nodes of the ranks"
    assert same_weights(paths.root, straight.root)[0]
    assert ledger_stats(paths).duplicates == ()
    wait_until_gone(str(paths.root))


# The kernel notices after three minutes; here after three seconds.
IMPATIENT = """
import sys
from verl_slurm_daemon.link import channel
from verl_slurm_daemon.__main__ import main
channel._SILENCE_S = 3
sys.exit(main())
"""


@pytest.mark.soak
@pytest.mark.scenario("N01")
def test_two_hosts_that_lose_each_other_for_long_find_together_again_by_themselves(
    straight: RunPaths, tmp_path: Path
) -> None:
    paths = prepared(tmp_path / "run")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{ADDRESS['a']} slots=1\n{ADDRESS['b']} slots=1\n")
    words = ["--run", str(paths.root), "--hostfile", str(hosts)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environment["GLOO_SOCKET_IFNAME"] = "veth"
    python = [sys.executable, "-c", IMPATIENT]
    with netlab() as lab:
        joined = subprocess.Popen(
            lab.argv("b", [*python, "join", *words, "--host", ADDRESS["b"]]), env=environment
        )
        first = subprocess.Popen(
            lab.argv("a", [*python, "lead", *words]),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            until(first, "first_rollout")
            lab.cut()
            assert "kind=node" in until(first, " crash ")
            until(first, "] restart ")
            lab.heal()
            assert finish(first) == 0
            assert joined.wait(timeout=300) == 0
        finally:
            for process in (first, joined):
                process.kill()
                process.wait()
    assert same_weights(paths.root, straight.root)[0]
    assert ledger_stats(paths).duplicates == ()
    wait_until_gone(str(paths.root))

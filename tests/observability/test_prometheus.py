"""A real Prometheus scrapes a real run; its alert goes through a real Alertmanager to the receiver: the run saves."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from verl_slurm_daemon.journal import Status
from verl_slurm_daemon.lead.lead_metrics import LeadMetrics

from tests.alert_receiver import listening
from tests.builders import run_config
from tests.harness import ROOT, SMALL, wait_until_gone
from tests.journals import make_event, read_events
from tests.lines import follow_lines
from tests.observability.conftest import RULES, Server, fetch
from tests.processes import free_port
from verl_slurm.base.files import write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.wire.messages import Progress

pytestmark = [pytest.mark.prometheus, pytest.mark.slow]


@pytest.fixture
def run(tmp_path: Path, ranks_without_torch: None) -> Iterator[RunPaths]:
    """A run under submitit's local executor, with metrics; it would train for minutes."""
    paths = RunPaths(tmp_path / "run")
    argv = [sys.executable, "-m", "verl_slurm.cli", "submit", str(ROOT / "configs/quickstart.yaml"), *SMALL]
    argv += [
        f"run_dir={paths.root}",
        "observability.metrics_port=0",
        "train.steps=1000",
        "--cluster",
        "local",
    ]
    argv += ["distributed.nodes=1", "distributed.dp_size=1"]
    argv += [
        "checkpoint.every_steps=1000",
        "checkpoint.runtime_every_steps=1000",
    ]  # no save that nobody asked for
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wait_event(paths, "first_rollout")
    try:
        yield paths
    finally:
        cancel = [sys.executable, "-m", "verl_slurm.cli", "cancel", str(paths.root)]
        subprocess.run(cancel, capture_output=True, text=True, timeout=60, check=False)
        wait_until_gone(str(paths.root))


def wait_event(paths: RunPaths, event: str) -> dict[str, Any]:
    for line in follow_lines(paths.events, silence_s=lambda: 90.0):
        assert line is not None, [e["event"] for e in read_events(paths)]
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError


class Overdue:
    """The lead's page as it is when a save is overdue and a GPU full, which no test can wait for. On a thread."""

    def __init__(self, directory: Path, run_id: str) -> None:
        paths = RunPaths(directory)
        directory.mkdir(mode=0o700)
        write_file(paths.run_id, run_id.encode())
        config = run_config(name="quickstart", metrics_port=0, targets_dir=directory / "targets")
        now = 1_800_000_000.0
        self.metrics = LeadMetrics(paths, config, Status(state="running"), lambda: now + 1900)
        self.metrics.run.feed(make_event("started", attempt=1, time="2027-01-15T08:00:00+00:00"))
        full = Progress(
            rank=0, step=0, phase="update", index=0, safe_points=1, new_rollouts=0, gpu_memory_percent=97.0
        )
        self.metrics.heard(full)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

        async def host() -> str:
            return "127.0.0.1"

        assert asyncio.run_coroutine_threadsafe(self.metrics.open(host), self.loop).result(10) == ""
        (target,) = (directory / "targets").iterdir()
        target.write_text(target.read_text().replace('"instance":"lead"', '"instance":"overdue"'))

    def close(self) -> None:
        """Nothing of it outlives the test."""
        self.loop.call_soon_threadsafe(self.metrics.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def prometheus(
    start: Callable[..., Server], home: Path, targets: list[Path], alertmanager: int | None = None
) -> Server:
    """The configuration that ships, with its places filled in and a second for everything that takes longer."""
    text = (RULES / "prometheus.yml").read_text().replace("15s", "1s")
    text = text.replace("[/path/to/targets/*.json]", json.dumps([f"{path}/*.json" for path in targets]))
    text = text.replace("127.0.0.1:9093", f"127.0.0.1:{alertmanager or 9}")
    (home / "prometheus.yml").write_text(text)
    (home / "alerts.yml").write_text((RULES / "alerts.yml").read_text().replace("for: 1m", "for: 0s"))
    port = free_port()
    argv = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    server = start("prometheus", [*argv, f"--storage.tsdb.path={home / 'data'}"], port)
    server.until(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"))
    return server


def test_an_overdue_save_becomes_one_through_prometheus_alertmanager_and_the_receiver(
    run: RunPaths, tmp_path: Path, start: Callable[..., Server]
) -> None:
    run_id = run.run_id.read_text().strip()
    token = tmp_path / "alerts.token"
    with listening(run, token) as (address, receiver):
        assert receiver.stdout is not None
        overdue = Overdue(tmp_path / "overdue", run_id)
        try:
            port = free_port()
            text = (RULES / "alertmanager.yml").read_text().replace("http://127.0.0.1:9470/alert", address)
            (tmp_path / "am.yml").write_text(text.replace("/path/to/alerts.token", str(token)))
            manager = ["prometheus-alertmanager", "--config.file=am.yml", "--cluster.listen-address="]
            manager += [f"--web.listen-address=127.0.0.1:{port}", f"--storage.path={tmp_path / 'am'}"]
            start("alertmanager", manager, port).until(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"))
            server = prometheus(start, tmp_path, [run.metrics, tmp_path / "overdue" / "targets"], port)
            told = json.loads(receiver.stdout.readline())
            assert list(told) == [run_id]
            assert told[run_id].startswith("asked job ")
            wait_event(run, "alert_save_asked")
            assert wait_event(run, "cause")["cause"] == "operator"
            saved = wait_event(run, "saved")
            assert saved["emergency"] is True
            wait_event(run, "verified")
            _look_around(server, run, run_id)
        finally:
            overdue.close()


def _look_around(server: Server, run: RunPaths, run_id: str) -> None:
    """The real run's own series, in the same Prometheus; the overdue page is another target of the same names."""

    def value(name: str, **labels: str) -> list[float]:
        wanted = ",".join(f'{key}="{text}"' for key, text in ({"run_id": run_id} | labels).items())
        return sorted(float(sample["value"][1]) for sample in server.query(f"{name}{{{wanted}}}"))

    agents = server.until(lambda: value("verl_agent_ranks_heard", role="agent", instance="node_0000"))
    assert agents == [1.0]
    server.until(lambda: value("verl_checkpoint_verified_total", instance="lead") == [1.0])
    assert value("verl_checkpoint_last_save_seconds_ago", instance="lead")[0] < 1000
    assert value("verl_runtime_state_age_seconds", instance="lead")[0] < 1000
    assert len(value("verl_rollout_queue_length", instance="lead")) == 1
    # The ranks have no GPU here: no number, neither of the lead nor of an agent.
    gpu = "verl_gpu_memory_utilization_percent"
    assert value(gpu) == value(gpu, instance="overdue") == [97.0]
    overdue = server.query("verl_checkpoint_last_save_seconds_ago > 1800")
    assert [sample["metric"]["instance"] for sample in overdue] == ["overdue"]
    dashboard = json.loads((RULES / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        server.query(expression.replace("$run_id", ".*"))
    assert str(run.root) not in msgspec.json.encode(server.query('{__name__=~"verl_.+"}')).decode()

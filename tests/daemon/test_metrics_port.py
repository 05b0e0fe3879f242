"""The pages of lead and agent, and the port they are on: what is shown, to whom, and what where it cannot be."""

import asyncio
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from verl_slurm_daemon.agent.node_metrics import AgentMetrics
from verl_slurm_daemon.journal import Journal
from verl_slurm_daemon.lead.lead_metrics import LeadMetrics

from tests.builders import run_config
from tests.harness import ROOT
from tests.journals import make_event
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import ObservabilityConfig, RunConfig
from verl_slurm.journal.events import Other
from verl_slurm.journal.status import Status
from verl_slurm.journal.steps import append_step
from verl_slurm.wire.messages import Progress

CANARY = "CANARY-very-secret"
D1 = {
    "verl_checkpoint_last_save_seconds_ago",
    "verl_runtime_state_age_seconds",
    "verl_gpu_memory_utilization_percent",
    "verl_rollout_queue_length",
}
Sample = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(private_dir(tmp_path / "run"))
    paths.run_yaml.touch()  # without it RUN is away
    return paths


@pytest.fixture
def clock() -> Clock:
    return Clock()


def config(**observability: Any) -> RunConfig:
    wanted = ObservabilityConfig(**({"metrics_port": 0} | observability))
    return run_config(name=CANARY, dp_size=2, observability=wanted)


TOKEN = "t" * 64


def token_in(place: Path) -> str:
    (place / "token").touch(0o600)
    (place / "token").write_text(TOKEN)
    return str(place / "token")


def lead_of(paths: RunPaths, clock: Clock, **observability: Any) -> tuple[LeadMetrics, Journal, Status]:
    status = Status(state="running", job_id="7", steps=10)
    metrics = LeadMetrics(paths, config(**observability), status, clock)
    asyncio.run(metrics.read_back())
    return metrics, Journal(paths, attempt=1, job_id="7", heard=metrics.journaled), status


def samples(page: bytes) -> Sample:
    families = text_string_to_metric_families(page.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(page: bytes, name: str, **labels: str) -> float | None:
    return samples(page).get((name, tuple(sorted(labels.items()))))


def progress(rank: int = 0, **fields: Any) -> Progress:
    facts = {"step": 0, "phase": "generate", "index": 3, "safe_points": 3, "new_rollouts": 4} | fields
    return Progress(rank=rank, **facts)


def ask(
    metrics: LeadMetrics | AgentMetrics, *requests: bytes, host: str = "127.0.0.1"
) -> tuple[str, list[bytes]]:
    """(what opening it said, the answers)."""

    async def own_host() -> str:
        return "127.0.0.1"

    async def talk() -> tuple[str, list[bytes]]:
        said = await (
            metrics.open(own_host) if isinstance(metrics, LeadMetrics) else metrics.open("127.0.0.1")
        )
        try:
            if not (file := _target_file(metrics)):
                return said, []
            port = int(json.loads(file.read_bytes())[0]["targets"][0].rpartition(":")[2])
            answers = []
            for request in requests:
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(request)
                answers.append(await reader.read())
                writer.close()
            return said, answers
        finally:
            metrics.close()

    return asyncio.run(talk())


def _target_file(metrics: LeadMetrics | AgentMetrics) -> Path | None:
    return metrics._exporter._target_file


def page_of(metrics: LeadMetrics | AgentMetrics) -> bytes:
    head = f"GET /metrics HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    answer = ask(metrics, head.encode())[1][0]
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:200]
    return answer.partition(b"\r\n\r\n")[2]


# ---- what is shown


def test_the_four_of_the_requirements_have_their_names_and_numbers(paths: RunPaths, clock: Clock) -> None:
    metrics, journal, _ = lead_of(paths, clock)
    journal.write(make_event("started", requeues=0))
    clock.now += 100
    metrics.heard(progress(gpu_memory_percent=80.0))
    metrics.heard(progress(rank=1, gpu_memory_percent=96.5))
    clock.now += 5
    page = page_of(metrics)
    assert {name: value(page, name) for name in D1} == {
        "verl_checkpoint_last_save_seconds_ago": pytest.approx(
            105
        ),  # nothing was ever saved: since the run began
        "verl_runtime_state_age_seconds": pytest.approx(5),
        "verl_gpu_memory_utilization_percent": 96.5,
        "verl_rollout_queue_length": 3 * 16 * 2,
    }
    journal.write(
        make_event("saved", name="step_000001", seconds=3.0, num_bytes=1000, emergency=False, on_shared=True)
    )
    clock.now += 7
    journal.write(make_event("verified", name="step_000001", detail=""))
    page = page_of(metrics)
    assert value(page, "verl_checkpoint_last_save_seconds_ago") == pytest.approx(7)
    assert value(page, "verl_runtime_state_age_seconds") == pytest.approx(7)
    assert value(page, "verl_checkpoint_saves_total", kind="periodic") == 1
    assert value(page, "verl_checkpoint_save_duration_seconds") == 3.0
    assert value(page, "verl_checkpoint_save_bytes") == 1000


def test_without_a_gpu_its_memory_has_no_number_and_a_steps_end_counts_for_goodput(
    paths: RunPaths, clock: Clock
) -> None:
    metrics, _, _ = lead_of(paths, clock)
    metrics.heard(progress())
    page = page_of(metrics)
    assert b"# TYPE verl_gpu_memory_utilization_percent gauge\n" in page
    assert value(page, "verl_gpu_memory_utilization_percent") is None
    metrics, journal, _ = lead_of(paths, clock)
    # The journal's time is the wall's, this clock is made up: what counts is what the lead tells its metrics.
    metrics.journaled(make_event("started", job_id="7", attempt=1))
    del journal
    clock.now += 40
    metrics.heard(progress(step=1, phase="step_end", index=0, metrics={"step_s": 30.0}))
    assert value(page_of(metrics), "verl_goodput_ratio") == pytest.approx(0.75)
    assert value(page_of(metrics), "verl_rollout_queue_length") == 0


def test_counters_go_on_where_the_former_attempt_left_them(paths: RunPaths, clock: Clock) -> None:
    first, journal, _ = lead_of(paths, clock)
    journal.write(make_event("started", requeues=0))
    journal.write(make_event("restart", number=1, resume=None))
    journal.write(make_event("crash", detail="x", crashes=1, budget=8))
    journal.write(make_event("restart", number=2, resume=None))
    append_step(paths, 1, {"step": 1.0, "step_s": 30.0})
    before = samples(page_of(first))
    second, _, _ = lead_of(paths, clock)
    after = samples(page_of(second))
    counted = ("verl_restarts_total", (("cause", "crash"),))
    assert before[counted] == after[counted] == 1
    assert after["verl_crashes_total", ()] == 1
    assert (before["verl_useful_seconds", ()], after["verl_useful_seconds", ()]) == (0.0, 30.0)


@pytest.mark.scenario("M11", "M13")
def test_no_name_path_or_text_of_an_event_is_on_the_page(paths: RunPaths, clock: Clock) -> None:
    metrics, journal, status = lead_of(paths, clock)
    evil = f'{CANARY}"}} 1\nverl_run_step 99\r\x1b[31m\u2028'
    journal.write(make_event("started", requeues=0, host=evil, nodes=evil))
    journal.write(make_event("cause", cause=evil, evidence=evil))
    journal.write(make_event("crash", detail=evil, crashes=1, budget=1))
    journal.write(make_event("saved", name=evil, reason=evil, seconds=1.0, num_bytes=1, on_shared=True))
    journal.write(Other(evil, {"name": evil}))
    status.state = status.phase = status.cause = status.last_checkpoint = evil
    status.metrics = {evil: 1.0, "reward": 0.5}
    page = page_of(metrics)
    assert CANARY.encode() not in page
    assert str(paths.root).encode() not in page
    assert value(page, "verl_run_step") == 0
    labels = {key for _, found in samples(page) for key, _ in found}
    assert labels == {"state", "cause", "outcome", "kind", "reason"}
    assert len(samples(page)) < 70  # bounded, whatever happens


def test_how_well_it_learns_is_shown_only_to_who_has_the_token(
    paths: RunPaths, clock: Clock, tmp_path: Path
) -> None:
    for asked in (False, True):
        metrics, _, status = lead_of(paths, clock, token_file=token_in(tmp_path) if asked else None)
        status.metrics = {"reward": 0.5, "kl": 0.1, "tokens_per_second": 50.0, "secret/thing": 1.0}
        page = page_of(metrics)
        assert value(page, "verl_learning", number="reward") == (0.5 if asked else None)
        assert value(page, "verl_tokens_per_second") == 50.0
        assert b"secret" not in page


@pytest.mark.scenario("N03", "N04")
def test_who_is_turned_away_at_the_control_port_is_counted_by_reason(paths: RunPaths, clock: Clock) -> None:
    lead, journal, _ = lead_of(paths, clock)
    lead.refused = {**lead.refused, "silent": 3, "token": 1}
    journal.write(make_event("link", node="n1", error="a frame is out of order"))
    page = page_of(lead)
    counted = {
        reason: value(page, "verl_control_refused_total", reason=reason)
        for reason in ("silent", "left", "token", "crowded", "full")
    }
    assert counted == {"silent": 3, "left": 0, "token": 1, "crowded": 0, "full": 0}
    assert value(page, "verl_links_broken_total") == 1


def test_an_agent_shows_its_ranks_one_by_one(paths: RunPaths, clock: Clock) -> None:
    linked = [True]
    agent = AgentMetrics(paths, config(), 3, lambda: linked[0], clock)
    agent.heard(progress(rank=1, gpu_memory_percent=42.0))
    clock.now += 4
    page = page_of(agent)
    assert value(page, "verl_gpu_memory_utilization_percent", rank="1") == 42.0
    assert value(page, "verl_agent_safe_point_age_seconds", rank="1") == pytest.approx(4)
    assert value(page, "verl_agent_ranks_heard") == 1
    assert (value(page, "process_resident_memory_bytes") or 0) > 1e6


def test_what_is_exported_is_what_is_documented(paths: RunPaths, clock: Clock, tmp_path: Path) -> None:
    documented = set(re.findall(r"`(verl_\w+)", (ROOT / "docs/reference-metrics.md").read_text()))
    lead, journal, status = lead_of(paths, clock, token_file=token_in(tmp_path))
    journal.write(make_event("started", requeues=0))
    journal.write(make_event("saved", name="a", seconds=1.0, num_bytes=1, on_shared=True))
    clock.now += 1
    status.metrics = {"reward": 0.5, "tokens_per_second": 1.0, "step_s": 1.0}
    agent = AgentMetrics(paths, config(), 0, lambda: True, clock)
    for told in (lead, agent):
        told.heard(progress(gpu_memory_percent=50.0))
    found = {name for page in (page_of(lead), page_of(agent)) for name, _ in samples(page)}
    assert {name for name in found if not name.startswith("process_")} == documented


# ---- who may look, and what else the port does


@pytest.mark.scenario("M13")
def test_the_port_knows_two_paths_and_reads_only(paths: RunPaths, clock: Clock) -> None:
    metrics, _, _ = lead_of(paths, clock)
    asked = [
        b"GET /healthz",
        b"GET /",
        b"GET /metrics/x",
        b"GET /../metrics",
        b"POST /metrics",
        b"PUT /healthz",
    ]
    _, answers = ask(metrics, *(words + b" HTTP/1.1\r\n\r\n" for words in asked))
    assert [answer[9:12] for answer in answers] == [b"200", b"404", b"404", b"404", b"405", b"405"]
    assert answers[0].endswith(b"\r\n\r\nup\n")


@pytest.mark.scenario("M13")
@pytest.mark.parametrize(
    ("state", "word"), [("running", b"up\n"), ("paused", b"up\n"), ("leaving", b"down\n")]
)
def test_health_is_one_word(paths: RunPaths, clock: Clock, state: str, word: bytes) -> None:
    metrics, _, status = lead_of(paths, clock)
    status.state = state
    (answer,) = ask(metrics, b"GET /healthz HTTP/1.1\r\n\r\n")[1]
    assert answer.partition(b"\r\n\r\n")[2] == word


@pytest.mark.scenario("M13")
def test_with_a_token_only_its_bearer_reads(paths: RunPaths, clock: Clock, tmp_path: Path) -> None:
    metrics, _, _ = lead_of(paths, clock, token_file=token_in(tmp_path))
    head = b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer %s\r\n\r\n"
    _, answers = ask(metrics, b"GET /metrics HTTP/1.1\r\n\r\n", head % (b"x" * 64), head % (b"t" * 64))
    assert [answer[9:12] for answer in answers] == [b"401", b"401", b"200"]
    assert b"verl_run" not in answers[0] + answers[1]


@pytest.mark.scenario("M08")
def test_an_open_token_and_a_place_that_cannot_be_written_open_no_port_and_stop_nothing(
    paths: RunPaths, clock: Clock, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 64)
    token.chmod(0o644)
    said, answers = ask(lead_of(paths, clock, token_file=str(token))[0], b"GET /healthz HTTP/1.1\r\n\r\n")
    assert "no metrics from lead" in said
    assert "t" * 64 not in said
    assert answers == []
    (tmp_path / "file").touch()
    metrics, _, _ = lead_of(paths, clock, targets_dir=str(tmp_path / "file" / "targets"))
    said, answers = ask(metrics, b"GET /healthz HTTP/1.1\r\n\r\n")
    assert "no metrics from lead" in said
    assert answers == []


# ---- where it is


def test_where_it_listens_is_told_to_prometheus_and_taken_back_but_a_successors_stays(
    paths: RunPaths, clock: Clock
) -> None:
    metrics, _, _ = lead_of(paths, clock)
    agent = AgentMetrics(paths, config(), 1, lambda: True, clock)
    seen: list[dict[str, Any]] = []

    async def host() -> str:
        raise AssertionError("a loopback address needs no question")

    async def live() -> None:
        assert await metrics.open(host) == ""
        assert await agent.open("10.0.0.9") == ""
        for file in sorted(paths.metrics.iterdir()):
            assert file.stat().st_mode & 0o077 == 0
            seen.extend(json.loads(file.read_bytes()))
        metrics.close()
        agent.close()

    asyncio.run(live())
    number = paths.run_id.read_text().strip()
    assert [entry["labels"] for entry in seen] == [
        {"run": CANARY, "run_id": number, "role": "lead", "instance": "lead"},
        {"run": CANARY, "run_id": number, "role": "agent", "instance": "node_0001"},
    ]
    assert all(entry["targets"][0].startswith("127.0.0.1:") for entry in seen)
    assert list(paths.metrics.iterdir()) == []
    metrics, _, _ = lead_of(paths, clock)

    async def live() -> Path:
        async def host() -> str:
            return "127.0.0.1"

        await metrics.open(host)
        (file,) = paths.metrics.iterdir()
        file.write_bytes(b"the successor's")
        metrics.close()
        return file

    assert asyncio.run(live()).read_bytes() == b"the successor's"


@pytest.mark.parametrize("own", ["10.1.2.3", "fe80::1"])
def test_a_port_for_others_is_told_with_the_nodes_own_address(
    paths: RunPaths, clock: Clock, tmp_path: Path, own: str
) -> None:
    wanted = config(metrics_host="0.0.0.0", token_file=token_in(tmp_path))
    agent = AgentMetrics(paths, wanted, 1, lambda: True, clock)

    async def told() -> str:
        assert await agent.open(own) == ""
        (file,) = paths.metrics.iterdir()
        target: str = json.loads(file.read_bytes())[0]["targets"][0]
        agent.close()
        return target

    host, _, port = asyncio.run(told()).rpartition(":")
    assert host == (f"[{own}]" if ":" in own else own)
    assert int(port) > 0


def test_several_runs_may_have_one_directory(paths: RunPaths, clock: Clock, tmp_path: Path) -> None:
    shared = tmp_path / "targets"
    first, _, _ = lead_of(paths, clock, targets_dir=str(shared))
    other = RunPaths(private_dir(tmp_path / "other"))
    second, _, _ = lead_of(other, clock, targets_dir=str(shared))

    async def live() -> set[str]:
        async def host() -> str:
            return "127.0.0.1"

        await first.open(host)
        await second.open(host)
        names = {file.name for file in shared.iterdir()}
        first.close()
        second.close()
        return names

    assert asyncio.run(live()) == {f"{run.run_id.read_text().strip()}.lead.json" for run in (paths, other)}


@pytest.fixture
def taken() -> Callable[[], int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield lambda: int(held.getsockname()[1])


def test_a_port_that_is_taken_is_another_one_and_said_and_an_agents_is_behind_the_leads(
    paths: RunPaths, clock: Clock, taken: Callable[[], int]
) -> None:
    said, answers = ask(lead_of(paths, clock, metrics_port=taken())[0], b"GET /healthz HTTP/1.1\r\n\r\n")
    assert "metrics of lead are at port" in said
    assert answers[0].endswith(b"up\n")
    agent = AgentMetrics(paths, config(metrics_port=taken() - 1), 0, lambda: True, clock)
    assert "metrics of node_0000 are at port" in ask(agent)[0]  # so it did ask for that one

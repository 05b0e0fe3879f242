"""Daemons beside one another on one node: of two runs, and of two attempts of each."""

import asyncio
import json
import secrets
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from verl_slurm_daemon.agent.node_metrics import AgentMetrics
from verl_slurm_daemon.agent.rank_socket import RankSocket
from verl_slurm_daemon.journal import Status
from verl_slurm_daemon.lead.lead_metrics import LeadMetrics
from verl_slurm_daemon.link.channel import AgentLink, serve

from tests.hostile.racing import FORK, PATIENCE_S, processes
from tests.processes import free_port
from verl_slurm.base.files import private_dir
from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import ObservabilityConfig, RunConfig
from verl_slurm.wire.lead_file import (
    LeadAddress,
    read_lead_address,
    remove_lead_address,
    write_lead_address,
)


def daemon(paths: RunPaths, config: RunConfig, attempt: int, others: Any, told: Any) -> None:
    """All that a lead and its agent open, held open while the other three daemons have theirs."""
    step = partial(asyncio.to_thread, others.wait, PATIENCE_S)

    async def host() -> str:
        return "127.0.0.1"

    async def no_link(_: AgentLink) -> None:
        raise AssertionError("nobody has the token")

    async def live() -> None:
        lead = LeadMetrics(paths, config, Status(attempt=attempt), time.time)
        agent = AgentMetrics(paths, config, 0, lambda: True)
        token = secrets.token_bytes(32)
        server, port = await serve("127.0.0.1", token, attempt, 4, no_link)
        write_lead_address(
            paths, LeadAddress(attempt=attempt, restart=1, host="127.0.0.1", port=port, token=token.hex())
        )
        ranks = RankSocket(lambda _: None, max_ranks=4)
        said = [await lead.open(host), await agent.open("127.0.0.1")]
        await step()
        if attempt == 2:  # the newer one has the last word, and the older ones are not leaving yet
            write_lead_address(paths, msgspec.structs.replace(read_lead_address(paths), attempt=2))
        (entry,) = json.loads(lead._exporter._written)
        (other,) = json.loads(agent._exporter._written)
        targets = [entry["targets"][0], other["targets"][0]]
        told.put((str(paths.root), attempt, port, str(ranks.directory), targets, said))
        await step()  # looked at from outside
        if attempt == 2:
            await step()  # the older ones leave
            assert read_lead_address(paths).attempt == 2
            assert ranks.directory.is_dir()
        for one in (lead, agent):
            one.close()
        server.close()
        ranks.close()
        remove_lead_address(paths, attempt)
        if attempt == 1:
            await step()

    asyncio.run(live())


@pytest.mark.scenario("C05")
def test_daemons_of_two_runs_and_two_of_each_on_one_node_have_their_own_of_everything(
    tmp_path: Path,
) -> None:
    observed = ObservabilityConfig(metrics_port=free_port(), targets_dir=str(tmp_path / "targets"))
    config = RunConfig(name="run", observability=observed)
    runs = [RunPaths(private_dir(tmp_path / name)) for name in "ab"]
    for paths in runs:
        private_dir(paths.control)
    others, told = FORK.Barrier(5), FORK.SimpleQueue()
    work = [(daemon, (paths, config, attempt, others, told)) for paths in runs for attempt in (1, 2)]
    with processes(*work):
        others.wait(PATIENCE_S)
        found = [told.get() for _ in work]
        pages = {}
        for root, attempt, _, _, targets, _ in found:
            with urllib.request.urlopen(f"http://{targets[0]}/metrics", timeout=30) as answer:
                pages[root, attempt] = answer.read().decode()
        others.wait(PATIENCE_S)
        others.wait(PATIENCE_S)
    for what in ([one[2] for one in found], [one[3] for one in found], [t for one in found for t in one[4]]):
        assert len(set(what)) == len(what), f"shared: {what}"
    assert all(f"verl_run_attempt {float(attempt)}" in page for (_, attempt), page in pages.items())
    elsewhere = [text for one in found for text in one[5] if text]
    assert len(elsewhere) >= 2 * (len(work) - 1), "a port that is another's is another one, and said"
    assert all("are at port" in text for text in elsewhere)
    assert list((tmp_path / "targets").iterdir()) == []
    assert not any(paths.lead_address.exists() or Path(one[3]).exists() for paths in runs for one in found)

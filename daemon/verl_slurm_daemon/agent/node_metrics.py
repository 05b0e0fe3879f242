"""An agent's Prometheus page: the numbers of each rank of its node."""

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from verl_slurm.base.paths import RunPaths
from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.messages import FromRank
from verl_slurm_daemon.agent.rank_socket import REASONS
from verl_slurm_daemon.metrics.exporter import Exporter, gauge, labelled, renderer
from verl_slurm_daemon.metrics.live_numbers import LiveNumbers


class AgentMetrics:
    """Collects the numbers and renders the page. `up` returns whether the lead is connected."""

    def __init__(
        self,
        paths: RunPaths,
        config: RunConfig,
        node_id: int,
        up: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._up, self._clock = config, up, clock
        self.refused: Mapping[str, int] = dict.fromkeys(REASONS, 0)
        """Refused connections at the ranks' socket, by reason; the agent counts them."""
        self._live = LiveNumbers(range(config.speakers))
        self._exporter = Exporter(paths, config, f"node_{node_id:04d}", page=renderer(self.families), up=up)

    async def open(self, own_host: str) -> str:
        """Opens as `Exporter.open`, at the port after the lead's: both are on the first node."""
        port = self._config.observability.metrics_port

        async def host() -> str:
            return own_host

        return await self._exporter.open(host, port + 1 if port else 0)

    def heard(self, message: FromRank) -> None:
        """Takes note of a message from a rank of this node."""
        self._live.feed(message, self._clock())

    def close(self) -> None:
        self._exporter.close()

    def families(self) -> Iterator[Metric]:
        """Yields all families of the page except the process' own."""
        now, live, expected = self._clock(), self._live, len(self._config.speakers_on(0))
        yield gauge("verl_agent_lead_link", "1 while the lead is heard.", float(self._up()))
        yield gauge("verl_agent_ranks_expected", "Ranks of this node.", expected)
        yield gauge("verl_agent_ranks_heard", "Ranks of this node that have said something.", len(live.heard))
        yield labelled(
            CounterMetricFamily,
            "verl_agent_refused",
            "Connections to the ranks' socket or to a service, and messages, that were refused; of this agent.",
            "reason",
            self.refused,
        )
        yield labelled(
            GaugeMetricFamily,
            "verl_agent_safe_point_age_seconds",
            "Since the last safe point of each rank.",
            "rank",
            {str(rank): max(now - at, 0.0) for rank, at in sorted(live.heard.items())},
        )
        yield labelled(
            GaugeMetricFamily,
            "verl_gpu_memory_utilization_percent",
            "Memory in use of each rank's GPU, by whomever. Absent without GPUs.",
            "rank",
            {str(rank): percent for rank, percent in sorted(live.gpu_percent.items())},
        )

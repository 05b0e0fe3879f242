"""The metrics port of a lead or an agent: serves `GET /metrics` and `GET /healthz`, both read-only.

Its address is written to a 0600 file (`observability.targets_dir`) in the format of Prometheus' file-based
service discovery. That file has the run's name and id, and no label has: everybody on the node can read a
port on 127.0.0.1. A port that cannot be opened stops no run: another one is taken, or none, and a message
says so.

The page is in Prometheus' text format. This module imports prometheus_client, which costs 2 MB, so it is
imported when a port is configured.
"""

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_slurm.base.errors import VerlSlurmError
from verl_slurm.base.files import private_dir, write_file
from verl_slurm.base.paths import RunPaths
from verl_slurm.base.run_id import run_id
from verl_slurm.config.schema import RunConfig
from verl_slurm.wire.http import Caps, HttpReply, HttpRequest, read_token, serve_http
from verl_slurm.wire.tcp_table import listener_of


def gauge(name: str, text: str, value: float | None) -> Metric:
    """Makes one number; None: the name is known, the value is not."""
    family = GaugeMetricFamily(name, text)
    if value is not None:
        family.add_metric([], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """Makes a counter. `name` comes without its `_total`."""
    return CounterMetricFamily(name, text, value=value)


def labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """Makes one number for each value of one label, out of a closed list."""
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class _Told(Collector):
    def __init__(self, tell: Callable[[], Iterable[Metric]]) -> None:
        self._tell = tell

    def collect(self) -> Iterator[Metric]:
        yield from self._tell()


def renderer(tell: Callable[[], Iterable[Metric]]) -> Callable[[], bytes]:
    """Returns the function that renders the page: `tell`'s families, and those of the process (memory, CPU)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(tell))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)


_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Exporter:
    """One open port. `name`: `lead` or `node_0003`, part of that file's name and the label `instance`."""

    def __init__(
        self,
        paths: RunPaths,
        config: RunConfig,
        name: str,
        *,
        page: Callable[[], bytes],
        up: Callable[[], bool],
    ) -> None:
        self._paths, self._config, self._name = paths, config, name
        self._page, self._up = page, up
        self._token: str | None = None
        self._server: asyncio.Server | None = None
        self._target_file: Path | None = None
        self._written = b""

    async def open(self, own_host: Callable[[], Awaitable[str]], port: int) -> str:
        """Listens at `port` (0: any) and publishes the address.

        Returns a message for people: the actual address if it differs from the wanted one, or why the port is
        closed.
        """
        wanted = self._config.observability
        try:
            if wanted.token_file is not None:
                self._token = read_token(wanted.token_file)
            reached: str = wanted.metrics_host
            if reached != "127.0.0.1":
                # Not the address to listen on: on the node itself, its name may mean 127.0.1.1.
                reached = await own_host()
            host = "::" if ":" in reached else wanted.metrics_host
            found, problem = await self._listen(host, port)
            self._publish(reached, found)
        except (OSError, VerlSlurmError) as error:
            self.close()
            return f"no metrics from {self._name}: {error}"
        return problem

    async def _listen(self, host: str, port: int) -> tuple[int, str]:
        problem = ""
        try:
            self._server, found = await serve_http(host, port, self._answer, Caps(), self._token)
        except OSError as error:
            if port == 0:
                raise
            # Any free port: the file with the address tells scrapers, so the run need not end for a port that is taken.
            self._server, found = await serve_http(host, 0, self._answer, Caps(), self._token)
            problem = f"metrics of {self._name} are at port {found}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                listener = listener_of(port)
                problem += f" by {listener.name}"
                # Another user's process may have taken the port to be shown the token by whoever scrapes the configured
                # address.
                if self._token is not None and listener.stranger:
                    problem += "; a scraper that still goes there shows it the token: make a new one"
        return found, problem

    def _publish(self, host: str, port: int) -> None:
        number = run_id(self._paths)
        labels = {
            # In this 0600 file and not on the page: every user who reaches the port can read that.
            "run": self._config.name,
            "run_id": number,
            "role": "lead" if self._name == "lead" else "agent",
            "instance": self._name,  # a port changes with each start; the series goes on
        }
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._written = msgspec.json.encode([{"targets": [target], "labels": labels}])
        directory = self._config.observability.targets_dir
        folder = (
            private_dir(Path(directory))
            if directory
            else private_dir(self._paths.metrics, inside=self._paths.run)
        )
        target_file = folder / f"{number}.{self._name}.json"
        write_file(target_file, self._written)
        self._target_file = target_file

    async def _answer(self, request: HttpRequest) -> HttpReply:
        # Without the token: it tells up or down, and nothing of the run.
        if request.path == "/healthz":
            return HttpReply(200, b"up\n") if self._up() else HttpReply(503, b"down\n")
        if request.path != "/metrics":
            return HttpReply(404)
        if self._token is not None and not request.bearer:
            return HttpReply(401)
        return HttpReply(200, self._page(), _TEXT)

    def close(self) -> None:
        """Closes the port and removes the published address, unless another process has written its own there."""
        if self._server is not None:
            self._server.close()
            self._server = None
        # A newer lead may have written its address there already.
        with contextlib.suppress(OSError):
            if self._target_file is not None and self._target_file.read_bytes() == self._written:
                self._target_file.unlink()
        self._target_file = None

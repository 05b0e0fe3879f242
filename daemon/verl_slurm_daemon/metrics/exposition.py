"""Renders numbers in Prometheus' text format.

Imports prometheus_client, which costs 2 MB, so this module is imported when a port is configured.

No label names the run. Everybody on the node can read a port on 127.0.0.1. The service-discovery file
(`exporter.py`) says which run a series belongs to, and its mode is 0600.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


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
    """Returns the function that renders the page: `tell`'s families, and the process' own (memory, CPU, file
    descriptors).
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(tell))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)

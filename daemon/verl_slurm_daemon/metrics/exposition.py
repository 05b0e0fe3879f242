"""Numbers as Prometheus' text format. The only file that imports prometheus_client, and only imported where a port is
asked for: it costs 2 MB.

No label says who or what a run is. A port on 127.0.0.1 is read by everybody on the node; which run a series is of, the
service-discovery file says (`exporter.py`), which is 0600.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["counter", "gauge", "labelled", "renderer"]


def gauge(name: str, text: str, value: float | None) -> Metric:
    """One number; None: the name is known and there is nothing to say."""
    family = GaugeMetricFamily(name, text)
    if value is not None:
        family.add_metric([], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """`name` without its `_total`."""
    return CounterMetricFamily(name, text, value=value)


def labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """One number for each value of one label, out of a closed list."""
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
    """What makes the page: `tell`'s families, and the process' own (memory, CPU, file descriptors)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(tell))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)

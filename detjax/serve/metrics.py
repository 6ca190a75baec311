# SPDX-License-Identifier: Apache-2.0
"""What the engine counts, as Prometheus reads it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from detjax.serve.service import Service, ServiceState
from detjax.serving.metrics import EngineStats, Histogram

GAUGES = {
    "num_waiting": "Sequences in the queue.",
    "num_running": "Sequences with a slot.",
    "num_pages": "Pages of the cache.",
    "num_self_unchecked": "Canonical programs that no self-check has compared with prefill yet.",
    "num_pages_held": "Pages that sequences, and a check of an answer, hold.",
    "num_pages_cached": "Pages kept for their content alone.",
}
COUNTERS = {
    "num_requests": "Requests.",
    "num_finished": "Sequences that ended by themselves.",
    "num_failed": "Sequences that ended with an error.",
    "num_cancelled": "Sequences that were cancelled.",
    "num_preempted": "Times a sequence lost its pages to another.",
    "num_pages_evicted": "Cached pages that were given out again.",
    "prompt_tokens": "Of all sequences.",
    "prefix_tokens": "Prompt tokens found in the prefix cache.",
    "prefill_tokens": "Computed by prefill.",
    "decode_tokens": "Committed.",
    "num_windows": "Windows of drafts verified.",
    "draft_tokens": "Drafts verified.",
    "accepted_tokens": "Drafts committed.",
    "num_rollbacks": "Windows in which a draft was wrong.",
    "num_compiled": "Programs compiled.",
    "compile_s": "Spent on compiling, at the start and while requests waited.",
    "num_self_checked": "Programs compared with prefill.",
    "num_rechecked": "Tokens of answers that were checked again by prefill.",
    "num_self_check_differences": "Bits that a self-check has found to differ.",
}
HISTOGRAMS = {
    "first_token_s": (
        "time_to_first_token_seconds",
        "From arrival to the first token.",
    ),
    "between_tokens_s": ("inter_token_seconds", "Between two releases of a sequence."),
    "end_to_end_s": ("end_to_end_seconds", "From arrival to the end."),
    "step_s": ("step_seconds", "Of the engine."),
}


class EngineCollector(Collector):
    """Reads the engine's counters when asked; keeps nothing."""

    def __init__(self, service: Service):
        """Of a service."""
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """All of them, and the state of the server."""
        if self._service.state is not ServiceState.STARTING:
            yield from _of_engine(self._service.stats())
        state = GaugeMetricFamily("detjax_state", "1 for the state it is in.", labels=["state"])
        for one in ServiceState:
            state.add_metric([one.value], float(self._service.state is one))
        yield state
        yield GaugeMetricFamily(
            "detjax_http_requests_open", "Requests being answered.", value=self._service.num_open
        )


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for name, text in GAUGES.items():
        yield GaugeMetricFamily(
            f"detjax_{name.removeprefix('num_')}", text, value=getattr(stats, name)
        )
    for name, text in COUNTERS.items():
        metric = name.removeprefix("num_")
        metric = f"{metric[:-2]}_seconds" if metric.endswith("_s") else metric
        yield CounterMetricFamily(f"detjax_{metric}", text, value=getattr(stats, name))
    for name, (metric, text) in HISTOGRAMS.items():
        histogram: Histogram = getattr(stats, name)
        yield HistogramMetricFamily(
            f"detjax_{metric}", text, buckets=_buckets(histogram), sum_value=histogram.total
        )


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts at every fourth edge: a factor of 2 apart."""
    total, buckets = 0, []
    for i, count in enumerate(histogram.counts[:-1]):
        total += count
        if i % 4 == 0:
            buckets.append((f"{histogram.edge(i):.6g}", float(total)))
    return [*buckets, ("+Inf", float(histogram.count))]


def render(service: Service) -> bytes:
    """The text format, in full."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service))
    return generate_latest(registry)

# SPDX-License-Identifier: Apache-2.0
"""What the engine counts, as Prometheus reads it."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from detjax.engine.metrics import (
    BETWEEN_TOKENS_BOUNDS,
    END_TO_END_BOUNDS,
    FIRST_TOKEN_BOUNDS,
    LOG_BOUNDS,
    EngineStats,
    Histogram,
)
from detjax.server.served_model import ServedModel
from detjax.server.service import Service, ServiceState

GAUGES = {
    "num_waiting": "Sequences in the queue.",
    "num_running": "Sequences with a slot.",
    "num_pages": "Pages of the cache.",
    "num_self_unchecked": "Canonical programs that no self-check has compared with prefill yet.",
    "num_pages_held": "Pages that sequences, and a check of an answer, hold.",
    "num_pages_cached": "Pages kept for their content alone.",
    "num_local_pages": "Pages of local layers, where they have fewer than the others.",
    "num_local_pages_held": "Of these, what sequences and a check of an answer hold.",
    "num_adapters": "Adapters that requests may name; two names of the same weights are one.",
}
COUNTERS = {
    "num_requests": "Requests.",
    "num_finished": "Sequences that ended by themselves.",
    "num_failed": "Sequences that ended with an error.",
    "num_cancelled": "Sequences that were cancelled.",
    "num_preempted": "Times a sequence lost its pages to another.",
    "num_pages_evicted": "Cached pages that were given out again.",
    "num_adapters_evicted": "Adapters that lost their slot on the devices to another.",
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
COUNTERS_BY_SOURCE = {
    "num_windows": ("source_windows", "Windows verified, by the source of their drafts."),
    "draft_tokens": ("source_draft_tokens", "Drafts verified, by source."),
    "accepted_tokens": ("source_accepted_tokens", "Drafts committed, by source."),
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
VLLM_GAUGES = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
}
VLLM_COUNTERS = {
    "num_preemptions": "num_preempted",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "decode_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "prefix_tokens",
    "spec_decode_num_drafts": "num_windows",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}
VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token_s", FIRST_TOKEN_BOUNDS),
    "inter_token_latency_seconds": ("between_tokens_s", BETWEEN_TOKENS_BOUNDS),
    "time_per_output_token_seconds": ("between_tokens_s", BETWEEN_TOKENS_BOUNDS),
    "e2e_request_latency_seconds": ("end_to_end_s", END_TO_END_BOUNDS),
}
"""Metrics under vLLM's names, and of what they are. The last but one is its older name."""


class EngineCollector(Collector):
    """Reads the engine's counters when asked; keeps nothing."""

    def __init__(self, service: Service):
        """Of a service."""
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """All of them, and the state of the server."""
        if self._service.state is not ServiceState.STARTING:
            stats = self._service.stats()
            yield from _of_engine(stats)
            yield from _as_vllm(stats, self._service.model.name)
            yield from _of_weights(self._service.model)
        state = GaugeMetricFamily("detjax_state", "1 for the state it is in.", labels=["state"])
        for one in ServiceState:
            state.add_metric([one.value], float(self._service.state is one))
        yield state
        for name, text, value in (
            ("open", "Requests being answered, or that wait.", self._service.num_open),
            ("held", "Requests that wait for the server.", self._service.turns.num_held),
        ):
            yield GaugeMetricFamily(f"detjax_http_requests_{name}", text, value=value)


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for name, text in GAUGES.items():
        yield GaugeMetricFamily(
            f"detjax_{name.removeprefix('num_')}", text, value=getattr(stats, name)
        )
    for name, text in COUNTERS.items():
        metric = name.removeprefix("num_")
        metric = f"{metric[:-2]}_seconds" if metric.endswith("_s") else metric
        yield CounterMetricFamily(f"detjax_{metric}", text, value=getattr(stats, name))
    for name, (metric, text) in COUNTERS_BY_SOURCE.items():
        counter = CounterMetricFamily(f"detjax_{metric}", text, labels=["source"])
        for source, counts in dict(stats.drafts).items():  # the engine adds to it meanwhile
            counter.add_metric([source], getattr(counts, name))
        yield counter
    for name, (metric, text) in HISTOGRAMS.items():
        histogram: Histogram = getattr(stats, name)
        yield HistogramMetricFamily(
            f"detjax_{metric}", text, buckets=_buckets(histogram), sum_value=histogram.total
        )


def _of_weights(model: ServedModel) -> Iterator[Metric]:
    info = GaugeMetricFamily("detjax_weights", "1 for the hash of the weights.", labels=["weights"])
    info.add_metric([str(model.identity.model["weights"])], 1.0)
    yield info
    yield GaugeMetricFamily(
        "detjax_weight_version", "Of the weights that compute.", value=model.weight_version
    )


def _as_vllm(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    """The same under vLLM's names, with its labels and buckets, for dashboards that know these."""
    names, labels = ("model_name", "engine"), (model_name, "0")
    gauges = {name: float(getattr(stats, of)) for name, of in VLLM_GAUGES.items()}
    gauges["kv_cache_usage_perc"] = stats.num_pages_held / max(stats.num_pages, 1)
    for name, value in gauges.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", "As vLLM has it.", labels=names)
        gauge.add_metric(labels, value)
        yield gauge
    for name, of in VLLM_COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", "As vLLM has it.", labels=names)
        counter.add_metric(labels, getattr(stats, of))
        yield counter
    ended = CounterMetricFamily(
        "vllm:request_success", "Sequences that ended.", labels=(*names, "finished_reason")
    )
    for reason, count in (
        ("stop", stats.num_finished - stats.num_cut),
        ("length", stats.num_cut),
        ("abort", stats.num_cancelled),
        ("error", stats.num_failed),
    ):
        ended.add_metric((*labels, reason), count)
    yield ended
    for name, (of, edges) in VLLM_HISTOGRAMS.items():
        histogram: Histogram = getattr(stats, of)
        family = HistogramMetricFamily(f"vllm:{name}", "As vLLM has it.", labels=names)
        family.add_metric(labels, _buckets(histogram, edges), histogram.total)
        yield family


def _buckets(
    histogram: Histogram, edges: Sequence[float] = LOG_BOUNDS[::4]
) -> list[tuple[str, float]]:
    """Cumulative counts; where no edges are given, at those a factor of 2 apart."""
    counted = [(f"{edge:.6g}", float(histogram.up_to(edge))) for edge in edges]
    return [*counted, ("+Inf", float(histogram.count))]


def render(service: Service) -> bytes:
    """The text format, in full."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service))
    return generate_latest(registry)

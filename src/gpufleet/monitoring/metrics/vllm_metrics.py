"""
List the metrics of vLLM's servers that rules, dashboards and gates use. Pure.

The list was read from `vllm/v1/metrics/` of the releases 0.17.0 to 0.33.0. The releases 0.28.0,
0.30.0 and 0.32.0 were also run (tests/unit/monitoring/recorded/). A metric has the same name and
labels in all releases from 0.18 on, or from the release in `since` on.

Some metrics that guides mention are not here. `gpu_cache_usage_perc`,
`time_per_output_token_seconds`, `gpu_prefix_cache_hit_rate`, `num_requests_swapped` and
`avg_*_throughput` were removed in 0.12 or earlier, and `request_error_total` never existed.
"""

from __future__ import annotations

from typing import Literal

from gpufleet.monitoring.metrics.metric import Job, Metric, Release

ENGINE = ("engine", "model_name")
READ = "vllm/v1/metrics/loggers.py of 0.17.0 to 0.33.0; recordings of 0.28.0, 0.30.0, 0.32.0"
FASTAPI = "prometheus-fastapi-instrumentator, which vLLM mounts; the same recordings"


def _gauge(name: str, help_text: str, *labels: str, since: Release | None = None) -> Metric:
    return _metric("gauge", name, help_text, labels or ENGINE, since)


def _counter(name: str, help_text: str, *labels: str, since: Release | None = None) -> Metric:
    return _metric("counter", name, help_text, labels or ENGINE, since)


def _histogram(name: str, help_text: str, *labels: str, since: Release | None = None) -> Metric:
    return _metric("histogram", name, help_text, labels or ENGINE, since)


def _metric(
    kind: Literal["counter", "gauge", "histogram"],
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    since: Release | None,
) -> Metric:
    return Metric(
        name=f"vllm:{name}",
        job=Job.VLLM,
        type=kind,
        help=help_text,
        labels=labels,
        since=since,
        source=READ,
    )


LOAD = (
    _gauge("num_requests_running", "Requests that the engine works on now"),
    _gauge("num_requests_waiting", "Requests that wait for the engine"),
    _gauge(
        "num_requests_waiting_by_reason",
        "Waiting requests by reason: capacity (no room) or deferred (LoRA, KV transfer)",
        *ENGINE,
        "reason",
        since=(0, 20),
    ),
    _gauge("kv_cache_usage_perc", "Share of the KV cache that is in use, 0 to 1 despite its name"),
    _counter(
        "num_preemptions_total",
        "Requests that lost their KV cache to others and had to be computed again",
    ),
    _counter(
        "admission_rejections_total",
        "Requests that vLLM rejected because a queue limit was reached, by reason of the rejection",
        "model_name",
        "reason",
        since=(0, 32),
    ),
    _gauge(
        "engine_sleep_state",
        "Whether the engine is in a sleep state (1), one series for each of them",
        *ENGINE,
        "sleep_state",
    ),
)

THROUGHPUT = (
    _counter("prompt_tokens_total", "Prompt tokens, counted when the whole prompt is computed"),
    _counter("generation_tokens_total", "Tokens generated"),
    _counter(
        "prompt_tokens_cached_total",
        "Prompt tokens that were not computed, because a cache had them",
    ),
    _counter("prefix_cache_queries_total", "Tokens that were looked up in the prefix cache"),
    _counter("prefix_cache_hits_total", "Tokens that the prefix cache had"),
    _counter(
        "request_success_total",
        "Requests that ended, by finished_reason (stop, length, abort, error, repetition)",
        *ENGINE,
        "finished_reason",
    ),
    _histogram(
        "iteration_tokens_total",
        "Tokens per engine step that produced any; the count is the number of such steps",
    ),
)

LATENCY = (
    _histogram("time_to_first_token_seconds", "From a request's arrival to its first token"),
    _histogram("inter_token_latency_seconds", "Between two tokens of a request"),
    _histogram("e2e_request_latency_seconds", "From a request's arrival to its end"),
    _histogram("request_queue_time_seconds", "How long a request waited for the engine"),
    _histogram(
        "request_prefill_time_seconds", "From the first work on a prompt to its first token"
    ),
    _histogram("request_decode_time_seconds", "From the first to the last token of a request"),
    _histogram("request_prompt_tokens", "Tokens of a request's prompt"),
    _histogram("request_generation_tokens", "Tokens that a request generated"),
)

# Values that do not change while a server runs.
SETUP = (
    _gauge(
        "cache_config_info",
        "Always 1; its labels say how the KV cache was set up, num_gpu_blocks among them",
        "engine",
    ),
)

HTTP = (
    Metric(
        name="http_requests_total",
        job=Job.VLLM,
        type="counter",
        help="Requests answered by handler and class of status (2xx, 4xx, 5xx); probes are not "
        "counted, and a class appears with its first answer",
        labels=("handler", "method", "status"),
        source=FASTAPI,
    ),
)

METRICS: tuple[Metric, ...] = (*LOAD, *THROUGHPUT, *LATENCY, *SETUP, *HTTP)

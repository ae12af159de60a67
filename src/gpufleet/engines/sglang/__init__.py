"""SGLang: https://docs.sglang.io"""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.engines.engine import (
    Engine,
    FlagRules,
    Launcher,
    Measure,
    ProgressMetrics,
    ResponseCounter,
)
from gpufleet.engines.sglang import (
    sglang_arguments,
    sglang_check,
    sglang_rank,
    sglang_schemas,
    sglang_variables,
)
from gpufleet.remote import payload

ENGINE = Engine(
    name="sglang",
    title="SGLang",
    prefix="sglang:",
    program="bin/sglang serve",
    launcher=Launcher(
        node_paths.SGLANG_LAUNCHER,
        lambda _: payload.source("serving/sglang_serve").encode(),
        lambda release: (f"{release}/bin/python", node_paths.SGLANG_LAUNCHER),
    ),
    flags=FlagRules(
        sglang_schemas.versions,
        sglang_schemas.load,
        lambda schema, argv, _: sglang_check.check(schema, argv),
    ),
    arguments=sglang_arguments.lines,
    environment=sglang_variables.environment,
    replica_variables=sglang_variables.offline_variables,
    rank=sglang_rank.rank,
    # srt/observability of 0.5.23, and the /metrics of a server after five requests
    # (docs/develop/sglang.md).
    metrics={
        Measure.RUNNING: ("sglang:num_running_reqs",),
        Measure.WAITING: ("sglang:num_queue_reqs",),
        # Requests that wait for a grammar are counted by a different metric
        # (num_grammar_queue_reqs).
        Measure.WAITING_BY_REASON: ("sglang:num_queue_reqs",),
        Measure.KV_USE: ("sglang:token_usage",),
        Measure.PREEMPTED: ("sglang:num_retracted_requests_total",),
        Measure.FINISHED: ("sglang:num_requests_total",),
        Measure.PROMPT_TOKENS: ("sglang:prompt_tokens_histogram",),
        Measure.TTFT: ("sglang:time_to_first_token_seconds",),
        Measure.ITL: ("sglang:inter_token_latency_seconds",),
        Measure.E2E: ("sglang:e2e_request_latency_seconds",),
        Measure.QUEUE_TIME: ("sglang:queue_time_seconds",),
        Measure.GENERATED_TOKENS: ("sglang:generation_tokens_histogram",),
        Measure.PROGRESS: ("sglang:realtime_tokens_total",),
        Measure.PROMPT_TOKENS_TOTAL: ("sglang:prompt_tokens_total",),
        Measure.GENERATED: ("sglang:generation_tokens_total",),
        Measure.PREFIX_HITS: ("sglang:cached_tokens_total",),
    },
    responses=ResponseCounter(
        "sglang:http_responses_total", "endpoint", "status_code", "sglang:num_running_reqs"
    ),
    # The counters of tokens increase when a request ends. `realtime_tokens_total` and the gauges
    # are updated while a request runs, every 40 decoding steps.
    progress=ProgressMetrics(
        marks=(
            "sglang:realtime_tokens_total",
            "sglang:prompt_tokens_total",
            "sglang:generation_tokens_total",
            "sglang:num_requests_total",
            "sglang:num_running_reqs",
            "sglang:num_queue_reqs",
            "sglang:token_usage",
        ),
        work=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        # The counters of the server have no label for the rank, but the counters of its scheduler
        # have one.
        engine_label="",
    ),
)

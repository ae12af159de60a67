"""vLLM: https://docs.vllm.ai"""

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
from gpufleet.engines.vllm import launch_arguments, launch_environment
from gpufleet.flags import check, schema
from gpufleet.templates import read_template

ENGINE = Engine(
    name="vllm",
    title="vLLM",
    prefix="vllm:",
    program="bin/vllm serve",
    launcher=Launcher(
        node_paths.LAUNCHER,
        lambda templates: read_template("vllm/vllm-serve.sh", templates).encode(),
        lambda _: (node_paths.LAUNCHER,),
        of_ranks=True,  # Ray, too, gets the key from it
    ),
    flags=FlagRules(schema.versions, schema.load, check.check),
    arguments=launch_arguments.lines,
    environment=launch_environment.environment,
    replica_variables=launch_environment.offline_variables,
    rank=launch_environment.rank,
    # vllm/v1/metrics/loggers.py; the same in all releases since 0.18
    # (monitoring/metrics/vllm_metrics.py, which tests hold against recordings).
    metrics={
        Measure.RUNNING: ("vllm:num_requests_running",),
        Measure.WAITING: ("vllm:num_requests_waiting",),
        Measure.KV_USE: ("vllm:kv_cache_usage_perc",),
        Measure.PREEMPTED: ("vllm:num_preemptions_total",),
        Measure.FINISHED: ("vllm:request_success_total",),
        Measure.PROMPT_TOKENS: ("vllm:request_prompt_tokens",),
        Measure.TTFT: ("vllm:time_to_first_token_seconds",),
        # The second name is the older one, which releases since 0.12 no longer have.
        Measure.ITL: ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        Measure.E2E: ("vllm:e2e_request_latency_seconds",),
        Measure.QUEUE_TIME: ("vllm:request_queue_time_seconds",),
        Measure.GENERATED_TOKENS: ("vllm:request_generation_tokens",),
        Measure.PROGRESS: ("vllm:iteration_tokens_total_count",),
        Measure.WAITING_BY_REASON: ("vllm:num_requests_waiting_by_reason",),
        Measure.REJECTED: ("vllm:admission_rejections_total",),
        Measure.PROMPT_TOKENS_TOTAL: ("vllm:prompt_tokens_total",),
        Measure.GENERATED: ("vllm:generation_tokens_total",),
        Measure.PREFIX_QUERIES: ("vllm:prefix_cache_queries_total",),
        Measure.PREFIX_HITS: ("vllm:prefix_cache_hits_total",),
    },
    # prometheus-fastapi-instrumentator, which every release from 0.4.2 to 0.33 uses.
    responses=ResponseCounter(
        "http_requests_total", "handler", "status", "http_request_duration_highr_seconds_count"
    ),
    # The tokens of a prompt are counted when the whole prompt was computed, and iterations are
    # counted only then as well. While a long prompt is computed in parts, only the usage of the KV
    # cache changes (vllm/v1/engine/async_llm.py of 0.32: no iteration statistics without outputs).
    # The list has the names of all releases from 0.4.2 to 0.33.
    progress=ProgressMetrics(
        marks=(
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:iteration_tokens_total_count",
            "vllm:num_preemptions_total",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:num_requests_swapped",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
        ),
        work=(
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:num_requests_swapped",
        ),
        engine_label="engine",
        # These requests wait for the KV cache of another stage, or for a grammar. They may wait for
        # a long time although the engine works.
        deferred=("vllm:num_requests_waiting_by_reason", "reason", "deferred"),
        awake=("vllm:engine_sleep_state", "sleep_state", "awake"),
    ),
)

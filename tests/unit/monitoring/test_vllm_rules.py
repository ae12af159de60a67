"""Alerts on vLLM: each fires where clients are hurt, and not for what only looks like it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpufleet.engines.engine import engine
from gpufleet.monitoring.rules import vllm_rules
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from gpufleet.network import haproxy
from gpufleet.settings.monitoring_settings import Objectives
from tests.unit.monitoring.promtool import Case, Firing, run, too_early

OBJECTIVES = {
    "tiny": Objectives(
        ttft_p99_seconds=2.0, itl_p99_seconds=0.1, e2e_p99_seconds=4.0, error_ratio=0.01
    ),
    "silent": Objectives(),
}
MINUTE = 60
TARGET = {"instance": "gpu-01", "job": "vllm", "stage": "tiny-0", "model": "tiny"}
STAGE = {"instance": "gpu-01", "stage": "tiny-0", "model": "tiny"}
UNIT = {"instance": "gpu-01", "stage": "tiny-0"}
UP = 'up{instance="gpu-01",job="vllm",stage="tiny-0",model="tiny"}'
TOOK = 'scrape_duration_seconds{instance="gpu-01",job="vllm",stage="tiny-0",model="tiny"}'
ACTIVE = 'gpufleet_stage_active{instance="gpu-01",job="node",stage="tiny-0"}'
RESTARTS = 'gpufleet_stage_restarts_total{instance="gpu-01",job="node",stage="tiny-0"}'
NODE_UP = 'up{instance="gpu-01",job="node"}'


def vllm(name: str, **labels: str) -> str:
    """Write a series of the stage; `labels` replace its own or are more."""
    every = {**TARGET, "engine": "0", "model_name": "tiny", **labels}
    written = ",".join(f'{key}="{value}"' for key, value in every.items())
    return f"vllm:{name}{{{written}}}"


def watchdog(name: str, stage: str = "tiny-0") -> str:
    """Write a series of the watchdog's."""
    own = f',stage="{stage}"' if stage else ""
    return f'gpufleet_watchdog_{name}{{instance="gpu-01",job="node"{own}}}'


def http(status: str, handler: str = "/v1/chat/completions") -> str:
    """Write a series of HTTP answers."""
    return (
        'http_requests_total{instance="gpu-01",job="vllm",stage="tiny-0",model="tiny",'
        f'handler="{handler}",method="POST",status="{status}"}}'
    )


def work(  # what a server tells of itself
    *,
    running: str = "3x60",
    waiting: str = "0x60",
    tokens: str = "100x60",
    kv: str = "0.5x60",
    prompts: str = "1000x60",
    iterations: str = "50x60",
    **labels: str,
) -> dict[str, str]:
    """Write what tells of a server's work; as it comes, of one that stands still."""
    return {
        vllm("num_requests_running", **labels): running,
        vllm("num_requests_waiting", **labels): waiting,
        vllm("num_requests_waiting_by_reason", reason="capacity", **labels): waiting,
        vllm("num_requests_waiting_by_reason", reason="deferred", **labels): "0x60",
        vllm("generation_tokens_total", **labels): tokens,
        vllm("prompt_tokens_total", **labels): prompts,
        vllm("iteration_tokens_total_count", **labels): iterations,
        vllm("kv_cache_usage_perc", **labels): kv,
        vllm("num_preemptions_total", **labels): "0x60",
    }


def latencies(name: str, fast: int, slow: int, **labels: str) -> dict[str, str]:
    """Write a histogram that gains `fast` below 0.05 s and `slow` between 5 and 10 s a minute."""
    upper = {"0.05": fast, "1.0": fast, "5.0": fast, "10.0": fast + slow, "+Inf": fast + slow}
    buckets = {
        vllm(f"{name}_bucket", le=bound, **labels): f"0+{gain}x60" for bound, gain in upper.items()
    }
    return {**buckets, vllm(f"{name}_count", **labels): f"0+{fast + slow}x60"}


ENGINE = {**STAGE, "engine": "0"}
STUCK = Firing(
    ENGINE,
    "gpu-01: stage tiny-0 has 3 requests but has made no progress for 5 minutes",
)

RUNS = (
    Case(
        "VllmDown",
        "the unit failed",
        {ACTIVE: "1x5 0x60", UP: "1x5 0x60"},
        at=15 * MINUTE,
        fires=(Firing(UNIT, "gpu-01: the unit of stage tiny-0 is not running"),),
    ),
    Case(
        "VllmDown",
        "the unit of a rank on another node, which has no endpoint, failed",
        {ACTIVE.replace("gpu-01", "gpu-02"): "0x60", ACTIVE: "1x60", UP: "1x60"},
        at=15 * MINUTE,
        fires=(
            Firing(
                {**UNIT, "instance": "gpu-02"}, "gpu-02: the unit of stage tiny-0 is not running"
            ),
        ),
    ),
    Case(
        "VllmDown",
        "a model that loads for 20 minutes: its unit runs, its port is closed",
        {ACTIVE: "1x60", UP: "0x20 1x40"},
        at=19 * MINUTE,
    ),
    Case(
        "VllmDown",
        "a restart of two minutes",
        {ACTIVE: "1x5 0x1 1x60", UP: "1x5 0x20 1x60"},
        at=11 * MINUTE,
    ),
    Case(
        "VllmDown",
        "it answers: the facts are old",
        {ACTIVE: "0x60", UP: "1x60"},
        at=15 * MINUTE,
    ),
    Case(
        "VllmUnresponsive",
        "it takes the connection and lets the scrape run into its timeout",
        {UP: "1x5 0x60", TOOK: "0.01x5 10x60", NODE_UP: "1x60"},
        at=10 * MINUTE,
        fires=(Firing(TARGET, "gpu-01: stage tiny-0 accepts connections but does not answer"),),
    ),
    Case(
        "VllmUnresponsive",
        "a model that loads for 20 minutes: the connection is refused at once",
        {UP: "0x20 1x40", TOOK: "0.0004x60", NODE_UP: "1x60"},
        at=19 * MINUTE,
    ),
    Case(
        "VllmUnresponsive",
        "the whole node is away: NodeDown says so",
        {UP: "0x60", TOOK: "10x60", NODE_UP: "0x60"},
        at=19 * MINUTE,
    ),
    Case(
        "VllmNotReady",
        "half an hour and no answer",
        {ACTIVE: "1x60", UP: "0x60"},
        at=31 * MINUTE,
        fires=(Firing(STAGE, "gpu-01: stage tiny-0 has not been ready for half an hour"),),
    ),
    Case(
        "VllmNotReady",
        "one of two servers of a stage",
        {
            UP.replace("}", ',server="1"}'): "1x60",
            UP.replace("}", ',server="2"}'): "0x60",
            ACTIVE: "1x60",
        },
        at=31 * MINUTE,
        fires=(
            Firing(
                {**STAGE, "server": "2"}, "gpu-01: stage tiny-0 has not been ready for half an hour"
            ),
        ),
    ),
    Case(
        "VllmNotReady",
        "a model that loads for 20 minutes",
        {ACTIVE: "1x60", UP: "0x20 1x40"},
        at=20 * MINUTE,
    ),
    Case(
        "VllmNotReady",
        "its unit does not run: VllmDown says so",
        {ACTIVE: "0x60", UP: "0x60"},
        at=40 * MINUTE,
    ),
    Case(
        "VllmRestartLoop",
        "three restarts in half an hour",
        {RESTARTS: "0x10 1x4 2x4 3x60"},
        at=25 * MINUTE,
        fires=(Firing(UNIT, "gpu-01: stage tiny-0 restarts again and again"),),
    ),
    Case(
        "VllmRestartLoop",
        "the watchdog restarts it a third time in an hour",
        {watchdog("restarts_total"): "0x10 1x10 2x10 3x60"},
        at=35 * MINUTE,
        fires=(Firing(UNIT, "gpu-01: stage tiny-0 restarts again and again"),),
    ),
    Case("VllmRestartLoop", "two restarts", {RESTARTS: "0x10 1x4 2x60"}, at=25 * MINUTE),
    Case(
        "VllmRestartLoop",
        "the count begins anew, for somebody started the unit by hand",
        {RESTARTS: "7x10 0x60"},
        at=15 * MINUTE,
    ),
    Case("VllmRestartLoop", "a first scrape that finds many", {RESTARTS: "_x5 9x60"}, at=900),
)

MOVES = (
    Case(
        "VllmNoProgress",
        "requests run and nothing moves, while every scrape succeeds",
        {**work(), UP: "1x60"},
        at=10 * MINUTE,
        fires=(STUCK,),
    ),
    Case(
        "VllmNoProgress",
        "nothing runs, but requests wait for room and nothing moves",
        work(running="0x60", waiting="3x60"),
        at=10 * MINUTE,
        fires=(STUCK,),
    ),
    Case(
        "VllmNoProgress",
        "a release before 0.20, which does not tell why requests wait",
        {series: values for series, values in work().items() if "waiting_by_reason" not in series},
        at=10 * MINUTE,
        fires=(STUCK,),
    ),
    Case(
        "VllmNoProgress",
        "one of two engines stands still; the other one is well",
        {**work(), **work(tokens="0+500x60", iterations="0+50x60", engine="1")},
        at=10 * MINUTE,
        fires=(STUCK,),
    ),
    Case(
        "VllmNoProgress",
        "one of a stage's two servers stands still",
        {
            **work(server="1"),
            **work(tokens="0+500x60", iterations="0+50x60", server="2"),
        },
        at=10 * MINUTE,
        fires=(Firing({**ENGINE, "server": "1"}, STUCK.summary),),
    ),
    Case(
        "VllmNoProgress",
        "saturated for an hour: a full cache, a long queue, few tokens",
        work(running="256x60", waiting="900x60", tokens="0+3x60", kv="1x60"),
        at=50 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "a long prompt in parts: only the KV cache moves",
        work(running="1x60", kv="0.01+0.01x60"),
        at=20 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "prompts alone: of a stage that hands its KV cache over",
        work(prompts="0+9000x60"),
        at=20 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "iterations alone",
        work(iterations="0+1x60"),
        at=20 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "requests are thrown out, and come in again",
        {**work(), vllm("num_preemptions_total"): "0+1x60"},
        at=20 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "requests end without a token, for their clients went away",
        work(running="60-1x60"),
        at=20 * MINUTE,
    ),
    Case("VllmNoProgress", "no requests at all", work(running="0x60"), at=20 * MINUTE),
    Case(
        "VllmNoProgress",
        "requests wait for another stage's KV cache, none for room",
        {
            **work(running="0x60"),
            vllm("num_requests_waiting", engine="0"): "4x60",
            vllm("num_requests_waiting_by_reason", reason="deferred"): "4x60",
        },
        at=20 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "a model that loads for 20 minutes after it stood at three requests",
        {
            series: f"{values.split('x', maxsplit=1)[0]}x5 stale"
            for series, values in work().items()
        },
        at=15 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "a restart: counters begin anew and go on",
        work(tokens="90000x3 0+40x60", iterations="3000x3 0+10x60", running="3x3 0x2 3x60"),
        at=8 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "the served name changed with a restart",
        {
            **{
                series: f"{values.split('x', maxsplit=1)[0]}x5 stale"
                for series, values in work().items()
            },
            **{
                series: f"_x6 {values}"
                for series, values in work(
                    tokens="0+40x60", iterations="0+10x60", model_name="tiny-v2"
                ).items()
            },
        },
        at=8 * MINUTE,
    ),
    Case(
        "VllmStalled",
        "the watchdog says so",
        {watchdog("stalled"): "0x5 1x60", watchdog("timestamp_seconds", ""): "0+60x60"},
        at=10 * MINUTE,
        fires=(Firing(UNIT, "gpu-01: the watchdog reports that stage tiny-0 is stalled"),),
    ),
    Case(
        "VllmStalled",
        "it is well",
        {watchdog("stalled"): "0x60", watchdog("timestamp_seconds", ""): "0+60x60"},
        at=10 * MINUTE,
    ),
    Case(
        "VllmStalled",
        "the last word of a watchdog that is dead",
        {watchdog("stalled"): "1x60", watchdog("timestamp_seconds", ""): "0+60x3 180x60"},
        at=10 * MINUTE,
    ),
    Case(
        "VllmRestartedByWatchdog",
        "it did",
        {watchdog("restarts_total"): "0x10 1x60"},
        at=20 * MINUTE,
        fires=(Firing(UNIT, "gpu-01: the watchdog restarted stage tiny-0"),),
    ),
    Case(
        "VllmRestartedByWatchdog",
        "it did, more than an hour ago",
        {watchdog("restarts_total"): "0x10 1x120"},
        at=80 * MINUTE,
    ),
    Case(
        "VllmWatchdogSilent",
        "it looked last ten minutes ago",
        {watchdog("timestamp_seconds", ""): "0+60x10 600x60"},
        at=22 * MINUTE,
        fires=(
            Firing({"instance": "gpu-01"}, "gpu-01: the watchdog has written nothing for 12m 0s"),
        ),
    ),
    Case(
        "VllmWatchdogSilent",
        "it looks every two minutes",
        {watchdog("timestamp_seconds", ""): "0x2 0+60x60"},
        at=22 * MINUTE,
    ),
)

FULL = (
    Case(
        "VllmKvCacheSaturated",
        "86 of 100 and a queue, for 20 minutes",
        work(kv="0.86x60", waiting="2x60", tokens="0+9x60"),
        at=20 * MINUTE,
        fires=(Firing(STAGE, "gpu-01: the KV cache of stage tiny-0 is at 86%, and requests wait"),),
    ),
    Case(
        "VllmKvCacheSaturated",
        "one of two engines",
        {**work(kv="0.9x60", waiting="1x60"), **work(kv="0.1x60", engine="1")},
        at=20 * MINUTE,
        fires=(Firing(STAGE, "gpu-01: the KV cache of stage tiny-0 is at 90%, and requests wait"),),
    ),
    Case(
        "VllmKvCacheSaturated",
        "well used, and nobody waits",
        work(kv="0.97x60", tokens="0+9x60"),
        at=40 * MINUTE,
    ),
    Case(
        "VllmKvCacheSaturated",
        "it falls for a moment whenever a request ends",
        work(kv="0.99x4 0.5 0.99x4 0.5 0.99x4 0.5 0.99x9", waiting="2x60", tokens="0+9x60"),
        at=20 * MINUTE,
        fires=(
            Firing(STAGE, "gpu-01: the KV cache of stage tiny-0 is at 90.83%, and requests wait"),
        ),
    ),
    Case(
        "VllmKvCacheSaturated",
        "nobody waits for most of the time",
        work(kv="0.97x60", waiting="0 0 0 2x60", tokens="0+9x60"),
        at=11 * MINUTE,
    ),
    Case(
        "VllmKvCacheSaturated",
        "a burst of ten minutes",
        work(kv="0.5x5 0.99x10 0.4x60", waiting="0x5 40x10 0x60", tokens="0+9x60"),
        at=16 * MINUTE,
    ),
    Case(
        "VllmKvCacheFull",
        "full, a queue, and requests push each other out",
        {
            **work(kv="0.99x60", waiting="50x60", tokens="0+9x60"),
            vllm("num_preemptions_total"): "0+4x60",
        },
        at=25 * MINUTE,
        fires=(
            Firing(
                STAGE,
                "gpu-01: the KV cache of stage tiny-0 is full, and requests preempt each other",
            ),
        ),
    ),
    Case(
        "VllmKvCacheFull",
        "full, and nobody is pushed out: a saturated server that gets on",
        work(kv="1x60", waiting="50x60", tokens="0+9x60"),
        at=50 * MINUTE,
    ),
    Case(
        "VllmQueueGrows",
        "ten more every minute",
        work(waiting="0+10x60", tokens="0+9x60"),
        at=30 * MINUTE,
        fires=(Firing(STAGE, "gpu-01: 300 requests wait for stage tiny-0, and the queue grows"),),
    ),
    Case(
        "VllmQueueGrows",
        "a batch of a thousand that is worked off",
        work(waiting="1000-15x60", tokens="0+9x60"),
        at=30 * MINUTE,
    ),
    Case(
        "VllmQueueGrows",
        "a queue that is as long as before",
        work(waiting="100x60", tokens="0+9x60"),
        at=30 * MINUTE,
    ),
    Case(
        "VllmQueueGrows",
        "it grows, and is short for so many that run",
        work(running="64x60", waiting="0+1x60", tokens="0+9x60"),
        at=50 * MINUTE,
    ),
    Case(
        "VllmQueueGrows",
        "from seven to eighteen in an hour",
        work(waiting="7+0.2x60", tokens="0+9x60"),
        at=50 * MINUTE,
    ),
    Case(
        "VllmPreemptions",
        "three in fifteen minutes",
        {
            vllm("num_preemptions_total"): "0+0.2x60",
            vllm("request_success_total", finished_reason="stop"): "0x60",
        },
        at=40 * MINUTE,
    ),
    Case(
        "VllmPreemptions",
        "one of four requests",
        {
            vllm("num_preemptions_total"): "0+1x60",
            vllm("request_success_total", finished_reason="stop"): "0+4x60",
        },
        at=40 * MINUTE,
        fires=(
            Firing(
                STAGE,
                "gpu-01: stage tiny-0 preempted 15 requests in 15 minutes",
            ),
        ),
    ),
    Case(
        "VllmPreemptions",
        "one of fifty requests",
        {
            vllm("num_preemptions_total"): "0+1x60",
            vllm("request_success_total", finished_reason="stop"): "0+50x60",
        },
        at=40 * MINUTE,
    ),
    Case(
        "VllmPreemptions",
        "none, and no requests either",
        {
            vllm("num_preemptions_total"): "0x60",
            vllm("request_success_total", finished_reason="stop"): "0x60",
        },
        at=40 * MINUTE,
    ),
    Case(
        "VllmPreemptions",
        "many of them, of before a restart",
        {
            vllm("num_preemptions_total"): "5000x10 0x60",
            vllm("request_success_total", finished_reason="stop"): "90000x10 0x60",
        },
        at=40 * MINUTE,
    ),
    Case(
        "VllmTurnsRequestsAway",
        "two a minute",
        {vllm("admission_rejections_total", reason="max_num_queued_reqs"): "0+2x60"},
        at=30 * MINUTE,
        fires=(Firing(STAGE, "gpu-01: stage tiny-0 rejected 20 requests in 10 minutes"),),
    ),
    Case(
        "VllmTurnsRequestsAway",
        "none",
        {vllm("admission_rejections_total", reason="max_num_queued_reqs"): "0x60"},
        at=30 * MINUTE,
    ),
)

OTHER_MODEL = {"stage": "silent-0", "model": "silent", "model_name": "silent"}
PROMISED = (
    Case(
        "VllmTtftAboveObjective",
        "two of a hundred wait for 5 to 10 seconds, over two stages",
        {
            **latencies("time_to_first_token_seconds", fast=98, slow=0),
            **latencies("time_to_first_token_seconds", fast=0, slow=2, stage="tiny-1"),
        },
        at=30 * MINUTE,
        fires=(
            Firing(
                {"model": "tiny"},
                "tiny: 1 % of the requests wait longer than 7.5s for their first token",
            ),
        ),
    ),
    Case(
        "VllmTtftAboveObjective",
        "all are fast",
        latencies("time_to_first_token_seconds", fast=100, slow=0),
        at=30 * MINUTE,
    ),
    Case(
        "VllmTtftAboveObjective",
        "slow, but five requests a minute: the p99 would be one request",
        latencies("time_to_first_token_seconds", fast=4, slow=1),
        at=30 * MINUTE,
    ),
    Case(
        "VllmTtftAboveObjective",
        "no traffic: its p99 is not a number",
        latencies("time_to_first_token_seconds", fast=0, slow=0),
        at=30 * MINUTE,
    ),
    Case(
        "VllmTtftAboveObjective",
        "another model, to whose clients nothing was promised",
        latencies("time_to_first_token_seconds", fast=0, slow=100, **OTHER_MODEL),
        at=30 * MINUTE,
    ),
    Case(
        "VllmTtftAboveObjective",
        "all were fast, and a restart begins the counts anew",
        {
            series: values.replace("x60", "x20 " + values)
            for series, values in latencies("time_to_first_token_seconds", fast=100, slow=0).items()
        },
        at=30 * MINUTE,
    ),
    Case(
        "VllmItlAboveObjective",
        "two tokens of a hundred come after 5 to 10 seconds",
        latencies("inter_token_latency_seconds", fast=980, slow=20),
        at=30 * MINUTE,
        fires=(
            Firing(
                {"model": "tiny"},
                "tiny: 1 % of the tokens come more than 7.5s after the previous token",
            ),
        ),
    ),
    Case(
        "VllmItlAboveObjective",
        "all are fast",
        latencies("inter_token_latency_seconds", fast=1000, slow=0),
        at=30 * MINUTE,
    ),
    Case(
        "VllmItlAboveObjective",
        "too few tokens for a p99",
        latencies("inter_token_latency_seconds", fast=40, slow=5),
        at=30 * MINUTE,
    ),
    Case(
        "VllmE2eAboveObjective",
        "two of a hundred take 5 to 10 seconds to their last token, over two stages",
        {
            **latencies("e2e_request_latency_seconds", fast=98, slow=0),
            **latencies("e2e_request_latency_seconds", fast=0, slow=2, stage="tiny-1"),
        },
        at=30 * MINUTE,
        fires=(
            Firing(
                {"model": "tiny"},
                "tiny: 1 % of the requests take longer than 7.5s until their last token",
            ),
        ),
    ),
    Case(
        "VllmE2eAboveObjective",
        "all are fast",
        latencies("e2e_request_latency_seconds", fast=100, slow=0),
        at=30 * MINUTE,
    ),
    Case(
        "VllmE2eAboveObjective",
        "slow, but five requests a minute: the p99 would be one request",
        latencies("e2e_request_latency_seconds", fast=4, slow=1),
        at=30 * MINUTE,
    ),
    Case(
        "VllmE2eAboveObjective",
        "another model, to whose clients nothing was promised",
        latencies("e2e_request_latency_seconds", fast=0, slow=100, **OTHER_MODEL),
        at=30 * MINUTE,
    ),
    Case(
        "VllmErrors",
        "two of a hundred answers are 5xx",
        {http("2xx"): "0+98x60", http("5xx"): "0+2x60"},
        at=30 * MINUTE,
        fires=(Firing({"model": "tiny"}, "tiny: 2% of the requests end in a server error"),),
    ),
    Case(
        "VllmErrors",
        "streams that began with 200 break off",
        {
            http("2xx"): "0+100x60",
            vllm("request_success_total", finished_reason="stop"): "0+95x60",
            vllm("request_success_total", finished_reason="error"): "0+5x60",
        },
        at=30 * MINUTE,
        fires=(Firing({"model": "tiny"}, "tiny: 5% of the requests end in a server error"),),
    ),
    Case(
        "VllmErrors",
        "half of the clients ask for what there is not",
        {http("2xx"): "0+50x60", http("4xx"): "0+50x60", http("5xx"): "0x60"},
        at=30 * MINUTE,
    ),
    Case(
        "VllmErrors",
        "clients go away, and answers end at their length",
        {
            http("2xx"): "0+100x60",
            vllm("request_success_total", finished_reason="abort"): "0+50x60",
            vllm("request_success_total", finished_reason="length"): "0+50x60",
            vllm("request_success_total", finished_reason="error"): "0x60",
        },
        at=30 * MINUTE,
    ),
    Case(
        "VllmErrors",
        "four of forty: too few to say",
        {http("2xx"): "0x25 36x60", http("5xx"): "0x25 4x60"},
        at=33 * MINUTE,
    ),
    Case(
        "VllmErrors",
        "no traffic: nothing divided by nothing",
        {http("2xx"): "5x60", http("5xx"): "5x60"},
        at=30 * MINUTE,
    ),
    Case(
        "VllmErrors",
        "a restart: both counts begin anew",
        {http("2xx"): "90000x10 0+100x60", http("5xx"): "800x10 0x60"},
        at=20 * MINUTE,
    ),
)

# A model that does not complete text: no token is ever generated, and an encoder has no KV cache.
PATHS = (*haproxy.PATHS, "/v1/embeddings", "/v1/audio/transcriptions")
IDLE_CACHE = {"tokens": "0x60", "kv": "0x60", "iterations": "0x60"}
EMBEDS = {
    **work(running="8x60", waiting="20x60", prompts="0+9000x60", **IDLE_CACHE),
    **latencies("time_to_first_token_seconds", fast=100, slow=0),
    **latencies("e2e_request_latency_seconds", fast=100, slow=0),
    vllm("inter_token_latency_seconds_bucket", le="+Inf"): "0x60",
    vllm("inter_token_latency_seconds_count"): "0x60",
    vllm("request_success_total", finished_reason="stop"): "0+100x60",
    vllm("request_success_total", finished_reason="error"): "0x60",
    http("2xx", "/v1/embeddings"): "0+100x60",
}
POOLING = (
    Case(
        "VllmNoProgress",
        "an embedder at work: prompts alone move",
        work(running="8x60", waiting="20x60", prompts="0+9000x60", **IDLE_CACHE),
        at=20 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "an embedder that has nothing to do",
        work(running="0x60", **IDLE_CACHE),
        at=20 * MINUTE,
    ),
    Case(
        "VllmNoProgress",
        "an embedder that stands still",
        work(**IDLE_CACHE),
        at=10 * MINUTE,
        fires=(STUCK,),
    ),
    *(
        Case(name, "an embedder at work", {**EMBEDS, UP: "1x60"}, at=30 * MINUTE)
        for name in (
            *("VllmKvCacheSaturated", "VllmKvCacheFull", "VllmPreemptions"),
            *("VllmItlAboveObjective", "VllmErrors"),
        )
    ),
    Case(
        "VllmE2eAboveObjective",
        "an embedder that is slow",
        {**EMBEDS, **latencies("e2e_request_latency_seconds", fast=98, slow=2)},
        at=30 * MINUTE,
        fires=(
            Firing(
                {"model": "tiny"},
                "tiny: 1 % of the requests take longer than 7.5s until their last token",
            ),
        ),
    ),
    *(
        Case(
            "VllmErrors",
            f"requests at {path}",
            {http("2xx", path): "0+98x60", http("5xx", path): "0+2x60"},
            at=30 * MINUTE,
            fires=(Firing({"model": "tiny"}, "tiny: 2% of the requests end in a server error"),),
        )
        for path in PATHS
    ),
    Case(
        "VllmErrors",
        "probes and tools, not clients",
        {http("2xx", "/v1/score"): "0+1x60", http("5xx", "/tokenize"): "0+9x60"},
        at=30 * MINUTE,
    ),
)

# The minute before the first firing case of each fires: it has not held for long enough.
EARLY = {
    "VllmDown": 10,
    "VllmUnresponsive": 8,
    "VllmNotReady": 29,
    "VllmNoProgress": 2,
    "VllmStalled": 6,
    "VllmWatchdogSilent": 20,
    "VllmKvCacheSaturated": 9,
    "VllmKvCacheFull": 10,
    "VllmQueueGrows": 11,
    "VllmPreemptions": 25,
    "VllmTurnsRequestsAway": 10,
    "VllmTtftAboveObjective": 5,
    "VllmItlAboveObjective": 5,
    "VllmE2eAboveObjective": 5,
    "VllmErrors": 6,
}


_ALL = (*RUNS, *MOVES, *FULL, *PROMISED, *POOLING)
CASES = (*_ALL, *too_early(_ALL, EARLY))


def test_alerts_on_vllm_fire_where_they_must_and_nowhere_else(tmp_path: Path) -> None:
    _, alerts = vllm_rules.rules(OBJECTIVES)
    declared = RuleSettings(objectives=OBJECTIVES, settings=frozenset({"watchdog"}))
    files = rule_files(declared)
    run(CASES, {"vllm.rules.yml": files["vllm.rules.yml"]}, alerts, tmp_path)


# Series that SGLang lacks, or has in another sense.
NOT_OF_SGLANG = {"VllmTurnsRequestsAway"}


def test_alerts_fire_for_sglang_where_they_do_for_vllm(tmp_path: Path) -> None:
    """The same cases, with the names and labels of its series."""
    _, alerts = vllm_rules.rules(OBJECTIVES)
    declared = RuleSettings(objectives=OBJECTIVES, settings=frozenset({"watchdog"}))
    files = rule_files(declared)
    cases = [of_sglang(each) for each in _ALL if each.alert not in NOT_OF_SGLANG]
    own = [each for each in cases if any("sglang:" in series for series in each.series)]
    assert {each.alert for each in own if each.fires} > {"VllmNoProgress", "VllmErrors"}
    run(own, {"vllm.rules.yml": files["vllm.rules.yml"]}, alerts, tmp_path)


def of_sglang(case: Case) -> Case:
    """Return a case with the series that SGLang would have in it."""
    series = {renamed: each for name, each in case.series.items() if (renamed := of_sglangs(name))}
    fires = [
        Firing({key: value for key, value in each.labels.items() if key != "engine"}, each.summary)
        for each in case.fires
    ]
    return replace(case, series=series, fires=tuple(fires))


def of_sglangs(series: str) -> str:
    """Return a series by SGLang's name and labels; "" if it has none of that measure."""
    name, brace, labels = series.partition("{")
    of_vllm, of_other = engine("vllm"), engine("sglang")
    counted = {of_vllm.responses.name: of_other.responses.name}
    for measure, names in of_vllm.metrics.items():
        for part in ("", "_bucket", "_count"):
            other = of_other.metrics.get(measure)
            counted |= {f"{each}{part}": f"{other[0]}{part}" if other else "" for each in names}
    if name not in counted:
        return series
    if 'reason="deferred"' in labels:
        return ""
    for old, new in (
        (",handler=", ",endpoint="),
        (',status="5xx"', ',status_code="503"'),
        (',status="2xx"', ',status_code="200"'),
        (',engine="0"', ',pp_rank="0"'),
        (',reason="capacity"', ""),
    ):
        labels = labels.replace(old, new)
    return f"{counted[name]}{brace}{labels}" if counted[name] else ""


def test_every_alert_on_vllm_has_cases_both_ways() -> None:
    _, alerts = vllm_rules.rules(OBJECTIVES)
    both = {(alert.name, fires) for alert in alerts for fires in (True, False)}

    assert {(case.alert, bool(case.fires)) for case in CASES} == both


def test_every_alert_on_vllm_that_waits_has_a_case_before_it_fires() -> None:
    _, alerts = vllm_rules.rules(OBJECTIVES)

    assert set(EARLY) == {alert.name for alert in alerts if alert.for_seconds}


def test_an_objective_that_nobody_has_makes_no_alert() -> None:
    """Not one that compares with nothing: it would look like a guard, and never fire."""
    nothing, _ = vllm_rules.rules({})
    recordings, alerts = vllm_rules.rules({"tiny": Objectives(itl_p99_seconds=0.1)})

    assert not [each for each in nothing if "objective" in each.record]
    assert [each.record for each in recordings if "objective" in each.record] == [
        "model:objective_itl_p99_seconds",
        "model:objective_error_ratio",
    ]
    assert not {"VllmTtftAboveObjective", "VllmE2eAboveObjective"} & {each.name for each in alerts}
    assert {"VllmItlAboveObjective", "VllmErrors"} <= {alert.name for alert in alerts}


def test_without_a_watchdog_there_are_no_alerts_on_it() -> None:
    text = rule_files(RuleSettings(objectives=OBJECTIVES))["vllm.rules.yml"]

    assert "alert: VllmNoProgress" in text
    assert "alert: VllmStalled" not in text
    assert "alert: VllmWatchdogSilent" not in text

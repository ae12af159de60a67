"""
Define rules on the metrics of model servers, for each stage. Pure.

The rules for models are in objective_rules and capacity_rules. The recordings `stage:*` have the
labels instance, stage and model, and the recordings `model:*` only have the label model. vLLM's own
labels `model_name` and `engine` are removed, because `model_name` changes with a served name and
`engine` with data parallelism. `engine` is kept in rules that must find a single stalled engine.

All numbers are gpufleet's own, and a comment has the reason for each. You can change or disable
each alert in `monitoring.alerts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpufleet.engines.engine import Measure
from gpufleet.engines.promql import JOBS, metric
from gpufleet.monitoring.rules import capacity_rules, objective_rules
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording
from gpufleet.settings.monitoring_settings import Objectives

_FOR_ROOM = metric(Measure.WAITING_BY_REASON, 'reason=~"|capacity"')

STAGE = ("instance", "stage", "model")
_BY_STAGE = f"by ({', '.join(STAGE)})"
_BY_ENGINE = f"by ({', '.join(STAGE)}, server, engine)"
_BY_SERVER = f"by ({', '.join(STAGE)}, server)"

# Loading 700 GB from a disk with 1 GB/s takes 12 minutes, and compiling and capturing graphs takes
# some more. The deadline of deploys, `start_seconds`, is also 1800.
LOADING_SECONDS = 1800
# While vLLM loads, connections to its port are refused, which takes milliseconds (0.33.0 binds the
# port early, but listens only when the engine is ready). With a frozen server, Prometheus waits
# until its timeout.
HANGING_SECONDS = 2
# The window in which no value has changed, and for how long that must be true: five minutes in
# all. A step of the engine takes seconds. The longest pauses between two steps, compilation for the
# first request and loading an adapter, took at most 37 s in gpufleet's measurements.
STILL = "2m"
STILL_SECONDS = 180
# From this share on, requests begin to wait for blocks of the KV cache, and long requests preempt
# others (vLLM's docs recommend to act on preemption). If no requests wait, a full cache is only
# well used.
KV_SATURATED = 0.85
KV_FULL = 0.98


def rules(
    objectives: Mapping[str, Objectives], measured: Iterable[MeasuredReplica] = ()
) -> tuple[tuple[Recording, ...], tuple[Alert, ...]]:
    """
    Return the recordings and alerts for the declared objectives, `{model: its objectives}`, and for
    measured replicas.

    If no model has a certain objective, there is no recording and no alert for it. Without measured
    replicas, there is no recording and no alert for capacity.
    """
    promised, held = objective_rules.rules(objectives)
    carried, near = capacity_rules.rules(measured)
    return (*STAGES, *promised, *carried), (*ALERTS, *held, *near)


# Of a stage

STAGES = (
    Recording(
        "stage:requests_running:sum",
        f"sum {_BY_STAGE} ({metric(Measure.RUNNING)})",
        "number of requests that a stage is processing",
        STAGE,
    ),
    Recording(
        "stage:requests_waiting:sum",
        f"sum {_BY_STAGE} ({metric(Measure.WAITING)})",
        "number of requests that wait for a stage",
        STAGE,
    ),
    Recording(
        "stage:kv_cache_usage:max",
        f"max {_BY_STAGE} ({metric(Measure.KV_USE)})",
        "share of the KV cache in use on the stage's fullest engine, 0 to 1",
        STAGE,
    ),
    Recording(
        "stage:ttft_seconds:p99_5m",
        "histogram_quantile(0.99, "
        f"sum by ({', '.join(STAGE)}, le) (rate({metric(Measure.TTFT)}[5m])))",
        "p99 of a stage's time to the first token over 5 minutes, in seconds",
        STAGE,
    ),
    Recording(
        "stage:itl_seconds:p99_5m",
        "histogram_quantile(0.99, "
        f"sum by ({', '.join(STAGE)}, le) (rate({metric(Measure.ITL)}[5m])))",
        "p99 of a stage's time between two tokens over 5 minutes, in seconds",
        STAGE,
    ),
)


# Alerts


def _nothing_moved() -> str:
    """Return a suffix for a PromQL expression that keeps only engines without any progress."""
    # While a long prompt is computed in parts, only the use of the KV cache changes, because tokens
    # and iterations are counted when the prompt is complete (vllm/v1/engine/async_llm.py of 0.28 to
    # 0.32). For a model that does not generate text, only the counts of prompts change. A counter
    # that restarts has also changed.
    others = (
        metric(Measure.PROMPT_TOKENS_TOTAL),
        metric(Measure.PROGRESS),
        metric(Measure.PREEMPTED),
        metric(Measure.KV_USE),
        metric(Measure.RUNNING),
        metric(Measure.WAITING),
    )
    return f" and sum {_BY_ENGINE} (changes({metric(Measure.GENERATED)}[{STILL}])) == 0" + "".join(
        f" unless sum {_BY_ENGINE} (changes({name}[{STILL}])) > 0" for name in others
    )


_STALL_ACTION = (
    "Do not trust /health. Save the processes' stacks and logs, then restart the whole stage. "
    "The runbook has the commands."
)

ALERTS = (
    # This uses facts instead of scrapes, because the port of a server is also closed while it loads.
    Alert(
        "VllmDown",
        "max by (instance, stage) (gpufleet_stage_active) == 0"
        f" unless on (instance, stage) up{{{JOBS}}} == 1",
        AlertSeverity.PAGE,
        300,  # longer than a restart by systemd (15 s), by the head of a group or by a deploy
        "{{ $labels.instance }}: the unit of stage {{ $labels.stage }} is not running",
        "Run `systemctl status` and read the unit's journal on the node. Exit code 2 means a wrong flag.",
    ),
    Alert(
        "VllmUnresponsive",
        f"(up{{{JOBS}}} == 0 and scrape_duration_seconds{{{JOBS}}} > {HANGING_SECONDS})"
        ' unless on (instance) up{job="node"} == 0',
        AlertSeverity.PAGE,
        180,  # twelve scrapes, which is longer than a pause of a process or a flapping link
        (
            "{{ $labels.instance }}: stage {{ $labels.stage }} accepts connections but "
            "does not answer"
        ),
        (
            "The stage's API server is frozen, or a firewall drops packets. First query /metrics on "
            "the node itself."
        ),
    ),
    Alert(
        "VllmNotReady",
        f"min {_BY_SERVER} (up{{{JOBS}}}) == 0"
        " unless on (instance, stage) gpufleet_stage_active == 0",
        AlertSeverity.PAGE,
        LOADING_SECONDS,
        ("{{ $labels.instance }}: stage {{ $labels.stage }} has not been ready for half an hour"),
        "The unit's journal shows how far the load has come. If the load is only slow, set a longer "
        "time in `monitoring.alerts.VllmNotReady.for_seconds`.",
    ),
    Alert(
        "VllmNoProgress",
        f"(sum {_BY_ENGINE} ({metric(Measure.RUNNING)}) > 0"
        # Requests that wait for something else ("deferred": an adapter, or the KV cache of a
        # different stage) may wait for a long time, although the engine works.
        f" or sum {_BY_ENGINE} ({_FOR_ROOM}) > 0)" + _nothing_moved(),
        AlertSeverity.PAGE,
        STILL_SECONDS,
        "{{ $labels.instance }}: stage {{ $labels.stage }} has "
        "{{ $value }} requests but has made no progress for 5 minutes",
        _STALL_ACTION,
    ),
    Alert(
        "VllmStalled",
        "max by (instance, stage) (gpufleet_watchdog_stalled) == 1"
        # If the watchdog is dead, its last value is out of date.
        " and on (instance) time() - gpufleet_watchdog_timestamp_seconds < 120",
        AlertSeverity.PAGE,
        60,  # a watchdog that may restart stages has done so by then; the others only warn
        "{{ $labels.instance }}: the watchdog reports that stage {{ $labels.stage }} is stalled",
        _STALL_ACTION,
        needs=("watchdog",),
    ),
    Alert(
        "VllmRestartedByWatchdog",
        # increase() extrapolates, so "> 0.5" means at least one.
        "sum by (instance, stage) (increase(gpufleet_watchdog_restarts_total[1h])) > 0.5",
        AlertSeverity.TICKET,
        0,
        "{{ $labels.instance }}: the watchdog restarted stage {{ $labels.stage }}",
        "The stage serves again. Use the dump on the node to find out why the stage stalled.",
        needs=("watchdog",),
    ),
    Alert(
        "VllmWatchdogSilent",
        "time() - max by (instance) (gpufleet_watchdog_timestamp_seconds) > 300",
        AlertSeverity.TICKET,
        300,
        (
            "{{ $labels.instance }}: the watchdog has written nothing for {{ $value | "
            "humanizeDuration }}"
        ),
        "Check the watchdog's unit on the node. Until the watchdog runs, only VllmNoProgress finds "
        "frozen stages, and nothing restarts them.",
        needs=("watchdog",),
    ),
    Alert(
        "VllmRestartLoop",
        # At least three: the first restart may be an accident, and the second its retry. systemd
        # gives up after five restarts in half an hour, but never for a stage that spans nodes.
        "sum by (instance, stage) (increase(gpufleet_stage_restarts_total[30m])) > 2.5"
        " or sum by (instance, stage) (increase(gpufleet_watchdog_restarts_total[1h])) > 2.5",
        AlertSeverity.PAGE,
        0,
        "{{ $labels.instance }}: stage {{ $labels.stage }} restarts again and again",
        "Read the unit's journal from before the second-last restart, because it shows the cause.",
    ),
    Alert(
        "VllmKvCacheSaturated",
        # The average is used because the value falls for a moment whenever a request ends or is
        # preempted.
        f"avg_over_time(stage:kv_cache_usage:max[5m]) >= {KV_SATURATED}"
        " and min_over_time(stage:requests_waiting:sum[5m]) > 0",
        AlertSeverity.TICKET,
        600,  # 15 minutes together with the average, which is longer than a burst of long prompts
        "{{ $labels.instance }}: the KV cache of stage {{ $labels.stage }} is at "
        "{{ $value | humanizePercentage }}, and requests wait",
        "Add a replica, or let each request use less KV cache: lower max-model-len or set a smaller "
        "KV cache data type.",
    ),
    Alert(
        "VllmKvCacheFull",
        f"max_over_time(stage:kv_cache_usage:max[5m]) >= {KV_FULL}"
        " and min_over_time(stage:requests_waiting:sum[5m]) > 0"
        f" and sum {_BY_STAGE} (increase({metric(Measure.PREEMPTED)}[5m])) > 0",
        AlertSeverity.PAGE,
        600,
        "{{ $labels.instance }}: the KV cache of stage {{ $labels.stage }} is full, and "
        "requests preempt each other",
        "Reject load at the gateway or add a replica now. The stage computes the same tokens twice.",
    ),
    Alert(
        "VllmQueueGrows",
        # Twice as many requests wait as run, so a new request waits as long as two requests take.
        "stage:requests_waiting:sum > 2 * stage:requests_running:sum"
        " and stage:requests_waiting:sum >= 20"
        " and deriv(stage:requests_waiting:sum[10m]) > 0",
        AlertSeverity.PAGE,
        600,
        "{{ $labels.instance }}: {{ $value }} requests wait for stage {{ $labels.stage }}, and "
        "the queue grows",
        "More requests arrive than the stage can serve. Add a replica or reject load. Check whether "
        "another replica of the model is down.",
    ),
    Alert(
        "VllmPreemptions",
        # If one of ten requests is computed twice, an additional replica would save this work.
        f"sum {_BY_STAGE} (increase({metric(Measure.PREEMPTED)}[15m])) > 10"
        f" and sum {_BY_STAGE} (increase({metric(Measure.PREEMPTED)}[15m]))"
        f" > 0.1 * sum {_BY_STAGE} (increase({metric(Measure.FINISHED)}[15m]))",
        AlertSeverity.TICKET,
        900,
        "{{ $labels.instance }}: stage {{ $labels.stage }} preempted {{ $value | humanize }} "
        "requests in 15 minutes",
        "Lower max-num-seqs or give the KV cache more memory.",
    ),
    Alert(
        "VllmTurnsRequestsAway",
        f"sum {_BY_STAGE} (increase({metric(Measure.REJECTED)}[10m])) > 0",
        AlertSeverity.TICKET,
        600,
        "{{ $labels.instance }}: stage {{ $labels.stage }} rejected {{ $value | humanize }} requests "
        "in 10 minutes",
        "The stage's queue has reached the limit set by its flags. Add a replica, or raise "
        "max-num-queued-reqs.",
    ),
)

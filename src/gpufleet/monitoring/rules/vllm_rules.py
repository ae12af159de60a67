"""Define rules on servers' metrics for each stage. Pure.

objective_rules and capacity_rules have the rules for models. `stage:` values have the labels
instance, stage and model; `model:` values have only the label model. vLLM's own labels `model_name`
and `engine` are summed away, because the first changes with a served name and the second with data
parallelism. `engine` is kept where a single engine can stall.

All numbers are gpufleet's, each with the reason in a comment. `monitoring.alerts` can change or
disable each alert.
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

# A load of 700 GB from a disk of 1 GB/s takes 12 minutes, compiling and capturing graphs some
# more; the deploy's own deadline, `start_seconds`, is 1800 as well.
LOADING_SECONDS = 1800
# A refused connection takes milliseconds, and while it loads vLLM's port refuses (0.33.0: bound
# early, listening when the engine is ready). A frozen server lets Prometheus wait for its timeout.
HANGING_SECONDS = 2
# The window in which nothing may have moved, and for how long that must be so: five minutes in
# all. A step of the engine takes seconds; the longest things between two, a first request's
# compilation and loading an adapter, took 37 s at most where we measured.
STILL = "2m"
STILL_SECONDS = 180
# From here on requests begin to wait for blocks: long ones push others out (vLLM's docs advise to
# act on preemption, which is next). Without a queue a full cache is only well used.
KV_SATURATED = 0.85
KV_FULL = 0.98


def rules(
    objectives: Mapping[str, Objectives], measured: Iterable[MeasuredReplica] = ()
) -> tuple[tuple[Recording, ...], tuple[Alert, ...]]:
    """
    Return recordings and alerts for the declared `{model: its objectives}` and measured replicas.

    An objective without a model has neither a recording nor an alert. The same applies to capacity
    without measurements.
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
    """Return a PromQL suffix that keeps only engines without any progress."""
    # Of a long prompt that is computed in parts only the KV cache moves: tokens and iterations
    # are counted when it is through (vllm/v1/engine/async_llm.py of 0.28 to 0.32). Of a model that
    # does not complete text only prompts move. A counter that restarts has moved as well.
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
    # The facts say so, not a scrape: while a server loads, its port is closed as well.
    Alert(
        "VllmDown",
        "max by (instance, stage) (gpufleet_stage_active) == 0"
        f" unless on (instance, stage) up{{{JOBS}}} == 1",
        AlertSeverity.PAGE,
        300,  # a restart by systemd (15 s), by a group's head, or in a deploy's batch is shorter
        "{{ $labels.instance }}: the unit of stage {{ $labels.stage }} is not running",
        "Run `systemctl status` and read the unit's journal on the node. Exit code 2 means a wrong flag.",
    ),
    Alert(
        "VllmUnresponsive",
        f"(up{{{JOBS}}} == 0 and scrape_duration_seconds{{{JOBS}}} > {HANGING_SECONDS})"
        ' unless on (instance) up{job="node"} == 0',
        AlertSeverity.PAGE,
        180,  # twelve scrapes in a row: a pause of one process, or a flapping link, is shorter
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
        # Requests that wait for something else ("deferred": an adapter, another stage's KV cache)
        # may wait for long in an engine that is well.
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
        # What a dead watchdog last wrote says nothing of now.
        " and on (instance) time() - gpufleet_watchdog_timestamp_seconds < 120",
        AlertSeverity.PAGE,
        60,  # one that acts has killed it by then; what is left are those that only warn
        "{{ $labels.instance }}: the watchdog reports that stage {{ $labels.stage }} is stalled",
        _STALL_ACTION,
        needs=("watchdog",),
    ),
    Alert(
        "VllmRestartedByWatchdog",
        # increase() extrapolates: a half stands for "at least one".
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
        # Three: one is an accident, a second one its retry. systemd gives up after five in half
        # an hour, and a stage over nodes never does.
        "sum by (instance, stage) (increase(gpufleet_stage_restarts_total[30m])) > 2.5"
        " or sum by (instance, stage) (increase(gpufleet_watchdog_restarts_total[1h])) > 2.5",
        AlertSeverity.PAGE,
        0,
        "{{ $labels.instance }}: stage {{ $labels.stage }} restarts again and again",
        "Read the unit's journal from before the second-last restart, because it shows the cause.",
    ),
    Alert(
        "VllmKvCacheSaturated",
        # Averaged: with every request that ends or is thrown out it falls for a moment.
        f"avg_over_time(stage:kv_cache_usage:max[5m]) >= {KV_SATURATED}"
        " and min_over_time(stage:requests_waiting:sum[5m]) > 0",
        AlertSeverity.TICKET,
        600,  # with the average a quarter of an hour: a burst of long prompts is over sooner
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
        # A queue as long as twice what runs: a new request waits for two requests' time.
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
        # One of ten requests computed twice is work that a replica more would save.
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

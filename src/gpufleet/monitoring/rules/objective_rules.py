"""
Define rules that compare each model with its objectives, `serving.<model>.objectives`. Pure.

The recordings `model:*` have the clients' view over all stages of a model, so they have only the
label model.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpufleet.engines.engine import Measure
from gpufleet.engines.promql import JOBS, metric, responses
from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording
from gpufleet.settings.monitoring_settings import Objectives

_ANSWERS = responses(JOBS)
_ERRORS = responses(JOBS, only="5..")
_BROKEN = metric(Measure.FINISHED, 'finished_reason="error"')
# With fewer requests, the p99 is simply the slowest request.
REQUESTS_FOR_P99 = 100
TOKENS_FOR_P99 = 1000
# With fewer errors, a high share of errors is not an outage: one of ten requests, for example.
ERRORS_AT_LEAST = 5


def rules(objectives: Mapping[str, Objectives]) -> tuple[tuple[Recording, ...], tuple[Alert, ...]]:
    """
    Return the recordings and alerts for the declared objectives, `{model: its objectives}`.

    If no model has a certain objective, there is no recording and no alert for this objective.
    """
    promised = tuple(
        recording
        for recording in (
            _promised(
                "ttft_p99_seconds",
                "objective for the p99 of the time to the first token, in seconds",
                {name: each.ttft_p99_seconds for name, each in objectives.items()},
            ),
            _promised(
                "itl_p99_seconds",
                "objective for the p99 of the time between two tokens, in seconds",
                {name: each.itl_p99_seconds for name, each in objectives.items()},
            ),
            _promised(
                "e2e_p99_seconds",
                "objective for the p99 of the time to the last token, in seconds",
                {name: each.e2e_p99_seconds for name, each in objectives.items()},
            ),
            _promised(
                "error_ratio",
                "objective for the share of requests that may end in a server error, 0 to 1",
                {name: each.error_ratio for name, each in objectives.items()},
            ),
        )
        if recording
    )
    there = {each.record for each in promised}
    held = tuple(alert for record, alert in _HELD if record in there)
    return (*MODELS, *promised), held


def _promised(what: str, about: str, values: Mapping[str, float | None]) -> Recording | None:
    """
    Return the recording of one objective: a constant for each model, with the label `model`. Return
    None if no model has the objective.
    """
    constants = [
        f'label_replace(vector({float(value)!r}), "model", "{model}", "", "")'
        for model, value in sorted(values.items())
        if value is not None
    ]
    if not constants:
        return None
    return Recording(f"model:objective_{what}", " or ".join(constants), about, ("model",))


def _p99(record: str, of: Measure, window: str, about: str) -> Recording:
    return Recording(
        record,
        f"histogram_quantile(0.99, sum by (model, le) (rate({metric(of)}[{window}])))",
        about,
        ("model",),
    )


MODELS = (
    # These show whether requests spend their time in the queue or after it. Runbooks use them.
    _p99(
        "model:ttft_seconds:p99_5m",
        Measure.TTFT,
        "5m",
        "p99 of the time to the first token over 5 minutes, in seconds",
    ),
    _p99(
        "model:queue_seconds:p99_5m",
        Measure.QUEUE_TIME,
        "5m",
        "p99 of the time in the queue over 5 minutes, in seconds",
    ),
    # Objectives are compared over a longer time, so that a model with few requests also has 100.
    _p99(
        "model:ttft_seconds:p99_15m",
        Measure.TTFT,
        "15m",
        "p99 of the time to the first token over 15 minutes, in seconds",
    ),
    _p99(
        "model:itl_seconds:p99_15m",
        Measure.ITL,
        "15m",
        "p99 of the time between two tokens over 15 minutes, in seconds",
    ),
    _p99(
        "model:e2e_seconds:p99_15m",
        Measure.E2E,
        "15m",
        "p99 of the time to the last token, for requests that ended in the last 15 minutes, in seconds",
    ),
    Recording(
        "model:http_errors:ratio_10m",
        f"sum by (model) (increase({_ERRORS}[10m])) / sum by (model) (increase({_ANSWERS}[10m]))",
        "share of requests that were answered with 5xx over 10 minutes, 0 to 1",
        ("model",),
    ),
    # A streamed answer begins with status 200. If it breaks off, only this recording shows it.
    Recording(
        "model:broken_requests:ratio_10m",
        f"sum by (model) (increase({_BROKEN}[10m]))"
        f" / sum by (model) (increase({metric(Measure.FINISHED)}[10m]))",
        "share of requests that the engine ended with an error over 10 minutes, 0 to 1",
        ("model",),
    ),
)

# The alerts on objectives, each with the recording that it needs.
_HELD = (
    (
        "model:objective_ttft_p99_seconds",
        Alert(
            "VllmTtftAboveObjective",
            "model:ttft_seconds:p99_15m > on (model) model:objective_ttft_p99_seconds"
            " and on (model)"
            f" sum by (model) (increase({metric(Measure.TTFT, part='_count')}[15m]))"
            f" >= {REQUESTS_FOR_P99}",
            AlertSeverity.PAGE,
            300,
            "{{ $labels.model }}: 1 % of the requests wait longer than "
            "{{ $value | humanizeDuration }} for their first token",
            "Compare the time in the queue with the time to the first token, to see whether the queue "
            "or long prompts are the cause. Then find the slow stage.",
        ),
    ),
    (
        "model:objective_itl_p99_seconds",
        Alert(
            "VllmItlAboveObjective",
            "model:itl_seconds:p99_15m > on (model) model:objective_itl_p99_seconds"
            " and on (model)"
            f" sum by (model) (increase({metric(Measure.ITL, part='_count')}[15m]))"
            f" >= {TOKENS_FOR_P99}",
            AlertSeverity.PAGE,
            300,
            "{{ $labels.model }}: 1 % of the tokens come more than "
            "{{ $value | humanizeDuration }} after the previous token",
            "If one stage is slow, look for a throttled GPU or NVLink errors. If all stages are slow, "
            "they have too many requests at once.",
        ),
    ),
    (
        "model:objective_e2e_p99_seconds",
        Alert(
            "VllmE2eAboveObjective",
            "model:e2e_seconds:p99_15m > on (model) model:objective_e2e_p99_seconds"
            " and on (model)"
            f" sum by (model) (increase({metric(Measure.E2E, part='_count')}[15m]))"
            f" >= {REQUESTS_FOR_P99}",
            AlertSeverity.PAGE,
            300,
            "{{ $labels.model }}: 1 % of the requests take longer than "
            "{{ $value | humanizeDuration }} until their last token",
            "Find out whether answers are longer or tokens are slower. Compare the tokens per request "
            "with last week's, then the time to the first token and between tokens.",
        ),
    ),
    (
        "model:objective_error_ratio",
        Alert(
            "VllmErrors",
            "(model:http_errors:ratio_10m > on (model) model:objective_error_ratio and on (model)"
            f" sum by (model) (increase({_ERRORS}[10m]))"
            f" >= {ERRORS_AT_LEAST})"
            " or (model:broken_requests:ratio_10m > on (model) model:objective_error_ratio"
            " and on (model) sum by (model)"
            f" (increase({_BROKEN}[10m]))"
            f" >= {ERRORS_AT_LEAST})",
            AlertSeverity.PAGE,
            300,
            "{{ $labels.model }}: {{ $value | humanizePercentage }} of the requests end in a "
            "server error",
            "The journal of the model's stages has a traceback for each error. Find the stage that fails.",
        ),
    ),
)

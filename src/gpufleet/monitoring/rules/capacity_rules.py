"""
Define rules that compare a model's finished requests with the rates measured for it. Pure.

A measured rate (`gpufleet measure`) applies only to one release on one node's hardware. The rule
compares the release with the node's facts, so the rate stops to apply as soon as the release is
upgraded, not only at the next deploy of the rules. Replicas without a rate that applies are left
out of the comparison, with their requests.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpufleet.engines.engine import Measure
from gpufleet.engines.promql import JOBS, metric
from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording

REPLICA = ("stage", "model")
_BY_REPLICA = f"by ({', '.join(REPLICA)})"

# The share of the measured rate from which a model counts as full. A measurement finds the limit to
# within 10 % at best (docs/operate/measure.md). Closer to the limit, nothing shows whether a model
# is above or below it.
FULL = 0.9
# At one request per second, the window has 600 requests. Random arrivals change this number by 4 %.
WINDOW = "10m"
# Together with the window, a model must be full for 10 to 20 minutes. A burst is shorter.
FULL_SECONDS = 600


@dataclass(frozen=True)
class MeasuredReplica:
    """A running replica that has a stored measurement which applies to its settings."""

    model: str
    """The name of the model in `serving`."""
    stage: str
    """The replica's id, such as `llama-0`."""
    node: str
    """The node of the replica's first rank."""
    release: str
    """The id of the release that the replica's unit runs."""
    requests_per_second: float
    """The measured rate at which the replica still meets the model's objectives."""
    measured: dt.date
    """The date of the measurement in UTC."""


def rules(
    measured: Iterable[MeasuredReplica],
) -> tuple[tuple[Recording, ...], tuple[Alert, ...]]:
    """
    Return the recordings and alerts for measured replicas, or nothing if there are no such
    replicas.
    """
    found = sorted(measured, key=lambda each: (each.model, each.stage))
    if not found:
        return (), ()
    return (FINISHED, _carried(found), _dates(found), LOAD), ALERTS


def _carried(found: Iterable[MeasuredReplica]) -> Recording:
    """
    Return the recording of each replica's measured rate. It has a value only while the replica is
    ready and runs the release that was measured.
    """
    alike: dict[tuple[str, str, float], list[MeasuredReplica]] = {}
    for each in found:
        alike.setdefault((each.model, each.release, each.requests_per_second), []).append(each)
    rates = " or ".join(
        f"{rate:.6g} * max {_BY_REPLICA} (gpufleet_stage_info{{model={json.dumps(model)}, "
        f"release={json.dumps(release)}, stage=~{_any_of(each.stage for each in those)}, "
        f"instance=~{_any_of(each.node for each in those)}}})"
        for (model, release, rate), those in alike.items()
    )
    return Recording(
        "replica:measured_requests_per_second",
        f"({rates}) and on ({', '.join(REPLICA)}) (min {_BY_REPLICA} (up{{{JOBS}}}) == 1)",
        "requests per second that a ready replica can serve within the objectives, as measured",
        REPLICA,
    )


def _any_of(names: Iterable[str]) -> str:
    r"""
    Return a regular expression in PromQL's syntax that matches only these names.

    >>> _any_of(["gpu-02.example.net", "gpu-01"])
    '"gpu-01|gpu-02\\\\.example\\\\.net"'
    """
    escaped = (re.sub(r"([^\w-])", r"\\\1", each) for each in sorted({*names}))
    return json.dumps("|".join(escaped))


def _dates(found: Iterable[MeasuredReplica]) -> Recording:
    """
    Return a recording with a constant for each model. Its label is the date of the oldest
    measurement.
    """
    oldest: dict[str, dt.date] = {}
    for each in found:
        oldest[each.model] = min(each.measured, oldest.get(each.model, each.measured))
    constants = (
        f'label_replace(label_replace(vector(1), "model", {json.dumps(model)}, "", ""), '
        f'"measured", "{date.isoformat()}", "", "")'
        for model, date in oldest.items()
    )
    return Recording(
        "model:measured:info",
        " or ".join(constants),
        "always 1; label `measured` is the date of the oldest measurement that applies to the model",
        ("model", "measured"),
    )


FINISHED = Recording(
    "replica:finished_requests:rate10m",
    f"sum {_BY_REPLICA} (rate({metric(Measure.FINISHED)}[{WINDOW}]))",
    "requests per second that ended at a replica over 10 minutes, with any result",
    REPLICA,
)

LOAD = Recording(
    "model:measured_load:ratio",
    "sum by (model) (replica:finished_requests:rate10m"
    " and on (stage, model) replica:measured_requests_per_second)"
    # A replica at which no request ends is drained, or the load balancer does not use it. Its rate
    # therefore does not count.
    " / sum by (model) (replica:measured_requests_per_second"
    " and on (stage, model) (replica:finished_requests:rate10m > 0))",
    "a model's finished requests per second, divided by the measured rate of its replicas that get requests",
    ("model",),
)

ALERTS = (
    Alert(
        "VllmNearMeasuredCapacity",
        f"model:measured_load:ratio * on (model) group_left (measured) model:measured:info > {FULL}",
        AlertSeverity.TICKET,
        FULL_SECONDS,
        "{{ $labels.model }}: the replicas run at {{ $value | humanizePercentage }} of the request rate "
        "that was measured as their limit on {{ $labels.measured }}",
        "Check whether replicas are down or drained. Otherwise add a replica, or measure again: "
        "users' requests may be shorter than those of the measurement.",
    ),
)

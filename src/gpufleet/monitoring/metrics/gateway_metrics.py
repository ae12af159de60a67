"""
List the metrics of HAProxy's built-in exporter that rules and panels use. Pure.

The label `proxy` is HAProxy's name of a backend or frontend. Each backend of the gateway is a
model, and its servers are the model's replicas. The list was read from HAProxy 2.6.12 with two
backends, one of which was down (tests/unit/monitoring/recorded/haproxy-2.6.txt).
"""

from __future__ import annotations

from typing import Literal

from gpufleet.monitoring.metrics.metric import Job, Metric

BACKEND = ("proxy",)
SERVER = ("proxy", "server")
ONLY = "fleets with a gateway"


def _metric(kind: Literal["counter", "gauge"], name: str, help_text: str, *labels: str) -> Metric:
    return Metric(
        name=f"haproxy_{name}",
        job=Job.GATEWAY,
        type=kind,
        help=help_text,
        labels=labels,
        only=ONLY,
        source="HAProxy 2.6.12, recorded",
    )


METRICS: tuple[Metric, ...] = (
    _metric(
        "gauge",
        "backend_active_servers",
        "Servers of a backend that are up and get requests",
        *BACKEND,
    ),
    _metric(
        "gauge",
        "backend_current_queue",
        "Requests that wait for any server of the backend",
        *BACKEND,
    ),
    _metric("gauge", "backend_current_sessions", "Requests in a backend now", *BACKEND),
    _metric(
        "counter",
        "backend_http_responses_total",
        "Answers of a backend by class of status (1xx to 5xx, other), HAProxy's own among them",
        *BACKEND,
        "code",
    ),
    _metric(
        "gauge",
        "server_status",
        "Whether a server is in a state (1), one series for each of UP, DOWN, MAINT, DRAIN, NOLB",
        *SERVER,
        "state",
    ),
    _metric("gauge", "server_current_sessions", "Requests that a server has now", *SERVER),
)

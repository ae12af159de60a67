"""
Define rules on the metrics of HAProxy, the fleet's gateway. Pure.

A backend (label `proxy`) is a model, and its servers are the model's replicas. The thresholds are
gpufleet's own, and a comment has the reason for each.
"""

from __future__ import annotations

from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording

_BACKEND = "by (instance, proxy)"
# The time that a model may take to load (vllm_rules.LOADING_SECONDS). During this time a server is
# down because it starts.
_LOADING_SECONDS = 1800
# The share of 5xx answers: those of the gateway itself (no server, a broken connection) and those of
# the servers. Clients notice a few percent. VllmErrors checks the objective of the model.
ERROR_RATIO = 0.05
ERRORS_AT_LEAST = 10

RECORDINGS: tuple[Recording, ...] = ()

_ANSWERS = "haproxy_backend_http_responses_total"
_ERRORS = f'sum {_BACKEND} (increase({_ANSWERS}{{code="5xx"}}[5m]))'

ALERTS: tuple[Alert, ...] = (
    Alert(
        "GatewayDown",
        'up{job="gateway"} == 0',
        AlertSeverity.PAGE,
        120,  # a reload takes one second, a restart ten seconds
        "{{ $labels.instance }}: the gateway does not answer",
        "Run `systemctl status gpufleet-gateway` on the node. If there is a second gateway, it now "
        "has all traffic.",
    ),
    Alert(
        "GatewayNoServer",
        # The backends for statistics and errors have no servers, so they are left out.
        f"sum {_BACKEND} (haproxy_backend_active_servers) == 0"
        f" and count {_BACKEND} (haproxy_server_status) > 0",
        AlertSeverity.PAGE,
        60,
        "{{ $labels.instance }}: no server of {{ $labels.proxy }} is up, so clients get 503",
        "The alerts VllmDown and VllmNotReady name the stages that fail. If an operator drained the "
        "servers, haproxy_server_status shows DRAIN or MAINT instead of DOWN.",
    ),
    Alert(
        "GatewayServerDown",
        'max by (instance, proxy, server) (haproxy_server_status{state="DOWN"}) == 1',
        AlertSeverity.TICKET,
        _LOADING_SECONDS,
        "{{ $labels.instance }}: the gateway has seen server {{ $labels.server }} of {{ $labels.proxy }} "
        "as down for half an hour",
        "If the server's stage is up, the gateway cannot reach it. Check the firewall, the address "
        "and the gateway's health check.",
    ),
    Alert(
        "GatewayErrors",
        f"{_ERRORS} / sum {_BACKEND} (increase({_ANSWERS}[5m])) > {ERROR_RATIO}"
        f" and {_ERRORS} >= {ERRORS_AT_LEAST}",
        AlertSeverity.PAGE,
        300,
        "{{ $labels.instance }}: {{ $value | humanizePercentage }} of the answers for "
        "{{ $labels.proxy }} are 5xx",
        "If VllmErrors does not fire, the errors come from the gateway itself. Its log "
        "shows the reason as a code of two to four letters.",
    ),
    Alert(
        "GatewayQueue",
        # All servers are full (maxconn) for the whole time. A burst is over within minutes.
        f"sum {_BACKEND} (haproxy_backend_current_queue) > 0",
        AlertSeverity.TICKET,
        600,
        "{{ $labels.instance }}: {{ $value }} requests wait at the gateway for {{ $labels.proxy }}",
        "All servers of the model have as many requests as their limit allows. Add a replica.",
    ),
)

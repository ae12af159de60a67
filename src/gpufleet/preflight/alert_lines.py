"""Report whether alerts reach a person. Pure."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.preflight.line import Line, Status, Verdict, reason, unknown
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.remote.query import Answer
from gpufleet.settings.monitoring_settings import Alertmanager, Receiver
from gpufleet.settings.node_settings import NodeSettings

METRICS = "alertmanager.metrics"
PROMETHEUS = "prometheus.alertmanagers"
"""
The ids of the pages that node_look.py fetches on a monitoring node in addition to the pages of the
node's services.
"""

SENT, FAILED = "alertmanager_notifications_total", "alertmanager_notifications_failed_total"
TEST_ALERT = "GpufleetPreflight"
TEST_MINUTES = 5
"""How many minutes a test alert lasts. It ends by itself, so it needs no silence."""
RECEIPT_SECONDS = 30
"""
How many seconds gpufleet waits for a delivery. Alertmanager waits 10 s before it sends a page
(`group_wait` in monitoring/alertmanager.py), and mail servers need more time.
"""

# The integrations of a receiver, with the names in Alertmanager's metrics (notify/notify.go of
# 0.25).
_INTEGRATIONS = {
    "webhook_url_file": "webhook",
    "slack_url_file": "slack",
    "pagerduty_key_file": "pagerduty",
    "email_to": "email",
}


@dataclass(frozen=True)
class Counts:
    """The number of notifications of one integration since Alertmanager's start."""

    sent: float = 0.0
    """All notifications that Alertmanager tried to send, including failed ones."""
    failed: float = 0.0

    @property
    def delivered(self) -> float:
        """Return the number of notifications that the receiver accepted."""
        return self.sent - self.failed

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.sent - other.sent, self.failed - other.failed)


def read_counts(page: str) -> dict[str, Counts]:
    """
    Return the counts in Alertmanager's /metrics, by integration. Raises `ValueError` if the page is
    not a page of metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, Counts] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name not in {SENT, FAILED}:
                continue
            name = sample.labels.get("integration", "")
            more = Counts(sample.value) if sample.name == SENT else Counts(0, sample.value)
            before = found.get(name, Counts())
            found[name] = Counts(before.sent + more.sent, before.failed + more.failed)
    return found


def integrations(receiver: Receiver | None) -> tuple[str, ...]:
    """Return the integrations of a receiver, with the names that Alertmanager's metrics use."""
    return tuple(name for key, name in _INTEGRATIONS.items() if receiver and getattr(receiver, key))


def new_test_alert(node: str, by: str, now: dt.datetime) -> dict[str, Any]:
    """
    Return a test alert for the receiver `page`. Its summary states that the alert is a test.

    Alertmanager delays repeated alerts with the same name and instance by minutes. The instance
    contains the time, so that each test is a new alert.
    """
    instance = f"{node} at {now:%H:%M:%S}"
    return {
        "labels": {"alertname": TEST_ALERT, "severity": "page", "instance": instance},
        "annotations": {
            "summary": f"This is a test by {by}, sent with gpufleet preflight.",
            "action": "Nothing is wrong. Tell the sender that you have received this alert.",
        },
        "startsAt": now.isoformat(),
        "endsAt": (now + dt.timedelta(minutes=TEST_MINUTES)).isoformat(),
    }


@dataclass(frozen=True)
class Receipt:
    """The result of a test alert."""

    before: Mapping[str, Counts]
    after: Mapping[str, Counts]
    confirmed: bool | None = None
    """
    Whether an operator has confirmed that the alert arrived. None if gpufleet did not ask, or got
    no answer.
    """


def read_receipt(node: str, answer: Answer) -> Receipt:
    """Parse the answer of alert_receipt.py. Raises `FleetError` if no alert was sent."""
    if isinstance(answer, str):
        raise FleetError(f"{node}: {answer}")
    with refuse_malformed(node):
        if answer["error"]:
            raise FleetError(f"{node}: {answer['error']}")
        return Receipt(read_counts(answer["before"]), read_counts(answer["after"]))


def alert_lines(
    looks: Mapping[str, Answer],
    settings: Mapping[str, NodeSettings],
    receipts: Mapping[str, Receipt | str],
    inventory: str,
) -> Iterator[Line]:
    """
    Yield a line for each Alertmanager: whether it is up, has a receiver, and delivers
    notifications.

    `receipts` maps nodes to the results of test alerts, or to the reason why there is no result. It
    is empty if no test alert was sent.
    """
    watched = {
        node: here.monitoring.alertmanager
        for node, here in settings.items()
        if here.monitoring and here.monitoring.alertmanager
    }
    if not watched:
        why = "no node has an Alertmanager, and gpufleet does not query your own Alertmanager"
        remedy = "send a test alert to your Alertmanager: amtool alert add preflight severity=page"
        yield unknown("alerts", why, remedy)
    for node, wanted in watched.items():
        look = looks.get(node, "this Alertmanager was not queried")
        yield Line("alerts", node, _alerts(look, wanted, receipts.get(node), inventory))


def _alerts(
    look: Answer, wanted: Alertmanager, receipt: Receipt | str | None, inventory: str
) -> Verdict:
    test = f"gpufleet preflight {inventory} --test-alert"
    deploy = f"gpufleet deploy monitoring {inventory}"
    if isinstance(look, str):
        return Verdict(Status.UNKNOWN, "could not be checked", look, f"gpufleet status {inventory}")
    pages = look["pages"]
    text = _body(pages.get(METRICS))
    if not text[0]:
        return Verdict(Status.FAIL, "Alertmanager does not answer", text[1], deploy)
    try:
        counts = read_counts(text[1])
    except ValueError as error:
        return Verdict(
            Status.UNKNOWN,
            "could not be checked",
            f"gpufleet cannot read Alertmanager's metrics: {error}",
            test,
        )
    ways = integrations(wanted.page)
    if not ways:
        proof = (
            "`monitoring.alertmanager.page` is not set, so Alertmanager shows pages but "
            "does not send them"
        )
        remedy = "`monitoring.alertmanager.page` (docs/monitor/monitoring.md)"
        return Verdict(Status.FAIL, "alerts reach no person", proof, remedy)
    prometheus = _prometheus(pages.get(PROMETHEUS))
    if prometheus.startswith("!"):
        return Verdict(
            Status.FAIL, "Prometheus sends no alerts to this Alertmanager", prometheus[1:], deploy
        )
    if isinstance(receipt, str):
        return Verdict(Status.FAIL, "did not accept the test alert", receipt, deploy)
    if receipt is not None:
        return _receipt(receipt, ways, shared=_shared(ways, wanted), prometheus=prometheus)
    return _history(counts, ways, _shared(ways, wanted), prometheus, test)


def _shared(ways: tuple[str, ...], wanted: Alertmanager) -> bool:
    """
    Return whether other receivers use the integrations of `page`. Their notifications are counted
    in the same metrics.
    """
    others = {*integrations(wanted.heartbeat), *integrations(wanted.ticket)}
    return bool(set(ways) & others)


def _receipt(found: Receipt, ways: tuple[str, ...], *, shared: bool, prometheus: str) -> Verdict:
    changed = {
        way: found.after.get(way, Counts()) - found.before.get(way, Counts()) for way in ways
    }
    said = ", ".join(
        f"{way}: {count.delivered:.0f} delivered, {count.failed:.0f} failed"
        for way, count in changed.items()
    )
    proof = f"test alert, by Alertmanager's own count: {said}{prometheus}"
    look = "look at the log: journalctl -u prometheus-alertmanager"
    if found.confirmed is True:
        return Verdict(
            Status.OK,
            "a test alert arrived",
            f"the operator has confirmed that the alert arrived; {proof}",
        )
    if found.confirmed is False:
        return Verdict(Status.FAIL, "a test alert did not arrive", proof, look)
    if any(count.failed > 0 for count in changed.values()):
        return Verdict(Status.FAIL, "a test alert was not delivered", proof, look)
    if all(count.delivered > 0 for count in changed.values()):
        if shared:
            proof += "; other receivers are counted in the same metric"
            what = "a notification was delivered, but it may be a different one"
            return Verdict(
                Status.UNKNOWN, what, proof, "ask the person on call whether the test alert arrived"
            )
        return Verdict(Status.OK, "a test alert was delivered", proof)
    proof = f"no notification was delivered within {RECEIPT_SECONDS} s; {proof}"
    remedy = (
        "ask the person on call whether the test alert arrived; a silence may also have stopped it"
    )
    return Verdict(Status.UNKNOWN, "it is unknown whether a test alert arrived", proof, remedy)


def _history(
    counts: Mapping[str, Counts],
    ways: tuple[str, ...],
    shared: bool,
    prometheus: str,
    test: str,
) -> Verdict:
    mine = {way: counts.get(way, Counts()) for way in ways}
    said = ", ".join(
        f"{way}: {count.delivered:.0f} delivered, {count.failed:.0f} failed"
        for way, count in mine.items()
    )
    proof = f"since Alertmanager's start, {said}{prometheus}"
    if any(count.failed > 0 for count in mine.values()):
        what = "notifications failed"
        return Verdict(Status.WARN, what, proof, f"{test}; journalctl -u prometheus-alertmanager")
    if all(count.delivered > 0 for count in mine.values()) and not shared:
        return Verdict(Status.OK, "notifications were delivered", proof)
    return Verdict(Status.UNKNOWN, "it is unknown whether alerts reach a person", proof, test)


def _body(page: Any) -> tuple[bool, str]:
    """
    Return whether the page could be fetched, and its text. If it could not, return the reason
    instead.
    """
    if not isinstance(page, Mapping):
        return False, "this Alertmanager was not queried"
    if "missing" in page:
        return False, reason(page)
    if page.get("status") != 200 or "body" not in page:
        return False, str(page.get("error") or f"answers {page.get('status')}")
    return True, str(page["body"])


def _prometheus(page: Any) -> str:
    """
    Return a text with the Alertmanagers to which Prometheus sends alerts. If there is a problem,
    return `!` and the problem. If Prometheus was not queried, return "".
    """
    if page is None:
        return ""
    good, text = _body(page)
    if not good:
        return f"!Prometheus: {text}"
    try:
        active = [each["url"] for each in json.loads(text)["data"]["activeAlertmanagers"]]
    except (ValueError, KeyError, TypeError):
        return "!Prometheus' list of Alertmanagers cannot be read"
    if not active:
        # Prometheus discovers even a static target up to 5 s after its start.
        return (
            "!Prometheus has no active Alertmanager; if Prometheus has only just started, run "
            "preflight again in a few seconds"
        )
    return f"; Prometheus sends to {join_names(active)}"

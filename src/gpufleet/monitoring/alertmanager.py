"""
Render Alertmanager's configuration, which routes alerts to receivers. Pure.

Pages are sent to the receiver `page`, and all other alerts to `ticket`. Alertmanager shows alerts
without a receiver, but does not send them.

Secrets are in files beside the configuration (credentials/), and the configuration has their paths.
The exception is the URL of a webhook, which Alertmanager before 0.26 cannot read from a file
(config/notifiers.go of 0.25 has no url_file, and amtool 0.25 rejects it). A URL in `urls` is
written into the configuration, so the configuration is then secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from gpufleet.monitoring.prometheus import MARK
from gpufleet.settings.monitoring_settings import Alertmanager, Mail, Receiver

NODE_DOWN = "NodeDown"
"""The alert that suppresses the other alerts of the same node, because it explains them."""
ALIVE = "MonitoringAlive"
"""The alert that always fires. If `heartbeat` is set, Alertmanager sends it there every minute."""

# A page is sent after a few seconds, together with pages that fire at the same time. Tickets wait
# longer, so that several tickets can be sent together.
_PAGE = {"group_wait": "10s", "group_interval": "2m", "repeat_interval": "4h"}
_TICKET = {"group_wait": "2m", "group_interval": "15m", "repeat_interval": "24h"}
_HEARTBEAT = {"group_wait": "0s", "group_interval": "1m", "repeat_interval": "1m"}
_TEXT = (
    "{{ range .Alerts }}{{ .Annotations.summary }}\n{{ .Annotations.action }}\n"
    "{{ .Annotations.runbook }}\n{{ end }}"
)


def alertmanager_yml(
    wanted: Alertmanager, urls: Mapping[str, str] | None = None, folder: str = ""
) -> str:
    """
    Return alertmanager.yml.

    `urls` maps each secret file with a webhook's URL to that URL. `folder` is the directory of the
    configuration with a trailing slash. It is needed because Alertmanager resolves file names from
    its working directory, which may be different.
    """
    receivers = {
        "page": wanted.page,
        "ticket": wanted.ticket,
        **({"heartbeat": wanted.heartbeat} if wanted.heartbeat else {}),
    }
    document: dict[str, Any] = {
        "global": {"resolve_timeout": "5m", **(_mail(wanted.mail, folder) if wanted.mail else {})},
        "route": {
            "receiver": "ticket",
            "group_by": ["alertname", "instance"],
            **_TICKET,
            "routes": [
                {
                    "receiver": "heartbeat" if wanted.heartbeat else "nobody",
                    "matchers": [f'alertname="{ALIVE}"'],
                    **_HEARTBEAT,
                },
                {"receiver": "page", "matchers": ['severity="page"'], **_PAGE},
            ],
        },
        "inhibit_rules": list(_inhibitions()),
        "receivers": [
            *(
                {"name": name, **_receiver(name, each, urls or {}, folder)}
                for name, each in receivers.items()
            ),
            {"name": "nobody"},
        ],
    }
    return MARK + yaml.safe_dump(document, sort_keys=False)


def secret_files(wanted: Alertmanager) -> dict[str, str]:
    """
    Return a dict that maps each secret file beside the configuration to its source file on this
    machine.
    """
    found: dict[str, str] = {}
    for name, each in (
        ("page", wanted.page),
        ("ticket", wanted.ticket),
        ("heartbeat", wanted.heartbeat),
    ):
        if each is None:
            continue
        files = {
            "webhook": each.webhook_url_file,
            "slack": each.slack_url_file,
            "pagerduty": each.pagerduty_key_file,
        }
        found |= {_file(name, way): file for way, file in files.items() if file}
    if wanted.mail and wanted.mail.password_file:
        found[_file("mail", "password")] = wanted.mail.password_file
    return found


def webhooks(wanted: Alertmanager) -> tuple[str, ...]:
    """Return those paths of `secret_files` that contain the URL of a webhook."""
    return tuple(file for file in secret_files(wanted) if file.endswith("-webhook"))


def _file(name: str, way: str) -> str:
    return f"credentials/{name}-{way}"


def _inhibitions() -> Iterator[dict[str, Any]]:
    """Yield the rules that suppress an alert while the alert about its cause fires."""
    yield {
        "source_matchers": [f'alertname="{NODE_DOWN}"'],
        "target_matchers": [f'alertname!="{NODE_DOWN}"'],
        "equal": ["instance"],
    }
    # A page suppresses only tickets about the same GPU or the same server.
    for label in ("gpu", "stage"):
        yield {
            "source_matchers": ['severity="page"', f'{label}=~".+"'],
            "target_matchers": ['severity="ticket"', f'{label}=~".+"'],
            "equal": ["instance", label],
        }


def _mail(mail: Mail, folder: str) -> dict[str, Any]:
    found = {"smtp_smarthost": mail.smarthost, "smtp_from": mail.sender}
    if mail.username:
        found["smtp_auth_username"] = mail.username
    if mail.password_file:
        found["smtp_auth_password_file"] = folder + _file("mail", "password")
    return found


def _receiver(
    name: str, wanted: Receiver | None, urls: Mapping[str, str], folder: str
) -> dict[str, Any]:
    if wanted is None:
        return {}
    found: dict[str, Any] = {}
    if wanted.webhook_url_file:
        file = _file(name, "webhook")
        where = {"url": urls[file]} if file in urls else {"url_file": folder + file}
        found["webhook_configs"] = [{**where, "send_resolved": name != "heartbeat"}]
    if wanted.slack_url_file:
        found["slack_configs"] = [
            {
                "api_url_file": folder + _file(name, "slack"),
                "channel": wanted.slack_channel,
                "send_resolved": True,
                "title": '[{{ .Status | toUpper }}] {{ .GroupLabels.SortedPairs.Values | join " " }}',
                "text": _TEXT,
            }
        ]
    if wanted.pagerduty_key_file:
        found["pagerduty_configs"] = [{"routing_key_file": folder + _file(name, "pagerduty")}]
    if wanted.email_to:
        found["email_configs"] = [{"to": wanted.email_to, "send_resolved": True}]
    return found

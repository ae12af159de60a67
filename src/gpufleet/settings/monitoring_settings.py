"""Settings of exporters, monitoring nodes, objectives and watchdogs.

Pure, like `settings/node_settings.py`, which contains these. Durations are in seconds; the names of
sizes contain the unit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    IPvAnyAddress,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gpufleet.settings.base import (
    BindAddress,
    Port,
    Seconds,
    Setting,
    Sha256,
    UnitName,
    Url,
    pattern_rule,
)


class PublishedProgram(Setting):
    """The publisher's .tar.gz instead of the distribution's package."""

    url: Url
    sha256: Sha256


class Tls(Setting):
    """The exporters' certificate; `{node}` in a file's name stands for the node's name."""

    certificate_file: Annotated[str, Field(description="PEM, on this machine")]
    key_file: Annotated[str, Field(description="PEM, on this machine; its content goes to nodes")]
    ca_file: Annotated[
        str | None, Field(description="CA certificates that Prometheus trusts; null: the system's")
    ] = None


class BasicAuth(Setting):
    """The login for exporters' metrics."""

    username: Annotated[
        str,
        pattern_rule(r"[\w.-]+", "letters, digits, `.`, `_` and `-`"),
        Field(description="User name that Prometheus sends"),
    ] = "prometheus"
    password_file: Annotated[
        str,
        Field(
            description="File on this machine; nodes get its bcrypt hash, Prometheus the password"
        ),
    ]


class Exporters(Setting):
    """TLS, login and address of a node's exporters."""

    tls: Annotated[Tls | None, Field(description="null: plain HTTP")] = None
    basic_auth: Annotated[BasicAuth | None, Field(description="null: no login is required")] = None
    listen: Annotated[
        IPvAnyAddress | None,
        Field(description="Address to bind; null: all addresses of the node"),
    ] = None


# It becomes part of a flag: --collector.NAME.
Collector = Annotated[
    str, pattern_rule(r"[a-z][a-z0-9_]*", "a collector's name: a-z, 0-9 and `_`, a letter first")
]


class NodeExporter(Setting):
    """Prometheus node exporter: the distribution's package, or the publisher's own binary."""

    port: Port = 9100
    archive: Annotated[
        PublishedProgram | None, Field(description="null: the package prometheus-node-exporter")
    ] = None
    collectors: Annotated[
        tuple[Collector, ...],
        Field(description="Collectors to enable besides those for GPU nodes"),
    ] = ()
    without: Annotated[tuple[Collector, ...], Field(description="Collectors to disable")] = ()

    @model_validator(mode="after")
    def _wanted_or_not(self) -> NodeExporter:
        if both := sorted(set(self.collectors) & set(self.without)):
            raise ValueError(f"`collectors` and `without` both name {', '.join(both)}: choose one")
        return self


class Objectives(Setting):
    """Latencies promised to a model's clients; without a value its alert is not made."""

    ttft_p99_seconds: Annotated[
        PositiveFloat | None, Field(description="Time to first token, p99")
    ] = None
    itl_p99_seconds: Annotated[
        PositiveFloat | None, Field(description="Inter-token latency, p99")
    ] = None
    e2e_p99_seconds: Annotated[
        PositiveFloat | None, Field(description="Time to the last token, p99")
    ] = None
    error_ratio: Annotated[
        float, Field(gt=0, le=1, description="Share of requests that end in a server error")
    ] = 0.01


class Watchdog(Setting):
    """Detection of servers that run requests and make no progress."""

    mode: Annotated[
        Literal["off", "warn", "act"],
        Field(description="warn: log and count; act: dump, kill and restart the group"),
    ] = "warn"
    seconds: Annotated[
        Seconds,
        Field(ge=10, le=3600, description="Time without progress until a server counts as stalled"),
    ] = 120
    idle_seconds: Annotated[
        Seconds,
        Field(
            ge=0,
            le=3600,
            description="Interval at which an idle server is tested with one token; 0: never",
        ),
    ] = 60


class Receiver(Setting):
    """An Alertmanager receiver; secrets are in files."""

    webhook_url_file: Annotated[str | None, Field(description="File with the URL")] = None
    slack_url_file: Annotated[str | None, Field(description="File with the webhook's URL")] = None
    slack_channel: Annotated[str | None, Field(description="Channel, as '#gpu-alerts'")] = None
    pagerduty_key_file: Annotated[str | None, Field(description="Events API v2 routing key")] = None
    email_to: Annotated[str | None, Field(description="Address; needs `mail`")] = None

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Receiver:
        ways = (
            self.webhook_url_file,
            self.slack_url_file,
            self.pagerduty_key_file,
            self.email_to,
        )
        if not any(ways):
            raise ValueError(
                "receiver has no destination: set webhook_url_file, slack_url_file, "
                "pagerduty_key_file or email_to"
            )
        if self.slack_url_file and not self.slack_channel:
            raise ValueError("`slack_url_file` needs `slack_channel`")
        return self


class Mail(Setting):
    """The mail server of receivers with `email_to`."""

    smarthost: Annotated[
        str,
        pattern_rule(r"[\w.-]+:\d+", "a host and a port, as mail.example.com:587"),
        Field(description="host:port"),
    ]
    sender: Annotated[str, Field(description="Sender address")]
    username: Annotated[str | None, Field(description="null: without a login")] = None
    password_file: Annotated[
        str | None, Field(description="On this machine; null: without a password")
    ] = None


class Prometheus(Setting):
    """The Prometheus of a monitoring node."""

    archive: Annotated[
        PublishedProgram | None, Field(description="null: the package prometheus")
    ] = None
    port: Port = 9090
    listen: BindAddress = "127.0.0.1"
    scrape_seconds: Annotated[Seconds, Field(gt=0, description="Scrape interval")] = 15
    retention_days: Annotated[PositiveInt, Field(description="Retention of series")] = 30


class Alertmanager(Setting):
    """The Alertmanager of a monitoring node."""

    archive: Annotated[
        PublishedProgram | None, Field(description="null: the package prometheus-alertmanager")
    ] = None
    port: Port = 9093
    listen: BindAddress = "127.0.0.1"
    page: Annotated[
        Receiver | None, Field(description="null: these alerts are shown, not sent")
    ] = None
    ticket: Annotated[
        Receiver | None, Field(description="null: these alerts are shown, not sent")
    ] = None
    heartbeat: Annotated[
        Receiver | None,
        Field(
            description="Receives a heartbeat every minute: a service that alerts you when "
            "it stops; null: a dead monitoring node goes unnoticed"
        ),
    ] = None
    mail: Annotated[Mail | None, Field(description="null: no receiver uses `email_to`")] = None

    @model_validator(mode="after")
    def _mail_goes_through_a_server(self) -> Alertmanager:
        receivers = {"page": self.page, "ticket": self.ticket, "heartbeat": self.heartbeat}
        if self.mail is None and (
            mailed := [name for name, each in receivers.items() if each and each.email_to]
        ):
            raise ValueError(
                f"{' and '.join(mailed)}: `email_to` needs `mail`: set the mail server"
            )
        return self


class Grafana(Setting):
    """A Grafana that is on the node already, or comes from a repository that you name."""

    package: Annotated[str | None, Field(description="as grafana; null: already installed")] = None
    provisioning: Annotated[
        str,
        pattern_rule(r"/[\w./-]+", "an absolute path of letters, digits, `.`, `_`, `/` and `-`"),
        Field(description="Its provisioning directory"),
    ] = "/etc/grafana/provisioning"
    unit: UnitName = "grafana-server.service"


class AlertChange(Setting):
    """A change to one of gpufleet's alerts."""

    enabled: Annotated[bool, Field(description="false: omit the alert")] = True
    for_seconds: Annotated[Seconds | None, Field(ge=0, description="null: the default")] = None
    severity: Annotated[
        Literal["page", "ticket"] | None, Field(description="null: the default")
    ] = None


class Monitoring(Setting):
    """A monitoring node; with `gpu_node: false` if it has no GPUs."""

    prometheus: Annotated[Prometheus | None, Field(description="null: no Prometheus here")] = (
        Prometheus()
    )
    alertmanager: Annotated[
        Alertmanager | None, Field(description="null: no Alertmanager here")
    ] = Alertmanager()
    grafana: Annotated[Grafana | None, Field(description="null: no dashboards are installed")] = (
        None
    )
    alerts: Annotated[
        dict[str, AlertChange],
        Field(description="Changes to alerts, by the alert's name; docs/alerts/ lists them"),
    ] = {}
    runbooks_url: Annotated[
        str, Field(description="Address of docs/alerts/; each page's name is appended")
    ] = "docs/alerts"
    external_labels: Annotated[
        dict[str, str], Field(description="Labels on everything that this Prometheus sends")
    ] = {}

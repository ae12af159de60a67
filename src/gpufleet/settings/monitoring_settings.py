"""Settings of exporters, monitoring nodes, objectives and watchdogs.

Pure. `settings/node_settings.py` contains these settings. Durations are in seconds. The name of a
size contains its unit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from gpufleet.settings.base import (
    Address,
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
    """The publisher's .tar.gz archive of a program, used instead of the distribution's package."""

    url: Url
    sha256: Sha256


class Tls(Setting):
    """The exporters' certificate. `{node}` in a file name is replaced by the node's name."""

    certificate_file: Annotated[
        str, Field(description="PEM file of the certificate, on the machine that runs gpufleet")
    ]
    key_file: Annotated[
        str,
        Field(
            description="PEM file of the key, on the machine that runs gpufleet, which copies the "
            "content to the nodes"
        ),
    ]
    ca_file: Annotated[
        str | None,
        Field(
            description="PEM file of the CA certificates that Prometheus trusts. null: the CA "
            "certificates of the node's system"
        ),
    ] = None


class BasicAuth(Setting):
    """The login that the exporters require for their metrics."""

    username: Annotated[
        str,
        pattern_rule(r"[\w.-]+", "letters, digits, `.`, `_` and `-`"),
        Field(description="User name that Prometheus sends"),
    ] = "prometheus"
    password_file: Annotated[
        str,
        Field(
            description="File with the password, on the machine that runs gpufleet. Nodes "
            "get a bcrypt hash of the password, and Prometheus gets the password"
        ),
    ]


class Exporters(Setting):
    """TLS, login and address of a node's exporters."""

    tls: Annotated[Tls | None, Field(description="null: plain HTTP")] = None
    basic_auth: Annotated[
        BasicAuth | None, Field(description="null: the exporters require no login")
    ] = None
    listen: Annotated[
        Address | None,
        Field(
            description="IP address that the exporters listen on. null: all addresses of the node"
        ),
    ] = None


# The name becomes a part of a flag: --collector.NAME.
Collector = Annotated[
    str,
    pattern_rule(
        r"[a-z][a-z0-9_]*",
        "the name of a collector: a-z, 0-9 and `_`, and the first character is a letter",
    ),
]


class NodeExporter(Setting):
    """The Prometheus node exporter: the distribution's package, or the publisher's binary."""

    port: Port = 9100
    archive: Annotated[
        PublishedProgram | None, Field(description="null: the package prometheus-node-exporter")
    ] = None
    collectors: Annotated[
        tuple[Collector, ...],
        Field(
            description="Collectors to enable in addition to those that gpufleet enables on "
            "GPU nodes"
        ),
    ] = ()
    without: Annotated[tuple[Collector, ...], Field(description="Collectors to disable")] = ()

    @model_validator(mode="after")
    def _wanted_or_not(self) -> NodeExporter:
        if both := sorted(set(self.collectors) & set(self.without)):
            raise ValueError(
                f"`collectors` and `without` both contain {', '.join(both)}: remove "
                f"{', '.join(both)} from one of the two"
            )
        return self


class Objectives(Setting):
    """
    Service objectives that you promise to a model's clients. An objective without a value has no
    alert.
    """

    ttft_p99_seconds: Annotated[
        PositiveFloat | None,
        Field(description="Limit for the 99th percentile of the time to first token"),
    ] = None
    itl_p99_seconds: Annotated[
        PositiveFloat | None,
        Field(description="Limit for the 99th percentile of the time between two tokens"),
    ] = None
    e2e_p99_seconds: Annotated[
        PositiveFloat | None,
        Field(description="Limit for the 99th percentile of the time to the last token"),
    ] = None
    error_ratio: Annotated[
        float,
        Field(gt=0, le=1, description="Limit for the share of requests that end in a server error"),
    ] = 0.01


class Watchdog(Setting):
    """Detection of servers that have running requests but make no progress."""

    mode: Annotated[
        Literal["off", "warn", "act"],
        Field(
            description="off: servers are not watched. warn: a stalled server is logged, "
            "counted and reported to gateways. act: the server is also dumped, killed and "
            "restarted, with all ranks of the replica"
        ),
    ] = "warn"
    seconds: Annotated[
        Seconds,
        Field(
            ge=10,
            le=3600,
            description="Time without progress after which a server counts as stalled",
        ),
    ] = 120
    idle_seconds: Annotated[
        Seconds,
        Field(
            ge=0,
            le=3600,
            description="Interval at which the watchdog tests an idle server with a "
            "request for one token. 0: no tests",
        ),
    ] = 60


class Receiver(Setting):
    """A receiver of Alertmanager. Its secrets are in files."""

    webhook_url_file: Annotated[
        str | None, Field(description="File with the URL of the webhook")
    ] = None
    slack_url_file: Annotated[
        str | None, Field(description="File with the URL of Slack's webhook")
    ] = None
    slack_channel: Annotated[
        str | None, Field(description="Slack channel, for example '#gpu-alerts'")
    ] = None
    pagerduty_key_file: Annotated[
        str | None, Field(description="File with PagerDuty's routing key (Events API v2)")
    ] = None
    email_to: Annotated[str | None, Field(description="E-mail address. It requires `mail`")] = None

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
                "the receiver has no destination: set webhook_url_file, slack_url_file, "
                "pagerduty_key_file or email_to"
            )
        if self.slack_url_file and not self.slack_channel:
            raise ValueError(
                "`slack_url_file` is set, but `slack_channel` is not: set `slack_channel`"
            )
        return self


class Mail(Setting):
    """The mail server through which Alertmanager sends to receivers with `email_to`."""

    smarthost: Annotated[
        str,
        pattern_rule(r"[\w.-]+:\d+", "a host and a port, for example mail.example.com:587"),
        Field(description="Mail server, written as host:port"),
    ]
    sender: Annotated[str, Field(description="E-mail address of the sender")]
    username: Annotated[
        str | None, Field(description="User name for the mail server. null: no login")
    ] = None
    password_file: Annotated[
        str | None,
        Field(
            description="File with the password for the mail server, on the machine that runs "
            "gpufleet. null: no password"
        ),
    ] = None


class Prometheus(Setting):
    """The Prometheus of a monitoring node."""

    archive: Annotated[
        PublishedProgram | None, Field(description="null: the package prometheus")
    ] = None
    port: Port = 9090
    listen: BindAddress = "127.0.0.1"
    scrape_seconds: Annotated[
        Seconds, Field(gt=0, description="Interval at which Prometheus scrapes its targets")
    ] = 15
    retention_days: Annotated[
        PositiveInt, Field(description="Time for which Prometheus keeps its data")
    ] = 30


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
            description="Receiver of a heartbeat, which Alertmanager sends every minute. "
            "Use a service that alerts you when the heartbeat stops. null: you get no "
            "alert if the monitoring node fails"
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
                f"{' and '.join(mailed)}: `email_to` is set, but `mail` is not: set the "
                "mail server with `mail`"
            )
        return self


class Grafana(Setting):
    """
    A Grafana that is already installed on the node, or that is installed from a repository of the
    node.
    """

    package: Annotated[
        str | None,
        Field(
            description="Package to install, for example grafana. null: Grafana is already "
            "installed"
        ),
    ] = None
    provisioning: Annotated[
        str,
        pattern_rule(r"/[\w./-]+", "an absolute path of letters, digits, `.`, `_`, `/` and `-`"),
        Field(description="Grafana's provisioning directory"),
    ] = "/etc/grafana/provisioning"
    unit: UnitName = "grafana-server.service"


class AlertChange(Setting):
    """A change to one of gpufleet's alerts."""

    enabled: Annotated[bool, Field(description="false: this alert is not installed")] = True
    for_seconds: Annotated[
        Seconds | None,
        Field(
            ge=0,
            description="Time for which the alert's condition must be true before the alert fires. "
            "null: the alert's default",
        ),
    ] = None
    severity: Annotated[
        Literal["page", "ticket"] | None,
        Field(description="Severity of the alert. null: the alert's default"),
    ] = None


class Monitoring(Setting):
    """Makes the node a monitoring node. Set `gpu_node: false` as well if the node has no GPUs."""

    prometheus: Annotated[Prometheus | None, Field(description="null: no Prometheus here")] = (
        Prometheus()
    )
    alertmanager: Annotated[
        Alertmanager | None, Field(description="null: no Alertmanager here")
    ] = Alertmanager()
    grafana: Annotated[
        Grafana | None, Field(description="null: gpufleet installs no dashboards")
    ] = None
    alerts: Annotated[
        dict[str, AlertChange],
        Field(
            description="Changes to gpufleet's alerts. Each key is the name of an alert; "
            "docs/alerts/ lists the names"
        ),
    ] = {}
    runbooks_url: Annotated[
        str,
        Field(
            description="Address of the pages of docs/alerts/. An alert's link is this address "
            "with the name of its page"
        ),
    ] = "docs/alerts"
    external_labels: Annotated[
        dict[str, str],
        Field(
            description="Labels that this Prometheus adds to everything that it sends to other "
            "systems"
        ),
    ] = {}

"""Define alerts on gpufleet's own facts: whether nodes answer and are as declared. Pure."""

from __future__ import annotations

from gpufleet.monitoring.rules.gpu_rules import BLANK
from gpufleet.monitoring.rules.rule import Alert, AlertSeverity, Recording

_ON = "{{ $labels.instance }}"
_DAY = 86400
SOON_DAYS, URGENT_DAYS = 21, 7
"""Days until a certificate expires. If fewer than SOON_DAYS are left, deploys print a note."""

RECORDINGS: tuple[Recording, ...] = (
    Recording(
        "node:answers",
        # The jobs of the monitoring servers are left out. A gateway may have the name of a node.
        'max by (instance) (up{job=~"node|dcgm|vllm|gateway"})',
        "Whether any target on the node answered the last scrape",
        ("instance",),
    ),
    Recording(
        "node:facts_age_seconds",
        "time() - max by (instance) (gpufleet_facts_timestamp_seconds)",
        "Age of a node's own facts, in seconds",
        ("instance",),
    ),
    Recording(
        "node:check_age_seconds",
        "time() - max by (instance) (gpufleet_check_timestamp_seconds)",
        "Time since a node was last checked, in seconds",
        ("instance",),
    ),
    Recording(
        "node:drift_age_seconds",
        "time() - max by (instance) (gpufleet_drift_timestamp_seconds)",
        "Time since a node was last compared with its declaration, in seconds",
        ("instance",),
    ),
)

# time() is Prometheus' clock, because the clock of a node may be wrong.
_LEFT = "min by (instance, use, path) (gpufleet_certificate_end_timestamp_seconds)\n  - time()"
_CERTIFICATE = f"{_ON}: the certificate {{{{ $labels.path }}}} ({{{{ $labels.use }}}})"
# An alert must not end and begin again because a scrape failed. If the node does not come back,
# NodeDown fires within this time.
_MISSED_SECONDS = 300

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="NodeDown",
        expr="node:answers == 0",
        severity=AlertSeverity.PAGE,
        # Three scrapes, one a minute. A reboot of a GPU server takes longer, and is silenced.
        for_seconds=180,
        summary=f"{_ON}: nothing on the node answers",
        action="Try ssh to the node, then the node's console through the BMC. If neither answers, power the node off and on.",
    ),
    Alert(
        name="ExporterDown",
        expr='max by (instance, job) (up{job=~"node|dcgm"}) == 0 and on (instance) node:answers == 1',
        severity=AlertSeverity.TICKET,
        for_seconds=300,  # longer than a restart after an upgrade, in which DCGM takes a minute
        summary=f"{_ON}: the {{{{ $labels.job }}}} exporter does not answer, although the node does",
        action="Run `systemctl status` for the exporter's unit. Alerts on its values cannot fire until the exporter runs again.",
    ),
    Alert(
        name="DcgmWithoutSeries",
        expr=(
            'max by (instance) (up{job="dcgm"}) == 1\n'
            f"  unless on (instance) DCGM_FI_DEV_GPU_TEMP < {BLANK}"
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=300,  # the exporter answers before the host engine has its first values
        summary=f"{_ON}: DCGM's exporter answers but reports no GPU",
        action="Restart nvidia-dcgm, then DCGM's exporter. Check whether nvidia-smi answers.",
    ),
    Alert(
        name="FactsStale",
        # The facts are old, or were never written.
        expr=(
            "node:facts_age_seconds > 600\n"
            'or max by (instance) (up{job="node"}) == 1\n'
            "  unless on (instance) gpufleet_facts_timestamp_seconds"
        ),
        severity=AlertSeverity.TICKET,
        for_seconds=600,  # they are written every minute, but a driver that hangs delays them
        summary=(
            f"{_ON} has {{{{ if gt $value 1.0 }}}}not written its facts for "
            "{{ $value | humanizeDuration }}{{ else }}never written its facts{{ end }}"
        ),
        action="Run `systemctl status gpufleet-facts`. Check whether the driver answers and whether the disk is full.",
    ),
    Alert(
        name="FactsFailed",
        expr="max by (instance, part) (gpufleet_facts_failed) == 1",
        severity=AlertSeverity.TICKET,
        for_seconds=900,  # a part may be slow once
        summary=f"{_ON}: gpufleet cannot read the facts about {{{{ $labels.part }}}}",
        action="`journalctl -u gpufleet-facts` shows the reason. Until it is repaired, alerts about this part cannot fire.",
    ),
    Alert(
        name="DriverLibraryMismatch",
        expr='max by (instance) (gpufleet_driver_mismatch{part="library"}) == 1',
        severity=AlertSeverity.PAGE,
        # During an upgrade of the driver, a node has both versions for some minutes.
        for_seconds=900,
        summary=f"{_ON}: the loaded driver and the driver's libraries have different versions",
        action="Running servers continue, but no new CUDA program can start. Load the new driver, or reboot the node.",
    ),
    Alert(
        name="DriverMismatch",
        expr='max by (instance, part) (gpufleet_driver_mismatch{part!="library"}) == 1',
        severity=AlertSeverity.TICKET,
        for_seconds=3600,  # an upgrade may be in progress
        summary=f"{_ON}: the loaded driver and its {{{{ $labels.part }}}} have different versions",
        action="Bring all parts to one version: run deploys/node.py, then reload the driver or reboot the node.",
    ),
    Alert(
        name="RebootPending",
        expr="max by (instance, reason) (gpufleet_reboot_pending) == 1",
        severity=AlertSeverity.TICKET,
        for_seconds=_DAY,  # a node may wait for its maintenance window, but not for weeks
        summary=f"{_ON} has needed a reboot for a day ({{{{ $labels.reason }}}})",
        action="Reboot the node at the next quiet hour. Reboot only one node at a time.",
    ),
    Alert(
        name="NodeUnchecked",
        expr="max by (instance) (gpufleet_node_unchecked) == 1",
        severity=AlertSeverity.TICKET,
        for_seconds=1800,  # an upgrade of the driver and its check take at most 20 minutes
        summary=f"{_ON}: the driver was changed, and no check has passed since then, so no stage starts",
        action="Run `gpufleet check` for the node, and fix the findings that block.",
    ),
    Alert(
        name="CheckFindings",
        # The sum removes the label `severity` of the findings, which is not that of the alert.
        expr='sum by (instance) (gpufleet_check_findings{severity=~"block|unknown"}) > 0',
        severity=AlertSeverity.TICKET,
        for_seconds=600,  # the operator who ran the check is probably repairing the node
        summary=f"{_ON}: the last check has {{{{ $value }}}} findings with result block or unknown",
        action="`gpufleet check` shows the findings and how to fix them. Fix them, then run `gpufleet check --record`.",
    ),
    Alert(
        name="CheckStale",
        expr=f"node:check_age_seconds > {7 * _DAY}",
        severity=AlertSeverity.TICKET,
        for_seconds=3600,  # a run that is late
        summary=f"{_ON} was last checked {{{{ $value | humanizeDuration }}}} ago",
        action="Run `gpufleet check --record`. Find out why the job that runs it every week did not run.",
    ),
    Alert(
        name="Drift",
        expr='max by (instance) (gpufleet_drift_differences{matters="now"}) > 0',
        severity=AlertSeverity.TICKET,
        for_seconds=600,  # a deploy may be in progress
        summary=f"{_ON} has {{{{ $value }}}} differences from its declaration that matter now",
        action="`gpufleet drift` shows the differences. Deploy the node, or declare what was changed by hand.",
    ),
    Alert(
        name="DriftUnknown",
        expr="max by (instance) (gpufleet_drift_unknown) == 1",
        severity=AlertSeverity.TICKET,
        for_seconds=_DAY,  # unknown is not a pass, but it is rarely urgent
        summary=f"{_ON}: a part of the node could not be compared with its declaration",
        action="`gpufleet drift` shows which part could not be compared, and the reason.",
    ),
    Alert(
        name="DriftStale",
        expr=f"node:drift_age_seconds > {7 * _DAY}",
        severity=AlertSeverity.TICKET,
        for_seconds=3600,  # a run that is late
        summary=f"{_ON} was last compared with its declaration {{{{ $value | humanizeDuration }}}} ago",
        action="Run `gpufleet drift --record`. Find out why the job that runs it every week did not run.",
    ),
    Alert(
        name="CertificateEndsSoon",
        # The ticket ends when the page begins, so each certificate has one alert.
        expr=f"{_LEFT} < {SOON_DAYS * _DAY} >= {URGENT_DAYS * _DAY}",
        severity=AlertSeverity.TICKET,
        for_seconds=0,  # the value does not fluctuate
        summary=f"{_CERTIFICATE} expires in {{{{ $value | humanizeDuration }}}}",
        action="Replace the certificate's file at the path in your settings, then deploy.",
        keep_seconds=_MISSED_SECONDS,
    ),
    Alert(
        name="CertificateEndsThisWeek",
        expr=f"{_LEFT} < {URGENT_DAYS * _DAY}",
        severity=AlertSeverity.PAGE,
        for_seconds=0,  # as above
        summary=(
            f"{_CERTIFICATE} {{{{ if gt $value 0.0 }}}}expires in {{{{ $value | humanizeDuration }}}}"
            "{{ else }}has expired{{ end }}"
        ),
        action="Renew the certificate now. Once it has expired, clients or Prometheus refuse connections to the node.",
        keep_seconds=_MISSED_SECONDS,
    ),
)

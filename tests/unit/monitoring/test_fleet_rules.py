"""Alerts on nodes that do not answer or are not as declared: both ways."""

from __future__ import annotations

from pathlib import Path

from gpufleet.monitoring.rules import fleet_rules
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from tests.unit.monitoring.promtool import Case, Firing, run, too_early

NODE = 'instance="gpu-01",job="node"'
DCGM = 'instance="gpu-01",job="dcgm"'
ON = {"instance": "gpu-01"}
DAY = 86400


def up(job: str, values: str) -> dict[str, str]:
    """Write whether a job of the node answered."""
    return {f'up{{instance="gpu-01",job="{job}"}}': values}


def own(name: str, labels: str, values: str) -> dict[str, str]:
    """Write a series of our own facts, with further labels."""
    return {f"gpufleet_{name}{{{NODE}{',' if labels else ''}{labels}}}": values}


ANSWERS = (
    Case(
        "NodeDown",
        "nothing on it answers",
        {**up("node", "1x5 0x30"), **up("dcgm", "1x5 0x30"), **up("vllm", "1x5 0x30")},
        at=600,
        fires=(Firing(ON, "gpu-01: nothing on the node answers"),),
    ),
    Case(
        "NodeDown",
        "its exporters are down, and vLLM answers",
        {**up("node", "0x30"), **up("dcgm", "0x30"), **up("vllm", "1x30")},
        at=600,
    ),
    Case("NodeDown", "two scrapes that failed", {**up("node", "1x5 0x2 1x30")}, at=480),
    Case(
        "NodeDown",
        "a Prometheus of the same name that still answers about itself",
        {**up("node", "0x30"), **up("prometheus", "1x30")},
        at=600,
        fires=(Firing(ON, "gpu-01: nothing on the node answers"),),
    ),
    Case(
        "ExporterDown",
        "DCGM's, on a node that answers",
        {**up("node", "1x30"), **up("dcgm", "0x30")},
        at=600,
        fires=(
            Firing(
                {**ON, "job": "dcgm"},
                "gpu-01: the dcgm exporter does not answer, although the node does",
            ),
        ),
    ),
    Case(
        "ExporterDown",
        "the whole node is down, which is one alert and not three",
        {**up("node", "0x30"), **up("dcgm", "0x30")},
        at=600,
    ),
    Case(
        "ExporterDown",
        "the exporter starts again after an upgrade",
        {**up("node", "1x30"), **up("dcgm", "1x5 0x3 1x30")},
        at=540,
    ),
    Case(
        "DcgmWithoutSeries",
        "it answers, with an empty page",
        up("dcgm", "1x30"),
        at=600,
        fires=(Firing(ON, "gpu-01: DCGM's exporter answers but reports no GPU"),),
    ),
    Case(
        "DcgmWithoutSeries",
        "it answers, with blank values of a GPU that hangs",
        {
            **up("dcgm", "1x30"),
            f'DCGM_FI_DEV_GPU_TEMP{{{DCGM},gpu="0",UUID="GPU-0"}}': "9223372036854775794x30",
        },
        at=600,
        fires=(Firing(ON, "gpu-01: DCGM's exporter answers but reports no GPU"),),
    ),
    Case(
        "DcgmWithoutSeries",
        "it has a GPU, under the new names of its labels",
        {
            **up("dcgm", "1x30"),
            f'DCGM_FI_DEV_GPU_TEMP{{{DCGM},gpu="0",UUID="GPU-0",hostname="x"}}': "40x30",
        },
        at=600,
    ),
    Case("DcgmWithoutSeries", "it does not answer: ExporterDown", up("dcgm", "0x30"), at=600),
)

FACTS = (
    Case(
        "FactsStale",
        "they were last written 20 minutes ago",
        {**own("facts_timestamp_seconds", "", "0x60"), **up("node", "1x60")},
        at=21 * 60,
        fires=(Firing(ON, "gpu-01 has not written its facts for 21m 0s"),),
    ),
    Case(
        "FactsStale",
        "never written",
        up("node", "1x60"),
        at=1200,
        fires=(Firing(ON, "gpu-01 has never written its facts"),),
    ),
    Case(
        "FactsStale",
        "written every minute",
        {**own("facts_timestamp_seconds", "", "0+60x60"), **up("node", "1x60")},
        at=1800,
    ),
    Case(
        "FactsStale",
        "written every minute, five minutes late",
        {**own("facts_timestamp_seconds", "", "-300+60x60"), **up("node", "1x60")},
        at=1800,
    ),
    Case(
        "FactsFailed",
        "one part",
        own("facts_failed", 'part="gpus"', "1x30"),
        at=1200,
        fires=(
            Firing({**ON, "part": "gpus"}, "gpu-01: gpufleet cannot read the facts about gpus"),
        ),
    ),
    Case("FactsFailed", "once", own("facts_failed", 'part="gpus"', "0x5 1 0x30"), at=420),
)

DRIVER = (
    Case(
        "DriverLibraryMismatch",
        "libraries were upgraded under a loaded driver",
        own("driver_mismatch", 'part="library"', "1x60"),
        at=1800,
        fires=(
            Firing(
                ON, "gpu-01: the loaded driver and the driver's libraries have different versions"
            ),
        ),
    ),
    Case(
        "DriverLibraryMismatch",
        "an upgrade of 5 minutes",
        own("driver_mismatch", 'part="library"', "0x5 1x5 0x60"),
        at=1260,
    ),
    Case(
        "DriverLibraryMismatch",
        "only the module on the disk is newer: what starts, starts",
        own("driver_mismatch", 'part="disk"', "1x60"),
        at=1800,
    ),
    Case(
        "DriverMismatch",
        "the fabric manager is of another version",
        own("driver_mismatch", 'part="fabric_manager"', "1x90"),
        at=80 * 60,
        fires=(
            Firing(
                {**ON, "part": "fabric_manager"},
                "gpu-01: the loaded driver and its fabric_manager have different versions",
            ),
        ),
    ),
    Case(
        "DriverMismatch",
        "the libraries, which page already",
        own("driver_mismatch", 'part="library"', "1x90"),
        at=80 * 60,
    ),
    Case(
        "RebootPending",
        "since yesterday",
        own("reboot_pending", 'reason="kernel"', "1x300"),
        step=300,
        at=DAY + 3600,
        fires=(
            Firing({**ON, "reason": "kernel"}, "gpu-01 has needed a reboot for a day (kernel)"),
        ),
    ),
    Case(
        "RebootPending",
        "since an hour",
        own("reboot_pending", 'reason="kernel"', "0x280 1x30"),
        step=300,
        at=DAY + 3600,
    ),
    Case(
        "NodeUnchecked",
        "an hour after its driver was changed",
        own("node_unchecked", "", "1x90"),
        at=3600,
        fires=(
            Firing(
                ON,
                "gpu-01: the driver was changed, and no check has passed since then, "
                "so no stage starts",
            ),
        ),
    ),
    Case("NodeUnchecked", "an upgrade", own("node_unchecked", "", "0x5 1x20 0x60"), at=1560),
)

DECLARED = (
    Case(
        "CheckFindings",
        "one that blocks, one that could not be judged",
        {
            **own("check_findings", 'severity="block"', "1x30"),
            **own("check_findings", 'severity="unknown"', "1x30"),
        },
        at=1200,
        fires=(Firing(ON, "gpu-01: the last check has 2 findings with result block or unknown"),),
    ),
    Case(
        "CheckFindings",
        "warnings",
        {
            **own("check_findings", 'severity="block"', "0x30"),
            **own("check_findings", 'severity="warn"', "7x30"),
        },
        at=1200,
    ),
    Case(
        "CheckStale",
        "9 days ago",
        own("check_timestamp_seconds", "", "0x240"),
        step=3600,
        at=9 * DAY,
        fires=(Firing(ON, "gpu-01 was last checked 9d 0h 0m 0s ago"),),
    ),
    Case(
        "CheckStale",
        "6 days ago",
        own("check_timestamp_seconds", "", "0x240"),
        step=3600,
        at=6 * DAY,
    ),
    Case(
        "Drift",
        "two things that matter now",
        own("drift_differences", 'matters="now"', "2x30"),
        at=1200,
        fires=(Firing(ON, "gpu-01 has 2 differences from its declaration that matter now"),),
    ),
    Case(
        "Drift",
        "things that matter at the next boot",
        {
            **own("drift_differences", 'matters="now"', "0x30"),
            **own("drift_differences", 'matters="next_boot"', "2x30"),
        },
        at=1200,
    ),
    Case(
        "DriftUnknown",
        "for a day",
        own("drift_unknown", "", "1x300"),
        step=300,
        at=DAY + 3600,
        fires=(
            Firing(ON, "gpu-01: a part of the node could not be compared with its declaration"),
        ),
    ),
    Case("DriftUnknown", "once", own("drift_unknown", "", "1x5 0x300"), step=300, at=DAY),
    Case(
        "DriftStale",
        "9 days ago",
        own("drift_timestamp_seconds", "", "0x240"),
        step=3600,
        at=9 * DAY,
        fires=(Firing(ON, "gpu-01 was last compared with its declaration 9d 0h 0m 0s ago"),),
    ),
    Case(
        "DriftStale",
        "6 days ago",
        own("drift_timestamp_seconds", "", "0x240"),
        step=3600,
        at=6 * DAY,
    ),
    Case(
        "DriftStale",
        "a node that nobody ever compared: there is no number to be old",
        up("node", "1x240"),
        step=3600,
        at=9 * DAY,
    ),
)

CERTIFICATE = {"path": "/etc/gpufleet/gateway/tls.pem", "use": "gateway"}
_AT = f'path="{CERTIFICATE["path"]}",use="{CERTIFICATE["use"]}"'
_ENDS = "gpu-01: the certificate /etc/gpufleet/gateway/tls.pem (gateway)"


def ends(seconds: int, at: int = 600) -> dict[str, str]:
    """Write a certificate of which so much is left when the case is asked."""
    return own("certificate_end_timestamp_seconds", _AT, f"{at + seconds}x30")


CERTIFICATES = (
    Case(
        "CertificateEndsSoon",
        "a second less than 21 days",
        ends(21 * DAY - 1),
        at=600,
        fires=(Firing({**ON, **CERTIFICATE}, f"{_ENDS} expires in 20d 23h 59m 59s"),),
    ),
    Case("CertificateEndsSoon", "21 days to the second", ends(21 * DAY), at=600),
    Case(
        "CertificateEndsSoon",
        "7 days to the second: still no page",
        ends(7 * DAY),
        at=600,
        fires=(Firing({**ON, **CERTIFICATE}, f"{_ENDS} expires in 7d 0h 0m 0s"),),
    ),
    Case("CertificateEndsSoon", "less than 7 days, which page", ends(6 * DAY), at=600),
    Case(
        "CertificateEndsSoon",
        "one of two certificates of a node",
        {
            **ends(20 * DAY),
            **own("certificate_end_timestamp_seconds", 'path="/x",use="exporter"', "9e9x30"),
        },
        at=600,
        fires=(Firing({**ON, **CERTIFICATE}, f"{_ENDS} expires in 20d 0h 0m 0s"),),
    ),
    Case(
        "CertificateEndsSoon",
        "a scrape that failed for some minutes",
        own("certificate_end_timestamp_seconds", _AT, f"{20 * DAY}x5 stale _x3 {20 * DAY}x30"),
        at=480,
        fires=(Firing({**ON, **CERTIFICATE}, f"{_ENDS} expires in 19d 23h 55m 0s"),),
    ),
    Case(
        "CertificateEndsSoon",
        "renewed, and the five minutes are over",
        own("certificate_end_timestamp_seconds", _AT, f"{20 * DAY}x5 {365 * DAY}x30"),
        at=720,
    ),
    Case("CertificateEndsThisWeek", "7 days to the second", ends(7 * DAY), at=600),
    Case(
        "CertificateEndsThisWeek",
        "a second less than 7 days",
        ends(7 * DAY - 1),
        at=600,
        fires=(Firing({**ON, **CERTIFICATE}, f"{_ENDS} expires in 6d 23h 59m 59s"),),
    ),
    Case(
        "CertificateEndsThisWeek",
        "it has ended",
        ends(-DAY),
        at=600,
        fires=(Firing({**ON, **CERTIFICATE}, f"{_ENDS} has expired"),),
    ),
    Case(
        "CertificateEndsThisWeek",
        "nodes without any",
        own("facts_timestamp_seconds", "", "0+60x60"),
        at=600,
    ),
)

# The last minute in which the first firing case of each is still silent.
EARLY = {
    "NodeDown": 8,
    "ExporterDown": 4,
    "DcgmWithoutSeries": 4,
    "FactsStale": 20,
    "FactsFailed": 14,
    "DriverLibraryMismatch": 14,
    "DriverMismatch": 59,
    "RebootPending": 1435,
    "NodeUnchecked": 29,
    "CheckFindings": 9,
    "CheckStale": 10140,
    "Drift": 9,
    "DriftUnknown": 1435,
    "DriftStale": 10140,
}

_ALL = (*ANSWERS, *FACTS, *DRIVER, *DECLARED, *CERTIFICATES)
CASES = (*_ALL, *too_early(_ALL, EARLY))


def test_alerts_on_nodes_fire_where_they_must_and_nowhere_else(tmp_path: Path) -> None:
    files = rule_files(RuleSettings())
    run(CASES, {"fleet.rules.yml": files["fleet.rules.yml"]}, fleet_rules.ALERTS, tmp_path)

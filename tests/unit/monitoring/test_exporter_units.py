"""What the exporters' units say, and what systemd makes of them; the counters that DCGM serves."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpufleet.converge.desired import File, Unit, Value
from gpufleet.errors import FleetError
from gpufleet.monitoring import dcgm, node_exporter
from gpufleet.monitoring.dcgm_counters import counters
from gpufleet.monitoring.exporters import Access
from gpufleet.monitoring.metrics import dcgm_metrics
from gpufleet.monitoring.metrics.metric import Job
from gpufleet.node.machine import Machine, System
from gpufleet.settings.cuda_settings import Dcgm
from gpufleet.settings.monitoring_settings import NodeExporter
from tests.support.checkout import ROOT
from tests.support.rows import each_row

GOLDEN = ROOT / "tests/data/golden/exporters"
PLAIN = Access()
GUARDED = Access(
    credentials={"certificate.pem": b"one", "key.pem": b"two", "web-config.yml": b"three"},
    listen="192.0.2.21",
    username="prometheus",
    password="secret",
    certificate_sha256="ab" * 32,
)
PACKAGED = NodeExporter()
ARCHIVED = NodeExporter.model_validate(
    {
        "port": 9101,
        "archive": {
            "url": "https://downloads.example.net/node_exporter-1.12.1.linux-amd64.tar.gz",
            "sha256": "b51d8a76aa2a9156a55d501aca6276fae09e262259a5e4e831d2c2222f084e63",
        },
        "collectors": ["processes", "softnet"],
        "without": ["ethtool"],
    }
)
DCGM = Dcgm(version="1:4.6.0-1", exporter_version="4.8.2-1")
needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed"
)


def text(values: tuple[Value, ...], ending: str) -> str:
    """Return the one file whose path ends so."""
    (found,) = (
        each.content.decode()
        for each in values
        if isinstance(each, File) and each.path.endswith(ending)
    )
    return found


def exporter(access: Access, *, profiling: bool = False) -> str:
    return text(
        dcgm.services(DCGM, access, profiling=profiling),
        "nvidia-dcgm-exporter.service.d/gpufleet.conf",
    )


UNITS = {
    "node_exporter-package.service": lambda: node_exporter.unit(PACKAGED, PLAIN).content,
    "node_exporter-archive-tls.service": lambda: node_exporter.unit(ARCHIVED, GUARDED).content,
    "dcgm-exporter.conf": lambda: exporter(PLAIN),
    "dcgm-exporter-tls.conf": lambda: exporter(GUARDED),
    "dcgm.conf": lambda: text(
        dcgm.services(DCGM, PLAIN, profiling=False), "nvidia-dcgm.service.d/gpufleet.conf"
    ),
}


@each_row("name", UNITS)
def test_what_nodes_get_is_reviewed_line_by_line(name: str):
    """Write the new ones: `UPDATE_GOLDEN=1 pytest tests/unit/monitoring/test_exporter_units.py`."""
    rendered = UNITS[name]()
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(rendered)

    assert rendered == (GOLDEN / name).read_text()


@needs_systemd
@pytest.mark.parametrize(
    ("wanted", "access"),
    [(PACKAGED, PLAIN), (PACKAGED, GUARDED), (ARCHIVED, PLAIN), (ARCHIVED, GUARDED)],
)
def test_systemd_finds_nothing_wrong(tmp_path: Path, wanted: NodeExporter, access: Access):
    rendered = node_exporter.unit(wanted, access)
    unit = tmp_path / rendered.unit
    program = shutil.which("env") or ""
    unit.write_text(rendered.content.replace(node_exporter.program(wanted), program))

    verify = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        check=False,
    )

    assert rendered.unit not in verify.stderr
    assert verify.returncode == 0, verify.stderr


@needs_systemd
@pytest.mark.parametrize("kind", ["node", "dcgm"])
def test_the_sandbox_keeps_its_strength(tmp_path: Path, kind: str):
    """Debian's own unit of the node exporter is rated 9.2, NVIDIA's of the other one 9.6."""
    if kind == "node":
        rendered = node_exporter.unit(PACKAGED, GUARDED)
        (tmp_path / rendered.unit).write_text(rendered.content)
        name = rendered.unit
    else:
        name = dcgm.EXPORTER
        (tmp_path / name).write_text("[Service]\nUser=root\nExecStart=/usr/bin/dcgm-exporter\n")
        (tmp_path / f"{name}.d").mkdir()
        (tmp_path / f"{name}.d" / "gpufleet.conf").write_text(exporter(GUARDED))

    rating = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", name],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert rating.returncode == 0, rating.stdout.splitlines()[-1:]


def test_every_credential_is_a_reason_to_restart():
    """A renewed certificate, another password and another key each make another fingerprint."""
    changed = [
        Access(credentials={**GUARDED.credentials, name: b"new"}) for name in GUARDED.credentials
    ]
    before = Access(credentials=GUARDED.credentials)

    for fingerprints in (
        [node_exporter.unit(PACKAGED, each).fingerprint for each in (before, *changed)],
        [_fingerprint(each) for each in (before, *changed)],
    ):
        assert len(set(fingerprints)) == 4


def test_another_list_of_counters_restarts_the_exporter_and_not_the_engine():
    one, two = (
        {
            each.name: each.fingerprint
            for each in dcgm.services(DCGM, PLAIN, profiling=profiling)
            if isinstance(each, Unit)
        }
        for profiling in (False, True)
    )

    assert one[dcgm.ENGINE] == two[dcgm.ENGINE]
    assert one[dcgm.EXPORTER] != two[dcgm.EXPORTER]


def _fingerprint(access: Access) -> str | None:
    (unit,) = (
        each
        for each in dcgm.services(DCGM, access, profiling=False)
        if isinstance(each, Unit) and each.name == dcgm.EXPORTER
    )
    return unit.fingerprint


# The node exporter's flags


def test_no_collector_is_both_on_and_off():
    """An operator's word wins over ours, whichever way."""
    flags = node_exporter.arguments(ARCHIVED, PLAIN)

    assert "--collector.softnet" in flags
    assert "--no-collector.softnet" not in flags
    assert "--no-collector.ethtool" in flags
    assert "--collector.ethtool" not in flags
    assert not any(flag.startswith("--collector.ethtool.") for flag in flags)


def test_verify_asks_for_nothing_that_was_left_out():
    wanted = NodeExporter.model_validate({"without": ["loadavg", "textfile"]})
    asked = node_exporter.metrics(wanted, PLAIN).families

    assert not {"node_load1", "node_textfile_scrape_error"} & set(asked)
    assert {"node_load1", "node_cpu_seconds_total"} <= set(
        node_exporter.metrics(PACKAGED, PLAIN).families
    )


def test_the_look_has_the_password_and_the_log_has_not():
    asked = node_exporter.metrics(PACKAGED, GUARDED)

    assert asked.parameters()["password"] == "secret"
    assert "secret" not in repr(asked)


# DCGM


def test_every_metric_of_dcgm_is_in_the_file_and_nothing_else():
    """Read as the exporter reads it: three fields, without spaces, # begins a comment."""
    lines = counters(profiling=True).decode().splitlines()
    rows = list(csv.reader(line for line in lines if not line.startswith("#")))

    assert [tuple(row) for row in rows] == [
        (each.name, each.type, each.help) for each in dcgm_metrics.METRICS
    ]
    assert {each.job for each in dcgm_metrics.METRICS} == {Job.DCGM}


def test_every_release_of_the_exporter_knows_every_name():
    """One unknown name ends it at every start; the names are those of its own sources."""
    lines = (ROOT / "tests/data/dcgm_fields.txt").read_text().splitlines()
    known = {line for line in lines if not line.startswith("#")}

    assert "DCGM_FI_DEV_GPU_TEMP" in known
    assert {each.name for each in dcgm_metrics.METRICS} - known == set()


def test_profiling_fields_are_there_only_where_they_may_be_read():
    """One that may not be read leaves the exporter without any series of any GPU."""
    without, with_them = (
        {line.split(",")[0] for line in counters(profiling=each).decode().splitlines()}
        for each in (False, True)
    )

    assert not [name for name in without if name.startswith("DCGM_FI_PROF")]
    assert "DCGM_FI_PROF_SM_ACTIVE" in with_them
    assert {name for name in with_them if not name.startswith("DCGM_FI_PROF")} == without


@each_row(
    ("gpus", "profiled"),
    [
        ((0x2330, 0x2330), True),  # H100
        ((0x2901,), True),  # B200
        ((0x20B2, 0x20B2), False),  # A100
        ((0x2330, 0x20B2), False),
        ((0x26B9,), False),  # L40S
        ((0xFFFF,), False),  # not known: the safe side
        ((), False),
    ],
)
def test_who_may_profile_is_decided_by_the_boards(gpus: tuple[int, ...], profiled: bool):
    assert dcgm.has_profiling(DCGM, Machine(gpus=gpus)) is profiled
    forced = DCGM.model_copy(update={"profiling": not profiled})
    assert dcgm.has_profiling(forced, Machine(gpus=gpus)) is not profiled


def test_a_system_without_dcgm_is_told_what_to_write():
    with pytest.raises(FleetError, match=r"gpu-13: .*Write `dcgm: null`"):
        dcgm.require_published(System("debian", "13", "x86_64"), "gpu-13")
    dcgm.require_published(System("debian", "12", "x86_64"), "gpu-12")
    dcgm.require_published(System("slackware", "15", "x86_64"), "gpu-15")  # nobody knows

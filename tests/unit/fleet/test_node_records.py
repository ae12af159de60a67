"""What is written on nodes of what was found about them: declaration, check, drift, deploys."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.checks.finding import Finding, GpuId, Severity
from gpufleet.fleet import node_records
from gpufleet.fleet.drift import Deviation, NodeDrift, Unread, Urgency
from gpufleet.monitoring.metrics import gpufleet_metrics
from gpufleet.remote import payload
from gpufleet.settings.parse import parse_settings
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.unit.monitoring.programs import program

TEXTFILES = "var/lib/gpufleet/textfile"
LOCK = {"driver": "580.95.05"}


def finding(check, severity, **more):
    return Finding(check, "gpu-01", severity, "found", **more)


FOUND = (
    finding("gpu-count", Severity.BLOCK),
    finding("ecc", Severity.BLOCK, gpu=GpuId(3)),
    finding("clock", Severity.WARN),
    finding("disk-space", Severity.UNKNOWN),
    finding("temperature", Severity.OK),
)


@pytest.fixture
def record(tmp_path):
    """`record(files, deploy=...)`: run the program as a node does; return what it says."""

    def run(files, **parameters):
        parameters = {"sysroot": str(tmp_path), "files": files, **parameters}
        done = subprocess.run(
            [sys.executable, "-I", "-"],
            input=payload.program("monitoring/record", **parameters),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    return run


def node(tmp_path):
    (tmp_path / TEXTFILES).mkdir(parents=True)
    (tmp_path / "var/lib/gpufleet/deploys").mkdir()


def samples(text):
    """Return {name: [(labels, value)]} by the publisher's own parser."""
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            found.setdefault(each.name, []).append((each.labels, each.value))
    return found


def counts(found, name, key):
    return {labels[key]: value for labels, value in samples_of(found, name)}


def samples_of(found, name):
    return [(labels, value) for each, labels, value in found if each == f"gpufleet_{name}"]


# --- what is counted


def test_findings_are_counted_by_severity_and_what_passed_is_none():
    found = node_records.check_record(FOUND, 1700000000)

    assert counts(found, "check_findings", "severity") == {
        "block": 2, "unknown": 1, "warn": 1, "info": 0}  # fmt: skip
    assert samples_of(found, "check_timestamp_seconds") == [({}, 1700000000)]


def test_what_an_operator_accepted_blocks_nothing():
    accepted = finding("ecc", Severity.BLOCK, accepted="ticket 4711, until 2026-12-31")
    found = node_records.check_record([*FOUND, accepted], 0)

    assert counts(found, "check_findings", "severity")["block"] == 2
    assert counts(found, "check_findings", "severity")["info"] == 1


def test_what_was_not_asked_because_of_another_finding_is_not_counted_beside_it():
    unasked = finding("nvlink-links", Severity.UNKNOWN, cause="gpu-count")

    assert node_records.check_record([*FOUND, unasked], 0) == node_records.check_record(FOUND, 0)


def test_drift_is_counted_by_when_it_matters():
    moved = (Deviation("a", "x"), Deviation("a", "y"), Deviation("b", "z", Urgency.NEXT_BOOT))
    found = node_records.drift_record(NodeDrift(moved), 1700000000)

    assert counts(found, "drift_differences", "matters") == {
        "now": 2, "next_boot": 1, "next_upgrade": 0}  # fmt: skip
    assert samples_of(found, "drift_unknown") == [({}, 0)]
    assert samples_of(found, "drift_timestamp_seconds") == [({}, 1700000000)]


@pytest.mark.parametrize(
    ("drift", "refused"), [(NodeDrift(unread=(Unread("a", "why"),)), False), (NodeDrift(), True)]
)
def test_what_could_not_be_compared_is_unknown_and_not_clean(drift, refused):
    found = node_records.drift_record(drift, 0, refused=refused)

    assert samples_of(found, "drift_unknown") == [({}, 1)]


def test_a_check_is_as_old_as_its_probe():
    assert node_records.probed_at({"time": "2026-01-01T00:00:00Z"}, 5) == 1767225600
    assert node_records.probed_at("no answer within 60 s", 5) == 5


# --- what a node is told of itself


def told(on_bus=None, **data):
    return json.loads(node_records.declaration(parse_settings(data), gpus=on_bus, release=None))


def test_the_declared_number_of_gpus_is_expected_else_what_is_on_the_bus():
    assert told(on_bus=7, gpus={"count": 8})["gpus"] == 8
    assert told(on_bus=7)["gpus"] == 7
    assert told(on_bus=7, gpu_node=False)["gpus"] is None


def test_every_lock_has_a_hash_of_its_own():
    one, other = (told(gpu_lock={"driver": driver})["lock"] for driver in ("580.95.05", "580"))

    assert len({one, other, told()["lock"]}) == 3
    assert told()["lock"] == ""
    assert one == told(gpu_lock=LOCK)["lock"]


def test_gpus_are_measured_by_dcgm_only_where_its_exporter_is():
    dcgm = {"version": "1:4.2.0-1", "cuda_major": 13}
    repository = {"url": "https://example.net/repository", "keyring_sha256": "0" * 64}
    cuda = {"repository": repository, "toolkit": "13-0", "version": "13.0.3-1"}

    assert not told()["dcgm"]
    assert not told(cuda=cuda, dcgm={**dcgm, "exporter_version": None})["dcgm"]
    assert told(cuda=cuda, dcgm={**dcgm, "exporter_version": "4.2.0-1"})["dcgm"]


# --- the program


def test_what_is_recorded_is_served_by_name_type_and_labels_of_the_list(record, tmp_path):
    node(tmp_path)
    files = {
        node_records.CHECK: node_records.check_record(FOUND, 1700000000),
        node_records.DRIFT: node_records.drift_record(NodeDrift(), 1700000000),
    }

    assert record(files)["error"] == ""

    text = "".join((tmp_path / TEXTFILES / name).read_text() for name in files)
    found = samples(text)
    listed = {metric.name: metric for metric in gpufleet_metrics.FINDINGS}
    assert set(found) == set(listed)
    for name, rows in found.items():
        assert {tuple(labels) for labels, _ in rows} == {listed[name].labels}
    said = subprocess.run(
        [program("prometheus", "usr/bin/promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stdout + said.stderr) == (0, "")


def test_a_deploy_that_ended_is_dated_for_the_facts(record, tmp_path):
    node(tmp_path)

    assert record({}, deploy="vllm") == {"schema": 1, "error": "", "recorded": ["vllm"]}

    at = int((tmp_path / "var/lib/gpufleet/deploys/vllm").read_text())
    assert abs(at - time.time()) < 60


def test_a_node_that_has_no_facts_yet_is_left_as_it_is(record, tmp_path):
    said = record({node_records.CHECK: node_records.check_record(FOUND, 0)})

    assert "the node has no /var/lib/gpufleet/textfile" in said["error"]
    assert list(tmp_path.iterdir()) == []


def test_a_metric_that_is_in_no_list_is_not_written(record, tmp_path):
    node(tmp_path)

    assert record({"x.prom": [["gpufleet_invented", {}, 1]]})["error"] != ""
    assert list((tmp_path / TEXTFILES).iterdir()) == []


def test_a_label_says_what_it_was_given_whatever_is_in_it(record, tmp_path):
    node(tmp_path)
    strange = 'a "quoted"\\path\nand a line'

    record({"x.prom": [["gpufleet_check_findings", {"severity": strange}, 0.1]]})

    found = samples((tmp_path / TEXTFILES / "x.prom").read_text())
    assert found == {"gpufleet_check_findings": [({"severity": strange}, 0.1)]}


# --- the commands


def test_a_node_that_cannot_be_written_to_is_named_and_the_status_stays(tmp_path):
    """This machine is no node: it has no directory for the file, and none is made."""
    if Path("/var/lib/gpufleet/textfile").exists():
        pytest.skip("this machine is a node")
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories/x.py").write_text(
        "from gpufleet import inventory\n"
        "globals().update(inventory.load(__file__, groups={'gpu': [('@local', {})]}))\n"
    )

    plain, recording_too = (
        warm_command.run(["check", "inventories/x.py", *more], cwd=tmp_path, connects=True)
        for more in ((), ("--record",))
    )

    assert recording_too.returncode == plain.returncode == 1
    assert "note: @local: its findings are not recorded on the node: the node has no /var" in (
        recording_too.stderr
    )
    assert not Path("/var/lib/gpufleet/textfile").exists()


def test_recorded_probes_have_no_node_to_write_to():
    recorded = ROOT / "src/gpufleet/catalog/data/nodes/t4x1.json"
    done = warm_command.run(["check", "--from", recorded, "--record"])

    assert done.returncode == 2
    assert "--record works only with live nodes:" in done.stderr

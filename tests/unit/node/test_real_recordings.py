"""Recordings of real machines: what identifies them is gone, and what they say can be read."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from gpufleet.node.topology import node_from_probe
from tests.support import real_recordings
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
SIMULATED = sorted(NODES.glob("*.json"))
REAL = sorted(
    (ROOT / "tests/data/nodes/real").glob("*.json")
)  # none so far: docs/reference/probe.md says how


def recording(path):
    """A recording as it is kept: of a real machine, nothing that identifies it."""
    document = json.loads(path.read_text())
    return document if path in REAL else real_recordings.anonymous(document)


@pytest.fixture
def document():
    """`document("h100x8")`: a recording, free to be changed."""
    return lambda profile: json.loads((NODES / f"{profile}.json").read_text())


@each_row("path", [*SIMULATED, *REAL], ids=lambda path: path.stem)
def test_a_recorded_machine_can_be_planned_on(path):
    document = recording(path)

    node = node_from_probe("gpu-01", document)

    assert len(node.gpus) == document["driver"]["gpu_count"]
    assert path in SIMULATED or path.stem == real_recordings.name(document)


@each_row("path", [*SIMULATED, *REAL], ids=lambda path: path.stem)
def test_a_recorded_machine_is_anonymous(path):
    document = recording(path)

    assert real_recordings.anonymous(document) == document


SECRETS = {
    "hostname": "rack7-node12.example.net",
    "machine_id": "8d4c5f3a9b7e4f21a6c0d2e1f3b5a798",
    "boot_id": "d1f0c3a2-7b6e-4d59-8c4a-1e2f3a4b5c6d",
}


@pytest.fixture
def private(document):
    """A machine whose every identifying value is known to the test."""
    found = document("gb200x4")
    found.update(SECRETS)
    found["driver"]["disk"]["signer"] = "rack7-node12.example.net Secure Boot Module Signature key"
    found["nics"]["net"][0].update(
        mac="94:6d:ae:12:34:56", ipv4="203.0.113.77", ipv6=["fe80::966d:aeff:fe12:3456"]
    )
    found["kernel_log"]["lines"].append(
        [
            99.0,
            "NVRM: GPU 94:6d:ae:12:34:56 of 203.0.113.77 is 41c1ae79-11a1-4a2b-9d3e-0123456789ab",
        ]
    )
    found["system"]["cmdline"] = (
        "root=UUID=2f1e iommu=pt ip=203.0.113.77 token=hunter2 modprobe.blacklist=nouveau"
    )
    return found


def test_nothing_that_identifies_a_machine_is_left(private):
    before = [gpu[key] for gpu in private["gpus"] for key in ("uuid", "serial")]
    chassis = [gpu["platform"]["chassis_serial"] for gpu in private["gpus"]]

    text = json.dumps(real_recordings.anonymous(private))

    left = {*SECRETS.values(), *before, *chassis, "rack7", "203.0.113", "94:6d", "966d", "hunter2"}
    assert [secret for secret in left if secret in text] == []
    assert "41c1ae79" not in text


def test_what_was_the_same_is_the_same_and_what_differed_differs(private):
    private["driver"]["excluded"] = [{"bus_id": "0000:5d:00.0", "uuid": private["gpus"][1]["uuid"]}]

    found = real_recordings.anonymous(private)

    uuids = [gpu["uuid"] for gpu in found["gpus"]]
    assert len(set(uuids)) == len(uuids)
    assert found["driver"]["excluded"][0]["uuid"] == uuids[1]
    assert len({gpu["platform"]["chassis_serial"] for gpu in found["gpus"]}) == 1


def test_what_identifies_nobody_stays(private):
    found = real_recordings.anonymous(private)

    for section in ("p2p", "pcie", "pci", "errors", "numa"):
        assert found[section] == private[section]
    assert [gpu["name"] for gpu in found["gpus"]] == [gpu["name"] for gpu in private["gpus"]]
    assert [gpu["pci"] for gpu in found["gpus"]] == [gpu["pci"] for gpu in private["gpus"]]
    assert found["system"]["cmdline"] == "iommu=pt"


def test_what_a_machine_serves_is_not_told(private):
    private["stages"] = [{"unit": "vllm-secret-0.service", "arguments": ["/srv/secret"]}]
    private["models"] = {"/srv/secret": {"config": {"architectures": ["SecretForCausalLM"]}}}

    assert "secret" not in json.dumps(real_recordings.anonymous(private)).lower()


def test_a_machine_is_made_anonymous_once(private):
    """A second time changes nothing: the test of what is published relies on it."""
    net = private["nics"]["net"][0]
    private["nics"]["net"] = [{**net, "ipv4": f"198.51.100.{n}"} for n in range(20)]

    once = real_recordings.anonymous(private)

    assert real_recordings.anonymous(deepcopy(once)) == once


def test_no_identity_is_not_a_value(document):
    """The zeros of a machine without a fabric are kept, or it would seem to be in one."""
    found = real_recordings.anonymous(document("h100x8"))

    assert {fabric["cluster_uuid"] for fabric in found["fabric"]} == {"0" * 32}


def test_a_recording_is_called_after_its_gpus_and_its_driver(document):
    assert real_recordings.name(document("h100x8")) == "nvidia-h100-80gb-hbm3-x8-570.124.06"


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (
            {"init": {"missing": "library_not_found"}, "version": {"missing": "x"}},
            "library not found",
        ),
        ({"init": "ok", "version": "570.1"}, "the driver lists none"),
    ],
)
def test_a_machine_without_gpus_is_not_recorded(driver, why):
    with pytest.raises(FleetError, match=f"no NVIDIA GPU answers on this machine .{why}"):
        real_recordings.with_gpus({"driver": driver, "gpus": []})


def test_the_command_refuses_in_one_line():
    """On this machine, unless it has a GPU: then there is nothing to refuse."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has NVIDIA's driver")

    done = subprocess.run(
        [sys.executable, "-m", "tests.support.record_node", "--real"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "nvidia-smi" in done.stderr

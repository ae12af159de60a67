"""Faults of simulated GPUs make the right alerts pend, for the right GPU: in a real Prometheus.

It scrapes the stand-ins of DCGM on this machine with the rules that are rendered for everybody, so
that a metric that nobody serves, a label that is called otherwise or a unit that differs is found
without a lab. How long an alert waits, and Alertmanager, are tests/lab/test_alerts.py's.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

import pytest

from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from lab import nvml
from tests.unit.monitoring import dcgm
from tests.unit.monitoring.programs import program

pytestmark = pytest.mark.long

NODE = "gpu-01"
# Healthy samples come first: a rate needs to see a counter rise, an average outweighs them.
HEALTHY_SECONDS = 10
WITHIN = 180

# Of the GPUs that a fault was set on: each alert must name those and no other.
FAULTS = (
    ("ecc-uncorrected", 0, "EccUncorrected"),
    ("remap-failed", 1, "RowRemapFailed"),
    ("remap-pending", 2, "RowRemapPending"),
    ("hot", 3, "GpuHot"),
    ("hot-memory", 1, "GpuMemoryHot"),
    ("throttle-hw-thermal", 4, "GpuHardwareSlowdown"),
    ("throttle-hw-thermal", 4, "GpuThermalThrottling"),
    ("throttle-sw-cap", 2, "GpuPowerThrottling"),
    ("nvlink-errors", 5, "NvlinkErrors"),
    ("nvlink-errors-fatal", 3, "NvlinkFlapping"),
    ("pcie-replays", 1, "PcieReplays"),
    ("xid-79", 6, "XidOffTheBus"),
    ("gpu-lost", 6, "GpuLost"),
    ("xid-74", 5, "XidNvlink"),
    ("xid-154-reboot", 7, "XidCritical"),
    ("xid-63", 0, "XidWatch"),
    ("xid-31-info", 4, "XidApplication"),
    ("fabric-resources", 7, "FabricNotReady"),
    ("throttle-power-brake", 7, "GpuHardwareSlowdown"),
    ("throttle-power-brake", 7, "GpuPowerThrottling"),
)

FACTS = """\
# TYPE gpufleet_gpus gauge
gpufleet_gpus{state="expected"} 8
gpufleet_gpus{state="present"} 8
"""


class Facts(BaseHTTPRequestHandler):
    """What the node itself says, in the place of its node exporter."""

    def do_GET(self):
        body = FACTS.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nobody reads it."""


@contextmanager
def watched(folder, node):
    """Yield what asks a Prometheus for its alerts: {(alert, gpu)}."""
    facts = ThreadingHTTPServer(("127.0.0.1", 0), Facts)
    threading.Thread(target=facts.serve_forever, daemon=True).start()
    for name, text in rule_files(RuleSettings()).items():
        (folder / name).write_text(text)
    port = dcgm.free_port()
    scrape = [
        {"job_name": job, "static_configs": [{"targets": [address], "labels": {"instance": NODE}}]}
        for job, address in (("dcgm", node.address), ("node", f"127.0.0.1:{facts.server_port}"))
    ]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {
        "global": every,
        "scrape_configs": scrape,
        "rule_files": ["gpu.rules.yml", "fleet.rules.yml"],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    server = subprocess.Popen(
        [program("prometheus", "usr/bin/prometheus"), f"--config.file={folder}/prometheus.yml",
         f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def alerts():
        with urlopen(f"http://127.0.0.1:{port}/api/v1/alerts", timeout=10) as answer:
            found = json.load(answer)["data"]["alerts"]
        assert {each["labels"]["instance"] for each in found} <= {NODE}
        return {(each["labels"]["alertname"], each["labels"].get("gpu")) for each in found}

    try:
        dcgm.answers(server, port)
        yield alerts
    finally:
        server.kill()
        server.wait()
        facts.shutdown()


def until(alerts, wanted):
    """Wait until all of these alerts are there; return all that are."""
    end = time.monotonic() + WITHIN
    while not wanted <= (found := alerts()):
        assert time.monotonic() < end, f"missing: {wanted - found}; there are {found}"
        time.sleep(1)
    return found


def of_gpus(found):
    return {(alert, gpu) for alert, gpu in found if gpu is not None}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return nvml.build(tmp_path_factory.mktemp("nvml"))


def test_each_fault_is_an_alert_of_its_gpu_and_a_healthy_node_has_none(library, tmp_path):
    wanted = {(alert, str(gpu)) for _, gpu, alert in FAULTS}
    with (
        dcgm.node(tmp_path, library, "h100x8", "-c", "1000") as node,
        watched(tmp_path, node) as alerts,
    ):
        time.sleep(HEALTHY_SECONDS)
        assert of_gpus(alerts()) == set()

        node.breaks(*((fault, gpu) for fault, gpu, _ in FAULTS))
        found = of_gpus(until(alerts, wanted))
        node.breaks()
        state = {("RowRemapFailed", "1"), ("RowRemapPending", "2"), ("GpuHot", "3"),
                 ("GpuLost", "6"), ("FabricNotReady", "7"), ("GpuMemoryHot", "1")}  # fmt: skip
        end = time.monotonic() + WITHIN
        while alerts() & state:
            assert time.monotonic() < end, alerts() & state
            time.sleep(1)

    assert found == wanted


def test_an_engine_that_reads_no_more_is_an_alert_of_the_node(library, tmp_path):
    """After an Xid 119 the exporter answers, and has nothing to say of any GPU."""
    with (
        dcgm.node(tmp_path, library, "h100x8", "-c", "1000") as node,
        watched(tmp_path, node) as alerts,
    ):
        time.sleep(HEALTHY_SECONDS)
        node.breaks(("xid-119", 2))

        until(alerts, {("XidGsp", "2"), ("DcgmWithoutSeries", None)})

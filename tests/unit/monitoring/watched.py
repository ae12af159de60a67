"""
A fleet on one machine, to look at dashboards: `python -m tests.unit.monitoring.watched`.

Real: Prometheus with our rules, Alertmanager with a silence, three node exporters. Stand-ins that
the lab has, too: two host engines and DCGM exporters over simulated GPUs, whose load moves and that
break. Recorded: what a real vLLM 0.32.0 served, its numbers moved as those of a day. Made up: what
nodes' own facts say. All of it listens on 127.0.0.1 and ends with this program.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import click
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.monitoring.metrics.metric import Job
from gpufleet.monitoring.rules.files import RuleSettings, rule_files
from gpufleet.settings.monitoring_settings import Objectives
from lab import machine, nvml
from tests.unit.monitoring import dcgm, example_fleet
from tests.unit.monitoring.example_fleet import STAGES, Target, load
from tests.unit.monitoring.programs import program

RECORDED = Path(__file__).with_name("recorded") / "vllm-0.32.0.txt"
SCRAPE = 5  # seconds
# Which boards stand in for which node; gpu-03 has none, and so no DCGM.
BOARDS = {"gpu-01": "h100x8", "gpu-02": "a100x4-pcie"}
PROMISED = {
    "chat": Objectives(ttft_p99_seconds=4, itl_p99_seconds=0.25),
    "code": Objectives(ttft_p99_seconds=2, itl_p99_seconds=0.25),
}


class Fleet:
    """What is wrong at which time: minutes since the start."""

    def __init__(self) -> None:
        self.begun = time.time()

    @property
    def minute(self) -> float:
        return (time.time() - self.begun) / 60

    def after(self, minute: float, until: float = math.inf) -> bool:
        return minute <= self.minute < until


def facts(fleet: Fleet, node: str) -> str:
    """Return what a node says of itself: gpu-02 gets another driver, code-1 restarts in a loop."""
    now = time.time()
    found = []
    of_node = Target(Job.NODE, {"instance": node, "job": "node"})
    for name, own, usual in example_fleet.samples(of_node, now):
        if not name.startswith("gpufleet_"):
            continue
        labels = dict(own)
        value = _changed(fleet, node, name, labels, usual)
        braces = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
        found.append(f"{name}{{{braces}}} {value:.10g}\n")
    return "".join(found)


def _changed(fleet: Fleet, node: str, name: str, labels: dict[str, str], value: float) -> float:
    """Return what a fact is on this fleet, at this time; changes `labels` of the upgraded node."""
    if name == "gpufleet_gpus":
        return {"gpu-01": 8, "gpu-02": 4, "gpu-03": 4}[node]
    if labels.get("stage") == "code-1":
        if name == "gpufleet_stage_restarts_total":
            return max(0, math.floor((fleet.minute - 6) / 1.5))
        if name == "gpufleet_stage_active":
            return float(not fleet.after(6))
    if name == "gpufleet_deploy_timestamp_seconds":
        value = fleet.begun - 3600
    return _upgraded(fleet, name, labels, value) if node == "gpu-02" else value


def _upgraded(fleet: Fleet, name: str, labels: dict[str, str], value: float) -> float:
    """Return a value of the node that is upgraded: installed at 4, reloaded at 8, checked at 9."""
    old, new = "580.82.07", "580.95.05"
    if name == "gpufleet_node_info":
        disk = new if fleet.after(4) else old
        loaded = new if fleet.after(8) else old
        labels |= {"driver_disk": disk, "library": disk, "fabric_manager": disk}
        labels |= {"driver_loaded": loaded, "lock": "3f9ac1d2" if fleet.after(4) else "b07e5512"}
    between = fleet.after(4, 8)
    if name == "gpufleet_driver_mismatch":
        return float(between)
    if name == "gpufleet_reboot_pending":
        return float(labels["reason"] == "kernel" and fleet.after(9.5))
    if name == "gpufleet_node_unchecked":
        return float(fleet.after(4, 9))
    if name == "gpufleet_check_findings":
        return float(labels["severity"] == ("block" if between else "warn"))
    if name == "gpufleet_stage_active":
        return float(not fleet.after(4, 10))
    if name == "gpufleet_deploy_timestamp_seconds" and fleet.after(4):
        return fleet.begun + (240 if labels["deploy"] == "node" else 600 * fleet.after(10))
    return value


def boards(fleet: Fleet, node: str, healthy: machine.Machine) -> str:
    """Return the state of a node's simulated GPUs: load, one that is too hot, one with an Xid."""
    now = time.time()
    count = {"gpu-01": 8, "gpu-02": 4}[node]
    hottest = 600 if node == "gpu-01" else 280
    lines = [machine.profile_text(healthy)]
    for gpu in range(count):
        busy = 0.0 if node == "gpu-02" and fleet.after(4, 10) else load(now, 0.02 * gpu)
        hot = node == "gpu-01" and gpu == 3 and fleet.after(5, 12)
        heat = 34 + 36 * busy + gpu + (17 * min((fleet.minute - 5) / 1.5, 1) if hot else 0)
        values = {
            "util.gpu": round(100 * min(busy * 1.05, 1)),
            "util.mem": round(55 * busy),
            "temp.gpu": round(heat),
            "temp.mem": round(heat + 9),
            "power.draw_mw": round(1000 * (70 + hottest * busy)),
            "clocks.sm": 1980 - 8 * gpu - (520 if hot and heat > 86 else 0) if busy else 345,
            "clocks.reasons": 0x20 if hot and heat > 80 else 0,
            "nvlink.tx_kib": round(example_fleet.grown(3e7, now, 0.02 * gpu)),
            "nvlink.rx_kib": round(example_fleet.grown(3e7, now, 0.02 * gpu)),
            "mem.used_mib": 71000 + 90 * gpu if node == "gpu-01" else 36000,
        }
        if node == "gpu-01" and gpu == 6 and fleet.after(7):
            values["xid.31"] = 1 + fleet.after(11)
        lines += [f"gpu.{gpu}.{key} = {value}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def moved(families: list[Metric], target: Target, now: float) -> str:
    """Return a recording with its numbers as they would be now: counters grow, gauges move."""
    ours = {
        (
            name,
            tuple(sorted((key, value) for key, value in labels.items() if key != "model_name")),
        ): v
        for name, labels, v in example_fleet.samples(target, now)
    }
    found = []
    for family in families:
        kind = family.type if not family.name.endswith("_created") else "gauge"
        found.append(f"# TYPE {family.name}{'_total' * (kind == 'counter')} {kind}\n")
        for sample in family.samples:
            labels = {**sample.labels}
            known = tuple(sorted((k, v) for k, v in labels.items() if k != "model_name"))
            value = _observed(target, sample.name, float(labels.get("le", "inf")), now)
            if value is None:
                value = ours.get((sample.name, known))
            if value is None:
                value = sample.value
            if "model_name" in labels:
                labels["model_name"] = target.labels["model"]
            braces = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
            found.append(f"{sample.name}{{{braces}}} {value:.10g}\n")
    return "".join(found)


def _observed(target: Target, name: str, le: float, now: float) -> float | None:
    """Return what a histogram of the recording would have counted, under that server's bounds."""
    family = name.removesuffix("_bucket").removesuffix("_count")
    if family == name or family not in example_fleet.MIDDLE:
        return None
    middle, per_second = example_fleet.MIDDLE[family]
    phase = example_fleet.phase_of(target.labels)
    # Two kinds of requests, of which now one, now the other comes more often.
    slow = middle * 0.8
    fast_count = example_fleet.grown(per_second * 0.9, now, phase)
    slow_count = example_fleet.grown(per_second * 0.1, now, phase + 0.4)
    return fast_count * _below(le, slow) + slow_count * _below(le, middle * 3)


def _below(le: float, middle: float) -> float:
    return 1.0 if le == math.inf else 0.5 * (1 + math.erf(math.log(le / middle) / 0.9))


def serving(fleet: Fleet, target: Target) -> ThreadingHTTPServer:
    """Serve a recording as a vLLM server would, until it is down."""
    families = list(text_string_to_metric_families(RECORDED.read_text()))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stage = target.labels["stage"]
            gone = (stage == "code-1" and fleet.after(6)) or (
                stage == "chat-1" and fleet.after(4, 10)
            )
            body = b"" if gone else moved(families, target, time.time()).encode()
            self.send_response(503 if gone else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def run(folder: Path, port: int, running: ExitStack) -> Iterator[Fleet]:
    """Start everything, then yield every few seconds, with the facts and GPUs of that moment."""
    fleet = Fleet()
    library = nvml.build(folder)
    jobs: dict[str, list[dict[str, object]]] = {"node": [], "dcgm": [], "vllm": []}

    def start(*command: object) -> None:
        with (folder / f"{Path(str(command[0])).name}.log").open("a") as log:
            process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
        running.callback(process.wait)
        running.callback(process.terminate)

    def scrape(job: str, address: object, **labels: str) -> None:
        jobs.setdefault(job, []).append({"targets": [str(address)], "labels": labels})

    simulated = {}
    for node in example_fleet.NODES:
        (folder / node).mkdir()
        listen = f"127.0.0.1:{dcgm.free_port()}"
        start(
            program("prometheus-node-exporter", "usr/bin/prometheus-node-exporter"),
            f"--web.listen-address={listen}",
            f"--collector.textfile.directory={folder / node}",
            "--collector.netdev.device-exclude=^(gf-|veth).*",  # of this machine's labs
            "--no-collector.schedstat",
        )
        scrape("node", listen, instance=node)
        if node in BOARDS:
            (folder / f"{node}-dcgm").mkdir()
            simulated[node] = running.enter_context(
                dcgm.node(folder / f"{node}-dcgm", library, BOARDS[node])
            )
            scrape("dcgm", simulated[node].address, instance=node)
    for node, stage, model in STAGES:
        labels = {"instance": node, "stage": stage, "model": model}
        server = serving(fleet, Target(Job.VLLM, {**labels, "job": "vllm", "alive": "yes"}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        scrape("vllm", f"127.0.0.1:{server.server_port}", **labels)
    alertmanager = _alertmanager(folder, start)
    scrape("alertmanager", alertmanager, instance="mon-01")
    scrape("prometheus", f"127.0.0.1:{port}", instance="mon-01")
    _prometheus(folder, start, jobs, alertmanager, port)

    silenced = False
    for _ in itertools.count():
        for node in example_fleet.NODES:
            dcgm.write(folder / node / "facts.prom", facts(fleet, node))
        if fleet.after(4) and not silenced:
            silenced = True
            _silence(alertmanager)
        for node, there in simulated.items():
            dcgm.write(there.profile, boards(fleet, node, there.healthy))
        yield fleet
        time.sleep(3)


def _alertmanager(folder: Path, start: Callable[..., None]) -> str:
    config = folder / "alertmanager.yml"
    config.write_text(json.dumps({"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}))
    address = f"127.0.0.1:{dcgm.free_port()}"
    found = program("prometheus-alertmanager", "usr/bin/prometheus-alertmanager")
    # Debian's has its template's path built in: it sees the package's own /usr/share, we do not.
    share = found.parents[1] / "share"
    start(
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$0" /usr/share && exec "$@"',
        share,
        found,
        f"--config.file={config}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    )
    return address


def _silence(alertmanager: str) -> None:
    """Keep quiet what a driver upgrade of gpu-02 makes fire, for six minutes."""
    start, end = (
        datetime.fromtimestamp(time.time() + seconds, UTC).isoformat() for seconds in (0, 360)
    )
    body = {
        "matchers": [{"name": "instance", "value": "gpu-02", "isRegex": False, "isEqual": True}],
        "startsAt": start,
        "endsAt": end,
        "createdBy": "gpufleet",
        "comment": "driver upgrade",
    }
    request = Request(
        f"http://{alertmanager}/api/v2/silences",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=10):
        pass


def _prometheus(
    folder: Path,
    start: Callable[..., None],
    jobs: dict[str, list[dict[str, object]]],
    alertmanager: str,
    port: int,
) -> None:
    declared = RuleSettings(objectives=PROMISED, settings=frozenset({"watchdog"}))
    files = rule_files(declared)
    for name, text in files.items():
        (folder / name).write_text(text)
    config = {
        "global": {"scrape_interval": f"{SCRAPE}s", "evaluation_interval": f"{SCRAPE}s"},
        "rule_files": sorted(files),
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": job, "static_configs": static} for job, static in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    start(
        program("prometheus", "usr/bin/prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )


@click.command()
@click.option("--minutes", type=float, help="How long it runs; otherwise until ended by hand.")
@click.option("--port", default=19090, show_default=True, help="Of Prometheus, on 127.0.0.1.")
def main(minutes: float | None, port: int) -> None:
    """Let a fleet run, for a Grafana whose data source is its Prometheus."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with this
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="gpufleet-")))
        for fleet in run(folder, port, running):
            if minutes is not None and fleet.minute >= minutes:
                break


if __name__ == "__main__":
    main()

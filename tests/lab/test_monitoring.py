"""A monitoring node watches the fleet: real Prometheus, real exporters, real vLLM.

Only DCGM's exporter is a stand-in, which serves the simulated GPUs through our own list of fields.
Tests run in the order in which they stand. What the servers say is asked on their node, for they
listen on its own address alone.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlencode

import openai
import pytest
import yaml

from gpufleet.monitoring.metrics import catalogue
from gpufleet.monitoring.rules.files import groups
from gpufleet.preflight.alert_lines import TEST_ALERT
from gpufleet.settings.monitoring_settings import Objectives
from tests.lab.conftest import ROOT, Fleet, Run
from tests.unit.monitoring import offline, panels

HOME = "mon-03"
DEPLOY = "deploys/monitoring.py"
# Short, so that an alert takes seconds and not minutes.
SECONDS = 2
PROMETHEUS, ALERTMANAGER = "http://127.0.0.1:9090", "http://127.0.0.1:9093"
RULES = groups({"tiny": Objectives(ttft_p99_seconds=1, itl_p99_seconds=1, e2e_p99_seconds=1)})
# Everything of the fleet but one node, which comes later.
PART = """
from gpufleet import inventory
from lab.inventory import MONITORING, groups, state
found = {name: [n for n in nodes if n[0] != "gpu-02"] for name, nodes in groups().items()}
found = {name: nodes for name, nodes in found.items() if nodes}
gpu = [name for name in found if name != MONITORING]
globals().update(
    inventory.load(__file__, groups=found, children={"gpu": gpu}, also=[state().dir])
)
"""
# Runs on the node: asks each address, and prints {address: the document or why there is none}.
ASK = """
import json, sys, urllib.error, urllib.request
found = {}
for url in json.load(sys.stdin):
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            found[url] = json.load(answer)
    except urllib.error.HTTPError as error:
        found[url] = {"error": error.read().decode("utf-8", "replace")}
    except OSError as error:
        found[url] = {"error": str(error)}
json.dump(found, sys.stdout)
"""


def ask(fleet: Fleet, urls: Iterable[str]) -> dict[str, Any]:
    """Return what the monitoring node's own servers answer."""
    command = f"python3 -c {shlex.quote(ASK)}"
    found: dict[str, Any] = json.loads(fleet.ssh(HOME, command, 120, json.dumps(list(urls))))
    return found


def query(fleet: Fleet, *expressions: str) -> list[Any]:
    """Return what Prometheus answers each expression: its result, or its error as a text."""
    urls = [f"{PROMETHEUS}/api/v1/query?{urlencode({'query': each})}" for each in expressions]
    answers = ask(fleet, urls)
    return [answers[url].get("error") or answers[url]["data"]["result"] for url in urls]


def up(fleet: Fleet) -> dict[tuple[str, str, str], str]:
    """Return (job, instance, stage) of every target, and whether it answers."""
    (found,) = query(fleet, "up")
    return {
        (each["metric"]["job"], each["metric"]["instance"], each["metric"].get("stage", "")): each[
            "value"
        ][1]
        for each in found
    }


def alerts(fleet: Fleet, name: str) -> dict[str, str]:
    """Return {node: active or suppressed} of an alert that has come to Alertmanager."""
    (found,) = ask(fleet, [f"{ALERTMANAGER}/api/v2/alerts"]).values()
    return {
        each["labels"]["instance"]: each["status"]["state"]
        for each in found
        if each["labels"]["alertname"] == name
    }


def knows_alertmanager(fleet: Fleet) -> bool:
    (found,) = ask(fleet, [f"{PROMETHEUS}/api/v1/alertmanagers"]).values()
    return bool(found.get("data", {}).get("activeAlertmanagers"))


def comes(what: Callable[[], bool], seconds: float = 60) -> bool:
    """Wait until something is so; return whether it came."""
    deadline = time.monotonic() + seconds
    while not (there := what()) and time.monotonic() < deadline:
        time.sleep(1)
    return there


def process(fleet: Fleet) -> tuple[str, str]:
    """Return Prometheus' process, and when it has last read its configuration."""
    pid = fleet.ssh(HOME, "systemctl show -P MainPID prometheus.service").strip()
    name = "prometheus_config_last_reload_success_timestamp_seconds"
    # It knows of itself what it has scraped: not in its first seconds.
    assert comes(lambda: bool(query(fleet, name)[0]))
    (found,) = query(fleet, name)
    return pid, found[0]["value"][1]


def deployed_on(fleet: Fleet, *arguments: str) -> Run:
    run = fleet.pyinfra("-y", "--json", *arguments, deploy=DEPLOY)
    assert run.status == 0, run.output
    return run


def declare(fleet: Fleet, **monitoring: Any) -> None:
    """Write what the monitoring node is to be."""
    declared = {
        "prometheus": {"scrape_seconds": SECONDS},
        "alerts": {"ExporterDown": {"for_seconds": 0}},
        **monitoring,
    }
    text = yaml.safe_dump({"gpu_node": False, "monitoring": declared})
    (fleet.project / "group_vars/monitoring.yml").write_text(text)


@pytest.fixture(scope="module")
def watched(deployed: Fleet) -> Iterator[Fleet]:
    """The fleet with its monitoring node, which does not know gpu-02 yet."""
    part = deployed.project / "part/lab.py"
    part.parent.mkdir()
    part.write_text(PART)
    declare(deployed)
    # It restarts nothing: promises are kept by alerts alone.
    promised = dict.fromkeys(("ttft_p99_seconds", "itl_p99_seconds", "e2e_p99_seconds"), 60)
    deployed.set({"tiny": {"objectives": promised}})
    run = deployed._run(
        sys.executable, *("-m", "pyinfra", "-y", "--json"), str(part), DEPLOY, seconds=600
    )
    assert run.status == 0, run.output
    assert {node for nodes in run.changed.values() for node in nodes} == {HOME}
    yield deployed
    deployed.reset()
    # The tests behind these are about others, and the node's servers would take their time.
    deployed.ssh(
        HOME,
        "systemctl disable --now prometheus.service prometheus-alertmanager.service && "
        "rm -r /etc/gpufleet/prometheus /etc/gpufleet/alertmanager",
        seconds=120,
    )


@pytest.fixture(scope="module")
def busy(watched: Fleet) -> Fleet:
    """The same after some requests and two scrapes: counters and histograms have series."""
    for node in ("gpu-01", "gpu-02"):
        url = f"http://{watched.address(node)}:8000/v1"
        with openai.OpenAI(base_url=url, api_key=watched.key, timeout=60) as client:
            for _ in range(2):
                client.completions.create(model="tiny", prompt="Hello", max_tokens=8)
    time.sleep(3 * SECONDS)
    return watched


# Every target of the whole fleet, as `up` says that it answers.
EVERY_TARGET = {
    **{("node", node, ""): "1" for node in ("gpu-01", "gpu-02", HOME)},
    **{("dcgm", node, ""): "1" for node in ("gpu-01", "gpu-02")},
    ("vllm", "gpu-01", "tiny-0"): "1",
    ("vllm", "gpu-02", "tiny-1"): "1",
    ("prometheus", HOME, ""): "1",
    ("alertmanager", HOME, ""): "1",
}


def test_a_node_more_is_watched_without_a_reload(watched: Fleet) -> None:
    before = process(watched)
    part = {"gpu-01", HOME}  # once each was scraped
    assert comes(lambda: {instance for _, instance, _ in up(watched)} == part), up(watched)
    assert deployed_on(watched).changed == {"Prometheus | targets": [HOME]}
    assert comes(lambda: up(watched) == EVERY_TARGET), up(watched)
    assert process(watched) == before


def test_a_second_deploy_changes_nothing_and_the_main_one_knows_the_same_targets(
    watched: Fleet,
) -> None:
    before = process(watched)
    assert deployed_on(watched).changed == {}
    dry = watched.pyinfra("--dry", "--json")
    assert dry.status == 0, dry.output
    assert dry.changed == {}
    assert process(watched) == before


# What an operator has chosen in Grafana.
SHOWN = {"instance": "gpu-01", "model": "tiny"}
# What is true of no node of this lab, in the words of the catalogue.
ABSENT_HERE = (
    "GPU nodes without DCGM",
    "boards with NVLink 5 and newer",
    "fleets with a gateway",
    "nodes on which a deploy placed a certificate",
    "nodes whose drift was recorded",
    "nodes whose memory controller reports errors",
    "nodes with InfiniBand or RoCE adapters",
    "nodes with Linux software RAID",
    "nodes with bonded network interfaces",
    "while an alert is pending or firing",
)
# nspawn lets no container ask for the clock's state (systemd.exec(5), @clock).
NOT_MEASURED = {"replica:measured_requests_per_second"}  # no result is stored in this project
NOT_IN_CONTAINERS = {name for name in catalogue.SERIES if name.startswith("node_timex_")}


def excused(name: str) -> bool:
    """Whether a series is served somewhere only, and not here."""
    metric = catalogue.SERIES.get(name)
    elsewhere = metric is not None and metric.only.startswith(ABSENT_HERE)
    return elsewhere or name in NOT_IN_CONTAINERS | NOT_MEASURED


def absent(fleet: Fleet, expressions: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """
    Return {selector: what is missing} of those in expressions, and all that find nothing now.

    One that asks for a value that comes with a fault (`status=~"5.."`) finds nothing while all is
    well: then its series have to be there with the labels that it names. Labels that come with a
    fault, or are empty, are in the catalogue at least.
    """
    asked = sorted(
        {
            selector + span
            for each in expressions
            for selector, span in offline.selectors(each).items()
        }
    )
    empty = [each for each, said in zip(asked, query(fleet, *asked), strict=True) if not said]
    names = sorted({name for each in empty for name in offline.names(each)})
    series = dict(zip(names, query(fleet, *names), strict=True))
    found = {}
    for selector in empty:
        (name,) = offline.names(selector)
        labels = {label for each in series[name] for label in each["metric"]}
        labels |= set(catalogue.SERIES[name].labels) if name in catalogue.SERIES else set()
        wanted = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", selector))
        if not series[name]:
            found[selector] = f"there is no {name}"
        elif wanted - labels:
            found[selector] = f"{name} has no label {', '.join(sorted(wanted - labels))}"
    return found, {re.sub(r"\[\d+s\]$", "", each) for each in empty}


def test_every_expression_of_every_rule_and_panel_finds_something(busy: Fleet) -> None:
    """
    No query errs, and none asks for a series that nobody serves.

    An alert's expression is empty while all is well, so each of its selectors is asked. A panel
    that may be empty says on its face what that means.
    """
    recordings = {each.record: each.expr for group in RULES for each in group.recordings}
    rules = [*recordings.values(), *(alert.expr for group in RULES for alert in group.alerts)]
    shown = panels.queries(SHOWN)
    expressions = list(dict.fromkeys([*rules, *(each.expr for each in shown)]))
    assert len(expressions) > 100
    answers = dict(zip(expressions, query(busy, *expressions), strict=True))
    assert {expr: said for expr, said in answers.items() if isinstance(said, str)} == {}

    missing, empty = absent(busy, expressions)
    lacking = {name for each in missing for name in offline.names(each)}

    def follows(name: str) -> bool:
        """Whether it is known why there is none of it."""
        if name not in recordings:
            return excused(name)
        return bool(set(offline.selectors(recordings[name])) & empty)

    unknown = {
        each: why for each, why in missing.items() if not all(map(follows, offline.names(each)))
    }
    assert unknown == {}, unknown
    may_be = panels.may_be_empty(SHOWN)
    assert [
        each
        for each in shown
        if not answers[each.expr] and each not in may_be and not offline.names(each.expr) & lacking
    ] == []


def test_a_configuration_that_prometheus_would_refuse_changes_nothing(watched: Fleet) -> None:
    before = process(watched)
    files = "find /etc/gpufleet/prometheus -type f | sort | xargs sha256sum"
    lay = watched.ssh(HOME, files)
    declare(watched, external_labels={"no-label": "x"})
    try:
        run = watched.pyinfra("-y", deploy=DEPLOY)
    finally:
        declare(watched)
    assert run.status != 0
    assert "no-label" in run.output
    assert "Traceback" not in run.output
    assert watched.ssh(HOME, files) == lay
    assert process(watched) == before


def test_another_configuration_is_reloaded_and_seen_to_be_in_force(watched: Fleet) -> None:
    """By the same process."""
    pid, read_at = process(watched)
    declare(watched, external_labels={"fleet": "lab"})
    assert set(deployed_on(watched).changed) == {
        "Prometheus | proof of the configuration",
        "Prometheus | configuration",
        "Prometheus | configuration in force",
    }
    # It tells so with its next scrape of itself.
    assert comes(lambda: float(process(watched)[1]) > float(read_at))
    assert process(watched)[0] == pid
    (found,) = ask(watched, [f"{PROMETHEUS}/api/v1/status/config"]).values()
    assert "fleet: lab" in found["data"]["yaml"]


def test_a_fault_is_told_with_its_node_kept_quiet_while_silenced_and_resolved(
    watched: Fleet,
) -> None:
    watched.ssh("gpu-02", "systemctl stop prometheus-node-exporter.service")
    try:
        assert comes(lambda: alerts(watched, "ExporterDown") == {"gpu-02": "active"})
        done = watched.gpufleet(
            *(
                "monitoring",
                "silence",
                watched.inventory,
                "gpu-02",
                "--for",
                "5m",
                "--why",
                "a test",
            )
        )
        assert done.status == 0, done.output
        assert comes(lambda: alerts(watched, "ExporterDown") == {"gpu-02": "suppressed"})
        listed = watched.gpufleet("monitoring", "silences", watched.inventory)
        assert "gpu-02" in listed.stdout
        assert "a test" in listed.stdout
        done = watched.gpufleet("monitoring", "unsilence", watched.inventory, "gpu-02")
        assert done.status == 0, done.output
        assert comes(lambda: alerts(watched, "ExporterDown") == {"gpu-02": "active"})
    finally:
        watched.ssh("gpu-02", "systemctl start prometheus-node-exporter.service")
    assert comes(lambda: alerts(watched, "ExporterDown") == {}, 120)


@pytest.mark.long
class Inbox(BaseHTTPRequestHandler):
    """Who is on call: keeps what Alertmanager sends, or refuses it."""

    refuses = False
    got: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.refuses:
            self.got.extend(said["alerts"])
        self.send_response(403 if self.refuses else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_test_alert_comes_to_who_is_on_call_and_a_refusal_of_it_is_seen(watched: Fleet) -> None:
    def verdict() -> tuple[str, str]:
        words = ("preflight", watched.inventory, "--test-alert", "--json")
        run = watched.gpufleet(*words, seconds=120)
        lines = [each for each in json.loads(run.stdout)["lines"] if each["check"] == "alerts"]
        return lines[0]["status"], lines[0]["proof"]

    with ThreadingHTTPServer((str(watched.state.machine), 0), Inbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = watched.project / "on-call"
        file.write_text(f"http://{watched.state.machine}:{server.server_address[1]}/page\n")
        declare(watched, alertmanager={"page": {"webhook_url_file": str(file)}})
        deployed_on(watched)
        # A server that has just started looks for it only seconds later.
        assert comes(lambda: knows_alertmanager(watched))
        status, proof = verdict()
        assert status == "OK", proof
        [alert] = (each for each in Inbox.got if each["labels"]["alertname"] == TEST_ALERT)
        assert alert["labels"]["instance"].startswith(f"{HOME} at ")
        assert "sent with gpufleet preflight" in alert["annotations"]["summary"]
        Inbox.refuses = True
        status, proof = verdict()
        server.shutdown()
    assert status == "FAIL", proof
    assert re.search(r"webhook: 0 delivered, [1-9]\d* failed", proof), proof


def test_a_node_that_is_down_keeps_nobody_else_from_being_watched(watched: Fleet) -> None:
    """Its own targets stay, and are seen to be down; a node's new targets come."""
    deployed_on(watched)  # alone, this test is the first that has the whole fleet watched
    assert comes(lambda: up(watched) == EVERY_TARGET), up(watched)
    watched.lab.power("gpu-02", "off")
    try:
        watched.ssh(HOME, "rm /etc/gpufleet/prometheus/targets/node.json")
        watched.pyinfra("-y", deploy=DEPLOY)  # it says that gpu-02 cannot be reached
        assert comes(lambda: up(watched).keys() == EVERY_TARGET.keys()), up(watched)
        assert comes(lambda: up(watched)["vllm", "gpu-02", "tiny-1"] == "0")
    finally:
        watched.lab.power("gpu-02", "on")
    assert comes(lambda: up(watched) == EVERY_TARGET, 300), up(watched)


def test_runs_without_a_monitoring_node_are_refused(watched: Fleet) -> None:
    run = watched.pyinfra("-y", "--limit", "gpu-01", deploy=DEPLOY)
    assert run.status != 0
    assert "monitoring: {}" in run.output
    assert "Starting operation" not in run.output
    assert (ROOT / "docs/monitor/monitoring.md").is_file()

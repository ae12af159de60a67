"""A document with every kind of part, made by the parts' own code from recorded nodes."""

from __future__ import annotations

import datetime as dt
import json
from functools import cache
from typing import Any

from gpufleet.doctor.fleet_diagnosis import Diagnosis, Impact, Problem
from gpufleet.fleet import assessment
from gpufleet.fleet.drift import Deviation, NodeDrift, Unread
from gpufleet.fleet.measured_rates import ModelRate
from gpufleet.load_test.result import MeasuredRate
from gpufleet.preflight.tls_lines import TlsServer
from gpufleet.report import fleet_parts
from gpufleet.report.fleet_document import Checkout, Document, Node
from gpufleet.report.node_parts import gpu_node
from gpufleet.serving.rank_status import Health, RankStatus
from gpufleet.serving.status import FleetStatus, ReplicaStatus
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from gpufleet.upgrade.report.report import Report
from tests.support.planned import machine
from tests.unit.preflight.sound_fleet import certificate

NOW = dt.datetime(2026, 11, 28, 12, 0, tzinfo=dt.UTC)
MODEL = "/srv/q"
REVISION = "0123456789abcdef0123456789abcdef01234567"
LOCK = {("Qwen/Qwen3-32B", REVISION): {"config.json": ("git", "a" * 40)}}
KINDS = {"gpu-01": "h100x8", "gpu-02": "h100x8", "gpu-03": "a100x4-pcie"}
SILENT = "gpu-04"


def settings(**more: Any) -> NodeSettings:
    """Return the settings of a GPU node."""
    plain: dict[str, Any] = {
        "firewall": {},
        "gpu_lock": {"driver": "570.124.06", "vllm": {"version": "0.32.0", "python": "3.12"}},
        "vllm": {
            "version": "0.32.0",
            "lock": "locks/none.txt",
            "models_lock": "models.lock.json",
            "api_key_file": "secrets/key",
        },
        "serving": {"q": {"model": MODEL, "replicas": 2, "tensor_parallel": 2}},
    }
    return NodeSettings.model_validate({**plain, **more})


def declared() -> dict[str, NodeVars]:
    """Return what is declared of the nodes with GPUs."""
    return {name: NodeVars(name, ("gpu",), settings(), {}) for name in KINDS}


def probe(name: str, number: int) -> dict[str, Any]:
    """Return the probe of a node; a replica runs on the first two GPUs of gpu-01."""
    found = json.loads(json.dumps(machine(KINDS[name], number, {MODEL: "Qwen--Qwen3-0.6B"})))
    found["system"]["releases"] = ["0.32.0-e28e5608c2"]
    if name == "gpu-01":
        found["stages"] = [
            {
                "unit": "vllm-q-0.service",
                "model": "q",
                "replica": 0,
                "rank": 0,
                "port": 8000,
                "side_channel": 0,
                "gpus": [gpu["uuid"] for gpu in found["gpus"][:2]],
                "release": "0.32.0-e28e5608c2",
                "arguments": [],
            }
        ]
    return dict(found)


@cache
def probes() -> dict[str, dict[str, Any]]:
    """Return the probes of the nodes that answer."""
    return {name: probe(name, number) for number, name in enumerate(KINDS, start=1)}


def nodes() -> tuple[Node, ...]:
    """Return the nodes: three that answer, a silent one, one without GPUs."""
    answers = {**probes(), SILENT: "no answer within 20 s"}
    everything = declared() | {SILENT: NodeVars(SILENT, ("gpu",), settings(), {})}
    found = assessment.check_nodes(answers, everything)
    return (
        Node(name="front", groups=("front",), gpu_node=False),
        *(
            gpu_node(name, everything[name], answers[name], found, ["0.32.0-e28e5608c2"])
            for name in answers
        ),
    )


def status() -> FleetStatus:
    """Return a replica that serves, and one that does not."""
    good = RankStatus("gpu-01", 0, Health.SERVES)
    bad = RankStatus("gpu-02", 0, Health.DOWN, "its unit failed")
    return FleetStatus(
        (
            ReplicaStatus("q", 0, (good,), Health.SERVES, ()),
            ReplicaStatus("q", 1, (bad,), Health.DOWN, ("its unit failed",)),
        ),
        {SILENT: "no answer within 20 s"},
    )


def measured() -> ModelRate:
    """Return what replicas of a model were measured to carry, ten days before."""
    rate = MeasuredRate(
        requests_per_second=12.5,
        missed=14.0,
        when=NOW - dt.timedelta(days=10),
        age_seconds=864000.0,
        target="gateway",
        replicas=2,
        workload={},
        fingerprint="f",
    )
    return ModelRate("q", (0, 1), rate, rate)


def upgrade() -> Report:
    """Return an upgrade that was stopped."""
    at = NOW.timestamp()
    return Report(
        "20261101T100000Z-00ff", "upgrade", "vLLM 0.31.0 -> 0.32.0", "ada@control",
        "inventories/prod.py", at - 7200, at - 3600, "stopped", ("a gate did not pass",),
        (), (), (), (),
    )  # fmt: skip


def document(**changed: Any) -> Document:
    """Return the document of a fleet with every kind of part, or with other parts."""
    return _document().model_copy(update=changed)


@cache
def _document() -> Document:
    server = TlsServer("front", "front", "gateway.port", "10.0.0.9", 443, None, "ca.pem", False)
    shown = {"verified": True, "certificate": certificate(), "why": ""}
    problem = Problem(
        "q-1", "q-1 is down", Impact.OUTAGE, ("gpu-02: exit status 1",), "out of memory",
        "`gpufleet logs inventories/prod.py q-1`", "docs/alerts/vllm-down.md",
    )  # fmt: skip
    worn = Problem("gpu-03", "gpu-03: a fan is slow", Impact.NOTICE)
    plan = assessment.plan_fleet(probes(), declared(), unfit_stops=False)
    models = tuple(
        fleet_parts.models(
            {
                **{name: each.settings for name, each in declared().items()},
                SILENT: settings(
                    serving={"qwen": {"model": "Qwen/Qwen3-32B", "revision": REVISION}}
                ),
            },
            {"models.lock.json": LOCK},
            dict.fromkeys((*KINDS, SILENT), "0.32.0-e28e5608c2"),
        )
    )
    return Document.model_validate(
        {
            "inventory": "inventories/prod.py",
            "when": NOW,
            "version": "0.2.0",
            "checkout": Checkout(
                commit="c" * 40, date="2026-11-20", changed=("group_vars/gpu.yml",)
            ),
            "nodes": nodes(),
            "models": models,
            "replicas": tuple(fleet_parts.replicas(status())),
            "missing": ("qwen: 1 replica declared, none found",),
            "plan": fleet_parts.plan(plan),
            "capacity": tuple(fleet_parts.capacities(models, plan, [measured()])),
            "findings": tuple(fleet_parts.findings(Diagnosis((problem, worn)))),
            "drift": fleet_parts.fleet_drift(
                {
                    "gpu-01": NodeDrift(),
                    "gpu-02": NodeDrift(
                        (
                            Deviation(
                                "deploys/vllm.py",
                                "write /etc/x",
                                remedy="gpufleet deploy vllm INVENTORY",
                            ),
                        )
                    ),
                    SILENT: NodeDrift((), (Unread("check: probe", "no answer"),)),
                },
                (),
                "inventories/prod.py",
                whole=True,
            ),
            "upgrades": tuple(fleet_parts.upgrades([upgrade()])),
            "certificates": tuple(
                fleet_parts.certificates([server], {"front": {"tls": {server.id: shown}}}, NOW)
            ),
            "files": {"group_vars/gpu.yml": "f" * 64, "inventories/prod.py": "e" * 64},
            "unknown": (f"{SILENT}: no answer within 20 s",),
        }
    )

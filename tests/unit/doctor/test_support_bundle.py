"""A bundle has what was seen, no secret, and a bound."""

from __future__ import annotations

import json

import pytest

from gpufleet.checks.finding import Report
from gpufleet.doctor import support_bundle
from gpufleet.doctor.fleet_diagnosis import Diagnosis, Impact, Problem
from gpufleet.doctor.node_evidence import JournalLine, NodeEvidence
from gpufleet.doctor.observations import FleetObservations
from gpufleet.doctor.support_bundle import README, bundle_files
from gpufleet.serving.status import FleetStatus

AT = 1_795_290_000.0
KEY = "f3a9c1d2e4b5a697"
TOKEN = "hf_abcdefghijklmnopqrstuvwx"


def files(lines=("one", "two"), **settings):
    journal = tuple(JournalLine(AT + n, text) for n, text in enumerate(lines))
    evidence = {"gpu-01": NodeEvidence("gpu-01", stages={"llama-0": journal}, kernel=journal)}
    report = Report((), {"gpu-01": {"hostname": "gpu-01"}}, ("gpu-01",))
    found = Diagnosis((Problem("llama-0", "llama-0 down", Impact.OUTAGE, (f"key {KEY}",)),))
    seen = FleetObservations(FleetStatus((), {}), report, evidence=evidence)
    return bundle_files(found, seen, {"gpu-01": settings}, [KEY], AT)


def test_it_has_what_was_seen_of_each_node():
    found = files()
    assert "OUTAGE  llama-0 down" in found["diagnosis.txt"]
    assert json.loads(found["probes/gpu-01.json"]) == {"hostname": "gpu-01"}
    assert found["journals/gpu-01/llama-0.log"] == (
        "2026-11-21T19:40:00Z one\n2026-11-21T19:40:01Z two\n"
    )


def test_no_file_has_a_known_secret_or_what_looks_like_one():
    found = files((f"Bearer {KEY}", f"token {TOKEN}"), note=f"{KEY} {TOKEN}")
    assert not [name for name, text in found.items() if KEY in text or TOKEN in text]


def test_no_file_has_the_keys_that_sglang_logs_and_answers():
    named = {"api_key": "lab-key", "admin_api_key": "lab-admin"}
    found = files((f"server_args={named}", json.dumps(named)), note=json.dumps(named))
    assert not [name for name, text in found.items() if "lab-" in text]
    assert "server_args=" in found["journals/gpu-01/llama-0.log"]


def test_it_is_bounded_and_says_which_journals_were_cut(monkeypatch):
    whole = files([f"line {n}" for n in range(5000)])
    monkeypatch.setattr(support_bundle, "README_BYTES", 1000)
    monkeypatch.setattr(support_bundle, "MOST_BYTES", 40_000)
    found = files([f"line {n}" for n in range(5000)])
    assert sum(len(text.encode()) for text in found.values()) <= 40_000
    for name in ("kernel/gpu-01.log", "journals/gpu-01/llama-0.log"):
        assert whole[name].endswith(found[name])
        assert found[name].endswith("line 4999\n")
        assert f"{name}: the first lines of this file are left out" in found[README]


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_journal_that_does_not_fit_at_all_is_empty(monkeypatch, size):
    monkeypatch.setattr(support_bundle, "MOST_BYTES", size)
    monkeypatch.setattr(support_bundle, "README_BYTES", 0)
    assert files()["journals/gpu-01/llama-0.log"] == ""


def test_probes_of_many_nodes_leave_room_for_journals_and_those_with_problems_come_first(
    monkeypatch,
):
    monkeypatch.setattr(support_bundle, "README_BYTES", 10_000)
    monkeypatch.setattr(support_bundle, "MOST_BYTES", 100_000)
    names = [f"gpu-{number:03}" for number in range(100)]
    journal = tuple(JournalLine(AT + n, f"line {n}") for n in range(500))
    evidence = {name: NodeEvidence(name, stages={"llama-0": journal}) for name in names}
    report = Report((), {name: {"hostname": name, "long": "x" * 2000} for name in names}, names)
    problem = Problem("llama-0", "llama-0 down", Impact.OUTAGE, names=("gpu-077",))
    seen = FleetObservations(FleetStatus((), {}), report, evidence=evidence)
    found = bundle_files(Diagnosis((problem,)), seen, {}, [], AT)
    assert sum(len(text.encode()) for text in found.values()) <= 100_000
    probes = {name for name in found if name.startswith("probes/")}
    assert "probes/gpu-077.json" in probes
    assert len(probes) < 40
    assert "probes/gpu-099.json: this file is left out" in found[README]
    journals = sum(len(found[f"journals/{name}/llama-0.log"]) for name in names)
    assert journals > 35_000

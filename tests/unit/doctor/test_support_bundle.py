"""A bundle has what was seen, no secret, and a bound."""

from __future__ import annotations

import json

import pytest

from gpufleet.checks.finding import Report
from gpufleet.doctor import support_bundle
from gpufleet.doctor.fleet_diagnosis import Diagnosis, Impact, Problem
from gpufleet.doctor.node_evidence import JournalLine, NodeEvidence
from gpufleet.doctor.sights import FleetObservations
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


def test_it_is_bounded_and_says_which_journals_were_cut(monkeypatch):
    whole = files([f"line {n}" for n in range(5000)])
    monkeypatch.setattr(support_bundle, "MOST_BYTES", 40_000)
    found = files([f"line {n}" for n in range(5000)])
    assert sum(len(text.encode()) for text in found.values()) < 41_000
    for name in ("kernel/gpu-01.log", "journals/gpu-01/llama-0.log"):
        assert whole[name].endswith(found[name])
        assert found[name].endswith("line 4999\n")
        assert f"{name}: its first lines are left out" in found[README]


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_journal_that_does_not_fit_at_all_is_empty(monkeypatch, size):
    monkeypatch.setattr(support_bundle, "MOST_BYTES", size)
    assert files()["journals/gpu-01/llama-0.log"] == ""

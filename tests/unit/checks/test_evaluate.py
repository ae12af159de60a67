"""The runner: no check is left out, nothing that could not be read passes, nothing ends the run."""

from __future__ import annotations

import datetime as dt
from copy import deepcopy

import pytest

from gpufleet.catalog.checks import CHECKS
from gpufleet.checks.evaluate import OF_GPU, OF_NODE, WITHOUT_DRIVER, evaluate
from gpufleet.checks.finding import Severity
from gpufleet.node.probe_document import document_problem
from gpufleet.settings.parse import SettingsError, parse_settings
from tests.support.checkout import ROOT
from tests.support.rows import each_row

from .conftest import PROFILES, TODAY

DOCS = ROOT / "docs/checks"


def test_every_check_of_the_catalogue_is_run_and_none_else():
    run = {"probe", *WITHOUT_DRIVER, *OF_NODE, *OF_GPU}

    assert run == set(CHECKS)


def test_every_check_has_a_page_and_every_page_a_check():
    assert {page.stem for page in DOCS.glob("*.md")} - {"README"} == set(CHECKS)


@each_row("profile", PROFILES)
def test_a_healthy_node_has_an_answer_to_every_check(document, profile):
    report = evaluate({"gpu-01": document(profile)}, {}, TODAY)

    assert {finding.check for finding in report.findings} == set(CHECKS)
    assert report.verdict() <= Severity.INFO, [f for f in report.findings if f.severity > 1]


def paths(value, prefix=()):
    """Yield the path of every fact in a document: whatever is no list or object of facts."""
    if isinstance(value, dict) and "missing" not in value and value:
        for key, item in value.items():
            yield from paths(item, (*prefix, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from paths(item, (*prefix, index))
    else:
        yield prefix


def put(document, path, value):
    changed = deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


@pytest.mark.parametrize("profile", ["t4x1", pytest.param("a100x4-pcie", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "garbage", [{"missing": "timeout"}, None, "\x00nonsense", -1, 10**30, [], {}], ids=repr
)
def test_any_single_fact_may_be_garbage(document, profile, garbage):
    """It may change that fact's verdict; it never ends the judgement, and no check falls silent."""
    healthy = document(profile)
    for path in paths(healthy):
        # Not facts of the node: the probe itself numbers what it asks.
        if path[0] in {"schema", "errors"} or path[-1] in {"index", "link"}:
            continue
        # One GPU stands for its siblings: the document is large, its lists are alike.
        if any(part != 0 for part in path if isinstance(part, int)):
            continue
        changed = put(healthy, path, garbage)
        if document_problem(changed):  # no fact but the outline: that is refused as a whole
            continue
        report = evaluate({"gpu-01": changed}, {}, TODAY)
        assert {finding.check for finding in report.findings} == set(CHECKS), path


def test_a_node_without_an_answer_is_unknown(document):
    report = evaluate({"gpu-01": document("t4x1"), "gpu-02": "no answer within 60 s"}, {}, TODAY)

    assert report.verdict("gpu-01") <= Severity.INFO
    assert report.verdict("gpu-02") is report.verdict() is Severity.UNKNOWN


def test_a_probe_of_another_version_is_unknown_and_not_misread(document):
    report = evaluate({"gpu-01": {**document("t4x1"), "schema": 1}}, {}, TODAY)

    (finding,) = report.findings
    assert finding.severity is Severity.UNKNOWN
    assert "schema 1" in finding.found


def test_a_silent_driver_leaves_nothing_passed_that_asks_it(document):
    """One reason blocks; everything that could not be asked says so."""
    found = document("h100x8")
    absent = {"missing": "driver_not_loaded", "code": 9}
    found["driver"] |= dict.fromkeys(("init", "version", "cuda", "gpu_count", "branch"), absent)
    found["gpus"] = found["nvlink"] = found["numa"] = found["fabric"] = found["pcie"] = []
    found["p2p"] = {kind: [] for kind in found["p2p"]}

    findings = evaluate({"gpu-01": found}, {}, TODAY).findings

    assert {each.check for each in findings} == set(CHECKS)
    asked = {each.check for each in findings if each.severity < Severity.UNKNOWN}
    assert not asked & {*OF_NODE, *OF_GPU}


ACCEPT = {"check": "persistence", "node": "gpu-01", "until": "2026-01-31", "reason": "known"}


@each_row(
    ("change", "accepted"),
    [
        ({}, True),
        ({"node": "*"}, True),
        ({"gpu": 0}, True),
        ({"node": "gpu-02"}, False),
        ({"gpu": 1}, False),
        ({"check": "mig"}, False),
        ({"until": "2025-12-31"}, False),
        ({"until": str(TODAY)}, True),
    ],
)
def test_an_acceptance_covers_what_it_names_until_its_day_ends(document, change, accepted):
    found = document("t4x1")
    found["gpus"][0]["persistence_mode"] = 0
    settings = parse_settings({"checks": {"accept": [ACCEPT | change]}})

    report = evaluate({"gpu-01": found}, {"gpu-01": settings}, TODAY)

    (finding,) = [each for each in report.findings if each.check == "persistence"]
    assert finding.severity is Severity.WARN  # it stays what it is, and visible
    assert (finding.accepted is not None) is accepted
    assert finding.accepted in {None, f"known, until {(ACCEPT | change)['until']}"}


@pytest.mark.parametrize(("until", "ended"), [("2025-12-31", True), (str(TODAY), False)])
def test_a_finding_whose_acceptance_has_ended_says_so(document, until, ended):
    found = document("t4x1")
    found["gpus"][0]["persistence_mode"] = 0
    settings = parse_settings({"checks": {"accept": [ACCEPT | {"until": until}]}})

    report = evaluate({"gpu-01": found}, {"gpu-01": settings}, TODAY)

    (finding,) = [each for each in report.findings if each.check == "persistence"]
    assert (f"; this finding was accepted until {until} (checks.accept)" in finding.found) is ended


def test_an_acceptance_of_no_check_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match=r"no check 'persistance'; did you mean 'persistence'"):
        parse_settings({"checks": {"accept": [ACCEPT | {"check": "persistance"}]}})


def test_an_acceptance_needs_a_day():
    """One without an end would hide the finding for ever."""
    with pytest.raises(SettingsError, match="until"):
        parse_settings({"checks": {"accept": [{"check": "mig", "node": "gpu-01"}]}})


def test_siblings_are_those_that_are_named(document):
    """A node of another group with the same GPU says nothing about this one."""
    small = document("a100x4-pcie")
    for section in ("gpus", "nvlink", "numa", "fabric"):
        small[section] = small[section][:2]
    for name in small["p2p"]:
        small["p2p"][name] = [row[:2] for row in small["p2p"][name][:2]]
    small["pcie"] = [row[:2] for row in small["pcie"][:2]]
    small["driver"]["gpu_count"] = 2
    small["pci"] = {"missing": "absent"}
    whole = {f"gpu-{n:02}": document("a100x4-pcie") for n in (2, 3, 4)}

    def verdict(siblings):
        report = evaluate({"gpu-01": small, **whole}, {}, dt.date(2026, 1, 1), siblings=siblings)
        return {f.check for f in report.findings if f.node == "gpu-01" and f.severity > 1}

    assert "gpu-count" in verdict({"gpu-01": tuple(whole)})
    assert "gpu-count" not in verdict({"gpu-01": ()})


@each_row(
    "damage",
    [
        lambda d: d.clear() or d.update(schema=2),
        lambda d: d.pop("gpus"),
        lambda d: d.update(gpus=None),
        lambda d: d["gpus"].append("GPU"),
        lambda d: d["gpus"][0].pop("index"),
        lambda d: d["gpus"][0].update(index="0"),
        lambda d: d["gpus"][0].pop("name"),
        lambda d: d["gpus"][0].pop("pci"),
        lambda d: d["nvlink"].clear(),
        lambda d: d["p2p"].update(nvlink=[]),
        lambda d: d.update(pcie=[[]]),
        lambda d: d["driver"].pop("init"),
        lambda d: d.update(driver="ok"),
        lambda d: d.update(system=[1]),
        lambda d: d.pop("errors"),
    ],
)
def test_a_document_that_is_not_whole_is_unknown_and_harms_no_sibling(document, damage):
    broken = document("t4x1")
    damage(broken)

    report = evaluate({"gpu-01": broken, "gpu-02": document("t4x1")}, {}, TODAY)

    (finding,) = report.node_findings["gpu-01"]
    assert finding.severity is Severity.UNKNOWN
    assert "its probe is incomplete: correct '" in finding.found
    assert report.verdict("gpu-02") <= Severity.INFO


def test_an_accepted_cause_takes_with_it_what_could_not_be_asked(document):
    """Nobody can accept thirty checks one by one for a GPU that is known to be away."""
    found = document("a100x4-pcie")
    lost = {"index": 2, "missing": "lost", "code": 15}
    found["gpus"][2] = lost
    for section in ("nvlink", "numa", "fabric"):
        found[section][2] = {"missing": "lost", "code": 15}
    accept = {"check": "gpu-answers", "node": "gpu-01", "gpu": 2, "until": "2026-01-31"}
    settings = parse_settings({"checks": {"accept": [accept]}})

    report = evaluate({"gpu-01": found}, {"gpu-01": settings}, TODAY)

    about = [each for each in report.findings if each.gpu and each.gpu.index == 2]
    assert {each.severity for each in about} >= {Severity.BLOCK, Severity.UNKNOWN}
    assert report.unfit("gpu-01") == {}


def test_a_node_is_judged_alone_as_it_is_among_the_others(document):
    """What it is compared with is asked in both cases."""
    odd = document("h100x8")
    odd["driver"]["version"] = "550.54.14"
    fleet = {f"gpu-{n:02}": document("h100x8") for n in range(1, 6)} | {"gpu-03": odd}

    everyone = evaluate(fleet, {}, TODAY)
    alone = evaluate(fleet, {}, TODAY, only={"gpu-03"})

    assert list(alone.findings) == [each for each in everyone.findings if each.node == "gpu-03"]
    assert alone.nodes == everyone.nodes

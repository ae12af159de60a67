"""No false pass, no false block, no traceback: simulated machines crossed with their faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpufleet.checks.evaluate import evaluate
from gpufleet.checks.finding import Severity
from lab import machine, nvml
from lab.faults import FAULTS
from tests.support.matrix import SETTINGS, TODAY, Case, all_of, case, crossed, every_fault_once
from tests.support.measured import note
from tests.support.record_node import probe_machine

pytestmark = pytest.mark.slow

TABLE = pytest.StashKey[list[Case]]()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The directory of the simulated NVML."""
    return nvml.build(tmp_path_factory.mktemp("nvml")).parent


@pytest.mark.parametrize("profile", nvml.profiles())
def test_a_healthy_machine_is_fit_and_nothing_warns(library, profile):
    document = probe_machine(library, machine.of(profile))
    report = evaluate({profile: document}, {profile: SETTINGS}, TODAY)

    assert [f for f in report.findings if f.severity > Severity.INFO] == []


@pytest.mark.parametrize(("profile", "fault"), every_fault_once(), ids=lambda value: value)
def test_every_fault_is_found_and_nothing_else_stops(library, profile, fault):
    """On one kind of machine each; `make test-long` crosses all of them."""
    assert list(case(library, profile, fault).wrongs) == []


@pytest.mark.long
@pytest.mark.parametrize("profile", nvml.profiles())
@pytest.mark.timeout(1200)
def test_every_machine_with_every_fault(library, profile, request):
    cases = crossed(library, profile, all_of(profile))
    request.config.stash.setdefault(TABLE, []).extend(cases)

    assert [wrong for each in cases for wrong in each.wrongs] == []


@pytest.mark.long
def test_the_table_of_all_of_them_is_written(request):
    """Last in the file: docs/measured/check-matrix.md shows what the run above saw."""
    cases = request.config.stash.get(TABLE, [])
    assert {each.profile for each in cases} == set(nvml.profiles())
    for row in rows(cases):
        note("measured/check-matrix.md", *row)


SHORT = {Severity.BLOCK: "**B**", Severity.UNKNOWN: "**U**", Severity.WARN: "w",
         Severity.INFO: "i", Severity.OK: "."}  # fmt: skip


def rows(cases: list[Case]) -> Iterator[list[str]]:
    """Yield the rows of docs/measured/check-matrix.md."""
    profiles = nvml.profiles()
    at = {(each.profile, each.fault): each for each in cases}
    for name, about in FAULTS.items():
        row = [at.get((profile, name)) for profile in profiles]
        also = {
            check
            for each in row
            if each
            for check, said in each.said.items()
            if said > Severity.INFO and check not in about.finds
            and any(f.check == check and f.severity == said and f.cause is None
                    for f in each.report.findings)
        }  # fmt: skip
        found = ", ".join(about.finds) or "no check: it is harmless"
        more = f" ({', '.join(sorted(also))})" if also else ""
        yield [name, *(SHORT[each.report.verdict()] if each else "" for each in row), found + more]

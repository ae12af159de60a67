"""Hardware by name: each kind is healthy, and a name that is not known is refused."""

from __future__ import annotations

import pytest

from gpufleet.catalog import recorded_nodes
from gpufleet.errors import FleetError
from gpufleet.fleet.assessment import check_nodes
from tests.support.rows import each_row


@each_row("name", recorded_nodes.names())
def test_named_hardware_is_healthy(name):
    report = check_nodes({name: recorded_nodes.document(name)}, {})

    assert [str(each) for each in report.findings if each.stops] == []


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(FleetError, match=r"did you mean 'h100x8'.*recorded hardware: .*a100x8"):
        recorded_nodes.document("h100x9")


def test_a_document_is_the_callers_own():
    recorded_nodes.document("t4x1")["hostname"] = "changed"

    assert recorded_nodes.document("t4x1")["hostname"] != "changed"

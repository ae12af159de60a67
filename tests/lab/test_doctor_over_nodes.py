"""
`gpufleet doctor` over fourteen nodes, of which some are dead.

`make test-long PART=doctor-hardware` writes what it measured into docs/measured/doctor.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.lab.conftest import Fleet, standing
from tests.lab.test_doctor import NAMED_SECONDS, PAGE
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfdn")
NODES = {f"gpu-{number:02}": "h100x8" for number in range(1, 15)}
OFF, CUT = "gpu-05", "gpu-09"
DEAD_SECONDS = 8
"""What dead nodes may cost, all together."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Fourteen bare nodes with eight simulated GPUs each; no model is declared."""
    with standing(LAB_ID, NODES, tmp_path_factory.mktemp("doctor-nodes")) as found:
        variables = found.project / "group_vars/lab.yml"
        data = yaml.safe_load(variables.read_text())
        del data["serving"], data["dcgm"]
        variables.write_text(yaml.safe_dump(data))
        yield found


def doctor(fleet: Fleet) -> tuple[dict[str, Any], float]:
    """Return what it says, and the seconds that it took."""
    begun = time.monotonic()
    run = fleet.gpufleet("doctor", fleet.inventory, "--json")
    assert run.status in (0, 1, 2), run.output
    return json.loads(run.stdout), time.monotonic() - begun


def silent(found: dict[str, Any]) -> dict[str, str]:
    """Return what is said of nodes that did not answer."""
    return {each["subject"]: each["what"] for each in found["problems"] if each["subject"] in NODES}


def test_fourteen_nodes_are_looked_at_and_dead_ones_are_named_without_a_wait_for_them(
    fleet: Fleet,
) -> None:
    doctor(fleet)  # the first login of each node starts its user manager
    found, whole = doctor(fleet)
    assert silent(found) == {}
    note(
        PAGE, "fourteen nodes, none of them dead", "none", "nothing", f"{whole:.1f} s", "not typed"
    )
    fleet.lab.power(OFF, "off")
    fleet.lab.net(CUT, "cut")
    try:
        found, seconds = doctor(fleet)
    finally:
        fleet.lab.net(CUT, "heal")
        fleet.lab.power(OFF, "on")
    named = silent(found)
    assert named.keys() == {OFF, CUT}
    assert all("not reached" in what for what in named.values()), named
    assert {each["do"] for each in found["problems"] if each["subject"] in named} == {
        f"`ssh {node}`; if it does not answer, its BMC says whether it has power"
        for node in (OFF, CUT)
    }
    note(
        PAGE,
        "fourteen nodes, one without power and one without network",
        "; ".join(named.values()),
        "`ssh NODE`; if it does not answer, its BMC says whether it has power",
        f"{seconds:.1f} s",
        "gone after the simulated repair",
    )
    assert silent(doctor(fleet)[0]) == {}
    assert seconds - whole < DEAD_SECONDS
    assert max(whole, seconds) < NAMED_SECONDS

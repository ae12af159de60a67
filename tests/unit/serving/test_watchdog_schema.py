"""Both ends of the watchdog's configuration speak of one schema."""

from __future__ import annotations

from tests.unit.serving.test_watchdog_unit import ALONE, document


def test_a_configuration_says_the_schema_that_the_watchdog_reads() -> None:
    """on_node/watchdog/watchdog.py refuses any other."""
    told = document(ALONE)

    assert set(told) == {"schema", "listen", "stages"}
    assert told["schema"] == 1
    assert told["listen"] == {"address": "0.0.0.0", "port": 8406}
    assert document(ALONE, port=None)["listen"] is None

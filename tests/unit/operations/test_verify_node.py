"""What is said of a node that is asked everything, and what is never said."""

from __future__ import annotations

from typing import Any

from gpufleet.monitoring.exporters import Metrics
from gpufleet.operations.validated_config import ServerConfig
from gpufleet.operations.verify_node import endpoint_problems
from tests.support.rows import each_row

EXPORTER = Metrics("node", "node.service", "http://127.0.0.1:9100/metrics", ("node_load1",))
WELL = {"status": 200, "missing": []}


@each_row(
    ("answer", "said"),
    [
        ({"unit": {"ActiveState": "active"}, **WELL}, []),
        ({"unit": {"ActiveState": "activating"}, **WELL}, ["node.service is activating"]),
        ({"unit": {"ActiveState": "failed"}, **WELL}, ["node.service is failed"]),
        # What is not known is not well.
        ({"unit": {}, **WELL}, ["node.service is unknown"]),
        ({"unit": None, **WELL}, ["node.service is unknown"]),
        (None, ["node: the exporter could not be queried"]),
    ],
)
def test_an_exporter_whose_unit_is_not_active_is_named(
    answer: dict[str, Any] | None, said: list[str]
) -> None:
    seen = {"metrics": {} if answer is None else {"node": answer}}

    assert endpoint_problems([], [EXPORTER], seen) == said


def test_a_servers_configuration_is_named_without_its_content() -> None:
    """Of what an operation is given pyinfra prints the repr."""
    wanted = ServerConfig(
        unit="a.service",
        url="",
        name="a",
        directory="/etc/a",
        check=("true",),
        watched=(),
        files={"a.cfg": b"canary7391"},
        secrets={"key": b"canary7391"},
    )

    assert "a.service" in repr(wanted)
    assert "canary7391" not in repr(wanted)

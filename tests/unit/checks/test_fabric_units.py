"""IMEX and NVLink 5's subnet manager: what has failed is judged by who needs it."""

from __future__ import annotations

from tests.support.rows import each_row

IMEX, SUBNETS = "nvidia-imex.service", "nvlsm.service"
FAILED = {"load": "loaded", "active": "failed", "enabled": "enabled"}
STOPPED = {"load": "loaded", "active": "inactive", "enabled": "enabled"}
DISABLED = {"load": "loaded", "active": "inactive", "enabled": "disabled"}
GONE = {"load": "not-found", "active": "inactive", "enabled": {"missing": "absent"}}
SPANS = {
    "vllm": {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"},
    "serving": {"m": {"model": "/models/m", "span_nodes": True}},
}


@each_row(
    ("profile", "unit", "state", "settings", "severity"),
    [
        ("gb200x4", IMEX, FAILED, SPANS, "block"),
        ("gb200x4", IMEX, STOPPED, SPANS, "block"),
        ("gb200x4", IMEX, GONE, SPANS, "warn"),
        ("gb200x4", IMEX, DISABLED, SPANS, "warn"),
        ("gb200x4", IMEX, FAILED, {}, "warn"),
        ("gb200x4", IMEX, GONE, {}, "info"),
        ("h200x8", IMEX, FAILED, SPANS, "info"),
        ("b200x8", SUBNETS, FAILED, {}, "block"),
        ("b200x8", SUBNETS, STOPPED, {}, "warn"),
        ("b200x8", SUBNETS, DISABLED, {}, "ok"),
        ("b200x8", SUBNETS, GONE, {}, "ok"),
        ("t4x1", SUBNETS, FAILED, {}, "info"),
    ],
)
def test_a_unit_of_the_fabric_is_judged_by_who_needs_it(  # noqa: PLR0917
    document, judged, profile, unit, state, settings, severity
):
    found = document(profile)
    found["system"]["units"][unit].update(state)

    said = judged(found, settings).worst("fabric-units")

    assert said.severity.word == severity
    if severity in {"warn", "block"}:
        assert unit in said.found
        assert said.remedy


def test_units_that_cannot_be_read_are_unknown_where_they_are_needed(document, judged):
    needed, other = document("gb200x4"), document("t4x1")
    for each in (needed, other):
        each["system"]["units"] = {"missing": "timeout", "seconds": 10}

    assert judged(needed).worst("fabric-units").severity.word == "unknown"
    assert judged(other).worst("fabric-units").severity.word == "ok"

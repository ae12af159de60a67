"""Texts of settings go into configurations: none begins a line there, addresses are some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from gpufleet.settings.base import Setting
from gpufleet.settings.node_settings import NodeSettings

# What may have line ends, and why: each is quoted wherever it goes.
FREE = {
    "Acceptance.reason",  # printed
    "Golden.prompts",  # JSON
    "Served.environment",  # converge/quoting.py
    "Served.flags",
    "EngineSettings.environment",
    "Sglang.environment",
    "Vllm.environment",
}
OPEN: dict[str, Any] = {"allow_unauthenticated": True, "allow_plain_http": True}
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("IP address", {"gateway": OPEN | {"listen": "::\n  http-request set-var(txn.client) str(x)"}}),
    ("IP address", {"gateway": OPEN | {"listen": "gateway.example"}}),
    ("IP address", {"gateway": OPEN | {"listen": "fe80::1%a b"}}),
    ("IP address", {"monitoring": {"prometheus": {"listen": "::1\nExecStartPre=/bin/sh"}}}),
    ("IP address", {"monitoring": {"alertmanager": {"listen": "::1 --x"}}}),
    ("monitoring.grafana.unit", {"monitoring": {"grafana": {"unit": "../../x"}}}),
    ("monitoring.grafana.unit", {"monitoring": {"grafana": {"unit": "a.service\nUser=root"}}}),
    ("one line", {"monitoring": {"runbooks_url": "docs\nx"}}),
    ("one line", {"monitoring": {"external_labels": {"a": "b\x1b[2J"}}}),
    ("one line", {"monitoring": {"grafana": {"package": "grafana\u2028x"}}}),
)


class Example(Setting):
    """Settings as they are made."""

    free_text = frozenset({"free"})
    text: str = ""
    many: tuple[str, ...] = ()
    by_name: Mapping[str, list[str]] = {}  # pydantic copies it
    free: str = ""


def kinds(cls: type[Setting]) -> Iterator[type[Setting]]:
    for each in cls.__subclasses__():
        yield each
        yield from kinds(each)


def test_only_texts_that_are_quoted_may_have_line_ends() -> None:
    found = {
        f"{each.__name__}.{name}"
        for each in kinds(Setting)
        if each.__module__.startswith("gpufleet.")
        for name in each.free_text & each.model_fields.keys()
    }
    assert found == FREE


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\x85", "\u2028"])
def test_no_text_of_a_setting_has_a_control_character(character: str) -> None:
    bad = f"a{character}b"
    given: tuple[dict[str, Any], ...] = (
        {"text": bad},
        {"many": ["x", bad]},
        {"by_name": {"x": [bad]}},
        {"by_name": {bad: []}},
    )
    for each in given:
        with pytest.raises(ValidationError, match="one line"):
            Example.model_validate(each)
    assert Example.model_validate({"free": bad, "text": "Grüße, 世界"}).free == bad


def test_what_would_add_lines_to_configurations_is_refused_with_its_key() -> None:
    for says, given in REFUSED:
        with pytest.raises(ValidationError) as refused:
            NodeSettings.model_validate(given)
        shown = str(refused.value)
        assert says in shown, (given, shown)


def test_addresses_that_are_some_are_taken() -> None:
    for listen in ("0.0.0.0", "::", "10.0.0.1", "localhost", "fd00::1"):
        found = NodeSettings.model_validate({"gateway": OPEN | {"listen": listen}})
        assert found.gateway is not None
        assert found.gateway.listen == listen

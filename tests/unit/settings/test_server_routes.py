"""Settings that let clients control servers are said on purpose; what passes the guard, never."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.settings.base import KeyPath
from gpufleet.settings.parse import SettingsError, parse_settings

KEYED = {"version": "0.32.0", "lock": "lock", "api_key_file": "secrets/key"}
LOCAL = {"version": "0.32.0", "lock": "lock", "listen": "127.0.0.1"}


def mistakes(vllm: dict[str, Any], **served: Any) -> dict[KeyPath, str]:
    settings = {"vllm": vllm, "serving": {"m": {"model": "/srv/m", **served}}}
    try:
        parse_settings(settings)
    except SettingsError as error:
        return dict(error.mistakes)
    return {}


CONTROL = [
    ("environment", "VLLM_SERVER_DEV_MODE", "1", "/collective_rpc"),
    ("environment", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", "/v1/load_lora_adapter"),
    ("environment", "VLLM_TORCH_PROFILER_DIR", "/srv/traces", "/start_profile"),
    ("flags", "enable-elastic-ep", True, "/scale_elastic_ep"),
    ("flags", "enable-fault-tolerance", True, "/fault_tolerance"),
    ("flags", "profiler-config", {"profiler": "torch"}, "/start_profile"),
]


@pytest.mark.parametrize(("where", "name", "value", "route"), CONTROL)
def test_routes_that_control_a_server_are_said_on_purpose(
    where: str, name: str, value: Any, route: str
) -> None:
    for vllm in (KEYED, LOCAL):
        ((at, what),) = mistakes(vllm, **{where: {name: value}}).items()
        assert at == ("serving", "m", where, name)
        assert route in what
        assert "write `allow_control_routes: true` under `vllm`" in what
        assert mistakes({**vllm, "allow_control_routes": True}, **{where: {name: value}}) == {}


def test_variables_of_all_models_are_looked_at_too() -> None:
    found = mistakes({**KEYED, "environment": {"VLLM_SERVER_DEV_MODE": "1"}})
    assert list(found) == [("vllm", "environment", "VLLM_SERVER_DEV_MODE")]


def test_what_is_switched_off_gives_no_route() -> None:
    off = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "False"}
    flags = {"enable-elastic-ep": False, "profiler-config": None}
    assert mistakes(KEYED, environment=off, flags=flags) == {}


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("environment", "VLLM_USE_RUST_FRONTEND", "1"),
        ("flags", "grpc", True),
        ("flags", "grpc-port", 50051),
    ],
)
def test_with_a_key_no_other_program_than_the_one_that_loads_the_guard_answers(
    where: str, name: str, value: Any
) -> None:
    allowed = {**KEYED, "allow_control_routes": True}
    ((at, what),) = mistakes(allowed, **{where: {name: value}}).items()
    assert at == ("serving", "m", where, name)
    assert "remove this key" in what
    assert mistakes(LOCAL, **{where: {name: value}}) == {}

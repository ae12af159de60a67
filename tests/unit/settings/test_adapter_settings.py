"""Adapters are refused by their names, sources and neighbours before a node is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings.base import KeyPath
from gpufleet.settings.node_variables import check
from gpufleet.settings.parse import SettingsError, parse_settings
from gpufleet.settings.variables import Origin

VLLM = {"version": "0.32.0", "lock": "lock", "listen": "127.0.0.1"}
COMMIT = "0123456789" * 4
HUB = {"source": "org/sql", "revision": COMMIT}


def mistakes(adapters: dict[str, Any], **served: Any) -> dict[KeyPath, str]:
    entry = {"model": "/srv/m", "adapters": adapters, **served}
    try:
        parse_settings({"vllm": VLLM, "serving": {"m": entry}})
    except SettingsError as error:
        return dict(error.mistakes)
    return {}


def test_a_commit_of_the_hub_and_a_path_are_taken() -> None:
    path = {"source": "/srv/adapters/chat", "sha256": "ab" * 32}

    assert mistakes({"sql": HUB, "chat": path, "bare": {"source": "/srv/adapters/bare"}}) == {}


@pytest.mark.parametrize(
    ("adapter", "what"),
    [
        ({"source": "org/sql"}, "`revision` is missing"),
        ({"source": "org/sql", "revision": "main"}, "a commit with all of its 40 digits;"),
        ({**HUB, "sha256": "ab" * 32}, "`sha256` has no effect if `source` is a Hugging Face id:"),
        (
            {"source": "/srv/sql", "revision": COMMIT},
            "`revision` has no effect if `source` is a path:",
        ),
        ({"source": "/srv/sql", "sha256": "AB"}, "64 digits"),
        ({"source": "srv/../sql", "revision": COMMIT}, "the absolute path"),
        ({"source": "../sql", "revision": COMMIT}, "the absolute path"),
        ({"source": "/srv/../etc"}, "without the parts . and .."),
        ({"source": "./sql"}, "the absolute path"),
        ({"source": "/srv/a=b"}, "the absolute path"),
        ({"source": "/srv/a b"}, "the absolute path"),
        ({"source": "/srv/a\nb"}, "the absolute path"),
        ({"source": "/root/sql"}, "is under /root, which servers cannot see"),
        ({"source": "/tmp/sql"}, "is under /tmp, which servers cannot see"),
        ({"source": "/home/ann/sql"}, "is under /home, which servers cannot see"),
        ({}, "source"),
    ],
)
def test_what_no_server_could_load_is_refused(adapter: dict[str, Any], what: str) -> None:
    found = mistakes({"sql": adapter})

    assert any(what in f"{at} {sentence}" for at, sentence in found.items()), found


@pytest.mark.parametrize(
    "name", ["", "../etc", "/etc/passwd", "a/b", "a b", ".a", "a.", "ä", "a\0b", "x" * 65, "a%2fb"]
)
def test_no_name_can_look_like_a_path(name: str) -> None:
    assert mistakes({name: HUB})


@pytest.mark.parametrize("flag", ["lora-modules", "enable-lora", "default-mm-loras"])
def test_flags_that_adapters_decide_are_refused_beside_them_alone(flag: str) -> None:
    ((at, what),) = mistakes({"sql": HUB}, flags={flag: True}).items()

    assert at == ("serving", "m")
    assert f"`flags` and `adapters` both set {flag}" in what
    assert mistakes({}, flags={flag: True}) == {}


@pytest.mark.parametrize("where", ["environment", "environment_files"])
@pytest.mark.parametrize(
    "name", ["VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_LORA_RESOLVER_HF_REPO_LIST"]
)
def test_clients_never_choose_where_an_adapter_is_read(where: str, name: str) -> None:
    found = mistakes({}, **{where: {name: "/srv/adapters"}})

    assert "lets clients choose" in found["serving", "m", where, name]


def fleet(**nodes: dict[str, Any]) -> None:
    here = Origin(str(Path("group_vars/gpu.yml")), 1)
    check(
        {
            name: {"vllm": (VLLM, here), "serving": (serving, here)}
            for name, serving in nodes.items()
        },
        dict.fromkeys(nodes, ("gpu",)),
    )


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "/srv/m", "adapters": {name: HUB}, **more}


@pytest.mark.parametrize(
    ("nodes", "other"),
    [
        ({"a": {"m": entry("m")}}, "the entry serving.m"),
        ({"a": {"m": entry("llama", served_name="llama")}}, "serving.m.served_name"),
        ({"a": {"m": entry("x"), "x": {"model": "/srv/x"}}}, "the entry serving.x"),
        ({"a": {"m": entry("x")}, "b": {"o": {"model": "/o", "served_name": "x"}}}, "served_name"),
        ({"a": {"m": entry("x")}, "b": {"o": entry("x")}}, "serving.o.adapters.x"),
    ],
)
def test_a_name_stands_for_one_thing_in_the_whole_fleet(
    nodes: dict[str, dict[str, Any]], other: str
) -> None:
    with pytest.raises(FleetError) as refused:
        fleet(**nodes)

    said = str(refused.value)
    assert "clients also use this name for" in said
    assert other in said
    assert "give the adapter a different name" in said


def test_an_entry_that_many_nodes_declare_has_its_adapters_once() -> None:
    fleet(a={"m": entry("x")}, b={"m": entry("x")})

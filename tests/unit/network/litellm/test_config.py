"""What LiteLLM is told, and what operators may not write."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from gpufleet.artifacts import release
from gpufleet.bundle.requirements import NodeNeeds, needs
from gpufleet.network import firewall, litellm, litellm_node
from gpufleet.network.litellm import Upstream
from gpufleet.node.machine import System
from gpufleet.remote import payload
from gpufleet.serving.unit import UnitFile
from gpufleet.settings.litellm_settings import COMPROMISED, Litellm
from gpufleet.settings.parse import SettingsError, parse_settings
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.network.gateway.test_config import OPEN, Node, fleet

LOCK = ROOT / "locks/litellm-1.106.2.txt"
KEY = b"the-upstreams-own-key"
BASE = {"version": "1.106.2", "lock": str(LOCK), "allow_unauthenticated": True}
VLLM = {"version": "0.32.0", "lock": "x.txt", "allow_unauthenticated": True}


def entry(**more: Any) -> dict[str, Any]:
    return {"model": "org/tiny", "revision": "0" * 40, **more}


def around(
    wanted: Mapping[str, Any], serving: Mapping[str, Any], gateway: Mapping[str, Any] | None = None
) -> dict[str, Node]:
    """Return a fleet of a node with LiteLLM and one with models."""
    front = {"gpu_node": False, "litellm": {**BASE, **wanted}}
    if gateway is not None:
        front["gateway"] = {**gateway}
    return fleet(
        ("gw-01", "192.0.2.9", front), ("gpu-01", "192.0.2.11", {"vllm": VLLM, "serving": serving})
    )


def said_of(nodes: Mapping[str, Node]) -> list[str]:
    wanted = nodes["gw-01"].settings.litellm
    assert wanted
    return [*litellm.problems(wanted, nodes, "gw-01")]


def mistakes(**wanted: Any) -> str:
    with pytest.raises(SettingsError) as refused:
        parse_settings({"litellm": {**BASE, **wanted}})
    return str(refused.value)


def told(nodes: Mapping[str, Node]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.yaml and front.json of gw-01."""
    wanted = nodes["gw-01"].settings.litellm
    assert wanted
    assert said_of(nodes) == []
    served = litellm.entries(nodes)
    at = litellm.upstream(wanted, nodes, "gw-01")
    found = litellm.configuration(wanted, litellm.names(wanted, served), served, at).files
    return yaml.safe_load(found["config.yaml"]), json.loads(found["front.json"])


def test_every_mistake_about_names_is_said_at_once() -> None:
    """Nothing is guessed: each sentence has the key, and what is near where something is."""
    wanted = {
        "models": {
            "org/larg": {},
            "pair": {"entries": ["small", "smal"], "fallbacks": ["nobody"]},
            "org/large": {"entries": ["small"]},
        },
        "aliases": {"gpt-4o": "org/smal", "org/small": "pair"},
        "clients": [{"name": "a", "key_sha256": "0" * 64, "models": ["gpt-5"]}],
        "allow_unauthenticated": False,
    }
    serving = {"small": entry(served_name="org/small"), "large": entry(served_name="org/large")}

    said = said_of(around(wanted, serving, OPEN))

    assert [each.removeprefix("gw-01: litellm.").split(": ")[0] for each in said] == [
        "models.org/larg",
        "models.pair.entries",
        "models.pair.fallbacks",
        "models.org/large",
        "aliases.gpt-4o",
        "aliases.org/small",
        "clients",
    ]
    assert "did you mean 'org/large'?" in said[0]
    assert "did you mean 'small'?" in said[1]
    assert "hides large" in said[3]
    assert "did you mean 'org/small'?" in said[4]


def test_two_entries_of_one_name_are_one_only_where_that_is_said() -> None:
    serving = {"east": entry(served_name="llama"), "west": entry(served_name="llama")}
    (said,) = said_of(around({}, serving, OPEN))
    assert "east and west have the same name llama" in said
    assert said_of(around({"models": {"llama": {"parameters": {}}}}, serving, OPEN)) == [said]

    config, _ = told(around({"models": {"llama": {"entries": ["west", "east"]}}}, serving, OPEN))

    bases = [each["litellm_params"]["api_base"] for each in config["model_list"]]
    assert bases == ["http://127.0.0.1:8443/west/v1", "http://127.0.0.1:8443/east/v1"]


def test_an_entry_that_only_computes_prompts_has_no_name() -> None:
    serving = {"first": entry(served_name="llama"), "llama": entry(prefill="first")}
    _, front = told(around({}, serving, OPEN))
    assert front["models"] == ["llama"]


@each_row(
    ("wanted", "said"),
    [
        (
            {"models": {"a": {"parameters": {"temperature": "0.2"}}}},
            "temperature: must be a number, without quotes",
        ),
        ({"models": {"a": {"parameters": {"temperature": 3}}}}, "temperature: must be at most 2.0"),
        ({"models": {"a": {"parameters": {"top_k": 1.5}}}}, "top_k: must be a whole number"),
        ({"models": {"a": {"parameters": {"seed": True}}}}, "seed: must be a whole number"),
        ({"models": {"a": {"parameters": {"stop": "END"}}}}, "stop: must be a list"),
        ({"models": {"a": {"parameters": {"temprature": 1}}}}, "no setting has this name"),
        ({"models": {"a": {"parameters": {"api_base": "x"}}}}, "no setting has this name"),
        ({"aliases": {"a b": "c"}}, "aliases.a b"),
        ({"aliases": {"a": "b", "b": "c"}}, "b, which is an alias, too: write c"),
        (
            {"aliases": {"a": "b"}, "models": {"a": {}}},
            "`aliases` and `models` both have the name a",
        ),
        ({"models": {"a": {"fallbacks": ["a"]}}}, "contains a itself"),
        ({"listen": "192.0.2.9"}, "keys and prompts would be sent unencrypted"),
        ({"allow_unauthenticated": False}, "no client has access"),
        ({"no_index": True}, "no source for packages:"),
        ({"upstream_ca_file": "ca.pem"}, "`upstream_url` that starts with https://:"),
        ({"upstream_url": "https://gateway.example.net/v1"}, "upstream_url"),
        ({"port": 9100}, "`node_exporter.port` and `litellm.port` are both 9100"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(wanted: dict[str, Any], said: str) -> None:
    assert said in mistakes(**wanted)


@pytest.mark.parametrize("version", COMPROMISED)
def test_releases_that_were_somebody_elses_are_refused(version: str) -> None:
    assert "compromised" in mistakes(version=version)


def test_the_gateway_is_asked_as_it_is_reached_and_as_long_as_it_waits() -> None:
    """LiteLLM gives up after the gateway, which says why; and it tries nothing again itself."""
    gateway = {**OPEN, "port": 8555, "request_seconds": 90, "queue_seconds": 30}
    gateway |= {"affinity": {"by": "session", "header": "X-Chat"}}
    wanted = {"aliases": {"gpt-4o": "tiny"}, "models": {"tiny": {"parameters": {"top_p": 0.5}}}}

    config, front = told(around(wanted, {"tiny": entry()}, gateway))

    own, alias = sorted(config["model_list"], key=lambda each: each["model_name"] != "tiny")
    assert own["litellm_params"] == {
        "model": "hosted_vllm/tiny",
        "api_base": "http://127.0.0.1:8555/tiny/v1",
        "timeout": 120,
        "stream_timeout": 120,
        "max_retries": 0,
        "top_p": 0.5,
    }
    assert alias["litellm_params"] == own["litellm_params"]
    assert config["router_settings"]["num_retries"] == 0
    assert "x-chat" in front["headers"]


def test_a_gateway_that_cannot_be_asked_is_said_with_what_to_write() -> None:
    serving = {"tiny": entry()}
    tls = {"tls": {"certificate_file": "c", "key_file": "k"}, "allow_unauthenticated": True}
    keyed = {**OPEN, "allow_unauthenticated": False}
    keyed["clients"] = [{"name": "a", "key_sha256": "0" * 64}]

    assert "this node has no `gateway`" in said_of(around({}, serving))[0]
    assert "request_seconds" in said_of(around({}, serving))[1]
    assert "uses TLS" in said_of(around({}, serving, tls))[0]
    assert "the gateway requires a key" in said_of(around({}, serving, keyed))[0]
    assert "there are no models" in said_of(around({}, {}, OPEN))[0]
    other = {"upstream_url": "https://gateway.example.net:8443", "request_seconds": 60}
    assert said_of(around(other, serving)) == []


def test_a_key_that_the_gateway_would_refuse_is_found_beforehand() -> None:
    """Unknown there, or not for a model that a name needs."""
    client: dict[str, Any] = {"name": "litellm", "key_sha256": hashlib.sha256(KEY).hexdigest()}
    gateway = {**OPEN, "allow_unauthenticated": False, "clients": [client]}
    wanted = {"upstream_key_file": "secrets/key"}

    def refusal(gateway: Mapping[str, Any], key: bytes) -> str | None:
        nodes = around(wanted, {"tiny": entry(), "other": entry()}, gateway)
        found = nodes["gw-01"].settings.litellm
        assert found
        return litellm.unknown_key(found, nodes, "gw-01", key)

    assert refusal(gateway, KEY) is None
    assert "is in no entry of `gateway.clients`" in str(refusal(gateway, b"another"))
    narrow = {**gateway, "clients": [{**client, "models": ["tiny"]}]}
    assert "may not use other" in str(refusal(narrow, KEY))


def test_no_key_is_in_what_it_reads() -> None:
    client = {"name": "litellm", "key_sha256": hashlib.sha256(KEY).hexdigest()}
    gateway = {**OPEN, "allow_unauthenticated": False, "clients": [client]}
    config, _ = told(around({"upstream_key_file": "secrets/key"}, {"tiny": entry()}, gateway))
    (model,) = config["model_list"]
    assert model["litellm_params"]["api_key"] == f"os.environ/{litellm.KEY_VARIABLE}"


@each_row(
    ("wanted", "url", "networks"),
    [
        ({}, "http://127.0.0.1:8443", ("localhost",)),
        ({}, "http://[::1]:8443", ("localhost",)),
        ({}, "https://gateway.example.net:8443", ()),
        ({"listen": "192.0.2.9", "allow_plain_http": True}, "http://127.0.0.1:8443", ()),
        ({"networks": ["192.0.2.0/24"]}, "https://a.example.net", ("localhost", "192.0.2.0/24")),
    ],
)
def test_it_reaches_no_further_than_it_has_to(
    wanted: dict[str, Any], url: str, networks: tuple[str, ...]
) -> None:
    found = litellm.allowed_networks(
        Litellm.model_validate({**BASE, **wanted}), Upstream(url, 60, "x")
    )
    assert found == networks


def test_the_lock_that_we_ship_is_whole_and_of_one_version() -> None:
    text = LOCK.read_text()
    entries = text.replace("\\\n", " ").splitlines()
    assert [each for each in entries if each.strip() and "--hash=sha256:" not in each] == []
    assert "://" not in text
    wanted = Litellm.model_validate(BASE)
    uv = (ROOT / "locks/uv.txt").read_bytes()
    found = release.release(wanted, text.encode(), uv, litellm.PROGRAM)
    assert found.directory.startswith("/opt/litellm/releases/1.106.2-")
    assert "vllm" not in release.build_script(found)


def test_what_starts_it_runs_on_every_python_that_litellm_does() -> None:
    """3.10, and nothing is imported before it is known that LiteLLM is quiet."""
    tree = ast.parse(payload.source("network/litellm_serve"), feature_version=(3, 10))
    above = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    assert not re.search("litellm|uvicorn", " ".join(map(ast.unparse, above)))


def test_its_wheels_come_from_the_mirror_and_go_into_a_bundle() -> None:
    """As vLLM's do: by one address, and never from PyPI where a node is offline."""
    mirror = {"mirror": {"url": "http://mirror.lan:8081"}, "offline": True}
    written = {"gpu_node": False, "litellm": BASE}
    found = parse_settings({**written, **mirror}).litellm
    assert found
    assert (found.find_links, found.no_index) == (
        ("http://mirror.lan:8081/wheels/index.html",),
        True,
    )
    alone = {"mirror": {"models": "http://mirror.lan:8081/hub"}, "offline": True}
    with pytest.raises(SettingsError, match="litellm: would download wheels from PyPI"):
        parse_settings({**written, **alone})

    node = NodeNeeds(
        "gw-01", parse_settings(written), System("debian", "12", "x86_64"), "3.11.2", ()
    )
    locks = needs([node], "https://index.example.net/simple", kinds=("wheels",)).locks
    assert [each.path for each in locks] == [str(LOCK), "locks/uv.txt"]


def test_a_firewall_lets_its_clients_in_where_it_listens_for_others() -> None:
    def opened(**wanted: Any) -> bool:
        told = {"litellm": {**BASE, **wanted}, "firewall": {"policy": "drop"}}
        return bool(re.search(r"\b4000\b", firewall.render_rules([], parse_settings(told))))

    assert not opened()
    assert opened(listen="192.0.2.9", allow_plain_http=True)


def test_whatever_it_reads_when_it_starts_is_a_reason_to_start_it_again() -> None:
    """And nothing else is: what a release was built from may move. No secret is in the unit."""
    lock, uv = LOCK.read_bytes(), (ROOT / "locks/uv.txt").read_bytes()

    def unit(
        read: bytes = b"a", key: bytes = KEY, reach: tuple[str, ...] = (), **wanted: Any
    ) -> UnitFile:
        said = Litellm.model_validate({**BASE, **wanted})
        build = release.release(said, lock, uv, litellm.PROGRAM)
        return litellm_node.litellm_unit(
            said, build, reach, {"config.yaml": read}, {"upstream-key": key}
        )

    first = unit()
    assert unit(index_url="https://index.example.net/simple").fingerprint == first.fingerprint
    others = (
        unit(read=b"b"),
        unit(key=b"another"),
        unit(reach=("localhost",)),
        unit(drain_seconds=5),
        unit(python="/usr/bin/python3.12"),
    )
    assert len({first.fingerprint, *(each.fingerprint for each in others)}) == 6
    assert KEY.decode() not in first.content
    assert "LoadCredential=upstream-key:" in first.content

"""What a gateway is told: its backends, and a configuration that HAProxy itself finds valid."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.network import gateway_node, keepalived
from gpufleet.network.haproxy import (
    CONFIGURATION,
    HOME,
    RUN,
    STATE,
    Backend,
    Target,
    backends,
    config,
    keep_silent_servers,
    problems,
)
from gpufleet.planning.adapter_flags import MODULES
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving import unit
from gpufleet.serving.servers import (
    Server,
    planned_and_running,
    planned_servers,
    running_servers,
)
from gpufleet.settings.gateway_settings import Gateway, VirtualAddress
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import parse_settings
from tests.support.rows import each_row
from tests.unit.network.gateway.running import certificate, haproxy

MODEL = {"model": "org/tiny", "revision": "0" * 40}
VLLM = {"version": "0.32.0", "lock": "x.txt", "allow_unauthenticated": True}
OPEN = {"allow_unauthenticated": True, "allow_plain_http": True}


@dataclass(frozen=True)
class Node:
    """A node of the inventory, without the inventory."""

    name: str
    address: str
    settings: NodeSettings


def fleet(*nodes: tuple[str, str, dict[str, Any]]) -> dict[str, Node]:
    return {name: Node(name, address, parse_settings(data)) for name, address, data in nodes}


def served(**vllm: Any) -> dict[str, Any]:
    return {"vllm": VLLM | vllm, "serving": {"tiny": MODEL | {"served_name": "org/tiny"}}}


GATEWAY = ("gw-01", "192.0.2.9", {"gpu_node": False, "gateway": OPEN})
FIRST = Server("gpu-01", "tiny-0", 0, "tiny", 8000)


def test_a_backend_is_an_entry_and_has_the_servers_that_can_be_reached() -> None:
    """One that listens on its own node alone is reached by a gateway on that node."""
    nodes = fleet(
        GATEWAY,
        ("gpu-01", "192.0.2.11", served()),
        ("gpu-02", "2001:db8::2", served()),
        ("gpu-03", "192.0.2.13", served(listen="127.0.0.1")),
        ("gpu-04", "192.0.2.14", served(listen="198.51.100.4")),
    )
    servers = [
        FIRST,
        Server("gpu-02", "tiny-1", 2, "tiny", 8001),
        Server("gpu-03", "tiny-2", 0, "tiny", 8000),
        Server("gpu-04", "tiny-3", 0, "tiny", 8000),
        Server("gpu-01", "other-0", 0, "not-declared", 9000),
    ]
    (found,) = backends(nodes, servers, "gw-01")

    assert (found.name, found.served_name) == ("tiny", "org/tiny")
    assert {each.name: each.place for each in found.targets} == {
        "gpu-01.tiny-0": "192.0.2.11:8000",
        "gpu-02.tiny-1.2": "[2001:db8::2]:8001",
        "gpu-04.tiny-3": "198.51.100.4:8000",
    }
    (there,) = backends(nodes, servers, "gpu-03")
    assert "127.0.0.1:8000" in [each.place for each in there.targets]


SQL = {"sql": {"source": "/srv/sql"}, "chat": {"source": "/srv/chat"}}


def adapted() -> dict[str, Any]:
    return {"vllm": VLLM, "serving": {"tiny": MODEL | {"adapters": SQL}}}


def test_an_adapter_is_known_once_every_server_of_its_model_loads_it() -> None:
    nodes = fleet(GATEWAY, *((f"gpu-0{n}", f"192.0.2.1{n}", adapted()) for n in (1, 2)))

    def known(*loaded: tuple[str, ...]) -> tuple[str, ...]:
        servers = [
            Server(f"gpu-0{n}", f"tiny-{n}", 0, "tiny", 8000, names)
            for n, names in enumerate(loaded, start=1)
        ]
        (found,) = backends(nodes, servers, "gw-01")
        return found.adapters

    assert known(("chat", "sql"), ("sql",)) == ("sql",)
    assert known(("chat", "sql"), ()) == ()
    assert known(("chat", "sql"), ("chat", "sql")) == ("chat", "sql")
    # An adapter that is loaded and not declared any more is forgotten before it is unloaded.
    assert known(("old", "sql"), ("old", "sql")) == ("sql",)
    assert known() == ("chat", "sql")


def test_an_adapter_of_the_operators_own_flag_is_known_before_and_after_it_runs() -> None:
    """Otherwise a gateway of several models answers 404 for a name that its servers know."""
    modules = ["sql=/srv/sql", "chat=/srv/chat"]
    own = MODEL | {"flags": {"enable-lora": True, MODULES: modules}}
    nodes = fleet(GATEWAY, ("gpu-01", "192.0.2.11", {"vllm": VLLM, "serving": {"tiny": own}}))
    flags = (LayeredFlag(MODULES, modules, "flags"),)
    stage = Stage("tiny", 0, "gpu-01", (0,), ("GPU-0",), 8000, 1, flags=flags)
    words = ("vllm serve", f"--{MODULES} {' '.join(modules)}")
    runs = Running("tiny", 0, "gpu-01", ("GPU-0",), 8000, arguments=words)
    planned, running = planned_servers([stage]), running_servers([runs])

    for there in (planned, running, planned_and_running(planned, running)):
        (found,) = backends(nodes, there, "gw-01")
        assert found.adapters == ("chat", "sql")


def test_a_client_is_given_models_and_an_adapter_is_its_models() -> None:
    gateway = OPEN | {"clients": [CLIENT | {"models": ["sql"]}], "allow_unauthenticated": False}
    nodes = fleet(
        ("gw-01", "192.0.2.9", {"gpu_node": False, "gateway": gateway}),
        ("gpu-01", "192.0.2.11", adapted()),
    )

    (said,) = problems(nodes, "gw-01")

    assert said.startswith("gateway.clients: team has the adapter sql in `models`: write the model")


def test_servers_of_silent_nodes_stay_and_no_others() -> None:
    """A node whose name begins as another's is not taken for it."""
    backends = (Backend("tiny", "tiny", (Target("gpu-01.tiny-0", "192.0.2.11", 8000),)),)
    before = {
        "tiny/gpu-01.tiny-9": ("192.0.2.11", 8009),
        "tiny/gpu.tiny-1": ("192.0.2.12", 8000),
        "tiny/gpu.example.tiny-2": ("192.0.2.13", 8000),
    }
    nodes = fleet(*((name, name, served()) for name in ("gpu-01", "gpu", "gpu.example")))
    (found,) = keep_silent_servers(backends, before, {"gpu"}, nodes)

    assert [each.name for each in found.targets] == ["gpu-01.tiny-0", "gpu.tiny-1"]


def test_a_watchdog_is_asked_about_the_stages_that_it_watches_and_no_others() -> None:
    """Also of nodes that do not answer the deploy: their servers stay as they are."""
    off = served()
    off["serving"]["tiny"] |= {"watchdog": {"mode": "off"}}
    nodes = fleet(
        GATEWAY,
        ("gpu-01", "192.0.2.11", served()),
        ("gpu-02", "192.0.2.12", served(watchdog_port=9500)),
        ("gpu-03", "192.0.2.13", served(watchdog_port=None)),
        ("gpu-04", "192.0.2.14", off),
    )
    servers = [Server(f"gpu-0{n}", f"tiny-{n}", 2, "tiny", 8000) for n in (1, 2, 3, 4)]
    (found,) = backends(nodes, servers, "gw-01")
    asked = {each.name: (each.stage, each.watchdog_port) for each in found.targets}
    assert asked == {
        "gpu-01.tiny-1.2": ("tiny-1", 8406),
        "gpu-02.tiny-2.2": ("tiny-2", 9500),
        "gpu-03.tiny-3.2": ("", 0),
        "gpu-04.tiny-4.2": ("", 0),
    }

    before = {f"tiny/{each.name}": (each.address, each.port) for each in found.targets}
    none = replace(found, targets=())
    assert keep_silent_servers([none], before, set(nodes), nodes) == (found,)

    text = config(Gateway.model_validate(OPEN), [found]).files["haproxy.cfg"].decode()
    lines = {line.split()[1]: line for line in text.splitlines() if "    server " in line}
    said = 'agent-check agent-port 9500 agent-inter 2000ms agent-send "tiny-2\\n"'
    assert lines["gpu-02.tiny-2.2"].endswith(f"192.0.2.12:8000 check {said}")
    assert lines["gpu-03.tiny-3.2"].endswith("192.0.2.13:8000 check")


def test_what_a_gateway_could_not_serve_is_refused_with_its_setting() -> None:
    nodes = fleet(
        GATEWAY,
        ("gpu-01", "192.0.2.11", served(api_key_file="a", allow_unauthenticated=False)),
        (
            "gpu-02",
            "192.0.2.12",
            served(api_key_file="b", allow_unauthenticated=False)
            | {"firewall": {"clients": ["198.51.100.0/24"]}},
        ),
    )
    keys, closed = problems(nodes, "gw-01")
    assert keys.startswith(
        "serving.tiny: the nodes of this model have different values of `vllm.api_key_file` "
    )
    assert closed.startswith(
        "gpu-02: firewall.clients does not include the gateway gw-01 (192.0.2.9)"
    )
    well = fleet(
        GATEWAY,
        ("gpu-01", "192.0.2.11", served() | {"firewall": {"clients": ["192.0.2.0/24"]}}),
        ("gpu-02", "192.0.2.12", served() | {"firewall": {"monitoring": ["198.51.100.0/24"]}}),
    )
    assert list(problems(well, "gw-01")) == []


@each_row(("entry", "is_refused"), [("v1", True), ("v2", True), ("v3", False), ("rerank", False)])
def test_an_entry_that_is_named_as_a_path_of_all_models_is_refused(
    entry: str, is_refused: bool
) -> None:
    node = served()
    node["serving"] = {entry: node["serving"]["tiny"]}
    found = list(problems(fleet(GATEWAY, ("gpu-01", "192.0.2.11", node)), "gw-01"))

    expected = (
        f"serving.{entry}: the gateway uses the path /{entry} for all models: rename the entry"
    )
    assert found == [expected] * is_refused


CLIENT = {"name": "team", "key_sha256": "ab" * 32, "requests_per_minute": 5, "models": ["tiny"]}
CERTIFIED = {"tls": {"certificate_file": "c.pem", "key_file": "k.pem"}}
SHARED = {
    "address": "192.0.2.10/24",
    "interface": "eth0",
    "router_id": 51,
    "password_file": "vrrp",
}
TWO = (
    Backend("tiny", 'org/it\'s "tiny"', (Target("gpu-01.tiny-0", "192.0.2.11", 8000),), "key"),
    Backend("big", "big", (Target("gpu-02.big-0", "2001:db8::2", 8000),)),
)


WATCHED = replace(TWO[0].targets[0], stage="tiny-0", watchdog_port=8406)


def test_a_models_limits_are_its_own_and_the_others_have_the_gateways() -> None:
    limits = {TWO[0].name: {"per_server": 512, "queue_seconds": 5}, TWO[1].name: {}}
    found = config(Gateway.model_validate(OPEN | {"per_server": 8, "limits": limits}), TWO)

    text = found.files[CONFIGURATION].decode()
    own, others = (
        text.partition(f"\nbackend {each.name}\n")[2].partition("\nbackend ")[0] for each in TWO
    )
    assert re.findall(r"maxconn \d+|timeout queue .*", own) == ["timeout queue 5s", "maxconn 512"]
    assert re.findall(r"maxconn \d+|timeout queue .*", others) == ["maxconn 8"]


def test_limits_of_a_model_that_nobody_serves_are_refused() -> None:
    gateway = {"gpu_node": False, "gateway": OPEN | {"limits": {"tinny": {"per_server": 8}}}}
    nodes = fleet(("gw-01", "192.0.2.9", gateway), ("gpu-01", "192.0.2.11", served()))

    (said,) = problems(nodes, "gw-01")

    assert said.startswith("gateway.limits.tinny: no node declares serving.tinny")
    assert "did you mean 'tiny'" in said


@pytest.mark.parametrize(
    ("settings", "backends"),
    [
        pytest.param(OPEN, (), id="nothing"),
        pytest.param(OPEN, TWO[:1], id="one"),
        pytest.param(OPEN, TWO, id="two"),
        pytest.param(OPEN, (replace(TWO[0], adapters=("a:b.c", "sql")),), id="one-adapters"),
        pytest.param(OPEN, (replace(TWO[0], adapters=("sql",)), TWO[1]), id="two-adapters"),
        pytest.param(OPEN, (replace(TWO[0], targets=(WATCHED,)),), id="watched"),
        pytest.param(OPEN, (TWO[0], replace(TWO[0], name="twin")), id="same-name"),
        pytest.param(OPEN, (replace(TWO[0], targets=()),), id="no-server"),
        pytest.param({"clients": [CLIENT], **CERTIFIED}, TWO, id="tls"),
        pytest.param(OPEN | {"affinity": {"by": "session"}}, TWO, id="session"),
        pytest.param(OPEN | {"affinity": {"by": "client"}}, TWO, id="client"),
        pytest.param(OPEN | {"per_server": 8, "max_body_mib": 1024}, TWO, id="full"),
        pytest.param(
            OPEN | {"limits": {TWO[0].name: {"per_server": 512, "queue_seconds": 5}}},
            TWO,
            id="limits",
        ),
        pytest.param(OPEN | {"listen": "::"}, TWO, id="ipv6"),
        pytest.param(OPEN | {"listen": "192.0.2.10", "virtual_address": SHARED}, TWO, id="virtual"),
    ],
)
def test_haproxy_finds_it_valid_without_a_warning(
    tmp_path: Path, settings: dict[str, Any], backends: tuple[Backend, ...]
) -> None:
    found = config(
        Gateway.model_validate(settings),
        backends,
        certificate=certificate(tmp_path) if "tls" in settings else b"",
        account="",
        run=str(tmp_path),
        state=str(tmp_path),
    )
    for path, content in {**found.files, **found.secrets}.items():
        (tmp_path / path).write_bytes(content)
    (tmp_path / "drained.state").write_text("1\n")
    done = subprocess.run(
        [haproxy(), "-c", "-C", tmp_path, "-f", "haproxy.cfg"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # 3.0 says nothing of one that is.
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout in {"", "Configuration file is valid\n"}


@each_row(
    ("settings", "told"),
    [
        ({"listen": "192.0.2.10"}, "bind 192.0.2.10:8443"),
        # Where the address is on another machine now, it is bound all the same.
        ({"listen": "192.0.2.10", "virtual_address": SHARED}, "bind 192.0.2.10:8443 transparent"),
        ({"listen": "0.0.0.0", "virtual_address": SHARED}, "bind *:8443"),
        ({"max_body_mib": 3}, "{ req.hdr_val(content-length) gt 3145728 }"),
    ],
)
def test_what_operators_write_is_what_haproxy_is_told(settings: dict[str, Any], told: str) -> None:
    text = config(Gateway.model_validate(OPEN | settings), TWO).files["haproxy.cfg"].decode()

    assert any(line.endswith(told) for line in text.splitlines())


@each_row(("listen", "place"), [("192.0.2.9", "192.0.2.9:8405"), (None, "*:8405")])
def test_a_gateways_metrics_are_where_the_exporters_of_its_node_are(
    listen: str | None, place: str
) -> None:
    data = {"gpu_node": False, "gateway": OPEN, "exporters": {"listen": listen}}
    node = MonitoringTargets("gw-01", fleet(("gw-01", "192.0.2.9", data)), ())  # type: ignore[arg-type]
    wanted = node.settings.gateway
    assert wanted

    found = gateway_node.configuration(node, wanted, lambda: pytest.fail("no node is silent"))

    assert f"    bind {place}\n" in found.files["haproxy.cfg"].decode()


def test_what_asks_a_gateway_knows_where_it_lies() -> None:
    """The program's places are those of the role that has written them, and nobody says them."""
    source = resources.files("gpufleet").joinpath("on_node/network/gateway_drains.py").read_text()
    for place in (HOME, RUN, STATE):
        assert f'"{place}"' in source


def test_no_secret_is_in_what_everybody_may_read() -> None:
    wanted = Gateway.model_validate({"clients": [CLIENT], **CERTIFIED})
    found = config(wanted, TWO, certificate=b"of-the-certificate")
    readable = b"".join(found.files.values())

    assert b"Bearer key" not in readable
    assert b"of-the-certificate" not in readable
    assert found.secrets["upstream.map"] == b"tiny key\n"
    assert "of-the-certificate" not in repr(found)


def test_another_fingerprint_means_something_else_to_read() -> None:
    """Of settings, servers, clients' keys, vLLM's key and the certificate; and of nothing else."""
    wanted = Gateway.model_validate({"clients": [CLIENT], **CERTIFIED})

    def fingerprint(
        settings: Gateway = wanted, *, certificate: bytes = b"a", key: str = "k"
    ) -> str:
        backends = (replace(TWO[0], api_key=key), TWO[1])
        return config(settings, backends, certificate=certificate).fingerprint

    other_key = wanted.clients[0].model_copy(update={"key_sha256": "cd" * 32})
    assert fingerprint() == fingerprint()
    different = {
        fingerprint(),
        fingerprint(certificate=b"b"),
        fingerprint(key="l"),
        fingerprint(wanted.model_copy(update={"clients": (other_key,)})),
        fingerprint(wanted.model_copy(update={"request_seconds": 60})),
        config(wanted, TWO[:1], certificate=b"a").fingerprint,
    }
    assert len(different) == 6


@pytest.mark.parametrize("password", ["nine-byte", "two words", 'quo"te', "", "a{b"])
def test_a_password_that_vrrp_would_cut_or_misread_is_refused(password: str) -> None:
    wanted = VirtualAddress.model_validate(SHARED)
    with pytest.raises(FleetError, match=r"^vrrp: see `gateway.virtual_address.password_file`"):
        keepalived.keepalived(wanted, password.encode())
    assert b"auth_pass s3cret\n" in keepalived.keepalived(wanted, b"s3cret")


def pair_of(*different: dict[str, Any]) -> Any:
    return fleet(
        *(
            (f"gw-0{number}", f"192.0.2.{number}", {"gateway": OPEN | {"virtual_address": each}})
            for number, each in enumerate((SHARED, *different), 1)
        )
    )


def test_gateways_that_would_not_hear_each_other_are_refused_once() -> None:
    """Each would take the address: both have it, and both keep it."""
    (said,) = keepalived.problems(pair_of(SHARED | {"router_id": 52}), "gw-01")
    assert said.startswith(
        "gateway.virtual_address.router_id: 51 on gw-01, but 52 on gw-02. The two "
    )
    assert list(keepalived.problems(pair_of(SHARED | {"router_id": 52}), "gw-02")) == []
    assert list(keepalived.problems(pair_of(SHARED | {"priority": 90}), "gw-01")) == []
    # Two pairs, each with its own.
    other = SHARED | {"address": "192.0.2.20/24", "router_id": 52}
    assert list(keepalived.problems(pair_of(other), "gw-01")) == []


def test_an_address_that_a_machine_has_is_not_shared() -> None:
    (said,) = keepalived.problems(pair_of(SHARED | {"address": "192.0.2.1/24"}), "gw-02")
    assert said.startswith("gw-02: gateway.virtual_address.address: 192.0.2.1 is the own")


def test_another_password_restarts_keepalived_and_is_in_no_file_that_others_read() -> None:
    def drop_in(password: bytes) -> unit.UnitFile:
        text = keepalived.keepalived(VirtualAddress.model_validate(SHARED), password)
        return unit.drop_in(
            "gateway/keepalived-gateway.conf.j2",
            keepalived.UNIT,
            started_with={"configuration": keepalived.slow_hash(text)},
        )

    assert drop_in(b"first").fingerprint != drop_in(b"second").fingerprint
    assert drop_in(b"first").fingerprint == drop_in(b"first").fingerprint
    assert "first" not in drop_in(b"first").content


def test_nothing_that_a_unit_is_started_with_hides_behind_its_text() -> None:
    """Of the fingerprint's parts the unnamed one is the text: it would replace another one."""
    with pytest.raises(ValueError, match="empty name"):
        unit.drop_in("gateway/keepalived-gateway.conf.j2", "x.service", started_with={"": b"more"})

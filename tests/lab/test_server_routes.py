"""Every route of a server of ours wants the key, but for those that are open on purpose.

Which routes there are, the release says itself (`list_routes.py`, in its own Python on the node),
and the running server with its own description: a route that is new in a release is asked, too. Two
releases are, one after the other; docs/reference/server-routes.md lists what they have.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lab.upgrade_fleet import NEW, OLD, UpgradeFleet, upgrade_fleet
from tests.support.checkout import ROOT, own_lab

LAB_ID = own_lab("gfrt")
NODE = "gpu-01"
PORT = 8000
PAGE = ROOT / "docs/reference/server-routes.md"
PROGRAM = ROOT / "tests/lab/list_routes.py"
OPEN = {("GET", "/health"), ("GET", "/metrics")}
UNAUTHORIZED = 401


@dataclass(frozen=True, order=True)
class Route:
    """What a server can be asked for; the method of a websocket is WEBSOCKET."""

    method: str
    path: str

    @property
    def is_open(self) -> bool:
        return (self.method, self.path) in OPEN


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpgradeFleet]:
    with upgrade_fleet(LAB_ID, tmp_path_factory.mktemp("routes"), (NODE,)) as found:
        yield found


def listed(text: str) -> set[Route]:
    """Return the routes that a release prints of itself."""
    found = set()
    for kind, path, methods in json.loads(text.splitlines()[-1]):
        names = {"websocket": ["WEBSOCKET"], "mount": ["GET"]}.get(kind, methods)
        found |= {Route(name, path) for name in names if name != "HEAD"}
    return found


def described(address: str, port: int, key: str) -> set[Route]:
    """Return the routes that a running server describes to those who have the key."""
    status, body = ask(address, port, Route("GET", "/openapi.json"), key)
    assert status == http.client.OK, body
    return {
        Route(method.upper(), path)
        for path, methods in json.loads(body)["paths"].items()
        for method in methods
    }


def ask(address: str, port: int, route: Route, key: str = "") -> tuple[int, str]:
    """Return the status and the body that a server answers to an empty request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    method, body = route.method, None
    if method == "WEBSOCKET":
        method = "GET"
        nonce = base64.b64encode(os.urandom(16)).decode()
        headers |= {"Upgrade": "websocket", "Connection": "Upgrade"}
        headers |= {"Sec-WebSocket-Key": nonce, "Sec-WebSocket-Version": "13"}
    elif method in {"POST", "PUT", "PATCH"}:
        body = "{}"
        headers["Content-Type"] = "application/json"
    path = re.sub(r"\{\w+\}", "nothing", route.path)
    connection = http.client.HTTPConnection(address, port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = "" if answer.status == http.client.SWITCHING_PROTOCOLS else answer.read().decode()
        return answer.status, text
    finally:
        connection.close()


def documented(release: str) -> set[Route]:
    """Return the routes that the page has of a release."""
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    first = next(at for at, row in enumerate(rows) if release in row)
    column = rows[first].index(release)
    table = rows[first + 2 :]
    assert {row[4] for row in table} == {"401", "**200**"}
    found = {Route(*row[1].strip("`").split()): row for row in table if row[column]}
    assert {route for route, row in found.items() if row[4] != "401"} == {
        route for route in found if route.is_open
    }
    return set(found)


@pytest.mark.long
@pytest.mark.parametrize("release", [OLD, NEW])
def test_every_route_but_the_open_ones_wants_the_key(fleet: UpgradeFleet, release: str) -> None:
    fleet.declare_release(release)
    run = fleet.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output
    python = f"$(ls -d /opt/vllm/releases/{release}-*/bin/python)"
    command = f"cd / && HOME=/tmp VLLM_NO_USAGE_STATS=1 {python} - 2>/dev/null"
    routes = listed(fleet.ssh(NODE, command, seconds=300, stdin=PROGRAM.read_text()))

    judge(fleet.address(NODE), PORT, fleet.key, release, routes)


def judge(address: str, port: int, key: str, release: str, routes: set[Route]) -> None:
    """Ask for each route without the key and with it, and hold the page to what there is."""
    assert described(address, port, key) <= routes
    without = {route: ask(address, port, route)[0] for route in sorted(routes)}
    let_in = {route for route, status in without.items() if status != UNAUTHORIZED}
    assert let_in == {route for route in routes if route.is_open}
    refused = [route for route in sorted(routes) if ask(address, port, route, key)[0] == 401]
    assert refused == []
    assert routes == documented(release)

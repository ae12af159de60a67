"""RUNS ON THE NODE: wait until servers have no requests, or until they answer a request.

A server's address is in its unit's file. Each wait runs in its own process, so that a frozen server
does not delay the waits for other servers, and no wait exceeds its deadline.
"""

from __future__ import annotations

import functools
import re
import time
import urllib.request
from typing import Any, Callable, Dict, Iterable, List, Optional

from gpufleet.on_node.change import systemd
from gpufleet.on_node.common import change_files, linux_facts, unit_journal
from gpufleet.on_node.common.answers import is_missing
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.serving import endpoints, status, unit_command

METRICS_SECONDS = 5
METRICS_BYTES = 16 << 20
POLL_SECONDS = 1.0
# Number of consecutive checks that must find no requests. Between two checks, a load balancer may
# still pass on a request that it had accepted.
QUIET_LOOKS = 2
# Interval between two checks of a starting server. A check takes about 30 ms if the server is not
# up yet.
READY_POLL_SECONDS = 0.5


class Server:
    """The server that a unit's file starts."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.text = systemd.text(unit)
        words = unit_command.command(self.text)
        server = unit_command.serve(words)
        named = re.search(r"^Port=(\d+)$", self.text, re.MULTILINE)
        port = int(named.group(1)) if named else int(unit_command.value(server, "--port") or 0)
        self.url = status.endpoint(server, port)
        others = status.engines(server, port)
        self.urls: List[str] = [
            each for each in (status.endpoint(server, at) for at in (port, *others)) if each
        ]
        self.served_name = unit_command.value(server, "--served-model-name") or ""
        self.key_file: Optional[str] = dict(unit_journal.CREDENTIAL.findall(self.text)).get(
            status.API_KEY
        )
        self.guarded = status.is_guarded(server)
        self.adapters = status.adapters(server)
        self.fingerprint = systemd.fingerprint(self.text)


# --- wait until no request is left


def wait_idle(asked: Dict[str, Any]) -> Dict[str, Any]:
    """
    Wait until servers have no running or waiting requests, and return the requests that remain.

    `metrics` has the names of the gauges that count requests, for all engines.
    """
    began = time.monotonic()
    left: Dict[str, Optional[int]] = {}
    calm = 0
    while True:
        left = requests(asked["units"], asked["metrics"])
        calm = calm + 1 if all(count == 0 for count in left.values()) else 0
        late = time.monotonic() - began >= asked["seconds"]
        if calm >= QUIET_LOOKS or late:
            return {"left": left, "seconds": round(time.monotonic() - began, 3)}
        time.sleep(POLL_SECONDS)


def requests(units: Iterable[str], metrics: Iterable[str]) -> Dict[str, Optional[int]]:
    """Return {URL of a running server: number of its requests, or None if unknown}."""
    urls = running_urls(units)
    names = list(metrics)
    watch = Watch()
    for url in urls:
        watch.ask(url, functools.partial(count, url, names), METRICS_SECONDS)
    answers = watch.answers(*urls)
    watch.stop()
    return {url: None if is_missing(found) else found for url, found in answers.items()}


def running_urls(units: Iterable[str]) -> List[str]:
    """Return the URLs of the servers of running units. A stopped server has no requests."""
    states = systemd.states(units)
    return [
        url
        for unit, state in states.items()
        if not systemd.is_gone(state)
        for url in Server(unit).urls
    ]


def count(url: str, names: Iterable[str]) -> Optional[int]:
    """
    Return the number of a server's requests, or None if it is unknown.

    If the server does not listen, the number is 0.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + "/metrics", timeout=METRICS_SECONDS) as answer:
            text = answer.read(METRICS_BYTES).decode("utf-8", "replace")
    except OSError as error:
        if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
            return 0
        return None
    return parse_requests(text, names)


def parse_requests(page: str, names: Iterable[str]) -> Optional[int]:
    """
    Return the sum of the gauges with these names, or None if the page has none of them.
    """
    gauges = r"^(?:%s)(?:\{[^}]*\})?\s+(\S+)" % "|".join(map(re.escape, names))
    found = re.findall(gauges, page, re.MULTILINE)
    try:
        return int(sum(float(each) for each in found)) if found else None
    except ValueError:
        return None


# --- wait until the servers answer


def wait_ready(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Wait until each unit's server has completed a prompt."""
    units = [change_files.must_be_name(unit) for unit in asked["units"]]
    watch = Watch()
    for unit in units:
        watch.ask(
            unit,
            functools.partial(wait_for_unit, unit, asked["seconds"], asked.get("journal", 0)),
            asked["seconds"] + endpoints.COMPLETION_SECONDS + 4 * endpoints.HEALTH_SECONDS,
        )
    answers = watch.answers(*units)
    watch.stop()
    return {
        "units": [
            {
                "unit": unit,
                "ready": False,
                "seconds": asked["seconds"],
                "seen": {"error": "the query gave no answer: %s" % answers[unit]["missing"]},
            }
            if is_missing(answers[unit])
            else answers[unit]
            for unit in units
        ]
    }


def wait_for_unit(unit: str, seconds: float, lines: int) -> Dict[str, Any]:
    """Wait until a unit is ready or has ended, but not longer than the deadline."""
    began = time.monotonic()
    server = Server(unit)
    endpoints.PARAMETERS["journal"] = 0
    restarts: Optional[int] = None
    while True:
        seen = look(server)
        properties = seen["unit"]
        if restarts is None:
            restarts = int(properties.get("NRestarts") or 0)
        done = is_ready(server, seen)
        late = time.monotonic() - began >= seconds
        if done or late or has_died(properties, restarts):
            break
        time.sleep(READY_POLL_SECONDS)
    at = round(time.time(), 3)
    return {
        "unit": unit,
        "ready": done,
        "seconds": round(time.monotonic() - began, 3),
        "since": systemd.active_since(systemd.states([unit])[unit]),
        "at": at if done else None,
        "served_name": server.served_name if server.url else None,
        "fingerprint": server.fingerprint,
        "keyed": server.key_file is not None,
        "adapters": server.adapters,
        "restarts": restarts,
        **({} if done else {"seen": redacted_answer(server, seen, lines)}),
    }


def look(server: Server) -> Dict[str, Any]:
    """Return the state of a unit and its server in the form of on_node/serving/endpoints.py."""
    if server.url is None:
        properties = endpoints.unit_state(server.unit)
        started = systemd.started_fingerprint(server.unit)
        return {"unit": properties, "started": started, "journal": []}
    return endpoints.stage(
        {
            "unit": server.unit,
            "url": server.url,
            "served_name": server.served_name,
            "key_file": server.key_file and linux_facts.ROOT + server.key_file,
            "guarded": server.guarded,
            "completion": True,
            "adapters": server.adapters,
        }
    )


def is_ready(server: Server, seen: Dict[str, Any]) -> bool:
    """
    Return whether a unit runs with the configuration in its file and has answered a request.
    """
    if seen["unit"].get("ActiveState") not in ("active", "reloading"):
        return False
    if seen.get("started") != server.fingerprint:
        return False
    if server.url is None:
        return True
    refused = set((seen.get("without_key") or {}).values()) <= {endpoints.UNAUTHORIZED}
    listed = {server.served_name, *server.adapters} <= set(seen.get("models", ()))
    answers = seen.get("adapters", {})
    adapted = all(answers.get(name, {}).get("status") == 200 for name in server.adapters)
    return refused and "completion" in seen and listed and adapted


def has_died(properties: Dict[str, str], restarts: int) -> bool:
    """Return whether a unit has ended after the wait began, or does not exist."""
    if properties.get("ActiveState") in systemd.GONE:
        return True
    again = int(properties.get("NRestarts") or 0) > restarts
    return again or properties.get("SubState") == "auto-restart"


def redacted_answer(server: Server, seen: Dict[str, Any], lines: int) -> Dict[str, Any]:
    """Return the observation and the journal's last lines, without secrets."""
    life = seen["unit"].get("InvocationID")
    hide: Callable[[str], str] = unit_journal.secret_redactor(unit_journal.secrets(server.text))

    def shown(line: str) -> str:
        return hide(line)[:1000]

    known = {**seen, "journal": endpoints.journal(server.unit, life, lines)}
    found: Dict[str, Any] = status.hide_secrets(known, shown)
    return found

"""Render the configuration and unit of a node's watchdog from the plan. Pure.

The program is `on_node/watchdog/watchdog.py`; docs/monitor/watchdog.md describes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from gpufleet import node_paths
from gpufleet.artifacts.release import VLLM, Release
from gpufleet.engines.engine import engines
from gpufleet.on_node.common import textfile
from gpufleet.planning.stage import Stage, served_name
from gpufleet.remote import payload
from gpufleet.serving import unit
from gpufleet.serving.unit import UnitFile
from gpufleet.settings.serving_settings import Served
from gpufleet.versions import numbers

SERVICE = "gpufleet-watchdog.service"
PROGRAM = node_paths.WATCHDOG
CONFIGURATION = node_paths.WATCHDOG_CONFIGURATION
STATE = node_paths.STATE
TEXTFILE = textfile.DIRECTORY
METRICS = f"{TEXTFILE}/watchdog.prom"
DUMPS = f"{STATE}/dumps"

# Since this release, servers pass a request with the header X-data-parallel-rank to that engine.
# vLLM reads the header since 0.11.1 (vllm-project/vllm#24945), and follows it since 0.12 (#29002).
PINS_SINCE = (0, 12)


def is_needed(stages: Iterable[Stage], serving: Mapping[str, Served]) -> bool:
    """Return whether the watchdog has a server to watch on the node."""
    return any(stage.servers and serving[stage.model].watchdog.mode != "off" for stage in stages)


def configuration(
    stages: Iterable[Stage],
    serving: Mapping[str, Served],
    *,
    address: str,
    key_file: str | None,
    releases: Mapping[str, Release],
    listen: str = "",
    port: int | None = None,
) -> str:
    """
    Return the configuration of a node's watchdog.

    `address` is the address at which the node reaches its own servers. `releases` has the servers'
    release, by engine. Gateways query the watchdog at `listen` and `port`. Without `port`, the
    watchdog does not listen.
    """
    told = [
        {
            "stage": stage.id,
            "unit": stage.unit,
            "mode": serving[stage.model].watchdog.mode,
            "seconds": serving[stage.model].watchdog.seconds,
            "idle_seconds": serving[stage.model].watchdog.idle_seconds,
            "servers": [f"http://{_bracketed(address)}:{port}" for port in stage.servers],
            "kind": stage.kind,
            # For all engines: an upgrade or a rollback may move a stage to a different engine.
            "progress": [asdict(each.progress) for each in engines()],
            "served_name": served_name(stage, serving[stage.model]),
            "key_file": key_file,
            "group": stage.group is not None,
            "rank": stage.node_rank,
            "pins": _pins(releases[stage.engine]),
            # The release's lock file has the version of the release's own py-spy.
            "py_spy": [f"{releases[stage.engine].directory}/bin/py-spy", "/usr/local/bin/py-spy"],
        }
        for stage in sorted(stages, key=lambda stage: stage.id)
        # A rank without a server cannot be queried; the server of its head reports on it.
        if stage.servers
    ]
    place = {"address": listen, "port": port} if port else None
    document = {"schema": 1, "listen": place, "stages": told}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _pins(release: Release) -> bool:
    """Return whether a request can choose the engine of the server that computes the answer."""
    return release.program is VLLM and numbers(release.source.version)[:2] >= PINS_SINCE


def service(told: str) -> UnitFile:
    """
    Return the watchdog's unit. A change of its configuration or program restarts the watchdog.
    """
    return unit.whole_unit(
        "watchdog/gpufleet-watchdog.service.j2",
        SERVICE,
        started_with={"configuration": told, "program": payload.archive("watchdog/watchdog")},
        program=PROGRAM,
        configuration=CONFIGURATION,
        textfile=TEXTFILE,
        dumps=DUMPS,
    )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address

"""Plans of recorded machines with a network of their own, by the road that deploys take."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from gpufleet.fleet import assessment
from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from tests.support.checkout import ROOT
from tests.unit.node.test_cluster_network import nic

DATA = ROOT / "tests/data"
ABSENT = {"missing": "absent"}


@cache
def _recorded(profile: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / f"src/gpufleet/catalog/data/nodes/{profile}.json").read_text()
    )
    return found


@cache
def _config(model: str) -> dict[str, Any]:
    found = json.loads((DATA / f"models/{model}.json").read_text())
    config: dict[str, Any] = found["config"]
    return config


def machine(profile: str, number: int, models: dict[str, str]) -> dict[str, Any]:
    """A recorded machine at 10.1.0.NUMBER on which models lie: {"/srv/q": "Qwen--Qwen3-0.6B"}."""
    document = with_identity(_recorded(profile), f"{profile}-{number}")
    document["models"] = {
        path: {"config": _config(model), "hf_quant_config": ABSENT, "bytes": ABSENT}
        for path, model in models.items()
    }
    document["nics"]["net"] = [nic("eth1", f"10.1.0.{number}/24", pci="0000:02:00.0")]
    return document


def planned(machines: dict[str, dict[str, Any]], settings: dict[str, dict[str, Any]]) -> Assessment:
    """Plan for machines, each with its own variables."""
    declared = declared_of({name: settings[name] for name in machines})
    return assessment.plan_fleet(machines, declared)


def declared_of(settings: dict[str, dict[str, Any]]) -> dict[str, NodeVars]:
    """Return what an inventory would say of nodes, which have a firewall: they may be partners."""
    return {
        name: NodeVars(name, (), NodeSettings.model_validate({"firewall": {}, **each}), {})
        for name, each in settings.items()
    }

"""One road from probes and variables to the plan, whoever asks for it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.settings.node_settings import NodeSettings
from tests.support.checkout import ROOT

DATA = ROOT / "tests/data"


@pytest.fixture
def fleet():
    """One recorded node on which a model's config lies, and what is declared of it."""
    document = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
    config = json.loads((DATA / "models/Qwen--Qwen3-32B.json").read_text())["config"]
    absent = {"missing": "absent"}
    document["models"] = {"/srv/q": {"config": config, "hf_quant_config": absent, "bytes": absent}}
    settings = {
        "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"},
        "gpus": {"reserved": [0, 1, 2, 3]},
        "serving": {"q": {"model": "/srv/q", "context": 8192, "replicas": 4}},
    }
    return {"a": document}, settings


def declared(settings):
    node = NodeSettings.model_validate(settings)
    return {"a": SimpleNamespace(groups=(), settings=node, origins={})}


@pytest.mark.parametrize("unfit_stops", [True, False])
def test_what_others_use_is_left_to_them_by_deploys_and_by_those_who_only_look(fleet, unfit_stops):
    """Verifying plans anew: it must look where the deploy has placed."""
    documents, settings = fleet
    found = assessment.plan_fleet(documents, declared(settings), unfit_stops=unfit_stops)
    assert sorted(gpu for stage in found.plan.stages for gpu in stage.gpus) == [4, 5, 6, 7]


def test_fp8_is_weighed_with_what_presets_set(fleet):
    """A preset that looks for latency takes a wide group on purpose: FP8 would take it, too."""
    documents, settings = fleet
    settings["gpus"] = {}
    settings["serving"]["q"] |= {"replicas": 1, "presets": ["low-latency-code"]}
    found = assessment.plan_fleet(documents, declared(settings))
    assert found.plan.stages[0].tensor_parallel > 2
    assert not any("FP8" in reason for reason in found.plan.reasons)


def test_a_plan_over_nodes_says_what_they_talk_over_and_why(fleet):
    """What is derived is shown before anything starts: a wrong network is seen, not found out."""
    documents, settings = fleet
    settings["gpus"] = {}
    settings["serving"]["q"] = {
        "model": "/srv/q",
        "tensor_parallel": 8,
        "pipeline_parallel": 2,
        "span_nodes": True,
    }
    absent = {"missing": "absent"}
    device = {"name": "eth1", "state": "up", "speed": 10000, "mtu": 1500, "pci": absent}
    for name, address in (("a", "10.1.0.1"), ("b", "10.1.0.2")):
        net = [{**device, "ipv4": address, "networks": [f"{address}/24"]}]
        nics = {**documents["a"]["nics"], "infiniband": [], "net": net}
        documents[name] = {**documents["a"], "nics": nics}
    node = declared(settings)["a"]

    found = assessment.plan_fleet(documents, {"a": node, "b": node}, unfit_stops=False)

    assert [stage.node for stage in found.plan.stages] == ["a", "b"]
    (said,) = (reason for reason in found.plan.reasons if "communicate over" in reason)
    assert said.startswith(
        "q-0: its nodes communicate over a eth1 10.1.0.1, b eth1 10.1.0.2: 10.1.0.0/24"
    )


@pytest.mark.parametrize(("system", "version"), [("rocky", "9.6"), ("fedora", "42")])
def test_a_node_without_apt_is_refused_where_it_is_to_serve(fleet, system, version):
    """It would fail in its first package, after other nodes were changed."""
    documents, settings = fleet
    documents["a"]["os_release"] |= {"id": system, "version_id": version}
    with pytest.raises(FleetError) as refused:
        assessment.plan_fleet(documents, declared(settings))
    (said,) = refused.value.problems
    assert said.startswith(f"a: it runs {system} {version}, and deploys/vllm.py installs packages")
    assert "or take `serving` from it" in said
    # What only looks at it is not refused, nor is a node that serves nothing.
    assert assessment.plan_fleet(documents, declared(settings), unfit_stops=False).plan.stages
    del settings["serving"]
    assert not assessment.plan_fleet(documents, declared(settings)).plan.stages


def test_what_a_node_is_built_of_is_known_where_its_probe_says_it(fleet):
    """What needs to know it goes on without where it cannot be told."""
    document = fleet[0]["a"]
    system, machine = assessment.machine_of("a", document)
    assert (system.id, machine.generations) == ("ubuntu", {"hopper"})
    assert assessment.machine_of("a", "no answer within 60 s") is None
    assert assessment.machine_of("a", {**document, "os": None, "system": {}}) is None

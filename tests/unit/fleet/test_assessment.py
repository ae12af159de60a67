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
        "q-0: the nodes of this replica communicate over a eth1 10.1.0.1, b eth1 10.1.0.2: "
        "10.1.0.0/24"
    )


@pytest.mark.parametrize(("system", "version"), [("rocky", "9.6"), ("fedora", "42")])
def test_a_node_without_apt_is_refused_where_it_is_to_serve(fleet, system, version):
    """It would fail in its first package, after other nodes were changed."""
    documents, settings = fleet
    documents["a"]["os_release"] |= {"id": system, "version_id": version}
    with pytest.raises(FleetError) as refused:
        assessment.plan_fleet(documents, declared(settings))
    (said,) = refused.value.problems
    assert said.startswith(
        f"a: the node runs {system} {version}, but deploys/vllm.py installs packages"
    )
    assert "or remove `serving` from its variables" in said
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


def bert(labels=None, **more):
    """The config of an encoder of 12 layers."""
    named = {"id2label": {str(at): name for at, name in enumerate(labels)}} if labels else {}
    return {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
        "model_type": "bert",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
        **named,
        **more,
    }


def of_kinds(documents, settings, models, **served):
    """Have these models on the node, by their configs, and declare them."""
    absent = {"missing": "absent"}
    documents["a"]["models"] = {
        f"/srv/{name}": {"config": config, "hf_quant_config": absent, "bytes": absent}
        for name, config in models.items()
    }
    settings["serving"] = {name: {"model": f"/srv/{name}", **served} for name in models}


def test_models_are_served_as_what_their_files_say(fleet):
    documents, settings = fleet
    models = {"e": bert(), "r": bert(["LABEL_0"]), "c": bert(["a", "b", "c"])}
    of_kinds(documents, settings, models)
    found = assessment.plan_fleet(documents, declared(settings))
    assert {stage.model: stage.kind for stage in found.plan.stages} == {
        "e": "embed",
        "r": "rerank",
        "c": "classify",
    }
    for stage in found.plan.stages:
        assert [(each.name, each.value) for each in stage.flags] == [("runner", "pooling")]
    assert {each["kind"] for each in found.as_json()["stages"]} == {"embed", "rerank", "classify"}


def test_a_kind_that_a_model_cannot_be_stops_the_plan_and_no_look(fleet):
    """`deploys/verify.py` and repairs are not stopped by what the next deploy refuses."""
    documents, settings = fleet
    of_kinds(documents, settings, {"e": bert()}, kind="generate")
    with pytest.raises(
        FleetError, match=r"serving\.e\.kind: generate: the model's class is BertModel"
    ):
        assessment.plan_fleet(documents, declared(settings))
    assert assessment.plan_fleet(documents, declared(settings), unfit_stops=False).plan.stages


def test_a_sentence_transformers_decoder_is_sized_without_its_head(fleet):
    """Its files have the class of a chat model and modules.json: it embeds, and is planned so."""
    documents, settings = fleet
    settings["serving"] = {"q": {"model": "/srv/q", "context": 8192}}
    chat = assessment.plan_fleet(documents, declared(settings)).plan
    documents["a"]["models"]["/srv/q"]["modules"] = [{"type": "x.models.Pooling", "path": ""}]
    embeds = assessment.plan_fleet(documents, declared(settings)).plan
    assert (chat.stages[0].kind, embeds.stages[0].kind) == ("generate", "embed")

    def weights(plan):
        (taken,) = (each for row in plan.candidates for each in row.candidates if each.chosen)
        return taken.sizing.weights_bytes_per_gpu * taken.division.tensor_parallel

    assert weights(embeds) < weights(chat)

"""One entry computes prompts for another: what both are told, and what does not fit."""

from __future__ import annotations

import json

import pytest

from gpufleet.engines.vllm import launch_environment
from gpufleet.errors import FleetError
from gpufleet.network import firewall
from gpufleet.on_node.rank import children
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.multinode.disaggregation import (
    Pairs,
    check_divisions,
    engine_id,
    handover_pairs,
)
from gpufleet.planning.stage import Stage
from gpufleet.serving import unit
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served
from tests.support.models import described
from tests.support.planned import machine, planned
from tests.support.rows import each_row
from tests.support.serve_words import vllm_arguments
from tests.unit.node.test_cluster_network import nic

LLAMA = "meta-llama--Meta-Llama-3.1-8B"
DEEPSEEK = "deepseek-ai--DeepSeek-V3"
OLD = {"version": "0.24.0"}


@pytest.fixture
def lock(tmp_path):
    """Write a lock, by default with the NIXL that the newest vLLM takes."""

    def written(*packages):
        path = tmp_path / "vllm.txt"
        path.write_text("\n".join(packages or ["vllm==0.33.0", "nixl==1.5.0"]))
        return str(path)

    return written


def fleet(lock, prefill=(), decode=(), *, vllm=(), nodes=("p", "d"), model=LLAMA):
    """A node of eight H100 for each side; settings beside those that both have."""
    shared = {"model": "/srv/m", "served_name": "llama", "tensor_parallel": 4, "context": 8192}
    serving = {
        "p": {"prompts": shared | dict(prefill)},
        "d": {"llama": shared | {"prefill": "prompts"} | dict(decode)},
    }
    machines = {
        name: machine("h100x8", number, {"/srv/m": model}) for number, name in enumerate(nodes, 1)
    }
    settings = {
        name: {
            "vllm": {"version": "0.33.0", "lock": lock, "listen": "127.0.0.1"}
            | dict(dict(vllm).get(name[0], {})),
            "cluster_network": "10.1.0.0/24",
            "serving": serving[name[0]],
        }
        for name in nodes
    }
    return machines, settings


def stages(*given, **more):
    machines, settings = fleet(*given, **more)
    return planned(machines, settings), {
        name: NodeSettings.model_validate(each) for name, each in settings.items()
    }


def refusal(*given, **more):
    with pytest.raises(FleetError) as caught:
        stages(*given, **more)
    return list(caught.value.problems)


def started(stage, settings):
    """The flag as vLLM reads it, and what its environment says of NIXL."""
    here = settings[stage.node]
    model = here.serving[stage.model]
    words = list(vllm_arguments(stage, model, here.vllm))
    flag = json.loads(words[words.index("--kv-transfer-config") + 1])
    variables = launch_environment.environment(stage, model, here.vllm, release="x")
    return flag, {
        name.removeprefix("VLLM_NIXL_SIDE_CHANNEL_"): value
        for name, value in variables.items()
        if "NIXL" in name or "UCX" in name
    }


def test_each_side_is_told_its_part_and_the_address_that_reaches_the_other(lock):
    found, settings = stages(lock())

    told = {stage.model: started(stage, settings) for stage in found.plan.stages}

    assert told["prompts"][0] == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert told["llama"][0] == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    assert (told["prompts"][1]["HOST"], told["llama"][1]["HOST"]) == ("10.1.0.1", "10.1.0.2")
    for _, variables in told.values():
        assert variables["PORT"] == "5600"
        assert variables["UCX_NET_DEVICES"].split(",")[-1] == "eth1"


def test_replicas_of_both_sides_on_one_node_have_ports_of_their_own(lock):
    machines, settings = fleet(lock(), nodes=("p",))
    settings["p"]["serving"] |= fleet(lock(), nodes=("d",))[1]["d"]["serving"]
    found = planned(machines, settings)
    parsed = {name: NodeSettings.model_validate(each) for name, each in settings.items()}

    told = [started(stage, parsed)[1] for stage in found.plan.stages]

    assert {each["PORT"] for each in told} == {"5600", "5601"}
    # And each the NICs near its own GPUs.
    near = [set(each["UCX_NET_DEVICES"].split(",")) - {"eth1"} for each in told]
    assert [len(each) for each in near] == [4, 4]
    assert not near[0] & near[1]


def test_contexts_that_differ_are_said_and_not_refused(lock):
    found, _ = stages(lock(), {"context": 4096})

    assert found.remarks == (
        "serving.llama.context is 8192, but serving.prompts.context is 4096. The side with the "
        "smaller value refuses longer requests: write the same value for both",
    )
    assert stages(lock())[0].remarks == ()


def test_the_plan_says_what_a_router_has_to_know(lock):
    found, _ = stages(lock(), {"replicas": 2})

    assert (
        "llama: prompts (2 replicas) computes the prompts of this model. A router has to send each "
        "request first to prefill (p:8000, p:8001), and then, with prefill's answer, to decode "
        "(d:8000)" in found.plan.reasons
    )
    assert [flag.layer for flag in found.layers["llama", "0.33.0"] if "kv-" in flag.name] == [
        "prefill"
    ]


def test_ranks_of_an_engine_over_nodes_say_one_name_of_it_and_another_engine_another():
    names = ("d1", "d2", "d3", "d4")
    replica = [
        Stage(
            model="llama",
            replica=0,
            node=node,
            gpus=(0, 1, 2, 3),
            gpu_uuids=("a", "b", "c", "d"),
            port=8000,
            tensor_parallel=8,
            data_parallel=2,
            node_rank=rank,
            nodes=names,
        )
        for rank, node in enumerate(names)
    ]
    assert [engine_id(stage) for stage in replica] == [
        "llama-0-0-{incarnation}",
        "llama-0-0-{incarnation}",
        "llama-0-1-{incarnation}",
        "llama-0-1-{incarnation}",
    ]


OVER_NODES = {"tensor_parallel": 16, "span_nodes": True}


def test_a_side_over_nodes_is_one_group_that_has_one_fingerprint(lock):
    found, settings = stages(
        lock(),
        {"data_parallel": 4, "span_nodes": True},
        {"tensor_parallel": 8},
        nodes=("p1", "p2", "d"),
        model="Qwen--Qwen3-32B",
    )
    spread = [stage for stage in found.plan.stages if stage.model == "prompts"]

    assert [started(stage, settings)[0]["engine_id"] for stage in spread] == [
        "prompts-0-0-{incarnation}",
        "prompts-0-1-{incarnation}",
    ]
    assert {started(stage, settings)[1]["PORT"] for stage in spread} == {"5600"}
    same = {
        unit.replica_fingerprint(
            stage, settings[stage.node].serving[stage.model], settings[stage.node].vllm
        )
        for stage in spread
    }
    assert len(same) == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (
            {"model": "/srv/other"},
            {},
            "serving.llama.model is /srv/m, but serving.prompts.model is /srv/other. vLLM can "
            "transfer a KV cache only between servers with the same value: write the same value "
            "for both",
        ),
        (
            {"flags": {"kv-cache-dtype": "fp8"}},
            {},
            "serving.llama.flags.kv-cache-dtype is not set, but "
            "serving.prompts.flags.kv-cache-dtype is fp8. vLLM",
        ),
        (
            {},
            {"flags": {"block-size": 32}},
            "serving.llama.flags.block-size is 32, but serving.pro",
        ),
        (
            {"served_name": "other"},
            {},
            "serving.prompts.served_name: prompts answers to 'other', but llama answers to "
            "'llama', and both entries get the same request: write `served_name: llama`",
        ),
        (
            {},
            {"prefill": "prompt"},
            "serving.llama.prefill: no node has an entry 'prompt' in `serving`; did",
        ),
        (
            {},
            {"prefill": "llama"},
            "serving.llama.prefill: the value is the name of the entry itself",
        ),
        (
            {"prefill": "llama"},
            {},
            (
                "serving.llama.prefill: prompts itself has `prefill: llama`, but an entry that "
                "computes prompts"
            ),
        ),
        (
            {
                "flags": {
                    "kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
                }
            },
            {},
            "serving.prompts.flags.kv-transfer-config: `prefill` sets kv_connector, kv_role on",
        ),
        (
            {"environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}},
            {},
            "serving.prompts.environment.VLLM_NIXL_SIDE_CHANNEL_PORT: with `prefill`, the plan",
        ),
        (
            {},
            {"flags": {"kv-transfer-config.kv_load_failure_policy": "recompute"}},
            "would replace the value that `prefill` sets: write a mapping under `kv-tr",
        ),
        (
            {"flags": {"kv-transfer-config": {"kv_connector_extra_config": {"backends": ["X"]}}}},
            {},
            "flags.kv-transfer-config.kv_connector_extra_config.backends is not set, but serving",
        ),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            {},
            (
                "serving.prompts.pipeline_parallel: the value is 2, but NixlConnector transfers "
                "the cache of only one pipeline stage"
            ),
        ),
    ],
    ids=[
        "another model",
        "another KV dtype",
        "another block size",
        "another name",
        "nobody",
        "itself",
        "each other",
        "its own connector",
        "its own port",
        "a part that replaces all",
        "another transport",
        "pipeline",
    ],
)
def test_partners_that_do_not_fit_are_refused_before_anything_starts(lock, prefill, decode, said):
    assert any(said in each for each in refusal(lock(), prefill, decode))


def test_all_that_does_not_fit_is_said_at_once(lock):
    found = refusal(
        lock("vllm==0.33.0"),
        {"model": "/srv/other", "served_name": "o", "flags": {"dtype": "float16"}},
    )

    assert len(found) == 5


def test_nixl_has_to_be_in_the_lock_in_a_release_that_vllm_takes(lock):
    assert any("add `nixl` 1.5.0 to the lock" in each for each in refusal(lock("vllm==0.33.0")))
    assert any("add `nixl`" in each for each in refusal(lock("nixl-cu13==1.5.0")))
    old = refusal(lock("vllm==0.33.0", "nixl==1.4.1"))
    assert any(
        "contains `nixl` 1.4.1, but vLLM 0.33.0 needs 1.5.0 or newer" in each for each in old
    )
    older = refusal(lock("vllm==0.24.0", "nixl==1.1.0"), vllm={"p": OLD, "d": OLD})
    assert any(
        "contains `nixl` 1.1.0, but vLLM 0.24.0 needs 1.2.0 or newer" in each for each in older
    )


def test_nixl_needs_its_library_for_the_cuda_that_the_lock_brings(lock):
    cuda = "nvidia-cuda-runtime-cu12==12.4.127"

    found = refusal(lock("nixl==1.5.0", "nixl-cu13==1.5.0", cuda))

    assert all("contains CUDA 12 without NIXL's library" in each for each in found)
    assert all(each.endswith("add `nixl-cu12` 1.5.0 to the lock") for each in found)
    stages(lock("nixl==1.5.0", "nixl-cu12==1.5.0", cuda))


def test_both_sides_run_one_release(lock):
    found = refusal(lock(), vllm={"p": {"version": "0.32.0"}})
    assert found == [
        "serving.llama.prefill: llama runs on vLLM 0.33.0 and prompts on vLLM 0.32.0, but "
        "vLLM transfers a KV cache only within one release: write the same `vllm.version` for all "
        "nodes of both entries"
    ]


def test_a_cpu_hands_nothing_over(lock):
    found = refusal(lock(), vllm={"d": {"device": "cpu"}})
    assert any("`vllm.device` is cpu on d" in each for each in found)


@each_row(
    ("prefill", "decode", "release", "model", "refused"),
    [
        (8, 4, "0.33.0", LLAMA, "nothing is refused"),  # as many ranks as KV heads
        (8, 4, "0.19.0", LLAMA, "has 8 KV heads"),  # before 0.20 one less
        (4, 8, "0.19.0", LLAMA, "nothing is refused"),
        (8, 4, "0.33.0", "Qwen--Qwen3-235B-A22B", "has 4 KV heads"),
        (4, 8, "0.33.0", "Qwen--Qwen3-235B-A22B", "nothing is refused"),
        (3, 4, "0.33.0", LLAMA, "must be a multiple of the other"),
        (8, 4, "0.33.0", DEEPSEEK, "nothing is refused"),  # every rank has all of it
        (8, 4, "0.20.0", DEEPSEEK, "has 1 KV head, so the prefill ranks have copies"),
    ],
)
def test_ranks_read_whole_parts(prefill, decode, release, model, refused):
    assert refused in judged({"p": prefill, "d": decode}, release, model)


def judged(sides, release, model, contexts=()):
    """What is refused about two replicas of so many ranks; "": nothing."""
    found = [
        Stage(name, 0, name, tuple(range(size)), ("u",) * size, 8000, size)
        for name, size in sides.items()
    ]
    flag = "decode-context-parallel-size"
    layers = {
        (name, release): tuple(
            LayeredFlag(flag, value, "yours") for each, value in contexts if each == name
        )
        for name in sides
    }
    try:
        check_divisions(found, Pairs({"d": "p"}), layers, dict.fromkeys(sides, described(model)))
    except FleetError as error:
        return str(error)
    return "nothing is refused"


@pytest.mark.parametrize(
    ("size", "release", "model", "refused"),
    [
        (8, "0.33.0", DEEPSEEK, "nothing is refused"),
        (4, "0.33.0", DEEPSEEK, "accepts only 1 or the tensor parallel size (8): write"),
        (8, "0.28.0", DEEPSEEK, "of vLLM 0.28.0 transfers only whole contexts: remove the flag"),
        (
            2,
            "0.33.0",
            LLAMA,
            "transfers divided contexts only for latent attention: remove the flag",
        ),
    ],
)
def test_a_context_is_divided_over_all_ranks_of_a_side_or_not_at_all(size, release, model, refused):
    assert refused in judged({"p": 8, "d": 8}, release, model, [("d", size)])


def test_every_replica_of_a_side_divides_its_context_over_all_of_its_ranks():
    """Of two kinds of node each has a division of its own."""
    found = [
        Stage(name, number, name, tuple(range(size)), ("u",) * size, 8000, size)
        for name, number, size in (("d", 0, 8), ("d", 1, 4), ("p", 0, 8))
    ]
    layers = {
        ("d", "0.33.0"): (LayeredFlag("decode-context-parallel-size", 8, "yours"),),
        ("p", "0.33.0"): (),
    }

    with pytest.raises(FleetError, match=r"tensor parallel size \(4 and 8\)"):
        check_divisions(found, Pairs({"d": "p"}), layers, {"d": described(DEEPSEEK)})


@each_row(
    ("prefill", "decode", "differ"),
    [
        ({"method": "mtp"}, {"method": "mtp", "num_speculative_tokens": 3}, False),
        ('{"method": "mtp"}', {"method": "mtp"}, False),
        (None, {"method": "ngram", "num_speculative_tokens": 3}, False),
        (None, {"method": "mtp"}, True),
        ({"method": "eagle3", "model": "/a"}, {"method": "eagle3", "model": "/b"}, True),
    ],
    ids=["depth", "text", "no cache of drafts", "one side", "another draft"],
)
def test_drafts_may_be_deeper_on_one_side_but_not_others(prefill, decode, differ):
    name = "speculative-config"
    served = Served.model_validate({"model": "/srv/m", "served_name": "m"})
    vllm = {"version": "0.33.0", "lock": "none", "listen": "127.0.0.1"}
    node = NodeSettings.model_validate(
        {"vllm": vllm, "serving": {"p": served, "d": served.model_copy(update={"prefill": "p"})}}
    )
    layers = {
        (each, "0.33.0"): (LayeredFlag(name, value, "yours"),) if value else ()
        for each, value in (("p", prefill), ("d", decode))
    }

    if differ:
        with pytest.raises(FleetError, match=r"flags\.speculative-config"):
            handover_pairs({"n": node}, layers, {}, {})
    else:
        assert handover_pairs({"n": node}, layers, {}, {}).role("d") == "kv_consumer"


def test_what_an_operator_adds_to_the_connectors_settings_stays(lock):
    added = {"kv_load_failure_policy": "recompute"}
    found, settings = stages(lock(), {}, {"flags": {"kv-transfer-config": added}})
    (stage,) = found.plan.stages_on("d")

    flag, variables = started(stage, settings)

    assert flag == added | {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    assert [each.value for each in found.layers["llama", "0.33.0"]].count(flag) == 1
    assert added not in [each.value for each in found.layers["llama", "0.33.0"]]
    assert variables["HOST"] == "10.1.0.2"


@pytest.mark.parametrize(
    ("model", "release", "sets"),
    [
        ("google--gemma-3-27b-it", "0.21.0", True),
        ("google--gemma-3-27b-it", "0.22.0", False),
        (LLAMA, "0.21.0", False),
    ],
)
def test_windows_stay_windows_where_a_connector_would_turn_them_off(model, release, sets):
    """Until 0.21 vLLM kept whole contexts of all layers then, which no plan has counted."""
    flags = Pairs({"d": "p"}).flags("d", release, (), described(model))

    names = {each.name: each.value for each in flags}

    assert names.get("disable-hybrid-kv-cache-manager", True) is not sets


def test_who_turns_windows_off_keeps_them_off():
    yours = LayeredFlag("disable-hybrid-kv-cache-manager", True, "yours")
    flags = Pairs({"d": "p"}).flags("d", "0.21.0", [yours], described("google--gemma-3-27b-it"))

    assert [each for each in flags if each.name == yours.name] == [yours]


def test_states_are_handed_over_in_the_one_layout_that_nixl_reads(lock):
    told = {"environment": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}}
    model = "Qwen--Qwen3-Next-80B-A3B-Instruct"

    (found,) = refusal(lock(), {}, told, model=model)

    assert "serving.prompts.environment: Qwen3NextForCausalLM has layers with a state" in found
    stages(lock(), told, told, model=model)


def test_sides_that_no_network_joins_are_refused_with_all_that_was_tried(lock):
    machines, settings = fleet(lock())
    machines["d"]["nics"]["net"] = [nic("eth0", "10.2.0.2/24", pci="0000:02:00.0")]
    for each in settings.values():
        del each["cluster_network"]

    with pytest.raises(FleetError) as caught:
        planned(machines, settings)

    (problem,) = caught.value.problems
    assert problem.startswith("the handover between llama and prompts spans d and p, but no")
    assert "on d eth0 10.2.0.2/24" in problem
    assert "on p eth1 10.1.0.1/24" in problem


def test_a_firewall_lets_partners_through_and_nobody_else_to_the_side_channel(lock):
    found, settings = stages(lock())
    stage = found.plan.stages_on("d")

    text = firewall.render_rules(stage, settings["d"])

    assert 'iifname "eth1" ip daddr 10.1.0.2 ip saddr { 10.1.0.1 } meta l4proto tcp accept' in text
    assert "tcp dport { 5600 } counter reject" in text
    assert "udp dport 5600-" not in text  # partners exchange no datagrams


def test_a_start_of_a_group_fills_its_incarnation_into_the_engines_name():
    """The other side would take an engine of the same name for the one that it knew."""
    flag = '{"engine_id":"llama-0-0-{incarnation}","kv_connector":"NixlConnector"}'
    values = {"incarnation": "5f1c", "master_port": 29502, "rpc_port": 29510}

    assert json.loads(children.fill_ports(flag, values)) == {
        "engine_id": "llama-0-0-5f1c",
        "kv_connector": "NixlConnector",
    }


def test_the_setting_is_a_name():
    with pytest.raises(ValueError, match="prefill"):
        Served.model_validate({"model": "/srv/m", "prefill": "No Such"})

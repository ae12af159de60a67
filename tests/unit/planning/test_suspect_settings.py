"""A plan says which settings start and work against the nodes, the model or the clients."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.planning import suspect_settings
from gpufleet.planning.planner import plan
from gpufleet.settings.node_settings import NodeSettings
from tests.support.rows import each_row
from tests.unit.planning.test_planner import VLLM, machine, model

CALLS = {"enable-auto-tool-choice": True}


def reasons(serving: dict[str, Any], *islands: int, **others: Any) -> list[str]:
    nodes = {"gpu-01": machine("gpu-01", *(islands or (2, 2)))}
    settings = {"gpu-01": NodeSettings.model_validate({"vllm": VLLM, "serving": serving, **others})}
    return [*suspect_settings.remarks(plan(nodes.values(), settings).stages, settings, nodes, {})]


def about(found: list[str], key: str) -> list[str]:
    return [each for each in found if each.startswith(key)]


def test_one_name_for_several_entries_is_said_with_where_clients_can_ask() -> None:
    entries = {"a": model(served_name="chat"), "b": model(served_name="chat", port=8100)}
    (said,) = about(reasons(entries), "serving.a.served_name")
    assert "a, b all answer to 'chat'" in said
    assert "use /a/v1" in said
    entries["b"] = model(served_name="other", port=8100)
    assert about(reasons(entries), "serving.a.served_name") == []


def test_an_entrys_own_name_counts_as_its_served_name() -> None:
    entries = {"a": model(), "b": model(served_name="a", port=8100)}
    assert len(about(reasons(entries), "serving.a.served_name")) == 1


@pytest.mark.parametrize(
    ("path", "flags", "key", "right"),
    [
        ("/srv/Llama-3.1-8B", {"tool-call-parser": "hermes"}, "tool-call-parser", "llama3_json"),
        ("/srv/qwen3-8b", {"reasoning-parser": "deepseek_r1"}, "reasoning-parser", "qwen3"),
        ("/srv/Llama-3.2-3B", {"tool-call-parser": "hermes"}, "tool-call-parser", "llama3_json"),
        (
            "/srv/Llama-xLAM-2-8b-fc-r",
            {"tool-call-parser": "llama3_json"},
            "tool-call-parser",
            "xlam",
        ),
    ],
)
def test_a_parser_of_another_family_is_said(
    path: str, flags: dict[str, str], key: str, right: str
) -> None:
    (said,) = reasons({"m": model(model=path, flags={**CALLS, **flags})})
    assert said.startswith(f"serving.m.flags.{key}")
    assert f"write `{key}: {right}`" in said
    assert reasons({"m": model(model=path, flags={**CALLS, key: right})}) == []


@each_row(
    ("name", "parser"),
    [
        ("/srv/Llama-3.2-3B-Instruct", "pythonic"),
        ("/srv/Llama-4-Scout", "pythonic"),
        ("/srv/ToolACE-8B", "pythonic"),
        ("/srv/Llama-xLAM-2-8b-fc-r", "xlam"),
        ("/srv/granite-20b-functioncalling", "granite-20b-fc"),
    ],
)
def test_a_parser_that_the_family_can_write_for_is_not_remarked_on(name: str, parser: str) -> None:
    own = model(model=name, flags={**CALLS, "tool-call-parser": parser})
    assert not about(reasons({"m": own}), "serving.m.flags.tool-call-parser")


def test_of_a_family_that_is_not_known_no_parser_is_judged() -> None:
    own = model(model="/srv/ours", flags={**CALLS, "tool-call-parser": "hermes"})
    assert reasons({"m": own}) == []


def test_a_parser_that_nothing_switches_on_is_said() -> None:
    flags = {"tool-call-parser": "hermes"}
    (said,) = about(reasons({"m": model(flags=flags)}), "serving.m.flags.tool-call-parser")
    assert "has no effect without `enable-auto-tool-choice: true`" in said
    assert reasons({"m": model(flags={**flags, **CALLS})}) == []


def test_a_reserved_gpu_that_is_not_there_is_said() -> None:
    (said,) = reasons({"m": model()}, gpus={"reserved": [3, 4, 7]})
    assert said.startswith("gpus.reserved: gpu-01 has no GPU 4,7: its GPUs are 0-3")
    assert reasons({"m": model()}, gpus={"reserved": [3]}) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "LOC"), ("NCCL_P2P_LEVEL", "0")],
)
@pytest.mark.parametrize("place", ["serving.m", "vllm"])
def test_nccl_kept_off_nvlink_is_said_where_nvlink_joins_the_gpus(
    place: str, variable: str, value: str
) -> None:
    off = {"environment": {variable: value}}
    others = {"vllm": {**VLLM, **off}} if place == "vllm" else {}
    served = model(tensor_parallel=2) if others else model(tensor_parallel=2, **off)
    found = reasons({"m": served}, 2, **others)
    (said,) = about(found, f"{place}.environment.{variable}:")
    assert "NVLink joins GPUs 0-1 of gpu-01" in said


@pytest.mark.parametrize(
    ("islands", "served"),
    [
        ((2,), {"tensor_parallel": 2, "environment": {"NCCL_P2P_DISABLE": "0"}}),
        ((2,), {"environment": {"NCCL_P2P_DISABLE": "1"}}),
        ((2,), {"tensor_parallel": 2, "environment": {"NCCL_P2P_LEVEL": "NVL"}}),
        (
            (1, 1),
            {"tensor_parallel": 2, "allow_pcie": True, "environment": {"NCCL_P2P_DISABLE": "1"}},
        ),
    ],
)
def test_it_is_not_said_where_nvlink_is_not_lost(
    islands: tuple[int, ...], served: dict[str, Any]
) -> None:
    assert not [each for each in reasons({"m": model(**served)}, *islands) if "NCCL" in each]


def of_memory(flags: dict[str, Any], gib: int, **others: Any) -> list[str]:
    nodes = {"gpu-01": machine("gpu-01", 4)}
    serving = {"m": model(flags=flags, **others)}
    settings = {"gpu-01": NodeSettings.model_validate({"vllm": VLLM, "serving": serving})}
    stages = plan(nodes.values(), settings).stages
    documents = {"gpu-01": {"memory_mib": gib * 1024}}
    return [*suspect_settings.remarks(stages, settings, nodes, documents)]


def test_a_cache_in_the_nodes_memory_that_exceeds_it_is_said() -> None:
    """`kv-offloading-size` is of all ranks of an engine together."""
    flags = {"kv-offloading-size": 600}
    (said,) = of_memory(flags, 1000, data_parallel=2, tensor_parallel=2)
    assert said.startswith("serving.m.flags.kv-offloading-size: the engines here keep 1,200 GiB")
    assert "gpu-01 has 1,000 GiB" in said
    assert of_memory(flags, 1000, tensor_parallel=4) == []
    assert of_memory({**flags, "kv-offloading-backend": "lmcache"}, 100) == []


@pytest.mark.parametrize(("tokens", "is_said"), [(50000, True), (8192, True), (4096, False)])
def test_an_answer_that_fills_the_context_is_said(tokens: int, *, is_said: bool) -> None:
    models = {"chat": {"entries": ["m"], "parameters": {"max_tokens": tokens}}}
    litellm = {"version": "1.80.0", "lock": "l", "allow_unauthenticated": True, "models": models}
    gateway = {"listen": "127.0.0.1", "allow_unauthenticated": True}
    found = reasons({"m": model(context=8192)}, litellm=litellm, gateway=gateway)
    said = about(found, "litellm.models.chat.parameters.max_tokens")
    assert bool(said) == is_said
    assert all("the context of m, 8192 tokens" in each for each in said)

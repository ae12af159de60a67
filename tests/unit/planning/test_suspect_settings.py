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


NET = {
    "nics": {
        "infiniband": [],
        "net": [{"name": "eth0", "ipv4": "10.0.0.1", "ipv6": ["fd00::1"], "networks": None}],
    }
}
"""What a probe has of a node with one interface."""


def reasons(
    serving: dict[str, Any], *islands: int, probe: dict[str, Any] | None = None, **others: Any
) -> list[str]:
    nodes = {"gpu-01": machine("gpu-01", *(islands or (2, 2)))}
    settings = {"gpu-01": NodeSettings.model_validate({"vllm": VLLM, "serving": serving, **others})}
    stages = plan(nodes.values(), settings).stages
    return [*suspect_settings.remarks(stages, settings, nodes, {"gpu-01": probe or {}})]


def about(found: list[str], key: str) -> list[str]:
    return [each for each in found if each.startswith(key)]


def test_one_name_for_several_entries_is_said_with_where_clients_can_ask() -> None:
    entries = {"a": model(served_name="chat"), "b": model(served_name="chat", port=8100)}
    (said,) = about(reasons(entries), "serving.a.served_name")
    assert "the models a, b all have the name 'chat'" in said
    assert "such as /a/v1" in said
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
    assert f"Write `{key}: {right}`" in said
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


def test_a_reserved_gpu_that_is_not_there_is_said() -> None:
    (said,) = reasons({"m": model()}, gpus={"reserved": [3, 4, 7]})
    assert said.startswith("gpus.reserved: gpu-01 has no GPU 4,7, so the GPU that you mean")
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
    assert "NVLink connects GPUs 0-1 of gpu-01" in said


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
    assert said.startswith(
        "serving.m.flags.kv-offloading-size: the engines on the node would keep 1,200 GiB"
    )
    assert "gpu-01 has only 1,000 GiB" in said
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
    assert all("the context of m (8192 tokens)" in each for each in said)


@each_row(
    ("variable", "value", "said"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel"),
        ("VLLM_PORT", "8000", "write `serving.m.port`, and remove the variable"),
        ("PATH", "/opt/cuda/bin", "does not contain /usr/bin"),
        ("HF_HOME", "/root/.cache", "because their unit sets ProtectHome="),
        ("LD_PRELOAD", "/opt/x.so", "No lock file records this code, and no rollback restores it"),
        ("NCCL_SOCKET_IFNAME", "eth9", "gpu-01 has no interface eth9, but has eth0, lo"),
        ("GLOO_SOCKET_IFNAME", "eth", "gpu-01 has no interface eth, but has eth0, lo"),
    ],
)
def test_a_variable_that_works_against_the_server_or_its_node_is_said(
    variable: str, value: str, said: str
) -> None:
    (found,) = reasons({"m": model(environment={variable: value})}, probe=NET)
    assert found.startswith(f"serving.m.environment.{variable}: ")
    assert said in found


@each_row(
    ("variable", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("VLLM_PORT", "23000"),
        ("PATH", "/opt/cuda/bin:/usr/bin"),
        ("HF_HOME", "/srv/cache"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
        ("NCCL_SOCKET_IFNAME", "ib0,eth0"),
    ],
)
def test_a_variable_that_fits_the_node_is_not_remarked_on(variable: str, value: str) -> None:
    assert reasons({"m": model(environment={variable: value})}, probe=NET) == []
    assert reasons({"m": model()}, vllm={**VLLM, "environment": {variable: value}}, probe=NET) == []


@each_row(
    ("objectives", "said"),
    [
        ({"ttft_p99_seconds": 500}, "ttft_p99_seconds: the value 500 is in seconds"),
        ({"itl_p99_seconds": 50}, "If you mean milliseconds, write 0.05"),
        ({"ttft_p99_seconds": 0.05, "itl_p99_seconds": 1}, "two values may be swapped"),
        ({"ttft_p99_seconds": 20, "itl_p99_seconds": 0.05, "e2e_p99_seconds": 600}, ""),
    ],
)
def test_an_objective_in_milliseconds_is_said(objectives: dict[str, float], said: str) -> None:
    found = reasons({"m": model(objectives=objectives)})
    assert len(found) == bool(said)
    assert not said or said in found[0]


@pytest.mark.parametrize("flag", ["revision", "download-dir"])
def test_flags_of_a_download_have_no_effect_on_staged_files(flag: str) -> None:
    (said,) = reasons({"m": model(flags={flag: "x"})})
    assert said.startswith(f"serving.m.flags.{flag}: the flag has no effect")


def test_an_address_that_the_node_lacks_is_said() -> None:
    def said(listen: str, probe: dict[str, Any]) -> list[str]:
        others = {"vllm": {**VLLM, "listen": listen, "allow_unauthenticated": True}}
        return about(reasons({"m": model()}, probe=probe, **others), "vllm.listen")

    (found,) = said("10.9.9.9", NET)
    assert "The node's addresses are 10.0.0.1, fd00::1" in found
    for listen in ("10.0.0.1", "fd00::1", "0.0.0.0", "::", "127.0.0.1", "localhost"):
        assert said(listen, NET) == []
    assert said("10.9.9.9", {}) == []

"""
The KV cache's tokens, concurrency and refusals equal what the releases' own code says.

`data/kv_oracle.json.xz` is a record of that code, made by `data/kv_oracle.py`.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import (
    Cache,
    ChunkCache,
    FullCache,
    LatentCache,
    StateCache,
    WindowCache,
)
from gpufleet.sizing.kv_bytes import Layout, kv_dtype
from gpufleet.sizing.kv_cache import GIB, CacheReport, cache, largest_max_model_len
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data"
ORACLE = json.loads(lzma.decompress((DATA / "kv_oracle.json.xz").read_bytes()))
Case = dict[str, Any]


def layer(given: Case) -> Cache:
    match given["kind"]:
        case "full":
            return FullCache(given["kv_heads"], given["head_dim"], given.get("v_head_dim"))
        case "window":
            return WindowCache(given["kv_heads"], given["head_dim"], given["window"])
        case "chunk":
            return ChunkCache(given["kv_heads"], given["head_dim"], given["chunk"])
        case "latent":
            return LatentCache(given["rank"], given["rope_dim"], given.get("indexer_dim", 0))
    return state(given)


def state(given: Case) -> StateCache:
    """Return a state of the whole model: convolution first, then the recurrent part."""
    sizes, dtypes = given["arguments"], given["dtypes"]
    match given["type"]:
        case "gdn":
            keys = sizes["num_k_heads"] * sizes["head_k_dim"]
            values = sizes["num_v_heads"] * sizes["head_v_dim"]
            convolution = (sizes["conv_kernel_size"] - 1, 2 * keys + values)
            recurrent = (sizes["num_v_heads"], sizes["head_v_dim"], sizes["head_k_dim"])
        case "kda":
            wide = sizes["num_heads"] * sizes["head_dim"]
            convolution = (sizes["conv_kernel_size"] - 1, 3 * wide)
            recurrent = (sizes["num_heads"], sizes["head_dim"], sizes["head_dim"])
        case "mamba2":
            groups = (sizes["n_groups"], 2 * sizes["state_size"], sizes["conv_kernel"] - 1)
            convolution = (sizes["conv_kernel"] - 1, sizes["intermediate_size"])
            recurrent = (sizes["num_heads"], sizes["head_dim"], sizes["state_size"])
            shapes = (convolution, groups, recurrent)
            return StateCache("mamba2", shapes, (1, 0, 0), (dtypes[0], *dtypes))
        case "mamba1":
            convolution = (sizes["conv_kernel"] - 1, sizes["intermediate_size"])
            recurrent = (sizes["intermediate_size"], sizes["state_size"])
        case "short_conv":
            convolution = (sizes["conv_kernel"] - 1, sizes["intermediate_size"])
            return StateCache("short_conv", (convolution,), (1,), (dtypes[0],))
        case _:
            heads = (sizes["num_heads"], sizes["head_dim"], sizes["head_dim"])
            return StateCache("linear", (heads,), (0,), (dtypes[0],))
    return StateCache(given["type"], (convolution, recurrent), (1, 0), tuple(dtypes))


def layout(release: str, case: Case) -> Layout:
    model = ORACLE["models"][case["model"]]
    caches = [layer(one) for times, pattern in model["layers"] for one in pattern * times]
    stages, start = [], 0
    for count in case["stages"]:
        stages.append(tuple(caches[start : start + count]))
        start += count
    return Layout(
        stages=tuple(stages),
        vllm=tuple(map(int, release.split("."))),
        max_model_len=case["max_model_len"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        kv_dtype=case["kv_dtype"],
        tensor=case["tensor"],
        decode_context_parallel=case["decode_context_parallel"],
        block_size=case["block_size"],
        prefix_caching=case["prefix_caching"],
        speculative_tokens=case["speculative_tokens"],
        hybrid_manager=case["hybrid_manager"],
    )


@each_row("release", ORACLE["releases"])
def test_blocks_tokens_and_refusals_are_those_that_the_release_logs(release: str) -> None:
    wrong = {}
    for number, said in enumerate(ORACLE["releases"][release]):
        if said is None:
            continue
        case = ORACLE["cases"][number]
        report = cache(layout(release, case), case["available"])
        ours = compared(release, report, said)
        if ours != said:
            wrong[f"case {number}, {case}"] = (ours, said)
    assert not wrong


def test_most_cases_are_of_releases_that_know_the_model() -> None:
    answers = [said for results in ORACLE["releases"].values() for said in results]
    assert len(ORACLE["releases"]) >= 30
    assert sum(said is not None for said in answers) >= 6_500
    assert sum("refused" in said for said in answers if said) >= 1_000


def compared(release: str, report: CacheReport, said: Case) -> Case:
    """Return the report in the record's form, with the record's word where it has no figure."""
    if report.starts:
        return {
            "blocks": report.blocks,
            "tokens": report.tokens,
            "concurrency": float(f"{report.max_concurrency:.2f}"),
        }
    found = {
        "refused": "memory" if report.needed_bytes else "layout",
        "needed_gib": float(f"{report.needed_bytes / GIB:.2f}"),
        "estimated": report.estimated_max_model_len or None,
    }
    if found["refused"] == "layout" or said.get("needed_gib", 0.0) is None:
        # Until 0.13 memory was looked at before the layers were grouped.
        earlier = tuple(map(int, release.split("."))) < (0, 14)
        found |= {key: said.get(key) for key in ("needed_gib", "estimated")}
        found["refused"] = said.get("refused") if earlier else found["refused"]
    if tuple(map(int, release.split("."))) < (0, 9, 1):
        # Not made before 0.8.4, lost on the way to the log until 0.9.0.
        found["estimated"] = None
    return found


@each_row("release", ["0.10.2", "0.13.0", "0.16.0", "0.24.0", "0.33.0"])
def test_the_longest_length_starts_and_one_token_more_does_not(release: str) -> None:
    for case in ORACLE["cases"]:
        asked = layout(release, case)
        longest = largest_max_model_len(asked, case["available"])
        if longest:
            starts = cache(replace(asked, max_model_len=longest), case["available"])
            assert starts.starts, (case, longest, starts.why)
        if longest < asked.max_model_len and cache(asked, case["available"]).needed_bytes:
            longer = cache(replace(asked, max_model_len=longest + 1), case["available"])
            assert not longer.starts, (case, longest)


CPU = Layout(
    stages=((FullCache(4, 32),) * 2,),
    vllm=(0, 32, 0),
    max_model_len=512,
    max_num_batched_tokens=512,
    device="cpu",
)
SLIDES, SEES_ALL = WindowCache(2, 32, 64), FullCache(2, 32)


@pytest.mark.parametrize(
    ("server", "memory", "tokens", "concurrency"),
    [
        # --kv-cache-memory-bytes 64M; all layers alike.
        (CPU, 64 << 20, 65_536, "128.00"),
        # 8M; five windows and two full layers: four groups of two, one of them padded. A batch is
        # in flight but once: the CPU's scheduler waits for it.
        (
            replace(
                CPU,
                stages=((SLIDES, SLIDES, SEES_ALL, SLIDES, SLIDES, SEES_ALL, SLIDES),),
                max_model_len=4096,
                max_num_batched_tokens=256,
            ),
            8 << 20,
            11_915,
            "2.91",
        ),
    ],
)
def test_the_cpu_server_logs_what_is_foretold(
    server: Layout, memory: int, tokens: int, concurrency: str
) -> None:
    # Measured: vLLM 0.32.0 for CPUs, "CPU KV cache size: 65,536 tokens, Maximum concurrency for 512
    # tokens per request: 128.00x" and so on.
    report = cache(server, memory)
    assert report.tokens == tokens
    assert f"{report.max_concurrency:.2f}" == concurrency
    assert report.block_size == 128


@pytest.mark.parametrize(
    ("capability", "token"), [((9, 0), 656), ((10, 0), 576), ((12, 0), 656), (None, 656)]
)
def test_layers_that_share_an_index_keep_their_latents_as_the_others(
    capability: tuple[int, int] | None, token: int
) -> None:
    """GLM-5.2 has an index in 21 of 78 layers, and sparse attention in all of them."""
    layers = (LatentCache(512, 64, 128), LatentCache(512, 64))
    glm = Layout(
        stages=(layers,),
        vllm=(0, 26, 0),
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_dtype="fp8",
        compute_capability=capability,
    )

    index = 128 + 4
    assert cache(glm, [GIB]).bytes_per_token_per_gpu == 2 * token + index


def test_speculation_of_a_hybrid_is_as_logged() -> None:
    # Logged by 0.19.2 with NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 and 3 tokens by its own layer:
    # 36.25 GiB, blocks of 8432, 1,399,712 tokens, 27.81 requests of 131072.
    state = StateCache(
        "mamba2",
        ((3, 8192), (8, 2 * 128, 3), (128, 64, 128)),
        (1, 0, 0),
        ("model", "model", "float32"),
    )
    attention = FullCache(2, 128)
    stage = (state,) * 40 + (attention,) * 8 + (attention,)
    model = Layout(
        stages=(stage,),
        vllm=(0, 19, 2),
        max_model_len=131_072,
        max_num_batched_tokens=2048,
        kv_dtype="fp8",
        prefix_caching=False,
        speculative_tokens=3,
    )
    report = cache(model, int(36.25 * GIB))
    assert report.block_size == 8432
    assert report.tokens == 1_399_712
    assert f"{report.max_concurrency:.2f}" == "27.81"


@each_row(
    ("said", "requested", "vllm", "wanted"),
    [
        ({}, "auto", (0, 33, 0), "auto"),
        ({}, "fp8", (0, 33, 0), "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "auto", (0, 13, 0), "auto"),
        (
            {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
            "auto",
            (0, 14, 0),
            "fp8_e4m3",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
            "auto",
            (0, 33, 0),
            "fp8_e4m3",
        ),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, "auto", (0, 33, 0), "auto"),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
            "auto",
            (0, 19, 0),
            "fp8",
        ),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
            "bfloat16",
            (0, 33, 0),
            "bfloat16",
        ),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
            "auto",
            (0, 19, 0),
            "auto",
        ),
    ],
)
def test_auto_is_what_the_checkpoint_says(
    said: Case, requested: str, vllm: tuple[int, ...], wanted: str
) -> None:
    assert kv_dtype({"quantization_config": said}, requested, vllm) == wanted


def test_a_kv_dtype_that_is_not_known_is_refused_by_name() -> None:
    unknown = Layout(
        stages=((FullCache(8, 128),),),
        vllm=(0, 33, 0),
        max_model_len=4096,
        max_num_batched_tokens=2048,
        kv_dtype="turboquant_4bit_nc",
    )
    with pytest.raises(FleetError, match="turboquant_4bit_nc"):
        cache(unknown, GIB)

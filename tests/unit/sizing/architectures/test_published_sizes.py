"""
What is counted of public models against what others count.

`data/models/` has the configs, and beside them what their publishers or other programs say of
their size; `data/models_oracle.json.xz` what vLLM 0.32.0's own classes make of the same configs
(`data/models_oracle.py`): each rank's parameters at several tensor-parallel sizes, and the cache
that each layer asks for.
"""

from __future__ import annotations

import json
import lzma
from functools import cache

from gpufleet.sizing import kv_cache
from gpufleet.sizing.architectures.components import StateCache
from gpufleet.sizing.architectures.description import Description, ModelFiles, describe
from gpufleet.sizing.kv_bytes import Kind, Layout, caches, kv_dtype, pages, state_bytes
from gpufleet.sizing.rank_weights import Sharding
from gpufleet.sizing.weights import layer_ranges, weight_bytes
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data"
FACTS = {path.stem: json.loads(path.read_text()) for path in sorted((DATA / "models").glob("*"))}
ORACLE = json.loads(lzma.decompress((DATA / "models_oracle.json.xz").read_bytes()))["models"]
PUBLISHED = [name for name, facts in FACTS.items() if "published" in facts]
CACHED = [
    (name, int(tensor))
    for name, facts in FACTS.items()
    for tensor in facts.get("kv_bytes_per_token", {}).get("tp", {})
]
RANKS = [(name, int(tensor)) for name, found in ORACLE.items() for tensor in found["tp"]]
VLLM = (0, 32, 0)

LOOSE = 0.02
"""What is promised of weights and of KV bytes."""
TIGHT = 0.001
"""What is reached unless the reason stands here."""
LOOSER_PARAMETERS = {
    "deepseek-ai--DeepSeek-V3.2": "its draft layer is stored with an embedding and a head again",
    "meituan-longcat--LongCat-Flash-Chat": "its draft layer is stored",
}
_REPACKED = "repacked and padded for the kernel when it is loaded, after vLLM has built its class"
_CUT = "8 ranks cut experts inside a group of 16, whose scales are kept whole"
_LATENT = "vLLM adds the absorbed kv_b_proj when it has loaded the weights, not in its class"
_TRANSFORMERS = "0.32 builds it with Transformers' class, which keeps no rotary table"
LOOSER_WEIGHTS = {
    "nvidia--Gemma-4-26B-A4B-NVFP4": _CUT,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": _CUT,
    "HuggingFaceTB--SmolLM3-3B": _TRANSFORMERS,
    "allenai--Olmo-3.1-32B-Instruct": _TRANSFORMERS,
    "Qwen--Qwen2.5-14B-AWQ": _REPACKED,
    "Qwen--Qwen2.5-7B-Instruct-AWQ": _REPACKED,
    "Qwen--Qwen3-30B-A3B-GPTQ-Int4": _REPACKED,
    "meta-llama--Meta-Llama-3.1-70B-AWQ-INT4": _REPACKED,
    "meta-llama--Meta-Llama-3.1-8B-GPTQ-Int4": _REPACKED,
    "meta-llama--Meta-Llama-3.1-8B-W4A16": _REPACKED,
    "mistralai--Mixtral-8x7B-v0.1-AWQ": _REPACKED,
    "Qwen--Qwen3-30B-A3B-FP8": "8 ranks hold less than a block of 128, and scales of whole ones",
    "deepseek-ai--DeepSeek-R1": _LATENT,
    "deepseek-ai--DeepSeek-V3": _LATENT,
    "deepseek-ai--DeepSeek-V3.2": _LATENT,
    "zai-org--GLM-5-FP8": _LATENT,
    "moonshotai--Kimi-K2-Instruct": _LATENT,
    "moonshotai--Kimi-K3": "0.32 makes more of its projections one tensor than is counted here",
    "mistralai--Devstral-Small-2-24B-Instruct-2512": "whether FP8 reaches its vision tower",
}
NOT_COMPARED = {
    "bigcode--gpt_bigcode-santacoder": "0.32 builds it with Transformers' class and divides little",
    "Qwen--Qwen3-30B-A3B-GPTQ-Int4-8": "96 inputs a rank are less than a group, and kept whole",
    "mistralai--Devstral-Small-2-24B-Instruct-2512-pp": "its tower is on both stages; see above",
    "mistralai--Mamba-Codestral-7B-v0.1-pp": "its class keeps embedding and head on every stage",
    "EleutherAI--gpt-neox-20b-pp": "Transformers' class takes its embedding for no part of a stage",
}
DIVIDED = [name for name, found in ORACLE.items() if found.get("ep")]
STAGED = [
    name
    for name, found in ORACLE.items()
    if len(found.get("pp", ())) == 2 and not {name, f"{name}-pp"} & NOT_COMPARED.keys()
]
WEIGHED = [
    (name, tensor)
    for name, tensor in RANKS
    if name not in NOT_COMPARED and f"{name}-{tensor}" not in NOT_COMPARED
]


@cache
def described(name: str) -> Description:
    facts = FACTS[name]
    return describe(ModelFiles(facts["config"], facts.get("hf_quant_config")))


def off(found: float, expected: float) -> float:
    return abs(found / expected - 1)


def test_forty_architectures_are_held_against_somebody_elses_count():
    """The promise is for at least 40 public architectures, each from a source that is named."""
    held = {FACTS[name]["config"]["architectures"][0] for name in {*PUBLISHED, *ORACLE}}

    assert len(held) >= 40
    assert all(facts["source"] for facts in FACTS.values())
    assert all(FACTS[name]["published"]["source"] for name in PUBLISHED)


@each_row("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str):
    """A config alone gives as many parameters as the checkpoint is known to have."""
    published = FACTS[name]["published"]
    model = described(name).architecture

    found = model.parameters
    if published.get("drafts"):
        found += sum(weight.parameters for layer in model.draft_layers for weight in layer.weights)

    allowed = LOOSE if name in LOOSER_PARAMETERS else TIGHT
    assert off(found, published["parameters"]) <= allowed


@each_row(("name", "tensor"), CACHED)
def test_a_token_takes_as_much_cache_as_by_hand(name: str, tensor: int):
    """KV bytes of one more token of a long context are exact."""
    found = kv_cache.cache(layout(name, tensor), 1 << 40).bytes_per_token_per_gpu

    assert found == FACTS[name]["kv_bytes_per_token"]["tp"][str(tensor)]


@each_row(("name", "tensor"), WEIGHED)
def test_a_rank_weighs_what_vllms_own_classes_weigh(name: str, tensor: int):
    """What tensor parallelism divides, pads and copies, and what a quantization packs."""
    description = described(name)

    (found,) = weight_bytes(
        description.architecture,
        description.quantization,
        Sharding(tensor=tensor),
        vllm=VLLM,
    )

    assert off(found.bytes, ORACLE[name]["tp"][str(tensor)]["allocated"]) <= allowed(name)


@each_row("name", DIVIDED)
def test_expert_parallelism_divides_what_vllms_own_classes_divide(name: str):
    """Whole experts on each of 8 ranks, and the rest as tensor parallelism has it."""
    description = described(name)

    (found,) = weight_bytes(
        description.architecture,
        description.quantization,
        Sharding(tensor=8, expert=True),
        vllm=VLLM,
    )

    assert off(found.bytes, ORACLE[name]["ep"]["8"]["allocated"]) <= allowed(name)


@each_row("name", STAGED)
def test_pipeline_stages_hold_what_vllms_own_stages_hold(name: str):
    """Layers, embeddings, head and tower are on the stages on which vLLM has them."""
    description = described(name)

    found = weight_bytes(
        description.architecture,
        description.quantization,
        Sharding(pipeline=2),
        vllm=VLLM,
    )

    for stage, held in zip(found, ORACLE[name]["pp"], strict=True):
        assert off(stage.bytes, held["allocated"]) <= allowed(name)


@each_row("name", ORACLE)
def test_the_longest_context_is_the_one_that_vllm_derives(name: str):
    """Rope scaling, windows and the rest of the config give vLLM's own `--max-model-len`."""
    assert described(name).architecture.max_model_len == ORACLE[name]["max_model_len"]


@each_row("name", ORACLE)
def test_the_dtype_is_the_one_that_vllm_takes(name: str):
    """`--dtype auto` on a GPU that has bfloat16."""
    assert described(name).architecture.dtype == ORACLE[name]["dtype"]


@each_row(("name", "tensor"), RANKS)
def test_layers_cache_what_vllms_own_layers_ask_for(name: str, tensor: int):
    """As many layers of each kind, and as many bytes, as vLLM's layers say of themselves."""
    assert cached(layout(name, tensor)) == ORACLE[name]["tp"][str(tensor)]["cache"]


def allowed(name: str) -> float:
    return LOOSE if name in LOOSER_WEIGHTS else TIGHT


def layout(name: str, tensor: int) -> Layout:
    """Everything on one stage, as vLLM 0.32.0 lays it out on Hopper."""
    description = described(name)
    model = description.architecture
    return Layout(
        stages=caches(model, layer_ranges(len(model.layers), 1)),
        vllm=VLLM,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=8192,
        dtype=model.dtype,
        kv_dtype=kv_dtype(description.config or {}, "auto", VLLM, (9, 0)),
        tensor=tensor,
        prefix_caching=False,
    )


def cached(layout: Layout) -> dict[str, list[int]]:
    """{kind: [layers, bytes of a token in all of them; of a sequence where it is a state]}."""
    found: dict[str, list[int]] = {}
    states = (c for c in layout.stages[0] if isinstance(c, StateCache))
    for page in pages(layout, layout.stages[0]):
        size = page.bytes // page.block
        if page.kind is Kind.STATE:  # its page is padded to those of attention
            size = state_bytes(layout, next(states))
        one = found.setdefault(page.kind.value, [0, 0])
        one[0] += 1
        one[1] += size
    return found

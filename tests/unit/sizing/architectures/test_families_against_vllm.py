"""
Every family of decoders with experts, latents, windows or states, against vLLM's own classes.

`data/small_models.json` has a small config of each family and what vLLM 0.32.0 makes of it
(`data/small_models.py`).
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import (
    CompressedCache,
    FullCache,
    LatentCache,
    Layer,
    StateCache,
    WindowCache,
)
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.architectures.quantization import quantization
from gpufleet.sizing.architectures.registry import architecture, builders
from gpufleet.sizing.fit import size
from gpufleet.sizing.kv_bytes import Layout, caches, state_bytes, token_bytes
from gpufleet.sizing.options import Options
from gpufleet.sizing.rank_weights import Sharding
from gpufleet.sizing.weights import weight_bytes
from tests.support.checkout import ROOT
from tests.support.rows import each_row

SMALL = json.loads((ROOT / "tests/data/small_models.json").read_text())
RANKS = [(name, int(tensor)) for name, record in SMALL.items() for tensor in record["tp"]]
VLLM = (0, 32, 0)
KINDS = {FullCache: "full", LatentCache: "full", WindowCache: "window"}

LEFT_OUT = 1 << 20
"""Bytes of a rank that are not counted: each layer's scales for the KV cache, 0.1 MiB in all."""
LEFT_OUT_TABLES = {"bailing 2.5": 2 << 20, "dbrx": 2 << 20, "laguna": 2 << 20}
"""Rotary tables that a family keeps more than one of."""


def config(name: str, **changes: Any) -> dict[str, Any]:
    """Return a family's config with other values; None takes a key away."""
    changed = SMALL[name]["config"] | changes
    return {key: value for key, value in changed.items() if key not in changes or value is not None}


@each_row(("name", "tensor"), RANKS)
def test_a_rank_holds_what_vllms_own_class_holds(name: str, tensor: int) -> None:
    """Divided, replicated and padded as vLLM's layers do, to the megabyte."""
    expected = SMALL[name]["tp"][str(tensor)]["allocated"]

    own = config(name)
    (found,) = weight_bytes(
        architecture(own), quantization(own), Sharding(tensor=tensor), vllm=VLLM
    )

    assert abs(found.bytes - expected) <= LEFT_OUT_TABLES.get(name, LEFT_OUT)


@each_row(
    ("name", "tensor"),
    # DeepSeek V4's pages stand in test_kv_groups.py: a model built alone has no block yet.
    [(name, tensor) for name, tensor in RANKS if name != "deepseek 4"],
)
def test_layers_cache_what_vllms_own_layers_ask_for(name: str, tensor: int) -> None:
    """As many layers of each kind, and as many bytes of a token or a state in all of them."""
    model = architecture(config(name))
    layout = Layout(
        stages=caches(model, [range(len(model.layers))]),
        vllm=VLLM,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        tensor=tensor,
        prefix_caching=False,
    )
    found: dict[str, list[int]] = {}
    for cache in layout.stages[0]:
        if isinstance(cache, StateCache):
            add(found, "state", state_bytes(layout, cache))
            continue
        assert not isinstance(cache, CompressedCache)
        add(found, KINDS[type(cache)], token_bytes(layout, cache))
        if isinstance(cache, LatentCache) and cache.indexer_dim:
            add(found, "full", cache.indexer_dim + 4)

    assert found == SMALL[name]["tp"][str(tensor)]["cache"]


def add(found: dict[str, list[int]], kind: str, size: int) -> None:
    """Count one more layer of a kind, and its bytes."""
    layers, total = found.get(kind, [0, 0])
    found[kind] = [layers + 1, total + size]


@each_row("name", SMALL)
def test_a_config_without_its_sizes_is_refused_by_the_key(name: str) -> None:
    """What a size follows from is never guessed: the key that is missing is named."""
    for key in ("vocab_size", "num_attention_heads"):
        if key not in SMALL[name]["config"]:
            continue
        if key == "num_attention_heads" and not architecture(config(name)).heads:
            continue
        if name in {"gemma 3n", "gemma 2 embeds", "gemma 3 embeds"}:
            continue  # Google leaves both out; their class has defaults.
        with pytest.raises(FleetError, match=re.escape(f"`{key}`")):
            architecture(config(name, **{key: None}))


@each_row("name", SMALL)
def test_equal_layers_are_one_object(name: str) -> None:
    """What follows from a layer is worked out once for all that are like it."""
    layers = architecture(config(name)).layers

    assert len({id(layer) for layer in layers}) == len(set(layers))


@each_row("name", ["afmoe", "laguna", "exaone moe", "qwen 3.5", "granite 4"])
def test_a_list_of_layers_that_ends_early_is_refused(name: str) -> None:
    """A layer that the config says nothing of has no kind."""
    with pytest.raises(FleetError, match="layer_types"):
        architecture(config(name, layer_types=SMALL[name]["config"]["layer_types"][:3]))


COUNTS = {"num_hidden_layers", "num_layers", "n_layers", "n_layer"}


@each_row("name", [name for name in SMALL if COUNTS & set(config(name)) and name != "nemotron 3"])
def test_more_layers_than_any_model_has_are_refused(name: str) -> None:
    """A slip of the pen in a count takes neither the memory nor the time of a fleet's plan."""
    counts = COUNTS & set(SMALL[name]["config"])
    with pytest.raises(FleetError, match="above the maximum of"):
        architecture(config(name, **dict.fromkeys(counts, 10**9)))


def test_a_shared_index_is_neither_loaded_nor_cached() -> None:
    """GLM-5.2: three of four layers take the tokens that an earlier layer chose."""
    layers = architecture(config("glm 5")).layers
    indexed = [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer.cache, LatentCache) and layer.cache.indexer_dim
    ]

    assert indexed == [0, 1, 2, 6]
    for index, layer in enumerate(layers):
        assert any("indexer" in weight.name for weight in layer.weights) == (index in indexed)


def test_draft_layers_are_not_the_models_own() -> None:
    """Multi-token prediction is loaded only where it is asked for."""
    without = architecture(config("deepseek 3"))
    with_drafts = architecture(config("deepseek 3", num_nextn_predict_layers=1))

    assert with_drafts.parameters == without.parameters
    assert len(with_drafts.draft_layers) == 1


@each_row("name", ["qwen 3.5", "nemotron 3 with a draft"])
@each_row("pattern", ["mtp", "mtp*", "mtp.layers.0*", "re:^mtp.*", "model.mtp*"])
def test_a_draft_that_the_checkpoint_leaves_as_it_is_takes_all_its_bytes(
    name: str, pattern: str
) -> None:
    """A pattern of `mtp` means the draft's layers, and no layer of the model itself."""
    changes: dict[str, Any] = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    if name == "nemotron 3 with a draft":
        name, changes["mtp_hybrid_override_pattern"] = "nemotron 3", "*"
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    own, draft = (
        added_by_a_draft(config(name, **changes, quantization_config={**said, "ignore": ignored}))
        for ignored in (["lm_head"], ["lm_head", pattern])
    )
    plain = added_by_a_draft(config(name, **changes))

    assert draft[0] == own[0]
    assert own[1] < draft[1] == plain[1]


def added_by_a_draft(own: dict[str, Any]) -> tuple[int, int]:
    """Return the weights of a model on a GPU, and what its draft adds, in bytes."""
    card = {"gpu_memory_gib": 79.0, "compute_capability": (9, 0), "vllm": VLLM}
    described = describe(ModelFiles(own))
    without, with_draft = (
        size(described, Options(**card, speculative_tokens=tokens)).weights_bytes_per_gpu
        for tokens in (0, 1)
    )
    return without, with_draft - without


def test_longcat_lite_looks_several_tokens_up_together() -> None:
    """One table of the last two, and of the last three, for each split; each of an odd size."""
    changes = {"ngram_vocab_size_ratio": 3, "emb_split_num": 2, "emb_neighbor_num": 3}
    plain = config("longcat")
    hidden, vocabulary = plain["hidden_size"], plain["vocab_size"]
    with_tables = architecture(
        config("longcat", architectures=["LongcatFlashNgramForCausalLM"], **changes)
    )

    rows = sum(3 * vocabulary + 2 * table + 1 for table in range(4))
    assert with_tables.parameters - architecture(plain).parameters == (
        rows * hidden // 4 + hidden * hidden
    )


def test_alice_is_qwens_attention_kimis_delta_and_experts() -> None:
    """Beside those of the two families: a bias of the router, and what mixes earlier layers."""
    qwen, kimi = architecture(config("qwen 3 next")), architecture(config("kimi linear"))
    linear = config("kimi linear")["linear_attn_config"]
    alice = architecture(
        config(
            "qwen 3 next",
            architectures=["AliceAIForCausalLM"],
            linear_num_key_heads=linear["num_heads"],
            linear_key_head_dim=linear["head_dim"],
            linear_conv_kernel_dim=linear["short_conv_kernel_size"],
        )
    )
    hidden, experts = alice.hidden_size, alice.experts

    def attends(layer: Layer, prefix: str) -> int:
        return sum(w.parameters for w in layer.weights if w.name.startswith(prefix))

    delta = next(layer for layer in kimi.layers if isinstance(layer.cache, StateCache))
    for index, (layer, its) in enumerate(zip(alice.layers, qwen.layers, strict=True)):
        mixing = 2 * hidden * (2 if index else 1)
        rest = attends(its, "mlp.") + 2 * hidden + experts + mixing
        own = attends(its, "self_attn.") or attends(delta, "self_attn.")
        assert sum(weight.parameters for weight in layer.weights) == own + rest
        assert layer.cache == (delta if isinstance(its.cache, StateCache) else its).cache


def test_rnjs_chunks_are_windows_of_a_gemma() -> None:
    """Each kind of layer turns its keys by a base of its own: a table more."""
    kinds = (["chunked_attention"] * 3 + ["full_attention"]) * 2
    own = {**config("olmoe", num_experts=None), "sliding_window": 128, "layer_types": kinds}
    bases = {"chunked_attention": 10000.0, "full_attention": 1000000.0}
    one, two = (
        architecture(
            {
                **own,
                "architectures": ["Rnj1ForCausalLM"],
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": base}
                    for kind, base in each.items()
                },
            }
        )
        for each in (dict.fromkeys(bases, 10000.0), bases)
    )

    assert [isinstance(layer.cache, WindowCache) for layer in two.layers] == [
        kind == "chunked_attention" for kind in kinds
    ]
    assert len(two.parts) == len(one.parts) + 1


def test_lings_experts_may_have_four_bits_in_a_checkpoint_of_eight() -> None:
    """`routed_experts_quant_method` says so; what is no routed expert keeps eight."""
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = architecture(config("bailing 3"))
    eight, mixed = (
        weight_bytes(
            model,
            quantization(config("bailing 3", quantization_config={**said, **more})),
            Sharding(),
            vllm=VLLM,
        )[0].bytes
        for more in ({}, {"routed_experts_quant_method": "mxfp4"})
    )
    experts = sum(
        weight.parameters for layer in model.layers for weight in layer.weights if weight.expert
    )

    assert eight - mixed == pytest.approx(experts * 15 / 32, rel=0.01)


def test_the_last_layer_of_each_of_lings_groups_attends_to_all() -> None:
    """The others have a state of one size, whatever the context."""
    model = architecture(config("bailing 2.5", layer_group_size=4))
    latent = [isinstance(layer.caches[0], LatentCache) for layer in model.layers]

    assert latent == [False, False, False, True] * 2


def test_the_first_of_every_four_of_granites_layers_attends_to_all() -> None:
    """So it is where the config does not say: the others have a window."""
    model = architecture(config("granite moe with windows", num_hidden_layers=8))

    everything = [isinstance(layer.caches[0], FullCache) for layer in model.layers]
    assert everything == [True, False, False, False] * 2


def test_ling_3_with_adapters_is_refused() -> None:
    """The class knows none in its Kimi delta attention."""
    with pytest.raises(FleetError, match="no_kda_lora"):
        architecture(config("bailing 3", no_kda_lora=None))


def test_zambas_transformers_are_loaded_once() -> None:
    """Two are shared by three layers, of which each has a cache and adapters of its own."""
    layers = [layer for layer in architecture(config("zamba 2")).layers if len(layer.caches) == 2]
    shared = ["self_attn.o_proj" in "".join(w.name for w in layer.weights) for layer in layers]

    assert shared == [True, True, False]
    assert all(any("adapter" in weight.name for weight in layer.weights) for layer in layers)


def test_kimis_experts_are_padded_since_0_27() -> None:
    """A rank of eight holds 256 of each expert's inner size, of which TP would leave 64."""
    model = architecture(config("kimi linear"))
    before, since = (
        weight_bytes(model, None, Sharding(tensor=8), vllm=vllm)[0].bytes
        for vllm in ((0, 26, 0), (0, 27, 0))
    )

    assert since > before * 2


@pytest.mark.parametrize("ratios", [[0, 4], [0, 4, 16, 4, 128, 0, 0]])
def test_a_compression_that_vllm_does_not_know_is_refused(ratios: list[int]) -> None:
    """Of DeepSeek V4's layers each says how many tokens become one: 4, 128 or none."""
    with pytest.raises(FleetError, match="compress_ratios"):
        architecture(config("deepseek 4", compress_ratios=ratios))


def test_every_name_reads_a_config_that_has_nothing_with_a_sentence() -> None:
    """No architecture's reader fails on an empty config other than by saying what is missing."""
    for name in builders():
        with pytest.raises(FleetError):
            architecture({"architectures": [name]})

"""Decoders with experts whose config has lists."""

from __future__ import annotations

from gpufleet.sizing.architectures.registry import architecture
from tests.support.rows import each_row

# ERNIE 4.5 VL 28B A3B's decoder: experts for text and for images.
ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "num_attention_heads": 20,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "intermediate_size": 12288,
    "vocab_size": 103424, "max_position_embeddings": 131072, "moe_num_experts": [64, 64],
    "moe_intermediate_size": [1536, 512], "moe_num_shared_experts": 2, "moe_k": 6,
    "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28], "moe_layer_interval": 1,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def expert(inner):
    return 3 * 2560 * inner


def test_experts_for_text_and_for_images_are_both_counted():
    """Summed by hand after Ernie4_5_VLMoeMoE: two routers, two sets, one set that both share."""
    attention = 2 * 2560 * 2560 + 2 * 2560 * 4 * 128
    norms = 2 * 2560
    mixture = 64 * (expert(1536) + expert(512)) + 2 * (64 * 2560 + 64) + expert(2 * 1536)
    layers = 28 * (attention + norms) + expert(12288) + 27 * mixture

    found = architecture(ERNIE)

    assert found.parameters == layers + 103424 * 2560 + 2560
    assert found.experts == 64


@each_row(("end", "counted"), [([29, 28], 27), ([29, 9], 9)])
def test_experts_for_images_are_in_their_own_layers(end, counted):
    one = architecture({**ERNIE, "moe_num_experts": 64, "moe_intermediate_size": 1536,
                        "moe_layer_start_index": 1, "moe_layer_end_index": 29})  # fmt: skip

    more = architecture({**ERNIE, "moe_layer_end_index": end}).parameters - one.parameters

    assert more == counted * (64 * expert(512) + 64 * 2560 + 64)


def test_a_number_that_is_the_same_in_every_layer_may_be_a_list():
    hunyuan = {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "hidden_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4,
        "intermediate_size": 768, "vocab_size": 32000, "max_position_embeddings": 4096,
        "num_experts": 8, "moe_intermediate_size": 768, "num_shared_expert": 1,
        "use_mixed_mlp_moe": True, "moe_topk": 2, "attention_head_dim": 128,
    }  # fmt: skip
    lists = {key: [hunyuan[key]] * 4
             for key in ("num_experts", "moe_intermediate_size", "num_shared_expert")}  # fmt: skip

    assert architecture({**hunyuan, **lists}).parameters == architecture(hunyuan).parameters

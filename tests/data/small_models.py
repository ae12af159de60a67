"""
Record what vLLM's own classes make of small models of many families: small_models.json.

    PYTHON tests/data/small_models.py [NAME ...]

PYTHON is the one of `models_oracle.py`, which does the work. The configs below are not of published
models: each has the keys of its family, with small sizes of which no two are equal by chance where
it matters. Of each the record keeps the config and what a rank of 1, 2, 4 and 8 holds. With NAMEs
only those are built anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import models_oracle
import torch

RECORD = Path(__file__).parent / "small_models.json"

COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
GROUPED = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
WINDOWS = {
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "sliding_window": 128,
}
LATENT = {
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 16,
}
DEEPSEEK = {
    **LATENT,
    **GROUPED,
    "head_dim": None,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
SPARSE = {**DEEPSEEK, "index_topk": 2048, "index_n_heads": 8, "index_head_dim": 128}
BAILING = {
    **EXPERTS,
    **GROUPED,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
}
GRANITE = {
    "head_dim": None,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "tie_word_embeddings": True,
}
MAMBA2 = {
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_d_head": 64,
}
FALCON_H1 = {
    **MAMBA2,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 16,
    "mamba_chunk_size": 128,
    "mamba_rms_norm": False,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}
MAMBA1 = {
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 64,
    "use_conv_bias": True,
    "use_bias": False,
    "intermediate_size": 2048,
    "layer_norm_epsilon": 1e-5,
}
DELTA_NET = {
    **EXPERTS,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "shared_expert_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
}
KIMI = {
    **LATENT,
    "head_dim": None,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 512,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "mla_use_nope": True,
}
KIMI_LAYERS = {
    "full_attn_layers": [4, 8],
    "kda_layers": [1, 2, 3, 5, 6, 7],
    "head_dim": 64,
    "num_heads": 16,
    "short_conv_kernel_size": 4,
}
DRAFTS = {"num_nextn_predict_layers": 2}
"""Layers of the checkpoint that vLLM loads for speculation, as a model of their own."""
MIMO_2 = {
    **DRAFTS,
    **GROUPED,
    "head_dim": 96,
    "v_head_dim": 64,
    "rms_norm_eps": None,
    "layernorm_epsilon": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "partial_rotary_factor": 0.334,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 96,
    "swa_v_head_dim": 64,
    "swa_rope_theta": 10000,
    "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1, 1, 1],
    "moe_layer_freq": [0] + [1] * 7,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
STEP = {
    "moe_num_experts": 16,
    "moe_top_k": 4,
    "moe_intermediate_size": 512,
    "share_expert_dim": 512,
    "norm_expert_weight": True,
}
EXAONE_MOE = {
    **DRAFTS,
    **EXPERTS,
    **GROUPED,
    **WINDOWS,
    "num_shared_experts": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "scoring_func": "sigmoid",
}
LONGCAT = {
    **DRAFTS,
    **DEEPSEEK,
    "num_layers": 4,
    "ffn_hidden_size": 2816,
    "expert_ffn_hidden_size": 512,
    "zero_expert_num": 8,
    "moe_topk": 4,
}
ENCODER = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "num_labels": 3,
}
ROBERTA = {**ENCODER, "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1}
MODERN = {
    **ENCODER,
    "type_vocab_size": None,
    "layer_norm_eps": None,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
}
SEEN = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "image_size": 224,
    "patch_size": 14,
}
READ = {
    "vocab_size": 32000,
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}
TWO_TOWERS = {**dict.fromkeys(COMMON), "torch_dtype": "bfloat16", "vision_config": SEEN}
LLAMA = "llama"
"""For families whose config class is not in transformers: one that takes any key."""

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": (
        "AfmoeForCausalLM",
        "afmoe",
        {
            **EXPERTS,
            **WINDOWS,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "route_scale": 1.0,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "mup_enabled": True,
        },
    ),
    "bailing 2": ("BailingMoeV2ForCausalLM", LLAMA, BAILING),
    "bailing 2.5": (
        "BailingMoeV2_5ForCausalLM",
        LLAMA,
        {
            **DRAFTS,
            **BAILING,
            **LATENT,
            "layer_group_size": 4,
            "group_norm_size": 8,
            "rope_interleave": True,
        },
    ),
    "bailing 3": (
        "BailingMoeV3ForCausalLM",
        LLAMA,
        {
            **DRAFTS,
            **BAILING,
            **LATENT,
            "num_hidden_layers": 9,
            "layer_group_size": 4,
            "no_kda_lora": True,
            "short_conv_kernel_size": 4,
            "moe_shared_expert_intermediate_size": 768,
            "gated_attention_proj_granularity_type": "head_wise",
        },
    ),
    "dbrx": (
        "DbrxForCausalLM",
        "dbrx",
        {
            **dict.fromkeys(COMMON),
            "vocab_size": 32000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "d_model": 1024,
            "n_heads": 16,
            "n_layers": 8,
            "max_seq_len": 4096,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
            "ffn_config": {"ffn_hidden_size": 1024, "moe_num_experts": 16, "moe_top_k": 4},
        },
    ),
    "deepseek": (
        "DeepseekForCausalLM",
        LLAMA,
        {
            **{key: value for key, value in DEEPSEEK.items() if key not in LATENT},
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "attention_bias": False,
        },
    ),
    "deepseek 3": ("DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK),
    "deepseek 3.2": ("DeepseekV32ForCausalLM", "deepseek_v32", SPARSE),
    "deepseek 4": (
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        {
            "num_hidden_layers": 6,
            "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "intermediate_size": None,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_topk": 512,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "sliding_window": 128,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1024,
            "num_hash_layers": 2,
            "num_nextn_predict_layers": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "swiglu_limit": 10.0,
            "hc_mult": 4,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
            "compress_rope_theta": 160000,
            "expert_dtype": "fp4",
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 512,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            },
        },
    ),
    "ernie 4.5 moe": (
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            **DRAFTS,
            "moe_num_experts": 16,
            "moe_k": 4,
            "moe_intermediate_size": 512,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 7,
            "moe_layer_interval": 1,
            "use_bias": False,
            "head_dim": None,
        },
    ),
    "exaone 4": (
        "Exaone4ForCausalLM",
        "exaone4",
        {**DRAFTS, **WINDOWS, "sliding_window_pattern": "LLLG"},
    ),
    "exaone moe": ("ExaoneMoEForCausalLM", "exaone_moe", EXAONE_MOE),
    "exaone moe by its other name": ("ExaoneMoeForCausalLM", "exaone_moe", EXAONE_MOE),
    "glm 4": ("Glm4ForCausalLM", "glm4", {**DRAFTS, "attention_bias": True}),
    "mimo": ("MiMoForCausalLM", "mimo", {**DRAFTS, "head_dim": None}),
    "mimo 2": ("MiMoV2ForCausalLM", "mimo_v2_flash", MIMO_2),
    "mimo 2 flash": ("MiMoV2FlashForCausalLM", "mimo_v2_flash", MIMO_2),
    "falcon h1": ("FalconH1ForCausalLM", "falcon_h1", FALCON_H1),
    "falcon h1 of 2 groups": (
        "FalconH1ForCausalLM",
        "falcon_h1",
        {**FALCON_H1, "mamba_n_groups": 2, "mamba_rms_norm": True},
    ),
    "falcon mamba": (
        "FalconMambaForCausalLM",
        "falcon_mamba",
        {**MAMBA1, "mixer_rms_eps": 1e-6},
    ),
    "gemma 3n": (
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {
            "num_hidden_layers": 10,
            "intermediate_size": [2816] * 10,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
            "num_kv_shared_layers": 5,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 32000,
            "altup_num_inputs": 4,
            "laurel_rank": 64,
            "sliding_window": 128,
            "tie_word_embeddings": True,
            "activation_sparsity_pattern": [0.0] * 10,
        },
    ),
    "glm 4 moe": (
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **{key: value for key, value in DEEPSEEK.items() if key not in LATENT},
            "head_dim": 64,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "glm 4 moe lite": ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", DEEPSEEK),
    "glm 5": (
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {**SPARSE, "index_topk_freq": 4, "index_skip_topk_offset": 3},
    ),
    "granite 4": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **GRANITE,
            **MAMBA2,
            "mamba_n_heads": 32,
            "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
            "position_embedding_type": "nope",
            "attention_bias": False,
        },
    ),
    "granite moe": (
        "GraniteMoeForCausalLM",
        "granitemoe",
        {**GRANITE, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
    "granite moe shared": (
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {
            **GRANITE,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "shared_intermediate_size": 512,
        },
    ),
    "granite moe with windows": (
        "GraniteMoeSWAForCausalLM",
        "granitemoe_swa",
        {**GRANITE, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
    "cohere moe": (
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 512,
            "num_shared_experts": 2,
            "first_k_dense_replace": 2,
            "prefix_dense_intermediate_size": 3072,
            "sliding_window": 128,
            "tie_word_embeddings": None,
            "rms_norm_eps": None,
        },
    ),
    "olmo hybrid": (
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        {
            "head_dim": None,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "pangu ultra": (
        "PanguUltraMoEForCausalLM",
        LLAMA,
        {**DEEPSEEK, "sandwich_norm": True, "router_enable_expert_bias": True},
    ),
    "param 2": (
        "Param2MoEForCausalLM",
        "param2moe",
        {
            **BAILING,
            "use_qk_norm": True,
            "num_shared_experts": 2,
            "moe_shared_expert_intermediate_size": 1024,
            "rope_scaling": None,
        },
    ),
    "hy 3": (
        "HYV3ForCausalLM",
        "hy_v3",
        {
            **DRAFTS,
            **EXPERTS,
            "expert_hidden_dim": 512,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "qk_norm": True,
            "route_norm": True,
            "enable_moe_fp32_combine": False,
            "moe_router_use_sigmoid": True,
            "moe_router_enable_expert_bias": True,
        },
    ),
    "kimi k3": (
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            **KIMI,
            "num_shared_experts": 2,
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 512,
            "latent_moe_use_norm": True,
            "attn_res_block_size": 4,
            "linear_attn_config": {
                **KIMI_LAYERS,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
        },
    ),
    "kimi linear": (
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            **DRAFTS,
            **KIMI,
            "q_lora_rank": None,
            "num_shared_experts": 1,
            "linear_attn_config": KIMI_LAYERS,
        },
    ),
    "laguna": (
        "LagunaForCausalLM",
        "laguna",
        {
            **EXPERTS,
            **WINDOWS,
            "shared_expert_intermediate_size": 512,
            "mlp_layer_types": ["dense"] + ["sparse"] * 7,
            "gating": True,
            "attention_bias": False,
            "moe_routed_scaling_factor": 1.0,
            "moe_apply_router_weight_on_input": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "lfm 2 moe": (
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            **EXPERTS,
            "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"],
            "conv_L_cache": 3,
            "conv_bias": False,
            "num_dense_layers": 2,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "norm_eps": 1e-5,
            "head_dim": None,
            "tie_word_embeddings": True,
        },
    ),
    "longcat": ("LongcatFlashForCausalLM", "longcat_flash", LONGCAT),
    "loop coder": (
        "IQuestLoopCoderForCausalLM",
        LLAMA,
        {"head_dim": None, "loop_num": 2, "loop_window_size": 64},
    ),
    "zamba 2": (
        "Zamba2ForCausalLM",
        "zamba2",
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "num_hidden_layers": 9,
            "layers_block_type": ["mamba", "hybrid", "mamba"] * 3,
            "num_mem_blocks": 2,
            "mamba_d_state": 64,
            "n_mamba_heads": 16,
            "mamba_ngroups": 2,
            "adapter_rank": 64,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        "mamba",
        {**MAMBA1, "tie_word_embeddings": True},
    ),
    "minicpm 3": (
        "MiniCPM3ForCausalLM",
        "minicpm3",
        {**LATENT, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "num_experts": 0},
    ),
    "minimax m3": (
        "MiniMaxM3SparseForCausalLM",
        "minimax_m3_text",
        {
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 512,
            "dense_intermediate_size": 2816,
            "head_dim": 128,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "moe_layer_freq": [0] + [1] * 7,
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.0,
            "swiglu_alpha": 1.702,
            "swiglu_beta": 1.0,
            "swiglu_limit": 7.0,
            "rotary_dim": 64,
            "partial_rotary_factor": 0.5,
            "use_gemma_norm": True,
            "qk_norm_type": "per_head",
            "hidden_act": "swigluoai",
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": 128,
                "sparse_num_index_heads": 4,
                "sparse_topk_blocks": 16,
                "sparse_block_size": 128,
                "sparse_attention_freq": [0] + [1] * 7,
                "sparse_disable_index_value": [0] + [1] * 7,
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 1,
            },
        },
    ),
    "nemotron 3": (
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **GROUPED,
            "hybrid_override_pattern": "MEM*E-ME",
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "moe_latent_size": 512,
            "moe_shared_expert_intermediate_size": 768,
            "n_shared_experts": 1,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
            "mamba_ssm_cache_dtype": "float32",
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        "olmoe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 512,
            "head_dim": None,
            "norm_topk_prob": False,
        },
    ),
    "qwen 3 next": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**DELTA_NET, "decoder_sparse_step": 1, "full_attention_interval": 4},
    ),
    "qwen 3.5": (
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        {
            **DELTA_NET,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
        },
    ),
    "sarvam": (
        "SarvamMLAForCausalLM",
        LLAMA,
        {**DEEPSEEK, "head_dim": 64, "num_experts": 16, "num_shared_experts": 1},
    ),
    "step 3": (
        "Step3TextForCausalLM",
        "step3_text",
        {
            **STEP,
            "share_q_dim": 512,
            "max_position_embedding": 8192,
            "moe_layers_enum": "2,3,4,5,6,7",
            "num_key_value_heads": None,
        },
    ),
    "bert of tokens": ("BertForTokenClassification", "bert", ENCODER),
    "bert of words": ("BertForMaskedLM", "bert", ENCODER),
    "splade": ("BertSpladeSparseEmbeddingModel", "bert", ENCODER),
    "roberta of words": ("RobertaForMaskedLM", "roberta", ROBERTA),
    "roberta of tokens": ("RobertaForTokenClassification", "roberta", ROBERTA),
    "xlm roberta of tokens": ("XLMRobertaForTokenClassification", "xlm-roberta", ROBERTA),
    "bge m3": (
        "BgeM3EmbeddingModel",
        "xlm-roberta",
        {**ROBERTA, "bos_token_id": 0, "eos_token_id": 2},
    ),
    "modern bert of tokens": ("ModernBertForTokenClassification", "modernbert", MODERN),
    "clip": (
        "CLIPModel",
        "clip",
        {**TWO_TOWERS, "projection_dim": 384, "text_config": READ},
    ),
    "siglip": ("SiglipModel", "siglip", {**TWO_TOWERS, "text_config": READ}),
    "gemma 2 embeds": (
        "Gemma2Model",
        "gemma2",
        {"sliding_window": 128, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
    ),
    "gemma 3 embeds": (
        "Gemma3TextModel",
        "gemma3_text",
        {
            **WINDOWS,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": True,
        },
    ),
    "llama embeds": ("LlamaBidirectionalModel", LLAMA, {"pooling": "avg"}),
    "llama ranks": (
        "LlamaBidirectionalForSequenceClassification",
        LLAMA,
        {"pooling": "avg", "num_labels": 1},
    ),
    "gpt 2 classifies": (
        "GPT2ForSequenceClassification",
        "gpt2",
        {
            **dict.fromkeys(COMMON),
            "vocab_size": 32000,
            "n_embd": 1024,
            "n_head": 16,
            "n_layer": 8,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": True,
            "num_labels": 3,
        },
    ),
    "jamba classifies": (
        "JambaForSequenceClassification",
        "jamba",
        {
            "head_dim": None,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 64,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "num_labels": 3,
        },
    ),
    "qwen 2 rewards": ("Qwen2ForRewardModel", "qwen2", {"head_dim": None}),
    "qwen 2 rewards steps": ("Qwen2ForProcessRewardModel", "qwen2", {"head_dim": None}),
    "internlm 2 rewards": (
        "InternLM2ForRewardModel",
        "internlm2",
        {"head_dim": None, "bias": False},
    ),
    "jina ranks": ("JinaForRanking", "qwen3", {"embedding_size": 384}),
    "jina 5": ("JinaEmbeddingsV5Model", "qwen3", {}),
    "jina 5 as an encoder": ("JinaEmbeddingsV5Model", LLAMA, {"is_decoder": False}),
    "voyage": ("VoyageQwen3BidirectionalEmbedModel", "qwen3", {"num_labels": 768}),
    "colpali": (
        "ColPaliForRetrieval",
        "paligemma",
        {
            **dict.fromkeys(COMMON),
            "torch_dtype": "bfloat16",
            "embedding_dim": 128,
            "hidden_size": 1024,
            "projection_dim": 1024,
            "text_config": {**COMMON, "model_type": "gemma", "tie_word_embeddings": True},
            "vision_config": {**SEEN, "model_type": "siglip_vision_model", "projection_dim": 1024},
        },
    ),
    "jina vl ranks": (
        "JinaVLForRanking",
        "qwen2_vl",
        {
            "head_dim": None,
            "num_labels": 1,
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "mrope", "mrope_section": [12, 10, 10]},
            "vision_config": {
                "model_type": "qwen2_vl",
                "depth": 4,
                "embed_dim": 512,
                "num_heads": 8,
                "hidden_size": 1024,
                "mlp_ratio": 4,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "in_chans": 3,
            },
        },
    ),
    "step 3.5": (
        "Step3p5ForCausalLM",
        "step3p5",
        {
            **DRAFTS,
            **STEP,
            **WINDOWS,
            "num_attention_groups": 8,
            "moe_layers_enum": "3,4,5,6,7",
            "max_seq_len": 8192,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 32,
                "num_attention_groups": 8,
                "head_dim": 64,
            },
            "use_head_wise_attn_gate": True,
            "use_moe_router_bias": True,
            "moe_router_scaling_factor": 3.0,
            "need_fp32_gate": True,
            "swiglu_limits": [0] * 8,
            "swiglu_limits_shared": [0] * 8,
            "moe_router_activation": "sigmoid",
        },
    ),
}


def config_of(architecture: str, model_type: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json; a key that is None in `own` is not in it."""
    config = COMMON | own | {"architectures": [architecture], "model_type": model_type}
    kept = {"q_lora_rank"}
    return {key: value for key, value in config.items() if value is not None or key in kept}


def main() -> None:
    """Build every model, and write the record."""
    torch.set_num_threads(1)
    models_oracle.on_hopper()
    models_oracle.OWN_CONFIGS["minimax_m3_text"] = "PretrainedConfig"
    models_oracle.OWN_CONFIGS["param2moe"] = "PretrainedConfig"
    # vLLM comes after what it shall find. This class speaks to a GPU's kernels, and has none here.
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

    olmo_gdn_linear_attn.set_triton_allocator = lambda _: None
    names = set(sys.argv[1:])
    found: dict[str, Any] = json.loads(RECORD.read_text()) if names else {}
    for name, model in MODELS.items():
        if names and name not in names:
            continue
        print(name, flush=True)
        config = config_of(*model)
        record = models_oracle.record({"config": json.loads(json.dumps(config))})
        if record["tp"]:
            found[name] = {"config": config, **record}
    text = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(record)}" for name, record in sorted(found.items())
    )
    RECORD.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()

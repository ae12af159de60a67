"""
Describe the tower of each multimodal family: its weights, and a note if it is estimated. Pure.

By default (`--mm-encoder-tp-mode weights`), TP divides the matrices of a tower like those of the
decoder. Source: the classes in vLLM's model_executor/models, 0.19 to 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpufleet.sizing.architectures.building_blocks import vector
from gpufleet.sizing.architectures.components import Split, Weight
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.tower_parts import (
    TowerLayers,
    Weights,
    clip,
    column_parallel,
    conformer,
    layer_norm,
    loaded_layers,
    patch_inputs,
    pixtral,
    plain_torch,
    replicated_linear,
    row_parallel,
    siglip,
    table,
    vision_fields,
)

Tower = Callable[[Fields, Fields], tuple[Weights, str]]
"""
Function that returns a tower's weights and a note if they are estimated ("" if not), from the whole
config and its text part.
"""


def qwen2_vl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = vision_fields(fields)
    width, heads = seen.whole("embed_dim", default=1280), seen.whole("num_heads", default=16)
    out = seen.whole("hidden_size", default=text.whole("hidden_size"))
    merged = width * seen.whole("spatial_merge_size", default=2) ** 2
    block = TowerLayers(
        "visual.blocks.0.",
        seen.whole("depth", default=32),
        width,
        heads,
        int(width * seen.number("mlp_ratio", default=4)),
        qkv=("attn.qkv",),
        out="attn.proj",
        norms=("norm1", "norm2"),
    )
    return (
        table("visual.patch_embed.proj", width, patch_inputs(seen, temporal=2)),
        *block.weights(),
        *layer_norm("visual.merger.ln_q", width),
        *column_parallel("visual.merger.mlp.0", merged, merged),
        *row_parallel("visual.merger.mlp.2", out, merged),
    ), ""


def qwen2_5_vl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = vision_fields(fields)
    width, heads = seen.whole("hidden_size", default=1280), seen.whole("num_heads", default=16)
    out = seen.whole("out_hidden_size", default=text.whole("hidden_size"))
    merged = width * seen.whole("spatial_merge_size", default=2) ** 2
    block = TowerLayers(
        "visual.blocks.0.",
        seen.whole("depth", default=32),
        width,
        heads,
        seen.whole("intermediate_size", default=3420),
        qkv=("attn.qkv",),
        out="attn.proj",
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        norms=("norm1", "norm2"),
        norm_bias=False,
    )
    return (
        table("visual.patch_embed.proj", width, patch_inputs(seen, temporal=2)),
        *block.weights(),
        vector("visual.merger.ln_q", width),
        *column_parallel("visual.merger.mlp.0", merged, merged),
        *row_parallel("visual.merger.mlp.2", out, merged),
    ), ""


def qwen3_vl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = vision_fields(fields)
    width, heads = seen.whole("hidden_size", default=1152), seen.whole("num_heads", default=16)
    out = seen.whole("out_hidden_size", default=text.whole("hidden_size"))
    merged = width * seen.whole("spatial_merge_size", default=2) ** 2
    stacked = len(seen.wholes("deepstack_visual_indexes"))
    block = TowerLayers(
        "visual.blocks.0.",
        seen.whole("depth", default=27),
        width,
        heads,
        seen.whole("intermediate_size", default=4304),
        qkv=("attn.qkv",),
        out="attn.proj",
        mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
        norms=("norm1", "norm2"),
    )
    further = tuple(
        replace(weight, count=stacked)
        for weight in (
            *layer_norm("visual.deepstack_merger_list.0.norm", merged),
            *column_parallel("visual.deepstack_merger_list.0.linear_fc1", merged, merged),
            *row_parallel("visual.deepstack_merger_list.0.linear_fc2", out, merged),
        )
        if stacked
    )
    return (
        table("visual.patch_embed.proj", width, patch_inputs(seen, patch=16, temporal=2)),
        vector("visual.patch_embed.proj.bias", width),
        table("visual.pos_embed", seen.whole("num_position_embeddings", default=2304), width),
        *block.weights(),
        *layer_norm("visual.merger.norm", width),
        *column_parallel("visual.merger.linear_fc1", merged, merged),
        *row_parallel("visual.merger.linear_fc2", out, merged),
        *further,
    ), ""


def glm4v(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = vision_fields(fields)
    width, heads = seen.whole("hidden_size", default=1536), seen.whole("num_heads", default=12)
    out = seen.whole("out_hidden_size", default=text.whole("hidden_size"))
    inner = seen.whole("intermediate_size", default=13696)
    merge = seen.whole("spatial_merge_size", default=2)
    patches = (seen.whole("image_size", default=336) // seen.whole("patch_size", default=14)) ** 2
    block = TowerLayers(
        "visual.blocks.0.",
        seen.whole("depth", default=24),
        width,
        heads,
        out,
        qkv=("attn.qkv",),
        out="attn.proj",
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        norms=("norm1", "norm2"),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        norm_bias=False,
    )
    return (
        table("visual.patch_embed.proj", width, patch_inputs(seen, temporal=2)),
        vector("visual.patch_embed.proj.bias", width),
        table("visual.embeddings.position_embedding", patches, width),
        vector("visual.post_conv_layernorm", width),
        *block.weights(),
        vector("visual.post_layernorm", width),
        table("visual.downsample", out, width * merge * merge),
        vector("visual.downsample.bias", out),
        *column_parallel("visual.merger.proj", out, out, bias=False),
        *layer_norm("visual.merger.post_projection_norm", out),
        *column_parallel("visual.merger.gate_proj", inner, out, bias=False),
        *column_parallel("visual.merger.up_proj", inner, out, bias=False),
        *row_parallel("visual.merger.down_proj", out, inner, bias=False),
    ), ""


def llava(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Return the tower of LLaVA 1.5, NeXT or OneVision.

    The tower is CLIP, SigLIP or Pixtral, and two linear layers.
    """
    seen = vision_fields(fields)
    kind = seen.text("model_type")
    width = seen.whole("hidden_size", default=1024)
    if "siglip" in kind:
        tower = siglip(fields, layers=loaded_layers(fields), normed=False)
    elif kind == "pixtral":
        tower = pixtral(fields)
    elif "clip" in kind:
        tower = clip(fields, layers=loaded_layers(fields))
    else:
        return estimated_tower(fields, text)
    out = text.whole("hidden_size", default=4096)
    bias = fields.flag("multimodal_projector_bias", default=True)
    projector = (
        *column_parallel("multi_modal_projector.linear_1", out, width, bias=bias),
        *row_parallel("multi_modal_projector.linear_2", out, out, bias=bias),
    )
    if fields.name == "LlavaOnevisionForConditionalGeneration":
        projector = plain_torch(projector)
    if fields.name != "LlavaForConditionalGeneration":
        projector = (*projector, vector("image_newline", out))
    return (*tower, *projector), ""


def mistral3(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Return Pixtral's tower, which merges patches before its two linear layers."""
    width = vision_fields(fields).whole("hidden_size", default=1024)
    out = text.whole("hidden_size")
    merge = fields.whole("spatial_merge_size", default=2)
    bias = fields.flag("multimodal_projector_bias")
    return (
        *pixtral(fields),
        vector("multi_modal_projector.norm", width),
        *replicated_linear(
            "multi_modal_projector.patch_merger.merging_layer",
            width,
            width * merge * merge,
            bias=False,
        ),
        *column_parallel("multi_modal_projector.linear_1", out, width, bias=bias),
        *row_parallel("multi_modal_projector.linear_2", out, out, bias=bias),
    ), ""


def gemma3(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = vision_fields(fields).whole("hidden_size")
    out = text.whole("hidden_size")
    return (
        *siglip(fields),
        table("multi_modal_projector.mm_input_projection_weight", width, out),
        vector("multi_modal_projector.mm_soft_emb_norm", width),
    ), ""


def gemma4(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Return Gemma 4's tower. E2B and E4B also have a tower for audio.

    The tower is a class of transformers, which is not divided over ranks.
    """
    seen = fields.section("vision_config")
    weights: Weights = ()
    out = text.whole("hidden_size")
    if seen:
        width = seen.whole("hidden_size", default=768)
        heads = seen.whole("num_attention_heads", default=12)
        head_dim = seen.whole("head_dim", default=64)
        depth = seen.whole("num_hidden_layers", default=16)
        block = TowerLayers(
            "vision_tower.encoder.layers.0.",
            depth,
            width,
            heads,
            seen.whole("intermediate_size", default=3072),
            out="self_attn.o_proj",
            mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
            norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            norm_bias=False,
            width=heads * head_dim,
            divided=False,
        )
        patch = seen.whole("patch_size", default=16)
        positions = seen.whole("position_embedding_size", default=10240)
        weights = (
            *plain_torch(
                replicated_linear(
                    "vision_tower.patch_embedder.input_proj", width, 3 * patch**2, bias=False
                )
            ),
            table("vision_tower.patch_embedder.position_embedding_table", 2 * positions, width),
            *plain_torch(block.weights()),
            replace(
                vector("vision_tower.encoder.layers.0.self_attn.q_norm", 2 * head_dim), count=depth
            ),
            *plain_torch(
                replicated_linear("embed_vision.embedding_projection", out, width, bias=False)
            ),
        )
        if seen.flag("standardize"):
            weights = (*weights, vector("vision_tower.std", 2 * width))
    heard = fields.section("audio_config")
    if heard is None:
        return weights, ""
    return (*weights, *plain_torch(conformer(heard, out))), ""


def internvl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = vision_fields(fields)
    width = seen.whole("hidden_size")
    image = seen.value("image_size")
    patch = seen.value("patch_size")
    image, patch = (each[0] if isinstance(each, list) else each for each in (image, patch))
    depth = seen.whole("num_hidden_layers")
    taken = fields.value("select_layer", "vision_feature_layer")
    if isinstance(taken, int):
        depth = depth + taken + 1 if taken < 0 else taken + 1
    prefix = "vision_model."
    block = TowerLayers(
        f"{prefix}encoder.layers.0.",
        depth,
        width,
        seen.whole("num_attention_heads"),
        seen.whole("intermediate_size"),
        qkv=("attn.qkv",),
        out="attn.proj",
        norms=("norm1", "norm2"),
        qkv_bias=seen.flag("qkv_bias", "attention_bias"),
        norm_bias=seen.text("norm_type", default="layer_norm") == "layer_norm",
    )
    further = [replace(vector(f"{prefix}encoder.layers.0.ls", 2 * width), count=depth)]
    if seen.flag("qk_normalization", "use_qk_norm"):
        further.append(
            replace(vector(f"{prefix}encoder.layers.0.attn.qk_norm", 2 * width), count=depth)
        )
    layers = block.weights()
    if "Conditional" in fields.name:  # InternSdpaAttention of interns1_vit.py is not divided
        layers = tuple(
            replace(weight, split=Split.NONE) if ".attn." in weight.name else weight
            for weight in layers
        )
    merged = int(width / fields.number("downsample_ratio", default=0.5) ** 2)
    out = text.whole("hidden_size")
    return (
        vector(f"{prefix}embeddings.class_embedding", width),
        table(f"{prefix}embeddings.patch_embedding", width, 3 * int(patch or 14) ** 2),
        vector(f"{prefix}embeddings.patch_embedding.bias", width),
        table(
            f"{prefix}embeddings.position_embedding",
            (int(image or 448) // int(patch or 14)) ** 2 + 1,
            width,
        ),
        *layers,
        *further,
        *layer_norm("mlp1.0", merged),
        *plain_torch(replicated_linear("mlp1.1", out, merged)),
        *plain_torch(replicated_linear("mlp1.3", out, out)),
    ), ""


_LLAMA4_TOWER = {
    "hidden_size": 1408,
    "image_size": 336,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_hidden_layers": 34,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 4096,
}
"""
The config of the tower in both published models. Source: config.json of
Llama-4-Scout-17B-16E-Instruct.
"""


def llama4(fields: Fields, text: Fields) -> tuple[Weights, str]:
    found = fields.config.get("vision_config") or {}
    seen = Fields({**_LLAMA4_TOWER, **found}, fields.name, "vision_config.")
    width, inner = seen.whole("hidden_size"), seen.whole("intermediate_size")
    patches = (seen.whole("image_size") // seen.whole("patch_size")) ** 2 + 1
    projected, out = seen.whole("projector_input_dim"), seen.whole("projector_output_dim")
    prefix = "vision_model."
    block = TowerLayers(
        f"{prefix}model.layers.0.",
        seen.whole("num_hidden_layers"),
        width,
        seen.whole("num_attention_heads"),
        inner,
        out="self_attn.o_proj",
        norms=("input_layernorm", "post_attention_layernorm"),
    )
    return (
        *column_parallel(f"{prefix}patch_embedding.linear", width, patch_inputs(seen), bias=False),
        vector(f"{prefix}class_embedding", width),
        table(f"{prefix}positional_embedding_vlm", patches, width),
        *layer_norm(f"{prefix}layernorm_pre", width),
        *layer_norm(f"{prefix}layernorm_post", width),
        *block.weights(),
        *column_parallel(f"{prefix}vision_adapter.mlp.fc1", projected, inner, bias=False),
        *row_parallel(f"{prefix}vision_adapter.mlp.fc2", out, projected, bias=False),
        *column_parallel(
            "multi_modal_projector.linear_1",
            text.whole("hidden_size"),
            seen.whole("vision_output_dim"),
            bias=False,
        ),
    ), ""


def moonvit(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Return the tower of Kimi VL, K2.5 and K3."""
    seen = vision_fields(fields)
    width = seen.whole("vt_hidden_size", "hidden_size", default=1152)
    heads = seen.whole("vt_num_attention_heads", "num_attention_heads", default=16)
    bias = seen.flag("attn_bias", default=True)
    second = seen.flag("linear_bias", default=True)
    block = TowerLayers(
        "vision_tower.encoder.blocks.0.",
        seen.whole("vt_num_hidden_layers", "num_hidden_layers", default=27),
        width,
        heads,
        seen.whole("vt_intermediate_size", "intermediate_size", default=4304),
        qkv=("wqkv",),
        out="wo",
        mlp=("mlp.fc0", "mlp.fc1"),
        norms=("norm0", "norm1"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=second,
        norm_bias=seen.text("norm_type") != "rmsnorm",
        width=seen.whole("qkv_hidden_size", default=width),
    )
    merge = seen.wholes("merge_kernel_size") or (2, 2)
    merged = width * merge[0] * merge[1]
    rows = seen.whole("init_pos_emb_height", default=64)
    positions = rows * seen.whole("init_pos_emb_width", default=64)
    return (
        table("vision_tower.patch_embed.proj", width, patch_inputs(seen)),
        vector("vision_tower.patch_embed.proj.bias", width),
        table("vision_tower.patch_embed.pos_emb", positions, width),
        *block.weights(),
        *layer_norm("vision_tower.encoder.final_layernorm", width),
        *layer_norm("mm_projector.pre_norm", width),
        *replicated_linear("mm_projector.linear_1", merged, merged),
        *replicated_linear("mm_projector.linear_2", text.whole("hidden_size"), merged),
    ), ""


def cohere2_vision(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = vision_fields(fields).whole("hidden_size")
    merged = width * fields.whole("downsample_factor", default=2) ** 2
    inner = fields.whole("alignment_intermediate_size", default=36864)
    return (
        *siglip(fields),
        *column_parallel("multi_modal_projector.linear_1", inner, merged),
        *row_parallel("multi_modal_projector.linear_2", text.whole("hidden_size"), inner // 2),
    ), ""


def paligemma(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = vision_fields(fields).whole("hidden_size")
    out = text.whole("hidden_size", default=2048)
    return (
        *siglip(fields),
        *plain_torch(replicated_linear("multi_modal_projector.linear", out, width)),
    ), ""


def nemotron_vl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Return the tower of Nemotron's embedder: SigLIP, and two linear layers over joined patches.

    Source: LlamaNemotronVLModel.
    """
    width, out = vision_fields(fields).whole("hidden_size"), text.whole("hidden_size")
    joined = width * int(1 / (fields.number("downsample_ratio", default=0.5) or 0.5)) ** 2
    projector = (
        *layer_norm("mlp1.0", joined),
        *replicated_linear("mlp1.1", out, joined),
        *replicated_linear("mlp1.3", out, out),
    )
    return (*siglip(fields), *plain_torch(projector)), ""


def idefics3(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Return the tower of Idefics 3 or SmolVLM: SigLIP, and one linear layer over merged patches.
    """
    width = vision_fields(fields).whole("hidden_size", default=1152)
    merged = width * fields.whole("scale_factor", default=2) ** 2
    out = text.whole("hidden_size")
    return (
        *siglip(fields, prefix="model.vision_model."),
        *replicated_linear("model.connector.modality_projection.proj", out, merged, bias=False),
    ), ""


def lfm2(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = vision_fields(fields).whole("hidden_size")
    merged = width * fields.whole("downsample_factor", default=2) ** 2
    inner = fields.whole("projector_hidden_size", default=2560)
    bias = fields.flag("projector_bias", default=True)
    out = text.whole("hidden_size")
    normed = layer_norm("multi_modal_projector.layer_norm", merged)
    return (
        *siglip(fields, layers=_tower_layers_or_all(fields)),
        *(normed if fields.flag("projector_use_layernorm", default=True) else ()),
        *replicated_linear("multi_modal_projector.linear_1", inner, merged, bias=bias),
        *replicated_linear("multi_modal_projector.linear_2", out, inner, bias=bias),
    ), ""


def _tower_layers_or_all(fields: Fields) -> int | None:
    return loaded_layers(fields) if fields.value("vision_feature_layer") is not None else None


def minicpm_v(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Return the tower of MiniCPM-V 2.5 to 4.5: SigLIP without its last layer, and a resampler.

    The resampler has one attention layer.
    """
    depth = vision_fields(fields).whole("num_hidden_layers", default=27)
    width = vision_fields(fields).whole("hidden_size", default=1152)
    out = text.whole("hidden_size")
    dropped = 1 if fields.flag("drop_vision_last_layer", default=True) else 0
    queries = fields.whole("query_num", default=64)
    seen = {"image_size": 980, "patch_size": 14, **fields.config["vision_config"]}
    whole = Fields({**fields.config, "vision_config": seen}, fields.name)
    return (
        *siglip(whole, prefix="vpm.", layers=depth - dropped),
        table("resampler.query", queries, out),
        *replicated_linear("resampler.kv_proj", out, width, bias=False),
        *replicated_linear("resampler.attn.in_proj", 3 * out, out),
        *replicated_linear("resampler.attn.out_proj", out, out),
        vector("resampler.norms", 6 * out),
        table("resampler.proj", out, out),
    ), ""


_CLIP_336 = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
"""
The config of CLIP ViT-L/14 at 336 pixels, which Phi-3's class always uses
(CLIP_VIT_LARGE_PATCH14_336).
"""


def phi3_v(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Return the tower of Phi-3 or 3.5 Vision: CLIP without its last layer, and two linear layers.

    The first linear layer combines four patches.
    """
    out = text.whole("hidden_size")
    width = _CLIP_336["hidden_size"]
    whole = Fields({**fields.config, "vision_config": _CLIP_336}, fields.name)
    return (
        *clip(whole, layers=23),
        vector("model.vision_embed_tokens.glb_GN", 4 * width),
        vector("model.vision_embed_tokens.sub_GN", 4 * width),
        *plain_torch(
            replicated_linear("model.vision_embed_tokens.img_projection.0", out, 4 * width)
        ),
        *plain_torch(replicated_linear("model.vision_embed_tokens.img_projection.2", out, out)),
    ), ""


_GATED = {"silu", "swish", "swiglu", "silu_and_mul"}
"""Activations of towers with a gated MLP: AIMv2, Pixtral, Qwen 2.5 VL, dots.vit."""


def estimated_tower(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Estimate a tower from its config, as an ordinary transformer and two linear layers after it.
    """
    weights: list[Weight] = []
    out = text.whole("hidden_size", default=0)
    towers = ("vision_config", "audio_config", "vision_tower_config", "encoder_config")
    for key in towers:
        seen = fields.section(key)
        if seen is None:
            continue
        width = seen.whole("hidden_size", "embed_dim", "d_model", "width", default=0)
        depth = seen.whole("num_hidden_layers", "depth", "encoder_layers", "layers", default=0)
        if not width or not depth:
            continue
        heads = seen.whole(
            "num_attention_heads", "num_heads", "encoder_attention_heads", "heads", default=16
        )
        inner = seen.whole("intermediate_size", "encoder_ffn_dim", default=4 * width)
        gated = seen.text("hidden_act", "activation_function") in _GATED
        mlp = ("mlp.gate_proj", "mlp.fc1", "mlp.fc2") if gated else ("mlp.fc1", "mlp.fc2")
        layers = TowerLayers(f"{key}.layers.0.", depth, width, heads, inner, mlp=mlp)
        weights += layers.weights()
        weights += column_parallel(f"{key}.projector.0", out, width) + row_parallel(
            f"{key}.projector.1", out, out
        )
    note = (
        f"the size of the tower beside the text part of {fields.name} is estimated from the "
        "config, as for an ordinary transformer"
        if weights
        else f"the parts of {fields.name} other than the text part are not counted"
    )
    return tuple(weights), note


def whisper_tower(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """
    Return the tower of Qwen2-Audio, Qwen2.5-Omni or Voxtral: Whisper's encoder and other parts.
    """
    heard = fields.section("audio_config")
    weights: list[Weight] = []
    out = text.whole("hidden_size")
    if heard:
        width = heard.whole("d_model", "hidden_size", default=1280)
        bins = heard.whole("num_mel_bins", default=128)
        positions = heard.whole("max_source_positions", "max_position_embeddings", default=1500)
        layers = TowerLayers(
            "audio_tower.layers.0.",
            heard.whole("encoder_layers", "num_hidden_layers", default=32),
            width,
            heard.whole("encoder_attention_heads", "num_attention_heads", default=20),
            heard.whole("encoder_ffn_dim", "intermediate_size", default=4 * width),
            mlp=("fc1", "fc2"),
        ).weights()
        if "Qwen2" in fields.name:  # the encoder is a class of transformers, which is not divided
            layers = tuple(replace(weight, split=Split.NONE) for weight in layers)
        weights += layers
        weights += [
            table("audio_tower.conv1", width, bins * 3),
            table("audio_tower.conv2", width, width * 3),
            table("audio_tower.embed_positions", positions, width),
            vector("audio_tower.layer_norm", 2 * width),
        ]
        weights += replicated_linear("multi_modal_projector.linear", out, width)
    note = ""
    if fields.section("vision_config"):
        seen, _ = qwen2_5_vl(fields, text) if "2_5Omni" in fields.name else qwen3_vl(fields, text)
        weights += seen
    elif "Qwen2Audio" not in fields.name:
        note = f"the size of the layers between {fields.name}'s tower and text part is estimated"
    return tuple(weights), note

"""
Models that also see or hear: the text part, and the tower beside it.  Pure.

vLLM loads the tower on every pipeline stage, from 0.33 on the first (_mark_tower_model), and
divides its matrices by TP like the decoder's (`--mm-encoder-tp-mode weights`, the default). A tower
that is not known here is estimated from its config as an ordinary transformer, and a note says so.

Source: the classes of the same names in vLLM's model_executor/models, 0.19 to 0.33.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import Architecture, Part, Split, Weight, Where
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.dense import vector

Weights = tuple[Weight, ...]
Tower = Callable[[Fields, Fields], tuple[Weights, str]]
"""(the whole config, its text part) -> the tower's weights, and what of it is not exact."""

_TEXT_KEYS = ("text_config", "llm_config", "language_config", "text_model")

_TEXT_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
    "opt": "OPTForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "step3_text": "Step3TextForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
}
"""The class that vLLM takes for a text part of this `model_type`."""


@dataclass(frozen=True)
class _Block:
    """The layers of a tower, all alike: attention, an MLP, and two norms."""

    prefix: str
    """Of the first layer's names; it stands for all."""
    depth: int
    hidden: int
    heads: int
    intermediate: int
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One name where the checkpoint has them in one weight."""
    out: str = "self_attn.out_proj"
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    """Three names: gate, up, down."""
    norms: tuple[str, ...] = ("layer_norm1", "layer_norm2")
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    k_bias: bool = True
    """Where there is `qkv_bias`."""
    width: int = 0
    """Of all heads together, where it is not the hidden size."""
    divided: bool = True

    def weights(self) -> Weights:
        """Return the weights of all layers, each with how many there are."""
        rows = Split.ROWS if self.divided else Split.NONE
        columns = Split.COLUMNS if self.divided else Split.NONE
        heads = Split.HEADS if self.divided else Split.NONE
        width = self.width or self.hidden
        made: list[Weight] = []

        def matrix(name: str, outputs: int, inputs: int, split: Split) -> None:
            weight = Weight(self.prefix + name, outputs, inputs, split, heads=self.heads)
            made.append(replace(weight, count=self.depth))

        def line(name: str, size: int, split: Split = Split.NONE) -> None:
            weight = vector(self.prefix + name, size, split, heads=self.heads)
            made.append(replace(weight, count=self.depth))

        for place, each in enumerate(self.qkv if len(self.qkv) == 3 else self.qkv * 3):
            matrix(each, width, self.hidden, heads)
            if self.qkv_bias and (self.k_bias or place != 1):
                line(f"{each}.bias", width, heads)
        matrix(self.out, self.hidden, width, columns)
        if self.out_bias:
            line(f"{self.out}.bias", self.hidden)
        for each in self.mlp[:-1]:
            matrix(each, self.intermediate, self.hidden, rows)
            if self.mlp_bias:
                line(f"{each}.bias", self.intermediate, rows)
        matrix(self.mlp[-1], self.hidden, self.intermediate, columns)
        if self.mlp_bias:
            line(f"{self.mlp[-1]}.bias", self.hidden)
        for each in self.norms:
            line(each, self.hidden)
            if self.norm_bias:
                line(f"{each}.bias", self.hidden)
        return tuple(made)


def _table(name: str, rows: int, columns: int) -> Weight:
    """A convolution, learnt positions: on every rank, never quantized."""
    return Weight(name, rows, columns, linear=False)


def _line(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Weights:
    """A linear layer that every rank has."""
    made = (Weight(name, outputs, inputs),)
    return (*made, vector(f"{name}.bias", outputs)) if bias else made


def _column(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Weights:
    made = (Weight(name, outputs, inputs, Split.ROWS),)
    return (*made, vector(f"{name}.bias", outputs, Split.ROWS)) if bias else made


def _row(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Weights:
    made = (Weight(name, outputs, inputs, Split.COLUMNS),)
    return (*made, vector(f"{name}.bias", outputs)) if bias else made


def _normed(name: str, size: int, *, bias: bool = True) -> Weights:
    made = (vector(name, size),)
    return (*made, vector(f"{name}.bias", size)) if bias else made


def _vision(fields: Fields, *keys: str) -> Fields:
    found = fields.below(*keys, "vision_config")
    if found is None:
        raise fields.missing(*keys, "vision_config")
    return found


def _patch(seen: Fields, *, patch: int = 14, temporal: int = 1) -> int:
    """Return the inputs of a patch: its colours, pixels and frames."""
    colours = seen.whole("in_channels", "in_chans", "num_channels", default=3)
    size = seen.whole("patch_size", default=patch)
    return colours * size * size * seen.whole("temporal_patch_size", default=temporal)


def _qwen2_vl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = _vision(fields)
    width, heads = seen.whole("embed_dim", default=1280), seen.whole("num_heads", default=16)
    out = seen.whole("hidden_size", default=text.whole("hidden_size"))
    merged = width * seen.whole("spatial_merge_size", default=2) ** 2
    block = _Block(
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
        _table("visual.patch_embed.proj", width, _patch(seen, temporal=2)),
        *block.weights(),
        *_normed("visual.merger.ln_q", width),
        *_column("visual.merger.mlp.0", merged, merged),
        *_row("visual.merger.mlp.2", out, merged),
    ), ""


def _qwen2_5_vl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = _vision(fields)
    width, heads = seen.whole("hidden_size", default=1280), seen.whole("num_heads", default=16)
    out = seen.whole("out_hidden_size", default=text.whole("hidden_size"))
    merged = width * seen.whole("spatial_merge_size", default=2) ** 2
    block = _Block(
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
        _table("visual.patch_embed.proj", width, _patch(seen, temporal=2)),
        *block.weights(),
        vector("visual.merger.ln_q", width),
        *_column("visual.merger.mlp.0", merged, merged),
        *_row("visual.merger.mlp.2", out, merged),
    ), ""


def _qwen3_vl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = _vision(fields)
    width, heads = seen.whole("hidden_size", default=1152), seen.whole("num_heads", default=16)
    out = seen.whole("out_hidden_size", default=text.whole("hidden_size"))
    merged = width * seen.whole("spatial_merge_size", default=2) ** 2
    stacked = len(seen.wholes("deepstack_visual_indexes"))
    block = _Block(
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
            *_normed("visual.deepstack_merger_list.0.norm", merged),
            *_column("visual.deepstack_merger_list.0.linear_fc1", merged, merged),
            *_row("visual.deepstack_merger_list.0.linear_fc2", out, merged),
        )
        if stacked
    )
    return (
        _table("visual.patch_embed.proj", width, _patch(seen, patch=16, temporal=2)),
        vector("visual.patch_embed.proj.bias", width),
        _table("visual.pos_embed", seen.whole("num_position_embeddings", default=2304), width),
        *block.weights(),
        *_normed("visual.merger.norm", width),
        *_column("visual.merger.linear_fc1", merged, merged),
        *_row("visual.merger.linear_fc2", out, merged),
        *further,
    ), ""


def _glm4v(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = _vision(fields)
    width, heads = seen.whole("hidden_size", default=1536), seen.whole("num_heads", default=12)
    out = seen.whole("out_hidden_size", default=text.whole("hidden_size"))
    inner = seen.whole("intermediate_size", default=13696)
    merge = seen.whole("spatial_merge_size", default=2)
    patches = (seen.whole("image_size", default=336) // seen.whole("patch_size", default=14)) ** 2
    block = _Block(
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
        _table("visual.patch_embed.proj", width, _patch(seen, temporal=2)),
        vector("visual.patch_embed.proj.bias", width),
        _table("visual.embeddings.position_embedding", patches, width),
        vector("visual.post_conv_layernorm", width),
        *block.weights(),
        vector("visual.post_layernorm", width),
        _table("visual.downsample", out, width * merge * merge),
        vector("visual.downsample.bias", out),
        *_column("visual.merger.proj", out, out, bias=False),
        *_normed("visual.merger.post_projection_norm", out),
        *_column("visual.merger.gate_proj", inner, out, bias=False),
        *_column("visual.merger.up_proj", inner, out, bias=False),
        *_row("visual.merger.down_proj", out, inner, bias=False),
    ), ""


def _siglip(
    fields: Fields,
    *,
    prefix: str = "vision_tower.vision_model.",
    layers: int | None = None,
    normed: bool = True,
) -> Weights:
    """SigLIP, and SigLIP 2 with a fixed size; `normed`: with the norm after its last layer."""
    seen = _vision(fields)
    width, heads = seen.whole("hidden_size"), seen.whole("num_attention_heads")
    depth = seen.whole("num_hidden_layers")
    count = depth if layers is None else layers
    if seen.value("num_patches"):
        positions = seen.whole("num_patches")
    else:
        positions = (seen.whole("image_size") // seen.whole("patch_size")) ** 2
    block = _Block(
        f"{prefix}encoder.layers.0.", count, width, heads, seen.whole("intermediate_size")
    )
    return (
        _table(f"{prefix}embeddings.patch_embedding", width, _patch(seen)),
        vector(f"{prefix}embeddings.patch_embedding.bias", width),
        _table(f"{prefix}embeddings.position_embedding", positions, width),
        *block.weights(),
        *(_normed(f"{prefix}post_layernorm", width) if normed and count == depth else ()),
    )


def _clip(fields: Fields, *, layers: int | None = None) -> Weights:
    """CLIP, without the norm after its last layer, which only embedders want."""
    seen = _vision(fields)
    width = seen.whole("hidden_size", default=768)
    depth = seen.whole("num_hidden_layers", default=12)
    count = depth if layers is None else layers
    patches = (seen.whole("image_size", default=224) // seen.whole("patch_size", default=32)) ** 2
    prefix = "vision_tower.vision_model."
    block = _Block(
        f"{prefix}encoder.layers.0.",
        count,
        width,
        seen.whole("num_attention_heads", default=12),
        seen.whole("intermediate_size", default=3072),
    )
    return (
        vector(f"{prefix}embeddings.class_embedding", width),
        _table(f"{prefix}embeddings.patch_embedding", width, _patch(seen, patch=32)),
        _table(f"{prefix}embeddings.position_embedding", patches + 1, width),
        *_normed(f"{prefix}pre_layrnorm", width),
        *block.weights(),
    )


def _pixtral(fields: Fields) -> Weights:
    seen = _vision(fields)
    width = seen.whole("hidden_size", default=1024)
    heads = seen.whole("num_attention_heads", default=16)
    block = _Block(
        "vision_tower.transformer.layers.0.",
        seen.whole("num_hidden_layers", default=24),
        width,
        heads,
        seen.whole("intermediate_size", default=4096),
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.o_proj",
        mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        norms=("attention_norm", "ffn_norm"),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        norm_bias=False,
        width=heads * seen.whole("head_dim", default=width // heads),
    )
    return (
        _table("vision_tower.patch_conv", width, _patch(seen, patch=16)),
        vector("vision_tower.ln_pre", width),
        *block.weights(),
    )


def _tower_layers(fields: Fields) -> int | None:
    """Return how many of the tower's layers are loaded: up to the one whose output is taken."""
    taken = fields.value("vision_feature_layer")
    deepest = max(
        (
            layer if layer >= 0 else _vision(fields).whole("num_hidden_layers", default=12) + layer
            for layer in ([taken] if isinstance(taken, int) else taken or [-2])
        ),
    )
    return deepest + 1 if deepest >= 0 else None


def _llava(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """LLaVA 1.5, NeXT, OneVision: CLIP, SigLIP or Pixtral, and two linear layers."""
    seen = _vision(fields)
    kind = seen.text("model_type")
    width = seen.whole("hidden_size", default=1024)
    if "siglip" in kind:
        tower = _siglip(fields, layers=_tower_layers(fields), normed=False)
    elif kind == "pixtral":
        tower = _pixtral(fields)
    elif "clip" in kind:
        tower = _clip(fields, layers=_tower_layers(fields))
    else:
        return _ordinary(fields, text)
    out = text.whole("hidden_size", default=4096)
    bias = fields.flag("multimodal_projector_bias", default=True)
    projector = (
        *_column("multi_modal_projector.linear_1", out, width, bias=bias),
        *_row("multi_modal_projector.linear_2", out, out, bias=bias),
    )
    if fields.name == "LlavaOnevisionForConditionalGeneration":
        projector = _plain(projector)
    if fields.name != "LlavaForConditionalGeneration":
        projector = (*projector, vector("image_newline", out))
    return (*tower, *projector), ""


def _mistral3(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Pixtral's tower; patches are merged before two linear layers."""
    width = _vision(fields).whole("hidden_size", default=1024)
    out = text.whole("hidden_size")
    merge = fields.whole("spatial_merge_size", default=2)
    bias = fields.flag("multimodal_projector_bias")
    return (
        *_pixtral(fields),
        vector("multi_modal_projector.norm", width),
        *_line(
            "multi_modal_projector.patch_merger.merging_layer",
            width,
            width * merge * merge,
            bias=False,
        ),
        *_column("multi_modal_projector.linear_1", out, width, bias=bias),
        *_row("multi_modal_projector.linear_2", out, out, bias=bias),
    ), ""


def _gemma3(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = _vision(fields).whole("hidden_size")
    out = text.whole("hidden_size")
    return (
        *_siglip(fields),
        _table("multi_modal_projector.mm_input_projection_weight", width, out),
        vector("multi_modal_projector.mm_soft_emb_norm", width),
    ), ""


def _gemma4(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Gemma 4's tower is transformers' own, so every rank has all of it; E2B and E4B also hear."""
    seen = fields.below("vision_config")
    weights: Weights = ()
    out = text.whole("hidden_size")
    if seen:
        width = seen.whole("hidden_size", default=768)
        heads = seen.whole("num_attention_heads", default=12)
        head_dim = seen.whole("head_dim", default=64)
        depth = seen.whole("num_hidden_layers", default=16)
        block = _Block(
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
            *_plain(
                _line("vision_tower.patch_embedder.input_proj", width, 3 * patch**2, bias=False)
            ),
            _table("vision_tower.patch_embedder.position_embedding_table", 2 * positions, width),
            *_plain(block.weights()),
            replace(
                vector("vision_tower.encoder.layers.0.self_attn.q_norm", 2 * head_dim), count=depth
            ),
            *_plain(_line("embed_vision.embedding_projection", out, width, bias=False)),
        )
        if seen.flag("standardize"):
            weights = (*weights, vector("vision_tower.std", 2 * width))
    heard = fields.below("audio_config")
    if heard is None:
        return weights, ""
    return (*weights, *_plain(_conformer(heard, out))), ""


def _conformer(heard: Fields, out: int) -> Weights:
    """Gemma 4's audio tower; source: Gemma4AudioModel in transformers 5.19."""
    width = heard.whole("hidden_size", default=1024)
    depth = heard.whole("num_hidden_layers", default=12)
    head_dim = width // heard.whole("num_attention_heads", default=8)
    kernel = heard.whole("conv_kernel_size", default=5)
    first, second = heard.wholes("subsampling_conv_channels") or (128, 32)
    projected = heard.whole("output_proj_dims", default=1536)
    prefix = "audio_tower.layers.0."
    layer = (
        *(Weight(f"{prefix}feed_forward{n}.ffw_layer_1", 4 * width, width) for n in (1, 2)),
        *(Weight(f"{prefix}feed_forward{n}.ffw_layer_2", width, 4 * width) for n in (1, 2)),
        *(Weight(f"{prefix}self_attn.{name}_proj", width, width) for name in "qkv"),
        Weight(f"{prefix}self_attn.post", width, width),
        Weight(f"{prefix}self_attn.relative_k_proj", width, width),
        vector(f"{prefix}self_attn.per_dim_scale", head_dim),
        Weight(f"{prefix}lconv1d.linear_start", 2 * width, width),
        _table(f"{prefix}lconv1d.depthwise_conv1d", width, kernel),
        Weight(f"{prefix}lconv1d.linear_end", width, width),
        vector(f"{prefix}norms", 9 * width),
    )
    return (
        *(replace(weight, count=depth) for weight in layer),
        _table("audio_tower.subsample_conv_projection.layer0", first, 9),
        _table("audio_tower.subsample_conv_projection.layer1", second, first * 9),
        vector("audio_tower.subsample_conv_projection.norms", first + second),
        *_line(
            "audio_tower.subsample_conv_projection.input_proj_linear",
            width,
            second * 32,
            bias=False,
        ),
        *_line("audio_tower.output_proj", projected, width),
        *_line("embed_audio.embedding_projection", out, projected, bias=False),
    )


def _plain(weights: Weights) -> Weights:
    """Return weights of PyTorch's own layers, which vLLM neither divides nor quantizes."""
    return tuple(replace(weight, linear=False, split=Split.NONE) for weight in weights)


def _internvl(fields: Fields, text: Fields) -> tuple[Weights, str]:
    seen = _vision(fields)
    width = seen.whole("hidden_size")
    image = seen.value("image_size")
    patch = seen.value("patch_size")
    image, patch = (each[0] if isinstance(each, list) else each for each in (image, patch))
    depth = seen.whole("num_hidden_layers")
    taken = fields.value("select_layer", "vision_feature_layer")
    if isinstance(taken, int):
        depth = depth + taken + 1 if taken < 0 else taken + 1
    prefix = "vision_model."
    block = _Block(
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
        _table(f"{prefix}embeddings.patch_embedding", width, 3 * int(patch or 14) ** 2),
        vector(f"{prefix}embeddings.patch_embedding.bias", width),
        _table(
            f"{prefix}embeddings.position_embedding",
            (int(image or 448) // int(patch or 14)) ** 2 + 1,
            width,
        ),
        *layers,
        *further,
        *_normed("mlp1.0", merged),
        *_plain(_line("mlp1.1", out, merged)),
        *_plain(_line("mlp1.3", out, out)),
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
"""Of both published models; source: config.json of Llama-4-Scout-17B-16E-Instruct."""


def _llama4(fields: Fields, text: Fields) -> tuple[Weights, str]:
    found = fields.config.get("vision_config") or {}
    seen = Fields({**_LLAMA4_TOWER, **found}, fields.name, "vision_config.")
    width, inner = seen.whole("hidden_size"), seen.whole("intermediate_size")
    patches = (seen.whole("image_size") // seen.whole("patch_size")) ** 2 + 1
    projected, out = seen.whole("projector_input_dim"), seen.whole("projector_output_dim")
    prefix = "vision_model."
    block = _Block(
        f"{prefix}model.layers.0.",
        seen.whole("num_hidden_layers"),
        width,
        seen.whole("num_attention_heads"),
        inner,
        out="self_attn.o_proj",
        norms=("input_layernorm", "post_attention_layernorm"),
    )
    return (
        *_column(f"{prefix}patch_embedding.linear", width, _patch(seen), bias=False),
        vector(f"{prefix}class_embedding", width),
        _table(f"{prefix}positional_embedding_vlm", patches, width),
        *_normed(f"{prefix}layernorm_pre", width),
        *_normed(f"{prefix}layernorm_post", width),
        *block.weights(),
        *_column(f"{prefix}vision_adapter.mlp.fc1", projected, inner, bias=False),
        *_row(f"{prefix}vision_adapter.mlp.fc2", out, projected, bias=False),
        *_column(
            "multi_modal_projector.linear_1",
            text.whole("hidden_size"),
            seen.whole("vision_output_dim"),
            bias=False,
        ),
    ), ""


def _moonvit(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Kimi VL, K2.5 and K3."""
    seen = _vision(fields)
    width = seen.whole("vt_hidden_size", "hidden_size", default=1152)
    heads = seen.whole("vt_num_attention_heads", "num_attention_heads", default=16)
    bias = seen.flag("attn_bias", default=True)
    second = seen.flag("linear_bias", default=True)
    block = _Block(
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
        _table("vision_tower.patch_embed.proj", width, _patch(seen)),
        vector("vision_tower.patch_embed.proj.bias", width),
        _table("vision_tower.patch_embed.pos_emb", positions, width),
        *block.weights(),
        *_normed("vision_tower.encoder.final_layernorm", width),
        *_normed("mm_projector.pre_norm", width),
        *_line("mm_projector.linear_1", merged, merged),
        *_line("mm_projector.linear_2", text.whole("hidden_size"), merged),
    ), ""


def _cohere2_vision(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = _vision(fields).whole("hidden_size")
    merged = width * fields.whole("downsample_factor", default=2) ** 2
    inner = fields.whole("alignment_intermediate_size", default=36864)
    return (
        *_siglip(fields),
        *_column("multi_modal_projector.linear_1", inner, merged),
        *_row("multi_modal_projector.linear_2", text.whole("hidden_size"), inner // 2),
    ), ""


def _paligemma(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = _vision(fields).whole("hidden_size")
    out = text.whole("hidden_size", default=2048)
    return (*_siglip(fields), *_plain(_line("multi_modal_projector.linear", out, width))), ""


def _idefics3(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Idefics 3 and SmolVLM: SigLIP and one linear layer over merged patches."""
    width = _vision(fields).whole("hidden_size", default=1152)
    merged = width * fields.whole("scale_factor", default=2) ** 2
    out = text.whole("hidden_size")
    return (
        *_siglip(fields, prefix="model.vision_model."),
        *_line("model.connector.modality_projection.proj", out, merged, bias=False),
    ), ""


def _lfm2(fields: Fields, text: Fields) -> tuple[Weights, str]:
    width = _vision(fields).whole("hidden_size")
    merged = width * fields.whole("downsample_factor", default=2) ** 2
    inner = fields.whole("projector_hidden_size", default=2560)
    bias = fields.flag("projector_bias", default=True)
    out = text.whole("hidden_size")
    normed = _normed("multi_modal_projector.layer_norm", merged)
    return (
        *_siglip(fields, layers=_tower_layers_or_all(fields)),
        *(normed if fields.flag("projector_use_layernorm", default=True) else ()),
        *_line("multi_modal_projector.linear_1", inner, merged, bias=bias),
        *_line("multi_modal_projector.linear_2", out, inner, bias=bias),
    ), ""


def _tower_layers_or_all(fields: Fields) -> int | None:
    return _tower_layers(fields) if fields.value("vision_feature_layer") is not None else None


def _minicpm_v(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """MiniCPM-V 2.5 to 4.5: SigLIP without its last layer, and a resampler of one attention."""
    depth = _vision(fields).whole("num_hidden_layers", default=27)
    width = _vision(fields).whole("hidden_size", default=1152)
    out = text.whole("hidden_size")
    dropped = 1 if fields.flag("drop_vision_last_layer", default=True) else 0
    queries = fields.whole("query_num", default=64)
    seen = {"image_size": 980, "patch_size": 14, **fields.config["vision_config"]}
    whole = Fields({**fields.config, "vision_config": seen}, fields.name)
    return (
        *_siglip(whole, prefix="vpm.", layers=depth - dropped),
        _table("resampler.query", queries, out),
        *_line("resampler.kv_proj", out, width, bias=False),
        *_line("resampler.attn.in_proj", 3 * out, out),
        *_line("resampler.attn.out_proj", out, out),
        vector("resampler.norms", 6 * out),
        _table("resampler.proj", out, out),
    ), ""


_CLIP_336 = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
"""CLIP ViT-L/14 at 336 pixels, which Phi-3's class always takes (CLIP_VIT_LARGE_PATCH14_336)."""


def _phi3_v(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Phi-3 and 3.5 Vision: CLIP up to its last layer but one, and two layers over four patches."""
    out = text.whole("hidden_size")
    width = _CLIP_336["hidden_size"]
    whole = Fields({**fields.config, "vision_config": _CLIP_336}, fields.name)
    return (
        *_clip(whole, layers=23),
        vector("model.vision_embed_tokens.glb_GN", 4 * width),
        vector("model.vision_embed_tokens.sub_GN", 4 * width),
        *_plain(_line("model.vision_embed_tokens.img_projection.0", out, 4 * width)),
        *_plain(_line("model.vision_embed_tokens.img_projection.2", out, out)),
    ), ""


def _ordinary(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Estimate a tower from its config: an ordinary transformer, and two layers to the text."""
    weights: list[Weight] = []
    out = text.whole("hidden_size", default=0)
    towers = ("vision_config", "audio_config", "vision_tower_config", "encoder_config")
    for key in towers:
        seen = fields.below(key)
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
        weights += _Block(f"{key}.layers.0.", depth, width, heads, inner).weights()
        weights += _column(f"{key}.projector.0", out, width) + _row(f"{key}.projector.1", out, out)
    note = (
        f"the tower of {fields.name} is estimated from its config, as an ordinary transformer"
        if weights
        else f"what {fields.name} has besides its text part is not counted"
    )
    return tuple(weights), note


def _whisper_tower(fields: Fields, text: Fields) -> tuple[Weights, str]:
    """Qwen2-Audio, Qwen2.5-Omni, Voxtral: Whisper's encoder, and whatever is beside it."""
    heard = fields.below("audio_config")
    weights: list[Weight] = []
    out = text.whole("hidden_size")
    if heard:
        width = heard.whole("d_model", "hidden_size", default=1280)
        bins = heard.whole("num_mel_bins", default=128)
        positions = heard.whole("max_source_positions", "max_position_embeddings", default=1500)
        layers = _Block(
            "audio_tower.layers.0.",
            heard.whole("encoder_layers", "num_hidden_layers", default=32),
            width,
            heard.whole("encoder_attention_heads", "num_attention_heads", default=20),
            heard.whole("encoder_ffn_dim", "intermediate_size", default=4 * width),
            mlp=("fc1", "fc2"),
        ).weights()
        if "Qwen2" in fields.name:  # the encoder is Transformers' own, whole on every rank
            layers = tuple(replace(weight, split=Split.NONE) for weight in layers)
        weights += layers
        weights += [
            _table("audio_tower.conv1", width, bins * 3),
            _table("audio_tower.conv2", width, width * 3),
            _table("audio_tower.embed_positions", positions, width),
            vector("audio_tower.layer_norm", 2 * width),
        ]
        weights += _line("multi_modal_projector.linear", out, width)
    note = ""
    if fields.below("vision_config"):
        seen, _ = _qwen2_5_vl(fields, text) if "2_5Omni" in fields.name else _qwen3_vl(fields, text)
        weights += seen
    elif "Qwen2Audio" not in fields.name:
        note = f"the layers between {fields.name}'s tower and its text part are estimated"
    return tuple(weights), note


@dataclass(frozen=True)
class _Wrapper:
    """A class of vLLM with a text part and a tower."""

    tower: Tower
    text: str = ""
    """The text part's class where its config does not say."""
    prefix: str = "model.language_model.layers."
    top: bool = False
    """Older configs have the text part's keys beside `vision_config`."""
    mrope: bool = False
    """Positions of three kinds, also where the config does not say: a table four times as long."""
    within: str = ""
    """The part of config.json that all of it is in: `thinker_config`."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """What text parts leave out: the defaults of their class in transformers."""


_LLAVA_DEFAULTS = (
    ("vocab_size", 32064),
    ("hidden_size", 4096),
    ("intermediate_size", 11008),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("tie_word_embeddings", False),
)
"""LlamaConfig of transformers: LLaVA 1.5's text part says only what differs."""

_WRAPPERS: dict[str, _Wrapper] = {
    "Qwen2VLForConditionalGeneration": _Wrapper(
        _qwen2_vl, "Qwen2ForCausalLM", top=True, mrope=True
    ),
    "Qwen2_5_VLForConditionalGeneration": _Wrapper(
        _qwen2_5_vl, "Qwen2ForCausalLM", top=True, mrope=True
    ),
    "Qwen3VLForConditionalGeneration": _Wrapper(_qwen3_vl, "Qwen3ForCausalLM", mrope=True),
    "Qwen3VLMoeForConditionalGeneration": _Wrapper(_qwen3_vl, "Qwen3MoeForCausalLM", mrope=True),
    "Qwen3_5ForConditionalGeneration": _Wrapper(_qwen3_vl, "Qwen3_5ForCausalLM", mrope=True),
    "Qwen3_5MoeForConditionalGeneration": _Wrapper(_qwen3_vl, "Qwen3_5MoeForCausalLM", mrope=True),
    "Qwen2_5OmniForConditionalGeneration": _Wrapper(
        _whisper_tower, "Qwen2ForCausalLM", within="thinker_config", mrope=True
    ),
    "Qwen2_5OmniModel": _Wrapper(
        _whisper_tower, "Qwen2ForCausalLM", within="thinker_config", mrope=True
    ),
    "Qwen3OmniMoeForConditionalGeneration": _Wrapper(
        _whisper_tower, "Qwen3MoeForCausalLM", within="thinker_config", mrope=True
    ),
    "Qwen2AudioForConditionalGeneration": _Wrapper(_whisper_tower, "Qwen2ForCausalLM"),
    "VoxtralForConditionalGeneration": _Wrapper(_whisper_tower, "LlamaForCausalLM"),
    "UltravoxModel": _Wrapper(_ordinary, "LlamaForCausalLM"),
    "Glm4vForConditionalGeneration": _Wrapper(_glm4v, "Glm4ForCausalLM", mrope=True),
    "Glm4vMoeForConditionalGeneration": _Wrapper(_glm4v, "Glm4MoeForCausalLM", mrope=True),
    "LlavaForConditionalGeneration": _Wrapper(_llava, "LlamaForCausalLM", defaults=_LLAVA_DEFAULTS),
    "LlavaNextForConditionalGeneration": _Wrapper(
        _llava, "LlamaForCausalLM", defaults=_LLAVA_DEFAULTS
    ),
    "LlavaNextVideoForConditionalGeneration": _Wrapper(
        _llava, "LlamaForCausalLM", defaults=_LLAVA_DEFAULTS
    ),
    "LlavaOnevisionForConditionalGeneration": _Wrapper(_llava, "Qwen2ForCausalLM"),
    "Mistral3ForConditionalGeneration": _Wrapper(_mistral3, "MistralForCausalLM"),
    "PixtralForConditionalGeneration": _Wrapper(_mistral3, "MistralForCausalLM"),
    "LightOnOCRForConditionalGeneration": _Wrapper(_mistral3, "Qwen3ForCausalLM"),
    "Gemma3ForConditionalGeneration": _Wrapper(_gemma3, "Gemma3ForCausalLM"),
    "Gemma3nForConditionalGeneration": _Wrapper(_ordinary, "Gemma3nForCausalLM"),
    "Gemma4ForConditionalGeneration": _Wrapper(_gemma4, "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": _Wrapper(_ordinary, "Gemma4ForCausalLM"),
    "PaliGemmaForConditionalGeneration": _Wrapper(_paligemma, "GemmaForCausalLM"),
    "InternVLChatModel": _Wrapper(_internvl),
    "H2OVLChatModel": _Wrapper(_internvl),
    "SkyworkR1VChatModel": _Wrapper(_internvl),
    "NVLM_D": _Wrapper(_internvl),
    "InternVLForConditionalGeneration": _Wrapper(_internvl),
    "InternS1ForConditionalGeneration": _Wrapper(_internvl),
    "Llama4ForConditionalGeneration": _Wrapper(
        _llama4, "Llama4ForCausalLM", prefix="language_model.model.layers."
    ),
    "KimiVLForConditionalGeneration": _Wrapper(_moonvit, "DeepseekV2ForCausalLM"),
    "KimiK25ForConditionalGeneration": _Wrapper(
        _moonvit, "DeepseekV3ForCausalLM", prefix="language_model.model.layers."
    ),
    "KimiK3ForConditionalGeneration": _Wrapper(
        _moonvit, "KimiLinearForCausalLM", prefix="language_model.model.layers."
    ),
    "Cohere2VisionForConditionalGeneration": _Wrapper(_cohere2_vision, "Cohere2ForCausalLM"),
    "AyaVisionForConditionalGeneration": _Wrapper(_ordinary, "Cohere2ForCausalLM"),
    "Idefics3ForConditionalGeneration": _Wrapper(_idefics3, "LlamaForCausalLM"),
    "SmolVLMForConditionalGeneration": _Wrapper(_idefics3, "LlamaForCausalLM"),
    "Lfm2VlForConditionalGeneration": _Wrapper(_lfm2, "Lfm2ForCausalLM"),
    "MiniCPMV": _Wrapper(_minicpm_v, "Qwen2ForCausalLM", top=True, prefix="llm.model.layers."),
    "DeepseekVLV2ForCausalLM": _Wrapper(_ordinary, "DeepseekV2ForCausalLM"),
    "Ovis2_5": _Wrapper(_ordinary, "Qwen3ForCausalLM"),
    "Phi3VForCausalLM": _Wrapper(_phi3_v, "Phi3ForCausalLM", top=True),
    "Phi4MMForCausalLM": _Wrapper(_ordinary, "Phi3ForCausalLM", top=True),
    "GraniteSpeechForConditionalGeneration": _Wrapper(_ordinary, "GraniteForCausalLM"),
    "GraniteSpeechPlusForConditionalGeneration": _Wrapper(_ordinary, "GraniteForCausalLM"),
    "Granite4VisionForConditionalGeneration": _Wrapper(_ordinary, "GraniteForCausalLM"),
    "GlmOcrForConditionalGeneration": _Wrapper(_ordinary, "Glm4ForCausalLM", mrope=True),
    "KeyeForConditionalGeneration": _Wrapper(_ordinary, "Qwen3ForCausalLM", top=True, mrope=True),
    "KeyeVL1_5ForConditionalGeneration": _Wrapper(
        _ordinary, "Qwen3ForCausalLM", top=True, mrope=True
    ),
    "Qwen3ASRForConditionalGeneration": _Wrapper(
        _ordinary, "Qwen3ForCausalLM", within="thinker_config"
    ),
    "Exaone4_5_ForConditionalGeneration": _Wrapper(_ordinary, "Exaone4ForCausalLM"),
    "OpenCUAForConditionalGeneration": _Wrapper(_ordinary, "Qwen2ForCausalLM"),
    "Ovis": _Wrapper(_ordinary),
    "Ovis2_6ForCausalLM": _Wrapper(_ordinary, "Qwen3ForCausalLM"),
    "Ovis2_6_MoeForCausalLM": _Wrapper(_ordinary, "Qwen3MoeForCausalLM"),
    "AudioFlamingo3ForConditionalGeneration": _Wrapper(_ordinary, "Qwen2ForCausalLM"),
    "InternS1ProForConditionalGeneration": _Wrapper(_ordinary, "Qwen3MoeForCausalLM"),
    "MiniCPMO": _Wrapper(_ordinary, "Qwen2ForCausalLM", top=True, prefix="llm.model.layers."),
    "HunYuanVLForConditionalGeneration": _Wrapper(_ordinary, "HunYuanDenseV1ForCausalLM", top=True),
    "HCXVisionForCausalLM": _Wrapper(_ordinary, "LlamaForCausalLM"),
    "HCXVisionV2ForCausalLM": _Wrapper(_ordinary, "HyperCLOVAXForCausalLM"),
    "KananaVForConditionalGeneration": _Wrapper(_ordinary, "LlamaForCausalLM"),
    "BeeForConditionalGeneration": _Wrapper(_ordinary, "Qwen3ForCausalLM"),
    "Blip2ForConditionalGeneration": _Wrapper(_ordinary, "OPTForCausalLM"),
    "StepVLForConditionalGeneration": _Wrapper(_ordinary, "Qwen3ForCausalLM"),
    "MiMoV2OmniForCausalLM": _Wrapper(_ordinary, "MiMoV2ForCausalLM", top=True),
    "NemotronH_Nano_Omni_Reasoning_V3": _Wrapper(_ordinary, "NemotronHForCausalLM"),
    "NemotronH_Super_Omni_Reasoning_V3": _Wrapper(_ordinary, "NemotronHForCausalLM"),
    "NemotronH_Omni_Reasoning_V3": _Wrapper(_ordinary, "NemotronHForCausalLM"),
    "AriaForConditionalGeneration": _Wrapper(_ordinary),
    "Step3VLForConditionalGeneration": _Wrapper(_ordinary, "Step3TextForCausalLM"),
    "Step3p7ForConditionalGeneration": _Wrapper(_ordinary, "Step3p5ForCausalLM", top=True),
    "Step3p7FlashForCausalLM": _Wrapper(_ordinary, "Step3p5ForCausalLM", top=True),
    "Ernie4_5_VLMoeForConditionalGeneration": _Wrapper(
        _ordinary, "Ernie4_5_MoeForCausalLM", top=True
    ),
    "MiniMaxM3SparseForConditionalGeneration": _Wrapper(_ordinary, "MiniMaxM3SparseForCausalLM"),
    "DotsOCRForCausalLM": _Wrapper(_ordinary, "Qwen2ForCausalLM", top=True),
    "PaddleOCRVLForConditionalGeneration": _Wrapper(_ordinary, "Ernie4_5ForCausalLM", top=True),
    "NemotronH_Nano_VL_V2": _Wrapper(_ordinary, "NemotronHForCausalLM"),
    "Llama_Nemotron_Nano_VL": _Wrapper(_ordinary, "LlamaForCausalLM"),
}


def _built(config: Mapping[str, Any], name: str, wrapper: _Wrapper) -> Architecture:
    """Return the text part's architecture under the wrapper's name, with the tower beside it."""
    from gpufleet.sizing.architectures.registry import builders, built

    whole = config
    if wrapper.within and isinstance(config.get(wrapper.within), Mapping):
        whole = {**config[wrapper.within], "architectures": [name]}
    fields = Fields(whole, name)
    text, path = _text(fields, wrapper)
    class_name = _class_of(text, wrapper)
    if class_name not in builders():
        raise FleetError(
            f"the text part of {name} is {class_name or 'of no stated class'} "
            f"(`{path}architectures` in config.json), which is not known; its size is not guessed: "
            "give the parallel sizes and `--gpu-memory-utilization` yourself"
        )
    read = built(class_name, {**text, "architectures": [class_name]})
    weights, note = wrapper.tower(fields, Fields(text, name, path))
    tower = Part("tower", weights, Where.FIRST, everywhere=True, everywhere_until=(0, 33))
    return replace(
        read,
        name=name,
        parts=(*read.parts, tower) if weights else read.parts,
        multimodal=True,
        prefix=wrapper.prefix,
        notes=(*read.notes, note) if note else read.notes,
    )


def _text(fields: Fields, wrapper: _Wrapper) -> tuple[dict[str, Any], str]:
    """Return the text part's config, with what it takes from the whole one, and its path."""
    inner: Mapping[str, Any] = {}
    path = ""
    for key in _TEXT_KEYS:
        if isinstance(found := fields.config.get(key), Mapping) and found:
            inner, path = found, f"{key}."
            break
    if not inner and not wrapper.top:
        raise fields.missing(*_TEXT_KEYS[:3])
    shared = ("torch_dtype", "dtype", "tie_word_embeddings")
    base: Mapping[str, Any] = (
        fields.config
        if not inner
        else {key: fields.config[key] for key in shared if fields.config.get(key) is not None}
    )
    text = {**dict(wrapper.defaults), **base, **inner}
    if wrapper.mrope and not (text.get("rope_scaling") or text.get("rope_parameters")):
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    return text, path


def _class_of(text: Mapping[str, Any], wrapper: _Wrapper) -> str:
    names = text.get("architectures")
    if isinstance(names, list) and names and str(names[0]) not in _WRAPPERS:
        return str(names[0])
    return _TEXT_CLASSES.get(str(text.get("model_type", "")), wrapper.text) or wrapper.text


def _refused(config: Mapping[str, Any], name: str, why: str) -> Architecture:
    """Refuse a class that is known and has no size here."""
    raise FleetError(f"{name} ({config.get('model_type', 'no model_type')}) {why}")


_NO_CACHE = (
    "embeds or scores and keeps no KV cache that grows with tokens, so it has no size in tokens; "
    "start it with a `--gpu-memory-utilization` that leaves room for its weights"
)
_CROSS = (
    "keeps a cache of what its encoder saw beside that of its tokens, which is not known; its size "
    "is not guessed: read the tokens that vLLM reports at start"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "BgeM3EmbeddingModel",
            "RobertaModel",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "XLMRobertaForSequenceClassification",
            "ModernBertModel",
            "ModernBertForSequenceClassification",
            "NomicBertModel",
            "GteModel",
            "GteNewModel",
            "CLIPModel",
            "SiglipModel",
            "HF_ColBERT",
            "Gemma2Model",
            "Gemma3TextModel",
            "EmbeddingGemma2Model",
            "LlamaBidirectionalModel",
            "LlamaBidirectionalForSequenceClassification",
            "BertSpladeSparseEmbeddingModel",
            "ModernBertForTokenClassification",
            "RobertaForTokenClassification",
            "XLMRobertaForTokenClassification",
            "GteNewForSequenceClassification",
            "GPT2ForSequenceClassification",
            "JambaForSequenceClassification",
            "Qwen2ForSequenceClassification",
            "Qwen2ForRewardModel",
            "Qwen2ForProcessRewardModel",
            "InternLM2ForRewardModel",
            "JinaVLForRanking",
            "JinaForRanking",
            "JinaEmbeddingsV5Model",
            "ColPaliForRetrieval",
            "ColQwen3",
            "VoyageQwen3BidirectionalEmbedModel",
            "LlamaNemotronVLModel",
            "LlamaNemotronVLForSequenceClassification",
            "Terratorch",
        ),
        _NO_CACHE,
    ),
    **dict.fromkeys(
        (
            "MllamaForConditionalGeneration",
            "WhisperForConditionalGeneration",
            "BartForConditionalGeneration",
            "T5ForConditionalGeneration",
            "NemotronParseForConditionalGeneration",
        ),
        _CROSS,
    ),
}
"""Classes that are known and have no size here, and why."""

ESTIMATED = frozenset(name for name, wrapper in _WRAPPERS.items() if wrapper.tower is _ordinary)
"""Classes whose tower is not counted weight by weight; a note says so of each model."""

BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **{name: partial(_refused, name=name, why=why) for name, why in REFUSED.items()},
    **{name: partial(_built, name=name, wrapper=wrapper) for name, wrapper in _WRAPPERS.items()},
}
"""Each name that `architectures` may have, with what reads such a config."""

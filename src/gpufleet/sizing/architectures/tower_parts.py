"""
Build parts of vision and audio towers: layers, projections, common encoders. Pure.

Source: the classes in vLLM's model_executor/models, 0.19 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpufleet.sizing.architectures.building_blocks import norm, vector
from gpufleet.sizing.architectures.components import Split, Weight
from gpufleet.sizing.architectures.config_fields import Fields

Weights = tuple[Weight, ...]


@dataclass(frozen=True)
class TowerLayers:
    """The equal layers of a tower: attention, an MLP, and two norms."""

    prefix: str
    """Prefix of the names in the first layer. The first layer represents all layers."""
    depth: int
    hidden: int
    heads: int
    intermediate: int
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """
    The names for queries, keys and values, or one name if they are one weight in the checkpoint.
    """
    out: str = "self_attn.out_proj"
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    """The names of the MLP's two matrices, or of three (gate, up, down) for a gated MLP."""
    norms: tuple[str, ...] = ("layer_norm1", "layer_norm2")
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    k_bias: bool = True
    """Whether keys have a bias, if `qkv_bias` is set."""
    width: int = 0
    """Width of all heads together, if it differs from the hidden size."""
    divided: bool = True

    def weights(self) -> Weights:
        """Return the weights of all layers, each with its count."""
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


def table(name: str, rows: int, columns: int) -> Weight:
    """Return a convolution or learnt positions, which are neither divided nor quantized."""
    return Weight(name, rows, columns, linear=False)


def replicated_linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Weights:
    """Return a linear layer that is not divided over ranks."""
    made = (Weight(name, outputs, inputs),)
    return (*made, vector(f"{name}.bias", outputs)) if bias else made


def column_parallel(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Weights:
    made = (Weight(name, outputs, inputs, Split.ROWS),)
    return (*made, vector(f"{name}.bias", outputs, Split.ROWS)) if bias else made


def row_parallel(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Weights:
    made = (Weight(name, outputs, inputs, Split.COLUMNS),)
    return (*made, vector(f"{name}.bias", outputs)) if bias else made


def layer_norm(name: str, size: int) -> Weights:
    """Return LayerNorm's weight and bias."""
    return norm(name, size, bias=True)


def vision_fields(fields: Fields, *keys: str) -> Fields:
    found = fields.section(*keys, "vision_config")
    if found is None:
        raise fields.missing_error(*keys, "vision_config")
    return found


def patch_inputs(seen: Fields, *, patch: int = 14, temporal: int = 1) -> int:
    """Return the number of inputs of a patch: colours x pixels x frames."""
    colours = seen.whole("in_channels", "in_chans", "num_channels", default=3)
    size = seen.whole("patch_size", default=patch)
    return colours * size * size * seen.whole("temporal_patch_size", default=temporal)


def siglip(
    fields: Fields,
    *,
    prefix: str = "vision_tower.vision_model.",
    layers: int | None = None,
    normed: bool = True,
) -> Weights:
    """
    Return the weights of SigLIP, or of SigLIP 2 with a fixed image size.

    With `normed`, the norm after the last layer is included.
    """
    seen = vision_fields(fields)
    width, heads = seen.whole("hidden_size"), seen.whole("num_attention_heads")
    depth = seen.whole("num_hidden_layers")
    count = depth if layers is None else layers
    if seen.value("num_patches"):
        positions = seen.whole("num_patches")
    else:
        positions = (seen.whole("image_size") // seen.whole("patch_size")) ** 2
    block = TowerLayers(
        f"{prefix}encoder.layers.0.", count, width, heads, seen.whole("intermediate_size")
    )
    return (
        table(f"{prefix}embeddings.patch_embedding", width, patch_inputs(seen)),
        vector(f"{prefix}embeddings.patch_embedding.bias", width),
        table(f"{prefix}embeddings.position_embedding", positions, width),
        *block.weights(),
        *(layer_norm(f"{prefix}post_layernorm", width) if normed and count == depth else ()),
    )


def clip(fields: Fields, *, layers: int | None = None) -> Weights:
    """
    Return the weights of CLIP without the norm after its last layer, which only embedders need.
    """
    seen = vision_fields(fields)
    width = seen.whole("hidden_size", default=768)
    depth = seen.whole("num_hidden_layers", default=12)
    count = depth if layers is None else layers
    patches = (seen.whole("image_size", default=224) // seen.whole("patch_size", default=32)) ** 2
    prefix = "vision_tower.vision_model."
    block = TowerLayers(
        f"{prefix}encoder.layers.0.",
        count,
        width,
        seen.whole("num_attention_heads", default=12),
        seen.whole("intermediate_size", default=3072),
    )
    return (
        vector(f"{prefix}embeddings.class_embedding", width),
        table(f"{prefix}embeddings.patch_embedding", width, patch_inputs(seen, patch=32)),
        table(f"{prefix}embeddings.position_embedding", patches + 1, width),
        *layer_norm(f"{prefix}pre_layrnorm", width),
        *block.weights(),
    )


def pixtral(fields: Fields) -> Weights:
    seen = vision_fields(fields)
    width = seen.whole("hidden_size", default=1024)
    heads = seen.whole("num_attention_heads", default=16)
    block = TowerLayers(
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
        table("vision_tower.patch_conv", width, patch_inputs(seen, patch=16)),
        vector("vision_tower.ln_pre", width),
        *block.weights(),
    )


def loaded_layers(fields: Fields) -> int | None:
    """
    Return the number of layers that vLLM loads, or None for all.

    vLLM does not load the layers after the one whose output is used.
    """
    taken = fields.value("vision_feature_layer")
    deepest = max(
        (
            layer
            if layer >= 0
            else vision_fields(fields).whole("num_hidden_layers", default=12) + layer
            for layer in ([taken] if isinstance(taken, int) else taken or [-2])
        ),
    )
    return deepest + 1 if deepest >= 0 else None


def conformer(heard: Fields, out: int) -> Weights:
    """
    Return the weights of Gemma 4's audio tower. Source: Gemma4AudioModel in transformers 5.19.
    """
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
        table(f"{prefix}lconv1d.depthwise_conv1d", width, kernel),
        Weight(f"{prefix}lconv1d.linear_end", width, width),
        vector(f"{prefix}norms", 9 * width),
    )
    return (
        *(replace(weight, count=depth) for weight in layer),
        table("audio_tower.subsample_conv_projection.layer0", first, 9),
        table("audio_tower.subsample_conv_projection.layer1", second, first * 9),
        vector("audio_tower.subsample_conv_projection.norms", first + second),
        *replicated_linear(
            "audio_tower.subsample_conv_projection.input_proj_linear",
            width,
            second * 32,
            bias=False,
        ),
        *replicated_linear("audio_tower.output_proj", projected, width),
        *replicated_linear("embed_audio.embedding_projection", out, projected, bias=False),
    )


def plain_torch(weights: Weights) -> Weights:
    """Return weights of PyTorch's own layers, which vLLM neither divides nor quantizes."""
    return tuple(replace(weight, linear=False, split=Split.NONE) for weight in weights)

"""
Describe models with vision or audio, which have a text part and a tower. Pure.

vLLM loads the tower on every pipeline stage. Since 0.33, it loads it only on the first stage
(_mark_tower_model). The known towers are in `towers.py`. An unknown tower is estimated from its
config as an ordinary transformer, and the result has a note.

Source: the classes of the same names in vLLM's model_executor/models, 0.19 to 0.33.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import Architecture, Part, StagePlacement
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.registry import build_architecture, builders
from gpufleet.sizing.architectures.towers import (
    Tower,
    cohere2_vision,
    estimated_tower,
    gemma3,
    gemma4,
    glm4v,
    idefics3,
    internvl,
    lfm2,
    llama4,
    llava,
    minicpm_v,
    mistral3,
    moonvit,
    nemotron_vl,
    paligemma,
    phi3_v,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    whisper_tower,
)
from gpufleet.sizing.architectures.unread_keys import SIZE_KEYS

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
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "mimo": "MiMoForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
}
"""The class that vLLM uses for a text part of this `model_type`."""


@dataclass(frozen=True)
class _Wrapper:
    """A class of vLLM with a text part and a tower."""

    tower: Tower
    text: str = ""
    """The class of the text part if its config does not state a class."""
    prefix: str = "model.language_model.layers."
    top: bool = False
    """
    Whether older configs have the keys of the text part at the top level, next to `vision_config`.
    """
    mrope: bool = False
    """
    Whether positions are three-dimensional even if the config does not state it. The rotary table
    is then four times as long.
    """
    within: str = ""
    """The section of config.json that describes the whole model, such as `thinker_config`."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Defaults of the text part's class in transformers, for missing values."""


_LLAVA_DEFAULTS = (
    ("vocab_size", 32064),
    ("hidden_size", 4096),
    ("intermediate_size", 11008),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("tie_word_embeddings", False),
)
"""
Defaults of transformers' LlamaConfig. The config of LLaVA 1.5's text part has only the values that
differ from them.
"""

_WRAPPERS: dict[str, _Wrapper] = {
    "Qwen2VLForConditionalGeneration": _Wrapper(qwen2_vl, "Qwen2ForCausalLM", top=True, mrope=True),
    "Qwen2_5_VLForConditionalGeneration": _Wrapper(
        qwen2_5_vl, "Qwen2ForCausalLM", top=True, mrope=True
    ),
    "Qwen3VLForConditionalGeneration": _Wrapper(qwen3_vl, "Qwen3ForCausalLM", mrope=True),
    "Qwen3VLMoeForConditionalGeneration": _Wrapper(qwen3_vl, "Qwen3MoeForCausalLM", mrope=True),
    "Qwen3_5ForConditionalGeneration": _Wrapper(qwen3_vl, "Qwen3_5ForCausalLM", mrope=True),
    "Qwen3_5MoeForConditionalGeneration": _Wrapper(qwen3_vl, "Qwen3_5MoeForCausalLM", mrope=True),
    "Qwen2_5OmniForConditionalGeneration": _Wrapper(
        whisper_tower, "Qwen2ForCausalLM", within="thinker_config", mrope=True
    ),
    "Qwen2_5OmniModel": _Wrapper(
        whisper_tower, "Qwen2ForCausalLM", within="thinker_config", mrope=True
    ),
    "Qwen3OmniMoeForConditionalGeneration": _Wrapper(
        whisper_tower, "Qwen3MoeForCausalLM", within="thinker_config", mrope=True
    ),
    "Qwen2AudioForConditionalGeneration": _Wrapper(whisper_tower, "Qwen2ForCausalLM"),
    "VoxtralForConditionalGeneration": _Wrapper(whisper_tower, "LlamaForCausalLM"),
    "UltravoxModel": _Wrapper(estimated_tower, "LlamaForCausalLM"),
    "Glm4vForConditionalGeneration": _Wrapper(glm4v, "Glm4ForCausalLM", mrope=True),
    "Glm4vMoeForConditionalGeneration": _Wrapper(glm4v, "Glm4MoeForCausalLM", mrope=True),
    "LlavaForConditionalGeneration": _Wrapper(llava, "LlamaForCausalLM", defaults=_LLAVA_DEFAULTS),
    "LlavaNextForConditionalGeneration": _Wrapper(
        llava, "LlamaForCausalLM", defaults=_LLAVA_DEFAULTS
    ),
    "LlavaNextVideoForConditionalGeneration": _Wrapper(
        llava, "LlamaForCausalLM", defaults=_LLAVA_DEFAULTS
    ),
    "LlavaOnevisionForConditionalGeneration": _Wrapper(llava, "Qwen2ForCausalLM"),
    "Mistral3ForConditionalGeneration": _Wrapper(mistral3, "MistralForCausalLM"),
    "PixtralForConditionalGeneration": _Wrapper(mistral3, "MistralForCausalLM"),
    "LightOnOCRForConditionalGeneration": _Wrapper(mistral3, "Qwen3ForCausalLM"),
    "Gemma3ForConditionalGeneration": _Wrapper(gemma3, "Gemma3ForCausalLM"),
    "Gemma3nForConditionalGeneration": _Wrapper(estimated_tower, "Gemma3nForCausalLM"),
    "Gemma4ForConditionalGeneration": _Wrapper(gemma4, "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": _Wrapper(estimated_tower, "Gemma4ForCausalLM"),
    "PaliGemmaForConditionalGeneration": _Wrapper(paligemma, "GemmaForCausalLM"),
    "InternVLChatModel": _Wrapper(internvl),
    "H2OVLChatModel": _Wrapper(internvl),
    "SkyworkR1VChatModel": _Wrapper(internvl),
    "NVLM_D": _Wrapper(internvl),
    "InternVLForConditionalGeneration": _Wrapper(internvl),
    "InternS1ForConditionalGeneration": _Wrapper(internvl),
    "Llama4ForConditionalGeneration": _Wrapper(
        llama4, "Llama4ForCausalLM", prefix="language_model.model.layers."
    ),
    "KimiVLForConditionalGeneration": _Wrapper(moonvit, "DeepseekV2ForCausalLM"),
    "KimiK25ForConditionalGeneration": _Wrapper(
        moonvit, "DeepseekV3ForCausalLM", prefix="language_model.model.layers."
    ),
    "KimiK3ForConditionalGeneration": _Wrapper(
        moonvit, "KimiLinearForCausalLM", prefix="language_model.model.layers."
    ),
    "Cohere2VisionForConditionalGeneration": _Wrapper(cohere2_vision, "Cohere2ForCausalLM"),
    "AyaVisionForConditionalGeneration": _Wrapper(estimated_tower, "Cohere2ForCausalLM"),
    "Idefics3ForConditionalGeneration": _Wrapper(idefics3, "LlamaForCausalLM"),
    "SmolVLMForConditionalGeneration": _Wrapper(idefics3, "LlamaForCausalLM"),
    "Lfm2VlForConditionalGeneration": _Wrapper(lfm2, "Lfm2ForCausalLM"),
    "MiniCPMV": _Wrapper(minicpm_v, "Qwen2ForCausalLM", top=True, prefix="llm.model.layers."),
    "DeepseekVLV2ForCausalLM": _Wrapper(estimated_tower, "DeepseekV2ForCausalLM"),
    "Ovis2_5": _Wrapper(estimated_tower, "Qwen3ForCausalLM"),
    "Phi3VForCausalLM": _Wrapper(phi3_v, "Phi3ForCausalLM", top=True),
    "Phi4MMForCausalLM": _Wrapper(estimated_tower, "Phi3ForCausalLM", top=True),
    "GraniteSpeechForConditionalGeneration": _Wrapper(estimated_tower, "GraniteForCausalLM"),
    "GraniteSpeechPlusForConditionalGeneration": _Wrapper(estimated_tower, "GraniteForCausalLM"),
    "Granite4VisionForConditionalGeneration": _Wrapper(estimated_tower, "GraniteForCausalLM"),
    "GlmOcrForConditionalGeneration": _Wrapper(estimated_tower, "Glm4ForCausalLM", mrope=True),
    "KeyeForConditionalGeneration": _Wrapper(
        estimated_tower, "Qwen3ForCausalLM", top=True, mrope=True
    ),
    "KeyeVL1_5ForConditionalGeneration": _Wrapper(
        estimated_tower, "Qwen3ForCausalLM", top=True, mrope=True
    ),
    "Qwen3ASRForConditionalGeneration": _Wrapper(
        estimated_tower, "Qwen3ForCausalLM", within="thinker_config"
    ),
    "Exaone4_5_ForConditionalGeneration": _Wrapper(estimated_tower, "Exaone4ForCausalLM"),
    "OpenCUAForConditionalGeneration": _Wrapper(estimated_tower, "Qwen2ForCausalLM"),
    "Ovis": _Wrapper(estimated_tower),
    "Ovis2_6ForCausalLM": _Wrapper(estimated_tower, "Qwen3ForCausalLM"),
    "Ovis2_6_MoeForCausalLM": _Wrapper(estimated_tower, "Qwen3MoeForCausalLM"),
    "AudioFlamingo3ForConditionalGeneration": _Wrapper(estimated_tower, "Qwen2ForCausalLM"),
    "InternS1ProForConditionalGeneration": _Wrapper(estimated_tower, "Qwen3MoeForCausalLM"),
    "MiniCPMO": _Wrapper(estimated_tower, "Qwen2ForCausalLM", top=True, prefix="llm.model.layers."),
    "HunYuanVLForConditionalGeneration": _Wrapper(
        estimated_tower, "HunYuanDenseV1ForCausalLM", top=True
    ),
    "HCXVisionForCausalLM": _Wrapper(estimated_tower, "LlamaForCausalLM"),
    "HCXVisionV2ForCausalLM": _Wrapper(estimated_tower, "HyperCLOVAXForCausalLM"),
    "KananaVForConditionalGeneration": _Wrapper(estimated_tower, "LlamaForCausalLM"),
    "BeeForConditionalGeneration": _Wrapper(estimated_tower, "Qwen3ForCausalLM"),
    "Blip2ForConditionalGeneration": _Wrapper(estimated_tower, "OPTForCausalLM"),
    "StepVLForConditionalGeneration": _Wrapper(estimated_tower, "Qwen3ForCausalLM"),
    "MiMoV2OmniForCausalLM": _Wrapper(estimated_tower, "MiMoV2ForCausalLM", top=True),
    "NemotronH_Nano_Omni_Reasoning_V3": _Wrapper(estimated_tower, "NemotronHForCausalLM"),
    "NemotronH_Super_Omni_Reasoning_V3": _Wrapper(estimated_tower, "NemotronHForCausalLM"),
    "NemotronH_Omni_Reasoning_V3": _Wrapper(estimated_tower, "NemotronHForCausalLM"),
    "AriaForConditionalGeneration": _Wrapper(estimated_tower),
    "Step3VLForConditionalGeneration": _Wrapper(estimated_tower, "Step3TextForCausalLM"),
    "Step3p7ForConditionalGeneration": _Wrapper(estimated_tower, "Step3p5ForCausalLM", top=True),
    "Step3p7FlashForCausalLM": _Wrapper(estimated_tower, "Step3p5ForCausalLM", top=True),
    "Ernie4_5_VLMoeForConditionalGeneration": _Wrapper(
        estimated_tower, "Ernie4_5_MoeForCausalLM", top=True
    ),
    "MiniMaxM3SparseForConditionalGeneration": _Wrapper(
        estimated_tower, "MiniMaxM3SparseForCausalLM"
    ),
    "DotsOCRForCausalLM": _Wrapper(estimated_tower, "Qwen2ForCausalLM", top=True),
    "PaddleOCRVLForConditionalGeneration": _Wrapper(
        estimated_tower, "Ernie4_5ForCausalLM", top=True
    ),
    "LlamaNemotronVLModel": _Wrapper(nemotron_vl, "LlamaBidirectionalModel"),
    "NemotronH_Nano_VL_V2": _Wrapper(estimated_tower, "NemotronHForCausalLM"),
    "Llama_Nemotron_Nano_VL": _Wrapper(estimated_tower, "LlamaForCausalLM"),
}


def _build(config: Mapping[str, Any], name: str, wrapper: _Wrapper) -> Architecture:
    """Return the architecture of the text part and the tower, under the name of the whole model."""
    whole = config
    if wrapper.within and isinstance(config.get(wrapper.within), Mapping):
        whole = {**config[wrapper.within], "architectures": [name]}
    fields = Fields(whole, name)
    text, path = _text_part(fields, wrapper)
    class_name = _text_class(text, path, fields, wrapper)
    if class_name not in builders():
        raise _unknown_text_error(name, path, class_name or "without a class", "architectures")
    read = build_architecture(class_name, {**text, "architectures": [class_name]})
    weights, note = wrapper.tower(fields, Fields(text, name, path))
    tower = Part("tower", weights, StagePlacement.FIRST, everywhere=True, everywhere_until=(0, 33))
    return replace(
        read,
        name=name,
        parts=(*read.parts, tower) if weights else read.parts,
        multimodal=True,
        tower_estimated=wrapper.tower is estimated_tower,
        prefix=wrapper.prefix,
        notes=(*read.notes, note) if note else read.notes,
    )


def _text_part(fields: Fields, wrapper: _Wrapper) -> tuple[dict[str, Any], str]:
    """
    Return the config of the text part with values from the whole config, and the path of the part.
    """
    inner: Mapping[str, Any] = {}
    path = ""
    for key in _TEXT_KEYS:
        if isinstance(found := fields.config.get(key), Mapping) and found:
            inner, path = found, f"{key}."
            break
    if not inner and not wrapper.top:
        raise fields.missing_error(*_TEXT_KEYS[:3])
    shared = ("torch_dtype", "dtype", "tie_word_embeddings")
    base: Mapping[str, Any] = (
        {key: value for key, value in fields.config.items() if key not in SIZE_KEYS["towers"]}
        if not inner
        else {key: fields.config[key] for key in shared if fields.config.get(key) is not None}
    )
    text = {**dict(wrapper.defaults), **base, **inner}
    if wrapper.mrope and not (text.get("rope_scaling") or text.get("rope_parameters")):
        text["rope_scaling"] = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    return text, path


def _text_class(text: Mapping[str, Any], path: str, fields: Fields, wrapper: _Wrapper) -> str:
    """
    Return the class of the text part.

    The usual class of the wrapper is used only if the text part has no `model_type`, or the same
    one as the whole model. Raises `FleetError` for an unknown `model_type`.
    """
    names = text.get("architectures")
    if isinstance(names, list) and names and str(names[0]) not in _WRAPPERS:
        return str(names[0])
    kind = str(text.get("model_type") or "")
    own = str(fields.config.get("model_type") or "").removesuffix("_thinker")
    if found := _TEXT_CLASSES.get(kind):
        return found
    if path and kind and kind not in {own, f"{own}_text"}:
        raise _unknown_text_error(fields.name, path, kind, "model_type")
    return wrapper.text


def _unknown_text_error(name: str, path: str, found: str, key: str) -> FleetError:
    return FleetError(
        f"the text part of {name} is {found} (`{path}{key}` in config.json). gpufleet does not "
        "know this kind of text part, and cannot estimate the model's size: set the parallel sizes "
        "and `--gpu-memory-utilization` yourself"
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    name: partial(_build, name=name, wrapper=wrapper) for name, wrapper in _WRAPPERS.items()
}
"""The builder of each architecture, by its name in `architectures`."""

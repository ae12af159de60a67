"""
Read a model's kind from its files: text, embeddings, scores, labels, transcription. Pure.

The rules are those of vLLM (config/model.py of 0.32.0: _get_default_runner_type,
_SUFFIX_TO_DEFAULTS). If a generating model has a `modules.json` of sentence-transformers, it is an
embedder. Otherwise the class name determines the kind. If a class is not listed and its name does
not show the kind, the kind is unknown and you must set it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from gpufleet.settings.serving_settings import ModelKind

ALL: Final[frozenset[ModelKind]] = frozenset(get_args(ModelKind))
POOLS: Final[frozenset[ModelKind]] = frozenset({"embed", "rerank", "classify", "reward"})
"""The kinds that vLLM serves with `--runner pooling`."""

# Classes with `supports_transcription_only` in vllm/model_executor/models of 0.32.0. The next set
# has the classes that transcribe and also chat.
_SPEECH = frozenset(
    {
        "CohereAsrForConditionalGeneration",
        "FireRedASR2ForConditionalGeneration",
        "FunASRForConditionalGeneration",
        "MossTranscribeDiarizeForConditionalGeneration",
        "WhisperForConditionalGeneration",
    }
)
_SPEECH_AND_TEXT = frozenset(
    {
        "Gemma3nForConditionalGeneration",
        "GlmAsrForConditionalGeneration",
        "GraniteSpeechForConditionalGeneration",
        "GraniteSpeechPlusForConditionalGeneration",
        "MoonshotKimiaForCausalLM",
        "Qwen3ASRForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    }
)
# The classes of _EMBEDDING_MODELS in model_executor/models/registry.py that can only embed.
_EMBEDDERS = re.compile(
    r"(Bert|Roberta|XLMRoberta|ModernBert|NomicBert|Gte|GteNew|BgeM3Embedding|CLIP|Siglip|Gemma2"
    r"|Gemma3Text|EmbeddingGemma2|JinaEmbeddingsV5|Llama|LlamaBidirectional|LlamaNemotronVL"
    r"|Mistral|Qwen2|Qwen3|DeepseekV3Bidirectional|VoyageQwen3BidirectionalEmbed)Model"
    r"|(Bert|Roberta)ForMaskedLM|BertSpladeSparseEmbeddingModel"
    r"|\w*EmbeddingModel|\w+ForTextEncoding"
)
_REWARD = re.compile(r"\w+(RewardModel|ForRewardModeling)")
_TOKENS = re.compile(
    r"\w+ForTokenClassification|HF_ColBERT|ColBERT\w+|Col\w+|JinaForRanking|\w+ForRetrieval"
)
"""
Models that return a vector or a score for each token. vLLM serves them at /pooling. Some of them
can rank documents.
"""
_SEQUENCE = re.compile(
    r"\w+(ForSequenceClassification|ForAudioClassification|ForImageClassification"
    r"|ForVideoClassification|ClassificationModel)|JinaVLForRanking"
)
_TEXT = re.compile(
    r"\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|ChatModel)"
    # Classes of the registry whose names have none of these endings.
    r"|ChatGLMModel|DiffusionGemmaForBlockDiffusion|HfMoondream|Llama_Nemotron_Nano_VL"
    r"|MiDashengLMModel|MiniCPM[OV]|MossAudioModel|NemotronH_\w+|NVLM_D|Ovis(2_5)?"
    r"|Phi4ForCausalLMV|Qwen2_5OmniModel|UltravoxModel"
)


@dataclass(frozen=True)
class KindReading:
    """The kind of a model, as read from its files."""

    kind: ModelKind | None
    """The kind, or None if the files do not determine it."""
    possible: frozenset[ModelKind]
    """The kinds that may be declared."""
    why: str
    """What determined the kind, as a clause: "the model's class is BertModel"."""
    converts: bool = False
    """Whether the class generates text, and embeds or scores only with `--convert`."""
    name: str = ""
    """The class name, if config.json has one."""


UNREAD = KindReading(None, ALL, "gpufleet could not read the model's files")
"""The reading of a model whose files could not be read."""


def read_kind(config: Mapping[str, Any], modules: Sequence[Any] | None = None) -> KindReading:
    """
    Return the kind of the model with these contents of config.json and modules.json.

    `config` already includes `--hf-overrides`.

    >>> read_kind({"architectures": ["BertModel"]}).kind
    'embed'
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list | tuple) and names else ""
    if not name:
        return KindReading(None, ALL, "the model's config.json has no `architectures`")
    found = replace(_of_class(name, config), name=name)
    if modules is None or found.kind not in {"generate", "embed", None}:
        return found
    why = f"{found.why}, and the model has a modules.json, as embedding models do"
    return replace(found, kind="embed", possible=found.possible | {"embed"}, why=why)


def _of_class(name: str, config: Mapping[str, Any]) -> KindReading:
    why = f"the model's class is {name}"
    if name in _SPEECH:
        return KindReading("transcribe", frozenset({"transcribe"}), why)
    if _SEQUENCE.fullmatch(name):
        return _by_labels(1 if name == "JinaVLForRanking" else label_count(config), why)
    if _REWARD.fullmatch(name) or name.endswith("ForProcessRewardModel"):
        return KindReading("reward", frozenset({"reward"}), why)
    if _TOKENS.fullmatch(name):
        each = f"{why}, which returns an answer for each token"
        return KindReading(None, frozenset({"rerank", "reward"}), each)
    if _EMBEDDERS.fullmatch(name):
        return KindReading("embed", frozenset({"embed"}), why)
    if _TEXT.fullmatch(name):
        possible: set[ModelKind] = {"generate", "embed"}
        if name in _SPEECH_AND_TEXT:
            possible.add("transcribe")
        return KindReading("generate", frozenset(possible), why, converts=True)
    return KindReading(None, ALL, f"{why}, which does not show the kind")


def _by_labels(labels: int, why: str) -> KindReading:
    if labels == 1:
        kinds: frozenset[ModelKind] = frozenset({"rerank", "classify", "reward"})
        return KindReading("rerank", kinds, f"{why} with one label")
    return KindReading("classify", frozenset({"classify", "reward"}), f"{why} with {labels} labels")


def label_count(config: Mapping[str, Any]) -> int:
    """
    Return the number of a classifier's labels. The default is two, as in transformers.

    Some decoders classify by choosing one of a few words. Such a decoder has a label for each word,
    or a single label for two words (`classifier_from_token` and `method` in
    SequenceClassificationConfig and Qwen3ForSequenceClassificationConfig, model_executor/models).
    """
    words, method = config.get("classifier_from_token"), config.get("method")
    if method == "from_2_way_softmax" or config.get("is_original_qwen3_reranker") is True:
        return 1
    if method is not None and isinstance(words, list | tuple) and words:
        return len(words)
    names = config.get("id2label")
    if isinstance(names, Mapping):
        return len(names)
    count = config.get("num_labels")
    return count if isinstance(count, int) and count > 0 else 2

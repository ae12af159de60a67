"""
Determine the kind of each model (text, embeddings, scores ...), and the vLLM flags that the kind
needs. Pure.

The order of precedence is: the operator's declaration (`serving.<model>.kind`), flags that allow
only one kind, the model's files, the running servers. A kind that the model cannot have is refused.
If the kind remains unknown, gpufleet treats the model as one that completes text. If gpufleet could
read the model's files, a remark then reports that the kind is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpufleet.catalog import presets
from gpufleet.errors import FleetError
from gpufleet.flags import served_classes
from gpufleet.flags.normalize import human_readable
from gpufleet.flags.schema import sort_key
from gpufleet.planning.flag_layers import KIND, LayeredFlag
from gpufleet.planning.stage import Running
from gpufleet.settings import engine_flags
from gpufleet.settings.engine_flags import DEFAULT
from gpufleet.settings.monitoring_settings import Objectives
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import ModelKind, Served, Vllm
from gpufleet.sizing.model_kinds import POOLS, UNREAD, KindReading
from gpufleet.sizing.options import POOLING

_CLASSIFIES: Final[frozenset[ModelKind]] = frozenset({"rerank", "classify", "reward"})
# A package of vLLM's extra `audio` in every release since 0.18 (its METADATA).
_AUDIO = "soundfile"
_WHISPER = "WhisperForConditionalGeneration"
_SECONDS_30, _TEXT = 1500, 448
"""
Number of positions of the encoder and of the decoder of every Whisper model.

The encoder processes its positions in one step. Source: max_source_positions and
max_target_positions in config.json of openai/whisper-*.
"""


@dataclass(frozen=True)
class ResolvedKind:
    """The kind of a model (text, embeddings, scores ...), from its settings and its files."""

    kind: ModelKind = "generate"
    flags: tuple[LayeredFlag, ...] = ()
    """Flags that the kind needs and that the operator has not set."""
    remark: str = ""


@dataclass(frozen=True)
class ResolvedKinds:
    """The kinds of all models, by the models' names in `serving`."""

    kinds: Mapping[str, ResolvedKind] = field(default_factory=dict)

    def kind(self, model: str) -> ModelKind:
        """Return the kind of requests to a model."""
        return self.kinds.get(model, ResolvedKind()).kind

    def flags(self, model: str, flags: Iterable[LayeredFlag]) -> tuple[LayeredFlag, ...]:
        """
        Return `flags` and the flags that the model's kind needs. A flag in `flags` has precedence.
        """
        found = {each.name: each for each in self.kinds.get(model, ResolvedKind()).flags}
        found |= {each.name: each for each in flags}
        return tuple(sorted(found.values(), key=lambda each: each.name))

    @property
    def remarks(self) -> tuple[str, ...]:
        """
        Return the remarks on models whose kind is unknown, or which the vLLM release may not
        support.
        """
        return tuple(each.remark for each in self.kinds.values() if each.remark)


def resolve_kinds(
    settings: Mapping[str, NodeSettings],
    readings: Mapping[str, KindReading],
    runs: Iterable[Running] = (),
    locks: Mapping[str, str] | None = None,
    *,
    judged: bool = True,
) -> ResolvedKinds:
    """
    Return the kind of each model, with the flags that the kind needs.

    `locks` maps the names of vLLM releases' lock files to the text of the files. If `judged` is
    true, raises `FleetError` with every kind that a model cannot have, and with every setting that
    does not suit the kind.
    """
    served = {
        model: (each, wanted.vllm)
        for _, wanted in sorted(settings.items())
        for model, each in wanted.serving.items()
    }
    running = {each.model: each.kind for each in runs}
    found: dict[str, ResolvedKind] = {}
    problems: list[str] = []
    for model, (wanted, vllm) in sorted(served.items(), key=lambda each: each[0]):
        reading = readings.get(model, UNREAD)
        if wanted.engine != DEFAULT:
            found[model] = ResolvedKind()
            if reading.kind not in {None, "generate"} and wanted.kind is None:
                problems.append(_only_generates(model, wanted, reading))
            continue
        try:
            found[model] = resolve_kind(
                model, wanted, readings.get(model, UNREAD), running.get(model)
            )
        except FleetError as error:
            problems += error.problems
            found[model] = ResolvedKind(wanted.kind or "generate")
            continue
        if vllm:
            problem, remark = _release_words(
                model, wanted, vllm.version, readings.get(model, UNREAD).name, found[model].kind
            )
            problems += [problem] if problem else []
            found[model] = replace(found[model], remark=found[model].remark or remark)
        problems += objective_problems(model, found[model].kind, wanted.objectives)
        if readings.get(model, UNREAD).name == _WHISPER:
            problems += _too_few_tokens(model, wanted)
        if found[model].kind == "transcribe" and vllm:
            problems += _without_audio(model, vllm, (locks or {}).get(vllm.lock))
    if problems and judged:
        raise FleetError(*problems)
    return ResolvedKinds(found)


def _only_generates(model: str, served: Served, reading: KindReading) -> str:
    engine = engine_flags.of(served.engine).title
    return (
        f"serving.{model}.engine: {served.engine}: {reading.why}, so the model is of `kind: "
        f"{reading.kind}`. gpufleet runs {engine} only for `kind: generate`: remove `engine`, or "
        "declare `kind: generate` if the model completes text"
    )


def _release_words(
    model: str, served: Served, version: str, name: str, kind: ModelKind
) -> tuple[str, str]:
    """
    Return a problem if a release cannot serve the model as this kind, and a remark if it is not
    known whether the release can.

    Each of the two is "" if there is nothing to say. `name` is the name of the model's class. If
    vLLM has no code for the class, vLLM uses the package transformers, if that package supports the
    class. gpufleet does not know whether the package supports the class.
    """
    pools = kind in POOLS
    if not name or served_classes.has_code(version, name, pools=pools) is not False:
        return "", ""
    known = served_classes.releases_with(name, pools=pools)
    newer = [each for each in known if sort_key(each) > sort_key(version)]
    have = f"{newer[0]} and newer have" if newer else f"{known[-1]} was the last release that had"
    own = {key.lstrip("-").replace("_", "-"): value for key, value in served.flags.items()}
    where = f"serving.{model}: vLLM {version} has no code for {name}. vLLM {have} this code"
    if own.get("model-impl") == "vllm" or not served_classes.runs_by_transformers(version, kind):
        return (
            f"{where}: set `vllm.version` to a release with the code, or serve a different model"
        ), ""
    return "", (
        f"{where}. vLLM {version} runs the model with the package transformers, if that package "
        "supports the model"
    )


def _without_audio(model: str, vllm: Vllm, text: str | None) -> Iterable[str]:
    """Yield a problem if a lock file has none of the packages with which vLLM reads audio."""
    if text and f"\n{_AUDIO}==" not in f"\n{text}":
        yield (
            f"vllm.lock: {vllm.lock} does not contain the package {_AUDIO}, but {model} "
            "transcribes, and vLLM cannot read audio without this package: write the lock file "
            f"with `gpufleet packages lock vllm {vllm.version} --also "
            f"'vllm[audio]=={vllm.version}'`"
        )


def _too_few_tokens(model: str, served: Served) -> Iterable[str]:
    """
    Yield a problem if a step has fewer tokens than the encoder's audio input, because vLLM would
    exit.

    Without `max-num-batched-tokens`, a step has as many tokens as all requests of full length
    together (0.32.0: "Chunked MM input disabled but max_tokens_per_mm_item (1500) is larger").
    """
    tokens = _said(served, "max-num-batched-tokens")
    requests = _said(served, "max-num-seqs")
    length = served.context or _said(served, "max-model-len") or _TEXT
    if tokens is None and requests is not None:
        tokens = requests * length
    if tokens is not None and tokens < _SECONDS_30:
        yield (
            f"serving.{model}.flags: a step has {tokens:,} tokens, which is less than the "
            f"{_SECONDS_30:,} tokens of 30 seconds of sound, so vLLM does not start: write "
            f"`max-num-batched-tokens: {_SECONDS_30}` or more"
        )


def _said(served: Served, flag: str) -> int | None:
    """Return the number that the operator or else the last preset sets for a flag, or None."""
    found = [
        *([served.flags[flag]] if flag in served.flags else ()),
        *(
            choice.value
            for name in reversed(served.presets)
            for choice in presets.load(name).flags.get(flag, ())
        ),
    ]
    return human_readable(str(found[0])) if found else None


def objective_problems(model: str, kind: ModelKind, objectives: Objectives) -> tuple[str, ...]:
    """Return a sentence for each objective that does not apply to a model of this kind."""
    if kind not in POOLS:
        return ()
    return tuple(
        f"serving.{model}.objectives.{name}: a model of `kind: {kind}` answers with one document "
        "and not with single tokens: write `e2e_p99_seconds`, which is the time to the whole "
        "answer"
        for name in ("ttft_p99_seconds", "itl_p99_seconds")
        if getattr(objectives, name) is not None
    )


def kind_problems(settings: Mapping[str, NodeSettings]) -> tuple[str, ...]:
    """Return a sentence for each declared kind that the model's own flags contradict."""

    def declared(_: str, served: Served) -> Served | None:
        return served if served.kind else None

    try:
        resolve_kinds({name: each.with_serving(declared) for name, each in settings.items()}, {})
    except FleetError as error:
        return error.problems
    return ()


def resolve_kind(
    model: str, served: Served, reading: KindReading, running: ModelKind | None = None
) -> ResolvedKind:
    """
    Return the kind of requests to a model.

    Raises `FleetError` for a kind that the model cannot have.
    """
    own = {name.lstrip("-").replace("_", "-"): value for name, value in served.flags.items()}
    runner, convert = own.get("runner"), own.get("convert")
    pools = runner == "pooling" or (runner in {None, "auto"} and convert in POOLING)
    possible = reading.possible | (_CLASSIFIES if convert == "classify" else frozenset())
    kind = served.kind or _by_flags(model, reading, runner, convert, pools=pools)
    if kind is None and reading == UNREAD:
        kind = running
    if kind is None:
        return ResolvedKind(remark=_not_known(model, reading))
    if kind not in possible:
        raise FleetError(
            f"serving.{model}.kind: {kind}: {reading.why}, and such a model can only be "
            f"{' or '.join(sorted(possible))}: write one of these kinds, or remove `kind`, and "
            f"gpufleet uses the kind in the model's files{_decoder(kind, reading)}"
        )
    if runner == "generate" and kind in POOLS:
        raise FleetError(
            f"serving.{model}.flags.runner: generate: a model of `kind: {kind}` needs the "
            "pooling runner: remove the flag"
        )
    if pools and kind not in POOLS:
        flag = "runner" if runner == "pooling" else "convert"
        raise FleetError(
            f"serving.{model}.flags.{flag}: {own[flag]}: a model of `kind: {kind}` completes "
            "text, and does not use pooling: remove the flag, or declare a different kind"
        )
    return ResolvedKind(kind, tuple(_flags(kind, served, own.keys())))


def _by_flags(
    model: str, reading: KindReading, runner: object, convert: object, *, pools: bool
) -> ModelKind | None:
    """Return the only kind that the flags allow, else the kind of the model's files, or None."""
    if runner == "generate" and reading.kind == "embed" and "generate" in reading.possible:
        return "generate"
    if not pools or reading.kind in POOLS:
        return reading.kind
    if convert == "classify":
        raise FleetError(
            f"serving.{model}.kind: gpufleet cannot determine the kind. With `convert: "
            "classify`, the model either scores documents or chooses labels: declare `kind: "
            "rerank` or `kind: classify`"
        )
    return "embed"


def _flags(kind: ModelKind, served: Served, own: Iterable[str]) -> Iterable[LayeredFlag]:
    """
    Yield the flags that a kind needs. `generate` needs a flag only if the operator declares the
    kind.

    If the flag for `generate` depended on the model's files, a Hub that does not answer would
    change the unit and restart the model. vLLM itself converts a decoder for pooling
    (_get_default_convert_type in config/model.py), and treats a model with a modules.json as an
    embedder unless the runner is set.
    """
    runner = "pooling" if kind in POOLS else "generate" if served.kind == "generate" else None
    if runner and "runner" not in own:
        yield LayeredFlag("runner", runner, KIND, f"the model's kind is {kind}")


def _decoder(kind: ModelKind, reading: KindReading) -> str:
    if not reading.converts or kind not in _CLASSIFIES:
        return ""
    return (
        ". A decoder that classifies needs `flags.hf-overrides` with `architectures` (for "
        "example Qwen3ForSequenceClassification) and `classifier_from_token`. The model's "
        "publisher documents their values"
    )


def _not_known(model: str, reading: KindReading) -> str:
    if reading == UNREAD:
        return ""  # the plan already reports every model whose files were not read
    return (
        f"serving.{model}.kind: gpufleet cannot determine the kind: {reading.why}. gpufleet "
        "treats the model as one that completes text. Declare "
        f"{' or '.join(f'`{each}`' for each in sorted(reading.possible))} as its `kind`"
    )

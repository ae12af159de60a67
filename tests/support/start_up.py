"""The lines of vLLM's start-up that others published, and what is said here in their place."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache as once
from typing import Any

from gpufleet.catalog.gpu_models import card
from gpufleet.sizing import kv_bytes, kv_cache
from gpufleet.sizing.architectures.components import Architecture, LatentCache, WindowCache
from gpufleet.sizing.architectures.description import Description, ModelFiles, describe
from gpufleet.sizing.architectures.quantization import online_quantization
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Options, Sizing
from gpufleet.sizing.rank_weights import Sharding
from gpufleet.sizing.startup_memory import batch_defaults
from gpufleet.sizing.weights import StageWeights, layer_ranges, weight_bytes
from tests.support.checkout import ROOT

GIB = 1 << 30
ROUNDING = 0.005
"""The logs print GiB with two digits."""
_DATA = ROOT / "tests/data"
_REFUSED = re.compile(
    r"max seq len \((?P<length>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed.*"
    r"memory \((?P<available>[\d.]+) GiB\)(?:.*maximum model length is (?P<estimate>\d+))?"
)


@dataclass(frozen=True)
class Refusal:
    """What a release said when it did not start."""

    length: int
    needed_gib: float
    available_gib: float
    estimate: int
    """The longest model length that would start; 0: not said."""


@dataclass(frozen=True, eq=False)
class Log:
    """One start, as tests/data/start_up_logs.json has it."""

    record: dict[str, Any]

    def __str__(self) -> str:
        release = self.record["vllm"].split("+")[0]
        shape = "".join(
            f" {short}{self.flags[name]}"
            for short, name in (
                ("TP", "tensor_parallel_size"),
                ("PP", "pipeline_parallel_size"),
                ("DP", "data_parallel_size"),
                ("DCP", "decode_context_parallel_size"),
            )
            if self.flags.get(name, 1) > 1
        )
        kept = self.flags.get("kv_cache_dtype", "auto")
        kept = "" if kept == "auto" else f" KV {kept}"
        return f"{self.record['model']} {release}{shape}{kept} {self.max_model_len}"

    @property
    def lines(self) -> dict[str, Any]:
        """Return what the log prints."""
        lines: dict[str, Any] = self.record["lines"]
        return lines

    @property
    def flags(self) -> dict[str, Any]:
        """Return what vLLM was started with, by vLLM's names."""
        flags: dict[str, Any] = self.record["flags"]
        return flags

    @property
    def vllm(self) -> tuple[int, ...]:
        """Return the release whose rules hold: a build between two releases may say which."""
        found = re.match(r"\d+(\.\d+)*", self.record.get("behaves_as", self.record["vllm"]))
        assert found is not None, self.record["source"]
        return tuple(int(part) for part in found[0].split("."))[:3]

    @property
    def seen(self) -> bool:
        """Say whether a constant of the estimates was fitted to this start before 2026-11-25."""
        seen: bool = self.record["seen"]
        return seen

    @property
    def blind(self) -> bool:
        """Say whether parts, margins and shares of the estimates were fixed before it was read."""
        return bool(self.record.get("blind", False))

    @property
    def weighs_as_logged(self) -> bool:
        """Say whether its weights are taken from the log: its checkpoint's config is not known."""
        return bool(self.record.get("weighs_as_logged", False))

    @property
    def laboratory(self) -> str:
        """Return who ran it: the record's word, else the repository, else the log's own source."""
        if "laboratory" in self.record:
            return str(self.record["laboratory"])
        source: str = self.record["source"]
        if source.startswith("github.com/"):
            owner, name = source.split(maxsplit=1)[0].split("/")[1:3]
            issue = re.search(r"/(issues|pull)/\d+", source)
            # In vLLM's own tracker each thread is another reporter's machine.
            return f"{owner}/{name}{issue[0]}" if issue else f"{owner}/{name}"
        return source

    @property
    def host(self) -> str:
        """Return the kind of GPU, in the catalogue's words."""
        if "gpu" in self.record:
            return card(self.record["gpu"]).name
        return "GH200" if "GH200" in self.laboratory else f"{self.lines.get('total_gib', 0):g} GiB"

    @property
    def band(self) -> str:
        """Return the releases that it is counted with."""
        minor = self.vllm[1]
        for first, last in ((8, 10), (11, 15), (16, 20), (21, 27)):
            if first <= minor <= last:
                return f"0.{first} to 0.{last}"
        return "0.28 to 0.33"

    @property
    def family(self) -> str:
        """Return what kind of cache the model has; "encoders": none."""
        if not any(layer.caches for layer in self.description.architecture.layers):
            return "encoders"
        kinds = {
            page.kind.value
            for stage in layout(self).stages
            for page in kv_bytes.pages(layout(self), stage)
        }
        architecture = self.description.architecture
        if "cross" in kinds:
            return "encoder and decoder"
        if "state" in kinds:
            return "hybrid with states"
        if kinds & {"window", "chunk"}:
            return "windows or chunks"
        if any(
            isinstance(cache, LatentCache)
            for layer in architecture.layers
            for cache in layer.caches
        ):
            return "latent attention"
        return "mixture of experts" if architecture.experts else "dense"

    @property
    def description(self) -> Description:
        """Return the model, from its config."""
        config = self.record["config"]
        changes = json.dumps(self.record.get("config_changes", {}))
        return _description(config if isinstance(config, str) else json.dumps(config), changes)

    @property
    def tensor(self) -> int:
        """Return the GPUs of a stage."""
        tensor: int = self.flags.get("tensor_parallel_size", 1)
        return tensor

    @property
    def pipeline(self) -> int:
        """Return the stages."""
        pipeline: int = self.flags.get("pipeline_parallel_size", 1)
        return pipeline

    @property
    def dtype(self) -> str:
        """Return what the weights are loaded in."""
        asked: str = self.flags.get("dtype", "auto")
        return self.description.architecture.dtype if asked == "auto" else asked

    @property
    def max_model_len(self) -> int:
        """Return the longest context that the server takes."""
        length: int = self.lines.get("max_model_len") or self.flags.get("max_model_len", 0)
        return length or self.description.architecture.max_model_len

    @property
    def drafts(self) -> int:
        """Return the speculative tokens."""
        return int((self.flags.get("speculative_config") or {}).get("num_speculative_tokens", 0))

    @property
    def own_drafts(self) -> bool:
        """Say whether the model's own multi-token prediction layers are loaded."""
        method = str((self.flags.get("speculative_config") or {}).get("method"))
        return "mtp" in method

    @property
    def loaded_gib(self) -> float | None:
        """Return `Model loading took` of the largest rank; None: not printed."""
        ranks = self.lines.get("model_loading_gib_ranks")
        loaded: float | None = max(ranks) if ranks else self.lines.get("model_loading_gib")
        return loaded

    @property
    def available_gib(self) -> list[float] | None:
        """Return `Available KV cache memory`, of each stage; None: not printed."""
        if "available_kv_gib_stages" in self.lines:
            return list(self.lines["available_kv_gib_stages"])
        if "available_kv_gib" not in self.lines:
            return None
        ranks = self.lines.get("available_kv_gib_ranks", [self.lines["available_kv_gib"]])
        return [min(ranks)] * self.pipeline

    @property
    def refusal(self) -> Refusal | None:
        """Return what it was refused with; None: it started."""
        said = self.lines.get("refused")
        found = _REFUSED.search(said) if said else None
        if found is None:
            return None
        return Refusal(
            int(found["length"]),
            float(found["needed"]),
            float(found["available"]),
            int(found["estimate"] or 0),
        )

    @property
    def only_cache(self) -> bool:
        """Say whether the config is of the model's shapes alone, not of its weights."""
        return "only the cache" in self.record.get("note", "")

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the GPU's compute capability; None: the log does not say the GPU."""
        return card(self.record["gpu"]).compute_capability if "gpu" in self.record else None

    @property
    def gpu_memory_gib(self) -> float | None:
        """Return the total that CUDA reports; None: the log does not say the GPU."""
        if "total_gib" in self.lines:
            total: float = self.lines["total_gib"]
            return total
        return card(self.record["gpu"]).memory_gib if "gpu" in self.record else None


@once
def _description(config: str, changes: str) -> Description:
    if config.startswith("{"):
        found = json.loads(config)
    else:
        found = json.loads((_DATA / "models" / f"{config}.json").read_text())["config"]
    wanted = json.loads(changes)
    inner = {**found.get("text_config", {}), **wanted.pop("text_config", {})}
    changed = {**found, **wanted, "text_config": inner or None}
    return describe(ModelFiles({key: value for key, value in changed.items() if value is not None}))


@once
def logs() -> tuple[Log, ...]:
    """Return every start of the data file."""
    return tuple(Log(record) for record in json.loads((_DATA / "start_up_logs.json").read_text()))


def _loaded(log: Log) -> Architecture:
    """Return what of the model is loaded: `--language-model-only` leaves the towers out."""
    whole = log.description.architecture
    if not log.flags.get("language_model_only"):
        return whole
    parts = tuple(part for part in whole.parts if part.name != "tower")
    return replace(whole, parts=parts, multimodal=False)


def _with_drafts(log: Log) -> Architecture:
    """Return what is loaded, the layers that predict further tokens among the others."""
    whole = _loaded(log)
    if not log.own_drafts:
        return whole
    return replace(whole, layers=whole.layers + whole.draft_layers, draft_layers=())


@once
def weighed(log: Log) -> tuple[StageWeights, ...]:
    """Return what each pipeline stage's largest rank weighs."""
    quantization = log.description.quantization
    if quantization is None and "quantization" in log.flags:
        quantization = online_quantization(log.flags["quantization"], log.vllm)
    return weight_bytes(
        _with_drafts(log),
        quantization,
        Sharding(
            log.tensor,
            log.pipeline,
            log.flags.get("data_parallel_size", 1),
            bool(log.flags.get("enable_expert_parallel", False)),
        ),
        dtype=log.dtype,
        vllm=log.vllm,
        partition=log.record.get("partition"),
        compute_capability=log.capability,
    )


@once
def layout(log: Log) -> kv_bytes.Layout:
    """Return what the arithmetic of the log's KV cache depends on."""
    architecture = log.description.architecture
    ranges = layer_ranges(len(architecture.layers), log.pipeline, log.record.get("partition"))
    stages = list(kv_bytes.caches(architecture, ranges))
    if log.own_drafts:
        stages[-1] += kv_bytes.draft_caches(architecture)
    # A draft model's layers are like the model's own.
    stages[-1] += stages[-1][-1:] * log.record.get("further_layers", 0)
    layers, *shape = log.record.get("further_windows", (0, 1, 1, 1))
    stages[-1] += (WindowCache(*shape),) * layers
    return kv_bytes.Layout(
        stages=tuple(stages),
        vllm=log.vllm,
        max_model_len=log.max_model_len,
        max_num_batched_tokens=_batched_tokens(log),
        dtype=log.dtype,
        kv_dtype=log.flags.get("kv_cache_dtype", "auto"),
        tensor=log.tensor,
        decode_context_parallel=log.flags.get("decode_context_parallel_size", 1),
        block_size=log.flags.get("block_size"),
        prefix_caching=log.flags.get("enable_prefix_caching"),
        speculative_tokens=log.drafts,
        hybrid_manager=not log.flags.get("disable_hybrid_kv_cache_manager", False),
        compute_capability=log.capability,
    )


def _batched_tokens(log: Log) -> int:
    """Return --max-num-batched-tokens, or its default on the log's GPU; on one not known, 2,048."""
    return batch_defaults(
        vllm=log.vllm,
        gpu_memory_gib=log.gpu_memory_gib or 0,
        max_model_len=log.max_model_len,
        compute_capability=log.capability,
        gpu=log.record.get("gpu"),
        max_num_seqs=log.flags.get("max_num_seqs"),
        max_num_batched_tokens=log.flags.get("max_num_batched_tokens"),
    ).max_num_batched_tokens


@once
def cached(log: Log, by: float = 0.0) -> kv_cache.CacheReport:
    """Return what is said of the memory that the log prints, and `by` GiB more."""
    available = log.available_gib
    assert available is not None
    return kv_cache.cache(layout(log), [int((one + by) * GIB) for one in available])


@once
def sized(log: Log) -> Sizing:
    """Return the whole chain's figures: from the config, the flags and the GPU alone."""
    return size(*asked(log))


def asked(log: Log) -> tuple[Description, Options]:
    """Return what is started, and how."""
    memory = log.gpu_memory_gib
    assert memory is not None
    flags = log.flags
    return (
        replace(log.description, architecture=_loaded(log)),
        Options(
            gpu_memory_gib=memory,
            vllm=log.vllm,
            tensor_parallel=log.tensor,
            pipeline_parallel=log.pipeline,
            data_parallel=flags.get("data_parallel_size", 1),
            expert_parallel=bool(flags.get("enable_expert_parallel", False)),
            max_model_len=log.max_model_len,
            gpu_memory_utilization=flags.get("gpu_memory_utilization"),
            kv_cache_dtype=flags.get("kv_cache_dtype", "auto"),
            quantization=flags.get("quantization"),
            dtype=flags.get("dtype", "auto"),
            max_num_seqs=flags.get("max_num_seqs"),
            max_num_batched_tokens=flags.get("max_num_batched_tokens"),
            enforce_eager=flags.get("enforce_eager", False),
            prefix_caching=flags.get("enable_prefix_caching"),
            block_size=flags.get("block_size"),
            decode_context_parallel=flags.get("decode_context_parallel_size", 1),
            speculative_tokens=log.drafts if log.own_drafts else 0,
            hybrid_manager=not flags.get("disable_hybrid_kv_cache_manager", False),
            compute_capability=log.capability,
        ),
    )


def whole_logs() -> tuple[Log, ...]:
    """Return the starts that say all that the whole chain needs."""
    return tuple(log for log in started_logs() if not log.weighs_as_logged)


def started_logs() -> tuple[Log, ...]:
    """Return those, and the starts that say all but what their checkpoint's tensors are."""
    return tuple(
        log
        for log in logs()
        if log.gpu_memory_gib
        and not log.only_cache
        and log.available_gib
        and min(log.available_gib) > 0
        and "cpu_offload_gb" not in log.flags
        and "not the whole chain" not in log.record.get("note", "")
    )

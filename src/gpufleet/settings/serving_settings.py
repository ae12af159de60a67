"""Settings of vLLM: the release, and the models to serve.

Pure, like `settings/node_settings.py`, which contains these. Durations are in seconds; the names of
sizes contain the unit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from gpufleet.catalog import presets
from gpufleet.formatting import suggestion
from gpufleet.settings import engine_flags
from gpufleet.settings.adapter_settings import Adapter, AdapterName, flag_mistakes
from gpufleet.settings.base import (
    LOOPBACK,
    AbsolutePath,
    BindAddress,
    PackageIndex,
    Port,
    PythonVersion,
    Seconds,
    Setting,
    Tokens,
    pattern_rule,
)
from gpufleet.settings.engine_flags import EngineName
from gpufleet.settings.monitoring_settings import Objectives, Watchdog
from gpufleet.settings.upgrade_settings import Golden
from gpufleet.versions import numbers


def _as_json_has_it(value: Any) -> Any:
    """
    Refuse YAML values that a command line cannot express: dates, sets, keys that are not text.
    """
    try:
        kept = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        kept = False
    if not kept:
        raise ValueError(
            "must be true, false, a number, text (a date in quotes), a list, or keys that are text "
            "with such values"
        )
    return value


Argument: TypeAlias = Annotated[
    bool | int | float | str | list[Any] | dict[str, Any] | None, BeforeValidator(_as_json_has_it)
]
"""
The value of a vLLM flag in YAML.

`true` passes the bare flag, `false` its `--no-` form, a mapping JSON, and a list one value after
another; with null, the flag is not passed.
"""


ModelKind: TypeAlias = Literal["generate", "embed", "rerank", "classify", "reward", "transcribe"]
"""
The type of a model's answers: text, vectors, scores of documents, labels, a pooler's numbers, or
transcribed speech. on_node/serving/questions.py has the request for each.
"""


# It becomes part of unit names, directories and URLs. 40 leaves room for "vllm-", the replica and
# ".service" in systemd's limit of 255, and for a metric label that people can read.
ModelName = Annotated[
    str,
    pattern_rule(
        r"[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?",
        "at most 40 of a-z, 0-9, `.` and `-`, with a letter or digit first and last; for "
        "clients, set another name with `served_name`",
    ),
]


# It becomes part of a credential's name, and a shell exports it.
VariableName = Annotated[
    str,
    pattern_rule(
        r"[A-Za-z_][A-Za-z0-9_]{0,127}",
        "a variable's name: at most 128 letters, digits and `_`, no digit first",
    ),
]


PLANNED_ENVIRONMENT = frozenset(
    {"CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY"}
)


LEAST_SHARE = 0.01
MOST_OF_A_GPU = 0.95
"""
The largest sum of the shares of one GPU. The rest is for the driver and exporters (checks allow
others 4 %), and for servers' allocations beyond their budgets.
"""

# Flags that divide a replica over GPUs, or that set the share in another way.
_NOT_WITH_A_SHARE = {
    "gpu-memory-utilization": "it follows from `gpu_share`",
    "prefill-context-parallel-size": "a share is of one GPU",
    "decode-context-parallel-size": "a share is of one GPU",
}


# The first release whose parser knows --shutdown-timeout (read in the sources of 43 releases).
OLDEST_VLLM = (0, 18)
# The first of the packaged releases with `sglang serve` and all flags of
# engines/sglang/sglang_arguments.py.
OLDEST_SGLANG = (0, 5, 5)


class Distribution(Setting):
    """Copies of releases and models between nodes: docs/gpu-nodes/distribution.md."""

    enabled: Annotated[
        bool, Field(description="false: share nothing; build and download only for this node")
    ] = True
    port: Annotated[
        int,
        Field(
            ge=1024,
            le=65535,
            description="Port while other nodes copy from this one; otherwise closed",
        ),
    ] = 8790
    rate_mbit: Annotated[
        PositiveInt | None,
        Field(description="Upload limit in Mbit/s; null: unlimited"),
    ] = None


class EngineSettings(Setting):
    """An engine's release, and what all stages of a node share."""

    free_text: ClassVar = frozenset({"environment"})
    engine: ClassVar[EngineName]

    version: PythonVersion
    lock: Annotated[
        str,
        Field(description="Lock file with hashes; relative to the project's root, or absolute"),
    ]
    uv_lock: Annotated[str, Field(description="Lock file of uv, which builds the release")] = (
        "locks/uv.txt"
    )
    python: Annotated[AbsolutePath, Field(description="The node's interpreter")] = (
        "/usr/bin/python3"
    )
    index_url: Annotated[PackageIndex | None, Field(description="Package index; null: PyPI")] = None
    find_links: Annotated[tuple[str, ...], Field(description="Flat wheel directories")] = ()
    no_index: Annotated[bool, Field(description="Use only find_links, no package index")] = False
    device: Annotated[
        Literal["cuda", "cpu"],
        Field(
            description="cpu: for nodes without real GPUs (the lab). The plan still comes from "
            "the probe; engines run their CPU builds, one process per rank"
        ),
    ] = "cuda"
    user: Annotated[
        str,
        pattern_rule(
            r"[a-z_][a-z0-9_-]{0,30}",
            "a user's name: at most 31 of a-z, 0-9, `_` and `-`, a letter or `_` first",
        ),
        Field(description="System user of the servers"),
    ] = "vllm"
    listen: Annotated[BindAddress, Field(description="Address that endpoints bind")] = "0.0.0.0"  # noqa: S104
    watchdog_port: Annotated[
        int | None,
        Field(
            ge=1024,
            le=65535,
            description="Port on `listen` where the watchdog reports stalled servers to "
            "gateways; null: none",
        ),
    ] = 8406
    api_key_file: Annotated[
        str | None,
        Field(description="File on this machine with the API key; its content goes to the nodes"),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        Field(
            description="File on this machine with the shared key of a replica's nodes, 32 "
            "bytes or more; required if replicas span nodes"
        ),
    ] = None
    allow_unauthenticated: Annotated[
        bool, Field(description="Accept that any client that reaches the port can use the model")
    ] = False
    allow_control_routes: Annotated[
        bool,
        Field(
            description="Accept variables and flags that add control routes to servers, as "
            "VLLM_SERVER_DEV_MODE does: any client with the API key can use them"
        ),
    ] = False
    allow_unguarded_ports: Annotated[
        bool,
        Field(
            description="Accept replicas that span nodes without `firewall`: any client that "
            "reaches the ports between the nodes can run code there"
        ),
    ] = False
    hf_token_file: Annotated[
        str | None, Field(description="File on this machine with the Hugging Face token")
    ] = None
    models_lock: Annotated[
        str,
        Field(description="Hashes of models' files: `gpufleet lock --models` writes it"),
    ] = "models.lock.json"
    hf_endpoint: Annotated[
        str | None,
        pattern_rule(r"https?://\S+", "an address that starts with https:// or http://"),
        Field(description="A mirror of the Hugging Face Hub"),
    ] = None
    distribution: Distribution = Distribution()
    environment: Annotated[dict[str, str], Field(description="For every stage")] = {}
    environment_files: Annotated[
        dict[VariableName, str],
        Field(description="Secret variables: for each, a file on this machine with its value"),
    ] = {}
    keep_releases: Annotated[
        int, Field(ge=1, description="Additional releases to keep on a node, newest first")
    ] = 2
    keep_days: Annotated[
        int, Field(ge=0, description="Also keep releases built within this many days")
    ] = 14

    @model_validator(mode="after")
    def _open_endpoints_are_deliberate(self) -> Self:
        local = self.listen in LOOPBACK
        if not local and self.api_key_file is None and not self.allow_unauthenticated:
            raise ValueError(
                f"endpoints would listen on {self.listen} without an API key: set `api_key_file`, "
                "or "
                "`listen: 127.0.0.1`, or `allow_unauthenticated: true`"
            )
        if mistakes := _environment_mistakes(self.environment, self.environment_files):
            raise ValueError("; ".join(mistakes))
        if wrong := self.release_mistake(self.version):
            raise ValueError(wrong)
        if self.no_index and not self.find_links:
            raise ValueError(
                "`no_index` without `find_links` leaves no download source: set `find_links`"
            )
        if self.no_index and self.index_url:
            raise ValueError("`no_index` and `index_url` exclude each other: remove one")
        return self

    @classmethod
    def release_mistake(cls, version: str) -> str | None:  # noqa: ARG003
        """Return why gpufleet cannot run a release of this engine, or None."""
        return None


class Vllm(EngineSettings):
    """The vLLM release and what all stages of a node share."""

    engine: ClassVar[EngineName] = "vllm"

    @classmethod
    def release_mistake(cls, version: str) -> str | None:
        """Return why gpufleet cannot run a release of vLLM, or None."""
        if numbers(version)[:2] >= OLDEST_VLLM:
            return None
        return (
            f"vLLM {version} has no --shutdown-timeout, without which a restart cuts off "
            f"running requests: use {'.'.join(map(str, OLDEST_VLLM))}.0 or newer"
        )


class Sglang(EngineSettings):
    """The SGLang release; beside `vllm`, keys that are left out have the values of `vllm`."""

    engine: ClassVar[EngineName] = "sglang"

    @classmethod
    def release_mistake(cls, version: str) -> str | None:
        """Return why gpufleet cannot run a release of SGLang, or None."""
        if numbers(version) >= OLDEST_SGLANG:
            return None
        return (
            f"SGLang {version} has no `sglang serve`: use "
            f"{'.'.join(map(str, OLDEST_SGLANG))} or newer"
        )


def _environment_mistakes(
    environment: Mapping[str, str], environment_files: Mapping[str, str]
) -> list[str]:
    """Return the mistakes in the variables of `vllm` or of a model."""
    mistakes = [
        f"`{key}` sets {', '.join(planned)}, which the plan decides"
        for key, names in (("environment", environment), ("environment_files", environment_files))
        if (planned := sorted(set(names) & PLANNED_ENVIRONMENT))
    ]
    if twice := sorted(set(environment) & set(environment_files)):
        mistakes.append(
            f"`environment` and `environment_files` both set {', '.join(twice)}: remove one"
        )
    return mistakes


def _some_or_fit(value: Any) -> Any:
    if value == "fit" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"must be a number from 1 up, or `fit` for as many as fit (got {value!r})")


class Served(Setting):
    """One model to serve: its files, replicas, division over GPUs, flags and limits."""

    free_text: ClassVar = frozenset({"environment", "flags"})

    model: Annotated[
        str,
        pattern_rule(
            r"/\S+|[\w.-]+/[\w.-]+",
            "a Hugging Face id, as Qwen/Qwen3-8B, or the absolute path of a directory on the node, "
            "as /srv/models/qwen3-8b",
        ),
        Field(
            description="Hugging Face id (downloaded on the node), or an absolute path on the node",
        ),
    ]
    revision: Annotated[
        str | None,
        pattern_rule(
            r"[0-9a-f]{40}",
            "a commit, all 40 digits of it: `git ls-remote` prints it, and so does the model's "
            "page on the Hub under `Files`, `History`",
        ),
        Field(
            description="Commit of a Hugging Face model, all 40 digits; a branch can change, "
            "and nodes would differ",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        pattern_rule(r"[\w.:/-]+", "letters, digits, `.`, `_`, `:`, `/` and `-`"),
        Field(description="Name for clients; null: the name of this entry"),
    ] = None
    kind: Annotated[
        ModelKind | None,
        Field(
            description="The model's kind of answers; generate: text; rerank: scores of "
            "documents; reward: the numbers of /pooling; null: as in the model's "
            "files"
        ),
    ] = None
    replicas: Annotated[
        int | Literal["fit"],
        BeforeValidator(_some_or_fit),
        Field(description="Number of independent copies; fit: as many as fit"),
    ] = 1
    engine: Annotated[
        EngineName, Field(description="The engine that serves it; its section has the release")
    ] = "vllm"
    prefer: Annotated[
        tuple[str, ...],
        Field(
            description="Groups of nodes to prefer for new replicas, in this order; other "
            "nodes get the rest"
        ),
    ] = ()
    objective: Annotated[
        Literal["balanced", "latency", "throughput", "memory"],
        Field(description="What the plan optimises for"),
    ] = "balanced"
    context: Annotated[
        Tokens | None,
        Field(gt=0, description="Maximum context in tokens, answer included; null: the model's"),
    ] = None
    concurrency: Annotated[
        PositiveInt, Field(description="Concurrent requests of full length that must fit")
    ] = 1
    presets: Annotated[
        tuple[str, ...],
        Field(description="Presets of flags, the last one wins: `gpufleet presets`"),
    ] = ()
    gpu_share: Annotated[
        float | None,
        Field(
            ge=LEAST_SHARE,
            le=MOST_OF_A_GPU,
            description="Fraction of one GPU's memory, which it shares with other models that "
            "have `gpu_share`; null: whole GPUs",
        ),
    ] = None
    tensor_parallel: Annotated[
        PositiveInt | None,
        Field(description="GPUs that share each layer (tensor parallel); null: planned"),
    ] = None
    pipeline_parallel: Annotated[
        PositiveInt | None, Field(description="Pipeline stages; null: planned")
    ] = None
    data_parallel: Annotated[
        PositiveInt | None, Field(description="Engines behind one endpoint; null: planned")
    ] = None
    expert_parallel: Annotated[
        bool | None,
        Field(description="Whole experts on each GPU instead of slices of all; null: planned"),
    ] = None
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"],
        Field(description="Executor for a replica that spans nodes: vLLM's processes, or Ray"),
    ] = "mp"
    data_parallel_balancing: Annotated[
        Literal["internal", "hybrid", "external"],
        Field(description="Balancing over engines: one server, one per node, or none"),
    ] = "internal"
    prefill: Annotated[
        ModelName | None,
        Field(
            description="Entry of `serving` that computes this one's prompts and hands over the "
            "KV cache; null: this one does both"
        ),
    ] = None
    cluster_port: Annotated[
        Port, Field(description="First port between the nodes of a replica")
    ] = 29500
    span_nodes: Annotated[
        bool, Field(description="Let a replica span nodes if one is too small")
    ] = False
    when_a_node_leaves: Annotated[
        Literal["refuse", "replan"],
        Field(
            description="If a node of a replica that spans nodes leaves the inventory or "
            "loses GPUs: refuse the plan, or place the replica on other nodes"
        ),
    ] = "refuse"
    allow_pcie: Annotated[
        bool,
        Field(
            description="Let a tensor-parallel group use PCIe if no NVLink island is large "
            "enough; every layer then waits for PCIe"
        ),
    ] = False
    port: Annotated[
        Port, Field(description="First port; further replicas on a node take the next")
    ] = 8000
    flags: Annotated[
        dict[str, Argument], Field(description="Flags of the engine's server, without dashes")
    ] = {}
    adapters: Annotated[
        dict[AdapterName, Adapter],
        Field(description="LoRA adapters that every replica loads, by the name for clients"),
    ] = {}
    allow_unlocked_code: Annotated[
        bool,
        Field(description="Accept that `trust-remote-code` runs code that no model lock covers"),
    ] = False
    environment: Annotated[
        dict[str, str], Field(description="Environment variables of this model's servers")
    ] = {}
    environment_files: Annotated[
        dict[VariableName, str],
        Field(description="Secret variables: for each, a file on this machine with its value"),
    ] = {}
    start_seconds: Annotated[
        Seconds, Field(gt=0, description="Deadline from start to the first answer")
    ] = 1800
    drain_seconds: Annotated[
        Seconds,
        Field(ge=0, le=3600, description="Time for running requests to finish before a stop"),
    ] = 60

    objectives: Annotated[
        Objectives,
        Field(description="Latencies promised to clients; alerts use those that are set"),
    ] = Objectives()
    watchdog: Annotated[
        Watchdog, Field(description="What to do when requests run but produce no tokens")
    ] = Watchdog()
    golden: Annotated[
        Golden, Field(description="Prompts whose answers must stay the same after a change")
    ] = Golden()

    @property
    def is_path(self) -> bool:
        """Return whether the model is a directory on the node, not a download."""
        return self.model.startswith("/")

    @property
    def hub_sources(self) -> tuple[tuple[str, str], ...]:
        """
        Return the downloads of the entry, each as (repository, commit): the model and its adapters.
        """
        every = ((self.model, self.revision),
                 *((each.source, each.revision) for each in self.adapters.values()))  # fmt: skip
        return tuple((source, revision) for source, revision in every if revision)

    @model_validator(mode="after")
    def _nothing_is_set_twice(self) -> Served:
        mistakes: list[str] = []
        names = {name.lstrip("-").replace("_", "-") for name in self.flags}
        mistakes += engine_flags.flag_mistakes(self.engine, self.flags)
        mistakes += engine_flags.setting_mistakes(self.engine, dict(self))
        mistakes += flag_mistakes(self.adapters, names)
        mistakes += self._share_mistakes(names)
        if self.adapters and self.prefill:
            mistakes.append(
                "`adapters` and `prefill` exclude each other: the entry that computes the "
                "prompts would need the adapters, too, but a name can belong to only one entry; "
                "remove one of the two"
            )
        length = engine_flags.of(self.engine).length
        if self.context is not None and length in names:
            mistakes.append(f"`context` and `flags.{length}` are the same: remove one of them")
        mistakes += [
            f"there is no preset {name!r}{suggestion(name, list(presets.names()))}; `gpufleet "
            "presets` names them all"
            for name in self.presets
            if name not in presets.names()
        ]
        mistakes += _environment_mistakes(self.environment, self.environment_files)
        if not self.is_path and self.revision is None:
            mistakes.append(
                f"`revision` is missing: set the commit of {self.model}, so that every node and "
                "every run serves the same files"
            )
        if self.is_path and self.revision is not None:
            mistakes.append("`revision` has no effect for a path: remove it")
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    def _share_mistakes(self, names: Collection[str]) -> Iterator[str]:
        """Yield the settings that conflict with `gpu_share`; `names` are the names in `flags`."""
        if self.gpu_share is None:
            return
        for key in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            if (number := getattr(self, key) or 1) > 1:
                yield (
                    f"`gpu_share` beside `{key}: {number}`: a share is of one GPU: remove "
                    "`gpu_share` to give the replica whole GPUs, or remove the other"
                )
        for name, why in _NOT_WITH_A_SHARE.items():
            if name in names:
                yield f"`gpu_share` beside `flags.{name}`: {why}: remove the flag"

"""Settings of the engines: the releases, and the models to serve.

Pure. `settings/node_settings.py` contains these settings. Durations are in seconds. The name of a
size contains its unit.
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
            "must be true, false, a number, text, a list, or a mapping whose keys are "
            "text; write a date in quotes, so that it is text"
        )
    return value


Argument: TypeAlias = Annotated[
    bool | int | float | str | list[Any] | dict[str, Any] | None, BeforeValidator(_as_json_has_it)
]
"""
The value of a vLLM flag in YAML:

- `true`: gpufleet passes the flag without a value.
- `false`: gpufleet passes the `--no-` form of the flag.
- a mapping: gpufleet passes it as JSON.
- a list: gpufleet passes its items as separate values.
- null: gpufleet does not pass the flag.
"""


ModelKind: TypeAlias = Literal["generate", "embed", "rerank", "classify", "reward", "transcribe"]
"""
The type of a model's answers: text, vectors, scores of documents, labels, a pooler's numbers, or
transcribed speech. For each type, on_node/serving/questions.py has a request.
"""


# The name becomes a part of unit names, directories and URLs. With at most 40 characters, "vllm-",
# the replica and ".service" fit in systemd's limit of 255, and labels of metrics stay readable.
ModelName = Annotated[
    str,
    pattern_rule(
        r"[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?",
        "at most 40 characters of a-z, 0-9, `.` and `-`, with a letter or digit first and "
        "last; to give clients a different name, set `served_name`",
    ),
]


# The name becomes a part of a credential's name, and a shell exports the variable.
VariableName = Annotated[
    str,
    pattern_rule(
        r"[A-Za-z_][A-Za-z0-9_]{0,127}",
        "the name of a variable: at most 128 letters, digits and `_`, and the first "
        "character is not a digit",
    ),
]


PLANNED_ENVIRONMENT = frozenset(
    {"CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY"}
)


LEAST_SHARE = 0.01
MOST_OF_A_GPU = 0.95
"""
The maximum sum of the shares of one GPU.

The rest of the GPU's memory is for the driver and exporters, and for memory that servers allocate
beyond their budgets. Checks allow other programs to use 4 % of the memory.
"""

# Flags that divide a replica over GPUs, or that set the share in another way.
_NOT_WITH_A_SHARE = {
    "gpu-memory-utilization": "gpufleet computes its value from `gpu_share`",
    "prefill-context-parallel-size": "a share is of one GPU",
    "decode-context-parallel-size": "a share is of one GPU",
}


# The first release that has the flag --shutdown-timeout (found in the sources of 43 releases).
OLDEST_VLLM = (0, 18)
# The first release with `sglang serve` and all flags in engines/sglang/sglang_arguments.py, of the
# releases whose flags gpufleet ships.
OLDEST_SGLANG = (0, 5, 5)


class Distribution(Setting):
    """How nodes copy releases and models from each other: docs/gpu-nodes/distribution.md."""

    enabled: Annotated[
        bool,
        Field(
            description="false: this node copies nothing from other nodes and to other nodes. "
            "It builds and downloads everything itself"
        ),
    ] = True
    port: Annotated[
        int,
        Field(
            ge=1024,
            le=65535,
            description="Port that is open only while other nodes copy from this node",
        ),
    ] = 8790
    rate_mbit: Annotated[
        PositiveInt | None,
        Field(description="Most Mbit/s that this node sends to other nodes. null: no limit"),
    ] = None


class EngineSettings(Setting):
    """The release of an engine, and the values that all servers of a node share."""

    free_text: ClassVar = frozenset({"environment"})
    engine: ClassVar[EngineName]

    version: PythonVersion
    lock: Annotated[
        str,
        Field(
            description="Lock file of package versions with hashes. The path is absolute, or "
            "relative to the project's root"
        ),
    ]
    uv_lock: Annotated[
        str, Field(description="Lock file of uv, the program that builds the release on the node")
    ] = "locks/uv.txt"
    python: Annotated[AbsolutePath, Field(description="Path of the node's Python interpreter")] = (
        "/usr/bin/python3"
    )
    index_url: Annotated[
        PackageIndex | None, Field(description="Address of the package index. null: PyPI")
    ] = None
    find_links: Annotated[
        tuple[str, ...],
        Field(
            description="Addresses of pages with links to wheels, or directories on the node with "
            "wheels"
        ),
    ] = ()
    no_index: Annotated[bool, Field(description="Use no package index, only `find_links`")] = False
    device: Annotated[
        Literal["cuda", "cpu"],
        Field(
            description="cpu: for nodes without real GPUs, as in the lab. gpufleet still "
            "plans with the GPUs that the probe reports. The engines run their CPU builds, "
            "with one process for each rank"
        ),
    ] = "cuda"
    user: Annotated[
        str,
        pattern_rule(
            r"[a-z_][a-z0-9_-]{0,30}",
            "the name of a user: at most 31 characters of a-z, 0-9, `_` and `-`, and the "
            "first character is a letter or `_`",
        ),
        Field(description="System user that the servers run as"),
    ] = "vllm"
    listen: Annotated[BindAddress, Field(description="IP address that the endpoints listen on")] = (
        "0.0.0.0"  # noqa: S104
    )
    watchdog_port: Annotated[
        int | None,
        Field(
            ge=1024,
            le=65535,
            description="Port, on the address of `listen`, where the watchdog reports "
            "stalled servers to gateways. null: no port, so gateways get no reports",
        ),
    ] = 8406
    api_key_file: Annotated[
        str | None,
        Field(
            description="File with the API key, on the machine that runs gpufleet, which "
            "copies the content to the nodes"
        ),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        Field(
            description="File with the key that the nodes of a replica share, on the "
            "machine that runs gpufleet. The key has 32 bytes or more. Required if "
            "replicas span nodes"
        ),
    ] = None
    allow_unauthenticated: Annotated[
        bool, Field(description="Accept that any client that reaches the port can use the model")
    ] = False
    allow_control_routes: Annotated[
        bool,
        Field(
            description="Accept variables and flags that add control routes to servers, "
            "for example VLLM_SERVER_DEV_MODE. Any client with the API key can use these "
            "routes"
        ),
    ] = False
    allow_unguarded_ports: Annotated[
        bool,
        Field(
            description="Accept replicas that span nodes although `firewall` is not set. "
            "Any client that reaches the ports between the nodes can run code on the nodes"
        ),
    ] = False
    hf_token_file: Annotated[
        str | None,
        Field(description="File with the Hugging Face token, on the machine that runs gpufleet"),
    ] = None
    models_lock: Annotated[
        str,
        Field(
            description="File with the hashes of the models' files. `gpufleet lock --models` "
            "writes the file"
        ),
    ] = "models.lock.json"
    hf_endpoint: Annotated[
        str | None,
        pattern_rule(r"https?://\S+", "an address that starts with https:// or http://"),
        Field(description="Address of a mirror of the Hugging Face Hub"),
    ] = None
    distribution: Distribution = Distribution()
    environment: Annotated[
        dict[str, str], Field(description="Environment variables of all servers of the engine")
    ] = {}
    environment_files: Annotated[
        dict[VariableName, str],
        Field(description="Secret variables: for each, a file on this machine with its value"),
    ] = {}
    keep_releases: Annotated[
        int,
        Field(
            ge=1,
            description="Number of additional releases to keep on a node. The newest releases "
            "are kept",
        ),
    ] = 2
    keep_days: Annotated[
        int,
        Field(
            ge=0,
            description="Number of days. A release that was built within these days is also kept",
        ),
    ] = 14

    @model_validator(mode="after")
    def _open_endpoints_are_deliberate(self) -> Self:
        local = self.listen in LOOPBACK
        if not local and self.api_key_file is None and not self.allow_unauthenticated:
            raise ValueError(
                f"endpoints would listen on {self.listen} without an API key: set "
                "`api_key_file`, or write `listen: 127.0.0.1` or `allow_unauthenticated: "
                "true`"
            )
        if mistakes := _environment_mistakes(self.environment, self.environment_files):
            raise ValueError("; ".join(mistakes))
        if wrong := self.release_mistake(self.version):
            raise ValueError(wrong)
        if self.no_index and not self.find_links:
            raise ValueError(
                "`no_index` is true and `find_links` is empty, so there is no source for "
                "packages: set `find_links`"
            )
        if self.no_index and self.index_url:
            raise ValueError("`no_index` and `index_url` exclude each other: remove one of the two")
        return self

    @classmethod
    def release_mistake(cls, version: str) -> str | None:  # noqa: ARG003
        """Return why gpufleet cannot run a release of this engine, or None."""
        return None


class Vllm(EngineSettings):
    """The vLLM release, and the values that all servers of a node share."""

    engine: ClassVar[EngineName] = "vllm"

    @classmethod
    def release_mistake(cls, version: str) -> str | None:
        """Return why gpufleet cannot run a release of vLLM, or None."""
        if numbers(version)[:2] >= OLDEST_VLLM:
            return None
        return (
            f"vLLM {version} has no flag --shutdown-timeout, so a restart would cut off "
            f"running requests: use {'.'.join(map(str, OLDEST_VLLM))}.0 or newer"
        )


class Sglang(EngineSettings):
    """
    The SGLang release. If `vllm` is also set, keys that you do not set here have their values from
    `vllm`.
    """

    engine: ClassVar[EngineName] = "sglang"

    @classmethod
    def release_mistake(cls, version: str) -> str | None:
        """Return why gpufleet cannot run a release of SGLang, or None."""
        if numbers(version) >= OLDEST_SGLANG:
            return None
        return (
            f"SGLang {version} has no command `sglang serve`: use "
            f"{'.'.join(map(str, OLDEST_SGLANG))} or newer"
        )


def _environment_mistakes(
    environment: Mapping[str, str], environment_files: Mapping[str, str]
) -> list[str]:
    """Return the mistakes in the environment variables of `vllm` or of a model."""
    mistakes = [
        f"`{key}` sets {', '.join(planned)}, but gpufleet sets this from the plan: remove "
        f"{', '.join(planned)}"
        for key, names in (("environment", environment), ("environment_files", environment_files))
        if (planned := sorted(set(names) & PLANNED_ENVIRONMENT))
    ]
    if twice := sorted(set(environment) & set(environment_files)):
        mistakes.append(
            f"`environment` and `environment_files` both set {', '.join(twice)}: remove "
            f"{', '.join(twice)} from one of the two"
        )
    return mistakes


def _some_or_fit(value: Any) -> Any:
    if value == "fit" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(
        f"must be a number of 1 or more, or `fit` for as many replicas as fit (got {value!r})"
    )


class Served(Setting):
    """
    One model to serve: its files, its replicas, how a replica is divided over GPUs, its flags and
    its limits.
    """

    free_text: ClassVar = frozenset({"environment", "flags"})

    model: Annotated[
        str,
        pattern_rule(
            r"/\S+|[\w.-]+/[\w.-]+",
            "a Hugging Face id, for example Qwen/Qwen3-8B, or the absolute path of a "
            "directory on the node, for example /srv/models/qwen3-8b",
        ),
        Field(
            description="Hugging Face id, which the node downloads, or the absolute path "
            "of a directory on the node",
        ),
    ]
    revision: Annotated[
        str | None,
        pattern_rule(
            r"[0-9a-f]{40}",
            "a commit with all of its 40 digits; `git ls-remote` prints the commit, and "
            "the model's page on the Hub shows the commit under `Files`, `History`",
        ),
        Field(
            description="Commit of a Hugging Face model, with all 40 digits. A branch is "
            "refused, because it can change and nodes would then serve different files",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        pattern_rule(r"[\w.:/-]+", "letters, digits, `.`, `_`, `:`, `/` and `-`"),
        Field(description="Name of the model for clients. null: the name of this entry"),
    ] = None
    kind: Annotated[
        ModelKind | None,
        Field(
            description="Kind of the model's answers. generate: text. embed: vectors. "
            "rerank: scores of documents. classify: labels. reward: the numbers that "
            "/pooling returns. transcribe: the text of speech. null: the kind that the "
            "model's files give"
        ),
    ] = None
    replicas: Annotated[
        int | Literal["fit"],
        BeforeValidator(_some_or_fit),
        Field(
            description="Number of independent copies of the model. fit: as many copies as fit "
            "on the nodes"
        ),
    ] = 1
    engine: Annotated[
        EngineName,
        Field(
            description="The engine that serves the model. The section of this name has the "
            "engine's release"
        ),
    ] = "vllm"
    prefer: Annotated[
        tuple[str, ...],
        Field(
            description="Groups of nodes that new replicas use first, in this order. "
            "Replicas that do not fit there use other nodes"
        ),
    ] = ()
    objective: Annotated[
        Literal["balanced", "latency", "throughput", "memory"],
        Field(description="What gpufleet optimises when it plans"),
    ] = "balanced"
    context: Annotated[
        Tokens | None,
        Field(
            gt=0,
            description="Maximum length of prompt and answer together, in tokens. null: the "
            "model's own maximum",
        ),
    ] = None
    concurrency: Annotated[
        PositiveInt,
        Field(
            description="Number of concurrent requests of full length for which memory must suffice"
        ),
    ] = 1
    presets: Annotated[
        tuple[str, ...],
        Field(
            description="Presets of flags. If several presets set a flag, the last preset "
            "applies. `gpufleet presets` lists the presets"
        ),
    ] = ()
    gpu_share: Annotated[
        float | None,
        Field(
            ge=LEAST_SHARE,
            le=MOST_OF_A_GPU,
            description="Fraction of one GPU's memory that the model uses. Models with "
            "`gpu_share` can share a GPU. null: the model uses whole GPUs",
        ),
    ] = None
    tensor_parallel: Annotated[
        PositiveInt | None,
        Field(
            description="Number of GPUs that share each layer (tensor parallelism). null: "
            "gpufleet chooses it"
        ),
    ] = None
    pipeline_parallel: Annotated[
        PositiveInt | None,
        Field(description="Number of pipeline stages. null: gpufleet chooses it"),
    ] = None
    data_parallel: Annotated[
        PositiveInt | None,
        Field(
            description="Number of engines behind one endpoint (data parallelism). null: "
            "gpufleet chooses it"
        ),
    ] = None
    expert_parallel: Annotated[
        bool | None,
        Field(
            description="true: each GPU has some of the experts as a whole. false: each GPU "
            "has a slice of all experts. null: gpufleet chooses it"
        ),
    ] = None
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"],
        Field(
            description="How a replica that spans nodes starts its processes. mp: with vLLM's "
            "own multiprocessing. ray: with Ray"
        ),
    ] = "mp"
    data_parallel_balancing: Annotated[
        Literal["internal", "hybrid", "external"],
        Field(
            description="How requests are balanced over the engines of a replica. internal: "
            "one server balances over all engines. hybrid: one server on each node balances "
            "over the engines of its node. external: each engine has its own server"
        ),
    ] = "internal"
    prefill: Annotated[
        ModelName | None,
        Field(
            description="Name of the entry of `serving` that computes the prompts of this "
            "entry and sends the KV cache to it. null: this entry computes its prompts "
            "itself"
        ),
    ] = None
    cluster_port: Annotated[
        Port, Field(description="First of the ports that the nodes of a replica use between them")
    ] = 29500
    span_nodes: Annotated[
        bool, Field(description="Whether a replica may span nodes if one node is too small")
    ] = False
    when_a_node_leaves: Annotated[
        Literal["refuse", "replan"],
        Field(
            description="What to do if a replica spans nodes, and one of these nodes "
            "leaves the inventory or loses GPUs. refuse: gpufleet refuses the plan. "
            "replan: gpufleet places the replica on other nodes"
        ),
    ] = "refuse"
    allow_pcie: Annotated[
        bool,
        Field(
            description="Whether a tensor-parallel group may use PCIe if no group of GPUs "
            "with NVLink is large enough. Every layer then waits for transfers over PCIe"
        ),
    ] = False
    port: Annotated[
        Port,
        Field(
            description="Port of the first replica on a node. Each further replica uses the "
            "next port"
        ),
    ] = 8000
    flags: Annotated[
        dict[str, Argument],
        Field(
            description="Flags of the engine's server. Write their names without the leading dashes"
        ),
    ] = {}
    adapters: Annotated[
        dict[AdapterName, Adapter],
        Field(
            description="LoRA adapters that every replica loads. Each key is the name of an "
            "adapter for clients"
        ),
    ] = {}
    allow_unlocked_code: Annotated[
        bool,
        Field(
            description="Accept that `trust-remote-code` runs code whose hashes are not in the "
            "model lock"
        ),
    ] = False
    environment: Annotated[
        dict[str, str], Field(description="Environment variables of this model's servers")
    ] = {}
    environment_files: Annotated[
        dict[VariableName, str],
        Field(description="Secret variables: for each, a file on this machine with its value"),
    ] = {}
    start_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Maximum time from the start of a server until its first answer"),
    ] = 1800
    drain_seconds: Annotated[
        Seconds,
        Field(
            ge=0,
            le=3600,
            description="Maximum time that running requests have to finish before the server stops",
        ),
    ] = 60

    objectives: Annotated[
        Objectives,
        Field(
            description="Service objectives that you promise to clients. Alerts use the "
            "objectives that are set"
        ),
    ] = Objectives()
    watchdog: Annotated[
        Watchdog,
        Field(
            description="What to do with a server that has running requests but produces no tokens"
        ),
    ] = Watchdog()
    golden: Annotated[
        Golden,
        Field(description="Prompts whose answers must be the same before and after a change"),
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
                "prompts would also need the adapters, but the name of an adapter can "
                "belong to only one entry; remove `adapters` or `prefill`"
            )
        length = engine_flags.of(self.engine).length
        if self.context is not None and length in names:
            mistakes.append(
                f"`context` and `flags.{length}` set the same value: remove one of the two"
            )
        mistakes += [
            f"there is no preset {name!r}{suggestion(name, list(presets.names()))}; "
            "`gpufleet presets` lists all presets"
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
            mistakes.append("`revision` has no effect if `model` is a path: remove `revision`")
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    def _share_mistakes(self, names: Collection[str]) -> Iterator[str]:
        """
        Yield the settings that conflict with `gpu_share`. `names` are the names of flags in
        `flags`.
        """
        if self.gpu_share is None:
            return
        for key in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            if (number := getattr(self, key) or 1) > 1:
                yield (
                    f"`gpu_share` and `{key}: {number}` exclude each other, because a share "
                    "is a part of one GPU: to give the replica whole GPUs, remove "
                    f"`gpu_share`; otherwise remove `{key}`"
                )
        for name, why in _NOT_WITH_A_SHARE.items():
            if name in names:
                yield f"`gpu_share` and `flags.{name}` exclude each other: {why}: remove the flag"

"""What operators write in `group_vars/` and `host_vars/`: every setting, its default, its meaning.

Pure: takes plain values, gives frozen models, knows nothing of files. `variables.py` knows which
file set which key and puts that in front of every mistake found here.

Units are in the names (`_mib`, `_seconds`) or in the description.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from ipaddress import IPv4Network
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    PositiveInt,
    ValidationError,
    model_validator,
)

from gpufleet.catalog import presets
from gpufleet.catalog.checks import CHECKS
from gpufleet.formatting import suggestion
from gpufleet.gpu_software import lock_rules as gpu_lock
from gpufleet.settings import lock_defaults
from gpufleet.settings.gateway_settings import Balancer, Gateway, Golden, Upgrade
from gpufleet.settings.gpu_settings import Gpu, GpuLock
from gpufleet.settings.litellm_settings import Litellm
from gpufleet.settings.lock_defaults import KeyPath
from gpufleet.settings.mirror_rewrite import mirrored, strangers
from gpufleet.settings.mirror_settings import Mirror
from gpufleet.settings.monitoring_settings import (
    Exporters,
    Monitoring,
    NodeExporter,
    Objectives,
    Port,
    Sha256,
    Watchdog,
)

Argument: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
"""One vLLM flag's value as YAML has it. `true`: the bare flag; `false`: its `--no-` form;
a mapping: JSON; a list: one value after another; null: the flag is not passed."""


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be an absolute path")
    if any(part in {".", ".."} for part in path.split("/")) or "\n" in path:
        raise ValueError("must be a plain absolute path, without . or ..")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]

# Unit names, directories and URLs are made of it. 40 leaves room for "vllm-", the replica and
# ".service" in systemd's limit of 255, and for a metric label that people can read.
ModelName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?$")]

# What the toolkit sets itself: an operator's value would contradict the plan.
PLANNED_ARGUMENTS = frozenset(
    {
        "api-key",
        "data-parallel-size",
        "enable-expert-parallel",
        "headless",
        "host",
        "master-addr",
        "master-port",
        "model",
        "nnodes",
        "node-rank",
        "pipeline-parallel-size",
        "port",
        "served-model-name",
        "shutdown-timeout",
        "tensor-parallel-size",
    }
)
PLANNED_ENVIRONMENT = frozenset(
    {"CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY"}
)
# Flags that would put a secret where everybody on the node reads it, or that move the endpoint to
# where nothing of ours finds it.
REFUSED_ARGUMENTS = {
    "config": "its file could set what the plan decides: write the flags here",
    "hf-token": "arguments are readable by everybody on the node: use vllm.hf_token_file",
    "ssl-certfile": "endpoints are plain HTTP for now: put TLS in front of them",
    "ssl-keyfile": "endpoints are plain HTTP for now: put TLS in front of them",
    "uds": "endpoints are TCP ports",
}


# The first release whose parser knows --shutdown-timeout (read in the sources of 43 releases).
OLDEST_VLLM = (0, 18)


class Setting(BaseModel):
    """Base of all settings: an unknown key is a mistake, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=False)


class Gpus(Setting):
    """What this node is declared to have; the probe must agree. What is left out is expected as the
    node's siblings have it, else as the device itself says."""

    count: Annotated[PositiveInt | None, Field(description="GPUs in the node")] = None
    name: Annotated[str | None, Field(description="Product name as NVML gives it")] = None
    nvlink_links: Annotated[
        int | None, Field(ge=0, le=36, description="NVLinks of each GPU that are up")
    ] = None
    pcie_width: Annotated[PositiveInt | None, Field(description="PCIe lanes of each GPU")] = None
    power_limit_watts: Annotated[
        PositiveInt | None, Field(description="Power limit of each GPU, where it is lowered")
    ] = None
    ecc: Annotated[bool | None, Field(description="Whether ECC is on")] = None
    reserved: Annotated[
        tuple[int, ...],
        Field(description="NVML indices of GPUs that others use: nothing is placed on them"),
    ] = ()
    rdma_ports: Annotated[
        int | None, Field(ge=0, description="InfiniBand or RoCE ports that are up in the node")
    ] = None


class Acceptance(Setting):
    """A finding that the operator knows of and lives with for a while."""

    check: Annotated[str, Field(description="The check's name")]
    node: Annotated[str, Field(description="The node, or * for every node these variables reach")]
    gpu: Annotated[int | None, Field(ge=0, description="NVML's index; null: any")] = None
    until: Annotated[dt.date, Field(description="The last day on which it is accepted")]
    reason: Annotated[str, Field(description="Why; shown with the finding")] = ""

    @model_validator(mode="after")
    def _check_exists(self) -> Acceptance:
        if self.check not in CHECKS:
            raise ValueError(
                f"there is no check {self.check!r}{suggestion(self.check, list(CHECKS))}; "
                "`gpufleet check --list` names them all"
            )
        return self


class Checks(Setting):
    """How findings of the node check are taken."""

    accept: Annotated[
        tuple[Acceptance, ...], Field(description="Findings that stop nothing for now")
    ] = ()
    degraded: Annotated[
        bool,
        Field(
            description="Serve on the healthy GPUs of a node of which others are unfit; without "
            "it, one unfit GPU stops the deploy"
        ),
    ] = False


class Repository(Setting):
    """NVIDIA's repository for the nodes' system, or a mirror of it with the same layout."""

    url: Annotated[str, Field(pattern=r"^https?://\S+[^/\s]$", description="Without final slash")]
    keyring: Annotated[
        str,
        Field(
            pattern=r"^[\w.+~-]+\.(deb|pub|asc|gpg)$",
            description="File beside the packages that brings the repository's key: the keyring "
            "package or, for dnf, the key itself, as D42D0685.pub",
        ),
    ] = "cuda-keyring_1.1-1_all.deb"
    keyring_sha256: Annotated[Sha256, Field(description="Hash of that file")]


class Cuda(Setting):
    """The CUDA toolkit. vLLM's wheels carry the runtime; compilers are for its JIT kernels."""

    repository: Repository
    toolkit: Annotated[
        str | None,
        Field(
            pattern=r"^\d+-\d+$",
            description="Toolkit as in cuda-toolkit-<13-0>, which it is where `version` is set; "
            "null installs none",
        ),
    ] = None
    version: Annotated[
        str | None,
        Field(description="Exact package version, e.g. 13.0.3-1; needed where a toolkit is"),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _a_version_is_a_toolkits(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("version") and "toolkit" not in data:
            return {**data, "toolkit": lock_defaults.TOOLKIT}
        return data

    @model_validator(mode="after")
    def _toolkit_has_a_version(self) -> Cuda:
        if self.toolkit and not self.version:
            raise ValueError(
                "`version` is missing: name the exact package version, as "
                f"`apt-cache madison cuda-toolkit-{self.toolkit}` lists it"
            )
        return self


class Dcgm(Setting):
    """NVIDIA's GPU monitoring: the host engine and its Prometheus exporter."""

    version: Annotated[str, Field(description="Of every datacenter-gpu-manager-4 package")]
    cuda_major: Annotated[PositiveInt, Field(description="The driver's CUDA major version")] = 13
    exporter_version: Annotated[str | None, Field(description="null: no exporter")]
    port: Annotated[Port, Field(description="The exporter's port")] = 9400
    profiling: Annotated[
        bool | None,
        Field(
            description="Read profiling counters; null: where every GPU is Hopper or newer, which "
            "needs no further right. true where they may not be read leaves no series at all"
        ),
    ] = None


def _range(value: Any) -> Any:
    """Take 8080 and "8000-8010" for the first and the last port of a range."""
    ports = [part.strip() for part in str(value).split("-")]
    if isinstance(value, bool) or not all(part.isdecimal() for part in ports) or len(ports) > 2:
        raise ValueError(f"must be a port or a range of them, as 8000-8010 (got {value!r})")
    return int(ports[0]), int(ports[-1])


def _ascends(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError(f"begins with the larger port: write {value[1]}-{value[0]}")
    return value


PortRange = Annotated[tuple[Port, Port], BeforeValidator(_range), AfterValidator(_ascends)]


class Open(Setting):
    """Ports of a service of yours that the firewall leaves open."""

    ports: Annotated[PortRange, Field(description="A port, or the first and last of a range")]
    protocol: Literal["tcp", "udp"] = "tcp"
    sources: Annotated[
        tuple[IPvAnyNetwork, ...], Field(description="Networks that may reach them; empty: any")
    ] = ()


class Firewall(Setting):
    """Which of a node's ports other machines may reach."""

    policy: Annotated[
        Literal["own_ports", "drop"],
        Field(
            description="own_ports: only what belongs to vLLM is guarded, everything else stays as "
            "it is. drop: what is not opened here is closed"
        ),
    ] = "own_ports"
    clients: Annotated[
        tuple[IPvAnyNetwork, ...],
        Field(description="Networks that may reach the endpoints; empty: any"),
    ] = ()
    monitoring: Annotated[
        tuple[IPvAnyNetwork, ...],
        Field(
            description="Networks that may reach the exporters, and the endpoints' metrics; empty: "
            "with `drop` none, with `own_ports` any"
        ),
    ] = ()
    open: Annotated[tuple[Open, ...], Field(description="Further ports that stay open")] = ()
    confirm_seconds: Annotated[
        int,
        Field(
            ge=20,
            le=600,
            description="New rules are taken back after so long, unless a new SSH connection has "
            "come about under them",
        ),
    ] = 60


class Distribution(Setting):
    """How nodes hand each other releases and models: docs/gpu-nodes/distribution.md."""

    enabled: Annotated[
        bool, Field(description="false: this node builds and downloads itself, and gives nobody")
    ] = True
    port: Annotated[
        int,
        Field(
            ge=1024,
            le=65535,
            description="Where a node hands them out while others copy; between copies nothing "
            "listens there",
        ),
    ] = 8790
    rate_mbit: Annotated[
        PositiveInt | None,
        Field(description="Most that a node sends, in Mbit/s; null: what its line carries"),
    ] = None


class Vllm(Setting):
    """The vLLM release and what all stages of a node share."""

    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+(\.?\w+)*$")]
    lock: Annotated[
        str,
        Field(description="Requirements with hashes; from the project's root, or absolute"),
    ]
    uv_lock: Annotated[str, Field(description="The same for uv, which builds the release")] = (
        "locks/uv.txt"
    )
    python: Annotated[AbsolutePath, Field(description="The node's interpreter")] = (
        "/usr/bin/python3"
    )
    index_url: Annotated[str | None, Field(description="Package index; null: PyPI")] = None
    find_links: Annotated[tuple[str, ...], Field(description="Flat wheel directories")] = ()
    no_index: Annotated[bool, Field(description="Use find_links alone")] = False
    device: Annotated[
        Literal["cuda", "cpu"],
        Field(
            description="cpu: for nodes without real GPUs (the lab). The plan still comes from the "
            "probe; vLLM runs its CPU build, one process a rank"
        ),
    ] = "cuda"
    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,30}$")] = "vllm"
    listen: Annotated[str, Field(description="Address that endpoints bind")] = "0.0.0.0"  # noqa: S104
    watchdog_port: Annotated[
        int | None,
        Field(
            ge=1024,
            le=65535,
            description="Where the watchdog tells gateways which servers are stalled, at `listen`; "
            "null: it does not",
        ),
    ] = 8406
    api_key_file: Annotated[
        str | None,
        Field(description="File on this machine with the API key; its content goes to the nodes"),
    ] = None
    cluster_key_file: Annotated[
        str | None,
        Field(
            description="File on this machine with the key that the nodes of a replica know each "
            "other by, 32 bytes or more; needed where replicas span nodes"
        ),
    ] = None
    allow_unauthenticated: Annotated[
        bool, Field(description="Accept that anyone who reaches the port may use the model")
    ] = False
    hf_token_file: Annotated[
        str | None, Field(description="File on this machine with the Hugging Face token")
    ] = None
    hf_endpoint: Annotated[str | None, Field(description="A mirror of the Hugging Face Hub")] = None
    distribution: Distribution = Distribution()
    environment: Annotated[dict[str, str], Field(description="For every stage")] = {}
    keep_releases: Annotated[
        int, Field(ge=1, description="Releases to keep on a node beyond those in use, newest first")
    ] = 2
    keep_days: Annotated[
        int, Field(ge=0, description="And those that were built in so many days")
    ] = 14

    @model_validator(mode="after")
    def _open_endpoints_are_deliberate(self) -> Vllm:
        local = self.listen in {"127.0.0.1", "::1", "localhost"}
        if not local and self.api_key_file is None and not self.allow_unauthenticated:
            raise ValueError(
                f"endpoints would listen on {self.listen} without a key: set `api_key_file`, or "
                "`listen: 127.0.0.1`, or `allow_unauthenticated: true`"
            )
        if planned := sorted(set(self.environment) & PLANNED_ENVIRONMENT):
            raise ValueError(f"`environment` sets {', '.join(planned)}, which the plan decides")
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        if numbers < OLDEST_VLLM:
            raise ValueError(
                f"vLLM {self.version} has no --shutdown-timeout, without which a restart cuts off "
                f"running requests: use {'.'.join(map(str, OLDEST_VLLM))}.0 or newer"
            )
        if self.no_index and not self.find_links:
            raise ValueError("`no_index` without `find_links` leaves nowhere to download from")
        if self.no_index and self.index_url:
            raise ValueError("`no_index` and `index_url` exclude each other: remove one")
        return self


def _some_or_fit(value: Any) -> Any:
    if value == "fit" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"must be a number from 1 up, or `fit` for as many as fit (got {value!r})")


class Served(Setting):
    """One model and how much of the nodes that declare it it gets."""

    model: Annotated[
        str,
        Field(
            pattern=r"^(/\S+|[\w.-]+/[\w.-]+)$",
            description="Hugging Face id (downloaded on the node), or an absolute path on the node",
        ),
    ]
    revision: Annotated[
        str | None,
        Field(
            pattern=r"^[0-9a-f]{40}$",
            description="Commit of a Hugging Face model, all 40 digits: a branch is another set of "
            "files tomorrow, and nodes would differ",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        Field(
            pattern=r"^[\w.:/-]+$",
            description="What clients ask for; null: the name that it has here",
        ),
    ] = None
    replicas: Annotated[
        int | Literal["fit"],
        BeforeValidator(_some_or_fit),
        Field(description="Independent copies; fit: as many as there is room for"),
    ] = 1
    objective: Annotated[
        Literal["balanced", "latency", "throughput", "memory"],
        Field(description="What the plan looks for where it may choose"),
    ] = "balanced"
    context: Annotated[
        PositiveInt | None,
        Field(description="Longest request in tokens, answer included; null: the model's own"),
    ] = None
    concurrency: Annotated[
        PositiveInt, Field(description="Requests of full length that must fit at once")
    ] = 1
    presets: Annotated[
        tuple[str, ...],
        Field(description="Flags for a situation, the last one counts: `gpufleet presets`"),
    ] = ()
    tensor_parallel: Annotated[
        PositiveInt | None, Field(description="GPUs that share each layer; null: planned")
    ] = None
    pipeline_parallel: Annotated[
        PositiveInt | None, Field(description="Parts that the layers are cut into; null: planned")
    ] = None
    data_parallel: Annotated[
        PositiveInt | None, Field(description="Engines behind one endpoint; null: planned")
    ] = None
    expert_parallel: Annotated[
        bool | None,
        Field(description="Whole experts on each GPU instead of a part of each; null: planned"),
    ] = None
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"],
        Field(description="What joins the nodes of a replica: vLLM's own processes, or Ray"),
    ] = "mp"
    data_parallel_balancing: Annotated[
        Literal["internal", "hybrid", "external"],
        Field(description="Who divides requests over engines: one server, one a node, or none"),
    ] = "internal"
    prefill: Annotated[
        ModelName | None,
        Field(
            description="Entry of `serving` that computes this one's prompts and hands over the "
            "KV cache; null: this one does both"
        ),
    ] = None
    cluster_port: Annotated[
        Port, Field(description="First of the ports that a replica's nodes talk to each other on")
    ] = 29500
    span_nodes: Annotated[
        bool, Field(description="Let a replica use GPUs of several nodes where one is too small")
    ] = False
    when_a_node_leaves: Annotated[
        Literal["refuse", "replan"],
        Field(
            description="A node that a replica over several nodes needs leaves the inventory, or "
            "its GPUs may not be used any more: refuse the plan, or place the replica anew"
        ),
    ] = "refuse"
    allow_pcie: Annotated[
        bool,
        Field(
            description="Let a tensor-parallel group span GPUs without NVLink, where no island is "
            "large enough; every layer then waits for PCIe"
        ),
    ] = False
    port: Annotated[
        Port, Field(description="First port; further replicas on a node take the next")
    ] = 8000
    flags: Annotated[
        dict[str, Argument], Field(description="Flags of `vllm serve`, without their dashes")
    ] = {}
    environment: Annotated[dict[str, str], Field(description="For this model's stages")] = {}
    start_seconds: Annotated[
        PositiveInt, Field(description="Deadline from start to the first answer")
    ] = 1800
    drain_seconds: Annotated[
        int, Field(ge=0, le=3600, description="How long running requests may finish before a stop")
    ] = 60

    objectives: Annotated[
        Objectives, Field(description="What its clients were promised; alerts hold it to that")
    ] = Objectives()
    watchdog: Annotated[
        Watchdog, Field(description="What is done when its requests run and its tokens do not")
    ] = Watchdog()
    golden: Annotated[
        Golden, Field(description="What it must answer after a change as it did before")
    ] = Golden()

    @property
    def is_path(self) -> bool:
        """Whether the model's files are declared to lie on the node already."""
        return self.model.startswith("/")

    @model_validator(mode="after")
    def _nothing_is_set_twice(self) -> Served:
        mistakes = []
        names = {name.lstrip("-").replace("_", "-") for name in self.flags}
        if planned := sorted(names & PLANNED_ARGUMENTS):
            mistakes.append(
                f"`flags` sets {', '.join(planned)}, which the plan decides: use the settings "
                "of the same meaning (tensor_parallel, served_name, port, drain_seconds, "
                "vllm.listen, vllm.api_key_file) instead"
            )
        mistakes += [
            f"`flags` has {name}: {why}" for name, why in REFUSED_ARGUMENTS.items() if name in names
        ]
        mistakes += [
            f"`flags` has {name!r}: write flags as `vllm serve` names them, in lower case "
            "with dashes and without the leading `--`"
            for name in self.flags
            if not re.fullmatch(r"[a-z0-9]+([-.][A-Za-z0-9_]+)*", name)
        ]
        if self.context is not None and "max-model-len" in names:
            mistakes.append("`context` and `flags.max-model-len` are the same: remove one of them")
        mistakes += [
            f"there is no preset {name!r}{suggestion(name, list(presets.names()))}; `gpufleet "
            "presets` names them all"
            for name in self.presets
            if name not in presets.names()
        ]
        if planned := sorted(set(self.environment) & PLANNED_ENVIRONMENT):
            mistakes.append(f"`environment` sets {', '.join(planned)}, which the plan decides")
        if not self.is_path and self.revision is None:
            mistakes.append(
                f"`revision` is missing: name the commit of {self.model}, so that every node "
                "and every later run serves the same files"
            )
        if self.is_path and self.revision is not None:
            mistakes.append("`revision` has no meaning for a path: remove it")
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self


class NodeSettings(Setting):
    """Everything that one node's variables may say, after groups and hosts are merged."""

    gpu_node: Annotated[
        bool, Field(description="false: it has no GPUs; what is set for GPU nodes leaves it alone")
    ] = True
    gpus: Gpus = Gpus()
    checks: Checks = Checks()
    gpu_lock: Annotated[
        GpuLock | None,
        Field(description="What belongs together on the nodes; null: the driver is not ours"),
    ] = None
    gpu: Gpu = Gpu()
    cuda: Cuda | None = None
    dcgm: Dcgm | None = None
    node_exporter: NodeExporter = NodeExporter()
    exporters: Exporters = Exporters()
    monitoring: Annotated[
        Monitoring | None, Field(description="null: this node watches nobody")
    ] = None
    gateway: Annotated[
        Gateway | None, Field(description="null: clients do not come to this node")
    ] = None
    litellm: Annotated[
        Litellm | None, Field(description="null: no LiteLLM in front of the gateway on this node")
    ] = None
    balancer: Annotated[
        Balancer | None, Field(description="A balancer of yours; null: our gateways, or none")
    ] = None
    upgrade: Annotated[
        Upgrade, Field(description="How the fleet is changed; the same for all of its nodes")
    ] = Upgrade()
    firewall: Annotated[
        Firewall | None, Field(description="null: none of ours, and one of before is removed")
    ] = None
    vllm: Vllm | None = None
    cluster_network: Annotated[
        IPv4Network | None,
        Field(description="Network on which nodes of one replica talk; null: found by the probe"),
    ] = None
    serving: dict[ModelName, Served] = {}
    mirror: Annotated[
        Mirror | None, Field(description="null: nodes download from the addresses set elsewhere")
    ] = None
    offline: Annotated[
        bool, Field(description="Refuse every address that is not on the mirror")
    ] = False

    @model_validator(mode="after")
    def _models_need_vllm(self) -> NodeSettings:
        if self.serving and self.vllm is None:
            raise ValueError("`serving` is declared, but `vllm` is not: say which release serves")
        if self.dcgm and not (self.cuda or self.gpu_lock):
            raise ValueError(
                "`dcgm` comes from NVIDIA's repository, which `cuda.repository` names: set it"
            )
        return self

    @model_validator(mode="after")
    def _programs_have_ports_of_their_own(self) -> NodeSettings:
        users: dict[int, list[str]] = {}
        for key, port in self.ports.items():
            users.setdefault(port, []).append(key)
        if clashes := [
            f"{' and '.join(f'`{key}`' for key in keys)} are both {port}: give one another port"
            for port, keys in sorted(users.items())
            if len(keys) > 1
        ]:
            raise ValueError("; ".join(clashes))
        return self

    @property
    def watchdog_port(self) -> int | None:
        """Where this node's watchdog answers gateways; None: nobody watches, or nobody may ask."""
        watched = any(each.watchdog.mode != "off" for each in self.serving.values())
        return self.vllm.watchdog_port if self.vllm and watched else None

    @property
    def ports(self) -> dict[str, int]:
        """The ports that programs of ours beside vLLM listen on, by the key that says so."""
        found = {"node_exporter.port": self.node_exporter.port}
        if watchdog := self.watchdog_port:
            found["vllm.watchdog_port"] = watchdog
        if self.vllm and self.vllm.distribution.enabled:
            found["vllm.distribution.port"] = self.vllm.distribution.port
        if self.dcgm and self.dcgm.exporter_version:
            found["dcgm.port"] = self.dcgm.port
        if self.monitoring and self.monitoring.prometheus:
            found["monitoring.prometheus.port"] = self.monitoring.prometheus.port
        if self.monitoring and self.monitoring.alertmanager:
            found["monitoring.alertmanager.port"] = self.monitoring.alertmanager.port
        if self.gateway:
            found["gateway.port"] = self.gateway.port
            found["gateway.metrics_port"] = self.gateway.metrics_port
        if self.litellm:
            found["litellm.port"] = self.litellm.port
        return found


class Mistake(Exception):  # noqa: N818  # it is a list of mistakes, not an error of ours
    """
    What is wrong in a node's variables: pairs of (key path, sentence).

    `against`: of a key that contradicts another one, the path of that one.
    """

    def __init__(
        self,
        *mistakes: tuple[KeyPath, str],
        against: Mapping[KeyPath, KeyPath] | None = None,
    ) -> None:
        self.mistakes = mistakes
        self.against = against or {}
        super().__init__("; ".join(f"{'.'.join(map(str, at))}: {what}" for at, what in mistakes))


def node_settings(data: Mapping[str, Any]) -> NodeSettings:
    """
    Parse one node's merged variables (only the keys of `NodeSettings`), as roles take them.

    Raises `Mistake` with every mistake at once, each with the path of its key.
    """
    settings = mirrored(written_settings(data))
    if found := tuple(strangers(settings)):
        raise Mistake(*found)
    return settings


def written_settings(data: Mapping[str, Any]) -> NodeSettings:
    """Parse variables as `node_settings` does, but with the addresses that a mirror replaces."""
    lock, mistakes = _lock(data)
    against: dict[KeyPath, KeyPath] = {}
    if lock:
        differing = tuple(lock_defaults.differences(data, lock))
        mistakes += [(each.at, str(each)) for each in differing]
        against = {each.at: each.locked_at for each in differing}
        mistakes += [(each.at, each.what) for each in gpu_lock.in_itself(lock) if each.refused]
    given = lock_defaults.filled(data, lock) if lock else dict(data)
    try:
        settings = NodeSettings.model_validate(given)
    except ValidationError as error:
        # Without a valid lock, what only the lock says is missing, which is no mistake of its own.
        no_lock = bool(mistakes) and lock is None
        found = [each for each in error.errors() if not (no_lock and each["type"] == "missing")]
        mistakes += [each for each in map(_sentence, found) if each not in mistakes]
    if mistakes:
        raise Mistake(*mistakes, against=against)
    return settings


def _lock(data: Mapping[str, Any]) -> tuple[GpuLock | None, list[tuple[KeyPath, str]]]:
    """Return the lock among variables, and what is wrong with it in form."""
    if data.get("gpu_lock") is None:
        return None, []
    try:
        return GpuLock.model_validate(data["gpu_lock"]), []
    except ValidationError as error:
        found = [_sentence(each) for each in error.errors()]
        return None, [(("gpu_lock", *at), what) for at, what in found]


def _sentence(found: Any) -> tuple[tuple[str | int, ...], str]:
    at = tuple(part for part in found["loc"] if part != "[key]")
    what = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return at, "no setting has this name"
    if found["type"] == "missing":
        return at, "is needed and not set"
    if found["type"] == "value_error":
        return at, what
    what = what.replace("valid tuple", "list")  # as YAML has it
    return at, f"{what[0].lower()}{what[1:]} (got {found['input']!r})"

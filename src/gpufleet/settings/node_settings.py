"""All settings of `group_vars/` and `host_vars/`, with defaults and descriptions.

Pure: converts plain values to immutable objects without reading files. `variables.py` records the
file that set each key. `node_variables.py` adds the file and line to each mistake.

Units are in the names (`_mib`, `_seconds`) or in the description.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    PositiveInt,
    StrictInt,
    model_validator,
)

from gpufleet.catalog import recorded_nodes
from gpufleet.catalog.checks import CHECKS
from gpufleet.formatting import suggestion
from gpufleet.settings.base import NetworkV4, Setting
from gpufleet.settings.cuda_settings import Cuda, Dcgm
from gpufleet.settings.engine_flags import NAMES, EngineName
from gpufleet.settings.firewall_settings import Firewall
from gpufleet.settings.gateway_settings import Balancer, Gateway
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.gpu_settings import Gpu
from gpufleet.settings.litellm_settings import Litellm
from gpufleet.settings.mirror_settings import Mirror
from gpufleet.settings.monitoring_settings import (
    Exporters,
    Monitoring,
    NodeExporter,
)
from gpufleet.settings.serving_settings import EngineSettings, ModelName, Served, Sglang, Vllm
from gpufleet.settings.upgrade_settings import Upgrade

OF_THE_NODE = (
    "user",
    "device",
    "listen",
    "watchdog_port",
    "api_key_file",
    "cluster_key_file",
    "allow_unauthenticated",
    "allow_unguarded_ports",
    "hf_token_file",
    "environment_files",
    "models_lock",
    "hf_endpoint",
    "distribution",
)
"""The keys whose values must be equal in the sections of all engines of a node."""

OF_THE_ENGINE = frozenset({"version", "lock", "environment"})
"""The keys that one engine's section does not take from another engine's section."""


class Gpus(Setting):
    """
    The hardware that the node should have. The probe's result must match these values. If a value
    is not set, checks compare the node with the nodes in the same groups, or with the values that
    the device reports.
    """

    count: Annotated[PositiveInt | None, Field(description="Number of GPUs in the node")] = None
    name: Annotated[
        str | None, Field(description="Product name of the GPUs, as NVML reports it")
    ] = None
    hardware: Annotated[
        str | None,
        Field(
            description="Name of known hardware, for example h100x8. Only `gpufleet plan "
            "--as` and `gpufleet validate` use it; checks do not"
        ),
    ] = None
    nvlink_links: Annotated[
        int | None, Field(ge=0, le=36, description="Number of active NVLinks of each GPU")
    ] = None
    pcie_width: Annotated[
        PositiveInt | None, Field(description="Number of PCIe lanes of each GPU")
    ] = None
    power_limit_watts: Annotated[
        PositiveInt | None, Field(description="Power limit of each GPU, if you lowered it")
    ] = None
    ecc: Annotated[
        bool | None, Field(description="Whether ECC is on for the memory of the GPUs")
    ] = None
    reserved: Annotated[
        tuple[StrictInt, ...],
        Field(description="NVML indices of GPUs that the plan must not use"),
    ] = ()
    rdma_ports: Annotated[
        int | None, Field(ge=0, description="Number of active InfiniBand or RoCE ports of the node")
    ] = None

    @model_validator(mode="after")
    def _hardware_is_known(self) -> Gpus:
        known = recorded_nodes.names()
        if self.hardware is not None and self.hardware not in known:
            raise ValueError(
                f"there is no hardware {self.hardware!r}{suggestion(self.hardware, known)}; "
                f"the known names are {', '.join(known)}"
            )
        return self


class Acceptance(Setting):
    """A finding that you accept until a date."""

    free_text: ClassVar = frozenset({"reason"})

    check: Annotated[str, Field(description="Name of the check")]
    node: Annotated[
        str, Field(description="Name of the node, or * for every node that has these variables")
    ]
    gpu: Annotated[int | None, Field(ge=0, description="NVML index of the GPU. null: any GPU")] = (
        None
    )
    until: Annotated[dt.date, Field(description="Last day on which the finding is accepted")]
    reason: Annotated[
        str,
        Field(description="Why you accept the finding. gpufleet shows this text with the finding"),
    ] = ""

    @model_validator(mode="after")
    def _check_exists(self) -> Acceptance:
        if self.check not in CHECKS:
            raise ValueError(
                f"there is no check {self.check!r}{suggestion(self.check, list(CHECKS))}; "
                "`gpufleet check --list` lists the checks"
            )
        return self


class Checks(Setting):
    """How deploys treat the findings of the node checks."""

    accept: Annotated[
        tuple[Acceptance, ...],
        Field(description="Findings that you accept. They do not stop a deploy"),
    ] = ()
    degraded: Annotated[
        bool,
        Field(
            description="true: if some GPUs of a node are unfit, serve models on the "
            "healthy GPUs. false: one unfit GPU stops the deploy"
        ),
    ] = False


class Absent(Setting):
    """Parts that `deploys/absent.py` removes from a node."""

    parts: Annotated[
        tuple[
            Literal[
                "litellm",
                "gateway",
                "monitoring",
                "dcgm",
                "serving",
                "exporters",
                "drivers",
                "rest",
            ],
            ...,
        ],
        Field(description="Parts to remove. Empty: all parts"),
    ] = ()
    models: Annotated[bool, Field(description="Whether to remove the files of the models, too")] = (
        False
    )
    drivers: Annotated[
        bool, Field(description="Whether to remove NVIDIA's driver, CUDA and their settings, too")
    ] = False


class NodeSettings(Setting):
    """All settings of one node, after groups and hosts are merged."""

    gpu_node: Annotated[
        bool,
        Field(description="false: the node has no GPUs, so settings for GPU nodes do not apply"),
    ] = True
    gpus: Gpus = Gpus()
    checks: Checks = Checks()
    absent: Absent = Absent()
    gpu_lock: Annotated[
        GpuLock | None,
        Field(
            description="Versions of the GPU software that are installed together. null: "
            "gpufleet does not manage the driver"
        ),
    ] = None
    gpu: Gpu = Gpu()
    cuda: Cuda | None = None
    dcgm: Dcgm | None = None
    node_exporter: NodeExporter = NodeExporter()
    exporters: Exporters = Exporters()
    monitoring: Annotated[
        Monitoring | None, Field(description="null: this node is not a monitoring node")
    ] = None
    gateway: Annotated[Gateway | None, Field(description="null: this node is not a gateway")] = None
    litellm: Annotated[Litellm | None, Field(description="null: no LiteLLM on this node")] = None
    balancer: Annotated[
        Balancer | None,
        Field(
            description="Your own load balancer. null: you use gpufleet's gateways, or no load "
            "balancer"
        ),
    ] = None
    upgrade: Annotated[
        Upgrade,
        Field(
            description="How upgrades proceed. The values must be equal on all nodes of the fleet"
        ),
    ] = Upgrade()
    firewall: Annotated[
        Firewall | None,
        Field(description="null: gpufleet removes its firewall from the node, if there is one"),
    ] = None
    vllm: Vllm | None = None
    sglang: Sglang | None = None
    cluster_network: Annotated[
        NetworkV4 | None,
        Field(
            description="Network that the nodes of one replica use between them. null: the "
            "network that the probe finds"
        ),
    ] = None
    serving: Annotated[
        dict[ModelName, Served],
        Field(description="Models to serve. Each key is a name that you choose for a model"),
    ] = {}
    mirror: Annotated[
        Mirror | None,
        Field(description="null: nodes download from the addresses in other settings"),
    ] = None
    offline: Annotated[
        bool,
        Field(
            description="true: gpufleet refuses settings with an address that is not on the mirror"
        ),
    ] = False

    @model_validator(mode="after")
    def _models_need_vllm(self) -> NodeSettings:
        missing = sorted({each.engine for each in self.serving.values()} - self.engines.keys())
        if missing == ["vllm"]:
            raise ValueError(
                "`serving` is set, but `vllm` is not: set the release of vLLM under `vllm`"
            )
        if missing:
            raise ValueError(
                f"`serving` has entries with `engine: {missing[0]}`, but `{missing[0]}` is "
                f"not set: set the release of the engine under `{missing[0]}`"
            )
        if self.dcgm and not (self.cuda or self.gpu_lock):
            raise ValueError(
                "`dcgm` needs packages from NVIDIA's repository, which is not set: set "
                "`cuda.repository`"
            )
        return self

    @model_validator(mode="after")
    def _engines_share_the_node(self) -> NodeSettings:
        engines = tuple(self.engines.values())
        if clashes := [
            f"`{other.engine}.{key}` differs from `{first.engine}.{key}`, but all servers "
            f"of a node share this value: remove `{key}` from `{other.engine}`"
            for first, other in pairwise(engines)
            for key in OF_THE_NODE
            if getattr(other, key) != getattr(first, key)
        ]:
            raise ValueError("; ".join(clashes))
        return self

    @model_validator(mode="after")
    def _programs_have_ports_of_their_own(self) -> NodeSettings:
        users: dict[int, list[str]] = {}
        for key, port in self.ports.items():
            users.setdefault(port, []).append(key)
        if clashes := [
            f"{' and '.join(f'`{key}`' for key in keys)} are both {port}: change one of the ports"
            for port, keys in sorted(users.items())
            if len(keys) > 1
        ]:
            raise ValueError("; ".join(clashes))
        return self

    @property
    def engines(self) -> dict[EngineName, EngineSettings]:
        """Return the sections of the engines that are set, by the engine's name."""
        found = {name: getattr(self, name) for name in NAMES}
        return {name: section for name, section in found.items() if section is not None}

    @property
    def used_engines(self) -> tuple[EngineSettings, ...]:
        """
        Return the sections of the engines that entries use, or all sections if there is no entry.
        """
        used = {each.engine for each in self.serving.values()} or self.engines.keys()
        return tuple(each for name, each in self.engines.items() if name in used)

    @property
    def servers(self) -> EngineSettings | None:
        """
        Return the section with the values that all servers of the node share, or None without an
        engine.
        """
        return next(iter(self.engines.values()), None)

    def engine_of(self, model: str) -> EngineSettings:
        """
        Return the section of the engine that serves an entry. Validation requires this section.
        """
        return self.engines[self.serving[model].engine]

    def with_serving(self, change: Callable[[str, Served], Served | None]) -> NodeSettings:
        """
        Return the settings with each entry of `serving` replaced by the result of `change`.

        If `change` returns None, the entry is removed.
        """
        found = {model: change(model, served) for model, served in self.serving.items()}
        kept = {model: served for model, served in found.items() if served is not None}
        return self.model_copy(update={"serving": kept})

    @property
    def watchdog_port(self) -> int | None:
        """
        Return the port on which this node's watchdog answers gateways.

        It is None if the node has no watchdog, or if its watchdog has no port.
        """
        watched = any(each.watchdog.mode != "off" for each in self.serving.values())
        return self.servers.watchdog_port if self.servers and watched else None

    @property
    def ports(self) -> dict[str, int]:
        """Return the ports of all gpufleet programs except engines, by the key of the setting."""
        found = {"node_exporter.port": self.node_exporter.port}
        section = self.servers.engine if self.servers else ""
        if watchdog := self.watchdog_port:
            found[f"{section}.watchdog_port"] = watchdog
        if self.servers and self.servers.distribution.enabled:
            found[f"{section}.distribution.port"] = self.servers.distribution.port
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

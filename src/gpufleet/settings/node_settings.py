"""What operators write in `group_vars/` and `host_vars/`: every setting, its default, its meaning.

Pure: takes plain values, gives frozen models, knows nothing of files. `variables.py` knows which
file set which key and puts that in front of every mistake found here.

Units are in the names (`_mib`, `_seconds`) or in the description.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    PositiveInt,
    model_validator,
)

from gpufleet.catalog import recorded_nodes
from gpufleet.catalog.checks import CHECKS
from gpufleet.formatting import suggestion
from gpufleet.settings.base import Setting
from gpufleet.settings.cuda_settings import Cuda, Dcgm
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
from gpufleet.settings.serving_settings import ModelName, Served, Vllm
from gpufleet.settings.upgrade_settings import Upgrade


class Gpus(Setting):
    """What this node is declared to have; the probe must agree. What is left out is expected as the
    node's siblings have it, else as the device itself says."""

    count: Annotated[PositiveInt | None, Field(description="GPUs in the node")] = None
    name: Annotated[str | None, Field(description="Product name as NVML gives it")] = None
    hardware: Annotated[
        str | None,
        Field(
            description="Hardware by name, as h100x8, that `gpufleet plan --as` and `gpufleet "
            "validate` take the node to be; checks of nodes do not look at it"
        ),
    ] = None
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

    @model_validator(mode="after")
    def _hardware_is_known(self) -> Gpus:
        known = recorded_nodes.names()
        if self.hardware is not None and self.hardware not in known:
            raise ValueError(
                f"no hardware is called {self.hardware!r}{suggestion(self.hardware, known)}; known "
                f"are {', '.join(known)}"
            )
        return self


class Acceptance(Setting):
    """A finding that the operator knows of and lives with for a while."""

    free_text: ClassVar = frozenset({"reason"})

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


class Absent(Setting):
    """What `deploys/absent.py` takes from a node."""

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
        Field(description="These alone; none: all of them"),
    ] = ()
    models: Annotated[bool, Field(description="Models' files, too")] = False
    drivers: Annotated[bool, Field(description="NVIDIA's driver, CUDA and their settings, too")] = (
        False
    )


class NodeSettings(Setting):
    """Everything that one node's variables may say, after groups and hosts are merged."""

    gpu_node: Annotated[
        bool, Field(description="false: it has no GPUs; what is set for GPU nodes leaves it alone")
    ] = True
    gpus: Gpus = Gpus()
    checks: Checks = Checks()
    absent: Absent = Absent()
    gpu_lock: Annotated[
        GpuLock | None,
        Field(description="What belongs together on the nodes; null: the driver is not ours"),
    ] = None
    gpu: Gpu = Gpu()
    cuda: Cuda | None = None
    dcgm: Dcgm | None = None
    node_exporter: NodeExporter = NodeExporter()
    exporters: Exporters = Exporters()
    monitoring: Annotated[Monitoring | None, Field(description="null: not a monitoring node")] = (
        None
    )
    gateway: Annotated[
        Gateway | None, Field(description="null: clients do not come to this node")
    ] = None
    litellm: Annotated[
        Litellm | None, Field(description="null: no LiteLLM in front of the gateway on this node")
    ] = None
    balancer: Annotated[
        Balancer | None, Field(description="Your own balancer; null: our gateways, or none")
    ] = None
    upgrade: Annotated[
        Upgrade, Field(description="How the fleet is changed; the same for all of its nodes")
    ] = Upgrade()
    firewall: Annotated[
        Firewall | None,
        Field(description="null: no firewall from gpufleet, and an earlier one is removed"),
    ] = None
    vllm: Vllm | None = None
    cluster_network: Annotated[
        IPv4Network | None,
        Field(description="Network on which nodes of one replica talk; null: found by the probe"),
    ] = None
    serving: Annotated[
        dict[ModelName, Served], Field(description="Models that the node may get, by name")
    ] = {}
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

    def with_serving(self, change: Callable[[str, Served], Served | None]) -> NodeSettings:
        """Return the settings with each model as `change` gives it; with None it is left out."""
        found = {model: change(model, served) for model, served in self.serving.items()}
        kept = {model: served for model, served in found.items() if served is not None}
        return self.model_copy(update={"serving": kept})

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

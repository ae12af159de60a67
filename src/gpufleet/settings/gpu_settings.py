"""What operators write of a node's GPU software: `gpu_lock`, what it runs; `gpu`, how we work.

Pure models. Which combinations cannot work is `gpu_software/lock_rules.py`'s; what the operating
system calls the packages is `driver_packages.py`'s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

# An upstream version of NVIDIA's driver, or the branch that is its first number.
DRIVER = r"^\d{3}(\.\d+(\.\d+)?)?$"
# A package's version: as deb-control(5) has it, or rpm's VERSION-RELEASE.
VERSION = r"^[0-9A-Za-z][0-9A-Za-z.+:~^-]*$"
# What modprobe.d(5) takes apart at blanks, a line for all of a module's options.
ModuleOption = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
ModuleValue = Annotated[str, Field(pattern=r"^\S+$")]


class _Setting(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Toolkit(_Setting):
    """Compilers for kernels that are made at run time; vLLM's wheels carry the CUDA runtime."""

    profile: Annotated[
        Literal["none", "jit", "full"],
        Field(description="none; jit: compiler and headers; full: all of the toolkit"),
    ] = "none"
    branch: Annotated[
        str | None, Field(pattern=r"^\d+-\d+$", description="as in cuda-toolkit-<13-0>")
    ] = None
    version: Annotated[
        str | None,
        Field(
            pattern=VERSION,
            description="exact version of cuda-toolkit-<branch> (full) or cuda-nvcc-<branch> (jit)",
        ),
    ] = None

    @model_validator(mode="after")
    def _whole(self) -> Toolkit:
        if self.profile != "none" and not (self.branch and self.version):
            raise ValueError(f"profile {self.profile} needs `branch` and `version`")
        if self.profile == "none" and (self.branch or self.version):
            raise ValueError("profile none installs nothing: remove `branch` and `version`")
        return self


class LockedDcgm(_Setting):
    """DCGM and its exporter."""

    version: Annotated[
        str, Field(pattern=VERSION, description="of every datacenter-gpu-manager-4 package")
    ]
    exporter: Annotated[
        str | None, Field(pattern=VERSION, description="of the exporter; null: none")
    ] = None


class LockedVllm(_Setting):
    """The release that serves. `vllm.version` and `vllm.python` may say the same, nothing else."""

    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+(\.?\w+)*$")]
    python: Annotated[str, Field(pattern=r"^3\.\d+$", description="Python of the node, as in 3.12")]


class GpuLock(_Setting):
    """
    The versions that belong together on a group's nodes.

    Fabric manager, NSCQ, IMEX and persistence daemon are the driver's version and have no key.
    """

    driver: Annotated[
        str,
        Field(
            pattern=DRIVER,
            description="exact version, as 580.95.05, or a branch, as 580: then any version of it "
            "that is installed is kept, and a new node gets the newest",
        ),
    ]
    modules: Annotated[
        Literal["open", "proprietary"], Field(description="flavour of the kernel modules")
    ] = "open"
    kernel: Annotated[
        Literal["follow", "held"],
        Field(description="held: kernel packages stay as they are until this says otherwise"),
    ] = "follow"
    nvlsm: Annotated[
        str | None,
        Field(pattern=VERSION, description="exact; for nodes with NVLink 5 switches"),
    ] = None
    toolkit: Toolkit = Toolkit()
    dcgm: LockedDcgm | None = None
    persistence: Annotated[
        bool, Field(description="whether the persistence daemon keeps GPUs initialised")
    ] = True
    vllm: LockedVllm | None = None

    @property
    def branch(self) -> str:
        """The driver's branch, as in "580"."""
        return self.driver.partition(".")[0]

    @property
    def exact(self) -> str | None:
        """The driver's exact version; None where the lock names a branch."""
        return self.driver if "." in self.driver else None


class HugePages(_Setting):
    """Huge pages of 2 MiB that are set aside."""

    count: PositiveInt


class Rdma(_Setting):
    """GPUs and network adapters that reach each other's memory."""

    way: Annotated[
        Literal["dma_buf", "peermem"],
        Field(description="dma_buf: the kernel's own; peermem: NVIDIA's nvidia_peermem module"),
    ] = "dma_buf"


class ContainerToolkit(_Setting):
    """NVIDIA's container toolkit, for nodes that also run containers with GPUs."""

    version: Annotated[str, Field(pattern=VERSION)]
    repository: Annotated[
        str, Field(pattern=r"^https?://\S+[^/\s]$", description="without final slash")
    ] = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64"
    key_file: Annotated[
        str, Field(description="the repository's public key, a file on this machine")
    ]


class Gpu(_Setting):
    """How the driver is brought into force, and what else is set on a GPU node."""

    reboot: Annotated[
        Literal["never", "when_needed", "ask"],
        Field(
            description="when a new driver or kernel is not in force without a reboot. never: say "
            "so and fail the node; when_needed: reboot; ask: on a terminal, else as never"
        ),
    ] = "ask"
    reboot_seconds: Annotated[
        PositiveInt, Field(description="until a rebooted node has to be back")
    ] = 1200
    secure_boot: Annotated[
        Literal["refuse", "enrolled"],
        Field(
            description="refuse: a node with Secure Boot on gets no module that it would not load; "
            "enrolled: the key that DKMS signs with is enrolled in the firmware"
        ),
    ] = "refuse"
    module_options: Annotated[
        dict[ModuleOption, ModuleValue],
        Field(description="of the nvidia module, as {NVreg_RestrictProfilingToAdminUsers: '0'}"),
    ] = {}
    tuning: Annotated[bool, Field(description="limits, sysctls, NUMA balancing")] = True
    huge_pages: HugePages | None = None
    rdma: Rdma | None = None
    container_toolkit: ContainerToolkit | None = None

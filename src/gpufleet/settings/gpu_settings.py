"""Settings of a node's GPU software: `gpu_lock` and `gpu`.

Pure models. `gpu_software/lock_rules.py` refuses combinations that cannot work;
`driver_packages.py` has the names of packages in each operating system.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from gpufleet.settings.base import Seconds, Setting, Url, pattern_rule
from gpufleet.settings.gpu_lock import PackageVersion

# modprobe.d(5) has one line for all options of a module, and splits it at blanks.
ModuleOption = Annotated[
    str, pattern_rule(r"[A-Za-z_]\w*", "an option's name: letters, digits and `_`, no digit first")
]
ModuleValue = Annotated[str, pattern_rule(r"\S+", "one word, without blanks")]


class HugePages(Setting):
    """Reserved huge pages of 2 MiB."""

    count: Annotated[PositiveInt, Field(description="Pages of 2 MiB")]


class Rdma(Setting):
    """GPUDirect RDMA between GPUs and network adapters."""

    way: Annotated[
        Literal["dma_buf", "peermem"],
        Field(description="dma_buf: the kernel's DMA-BUF; peermem: NVIDIA's nvidia_peermem module"),
    ] = "dma_buf"


class ContainerToolkit(Setting):
    """NVIDIA's container toolkit, for nodes that also run containers with GPUs."""

    version: Annotated[PackageVersion, Field(description="exact version of its packages")]
    repository: Url = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64"
    key_file: Annotated[
        str, Field(description="the repository's public key, a file on this machine")
    ]


class Gpu(Setting):
    """How a driver is activated, and other settings of a GPU node."""

    reboot: Annotated[
        Literal["never", "when_needed", "ask"],
        Field(
            description="if a new driver or kernel needs a reboot. never: fail the node with "
            "that reason; when_needed: reboot; ask: ask on a terminal, otherwise as never"
        ),
    ] = "ask"
    reboot_seconds: Annotated[
        Seconds, Field(gt=0, description="deadline for a node to return from a reboot")
    ] = 1200
    secure_boot: Annotated[
        Literal["refuse", "enrolled"],
        Field(
            description="refuse: build no module that a node with Secure Boot cannot load; "
            "enrolled: the DKMS signing key is enrolled in the firmware"
        ),
    ] = "refuse"
    module_options: Annotated[
        dict[ModuleOption, ModuleValue],
        Field(
            description="options of the nvidia module, as "
            "{NVreg_RestrictProfilingToAdminUsers: '0'}"
        ),
    ] = {}
    tuning: Annotated[bool, Field(description="set limits, sysctls and NUMA balancing")] = True
    huge_pages: HugePages | None = None
    rdma: Rdma | None = None
    container_toolkit: ContainerToolkit | None = None

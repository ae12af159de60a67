"""Settings of a node's GPU software: `gpu_lock` and `gpu`.

Pure. `gpu_software/lock_rules.py` refuses combinations that cannot work. `driver_packages.py` has
the names of the packages in each operating system.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from gpufleet.settings.base import Seconds, Setting, Url, pattern_rule
from gpufleet.settings.gpu_lock import PackageVersion

# modprobe.d(5) has one line for all options of a module, and splits it at blanks.
ModuleOption = Annotated[
    str,
    pattern_rule(
        r"[A-Za-z_]\w*",
        "the name of an option: letters, digits and `_`, and the first character is not a digit",
    ),
]
ModuleValue = Annotated[str, pattern_rule(r"\S+", "one word, without blanks")]


class HugePages(Setting):
    """Huge pages of 2 MiB that the node reserves."""

    count: Annotated[PositiveInt, Field(description="Number of pages of 2 MiB")]


class Rdma(Setting):
    """GPUDirect RDMA between GPUs and network adapters."""

    way: Annotated[
        Literal["dma_buf", "peermem"],
        Field(
            description="dma_buf: use the kernel's DMA-BUF. peermem: use NVIDIA's kernel "
            "module nvidia_peermem"
        ),
    ] = "dma_buf"


class ContainerToolkit(Setting):
    """NVIDIA's container toolkit, for nodes that also run containers with GPUs."""

    version: Annotated[PackageVersion, Field(description="Exact version of the toolkit's packages")]
    repository: Url = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64"
    key_file: Annotated[
        str,
        Field(
            description="File with the repository's public key, on the machine that runs gpufleet"
        ),
    ]


class Gpu(Setting):
    """How a new driver is activated on a GPU node, and other system settings of the node."""

    reboot: Annotated[
        Literal["never", "when_needed", "ask"],
        Field(
            description="What to do if a new driver or kernel needs a reboot. never: the "
            "deploy of the node fails with this reason. when_needed: reboot the node. ask: "
            "ask you if there is a terminal, otherwise do the same as never"
        ),
    ] = "ask"
    reboot_seconds: Annotated[
        Seconds,
        Field(
            gt=0,
            description="Maximum time from the start of a reboot until the node is reachable again",
        ),
    ] = 1200
    secure_boot: Annotated[
        Literal["refuse", "enrolled"],
        Field(
            description="refuse: on a node with Secure Boot, build no kernel module that "
            "the node could not load. enrolled: you have enrolled the DKMS signing key in "
            "the node's firmware, so the node loads modules that it builds"
        ),
    ] = "refuse"
    module_options: Annotated[
        dict[ModuleOption, ModuleValue],
        Field(
            description="Options of the kernel module nvidia, for example "
            "{NVreg_RestrictProfilingToAdminUsers: '0'}"
        ),
    ] = {}
    tuning: Annotated[
        bool, Field(description="Whether gpufleet sets limits, sysctls and NUMA balancing")
    ] = True
    huge_pages: HugePages | None = None
    rdma: Rdma | None = None
    container_toolkit: ContainerToolkit | None = None

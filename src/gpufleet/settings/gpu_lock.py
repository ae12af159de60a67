"""The setting `gpu_lock`: versions to install together, and combinations to refuse.

Pure. `gpu_software/lock_rules.py` has the objections that depend on the node, on vLLM's release or
on the date.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gpufleet.catalog.driver_branches import OPEN_ONLY_SINCE, branch, cuda_major, flavours
from gpufleet.settings.base import KeyPath, PythonVersion, Setting, pattern_rule

# A version of NVIDIA's driver without a package's suffix, or its branch, which is the first number.
DRIVER = r"\d{3}(\.\d+(\.\d+)?)?"


# The version of a package, as in deb-control(5), or as VERSION-RELEASE in rpm.
PackageVersion = Annotated[
    str,
    pattern_rule(
        r"[0-9A-Za-z][0-9A-Za-z.+:~^-]*",
        "the whole version of a package, for example 1:4.4.1-1 or 13.0.2-1",
    ),
]


class Toolkit(Setting):
    """
    The CUDA toolkit: compilers for kernels that are compiled at run time. vLLM's wheels contain the
    CUDA runtime.
    """

    profile: Annotated[
        Literal["none", "jit", "full"],
        Field(
            description="none: install no toolkit. jit: install the compiler and the headers. "
            "full: install the whole toolkit"
        ),
    ] = "none"
    branch: Annotated[
        str | None,
        pattern_rule(r"\d+-\d+", "two numbers with `-` between them, for example 13-0"),
        Field(description="Branch of the toolkit: 13-0 stands for the package cuda-toolkit-13-0"),
    ] = None
    version: Annotated[
        PackageVersion | None,
        Field(
            description="Exact version of the package: `cuda-toolkit-<branch>` with "
            "`profile: full`, or `cuda-nvcc-<branch>` with `profile: jit`",
        ),
    ] = None

    @model_validator(mode="after")
    def _whole(self) -> Toolkit:
        if self.profile != "none" and not (self.branch and self.version):
            raise ValueError(f"`profile: {self.profile}` needs `branch` and `version`: set both")
        if self.profile == "none" and (self.branch or self.version):
            raise ValueError("`profile: none` installs no toolkit: remove `branch` and `version`")
        return self


class LockedDcgm(Setting):
    """DCGM and its exporter."""

    version: Annotated[
        PackageVersion, Field(description="Version of the datacenter-gpu-manager-4 packages")
    ]
    exporter: Annotated[
        PackageVersion | None,
        Field(description="Version of the exporter. null: no exporter is installed"),
    ] = None


class LockedVllm(Setting):
    """
    The vLLM release of the nodes. If `vllm.version` or `vllm.python` is also set, the values must
    be equal.
    """

    version: PythonVersion
    python: Annotated[
        str,
        pattern_rule(r"3\.\d+", "two numbers with a dot, for example 3.12"),
        Field(description="Python version of the node, for example 3.12"),
    ]


class GpuLock(Setting):
    """
    Versions of driver, toolkit, DCGM and vLLM for a group of nodes.

    Fabric manager, NSCQ, IMEX and the persistence daemon have the same version as the driver, so
    there are no keys for them.
    """

    driver: Annotated[
        str,
        pattern_rule(DRIVER, "the version or the branch of a driver, for example 580.95.05 or 580"),
        Field(
            description="Exact version (for example 580.95.05), or a branch (for example "
            "580). With a branch, a node keeps any installed version of this branch, and a "
            "new node gets the newest version",
        ),
    ]
    modules: Annotated[
        Literal["open", "proprietary"],
        Field(description="Which of NVIDIA's two variants of the kernel modules to install"),
    ] = "open"
    kernel: Annotated[
        Literal["follow", "held"],
        Field(
            description="held: keep the installed kernel packages. follow: allow updates of "
            "the kernel packages"
        ),
    ] = "follow"
    nvlsm: Annotated[
        PackageVersion | None,
        Field(
            description="Exact version of the package nvlsm, which nodes with NVLink 5 "
            "switches need"
        ),
    ] = None
    toolkit: Toolkit = Toolkit()
    dcgm: LockedDcgm | None = None
    persistence: Annotated[
        bool,
        Field(
            description="Run NVIDIA's persistence daemon, which keeps GPUs initialised while "
            "no program uses them"
        ),
    ] = True
    vllm: LockedVllm | None = None

    @property
    def branch(self) -> str:
        """The driver's branch, for example "580"."""
        return self.driver.partition(".")[0]

    @property
    def exact(self) -> str | None:
        """The driver's exact version, or None if the lock names only a branch."""
        return self.driver if "." in self.driver else None


@dataclass(frozen=True)
class Objection:
    """An objection to a lock: the key to change, the message, and whether it stops the run."""

    at: KeyPath
    what: str
    refused: bool = True

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.at))}: {self.what}"


def lock_objections(lock: GpuLock) -> Iterator[Objection]:
    """
    Yield the objections to a lock that do not depend on the node, on vLLM's release or on the date.
    """
    if lock.modules not in flavours(lock.branch):
        yield Objection(
            ("gpu_lock", "modules"),
            f"driver R{lock.branch} has no {lock.modules} kernel modules (no driver since "
            f"R{OPEN_ONLY_SINCE} has them): write `open`. If the open modules do not "
            "support your GPUs, stay on driver R580",
        )
    yield from _toolkit_objections(lock)


def _toolkit_objections(lock: GpuLock) -> Iterator[Objection]:
    """
    Yield objections to a toolkit if the driver cannot run the programs that it compiles.

    A driver runs the kernels of every toolkit of its CUDA major version. If the toolkit's minor
    version is newer than the driver's, the driver runs only kernels that are compiled to machine
    code ("minor version compatibility" in NVIDIA's CUDA compatibility guide).
    """
    if lock.toolkit.branch is None:
        return
    major, minor = (int(part) for part in lock.toolkit.branch.split("-"))
    at = ("gpu_lock", "toolkit", "branch")
    major_served, known = cuda_major(lock.branch), branch(lock.branch)
    if major_served is not None and major > major_served:
        yield Objection(
            at,
            f"is {lock.toolkit.branch}, but driver R{lock.branch} runs CUDA {major_served}, "
            "so programs that this toolkit compiles would not start: write a toolkit of "
            f"CUDA {major_served}, or a newer driver",
        )
    elif known and (major, minor) > known.cuda:
        yield Objection(
            at,
            f"is {lock.toolkit.branch}, which is newer than the CUDA version of driver "
            f"R{lock.branch} ({known.cuda[0]}.{known.cuda[1]}): kernels in machine code "
            "run, but kernels in PTX do not, because the driver would have to compile them",
            refused=False,
        )

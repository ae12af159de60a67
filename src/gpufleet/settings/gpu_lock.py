"""The setting `gpu_lock`: versions to install together, and combinations to refuse.

Pure. Objections that depend on the node, vLLM's release or the date are in
`gpu_software/lock_rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gpufleet.catalog.driver_branches import OPEN_ONLY_SINCE, branch, cuda_major, flavours
from gpufleet.settings.base import KeyPath, PythonVersion, Setting, pattern_rule

# An upstream version of NVIDIA's driver, or the branch that is its first number.
DRIVER = r"\d{3}(\.\d+(\.\d+)?)?"


# A package's version: as deb-control(5) has it, or rpm's VERSION-RELEASE.
PackageVersion = Annotated[
    str,
    pattern_rule(
        r"[0-9A-Za-z][0-9A-Za-z.+:~^-]*", "a package's whole version, as 1:4.4.1-1 or 13.0.2-1"
    ),
]


class Toolkit(Setting):
    """Compilers for kernels that are made at run time; vLLM's wheels carry the CUDA runtime."""

    profile: Annotated[
        Literal["none", "jit", "full"],
        Field(description="none; jit: compiler and headers; full: all of the toolkit"),
    ] = "none"
    branch: Annotated[
        str | None,
        pattern_rule(r"\d+-\d+", "two numbers with `-` between them, as 13-0"),
        Field(description="as in cuda-toolkit-<13-0>"),
    ] = None
    version: Annotated[
        PackageVersion | None,
        Field(
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


class LockedDcgm(Setting):
    """DCGM and its exporter."""

    version: Annotated[
        PackageVersion, Field(description="version of the datacenter-gpu-manager-4 packages")
    ]
    exporter: Annotated[
        PackageVersion | None, Field(description="version of the exporter; null: none")
    ] = None


class LockedVllm(Setting):
    """The vLLM release of the nodes; `vllm.version` and `vllm.python`, if set, must equal it."""

    version: PythonVersion
    python: Annotated[
        str,
        pattern_rule(r"3\.\d+", "as in 3.12"),
        Field(description="Python of the node, as in 3.12"),
    ]


class GpuLock(Setting):
    """
    Versions of driver, toolkit, DCGM and vLLM for a group of nodes.

    Fabric manager, NSCQ, IMEX and persistence daemon are the driver's version and have no key.
    """

    driver: Annotated[
        str,
        pattern_rule(DRIVER, "a driver's version or branch, as 580.95.05 or 580"),
        Field(
            description="exact version (580.95.05), or a branch (580): any installed version of "
            "the branch is kept, and a new node gets the newest",
        ),
    ]
    modules: Annotated[
        Literal["open", "proprietary"], Field(description="flavour of the kernel modules")
    ] = "open"
    kernel: Annotated[
        Literal["follow", "held"],
        Field(description="held: keep the kernel packages; follow: let them change"),
    ] = "follow"
    nvlsm: Annotated[
        PackageVersion | None,
        Field(description="exact version; for nodes with NVLink 5 switches"),
    ] = None
    toolkit: Toolkit = Toolkit()
    dcgm: LockedDcgm | None = None
    persistence: Annotated[
        bool, Field(description="run the persistence daemon, which keeps GPUs initialised")
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
    """Yield a lock's problems that do not depend on the node, vLLM's release or the date."""
    if lock.modules not in flavours(lock.branch):
        yield Objection(
            ("gpu_lock", "modules"),
            f"R{lock.branch} has no {lock.modules} kernel modules (none since R{OPEN_ONLY_SINCE}): "
            "write `open`, or stay on R580 for GPUs that the open modules do not run",
        )
    yield from _toolkit_objections(lock)


def _toolkit_objections(lock: GpuLock) -> Iterator[Objection]:
    """
    Yield objections to a toolkit whose programs the driver cannot run.

    A toolkit's kernels run on any driver of its CUDA major version. If the toolkit's minor version
    is newer, only kernels compiled to machine code run ("minor version compatibility" in NVIDIA's
    CUDA compatibility guide).
    """
    if lock.toolkit.branch is None:
        return
    major, minor = (int(part) for part in lock.toolkit.branch.split("-"))
    at = ("gpu_lock", "toolkit", "branch")
    major_served, known = cuda_major(lock.branch), branch(lock.branch)
    if major_served is not None and major > major_served:
        yield Objection(
            at,
            f"is {lock.toolkit.branch}, but driver R{lock.branch} runs CUDA {major_served}: "
            f"programs that it compiles would not start; lock a toolkit of CUDA {major_served}, "
            "or a newer driver",
        )
    elif known and (major, minor) > known.cuda:
        yield Objection(
            at,
            f"is {lock.toolkit.branch}, newer than driver R{lock.branch} (CUDA "
            f"{known.cuda[0]}.{known.cuda[1]}): kernels run as machine code, but not as PTX, "
            "which the driver would have to compile",
            refused=False,
        )

"""Choose the packages of the CUDA toolkit. Pure."""

from __future__ import annotations

from typing import Literal

from gpufleet.converge.desired import Package
from gpufleet.settings.cuda_settings import Cuda
from gpufleet.settings.node_settings import NodeSettings

# Packages for compiling kernels at run time: the headers of CUDA and of libraries that FlashInfer
# and torch's extensions include. The package of nvcc depends on the other parts of the compiler in
# the same version.
JIT = ("cuda-cudart-dev", "cuda-cccl", "libcublas-dev", "libcurand-dev")

Profile = Literal["none", "jit", "full"]


def toolkit_profile(settings: NodeSettings) -> Profile:
    """Return the profile of the toolkit in a node's lock, or "full" if the node has no lock."""
    return settings.gpu_lock.toolkit.profile if settings.gpu_lock else "full"


def toolkit_packages(wanted: Cuda, profile: Profile = "full") -> tuple[Package, ...]:
    """Return the toolkit's packages with exact versions. They are held against other upgrades."""
    branch = wanted.toolkit
    if branch is None or profile == "none":
        return ()
    if profile == "full":
        return (Package(f"cuda-toolkit-{branch}", wanted.version, hold=True),)
    return (
        Package(f"cuda-nvcc-{branch}", wanted.version, hold=True),
        *(Package(f"{name}-{branch}", hold=True) for name in JIT),
    )

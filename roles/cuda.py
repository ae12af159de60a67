"""Install the CUDA toolkit in an exact, held version."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState
from gpufleet.gpu_software.cuda_toolkit import Profile, toolkit_packages
from gpufleet.gpu_software.repository import package_source
from gpufleet.operations.converge import Converge
from gpufleet.settings.cuda_settings import Cuda


@deploy("CUDA")
def cuda(wanted: Cuda, profile: Profile = "full") -> None:
    """Converge the toolkit after its repository; install no package if no toolkit is set."""
    toolkit = Converge(
        DesiredState(package_source(wanted.repository), *toolkit_packages(wanted, profile))
    )
    toolkit.packages(name="toolkit")

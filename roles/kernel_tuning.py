"""Tune a GPU node's kernel for serving, and create its device files."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.gpu_software.kernel_tuning import desired_tuning, kernel_settings
from gpufleet.operations.converge import Converge
from gpufleet.operations.tune_kernel import SECONDS, tune_kernel
from gpufleet.settings.gpu_settings import Gpu


@deploy("tuning")
def kernel_tuning(gpu: Gpu, gpus: int) -> None:
    """Converge the kernel settings, now and at boot, and the unit for `gpus` GPUs."""
    node = Converge(desired_tuning(gpu, gpus))
    node.files(name="settings and device files")
    node.units(name="device files at boot")
    if settings := kernel_settings(gpu):
        tune_kernel(settings, name="settings of the running kernel", _timeout=SECONDS)

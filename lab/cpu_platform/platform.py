"""vLLM's CPU platform for ranks on several nodes."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuNodes(CpuPlatform):
    """The CPU platform, with workers that Ray can place and ranks that know who is near."""

    # vllm/v1/executor/ray_utils.py of 0.32 refuses a platform without one. What `ray start
    # --num-gpus` counts: ranks are placed as on nodes with GPUs.
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the class of what ranks talk through."""
        return "gpufleet_lab_cpu.communicator.Communicator"

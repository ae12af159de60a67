"""vLLM's CPU platform for ranks on several nodes."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform


class CpuNodes(CpuPlatform):
    """The CPU platform, with workers for Ray and ranks that know their local peers."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """
        Make vLLM fork the engine and its workers.

        This is vLLM's default, which its CPU platform (0.31 and 0.32) replaces by "spawn". With
        "spawn" each process imports torch and vLLM again, and a start takes 36 s of CPU time
        instead of 16.
        """
        super().check_and_update_config(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    # vllm/v1/executor/ray_utils.py of 0.32 refuses a platform without one. What `ray start
    # --num-gpus` counts: ranks are placed as on nodes with GPUs.
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the import path of the communicator between ranks."""
        return "gpufleet_lab_cpu.communicator.Communicator"

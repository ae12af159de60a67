"""vLLM's CPU platform for ranks on several nodes."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from vllm.platforms.cpu import CpuPlatform


class CpuNodes(CpuPlatform):
    """The CPU platform, with workers for Ray and ranks that know their local peers."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """
        Make vLLM fork the engine and its workers, and its ranks wait without occupying a core.

        To fork is vLLM's default, which its CPU platform (0.31 and 0.32) replaces by "spawn". With
        "spawn" each process imports torch and vLLM again, and a start takes 36 s of CPU time
        instead of 16.
        """
        super().check_and_update_config(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        _wait_without_spinning()

    # vllm/v1/executor/ray_utils.py of 0.32 refuses a platform without one. What `ray start
    # --num-gpus` counts: ranks are placed as on nodes with GPUs.
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the import path of the communicator between ranks."""
        return "gpufleet_lab_cpu.communicator.Communicator"


def _wait_without_spinning() -> None:
    """
    Make a rank sleep for a millisecond at a time while it waits for its engine's next message.

    vLLM makes it poll without a pause until a second after the last message (0.31 and 0.32), on a
    core of its own. Lab nodes share the cores of one machine: with a request a second, each of them
    would occupy one all the time. To sleep until a message is announced would not do: vLLM may lose
    announcements (tried with 0.31 and 0.32: requests hung).
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = partial(time.sleep, 0.001)

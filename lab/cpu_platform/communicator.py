"""Communication of ranks on CPUs: shared memory on one node, sockets between nodes."""

from __future__ import annotations

import socket

import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Communicator(CpuCommunicator):
    """vLLM's communicator, changed because it regards ranks with the same port as local (0.32)."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        hosts = [""] * self.world_size
        torch.distributed.all_gather_object(hosts, socket.gethostname(), group=self.device_group)
        return len(set(hosts)) == 1 and super()._all_group_ranks_share_shm_group_name()

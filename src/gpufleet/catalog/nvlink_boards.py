"""List the GPUs that are sold only with NVLink. If such a GPU has no NVLink, its links are down."""

from __future__ import annotations

LINKS_OF_BOARD = {
    "NVIDIA A100-SXM4-40GB": 12,
    "NVIDIA A100-SXM4-80GB": 12,
    "NVIDIA A800-SXM4-80GB": 8,
    "NVIDIA H100 80GB HBM3": 18,
    "NVIDIA H200": 18,
    "NVIDIA H20": 18,
    "NVIDIA H800": 8,
    "NVIDIA B200": 18,
    "NVIDIA GB200": 18,
}
"""
Number of NVLinks of a GPU, by NVML's exact name.

The number is the NVLink bandwidth in the data sheet divided by the bandwidth of one link, in GB/s:

- A100: 600 / 50
- A800 and H800: 400 / 50
- H100, H200 and H20: 900 / 50
- B200 and GB200: 1800 / 100
"""


def is_always_wired(model: str) -> bool:
    """
    Return whether a GPU with this name is sold only with NVLink.

    Such a GPU is connected to NVSwitches or directly to other GPUs.

    >>> is_always_wired("Tesla V100-SXM2-32GB"), is_always_wired("NVIDIA H100 PCIe")
    (True, False)
    """
    return model in LINKS_OF_BOARD or "-SXM" in model

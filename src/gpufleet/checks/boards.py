"""What a GPU's board was made for.  Pure."""

from __future__ import annotations

from gpufleet.checks.probe_facts import GpuReading

# nvmlBrandType_t of boards for servers: Tesla, and "NVIDIA", which they answer since Ampere.
_BRANDS = {2, 14}
# Boards made for desktops, whatever brand they answer.
_DESKTOP_NAMES = ("GeForce", "RTX", "TITAN", "Quadro")


def is_for_servers(gpu: GpuReading) -> bool:
    """Say whether a board was made for servers: ECC is on as delivered, bridges join all pairs."""
    name = gpu.known("name", default="")
    return gpu.known("brand") in _BRANDS and not any(word in name for word in _DESKTOP_NAMES)

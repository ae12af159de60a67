"""Define nodes that can reach only a mirror, which `gpufleet bundle` fills."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01", "gpu-02"]}))

"""Nodes that reach a mirror and nothing else: `gpufleet bundle` fills it."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01", "gpu-02"]}))

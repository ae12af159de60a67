"""Define nodes with an installed driver, which gpufleet does not change."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01"]}))

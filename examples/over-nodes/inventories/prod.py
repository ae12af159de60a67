"""Two nodes with eight H100 each, for a model that one of them does not hold."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01", "gpu-02"]}))

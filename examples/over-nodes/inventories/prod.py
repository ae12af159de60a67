"""Define two nodes with eight H100 each, for a model that is too large for one node."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01", "gpu-02"]}))

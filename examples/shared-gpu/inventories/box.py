"""This machine alone, without SSH: three models on its one GPU."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))

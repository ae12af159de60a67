"""This machine alone, without SSH."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))

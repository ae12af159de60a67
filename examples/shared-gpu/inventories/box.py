"""Define this machine as the only node, without SSH: three models share one GPU."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))

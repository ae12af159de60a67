"""Nodes whose driver is there already, and stays as it is."""

from gpufleet import inventory

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01"]}))

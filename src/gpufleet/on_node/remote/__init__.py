"""The program that runs all short programs of a gpufleet run in one Python process on the node."""

"""RUNS ON THE NODE: checks of `gpufleet preflight`."""

"""Programs that read facts and test alerts on nodes for `gpufleet preflight`."""

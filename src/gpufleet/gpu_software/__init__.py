"""Driver, CUDA, DCGM and fabric manager: versions, packages and activation."""

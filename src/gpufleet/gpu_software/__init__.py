"""Driver, CUDA, DCGM and fabric manager: versions, packages, and what brings them into force."""

"""Versions, packages and activation of the driver, CUDA, DCGM and the fabric manager."""

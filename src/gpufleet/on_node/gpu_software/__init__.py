"""The NVIDIA driver: loaded, unloaded, built."""

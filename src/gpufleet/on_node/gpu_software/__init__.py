"""Programs that load, unload and build the NVIDIA driver."""

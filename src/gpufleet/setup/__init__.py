"""A fleet's project directory, written from the names of its hosts: `gpufleet init`."""

"""A fleet's own directory, written from the names of its hosts: `gpufleet init`."""

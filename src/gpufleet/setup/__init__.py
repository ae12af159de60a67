"""Write a fleet's project directory from the names of its hosts: `gpufleet init`."""

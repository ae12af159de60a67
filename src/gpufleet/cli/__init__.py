"""The command line `gpufleet ...`: one module a command."""

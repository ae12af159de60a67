"""The command line `gpufleet ...`: one module per command."""

"""Test that `gpufleet measure` finds a known capacity, and never states a wrong one."""

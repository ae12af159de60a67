"""The state of all nodes within one run: they are probed, judged and planned once."""

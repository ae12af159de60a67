"""The state of all nodes within one run: each node is probed, checked and planned once."""

"""Run one rank of a multi-node replica."""

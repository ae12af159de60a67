"""Releases and models, copied from node to node."""

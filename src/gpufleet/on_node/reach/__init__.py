"""Test whether the nodes of a replica reach each other."""

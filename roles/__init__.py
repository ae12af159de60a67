"""Roles: everything one purpose needs on a node."""

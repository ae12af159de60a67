"""Modules that several on-node programs share."""

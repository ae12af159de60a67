"""Desired and seen state of a node as values, their difference, the commands that follow.  Pure."""

"""Shared by several programs for nodes."""

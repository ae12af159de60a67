"""Detect and restart stalled servers."""

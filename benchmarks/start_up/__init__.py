"""Measure how long commands take that ask no node."""

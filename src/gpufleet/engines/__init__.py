"""Inference engines, one folder each, with all that is specific to an engine."""

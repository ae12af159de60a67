"""Describe a model from its `config.json`: weights and caches by layer.  Pure."""

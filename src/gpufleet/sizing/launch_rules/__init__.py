"""Predict why vLLM would refuse to start with a model. The entry point is `rules.py`."""

"""Rules by which vLLM refuses a model before it starts; `rules.py` is the entry point."""

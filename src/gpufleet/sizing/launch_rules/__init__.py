"""What vLLM refuses about a model before it starts; `rules.py` is where others look."""

"""Estimate a model's memory on a GPU: weights, KV cache and start-up memory."""

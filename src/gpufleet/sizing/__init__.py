"""Estimate a model's memory on a GPU: weights, KV cache, start-up memory."""

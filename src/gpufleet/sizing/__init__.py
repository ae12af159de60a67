"""What a model takes on a GPU: weights, KV cache, start-up memory."""

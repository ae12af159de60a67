"""Measure what a request costs the load client, and when the client is late; with guidellm."""

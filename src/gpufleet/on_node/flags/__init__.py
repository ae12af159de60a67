"""The flags of one vLLM release, read from its sources."""

"""Read the flags of one vLLM release from its sources."""

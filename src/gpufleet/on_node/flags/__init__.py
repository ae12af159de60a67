"""Read the flags of one vLLM or SGLang release from its sources."""

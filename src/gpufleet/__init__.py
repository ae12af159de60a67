"""gpufleet: bare Linux GPU servers into a vLLM fleet over SSH, safe to change."""

"""Tables of GPUs, driver branches, checks, presets and limits of vLLM, each with its sources."""

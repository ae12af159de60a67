"""Tables with their sources: GPUs, driver branches, checks, presets, limits of vLLM."""

"""Does `gpufleet measure` find a capacity that is known, and does it ever state a wrong one?"""

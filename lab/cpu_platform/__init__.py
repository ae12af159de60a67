"""RUNS ON THE LAB'S NODES: a plug-in of vLLM (group `vllm.platform_plugins`) in its releases.

vLLM's platform for CPUs expects that all ranks are on one machine, or share its memory. On nodes
that are apart it needs two things more, and gets them here; what runs is otherwise vLLM's own.
"""


def platform() -> str:
    """Return where vLLM finds the platform."""
    return "gpufleet_lab_cpu.platform.CpuNodes"

"""RUNS ON THE LAB'S NODES: a plug-in of vLLM (group `vllm.platform_plugins`).

vLLM's platform for CPUs expects that all ranks are on one machine, or share its memory. This
plug-in adds what separate nodes on one machine need; all other code is vLLM's own.
"""


def platform() -> str:
    """Return the import path of the platform."""
    return "gpufleet_lab_cpu.platform.CpuNodes"

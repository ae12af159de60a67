"""Numbers of a probe that `checks/outlier_facts.py` does not compare: who judges them, or why none.

Two tables. tests/unit/checks/test_outliers.py holds that no number of a probe is in none.
"""

from __future__ import annotations

ELSEWHERE: dict[str, str] = {
    "driver.cuda": "driver-minimum",
    "driver.gpu_count": "gpu-count",
    "fabric.": "fabric-state",
    "gpus.*.compute_capability": "compute-capability",
    "gpus.*.compute_mode": "compute-mode",
    "gpus.*.ecc_corrected": "ecc-corrected",
    "gpus.*.ecc_dram": "ecc-corrected",
    "gpus.*.ecc_mode": "ecc-mode",
    "gpus.*.ecc_sram": "ecc-sram",
    "gpus.*.ecc_uncorrected": "ecc-uncorrected",
    "gpus.*.margin_celsius": "temperature",
    "gpus.*.memory.": "foreign-memory",
    "gpus.*.mig_mode": "mig",
    "gpus.*.module_id": "gpu-count",
    "gpus.*.pcie_replays": "pcie-replays",
    "gpus.*.pcie_width": "pcie-width",
    "gpus.*.performance_state": "pcie-generation",
    "gpus.*.persistence_mode": "persistence",
    "gpus.*.recovery_action": "recovery-action",
    "gpus.*.remap_histogram": "row-remap-spares",
    "gpus.*.remapped_rows.failed": "row-remap-failed",
    "gpus.*.remapped_rows.pending": "row-remap-pending",
    "gpus.*.remapped_rows": "row-remap-count",
    "gpus.*.repair": "memory-repair",
    "gpus.*.retired_pages": "retired-pages",
    "gpus.*.temperature_limits": "temperature",
    "gpus.*.throttle_reasons": "hardware-slowdown",
    "gpus.*.throttle_samples": "hardware-slowdown",
    "gpus.*.uuid": "gpu-answers",
    "kernel_log.": "xid",
    "nics.infiniband.*.ports": "rdma",
    "nvlink.*.links.*.errors": "nvlink-errors",
    "nvlink.*.links.*.link": "nvlink-links",
    "nvlink.*.links.*.remote_type": "nvlink-width",
    "nvlink.*.links.*.speed_mbps": "nvlink-width",
    "nvlink.*.links.*.state": "nvlink-links",
    "nvlink.*.links.*.version": "fabric-manager",
    "nvlink.*.count": "nvlink-links",
    "nvlink.*.switch_links": "nvlink-width",
    "p2p.": "iommu-acs",
    "system.disks.*.free_mib": "disk-space",
    "system.hugepages": "host-memory",
    "system.iommu": "iommu-acs",
    "system.memory_available_mib": "host-memory",
    "system.shm": "shared-memory",
}
"""The check that judges a number by itself, by how its path begins; the longest one counts."""

UNJUDGED: dict[str, str] = {
    "gpus.*.architecture": "follows from the name, which gpu-identical compares",
    "gpus.*.brand": "follows from the name, which gpu-identical compares",
    "gpus.*.index": "NVML's own number of the GPU",
    "gpus.*.memory.reserved": "the driver's own; what is left for models is in `free`",
    "gpus.*.minor": "the number of its device file, in the order in which the driver found it",
    "gpus.*.platform": "its place in the rack: every node has another",
    "pci.*.numa_node": "numa.*.node says the same of GPUs; NVSwitches have no use for it",
    "schema": "the document's version: another one is refused as a whole",
    "seconds": "how long the probe took: the load of the node and of its disks",
    "system.uptime_seconds": "when a node was booted is the operator's choice",
    "user.uid": "who probed",
}
"""Why a number is judged by no check, by how its path begins."""

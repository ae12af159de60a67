"""
List the numbers of a probe that `checks/outlier_facts.py` does not compare between nodes.

`ELSEWHERE` has the check that judges each number, and `UNJUDGED` has the reason why no check does.
tests/unit/checks/test_outliers.py verifies that every number of a probe is in one of the tables.
"""

from __future__ import annotations

ELSEWHERE: dict[str, str] = {
    "driver.cuda": "driver-minimum",
    "driver.gpu_count": "gpu-count",
    "fabric.": "fabric-state",
    "gpus.*.application_clocks_mhz": "locked-clocks",
    "gpus.*.compute_capability": "compute-capability",
    "gpus.*.compute_mode": "compute-mode",
    "gpus.*.ecc_corrected_volatile": "ecc-corrected",
    "gpus.*.ecc_dram.corrected_volatile": "ecc-corrected",
    "gpus.*.ecc_mode": "ecc-mode",
    "gpus.*.ecc_sram.aggregateUncParity": "ecc-sram",
    "gpus.*.ecc_sram.aggregateUncSecDed": "ecc-sram",
    "gpus.*.ecc_sram.bThresholdExceeded": "ecc-sram",
    "gpus.*.ecc_sram_counts.corrected_volatile": "ecc-corrected",
    "gpus.*.ecc_uncorrected": "ecc-uncorrected",
    "gpus.*.margin_celsius": "temperature",
    "gpus.*.memory.used": "foreign-memory",
    "gpus.*.mig_mode": "mig",
    "gpus.*.module_id": "gpu-count",
    "gpus.*.pcie_replays": "pcie-replays",
    "gpus.*.pcie_width": "pcie-width",
    "gpus.*.persistence_mode": "persistence",
    "gpus.*.recovery_action": "recovery-action",
    "gpus.*.remap_histogram.low": "row-remap-spares",
    "gpus.*.remap_histogram.none": "row-remap-spares",
    "gpus.*.remapped_rows.failed": "row-remap-failed",
    "gpus.*.remapped_rows.pending": "row-remap-pending",
    "gpus.*.remapped_rows.uncorrected": "row-remap-count",
    "gpus.*.repair": "memory-repair",
    "gpus.*.retired_pages": "retired-pages",
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
    "p2p.nvlink": "fabric-state",
    "p2p.read": "iommu-acs",
    "p2p.write": "iommu-acs",
    "system.disks.*.free_mib": "disk-space",
    "system.iommu.types.DMA": "iommu-acs",
    "system.memory_errors": "host-ecc",
    "system.memory_available_mib": "host-memory",
    "system.shm": "shared-memory",
}
"""
The check that judges a number. The keys are the beginnings of the numbers' paths in a probe. Of
several keys that match a path, the longest one applies.
"""

UNJUDGED: dict[str, str] = {
    "fabric.*.struct": "the version of NVML's data structure",
    "gpus.*.architecture": "follows from the GPU's name, which gpu-identical compares",
    "gpus.*.brand": "follows from the GPU's name, which gpu-identical compares",
    "gpus.*.ecc_corrected_aggregate": (
        "counts errors of the GPU's whole life; ecc-corrected judges only the errors since the "
        "last reset"
    ),
    "gpus.*.ecc_dram": "is part of a sum; ecc-uncorrected judges the sum over all places",
    "gpus.*.ecc_sram": "ecc-sram judges NVIDIA's threshold and the counts for it",
    "gpus.*.ecc_sram_counts": (
        "is part of a sum; ecc-uncorrected judges the sum, and ecc-sram judges the threshold"
    ),
    "gpus.*.index": "NVML's own number of the GPU",
    "gpus.*.memory.free": "`total` minus `used`",
    "gpus.*.memory.reserved": "the driver's own memory; `free` is the rest, which models can use",
    "gpus.*.minor": (
        "the number of the GPU's device file, in the order in which the driver found the GPUs"
    ),
    "gpus.*.performance_state": "changes with load; pcie-generation uses it",
    "gpus.*.platform": "the GPU's place in the rack, which differs on every node",
    "gpus.*.remap_histogram": (
        "counts banks with spare rows left; a check judges the banks with few or no spare rows"
    ),
    "gpus.*.remapped_rows.corrected": (
        "NVIDIA's limit applies only to rows that were remapped after uncorrectable errors"
    ),
    "gpus.*.temperature_limits": (
        "the check `temperature` uses these limits if a board reports no other limits"
    ),
    "nvlink.*.links.*.errors.symbol_ber": (
        "the error rate before correction; nvlink-errors judges the rate after correction"
    ),
    "nvlink.*.switch_links": "nvlink-width counts the links themselves",
    "pci.*.numa_node": (
        "numa.*.node has the same value for GPUs, and for NVSwitches the value does not matter"
    ),
    "schema": (
        "the version of the document's format; gpufleet refuses a document of a different version"
    ),
    "seconds": "how long the probe took, which depends on the load of the node and its disks",
    "system.hugepages": (
        "huge pages are reserved on purpose; host-memory reports them if memory is short"
    ),
    "system.iommu.groups": "the number of IOMMU groups; iommu-acs judges their types",
    "system.iommu.types.identity": (
        "the number of IOMMU groups in passthrough mode, which is the right mode"
    ),
    "system.uptime_seconds": "the operator chooses when a node is booted",
    "user.uid": "the user that ran the probe",
}
"""
The reason why no check judges a number. The keys are the beginnings of the numbers' paths in a
probe. Of several keys that match a path, the longest one applies.
"""

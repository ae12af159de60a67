"""Define the node checks, by name.

This module imports nothing from gpufleet, because the settings import the names from it. Every
check has a runbook page, docs/checks/<id>.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """
    One check and the question that it answers. `root` is the data that only root can read for it.
    """

    id: str
    question: str
    root: str | None = None


CHECKS: dict[str, Check] = {
    check.id: check
    for check in (
        Check("probe", "Does the node answer the probe?"),
        # The driver.
        Check("driver-loaded", "Does the driver answer?"),
        Check("driver-versions", "Do kernel module and libraries have the same version?"),
        Check("uvm-device", "Does CUDA's memory device file exist?"),
        Check("driver-minimum", "Does the driver support vLLM's CUDA version?"),
        Check("compute-capability", "Does vLLM support these GPUs?"),
        # Each GPU.
        Check("gpu-count", "Is every GPU there?"),
        Check("gpu-answers", "Does every GPU answer?"),
        Check("gpu-identical", "Are the GPUs identical, on the node and on its siblings?"),
        Check("gpu-outlier", "Do the GPU's values match those of similar GPUs?"),
        Check("recovery-action", "Does the driver ask for a reset or a reboot?"),
        Check("hardware-slowdown", "Does the hardware throttle the GPU?"),
        Check("software-throttle", "Does the driver throttle the idle GPU?"),
        Check("locked-clocks", "Are the GPU's clocks unlocked?"),
        Check("temperature", "Is the GPU below its temperature limits?"),
        Check("pcie-width", "Does the GPU have all its PCIe lanes?"),
        Check("pcie-generation", "Does PCIe run at full speed under load?"),
        Check("pcie-replays", "Is PCIe free of replays?"),
        Check("persistence", "Is persistence mode on?"),
        Check("mig", "Are the GPUs whole?"),
        Check("compute-mode", "Can several processes use the GPU?"),
        Check("foreign-processes", "Is the GPU free of other programs?"),
        Check("foreign-memory", "Is the GPU's memory free of unowned allocations?"),
        Check("power-limit", "Does the GPU have its full power limit?"),
        Check("inforom", "Is the GPU's InfoROM intact?"),
        # Its memory.
        Check("ecc-mode", "Is ECC on?"),
        Check("ecc-uncorrected", "Is memory free of uncorrectable errors?"),
        Check("ecc-sram", "Is SRAM below NVIDIA's replacement threshold?"),
        Check("ecc-corrected", "Are correctable errors rare?"),
        Check("row-remap-pending", "Is no row remap pending?"),
        Check("row-remap-failed", "Did every row remap succeed?"),
        Check("row-remap-count", "Are remapped rows few?"),
        Check("row-remap-spares", "Does every memory bank have spare rows?"),
        Check("retired-pages", "Are retired pages few?"),
        Check("memory-repair", "Is no memory repair pending?"),
        # NVLink.
        Check("nvlink-links", "Is every NVLink up?"),
        Check("nvlink-width", "Do the GPU pairs have all their NVLinks?"),
        Check("nvlink-errors", "Are the NVLinks free of errors?"),
        Check("fabric-state", "Has every GPU joined the NVLink fabric?"),
        Check("fabric-manager", "Does the fabric manager run, with the driver's version?"),
        Check("fabric-units", "Do IMEX and NVLink 5's subnet manager run?"),
        # What the kernel logged since boot.
        Check("xid", "Has the driver logged no Xid error?", root="the kernel log"),
        Check("sxid", "Has no NVSwitch logged an error?", root="the kernel log"),
        Check("pcie-errors", "Has no PCIe link logged an error?", root="the kernel log"),
        Check("gpu-start", "Did the driver start every GPU?", root="the kernel log"),
        Check("machine-check", "Has the machine logged no hardware error?", root="the kernel log"),
        # The machine around the GPUs.
        Check("secure-boot", "Will Secure Boot load the driver's module?"),
        Check("nouveau", "Is nouveau not loaded?"),
        Check("iommu-acs", "Can GPUs reach each other over PCIe?", root="PCI's extended registers"),
        Check("disk-space", "Is there room for the release and the models?"),
        Check("clock", "Is the clock synchronised?"),
        Check("shared-memory", "Is /dev/shm large enough?"),
        Check("host-memory", "Is there enough memory?"),
        Check("host-ecc", "Is the machine's own memory free of errors?"),
        Check("rdma", "Are the RDMA ports up?"),
        Check("node-outlier", "Do the node's values match those of its siblings?"),
        # What breaks at the next reboot.
        Check("reboot-module", "Will the next boot load the driver that runs now?"),
        Check("reboot-kernel", "Does the next boot's kernel have the driver's module?"),
        Check("reboot-signature", "Is the next boot's module signed, if required?"),
        Check("unattended-upgrades", "Are unattended driver upgrades off?"),
    )
}

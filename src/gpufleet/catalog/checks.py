"""Which checks there are. A leaf: settings know the names from here, the checks themselves do not
know settings' file.

Every check has a runbook page, docs/checks/<id>.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One check: the question that it answers, and what of it only root can read."""

    id: str
    question: str
    root: str | None = None


CHECKS: dict[str, Check] = {
    check.id: check
    for check in (
        Check("probe", "Does the node answer the probe?"),
        # The driver.
        Check("driver-loaded", "Does the driver answer?"),
        Check("driver-versions", "Are kernel module and libraries of one version?"),
        Check("uvm-device", "Has CUDA the device file of its memory?"),
        Check("driver-minimum", "Does the driver run the CUDA that vLLM brings?"),
        Check("compute-capability", "Do vLLM's kernels run on these GPUs?"),
        # Each GPU.
        Check("gpu-count", "Is every GPU there?"),
        Check("gpu-answers", "Does every GPU answer?"),
        Check("gpu-identical", "Are the node's GPUs alike, and like its siblings'?"),
        Check("gpu-outlier", "Are the GPU's numbers those of its like?"),
        Check("recovery-action", "Does the driver itself ask for a reset or a reboot?"),
        Check("hardware-slowdown", "Does the hardware slow the GPU down?"),
        Check("software-throttle", "Does the driver slow the GPU down while it idles?"),
        Check("locked-clocks", "Are the GPU's clocks free to rise?"),
        Check("temperature", "Is the GPU cooler than its own limits?"),
        Check("pcie-width", "Does the GPU have all its PCIe lanes?"),
        Check("pcie-generation", "Does PCIe run at full speed under load?"),
        Check("pcie-replays", "Is PCIe free of replays?"),
        Check("persistence", "Is persistence mode on?"),
        Check("mig", "Are the GPUs whole?"),
        Check("compute-mode", "May several processes use the GPU?"),
        Check("foreign-processes", "Does nobody else compute on the GPU?"),
        Check("foreign-memory", "Is the GPU's memory free of what nobody owns?"),
        Check("power-limit", "Has the GPU its full power?"),
        Check("inforom", "Is the GPU's InfoROM intact?"),
        # Its memory.
        Check("ecc-mode", "Is ECC on?"),
        Check("ecc-uncorrected", "Is memory free of uncorrectable errors?"),
        Check("ecc-sram", "Is SRAM below NVIDIA's replacement threshold?"),
        Check("ecc-corrected", "Are correctable errors rare?"),
        Check("row-remap-pending", "Does no row remap wait for a reset?"),
        Check("row-remap-failed", "Did every row remap succeed?"),
        Check("row-remap-count", "Are remapped rows few?"),
        Check("row-remap-spares", "Has every memory bank spare rows?"),
        Check("retired-pages", "Are retired pages few?"),
        Check("memory-repair", "Does no memory repair wait?"),
        # NVLink.
        Check("nvlink-links", "Is every NVLink up?"),
        Check("nvlink-width", "Are the GPUs joined as widely as they should be?"),
        Check("nvlink-errors", "Are the NVLinks free of errors?"),
        Check("fabric-state", "Has every GPU joined the NVLink fabric?"),
        Check("fabric-manager", "Does the fabric manager run, in the driver's version?"),
        Check("fabric-units", "Do IMEX and NVLink 5's subnet manager run?"),
        # What the kernel logged since boot.
        Check("xid", "Has the driver logged no Xid error?", root="the kernel log"),
        Check("sxid", "Has no NVSwitch logged an error?", root="the kernel log"),
        Check("pcie-errors", "Has no PCIe link logged an error?", root="the kernel log"),
        Check("gpu-start", "Did the driver start every GPU?", root="the kernel log"),
        Check("machine-check", "Has the machine logged no hardware error?", root="the kernel log"),
        # The machine around the GPUs.
        Check("secure-boot", "Will Secure Boot load the driver's module?"),
        Check("nouveau", "Is nouveau away?"),
        Check("iommu-acs", "May GPUs reach each other over PCIe?", root="PCI's extended registers"),
        Check("disk-space", "Is there room for the release and the models?"),
        Check("clock", "Is the clock in step?"),
        Check("shared-memory", "Is /dev/shm large enough?"),
        Check("host-memory", "Is there enough memory?"),
        Check("host-ecc", "Is the machine's own memory free of errors?"),
        Check("rdma", "Are the RDMA ports up?"),
        Check("node-outlier", "Are the node's numbers those of its siblings?"),
        # What breaks at the next reboot.
        Check("reboot-module", "Will the next boot load the driver that runs now?"),
        Check("reboot-kernel", "Has the kernel of the next boot the driver's module?"),
        Check("reboot-signature", "Is the module of the next boot signed where it must be?"),
        Check("unattended-upgrades", "Does nobody upgrade the driver behind our back?"),
    )
}

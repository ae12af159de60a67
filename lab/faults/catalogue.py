"""List every fault that a machine of the lab can have. Pure.

`finds` has the findings that `gpufleet check` must report at least. These findings follow from the
requirements of the hardware's vendors and operators, never from the output of the checks.
"""

from __future__ import annotations

from lab.faults.changes import (
    all_links_down,
    another_model,
    capped,
    disk_full,
    excluded,
    few_spares,
    hot,
    hot_memory,
    imex_failed,
    library_gone,
    link_down,
    link_errors,
    link_errors_fatal,
    links_gone,
    little_memory,
    log_denied,
    log_wrapped,
    manager_dead,
    manager_of_another_version,
    manager_stopped,
    memory_error,
    memory_in_use,
    module_differs,
    module_unsigned,
    new_kernel,
    not_root,
    nouveau,
    old_driver,
    rdma_down,
    redirecting,
    refused_by_secure_boot,
    says,
    small_shm,
    stranger,
    unloaded,
    unprobed,
    unsynced,
    upgraded_without_reboot,
    upgrades_on,
    without_uvm,
)
from lab.faults.fault import BLOCK, INFO, UNKNOWN, WARN, Fault, Severity
from lab.faults.hardware import (
    Condition,
    counts_sram,
    debian_like,
    efi,
    has,
    has_bridges,
    has_ecc,
    has_rdma,
    has_switches_on_pci,
    knows_memory_limit,
    linked,
    linked_beyond_a_pair,
    managed,
    nvlink5,
    own_memory,
    registers,
    remaps,
    retires,
    several,
    switched,
    talks_over_pcie,
    tells_action,
)
from lab.machine import Profile


def unless_contained(profile: Profile) -> str:
    """
    Return the severity of a pending remap, which is harmless if errors are contained (NVIDIA).
    """
    return WARN if profile.contains_errors else BLOCK


def worse_than_most(profile: Profile) -> str:
    """
    Return the severity of half a slot width, which is a certain fault if most boards have more.
    """
    return BLOCK if profile.count > 2 else WARN


def blocks_several(profile: Profile) -> str:
    """Return the severity of a fault between GPUs, which affects a single GPU less."""
    return BLOCK if several(profile) else WARN


def worse_over_pcie(profile: Profile) -> str:
    """Return the severity of redirection, which harms GPUs that communicate over PCIe."""
    return WARN if talks_over_pcie(profile) else INFO


def where(condition: Condition, severity: str) -> Severity:
    """Return a severity for some hardware; on other hardware the check may report no problem."""
    return lambda profile: severity if condition(profile) else ""


# fmt: off
OF_GPUS = (
    Fault(
        "gpu-lost", "a GPU fell off the bus, and the driver reports this",
        {"gpu-answers": BLOCK}, lines="gpu.{gpu}.error.* = 15",
    ),
    Fault(
        "gpu-lost-999", "a GPU fell off the bus, and the driver reports an unknown error",
        {"gpu-answers": BLOCK}, lines="gpu.{gpu}.error.* = 999",
    ),
    Fault(
        "gpu-hang", "any query of a GPU hangs",
        {"gpu-answers": BLOCK}, lines="gpu.{gpu}.hang.* = 600",
    ),
    Fault(
        "gpu-crash", "NVML crashes when a program queries a GPU",
        {"gpu-answers": BLOCK}, lines="gpu.{gpu}.crash.nvmlDeviceGetName = 1",
    ),
    Fault(
        "gpu-garbage", "NVML returns invalid text and impossible numbers for a GPU",
        {"gpu-answers": UNKNOWN, "temperature": UNKNOWN},
        lines="""
        gpu.{gpu}.name = NVIDIA \\xff\\xfe\\x80GPU
        gpu.{gpu}.serial = \\xc3\\x28
        gpu.{gpu}.temp.gpu = 0x7fffffff
        gpu.{gpu}.power.draw_mw = 0xffffffff
        gpu.{gpu}.pcie.width = 0
        gpu.{gpu}.pcie.gen = 255
        """,
    ),
    Fault(
        "gpu-flaky", "every third query of a GPU fails",
        {"gpu-answers": UNKNOWN}, lines="gpu.{gpu}.error.* = 999/3",
    ),
    Fault(
        "gpu-vanishes", "a GPU falls off the bus during the probe, at the 20th call",
        {"gpu-answers": BLOCK}, lines="gpu.{gpu}.error.* = 15@20",
    ),
    Fault(
        "gpu-missing",
        "the driver could not start a GPU at boot, so the GPU is on the bus but not in NVML",
        {"gpu-count": BLOCK, "gpu-start": BLOCK}, change=unprobed,
    ),
    Fault(
        "gpu-excluded", "a module option hides a GPU",
        {"gpu-count": INFO}, several, change=excluded,
    ),
    Fault(
        "recovery-reset", "the driver requests a reset of a GPU",
        {"recovery-action": BLOCK}, tells_action, "gpu.{gpu}.recovery_action = 1",
    ),
    Fault(
        "recovery-reboot", "the driver requests a reboot of the node",
        {"recovery-action": BLOCK}, tells_action, "gpu.{gpu}.recovery_action = 2",
    ),
    Fault(
        "mixed-model", "one GPU is of a different model than the others",
        # Such machines are sold. The mix is a fault only if the operator has declared one model.
        {"gpu-identical": WARN}, several, change=another_model,
    ),
    Fault(
        "mixed-vbios", "one GPU has a different VBIOS than the others",
        {"gpu-identical": WARN}, several, "gpu.{gpu}.vbios = 90.00.00.00.01",
    ),
    Fault(
        "inforom-corrupt", "a GPU's InfoROM fails its checksum",
        {"inforom": WARN}, has("inforom"), "gpu.{gpu}.inforom.corrupted = 1",
    ),
)

OF_MEMORY = (
    Fault(
        "ecc-off", "ECC is off on a server GPU",
        {"ecc-mode": WARN}, has_ecc, "gpu.{gpu}.ecc.mode = 0",
    ),
    Fault(
        "ecc-pending", "ECC will be off after the next reset",
        {"ecc-mode": WARN}, has_ecc, "gpu.{gpu}.ecc.pending = 0",
    ),
    Fault(
        "ecc-uncorrected",
        "the memory has had two uncorrectable errors since the driver was loaded",
        {"ecc-uncorrected": BLOCK}, has_ecc,
        "gpu.{gpu}.ecc.unc_vol.dram = 2\ngpu.{gpu}.ecc.unc_agg.dram = 2",
    ),
    Fault(
        "ecc-sram-threshold",
        "the SRAM has had so many uncorrectable errors that NVIDIA replaces the GPU",
        {"ecc-sram": BLOCK}, counts_sram,
        "gpu.{gpu}.ecc.unc_agg.sram = 5\ngpu.{gpu}.ecc.sram_threshold = 1",
    ),
    Fault(
        "ecc-corrected-flood",
        "the memory has had 60 million corrected errors since the driver was loaded",
        {"ecc-corrected": WARN}, has_ecc,
        "gpu.{gpu}.ecc.cor_vol.dram = 60000000\ngpu.{gpu}.ecc.cor_agg.dram = 60000000",
    ),
    Fault(
        "remap-pending", "a memory row will be remapped at the next reset",
        {"row-remap-pending": unless_contained}, remaps,
        "gpu.{gpu}.remap.unc = 1\ngpu.{gpu}.remap.pending = 1",
    ),
    Fault(
        "remap-failed", "a memory bank has no spare rows left, so a row could not be remapped",
        {"row-remap-failed": BLOCK}, remaps,
        "gpu.{gpu}.remap.unc = 9\ngpu.{gpu}.remap.failure = 1\ngpu.{gpu}.remap.none = 1",
    ),
    Fault(
        "remap-many", "512 memory rows were remapped after uncorrectable errors",
        {"row-remap-count": BLOCK}, remaps, "gpu.{gpu}.remap.unc = 512",
    ),
    Fault(
        "remap-spares-low", "a memory bank has few spare rows left",
        {"row-remap-spares": WARN}, remaps, change=few_spares,
    ),
    Fault(
        "retired-pending", "a memory page will be retired at the next reboot",
        {"retired-pages": WARN}, retires,
        "gpu.{gpu}.retired.dbe = 1\ngpu.{gpu}.retired.pending = 1",
    ),
    Fault(
        "retired-many", "64 memory pages are retired, one more than NVIDIA allows",
        {"retired-pages": BLOCK}, retires,
        "gpu.{gpu}.retired.sbe = 44\ngpu.{gpu}.retired.dbe = 20",
    ),
    Fault(
        "repair-pending", "a memory channel will be repaired at the next reset",
        {"memory-repair": WARN}, has("repair.channel"), "gpu.{gpu}.repair.channel = 1",
    ),
)

OF_LINKS = (
    Fault(
        "nvlink-dead-link", "one NVLink is down",
        {"nvlink-links": BLOCK}, linked, change=link_down,
    ),
    Fault(
        "nvlink-gpu-off", "all NVLinks of a GPU are down",
        {"nvlink-links": BLOCK}, linked_beyond_a_pair, change=all_links_down,
    ),
    Fault(
        "nvlink-gone", "a GPU reports that it has no NVLinks",
        {"nvlink-links": BLOCK}, linked_beyond_a_pair, change=links_gone,
    ),
    Fault(
        "nvlink-errors", "an NVLink retransmits packets again and again",
        {"nvlink-errors": WARN}, linked, change=link_errors,
    ),
    Fault(
        "nvlink-errors-fatal", "an NVLink is retrained again and again",
        {"nvlink-errors": BLOCK}, linked, change=link_errors_fatal,
    ),
)


OF_STATE = (
    Fault(
        "throttle-hw-thermal", "the hardware slows a GPU down because it is too hot",
        {"hardware-slowdown": BLOCK},
        lines="""
        gpu.{gpu}.clocks.reasons = 0x48
        gpu.{gpu}.violation.thermal = 0+300000000
        gpu.{gpu}.violation.hw_thermal = 0+300000000
        """,
    ),
    Fault(
        "throttle-power-brake", "the power supply tells a GPU to slow down",
        {"hardware-slowdown": BLOCK},
        lines="""
        gpu.{gpu}.clocks.reasons = 0x88
        gpu.{gpu}.violation.power = 0+600000000
        gpu.{gpu}.violation.power_brake = 0+600000000
        """,
    ),
    Fault(
        "throttle-once", "the hardware slows a GPU down for a moment",
        {"hardware-slowdown": INFO}, lines="gpu.{gpu}.clocks.reasons = 0x48,1",
    ),
    Fault(
        "throttle-sw-cap", "the driver limits the power of an idle GPU",
        {"software-throttle": WARN},
        lines="gpu.{gpu}.clocks.reasons = 0x4\ngpu.{gpu}.violation.power = 0+600000000",
    ),
    Fault(
        "clocks-locked", "an operator has locked a GPU's clocks",
        {"locked-clocks": WARN}, lines="gpu.{gpu}.clocks.reasons = 0x2",
    ),
    Fault(
        "clocks-lowered", "an operator has lowered a GPU's application clocks",
        {"locked-clocks": WARN}, has("clocks.app"),
        lines="gpu.{gpu}.clocks.app_sm = 345\ngpu.{gpu}.clocks.reasons = 0x3",
    ),
    Fault(
        "hot", "a GPU is hotter than its slowdown temperature",
        {"temperature": BLOCK}, change=hot,
    ),
    Fault(
        "hot-memory", "a GPU's memory is hotter than its limit",
        {"temperature": WARN},
        knows_memory_limit,
        change=hot_memory,
    ),
    Fault(
        "pcie-x8", "a GPU uses only half of its PCIe lanes",
        {"pcie-width": worse_than_most}, lines="gpu.{gpu}.pcie.width = 8",
    ),
    Fault(
        "pcie-replays", "the PCIe link of a GPU constantly repeats packets",
        # More replays than 16 lanes of generation 6 may have in two years. DCGM allows 3.84 replays
        # per minute and lane.
        {"pcie-replays": WARN}, lines="gpu.{gpu}.pcie.replay = 90000000+20",
    ),
    Fault(
        "persistence-off", "persistence mode is off",
        {"persistence": WARN}, lines="gpu.{gpu}.persistence = 0",
    ),
    Fault("mig-on", "a GPU is in MIG mode", {"mig": BLOCK}, has("mig"), "gpu.{gpu}.mig = 1"),
    Fault(
        "mig-pending", "a GPU will be in MIG mode after the next reset",
        {"mig": WARN}, has("mig"), "gpu.{gpu}.mig.pending = 1",
    ),
    Fault(
        "compute-exclusive", "a GPU is in exclusive mode, so only one process may use it",
        {"compute-mode": BLOCK}, lines="gpu.{gpu}.computemode = 3",
    ),
    Fault(
        "foreign-process", "a program that is not gpufleet's computes on a GPU",
        {"foreign-processes": BLOCK}, change=stranger,
    ),
    Fault(
        "foreign-memory", "half of a GPU's memory is in use, but no process is visible",
        # On Grace, Linux may use this memory.
        {"foreign-memory": BLOCK}, own_memory, change=memory_in_use,
    ),
    Fault(
        "power-capped", "a GPU's power limit is set to the lowest value that the GPU allows",
        {"power-limit": WARN}, has("power.min_mw"), change=capped,
    ),
    Fault(
        "older-slot", "a GPU's slot is of PCIe generation 2, and the other slots are newer",
        {"gpu-outlier": WARN}, several,
        lines="gpu.{gpu}.pcie.gen = 2\ngpu.{gpu}.pcie.gen_max = 2",
    ),
)

OF_DRIVER = (
    Fault(
        "no-uvm", "nvidia_uvm is not loaded, so CUDA has no /dev/nvidia-uvm",
        {"uvm-device": BLOCK}, change=without_uvm,
    ),
    Fault(
        "no-driver", "the running kernel has no NVIDIA kernel module",
        {"driver-loaded": BLOCK}, change=unloaded,
    ),
    Fault(
        "mismatch", "the driver was upgraded, but the old module is still loaded",
        {"driver-loaded": BLOCK, "driver-versions": BLOCK}, change=upgraded_without_reboot,
    ),
    Fault(
        "nvml-unknown", "NVML does not start, and reports no cause",
        {"driver-loaded": BLOCK}, lines="error.nvmlInitWithFlags = 999",
    ),
    Fault(
        "nvml-hang", "NVML hangs when it starts",
        {"driver-loaded": BLOCK}, lines="hang.nvmlInitWithFlags = 600",
    ),
    Fault(
        "nvml-crash", "NVML crashes when it starts",
        {"driver-loaded": BLOCK}, lines="crash.nvmlInitWithFlags = 1",
    ),
    Fault(
        "no-permission", "the user may not open GPUs or the kernel log",
        {"driver-loaded": UNKNOWN, "xid": UNKNOWN},
        lines="error.nvmlInitWithFlags = 4", change=not_root,
    ),
    Fault(
        "no-library", "the driver's libraries are not installed",
        {"driver-loaded": BLOCK}, change=library_gone,
    ),
    Fault(
        "old-driver", "the driver is too old for every release of CUDA 12",
        # Only if `vllm` is set for the node. Without vLLM, no driver is too old.
        {"driver-minimum": BLOCK}, change=old_driver,
    ),
    Fault(
        "module-differs", "the next boot will load a different driver version than the running one",
        {"reboot-module": WARN}, change=module_differs,
    ),
    Fault(
        "kernel-without-module", "the kernel of the next boot has no NVIDIA module",
        {"reboot-kernel": WARN}, change=new_kernel,
    ),
    Fault(
        "module-unsigned", "Secure Boot will refuse the module at the next boot",
        {"reboot-signature": WARN}, efi, change=module_unsigned,
    ),
    Fault(
        "unattended-upgrades-on", "unattended-upgrades may upgrade the driver",
        {"unattended-upgrades": WARN}, debian_like, change=upgrades_on,
    ),
)

OF_FABRIC = (
    Fault(
        "imex-failed", "IMEX, which shares GPU memory between nodes, has failed",
        {"fabric-units": WARN}, has("platform.chassis"), change=imex_failed,
    ),
    Fault(
        "fabric-not-started", "the fabric manager has not been started",
        {
            "fabric-state": where(registers, BLOCK),
            "fabric-manager": where(managed, BLOCK),
        },
        switched,
        change=manager_stopped,
    ),
    Fault(
        "fabric-in-progress", "the GPUs wait for the fabric manager",
        {"fabric-state": BLOCK}, registers, "gpu.*.fabric.state = 2",
    ),
    Fault(
        "fabric-stale", "the GPUs have joined the fabric, and the fabric manager died later",
        {"fabric-manager": BLOCK}, managed, change=manager_dead,
    ),
    Fault(
        "fabric-unhealthy", "a GPU has too little bandwidth in the fabric",
        # Bits 0 and 1 of the mask are the degraded bandwidth: 1 yes, 2 no (nvml.h).
        {"fabric-state": BLOCK}, registers,
        "gpu.{gpu}.fabric.health = 0x1a9\ngpu.{gpu}.fabric.summary = 2",
    ),
    Fault(
        "fabric-resources",
        "the registration of a GPU in the fabric failed because of insufficient resources",
        {"fabric-state": BLOCK}, registers, "gpu.{gpu}.fabric.status = 23",
    ),
    Fault(
        "fabric-manager-version", "the fabric manager has a different version than the driver",
        {"fabric-manager": BLOCK}, managed, change=manager_of_another_version,
    ),
)

# The beginnings of log lines of NVRM and of NVSwitches, and their text for an unknown process.
XID = "NVRM: Xid (PCI:{pci}): "
NO_PID = "pid='<unknown>', name=<unknown>, "
SXID = "nvidia-nvswitch{number}: SXid (PCI:{switch}): "

OF_LOG = (
    Fault(
        "xid-13-info", "a program caused an error on a GPU (Xid 13)", harmless=True,
        change=says(
            XID + "13, pid=41234, name=python3, Graphics SM Warp Exception on (GPC 1, TPC 0, "
            "SM 1): Out Of Range Address"
        ),
    ),
    Fault(
        "xid-31-info",
        "a program accessed GPU memory that does not belong to it (Xid 31)",
        harmless=True,
        change=says(
            XID + "31, pid=41234, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE "
            "GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2a_40000000. Fault is of type FAULT_PDE "
            "ACCESS_TYPE_VIRT_READ"
        ),
    ),
    Fault(
        "xid-48", "an uncorrectable error of the memory (Xid 48)",
        {"xid": BLOCK, "ecc-uncorrected": where(has_ecc, BLOCK)},
        change=memory_error(
            XID + "48, " + NO_PID + "An uncorrectable double bit error (DBE) has been detected on "
            "GPU in the framebuffer at partition 3, subpartition 0."
        ),
    ),
    Fault(
        "xid-63", "a memory row was marked for remapping (Xid 63)", {"xid": WARN}, remaps,
        change=says(
            XID + "63, " + NO_PID + "Row Remapper: New row (0x00000000a4b3c2d1) marked for "
            "remapping, reset gpu to activate."
        ),
    ),
    Fault(
        "xid-74", "an NVLink had an error (Xid 74)", {"xid": BLOCK}, linked,
        change=says(
            XID + "74, " + NO_PID + "NVLink: fatal error detected on link 3(0x10000, 0x0, 0x0, "
            "0x0, 0x0, 0x0, 0x0)"
        ),
    ),
    Fault(
        "xid-79", "a GPU fell off the bus (Xid 79)", {"xid": BLOCK},
        change=says(
            XID + "79, " + NO_PID + "GPU has fallen off the bus.",
            "NVRM: GPU {bus}: GPU has fallen off the bus.",
        ),
    ),
    Fault(
        "machine-check", "a CPU reported a hardware error that was not corrected",
        {"machine-check": WARN},
        change=says(
            "mce: [Hardware Error]: Machine check events logged",
            "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: bea0000000000108",
        ),
    ),
    Fault(
        "edac-uncorrected", "a memory controller reported an error that was not corrected",
        {"machine-check": WARN},
        change=says(
            "EDAC MC1: 1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0 (channel:0 slot:0 "
            "page:0x1f2e3d offset:0x0 grain:64)"
        ),
    ),
    Fault(
        "pcie-fatal", "a GPU's PCIe link had a fatal error", {"pcie-errors": BLOCK},
        change=says(
            "pcieport 0000:00:01.0: AER: Uncorrectable (Fatal) error message received from {bus}"
        ),
    ),
    Fault(
        "xid-79-no-number", "a GPU fell off the bus, and the log lines have no Xid", {"xid": BLOCK},
        change=says(
            "NVRM: The NVIDIA GPU {bus}",
            "NVRM: (PCI ID: {id}) installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
            "NVRM: GPU {bus}: GPU has fallen off the bus.",
        ),
    ),
    Fault(
        "xid-94-mig", "a contained error of the memory in a MIG instance (Xid 94)", {"xid": WARN},
        has("mig"),
        change=says(
            "NVRM: Xid (PCI:{pci} GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). "
            "RST: No, D-RST: No"
        ),
    ),
    Fault(
        "xid-95", "an uncontained error of the memory (Xid 95)",
        {"xid": BLOCK, "ecc-uncorrected": where(has_ecc, BLOCK)}, remaps,
        change=memory_error(
            XID + "95, " + NO_PID + "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No"
        ),
    ),
    Fault(
        "xid-119", "a GPU's system processor does not answer the driver (Xid 119)",
        {"xid": BLOCK}, has("gsp"),
        change=says(
            XID + "119, pid=2031, name=nvidia-smi, Timeout after 6s of waiting for RPC response "
            "from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20801a4a 0x10)."
        ),
    ),
    Fault(
        "xid-149-fatal", "an NVLink 5 port failed (Xid 149)", {"xid": BLOCK}, nvlink5,
        change=says(
            XID + "149, NETIR_LINK_EVT Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 "
            "0x00000000 0x00000000 0x00000000)"
        ),
    ),
    Fault(
        "xid-149-nonfatal", "an NVLink 5 port had an error and continued (Xid 149)", {"xid": WARN},
        nvlink5,
        change=says(
            XID + "149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 "
            "0x00000000 0x00000000 0x00000000)"
        ),
    ),
    Fault(
        "xid-154-none", "the driver reports that a GPU needs no action (Xid 154)", {},
        tells_action, harmless=True,
        change=says(
            XID + "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
        ),
    ),
    # An entry only in the log would be a past event, because NVML reports the present state.
    Fault(
        "xid-154-reboot", "the driver requests a reboot, in the log and in NVML (Xid 154)",
        {"xid": BLOCK, "recovery-action": BLOCK}, tells_action, "gpu.{gpu}.recovery_action = 2",
        says(
            XID + "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
        ),
    ),
    Fault(
        "sxid-fatal", "an NVSwitch had a fatal error", {"sxid": BLOCK}, has_switches_on_pci,
        change=says(
            SXID + "20034, Fatal, Link 28 LTSSM Fault Up",
            SXID + "20034, Severity 1 Engine instance 28 Sub-engine instance 00",
        ),
    ),
    Fault(
        "sxid-nonfatal", "an NVSwitch had an error and continued", {"sxid": WARN},
        has_switches_on_pci,
        change=says(
            SXID + "12028, Non-fatal, Link 61 egress non-posted PRIV error (First)",
            SXID + "12028, Severity 0 Engine instance 61 Sub-engine instance 00",
        ),
    ),
    Fault(
        "log-unreadable", "the user may not read the kernel log",
        {"xid": UNKNOWN, "sxid": where(has_switches_on_pci, UNKNOWN)}, change=log_denied,
    ),
    Fault(
        "log-wrapped", "the kernel log has lost the messages of the boot",
        {"xid": WARN, "sxid": where(has_switches_on_pci, WARN)}, change=log_wrapped,
    ),
)

OF_HOST = (
    Fault(
        "nouveau",
        "the driver nouveau controls the GPUs",
        {"driver-loaded": BLOCK, "nouveau": BLOCK},
        change=nouveau,
    ),
    Fault(
        "secure-boot-unsigned", "Secure Boot refused the NVIDIA module",
        {"driver-loaded": BLOCK, "secure-boot": BLOCK}, efi, change=refused_by_secure_boot,
    ),
    Fault(
        "acs-on", "PCI bridges send the traffic between GPUs through the root complex",
        {"iommu-acs": worse_over_pcie}, has_bridges, change=redirecting,
    ),
    # vLLM cannot be installed. If no vLLM is declared, the check only informs the operator.
    Fault("disk-full", "the disk has only 700 MiB left", {"disk-space": BLOCK}, change=disk_full),
    Fault(
        "clock-unsynced", "the clock is not synchronised", {"clock": WARN}, change=unsynced
    ),
    # If vLLM has several ranks, they communicate through /dev/shm.
    Fault(
        "shm-small", "/dev/shm has only 64 MiB", {"shared-memory": blocks_several}, change=small_shm
    ),
    Fault(
        "memory-low", "the host has only 2 GiB of memory left", {"host-memory": WARN},
        change=little_memory,
    ),
    # Only the operator or an equal node shows how many ports there should be.
    Fault("rdma-down", "an RDMA port has no link", {"rdma": INFO}, has_rdma, change=rdma_down),
)
# fmt: on

"""What the driver's Xid numbers mean, how bad they are, and what mends them. A table, pure.

Meanings and NVIDIA's own actions are those of NVIDIA's Xid catalogue (docs.nvidia.com/deploy/
xid-errors); severities are ours: `BLOCK` where the GPU itself needs a reset or a person, `INFO`
where only the program that was running did. docs/checks/xid.md says so in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet.checks.finding import Action, Severity

APPLICATION = (Action.LOOK,)
WATCH = (Action.LOOK, Action.RESET_GPU, Action.SERVICE)
RESTART = (Action.RESTART_SERVICE, Action.RESET_GPU, Action.SERVICE)
RESET = (Action.DRAIN, Action.RESET_GPU, Action.REBOOT, Action.SERVICE)
REBOOT = (Action.DRAIN, Action.REBOOT, Action.POWER_CYCLE, Action.SERVICE)
REPLACE = (Action.DRAIN, Action.RESET_GPU, Action.SERVICE)


@dataclass(frozen=True)
class Kind:
    """One number: its meaning in a few words, its severity, and the ladder of remedies."""

    meaning: str
    severity: Severity
    ladder: tuple[Action, ...]


def _application(meaning: str) -> Kind:
    return Kind(f"the program's fault: {meaning}", Severity.INFO, APPLICATION)


KINDS: dict[int, Kind] = {
    13: _application("exception in a kernel"),
    31: _application("access to memory that is not mapped"),
    32: _application("invalid commands to the GPU"),
    43: _application("the GPU stopped its work"),
    45: _application("its work was cleared away after it ended"),
    46: Kind("the GPU stopped working", Severity.BLOCK, RESET),
    48: Kind("double-bit memory error", Severity.BLOCK, RESET),
    54: Kind("auxiliary power is not connected", Severity.BLOCK, (Action.SERVICE,)),
    61: Kind("internal micro-controller breakpoint", Severity.BLOCK, RESET),
    62: Kind("internal micro-controller halt", Severity.BLOCK, RESET),
    63: Kind("a memory row or page is to be replaced", Severity.WARN, WATCH),
    64: Kind("replacing a memory row or page failed", Severity.BLOCK, REPLACE),
    68: _application("video decoder exception"),
    69: _application("graphics engine class error"),
    74: Kind("NVLink error", Severity.BLOCK, RESET),
    79: Kind("the GPU has fallen off the bus", Severity.BLOCK, REBOOT),
    92: Kind("many correctable memory errors", Severity.WARN, WATCH),
    93: Kind("the InfoROM is written often", Severity.INFO, APPLICATION),
    94: Kind("contained memory error: only the program that met it died", Severity.WARN, RESTART),
    95: Kind("uncontained memory error: every program on the GPU met it", Severity.BLOCK, RESET),
    109: Kind("switching between programs took too long", Severity.WARN, RESTART),
    110: Kind("security fault", Severity.BLOCK, RESET),
    119: Kind("the GPU's system processor (GSP) does not answer", Severity.BLOCK, RESET),
    120: Kind("the GPU's system processor (GSP) failed", Severity.BLOCK, RESET),
    121: Kind("corrected error between CPU and GPU (C2C)", Severity.WARN, WATCH),
    136: Kind("NVLink training failed", Severity.BLOCK, RESET),
    137: Kind("forbidden access of a peer over NVLink", Severity.WARN, APPLICATION),
    140: Kind("unrecovered memory error", Severity.BLOCK, RESET),
    143: Kind("the GPU could not be initialised", Severity.BLOCK, RESET),
    **{
        number: Kind(f"NVLink 5 error ({unit})", Severity.BLOCK, RESET)
        for number, unit in (
            (144, "SAW"),
            (145, "RLW"),
            (146, "TLW"),
            (147, "TREX"),
            (148, "NVLPW"),
            (149, "NETIR"),
            (150, "MSE"),
        )
    },
    151: Kind("changing an encryption key failed", Severity.BLOCK, REBOOT),
    154: Kind("the driver's recovery action changed", Severity.BLOCK, RESET),
    155: Kind("NVLink software error", Severity.BLOCK, RESET),
    156: Kind("a broken part of the GPU is to be retired", Severity.BLOCK, RESET),
    157: Kind("a broken part of the GPU could not be retired", Severity.WARN, WATCH),
    158: Kind("the GPU timed out beyond recovery", Severity.BLOCK, RESET),
    160: Kind("a memory channel is to be retired", Severity.WARN, WATCH),
    161: Kind("a memory channel could not be retired", Severity.WARN, WATCH),
    **{
        number: Kind("power smoothing or confidential computing", Severity.WARN, WATCH)
        for number in (162, 163, 164, 165, 166, 169, 170)
    },
    167: Kind("fatal PCIe timeout", Severity.BLOCK, RESET),
    168: Kind("the GPU runs with less memory", Severity.BLOCK, REPLACE),
    171: Kind("uncorrectable error in memory (DRAM)", Severity.BLOCK, RESET),
    172: Kind("uncorrectable error in caches (SRAM)", Severity.BLOCK, RESET),
    185: Kind("memory was replaced by spare memory", Severity.WARN, WATCH),
}

# A number that the table does not have.
UNKNOWN = Kind("not in our table", Severity.WARN, (Action.LOOK,))

# Xids whose cause the GPU still counts: an uncorrectable memory error stays in its volatile
# counters until the next reset.
COUNTED_BY_ECC = frozenset({48, 95, 140, 171, 172})

# Errors of NVLink 5 whose line itself says whether they are fatal.
NVLINK5 = range(144, 151)

# Kinds that alerts tell apart (monitoring/rules/gpu_rules.py): other people act on them, otherwise.
OFF_THE_BUS = frozenset({79})
GSP = frozenset({119, 120})
NVLINK = frozenset({74, 136, *NVLINK5, 155})
CONTAINED = frozenset({94})

# What the driver asks for: (words, ladder) by NVML's number, which Xid 154 writes in hexadecimal
# (nvmlDeviceGpuRecoveryAction_t, nvml.h).
RECOVERY: dict[int, tuple[str, tuple[Action, ...]]] = {
    0: ("nothing", ()),
    1: ("a GPU reset", RESET),
    2: ("a reboot", REBOOT),
    3: ("draining P2P", RESET),
    4: ("draining and a GPU reset", RESET),
    5: ("recovery of the IMEX domain", REBOOT),
    6: ("a bus reset", REBOOT),
    7: ("a reboot of the whole system", REBOOT),
}

"""
Define the meaning, severity and remedy of each Xid number of the driver. Pure.

The actions are from NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, version of October
2025, Xids 1 to 172). The severities are gpufleet's: `BLOCK` if the GPU needs a reset or a
technician, `INFO` if at most the running program needs a restart. docs/checks/xid.md describes
both.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpufleet.checks.finding import Action, Severity

APPLICATION = (Action.LOOK,)
WATCH = (Action.LOOK, Action.RESET_GPU, Action.SERVICE)
SUPPORT = (Action.LOOK, Action.SERVICE)
RESTART = (Action.RESTART_SERVICE, Action.RESET_GPU, Action.SERVICE)
RESET = (Action.DRAIN, Action.RESET_GPU, Action.REBOOT, Action.SERVICE)
REBOOT = (Action.DRAIN, Action.REBOOT, Action.POWER_CYCLE, Action.SERVICE)
REPLACE = (Action.DRAIN, Action.RESET_GPU, Action.SERVICE)


@dataclass(frozen=True)
class Kind:
    """
    The meaning of an Xid number in a few words, its severity, and the steps of its remedy.

    `action` is the immediate action in NVIDIA's catalogue, or "" if the catalogue has none.
    """

    meaning: str
    severity: Severity
    ladder: tuple[Action, ...]
    action: str = ""


RESTART_APP, IGNORE, RESET_GPU = "RESTART_APP", "IGNORE", "RESET_GPU"
CONTACT_SUPPORT = "CONTACT_SUPPORT"


def _application(meaning: str, action: str = RESTART_APP) -> Kind:
    return Kind(f"caused by the program: {meaning}", Severity.INFO, APPLICATION, action)


def _engine(meaning: str) -> Kind:
    return Kind(f"the program's work failed: {meaning}", Severity.INFO, APPLICATION, RESTART_APP)


def _ignored(meaning: str) -> Kind:
    return Kind(meaning, Severity.INFO, APPLICATION, IGNORE)


_COPY_ENGINES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_DECODERS = (68, 83, 84, 88, 89, 96, 97, 98)
_JPEG_ENGINES = (82, *range(99, 106))
_OPTICAL_FLOW = (86, 139)

# Numbers that the catalogue lists as unused or unknown, with NVIDIA's support as the remedy.
_SUPPORT = (
    *range(1, 8), 9, 10, 12, *range(15, 25), *range(26, 31), 33, 34, 35, 36, 42, 47,
    *range(49, 54), *range(55, 60), 65, 73, 81, 87, 90, 91, *range(111, 119), *range(122, 126),
    138, 142,
)  # fmt: skip

KINDS: dict[int, Kind] = {
    **dict.fromkeys(
        _SUPPORT,
        Kind("a number without a public meaning", Severity.WARN, SUPPORT, CONTACT_SUPPORT),
    ),
    **{number: _engine(f"copy engine {at}") for at, number in enumerate(_COPY_ENGINES)},
    **{number: _engine(f"video decoder {at}") for at, number in enumerate(_DECODERS)},
    **{number: _engine(f"JPEG engine {at}") for at, number in enumerate(_JPEG_ENGINES)},
    **{number: _engine(f"optical flow engine {at}") for at, number in enumerate(_OPTICAL_FLOW)},
    8: _engine("the GPU stopped this work"),
    11: _application("invalid commands to the GPU"),
    25: _application("invalid commands to the GPU"),
    60: _engine("video processor"),
    14: _ignored("a test of the driver"),
    37: _ignored("the driver's firmware reports an error"),
    38: _ignored("the driver's firmware reports an error"),
    44: _ignored("fault while switching between programs"),
    66: _ignored("the driver made an illegal access"),
    67: _ignored("the driver made an illegal access"),
    106: _ignored("a test message of the board's management"),
    107: _ignored("a test message of the board's management"),
    108: _ignored("address translation over NVLink failed"),
    141: _ignored("CUDA's fast path failed; CUDA uses the other path"),
    152: _ignored("a memory access of a deep learning accelerator failed"),
    153: _ignored("a deep learning accelerator timed out"),
    78: Kind("a virtual GPU could not start", Severity.WARN, WATCH, "UPDATE_SWFW"),
    # Azure's node checks fail a node with this Xid. NVIDIA recommends a restart of the program.
    80: Kind("data on its way to the GPU was corrupted", Severity.WARN, RESTART, RESTART_APP),
    159: Kind(
        "error in a packet without data between CPU and GPU", Severity.WARN, WATCH, "CHECK_UVM"
    ),
    13: _application("exception in a kernel"),
    31: _application("access to unmapped memory"),
    32: _application("invalid commands to the GPU"),
    43: _application("the GPU stopped its work", IGNORE),
    45: _application(
        "the driver cleaned up a program's work after the program ended", "WORKFLOW_XID_45"
    ),
    46: Kind("the GPU stopped working", Severity.BLOCK, RESET, RESET_GPU),
    48: Kind("double-bit memory error", Severity.BLOCK, RESET, "WORKFLOW_XID_48"),
    54: Kind(
        "auxiliary power is not connected", Severity.BLOCK, (Action.SERVICE,), "CHECK_MECHANICALS"
    ),
    61: Kind("internal micro-controller breakpoint", Severity.BLOCK, RESET, CONTACT_SUPPORT),
    62: Kind("internal micro-controller halt", Severity.BLOCK, RESET, RESET_GPU),
    63: Kind("a memory row or page will be replaced", Severity.WARN, WATCH, IGNORE),
    64: Kind("replacing a memory row or page failed", Severity.BLOCK, REPLACE, RESET_GPU),
    69: _application("graphics engine class error"),
    74: Kind("NVLink error", Severity.BLOCK, RESET, "WORKFLOW_NVLINK_ERR"),
    79: Kind("the GPU has fallen off the bus", Severity.BLOCK, REBOOT, "RESTART_BM"),
    92: Kind("many correctable memory errors", Severity.WARN, WATCH, IGNORE),
    93: Kind("the InfoROM is written often", Severity.INFO, APPLICATION, IGNORE),
    94: Kind(
        "contained memory error: only the program that used the memory ended",
        Severity.WARN,
        RESTART,
        RESTART_APP,
    ),
    95: Kind(
        "uncontained memory error: every program on the GPU is affected",
        Severity.BLOCK,
        RESET,
        RESET_GPU,
    ),
    109: Kind("switching between programs took too long", Severity.WARN, RESTART, RESET_GPU),
    110: Kind("security fault", Severity.BLOCK, RESET, RESET_GPU),
    119: Kind("the GPU's system processor (GSP) does not answer", Severity.BLOCK, RESET, RESET_GPU),
    120: Kind("the GPU's system processor (GSP) failed", Severity.BLOCK, RESET, RESET_GPU),
    121: Kind("corrected error between CPU and GPU (C2C)", Severity.WARN, WATCH, IGNORE),
    136: Kind("NVLink training failed", Severity.BLOCK, RESET, RESET_GPU),
    137: Kind("forbidden access by a peer over NVLink", Severity.WARN, APPLICATION, IGNORE),
    140: Kind("unrecovered memory error", Severity.BLOCK, RESET, RESET_GPU),
    143: Kind("the GPU could not be initialised", Severity.BLOCK, RESET, RESET_GPU),
    **{
        number: Kind(f"NVLink 5 error ({unit})", Severity.BLOCK, RESET, "WORKFLOW_NVLINK5_ERR")
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
    151: Kind("changing an encryption key failed", Severity.BLOCK, REBOOT, "RESTART_VM"),
    154: Kind("the driver's recovery action changed", Severity.BLOCK, RESET, "XID_154"),
    155: Kind("NVLink software error", Severity.BLOCK, RESET, RESET_GPU),
    156: Kind("a faulty part of the GPU will be retired", Severity.BLOCK, RESET, RESET_GPU),
    157: Kind("a faulty part of the GPU could not be retired", Severity.WARN, WATCH, IGNORE),
    158: Kind("the GPU timed out beyond recovery", Severity.BLOCK, RESET, RESET_GPU),
    160: Kind("a memory channel will be retired", Severity.WARN, WATCH, IGNORE),
    161: Kind("a memory channel could not be retired", Severity.WARN, WATCH, IGNORE),
    **{
        number: Kind("error of power smoothing or of confidential computing", Severity.WARN, WATCH)
        for number in (162, 163, 164, 165, 166, 169, 170)
    },
    167: Kind("fatal PCIe timeout", Severity.BLOCK, RESET),
    168: Kind("the GPU runs with less memory", Severity.BLOCK, REPLACE),
    171: Kind("uncorrectable error in memory (DRAM)", Severity.BLOCK, RESET),
    172: Kind("uncorrectable error in caches (SRAM)", Severity.BLOCK, RESET),
    185: Kind("memory was replaced by spare memory", Severity.WARN, WATCH),
}

# Used for numbers that are not in the table.
UNKNOWN = Kind("not in gpufleet's table", Severity.WARN, (Action.LOOK,))

# Xids for which NVIDIA only recommends a restart of the program. If they recur on a single GPU, the
# GPU may be the cause.
OF_PROGRAMS = frozenset(
    number
    for number, kind in KINDS.items()
    if kind.action == RESTART_APP and kind.severity is Severity.INFO
)

# Xids about uncorrectable memory errors. The GPU's volatile counters include such an error until
# the next reset.
COUNTED_BY_ECC = frozenset({48, 95, 140, 171, 172})

# Errors of NVLink 5. The line of the error states whether it is fatal.
NVLINK5 = range(144, 151)

# Xids that have separate alerts (monitoring/rules/gpu_rules.py), because they are handled by
# different people in different ways.
OFF_THE_BUS = frozenset({79})
GSP = frozenset({119, 120})
NVLINK = frozenset({74, 136, *NVLINK5, 155})
CONTAINED = frozenset({94})

# The text and the remedy for each recovery action that the driver can request. The keys are NVML's
# numbers (nvmlDeviceGpuRecoveryAction_t, nvml.h). Xid 154 has the number in hexadecimal.
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

"""
Check each GPU's memory: ECC, row remapping, retired pages, pending repairs. Pure.

The counters are NVML's. "Volatile" counters start at zero when the driver is loaded or the GPU is
reset, and "aggregate" counters cover the whole life of the GPU. Earlier errors are not a fault if
they were repaired. In sources of expected values, "memory error management" is NVIDIA's application
note DA-09826, and "DCGM" is NVIDIA's data center GPU manager 4.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import (
    CannotTell,
    DoesNotApply,
    Expectation,
    GpuReading,
    Reading,
    Unread,
    cached_answer,
    expectation,
    gpu_facts,
    twin_answers,
)

# The compute capabilities of chips with error containment: GA100, GH100, GB10x. After a memory
# error, these chips stop only the affected programs, and the faulty page is no longer used (memory
# error management, "Supported GPUs"). GA10x, AD10x and GB20x (8.6, 8.9, 12.x) do not have it. For
# later chips nothing is documented.
CONTAINS_ERRORS = {(8, 0), (9, 0), (10, 0), (10, 3)}
REMAPS_ROWS = (8, 0)  # Ampere and later; Volta and Turing retire pages instead
REPAIRS_CHANNELS = (10, 0)  # Blackwell and later ("RAS repair", same table)

# A GPU is to be replaced if a bank of its SRAM has more than 4 uncorrectable parity errors or more
# than 2 double-bit errors (memory error management). NVML does not report the bank, so the limit is
# applied to the total.
SRAM_UNCORRECTED_MAX = 4
# From these numbers of correctable errors since the driver was loaded, the health checks of Azure
# HPC fail a node (as of 2026). NVIDIA publishes no limit, because these errors do no harm.
DRAM_CORRECTED_MANY = 20_000_000
SRAM_CORRECTED_MANY = 10_000
REMAPPED_ROWS_MAX = 512  # after uncorrectable errors: DCGM's limit
RETIRED_PAGES_MAX = 63  # DCGM's limit; the GPU's table holds 64
# If a GPU has this number of pages that were retired after double-bit errors, more than one new
# page a week is a reason for an RMA (DCGM). The check sees only one reading, so it cannot know the
# rate.
RETIRED_DOUBLE_BIT_MANY = 15

_MEMORY_ERRORS = "NVIDIA, GPU memory error management"

_DRAIN = Step(Action.DRAIN, "let the GPU's requests finish and stop its servers")
_REBOOT = Step(Action.REBOOT, "if this does not help, or if the GPU cannot be reset: `sudo reboot`")
_RETURN = Step(
    Action.SERVICE,
    "run NVIDIA's field diagnostic, then have the GPU replaced; send the output of `sudo "
    "nvidia-bug-report.sh` with it",
)


def _reset(gpu: GpuReading) -> Step:
    return Step(
        Action.RESET_GPU,
        f"`sudo nvidia-smi -r -i {gpu.index}`; on nodes with NVSwitches, reset all GPUs at once: "
        f"`sudo nvidia-smi -r`",
    )


def ecc_mode(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that ECC is on or off as declared. If it is not declared, ECC must be on for server
    boards, and otherwise as on the siblings.
    """
    declared = gpu.node.settings.gpus.ecc
    try:
        current, pending = bool(gpu.get("ecc_mode", "current")), gpu.get("ecc_mode", "pending")
    except DoesNotApply:
        if not declared:
            raise
        yield Problem(
            Severity.BLOCK,
            "the GPU has no ECC",
            "ECC on",
            "gpus.ecc in group_vars",
            (Step(Action.CONFIGURE, "remove gpus.ecc, or move the node to another group"),),
        )
        return
    wanted = _ecc_wanted(gpu)
    remedy = (
        *((_ecc_switch(gpu, wanted.value),) if wanted and wanted.value != bool(pending) else ()),
        _DRAIN,
        _reset(gpu),
        _REBOOT,
    )
    if wanted and current != wanted.value:
        yield Problem(
            Severity.WARN if declared is None else Severity.BLOCK,
            f"ECC is {_word(current)}{_and_pending(current, pending)}",
            f"ECC {_word(wanted.value)}",
            wanted.source,
            remedy,
        )
    elif bool(pending) != current:
        yield Problem(
            Severity.WARN,
            f"ECC is {_word(current)}{_and_pending(current, pending)}",
            f"ECC {_word(current)}, also after the next reset",
            wanted.source if wanted else "the device",
            remedy,
        )


@cached_answer
def _has_ecc_on(node: Reading) -> bool | None:
    """
    Return whether ECC is on for most of the node's GPUs, or None if no GPU supports or reports ECC.
    """
    modes = [bool(mode) for _, mode in gpu_facts(node.gpus, "ecc_mode", "current")]
    return 2 * sum(modes) > len(modes) if modes else None


def _ecc_wanted(gpu: GpuReading) -> Expectation | None:
    for_servers = is_for_servers(gpu)
    of_siblings = () if for_servers else twin_answers(gpu.node, _has_ecc_on)
    own = True if for_servers else None  # server boards are not compared with siblings
    source = f"{gpu.known('name')} boards are delivered with ECC on"
    return expectation(gpu.node.settings.gpus.ecc, "gpus.ecc", of_siblings, own, source)


def _ecc_switch(gpu: GpuReading, on: bool) -> Step:
    return Step(Action.CONFIGURE, f"`sudo nvidia-smi -i {gpu.index} -e {int(on)}`")


def _word(on: Any) -> str:
    return "on" if on else "off"


def _and_pending(current: bool, pending: Any) -> str:
    return "" if bool(pending) == current else f", and {_word(pending)} after the next reset"


def ecc_uncorrected(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that there was no uncorrectable error since the driver was loaded.

    DCGM's policy after such an error is to drain the node, then to reset the GPU or to reboot.
    """
    now = gpu.get("ecc_uncorrected_volatile")
    if now < 0:
        raise Unread(f"ecc_uncorrected_volatile cannot be {now}")
    if now > 0:
        yield Problem(
            Severity.BLOCK,
            f"{_errors(now, 'uncorrectable memory error')} since the driver was loaded",
            "none",
            "DCGM's health policy",
            (_DRAIN, _reset(gpu), _REBOOT, _RETURN),
        )
    elif (life := gpu.known("ecc_uncorrected_aggregate", default=0)) > 0:
        yield Problem(
            Severity.INFO,
            f"{_errors(life, 'uncorrectable memory error')} in the GPU's lifetime, none "
            f"since the driver was loaded",
            "none since the driver was loaded",
            "DCGM's health policy",
        )


def _errors(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def ecc_sram(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the driver requests no replacement because of SRAM errors, and that there are few
    errors.
    """
    try:
        gpu.get("ecc_sram")
    except (CannotTell, DoesNotApply):
        # Drivers before R535.161, and Turing GPUs, only report the count.
        exceeded, count = False, gpu.get("ecc_sram_counts", "uncorrected_aggregate")
    else:
        exceeded = bool(gpu.get("ecc_sram", "bThresholdExceeded"))
        kinds = ("aggregateUncParity", "aggregateUncSecDed")
        count = sum(gpu.get("ecc_sram", kind) for kind in kinds)
    said = f"{_errors(count, 'uncorrectable SRAM error')} in the GPU's lifetime"
    if exceeded:
        yield Problem(
            Severity.BLOCK,
            f"SRAM errors are above NVIDIA's threshold for a replacement ({said})",
            "below the threshold",
            f"the driver (SRAM threshold), {_MEMORY_ERRORS}",
            (_DRAIN, _RETURN),
        )
    elif count > SRAM_UNCORRECTED_MAX:
        yield Problem(
            Severity.WARN,
            said,
            f"at most {SRAM_UNCORRECTED_MAX}",
            _MEMORY_ERRORS,
            (Step(Action.LOOK, "run `dcgmi diag -r 3` when the node is free"), _RETURN),
        )


def ecc_corrected(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that there are fewer correctable errors since the driver was loaded than the limit at
    which a fleet operator takes a node out of service.
    """
    counts = (
        ("DRAM", ("ecc_dram", "corrected_volatile"), DRAM_CORRECTED_MANY),
        ("SRAM", ("ecc_sram_counts", "corrected_volatile"), SRAM_CORRECTED_MANY),
    )
    flood = False
    for place, path, many in counts:
        try:
            count = gpu.get(*path)
        except (CannotTell, DoesNotApply):
            continue  # some boards only count DRAM and SRAM errors together: see below
        if count >= many:
            flood = True
            yield _corrected(f"{place} had {count:,} correctable errors", many)
    together = gpu.get("ecc_corrected_volatile")
    if together >= DRAM_CORRECTED_MANY and not flood:
        yield _corrected(f"memory had {together:,} correctable errors", DRAM_CORRECTED_MANY)


def _corrected(found: str, many: int) -> Problem:
    return Problem(
        Severity.WARN,
        f"{found} since the driver was loaded",
        f"fewer than {many:,}",
        "the limit at which the operator of a large fleet takes a node out of service",
        (
            Step(
                Action.LOOK,
                "run `nvidia-smi -q -d ECC` twice, an hour apart, to see whether the count grows",
            ),
            Step(Action.LOOK, "if the count grows, run `dcgmi diag -r 3` when the node is free"),
            _RETURN,
        ),
    )


def _remapped_rows(gpu: GpuReading, key: str) -> Any:
    """
    Return one value of the row remapper. Raises `Unread` if the value is missing and MIG is on.
    """
    try:
        return gpu.get("remapped_rows", key)
    except DoesNotApply:
        if gpu.known("mig_mode", "current"):
            raise Unread("the driver does not report remapped rows while MIG is on") from None
        raise


def _contains_errors(gpu: GpuReading) -> bool:
    return tuple(gpu.get("compute_capability")) in CONTAINS_ERRORS


def row_remap_pending(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that no row remap waits for a reset, because the faulty row may be used until then.

    On chips with error containment, the driver no longer uses the page with the faulty row. NVIDIA
    states that new work may start, so the reset can wait for the next maintenance window.
    """
    if not _remapped_rows(gpu, "pending"):
        return
    if _contains_errors(gpu):
        yield Problem(
            Severity.WARN,
            "a row remap is pending until a reset; until then, the driver does not use the page "
            "with the faulty row",
            "no remap or repair pending",
            f"{_MEMORY_ERRORS}: with error containment, new work may start before the reset",
            (_at_next_window(gpu), _REBOOT),
        )
    else:
        yield Problem(
            Severity.BLOCK,
            "a row remap is pending until a reset; until then, this chip may use the faulty row",
            "no remap or repair pending",
            f"{_MEMORY_ERRORS}: this chip does not contain errors",
            (_DRAIN, _reset(gpu), _REBOOT),
        )


def _at_next_window(gpu: GpuReading) -> Step:
    reset = _reset(gpu)
    return Step(reset.action, f"in the next maintenance window: {reset.text}")


def row_remap_failed(gpu: GpuReading) -> Iterator[Problem]:
    """Check that no row remap has failed, because a faulty row then stays in use."""
    if _remapped_rows(gpu, "failed"):
        yield Problem(
            Severity.BLOCK,
            "a row could not be remapped, because its memory bank has no spare row left",
            "every remap succeeded",
            f"{_MEMORY_ERRORS}: a reason for an RMA",
            (_DRAIN, _RETURN),
        )


def row_remap_count(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the number of rows that were remapped after uncorrectable errors is below DCGM's
    limit.
    """
    count = _remapped_rows(gpu, "uncorrected")
    if count >= REMAPPED_ROWS_MAX:
        yield Problem(
            Severity.BLOCK,
            f"{count} rows were remapped after uncorrectable errors",
            f"fewer than {REMAPPED_ROWS_MAX}",
            "DCGM's limit",
            (_DRAIN, _RETURN),
        )


def row_remap_spares(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that every memory bank has enough spare rows. Otherwise its next error may not be
    repairable.
    """
    try:
        used_up, few = (gpu.get("remap_histogram", spares) for spares in ("none", "low"))
    except DoesNotApply:
        _remapped_rows(gpu, "pending")  # raises `Unread` if MIG is the reason
        raise
    if used_up or few:
        yield Problem(
            Severity.WARN,
            f"{used_up} memory banks have no spare row left, {few} banks have only a few",
            "no memory bank short of spare rows",
            f"the driver (row remapper histogram), {_MEMORY_ERRORS}",
            (
                Step(
                    Action.SERVICE,
                    "plan the GPU's replacement: the next remap in these banks may fail",
                ),
            ),
        )


def retired_pages(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that few pages are retired, and that no page waits for a reset (Volta and Turing).

    A page that waits may be used until the reset. This is only a warning. If an uncorrectable error
    caused it, the error has happened since the driver was loaded, so the check ecc-uncorrected
    stops work.
    """
    if tuple(gpu.get("compute_capability")) >= REMAPS_ROWS:
        raise DoesNotApply("this chip remaps rows instead of retiring pages")
    if gpu.get("retired_pages_pending"):
        yield Problem(
            Severity.WARN,
            "a faulty page will be retired at the next reset, and may be used until then",
            "no remap or repair pending",
            "NVIDIA, dynamic page retirement",
            (_DRAIN, _reset(gpu), _REBOOT),
        )
    single, double = (gpu.get("retired_pages", kind) for kind in ("single_bit", "double_bit"))
    said = f"{single + double} pages are retired, {double} of them after double-bit errors"
    if single + double >= RETIRED_PAGES_MAX:
        yield Problem(
            Severity.BLOCK,
            said,
            f"fewer than {RETIRED_PAGES_MAX}",
            "DCGM's limit; at most 64 pages can be retired",
            (_DRAIN, _RETURN),
        )
    elif double >= RETIRED_DOUBLE_BIT_MANY:
        yield Problem(
            Severity.WARN,
            said,
            f"fewer than {RETIRED_DOUBLE_BIT_MANY} after double-bit errors",
            "DCGM's soft limit: with more than one new page a week the GPU qualifies for an RMA",
            (
                Step(
                    Action.LOOK,
                    "run `nvidia-smi -q -d PAGE_RETIREMENT` from time to time, to "
                    "see whether the number grows",
                ),
                _RETURN,
            ),
        )


def memory_repair(gpu: GpuReading) -> Iterator[Problem]:
    """Check that no memory is unrepairable, and that no repair waits for a reset (Blackwell)."""
    if tuple(gpu.get("compute_capability")) < REPAIRS_CHANNELS:
        raise DoesNotApply("this chip has no repair method except row remapping")
    try:
        beyond = bool(gpu.get("memory_unrepairable"))
    except (CannotTell, DoesNotApply):
        beyond = False  # only R590 and later report it
    if beyond:
        yield Problem(
            Severity.BLOCK,
            "the driver reports unrepairable GPU memory",
            "repairable memory",
            "the driver (unrepairable memory flag)",
            (_DRAIN, _RETURN),
        )
    waiting = [
        what
        for key, what in (("channel_pending", "memory channel"), ("tpc_pending", "TPC"))
        if gpu.get("repair", key)
    ]
    if waiting:
        yield Problem(
            Severity.WARN,
            f"a repair of a {' and of a '.join(waiting)} is pending until a reset",
            "no remap or repair pending",
            f"the driver (repair status), {_MEMORY_ERRORS}",
            (_at_next_window(gpu), _REBOOT),
        )


OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "ecc-mode": ecc_mode,
    "ecc-uncorrected": ecc_uncorrected,
    "ecc-sram": ecc_sram,
    "ecc-corrected": ecc_corrected,
    "row-remap-pending": row_remap_pending,
    "row-remap-failed": row_remap_failed,
    "row-remap-count": row_remap_count,
    "row-remap-spares": row_remap_spares,
    "retired-pages": retired_pages,
    "memory-repair": memory_repair,
}


# Values of nvmlBrandType_t for server boards: Tesla, and "NVIDIA", which they report since Ampere.
_BRANDS = {2, 14}


# Words in the names of boards that are made for desktops, whatever brand they report.
_DESKTOP_NAMES = ("GeForce", "RTX", "TITAN", "Quadro")


def is_for_servers(gpu: GpuReading) -> bool:
    """
    Return whether the board is made for servers. Server boards are delivered with ECC on, and have
    NVLink for all pairs of GPUs.
    """
    name = gpu.known("name", default="")
    return gpu.known("brand") in _BRANDS and not any(word in name for word in _DESKTOP_NAMES)

"""Check whether heat, power or a setting lowers the clocks of GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import multimode
from typing import Any

from gpufleet.checks.finding import REBOOT_IT, STOP, Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import (
    CannotTell,
    DoesNotApply,
    GpuReading,
    Reading,
    Unread,
    cached_answer,
    expectation,
    gpu_facts,
)

# nvmlClocksEventReasons, nvml.h.
CLOCKS_SETTING = 0x2
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
# If a hardware reason is set, the probe takes this number of samples, 0.3 s apart. A reason that is
# in every sample is not transient. After a change of clocks or power state, 0x8 may be set for a
# moment (nvml.h).
SAMPLES = 3

# A T.Limit margin counts only if the GPU has at least this temperature. Cool H100s have been seen
# to report margins of 0 and less (gpud ignores such answers too), and no NVIDIA board slows down
# below about 80 °C.
WARM_CELSIUS = 70

# The tolerance is needed because the driver rounds power limits.
POWER_TOLERANCE_WATTS = 1


def hardware_slowdown(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that neither heat nor power halves the GPU's clocks (NVML's reasons 0x8, 0x40, 0x80).

    A reason that is set in all three samples is `block`. A reason that is set in some of them is a
    warning, but 0x8 alone is then only a remark, because it is also set after a change of clocks.
    """
    samples = [_reasons(bits) for bits in gpu.get("throttle_samples")]
    if not samples:
        raise Unread("the probe took no sample of the clock event reasons")
    celsius = gpu.known("temperature_celsius", default="?")
    found = []
    for bit, said, remedy in (
        (
            HW_POWER_BRAKE,
            "the power supply causes throttling of the GPU (HW power brake)",
            _POWER_LADDER,
        ),
        (HW_THERMAL, f"heat throttles it at {celsius} °C (HW thermal slowdown)", _HEAT_LADDER),
        (HW_SLOWDOWN, f"the hardware throttles it at {celsius} °C (HW slowdown)", _BOTH_LADDER),
    ):
        seen = sum(bool(bits & bit) for bits in samples)
        lasting = seen == len(samples) >= SAMPLES
        passing = Severity.INFO if bit == HW_SLOWDOWN else Severity.WARN
        if seen:
            found.append(
                Problem(
                    Severity.BLOCK if lasting else passing,
                    f"{said}, in {seen} of {len(samples)} samples",
                    "never",
                    "NVML's clock event reasons",
                    remedy,
                    gpu.index,
                )
            )
    # 0x8 is set together with the other two reasons. Report the worst problem. Of equal problems,
    # report the first, which names the cause.
    yield from found and [max(found, key=lambda problem: problem.severity)]


def _reasons(bits: int) -> int:
    """Return NVML's reasons. Raises `Unread` if the number cannot be a set of bits."""
    if bits < 0:
        raise Unread(f"{bits} is not a set of clock event reasons")
    return bits


_POWER_LADDER = (
    Step(
        Action.LOOK,
        "check the BMC's sensors for a failed power supply (`ipmitool sdr type 'Power Supply'`)",
    ),
    STOP,
    Step(Action.SERVICE, "have the power supplies, the feeds and the GPU's power cables inspected"),
)
_HEAT_LADDER = (
    Step(Action.LOOK, "`nvidia-smi -q -d TEMPERATURE,PERFORMANCE`; fans: `ipmitool sdr type Fan`"),
    STOP,
    Step(Action.SERVICE, "have fans, air flow and the heat sink inspected"),
)
_BOTH_LADDER = (
    Step(
        Action.LOOK,
        "`nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE` shows whether heat or power is the cause",
    ),
    STOP,
    REBOOT_IT,
    Step(Action.SERVICE, "have the cooling and the power supply of this GPU inspected"),
)


def software_throttle(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that neither a power cap nor heat throttles an idle GPU (NVML's reasons 0x4 and 0x20).

    Under load, a power cap is normal, and throttling by heat is a remark.
    """
    bits = _reasons(gpu.get("throttle_reasons"))
    if not bits & (SW_POWER_CAP | SW_THERMAL):
        return
    idle = not gpu.get("processes")
    watts = gpu.known("power_draw_milliwatts", default=0) / 1000
    if bits & SW_THERMAL:
        yield Problem(
            Severity.WARN if idle else Severity.INFO,
            f"heat lowers the GPU's clocks while it {'idles' if idle else 'works'} (SW thermal "
            f"slowdown)",
            "throttling only under load, if at all",
            "NVML's clock event reasons",
            _HEAT_LADDER,
            gpu.index,
        )
    elif idle:
        yield Problem(
            Severity.WARN,
            f"a power cap lowers the GPU's clocks while it idles at {watts:.0f} W (SW power cap)",
            "only under load",
            "NVML's clock event reasons",
            (
                Step(Action.LOOK, f"`nvidia-smi -q -d POWER,PERFORMANCE -i {gpu.index}`"),
                Step(
                    Action.CONFIGURE,
                    "restore the GPU's power limit (see the check "
                    "power-limit), or the BMC's power limit",
                ),
            ),
            gpu.index,
        )


def locked_clocks(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that no setting keeps the GPU's clocks below their default.

    Application clocks (`nvidia-smi -ac`) are compared with their defaults. NVML does not report
    locked clocks (`-lgc`, `-lmc`). It only reports that a setting limits the clocks now (reason
    0x2). Reason 0x2 is no problem if the application clocks are above their default, or if the
    default is below the highest clocks (V100).
    """
    held = bool(_reasons(gpu.get("throttle_reasons")) & CLOCKS_SETTING)
    lower, by_design = [], False
    for domain, called in (("sm", "SM"), ("memory", "memory")):
        now, default, highest = (
            _told(gpu, name, domain) if name in gpu.facts else None
            for name in ("application_clocks_mhz", "default_application_clocks_mhz",
                         "clocks_max_mhz")
        )  # fmt: skip
        if now is not None and default is not None:
            by_design = by_design or now > default or default < (highest or 0)
            if now < default:
                lower.append(f"{now} MHz instead of {default} ({called})")
    if not lower and (not held or by_design):
        return
    said = f"the GPU's application clocks are lowered: {', '.join(lower)}"
    yield Problem(
        Severity.WARN,
        said if lower else "a setting has locked the GPU's clocks",
        "clocks as delivered",
        "the board's default application clocks" if lower else "NVML's clock event reasons",
        (
            Step(Action.LOOK, f"`nvidia-smi -q -d CLOCK,PERFORMANCE -i {gpu.index}`"),
            Step(
                Action.CONFIGURE,
                f"`nvidia-smi -i {gpu.index} -rac`, `-rgc` and `-rmc`; find out what sets the "
                f"clocks at boot (a unit, a cron job), or accept the finding (checks.accept)",
            ),
        ),
        gpu.index,
    )


def temperature(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the GPU and its memory are below the temperature at which the device slows down.

    Limits in °C are used if the device has them. Otherwise (Ada and newer) the T.Limit margins are
    used (NVML fields 193 to 196). The margin of a cool GPU is ignored.
    """
    celsius = gpu.get("temperature_celsius")
    slowdown = _told(gpu, "temperature_slowdown_celsius")
    highest = _told(gpu, "temperature_gpu_max_celsius")
    margin = _told(gpu, "margin_celsius")
    if slowdown is not None or highest is not None:
        beyond = slowdown is not None and celsius >= slowdown
        near = highest is not None and celsius >= highest
        says = f"{celsius} °C"
        wanted = f"below {slowdown if beyond or highest is None else highest} °C"
    elif margin is not None:
        halves = _told(gpu, "temperature_limits", "slowdown") or 0
        lowers = _told(gpu, "temperature_limits", "gpu_max") or 0
        warm = celsius >= WARM_CELSIUS
        beyond, near = warm and margin < halves, warm and margin <= lowers
        says = f"{celsius} °C, {margin} °C of margin left"
        wanted = f"a margin above {lowers} °C"
    else:
        raise CannotTell("the device reports no limits")
    if beyond or near:
        yield Problem(
            Severity.BLOCK if beyond else Severity.WARN,
            f"{says}: {'the GPU halves its clocks' if beyond else 'the GPU may lower its clocks'}",
            wanted,
            "the device",
            _HEAT_LADDER,
            gpu.index,
        )
    memory = _told(gpu, "temperature_memory_celsius")
    memory_max = _told(gpu, "temperature_memory_max_celsius")
    if memory is not None and memory_max is not None and memory >= memory_max:
        yield Problem(
            Severity.WARN,
            f"the GPU's memory is at {memory} °C, so the GPU lowers its clocks",
            f"below {memory_max} °C",
            "the device",
            _HEAT_LADDER,
            gpu.index,
        )


def _told(gpu: GpuReading, *path: str) -> Any:
    """
    Return a fact, or None if the board or driver does not have it. Raises `Unread` if it could not
    be read.
    """
    try:
        return gpu.get(*path)
    except (DoesNotApply, CannotTell):
        return None


def power_limit(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the power limit is the declared one. If none is declared, the limit must be at least
    the smaller of the siblings' limit and the board's default.
    """
    enforced = gpu.get("power_limit_milliwatts") / 1000
    if enforced <= 0:
        raise Unread(f"{enforced:.0f} W is not a power limit")
    index = gpu.index
    declared = gpu.node.settings.gpus.power_limit_watts
    if declared is not None:
        if abs(enforced - declared) > POWER_TOLERANCE_WATTS:
            yield _power(index, enforced, declared, "gpus.power_limit_watts in group_vars")
        return
    default = gpu.get("power_default_limit_milliwatts") / 1000
    expected = expectation(None, "", (_usual_limit(twin) for twin in gpu.node.twins))
    wanted, source = default, "the board's default"
    if expected and expected.certain:
        wanted, source = expected.value / 1000, expected.source
    if enforced < min(wanted, default) - POWER_TOLERANCE_WATTS:
        yield _power(index, enforced, wanted, source)


@cached_answer
def _usual_limit(node: Reading) -> Any:
    """
    Return the power limit in mW that most of the node's GPUs have, or None if no GPU reports it.
    """
    most = multimode(value for _, value in gpu_facts(node.gpus, "power_limit_milliwatts"))
    return next(iter(most), None)


def _power(index: int, enforced: float, wanted: float, source: str) -> Problem:
    set_it = f"`nvidia-smi -i {index} -pl {wanted:.0f}`"
    return Problem(
        Severity.WARN,
        f"the GPU's power is limited to {enforced:.0f} W",
        f"{wanted:.0f} W",
        source,
        (
            Step(
                Action.LOOK,
                f"`nvidia-smi -q -d POWER -i {index}`: find out who lowered the limit, and why",
            ),
            Step(
                Action.CONFIGURE,
                f"{set_it} (this setting is lost at a reboot, or without persistence mode), or "
                f"declare "
                f"gpus.power_limit_watts: {enforced:.0f}",
            ),
        ),
        index,
    )


OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "hardware-slowdown": hardware_slowdown,
    "software-throttle": software_throttle,
    "locked-clocks": locked_clocks,
    "temperature": temperature,
    "power-limit": power_limit,
}

"""Define the dashboard of GPUs and links: heat, power, memory errors and NVLink. Pure."""

from __future__ import annotations

from gpufleet.monitoring.dashboards.common import (
    ANY_IS_BAD,
    ANY_IS_TO_LOOK_AT,
    DEPLOYS,
    GPU,
    NODE,
    lines,
    stat,
    timeline,
)
from gpufleet.monitoring.dashboards.panel import (
    Colour,
    Dashboard,
    Query,
    Row,
    Step,
    Unit,
    ValueDisplay,
)

_OF = 'instance="$instance",gpu=~"$gpu"'
_RATE = "[$__rate_interval]"
_ONE = "GPU {{gpu}}"
_NO_DCGM = "the node has no DCGM"
_NO_NVLINK = "the node has no NVLink or no DCGM"
_NO_ECC = "these boards have no ECC"
_NO_REMAPPING = "these boards do not remap rows"

# Degrees left until the GPU slows down. If fewer than 3 are left, a slightly warmer room is enough.
_MARGIN = (Step(None, Colour.BAD), Step(3, Colour.LOOK), Step(10, Colour.GOOD))


def _each(record: str, operation: str = "max") -> tuple[Query, ...]:
    return (Query(f"{operation} by (gpu) ({record}{{{_OF}}})", _ONE),)


NOW = Row(
    "Is a GPU faulty?",
    (
        stat(
            "GPUs missing",
            'max(gpufleet_gpus{state="expected",instance="$instance"})'
            ' - max(gpufleet_gpus{state="present",instance="$instance"})',
            "Run `gpufleet check`, then reboot the node. If the GPU is still missing, replace it.",
            steps=ANY_IS_BAD,
            empty="not a GPU node",
        ),
        stat(
            "Xid errors, 5 min",
            f"sum(gpu:xid_errors:count5m{{{_OF}}}) or vector(0)",
            "The panel below shows the Xids by number. docs/checks/xid.md shows which numbers a program causes.",
            steps=ANY_IS_TO_LOOK_AT,
        ),
        stat(
            "Memory errors, 24 h",
            f"sum(increase(gpu:ecc_uncorrected_total{{{_OF}}}[24h]))",
            "These errors could not be corrected, so the running work is lost. Drain the node, reset the "
            "GPU and run `gpufleet check`.",
            steps=ANY_IS_BAD,
            empty=_NO_ECC,
            decimals=0,
        ),
        stat(
            "GPUs that need a reset",
            f"sum(gpu:row_remap_pending{{{_OF}}})",
            "These GPUs remap rows of memory at their next reset. Plan a reset.",
            steps=ANY_IS_TO_LOOK_AT,
            empty=_NO_REMAPPING,
        ),
        stat(
            "GPUs to be replaced",
            f"sum(gpu:row_remap_failure{{{_OF}}})",
            "These GPUs could not remap a row of memory because no spare row is left. Have the boards replaced.",
            steps=ANY_IS_BAD,
            empty=_NO_REMAPPING,
        ),
        stat(
            "Degrees until throttling",
            f"min(gpu:temperature_margin_celsius{{{_OF}}})",
            "If few degrees are left, check the fans, the air flow and the neighbouring machines.",
            unit=Unit.CELSIUS,
            steps=_MARGIN,
            empty=_NO_DCGM,
        ),
        stat(
            "GPUs throttled",
            f"sum(max by (gpu) (gpu:throttled{{{_OF}}}))",
            "The panel below shows the reasons. A power limit is often intended, but heat and hardware slowdowns never are.",
            steps=ANY_IS_TO_LOOK_AT,
            empty=_NO_DCGM,
        ),
        stat(
            "NVLink errors",
            f"sum(gpu:nvlink_errors:rate5m{{{_OF}}})",
            "The panel below shows the kinds. If errors do not stop, a cable, a board or a switch is faulty.",
            unit=Unit.PER_SECOND,
            steps=(Step(None, Colour.GOOD), Step(0.01, Colour.LOOK), Step(100, Colour.BAD)),
            empty=_NO_NVLINK,
        ),
    ),
)

WORK = Row(
    "Utilization and memory",
    (
        lines(
            "Work",
            Unit.RATIO,
            _each("gpu:utilization_ratio"),
            "Share of time in which at least one kernel ran. If a GPU differs from the other GPUs of its "
            "group, it hangs, or the others wait for it.",
            maximum=1,
        ),
        lines(
            "Memory in use",
            Unit.RATIO,
            _each("gpu:memory_used_ratio"),
            "vLLM allocates its share of the memory at start and keeps it. No other process should use the GPU.",
            maximum=1,
        ),
        lines(
            "Clock",
            Unit.HERTZ,
            _each("gpu:sm_clock_hertz", "min"),
            "If the clock is low under load, see the panel of throttling reasons below.",
        ),
    ),
)

HEAT = Row(
    "Heat and power",
    (
        lines(
            "Temperature",
            Unit.CELSIUS,
            _each("gpu:temperature_celsius"),
            "If one GPU is hotter than its neighbours, check its fan, its air flow and its "
            "cold plate.",
            width=6,
            minimum=None,
        ),
        lines(
            "Memory temperature",
            Unit.CELSIUS,
            (
                *_each("gpu:memory_temperature_celsius"),
                Query(f"min(gpu:memory_temperature_limit_celsius{{{_OF}}})", "limit", limit=True),
            ),
            "Above the dashed line, memory errors become likely and the GPU lowers its clocks.",
            width=6,
            minimum=None,
            empty="no HBM, or no DCGM",
        ),
        lines(
            "Power",
            Unit.WATTS,
            (
                *_each("gpu:power_watts"),
                Query(f"min(gpu:power_limit_watts{{{_OF}}})", "limit", limit=True),
            ),
            "At the dashed line, the GPU reduces its clock. If the line is lower than before, someone has "
            "set a lower power limit.",
            width=6,
        ),
        timeline(
            "Throttled, by reason",
            (
                Query(
                    f"max by (gpu, reason) (gpu:throttled{{{_OF}}}) > 0",
                    "GPU {{gpu}} {{reason}}",
                ),
            ),
            "sw_power_cap: the GPU is at its power limit, which is often intended. sw_thermal and "
            "hw_thermal: the GPU is too hot. hw_power_brake: the machine's power supply is too weak "
            "or faulty.",
            shown=(ValueDisplay(1, " ", Colour.LOOK),),
            width=6,
            empty="no GPU was throttled, or there is no DCGM",
        ),
    ),
)

MEMORY = Row(
    "Errors",
    (
        timeline(
            "Xid errors",
            (
                Query(
                    f"max by (gpu, xid) (gpu:xid_errors:count5m{{{_OF}}}) > bool 0",
                    "GPU {{gpu}}  Xid {{xid}}",
                ),
            ),
            "docs/checks/xid.md shows the cause of each number.",
            shown=(ValueDisplay(1, " ", Colour.BAD),),
            width=8,
            empty="no Xid in this time",
        ),
        lines(
            "Uncorrected memory errors",
            Unit.COUNT,
            _each("gpu:ecc_uncorrected_total"),
            "Each increase is an error that could not be corrected, so the running work was lost.",
            empty=_NO_ECC,
        ),
        lines(
            "PCIe packets resent",
            Unit.PER_SECOND,
            _each("gpu:pcie_replays:rate15m"),
            "Some resent packets are normal. If there are many and the number grows, check the riser, "
            "the retimer and the slot.",
            empty=_NO_DCGM,
        ),
    ),
)

NVLINK = Row(
    "NVLink",
    (
        lines(
            "Errors, by kind",
            Unit.PER_SECOND,
            (
                Query(
                    f"max by (error) (gpu:nvlink_errors:rate5m{{{_OF}}})",
                    "{{error}}",
                ),
            ),
            "lost: a link went down and stayed down. recovered: a link went down and came back; it will probably fail again.",
            empty=_NO_NVLINK,
        ),
        lines(
            "Errors, by GPU",
            Unit.PER_SECOND,
            _each("gpu:nvlink_errors:rate5m", "sum"),
            "If only one GPU has errors, its board is faulty. If all GPUs have errors, the switch is faulty.",
            empty=_NO_NVLINK,
        ),
        lines(
            "Traffic",
            Unit.BYTES_PER_SECOND,
            (
                Query(
                    "sum by (gpu) (rate(DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES"
                    f"{{{_OF}}}{_RATE}) + rate(DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES{{{_OF}}}{_RATE}))"
                    # Older boards count megabytes in a different counter. The counter above is 0.
                    " or 1e6 * max by (gpu) "
                    f"(avg_over_time(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{_OF}}}{_RATE}))",
                    _ONE,
                ),
            ),
            "All GPUs of a tensor-parallel group should have equal traffic. If there is no traffic under load, NCCL does not use NVLink.",
            empty=_NO_NVLINK,
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="gpufleet-gpu",
    title="gpufleet: GPU and NVLink",
    question="Is a GPU, or a link between them, faulty or throttled?",
    variables=(NODE, GPU),
    marks=(DEPLOYS,),
    rows=(NOW, WORK, HEAT, MEMORY, NVLINK),
)

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
_NO_NVLINK = "no NVLink here, or no DCGM"
_NO_ECC = "these boards have no ECC"
_NO_REMAPPING = "these boards do not remap rows"

# Degrees left until the GPU slows down: with fewer than 3, a warm aisle is enough.
_MARGIN = (Step(None, Colour.BAD), Step(3, Colour.LOOK), Step(10, Colour.GOOD))


def _each(record: str, operation: str = "max") -> tuple[Query, ...]:
    return (Query(f"{operation} by (gpu) ({record}{{{_OF}}})", _ONE),)


NOW = Row(
    "Is a GPU sick?",
    (
        stat(
            "GPUs missing",
            'max(gpufleet_gpus{state="expected",instance="$instance"})'
            ' - max(gpufleet_gpus{state="present",instance="$instance"})',
            "Run `gpufleet check`. Reboot the node; replace a GPU that is still missing.",
            steps=ANY_IS_BAD,
            empty="not a GPU node",
        ),
        stat(
            "Xid errors, 5 min",
            f"sum(gpu:xid_errors:count5m{{{_OF}}}) or vector(0)",
            "Shown below by number; docs/alerts/ tells which numbers the application causes.",
            steps=ANY_IS_TO_LOOK_AT,
        ),
        stat(
            "Memory errors, 24 h",
            f"sum(increase(gpu:ecc_uncorrected_total{{{_OF}}}[24h]))",
            "Uncorrectable: the running work is lost. Drain the node, reset the GPU, run "
            "`gpufleet check`.",
            steps=ANY_IS_BAD,
            empty=_NO_ECC,
            decimals=0,
        ),
        stat(
            "Wait for a reset",
            f"sum(gpu:row_remap_pending{{{_OF}}})",
            "Rows are remapped at the next reset: plan a reset.",
            steps=ANY_IS_TO_LOOK_AT,
            empty=_NO_REMAPPING,
        ),
        stat(
            "To be replaced",
            f"sum(gpu:row_remap_failure{{{_OF}}})",
            "No spare row is left: have the board replaced.",
            steps=ANY_IS_BAD,
            empty=_NO_REMAPPING,
        ),
        stat(
            "Degrees until it slows down",
            f"min(gpu:temperature_margin_celsius{{{_OF}}})",
            "Check fans, air flow and neighbouring machines.",
            unit=Unit.CELSIUS,
            steps=_MARGIN,
            empty=_NO_DCGM,
        ),
        stat(
            "GPUs held back",
            f"sum(max by (gpu) (gpu:throttled{{{_OF}}}))",
            "Shown below by reason: a power limit is often intended, heat and hardware never are.",
            steps=ANY_IS_TO_LOOK_AT,
            empty=_NO_DCGM,
        ),
        stat(
            "NVLink errors",
            f"sum(gpu:nvlink_errors:rate5m{{{_OF}}})",
            "Shown below by kind. If errors do not stop, a cable, a board or a switch is faulty.",
            unit=Unit.PER_SECOND,
            steps=(Step(None, Colour.GOOD), Step(0.01, Colour.LOOK), Step(100, Colour.BAD)),
            empty=_NO_NVLINK,
        ),
    ),
)

WORK = Row(
    "What they do",
    (
        lines(
            "Work",
            Unit.RATIO,
            _each("gpu:utilization_ratio"),
            "Share of time in which any kernel ran, however small. A GPU that differs from its "
            "group hangs, or the others wait for it.",
            maximum=1,
        ),
        lines(
            "Memory in use",
            Unit.RATIO,
            _each("gpu:memory_used_ratio"),
            "vLLM takes its share at start and keeps it. No other process should use the GPU.",
            maximum=1,
        ),
        lines(
            "Clock",
            Unit.HERTZ,
            _each("gpu:sm_clock_hertz", "min"),
            "If low under load, look below for the reason.",
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
            "Memory's temperature",
            Unit.CELSIUS,
            (
                *_each("gpu:memory_temperature_celsius"),
                Query(f"min(gpu:memory_temperature_limit_celsius{{{_OF}}})", "may be", limit=True),
            ),
            "Above the dashed line memory errors become likely, and clocks fall.",
            width=6,
            minimum=None,
            empty="no HBM, or no DCGM",
        ),
        lines(
            "Power",
            Unit.WATTS,
            (
                *_each("gpu:power_watts"),
                Query(f"min(gpu:power_limit_watts{{{_OF}}})", "may take", limit=True),
            ),
            "At the dashed line the clock is reduced. If that line is lower than before, a limit "
            "was set.",
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
            "sw_power_cap: its power limit, often intended. sw_thermal, hw_thermal: heat. "
            "hw_power_brake: "
            "the machine's power supply.",
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
            "docs/alerts/ tells for each number what is at fault.",
            shown=(ValueDisplay(1, " ", Colour.BAD),),
            width=8,
            empty="no Xid in this time",
        ),
        lines(
            "Uncorrected memory errors",
            Unit.COUNT,
            _each("gpu:ecc_uncorrected_total"),
            "Each step up is an error: the running work is lost.",
            empty=_NO_ECC,
        ),
        lines(
            "PCIe packets sent again",
            Unit.PER_SECOND,
            _each("gpu:pcie_replays:rate15m"),
            "Some are normal. If they are many and grow, check the riser, the retimer and "
            "the slot.",
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
            "lost: a link went down and stayed down. recovered: it came back, and will fail again.",
            empty=_NO_NVLINK,
        ),
        lines(
            "Errors, by GPU",
            Unit.PER_SECOND,
            _each("gpu:nvlink_errors:rate5m", "sum"),
            "If one GPU is affected, its board is faulty; if all are, the switch.",
            empty=_NO_NVLINK,
        ),
        lines(
            "Traffic",
            Unit.BYTES_PER_SECOND,
            (
                Query(
                    "sum by (gpu) (rate(DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES"
                    f"{{{_OF}}}{_RATE}) + rate(DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES{{{_OF}}}{_RATE}))"
                    # Older boards count megabytes in another counter; this counter is 0 there.
                    " or 1e6 * max by (gpu) "
                    f"(avg_over_time(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{_OF}}}{_RATE}))",
                    _ONE,
                ),
            ),
            "Should be equal in a tensor-parallel group. None under load: NCCL uses another path.",
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

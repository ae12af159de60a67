"""GPUs and what joins them: heat, power, memory errors, NVLink. Pure."""

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

# Degrees that are left: below the first a warm aisle is enough to slow it down.
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
            "Run `gpufleet check`; a reboot brings it back, or nothing does.",
            steps=ANY_IS_BAD,
            empty="not a GPU node",
        ),
        stat(
            "Xid errors, 5 min",
            f"sum(gpu:xid_errors:count5m{{{_OF}}}) or vector(0)",
            "Below, by number; docs/alerts/ says which are the application's own.",
            steps=ANY_IS_TO_LOOK_AT,
        ),
        stat(
            "Memory errors, 24 h",
            f"sum(increase(gpu:ecc_uncorrected_total{{{_OF}}}[24h]))",
            "Uncorrectable: what ran there is lost. Drain the node, reset, run `gpufleet check`.",
            steps=ANY_IS_BAD,
            empty=_NO_ECC,
            decimals=0,
        ),
        stat(
            "Wait for a reset",
            f"sum(gpu:row_remap_pending{{{_OF}}})",
            "Rows are remapped at the next reset: plan it.",
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
            "Left until it slows down",
            f"min(gpu:temperature_margin_celsius{{{_OF}}})",
            "Fans, air flow, neighbours.",
            unit=Unit.CELSIUS,
            steps=_MARGIN,
            empty=_NO_DCGM,
        ),
        stat(
            "GPUs held back",
            f"sum(max by (gpu) (gpu:throttled{{{_OF}}}))",
            "Below, by reason: power is often wanted so, heat and hardware never.",
            steps=ANY_IS_TO_LOOK_AT,
            empty=_NO_DCGM,
        ),
        stat(
            "NVLink errors",
            f"sum(gpu:nvlink_errors:rate5m{{{_OF}}})",
            "Below, by kind. One that does not stop is a cable, a board or a switch.",
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
            "Share of time in which anything ran, not how much. One apart from its group: it "
            "hangs, "
            "or the others wait for it.",
            maximum=1,
        ),
        lines(
            "Memory in use",
            Unit.RATIO,
            _each("gpu:memory_used_ratio"),
            "vLLM takes its share when it starts and keeps it. Other processes should not be there.",
            maximum=1,
        ),
        lines(
            "Clock",
            Unit.HERTZ,
            _each("gpu:sm_clock_hertz", "min"),
            "Low under load: see below what holds it back.",
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
            "One hotter than its neighbours: its fan, its place in the air, its cold plate.",
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
            "At the dashed line the clock is reduced. A line that is lower than it was: a limit "
            "was set.",
            width=6,
        ),
        timeline(
            "Held back, by reason",
            (
                Query(
                    f"max by (gpu, reason) (gpu:throttled{{{_OF}}}) > 0",
                    "GPU {{gpu}} {{reason}}",
                ),
            ),
            "sw_power_cap: its limit, often wanted so. sw_thermal, hw_thermal: heat. "
            "hw_power_brake: "
            "the machine's power supply.",
            shown=(ValueDisplay(1, " ", Colour.LOOK),),
            width=6,
            empty="nothing held a GPU back, or no DCGM",
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
            "The number says whose fault it is: docs/alerts/.",
            shown=(ValueDisplay(1, " ", Colour.BAD),),
            width=8,
            empty="no Xid in this time",
        ),
        lines(
            "Uncorrected memory errors",
            Unit.COUNT,
            _each("gpu:ecc_uncorrected_total"),
            "A step is an error: what ran there is lost.",
            empty=_NO_ECC,
        ),
        lines(
            "PCIe packets sent again",
            Unit.PER_SECOND,
            _each("gpu:pcie_replays:rate15m"),
            "Some are normal. Many and growing: a riser, a retimer, a slot.",
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
            "lost: a link went down and stayed down. recovered: it came back, and will go again.",
            empty=_NO_NVLINK,
        ),
        lines(
            "Errors, by GPU",
            Unit.PER_SECOND,
            _each("gpu:nvlink_errors:rate5m", "sum"),
            "One GPU: its board. All of them: the switch.",
            empty=_NO_NVLINK,
        ),
        lines(
            "Traffic",
            Unit.BYTES_PER_SECOND,
            (
                Query(
                    "sum by (gpu) (rate(DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES"
                    f"{{{_OF}}}{_RATE}) + rate(DCGM_FI_DEV_NVLINK_COUNT_RX_BYTES{{{_OF}}}{_RATE}))"
                    # Older boards count megabytes in another counter; on theirs this one is 0.
                    " or 1e6 * max by (gpu) "
                    f"(avg_over_time(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{_OF}}}{_RATE}))",
                    _ONE,
                ),
            ),
            "Even over the GPUs of a tensor-parallel group. None under load: NCCL goes another "
            "way.",
            empty=_NO_NVLINK,
        ),
    ),
)

DASHBOARD = Dashboard(
    uid="gpufleet-gpu",
    title="gpufleet: GPU and NVLink",
    question="Is a GPU, or a link between them, sick or held back?",
    variables=(NODE, GPU),
    marks=(DEPLOYS,),
    rows=(NOW, WORK, HEAT, MEMORY, NVLINK),
)

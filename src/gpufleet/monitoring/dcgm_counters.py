"""Write the counters file of DCGM's exporter from the list of metrics. Pure."""

from __future__ import annotations

import csv
import io

from gpufleet.monitoring.metrics import dcgm_metrics
from gpufleet.monitoring.metrics.metric import Job

# Fields of DCGM's profiling module, numbers 1001 and up (dcgm_fields.h).
_PROFILING = "DCGM_FI_PROF_"
_HEAD = (
    "# Written by gpufleet; the next deploy overwrites what is changed here.\n"
    "# DCGM field, type of the metric, help text\n"
)


def counters(*, profiling: bool) -> bytes:
    """
    Return the counters file of a node.

    Fields that a board lacks have no series, which is harmless. A profiling field without
    permission breaks the exporter: it then reads no field of any GPU, but keeps running without
    series (dcgm-exporter 4.8.2, startDeviceWatchListManager in pkg/cmd/app.go). So the file has
    profiling fields only with `profiling`.
    """
    text = io.StringIO(_HEAD)
    text.seek(0, io.SEEK_END)
    rows = csv.writer(text, lineterminator="\n")
    for metric in dcgm_metrics.METRICS:
        if metric.job is Job.DCGM and (profiling or not metric.name.startswith(_PROFILING)):
            rows.writerow((metric.name, metric.type, metric.help))
    return text.getvalue().encode()

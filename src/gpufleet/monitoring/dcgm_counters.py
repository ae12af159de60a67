"""Write the counters file of DCGM's exporter from gpufleet's list of metrics. Pure."""

from __future__ import annotations

import csv
import io

from gpufleet.monitoring.metrics import dcgm_metrics
from gpufleet.monitoring.metrics.metric import Job

# The prefix of the fields of DCGM's profiling module, which have numbers from 1001 (dcgm_fields.h).
_PROFILING = "DCGM_FI_PROF_"
_HEAD = (
    "# Written by gpufleet; the next deploy overwrites what is changed here.\n"
    "# DCGM field, type of the metric, help text\n"
)


def counters(*, profiling: bool) -> bytes:
    """
    Return the content of a node's counters file.

    If a board does not have a field, the field has no series, which is harmless. A profiling field
    without permission makes the exporter useless: it reads no field of any GPU, but keeps running
    without series (dcgm-exporter 4.8.2, startDeviceWatchListManager in pkg/cmd/app.go). Therefore
    the file has profiling fields only if `profiling` is True.
    """
    text = io.StringIO(_HEAD)
    text.seek(0, io.SEEK_END)
    rows = csv.writer(text, lineterminator="\n")
    for metric in dcgm_metrics.METRICS:
        if metric.job is Job.DCGM and (profiling or not metric.name.startswith(_PROFILING)):
            rows.writerow((metric.name, metric.type, metric.help))
    return text.getvalue().encode()

"""RUNS ON THE NODE: write files for the node exporter's textfile collector.

The collector reads every *.prom file of one directory. Files are replaced atomically. Every user
can read the files, so they must not contain secrets.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import Dict, Iterable, Tuple, Union

from gpufleet.on_node.common.metric_families import FAMILIES

DIRECTORY = "/var/lib/gpufleet/textfile"
"""Directory of the metrics files. The role creates it with owner root and mode 0755."""

Labels = Dict[str, str]
Number = Union[int, float]
Sample = Tuple[str, Labels, Number]  # name of a family, labels, value


def text(samples: Iterable[Sample]) -> str:
    """
    Return samples in Prometheus' text format 0.0.4, in the order of `FAMILIES`.

    Raises `KeyError` for a name that is not in `FAMILIES`. Raises `ValueError` for two samples of
    one series, because the collector would refuse the whole file.
    """
    by_family: Dict[str, Dict[str, str]] = {name: {} for name in FAMILIES}
    for name, labels, value in samples:
        series = name + format_labels(labels)
        if series in by_family[name]:
            raise ValueError("two samples have the same series: %s" % series)
        by_family[name][series] = "%s %s\n" % (series, number(value))
    return "".join(
        "# HELP %s %s\n# TYPE %s %s\n%s" % (name, about, name, kind, "".join(rows.values()))
        for name, (kind, about) in FAMILIES.items()
        for rows in (by_family[name],)
        if rows
    )


def format_labels(labels: Labels) -> str:
    """Return labels in Prometheus' notation: {stage="tiny-0",model="tiny"}."""
    if not labels:
        return ""
    return "{%s}" % ",".join('%s="%s"' % (name, escaped(str(labels[name]))) for name in labels)


def escaped(value: str) -> str:
    """Return a label's value with reserved characters escaped."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: Number) -> str:
    """Format a finite number without losing digits. Raises `ValueError` for any other."""
    if not math.isfinite(value):
        raise ValueError("%r is not a finite number" % value)
    return repr(int(value) if isinstance(value, bool) else value)


def write(name: str, content: str, root: str = "") -> None:
    """
    Write `content` as `name` (facts.prom) atomically.

    Raises `OSError`, for example `FileNotFoundError` if the directory does not exist.
    """
    path = "%s%s/%s" % (root, DIRECTORY, name)
    new = path + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o644)  # whatever the umask
        file.write(content)
    os.replace(new, path)

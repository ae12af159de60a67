"""Every node's lock against its release and the day, before a node is touched.

Border: reads the vLLM locks that settings name. What is wrong is `gpu_lock.py`'s.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpufleet import gpu_lock, release
from gpufleet.gpu_lock import Objection
from gpufleet.nodevars import NodeVars
from gpufleet.release import Wheels
from gpufleet.settings import NodeSettings


@dataclass(frozen=True)
class Found:
    """Sentences with the file and line in front: what stops a run, and what does not."""

    problems: tuple[str, ...]
    remarks: tuple[str, ...]


def found(nodes: Mapping[str, NodeVars], today: dt.date) -> Found:
    """Check the locks of all nodes; what many inherit from one place is said once."""
    wheels = cache(_wheels)  # one release for many nodes
    said: dict[str, bool] = {}
    for node in nodes.values():
        for each in _objections(node.settings, today, wheels):
            place = node.origins.get("gpu_lock")
            where = f"{place.at(*each.at[1:])}: " if place else ""
            said[f"{where}{each}"] = each.refused
    return Found(
        tuple(sentence for sentence, refused in said.items() if refused),
        tuple(sentence for sentence, refused in said.items() if not refused),
    )


def _objections(
    settings: NodeSettings, today: dt.date, wheels: Callable[[str], Wheels | None]
) -> Iterator[Objection]:
    lock, vllm = settings.gpu_lock, settings.vllm
    if lock is None:
        return
    yield from (each for each in gpu_lock.in_itself(lock) if not each.refused)
    if vllm and vllm.device == "cuda" and (needed := wheels(vllm.lock)):
        yield from gpu_lock.with_release(lock, needed)
    yield from gpu_lock.on_day(lock, today)


def _wheels(path: str) -> Wheels | None:
    """Return what a release's wheels need; None: the role that installs it says what is wrong."""
    try:
        return release.wheels(Path(path).read_bytes(), path)
    except OSError:
        return None

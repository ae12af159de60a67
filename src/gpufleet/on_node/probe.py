"""RUNS ON THE NODE: what is this machine made of? Reads, changes nothing, judges nothing.

Takes (global `PARAMETERS`, all optional):
  sysroot  prefix of every file read: "" is the real machine
  seconds  {"init": 20, "gpu": 15, "pairs": 15}: deadlines of the three rounds of questions
Prints one JSON document, described in docs/probe.md. Every value that could not be read is
{"missing": reason, ...}; none is left out.

A GPU that hangs or crashes the driver costs itself only: this process asks nothing, it forks one
process a GPU (watched.py). Python 3.8, standard library, and the binding that travels along as
`pynvml`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any, Iterator, Mapping

from gpufleet.on_node import machine, nvidia
from gpufleet.on_node.answers import is_missing, missing
from gpufleet.on_node.watched import Watched, answers, asked_of_all

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# Their sum stays below the minute that the controller grants. `init` is long because without
# persistence mode the driver wakes every GPU first, which takes seconds each.
SECONDS = {"init": 20, "gpu": 15, "pairs": 15, **PARAMETERS.get("seconds", {})}


def document() -> dict[str, Any]:
    """Ask in three rounds: the machine and its driver, every GPU, every pair of GPUs."""
    began = time.monotonic()
    # Kept alive: while one process has NVML open, the driver does not put GPUs to sleep between
    # our questions, which without persistence mode costs seconds each time.
    first = {
        "driver": Watched(nvidia.driver, sum(SECONDS.values()), keep=True),
        "host": Watched(machine.host, SECONDS["init"]),
    }
    try:
        whole = answers(first, SECONDS["init"])
        about = whole["driver"]
        count = 0 if is_missing(about) or is_missing(about["gpu_count"]) else about["gpu_count"]
        alone = asked_of_all(nvidia.gpu, {i: (i,) for i in range(count)}, SECONDS["gpu"])
        present = [i for i in range(count) if not is_missing(alone[i])]
        others = {i: (i, [j for j in present if j != i]) for i in present}
        together = asked_of_all(nvidia.pairs, others, SECONDS["pairs"])
    finally:
        for watched in first.values():
            watched.stop()
    sections = host_section(whole["host"])
    return {
        "schema": 1,
        "probe": globals().get("__sha256__", missing("absent")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - began, 3),
        **{name: sections[name] for name, _ in machine.HOST_FACTS},
        "driver": {**driver_section(about), **sections["module"]},
        **{
            section: [gpu_section(alone[i], section, i) for i in range(count)]
            for section in ("gpus", "nvlink", "numa", "fabric")
        },
        "p2p": {kind: matrix(together, kind, count) for kind, _ in nvidia.P2P_INDEXES},
        "pcie": matrix(together, "pcie", count),
        "errors": list(errors(whole, alone, together)),
    }


def host_section(about: Any) -> dict[str, Any]:
    """Return the machine's facts by name, all missing alike if its files could not be read."""
    if not is_missing(about):
        return dict(about)
    return {
        **{name: about for name, _ in machine.HOST_FACTS},
        "module": {name: about for name, _ in machine.MODULE_FACTS},
    }


def driver_section(about: Any) -> dict[str, Any]:
    """Return the driver's facts by name, all missing alike if NVML could not be initialised."""
    if not is_missing(about):
        return {"init": "ok", **about}
    return {"init": about, **{name: about for name, _ in nvidia.DRIVER_FACTS}}


def gpu_section(answer: Any, section: str, index: int) -> Any:
    """Return one section about one GPU; a GPU that did not answer keeps its place in each."""
    if not is_missing(answer):
        return answer[section]
    return {"index": index, **answer} if section == "gpus" else answer


def matrix(together: Mapping[int, Any], kind: str, count: int) -> list[list[Any]]:
    """Return one kind of answer for every pair, row by row; null for a GPU with itself."""

    def cell(row: int, column: int) -> Any:
        if row == column:
            return None
        answers = together.get(row, missing("no_gpu"))
        # JSON turned the numbers of GPUs into strings on the way through the pipe.
        answer = answers if is_missing(answers) else answers.get(str(column), missing("no_gpu"))
        return answer if is_missing(answer) else answer[kind]

    return [[cell(row, column) for column in range(count)] for row in range(count)]


def errors(
    whole: Mapping[str, Any], alone: Mapping[int, Any], together: Mapping[int, Any]
) -> Iterator[dict[str, Any]]:
    """Yield every question that had no answer at all, with what it was about."""
    asked_about = {
        **whole,
        **{"gpus[%d]" % index: answer for index, answer in alone.items()},
        **{"p2p[%d]" % index: answer for index, answer in together.items()},
    }
    for about, answer in asked_about.items():
        if is_missing(answer):
            yield {"about": about, **answer}


def main() -> None:
    """Print the document and end, whatever forked processes are still stuck."""
    machine.ROOT = PARAMETERS.get("sysroot", "")
    with contextlib.suppress(ImportError):
        import pynvml  # noqa: F401  # compiled once, not in every forked process
    sys.stdout.write(json.dumps(document(), separators=(",", ":")) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

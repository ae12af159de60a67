"""RUNS ON THE NODE: print the machine's hardware and software facts, without changes or verdicts.

Takes (global `PARAMETERS`, all optional):
  sysroot  prefix of every file read and of every program run: "" is the real machine
  seconds  {"init": 20, "gpu": 15, "pairs": 15, "turn": 8, "beside": 20}: deadlines
           (docs/reference/probe.md)
  disks    paths whose free space is read: ["/"]
  models   directories of models whose descriptions are read: []
  files    paths, from flags of servers, whose existence is read: []
  answers  results of system calls on another machine (tests and recordings)
Prints one JSON document, described in docs/reference/probe.md. Every value that could not be read
is {"missing": reason, ...}; none is left out.

A GPU that hangs or crashes the driver affects only itself: this process forks one process a GPU
(forked.py), and queries none itself. Facts that do not concern GPUs are read in parallel without
delaying them: one process answers the quick questions in turn, and a slow question moves to its own
process. Python 3.8, standard library, and the binding that travels along as `pynvml`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from typing import Any, Callable, Iterator, Mapping

from gpufleet.on_node.common import (
    driver_files,
    kernel_messages,
    linux_facts,
    nvml,
    package_facts,
    stages,
    system,
)  # fmt: skip
from gpufleet.on_node.common.answers import is_missing, missing
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.probe import cordon_mark, nvml_gpus, nvml_links

SCHEMA = 2

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# init, gpu and pairs follow each other: their sum stays below the minute that the controller
# grants. `init` is long because without persistence mode the driver wakes every GPU first, which
# takes seconds each. `turn` and `beside` run from the beginning, one after the other; `beside` is
# longer than the longest deadline of the programs that are run (kernel_messages.py).
SECONDS = {
    "init": 20,
    "gpu": 15,
    "pairs": 15,
    "turn": 8,
    "beside": 20,
    **PARAMETERS.get("seconds", {}),
}
DISKS = tuple(PARAMETERS.get("disks", ["/"]))
MODELS = tuple(PARAMETERS.get("models", []))
NAMED = tuple(PARAMETERS.get("files", []))

# Asked beside the GPUs. What the machine is comes first; the others are facts for checks.
# Files, which take a millisecond each:
FILES: dict[str, Callable[[], Any]] = {
    "host": linux_facts.host,
    "system": system.system_facts,
    "acs": system.acs,
    "library": driver_files.library,
    "stages": stages.stages,
    "cordon": cordon_mark.cordon,
    "upgrade": cordon_mark.upgrade,
    **{"disk %s" % path: functools.partial(system.disk, path) for path in DISKS},
    **{"model %s" % path: functools.partial(stages.model, path) for path in MODELS},
    **{"file %s" % path: functools.partial(stages.named_file, path) for path in NAMED},
}
# Programs that answer at once:
PROGRAMS: dict[str, Callable[[], Any]] = {
    "units": system.units,
    "upgrades": package_facts.upgrades,
    "packages": package_facts.packages,
}
# A module is unpacked, and the kernel log of a year read: seconds.
LONG: dict[str, Callable[[], Any]] = {
    "kernels": driver_files.kernels,
    "kernel_log": kernel_messages.kernel_log,
}


def document() -> dict[str, Any]:
    """
    Return all facts: of the driver, then every GPU, then every pair, with the rest in parallel.
    """
    began = time.monotonic()
    watch = Watch()
    try:
        # Kept alive: while one process has NVML open, the driver does not put GPUs to sleep between
        # our questions, which without persistence mode costs seconds each time.
        rounds = sum(SECONDS[name] for name in ("init", "gpu", "pairs"))
        watch.ask("driver", nvml_gpus.driver, SECONDS["init"], keep=rounds)
        for key, function in LONG.items():
            watch.ask(key, function, SECONDS["beside"])
        for those in (FILES, PROGRAMS):
            each = {key: (function, SECONDS["beside"]) for key, function in those.items()}
            watch.ask_in_turn(each, SECONDS["turn"])
        driver = watch.answers("driver")["driver"]
        count = 0 if is_missing(driver) or is_missing(driver["gpu_count"]) else driver["gpu_count"]
        alone = ask_gpus(watch, "gpus", nvml_gpus.gpu, {i: (i,) for i in range(count)}, "gpu")
        present = [i for i in range(count) if not is_missing(alone[i])]
        others = {i: (i, [j for j in present if j != i]) for i in present if len(present) > 1}
        together = ask_gpus(watch, "p2p", nvml_links.pairs, others, "pairs")
        beside = watch.answers(*FILES, *PROGRAMS, *LONG)
    finally:
        watch.stop()
    sections = host_section(beside["host"])
    return {
        "schema": SCHEMA,
        "probe": globals().get("__sha256__", missing("absent")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - began, 3),
        "user": {"uid": linux_facts.recorded_or_call("uid", os.geteuid)},
        **{name: sections[name] for name, _ in linux_facts.HOST_FACTS},
        "system": system_section(beside),
        "kernel_log": beside["kernel_log"],
        "stages": beside["stages"],
        "cordon": beside["cordon"],
        "upgrade": beside["upgrade"],
        "models": {path: beside["model %s" % path] for path in MODELS},
        "files": {path: beside["file %s" % path] for path in NAMED},
        "driver": driver_section(driver, sections["module"], beside),
        **{
            section: [gpu_section(alone[i], section, i) for i in range(count)]
            for section in ("gpus", "nvlink", "numa", "fabric")
        },
        "p2p": {kind: matrix(together, kind, count) for kind, _ in nvml_links.P2P_INDEXES},
        "pcie": matrix(together, "pcie", count),
        "errors": list(errors(driver, beside, alone, together)),
    }


def ask_gpus(
    watch: Watch,
    about: str,
    function: Callable[..., Any],
    each: Mapping[int, tuple[Any, ...]],
    seconds: str,
) -> dict[int, Any]:
    """Query every GPU at once, each in its own process, and return the answers by GPU."""
    keys = {index: "%s[%d]" % (about, index) for index in each}
    for index, arguments in each.items():
        watch.ask(keys[index], functools.partial(function, *arguments), SECONDS[seconds])
    answers = watch.answers(*keys.values())
    return {index: answers[key] for index, key in keys.items()}


def host_section(about: Any) -> dict[str, Any]:
    """Return the machine's facts by name; all are missing if its files could not be read."""
    if not is_missing(about):
        return dict(about)
    return {
        **{name: about for name, _ in linux_facts.HOST_FACTS},
        "module": {name: about for name, _ in linux_facts.MODULE_FACTS},
    }


def system_section(beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operating system's facts from the answers of the parallel processes."""
    about = beside["system"]
    return {
        **{name: part(about, name) for name, _ in system.SYSTEM_FACTS},
        "acs": beside["acs"],
        "disks": {path: beside["disk %s" % path] for path in DISKS},
        "units": beside["units"],
        "packages": beside["packages"],
        "unattended_upgrades": package_facts.unattended_upgrade_settings(
            beside["upgrades"], beside["packages"], beside["units"]
        ),
    }


def part(answer: Any, name: str) -> Any:
    """Return one member of an answer, or the answer itself if it is missing."""
    return answer if is_missing(answer) else answer[name]


def driver_section(
    about: Any, module: Mapping[str, Any], beside: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the driver's facts by name; without NVML its values are missing."""
    if is_missing(about):
        facts = {"init": about, **{name: about for name, _ in nvml_gpus.DRIVER_FACTS}}
        facts["nvml"] = part(beside["library"], "nvml")
    else:
        facts = {"init": "ok", **about}
    return {
        **facts,
        **module,
        "disk": part(beside["kernels"], "disk"),
        "kernels": part(beside["kernels"], "kernels"),
        "library": part(beside["library"], "library"),
    }


def gpu_section(answer: Any, section: str, index: int) -> Any:
    """Return one section about a GPU; a GPU without an answer keeps its entry in each section."""
    if not is_missing(answer):
        return answer[section]
    return {"index": index, **answer} if section == "gpus" else answer


def matrix(together: Mapping[int, Any], kind: str, count: int) -> list[list[Any]]:
    """Return one kind of answer for every pair as rows; the diagonal is null."""

    def cell(row: int, column: int) -> Any:
        if row == column:
            return None
        answers = together.get(row, missing("no_gpu"))
        # JSON turned the numbers of GPUs into strings on the way through the pipe.
        answer = answers if is_missing(answers) else answers.get(str(column), missing("no_gpu"))
        return answer if is_missing(answer) else answer[kind]

    return [[cell(row, column) for column in range(count)] for row in range(count)]


def errors(
    driver: Any,
    beside: Mapping[str, Any],
    alone: Mapping[int, Any],
    together: Mapping[int, Any],
) -> Iterator[dict[str, Any]]:
    """
    Yield every process without an answer, with its subject.

    Other facts record reasons such as "no such program" themselves.
    """
    silent = {"timeout", "crashed", "error", "implausible"}
    asked_about = {
        "driver": driver,
        **{
            about: answer
            for about, answer in beside.items()
            if is_missing(answer) and answer["missing"] in silent
        },
        **{"gpus[%d]" % index: answer for index, answer in alone.items()},
        **{"p2p[%d]" % index: answer for index, answer in together.items()},
    }
    for about, answer in asked_about.items():
        if is_missing(answer):
            yield {"about": about, **answer}


def main() -> None:
    """Print the document, and end even if forked processes are still stuck."""
    linux_facts.ROOT = PARAMETERS.get("sysroot", "")
    linux_facts.ANSWERS = PARAMETERS.get("answers", {})
    with contextlib.suppress(ImportError):
        nvml.binding()  # loaded once, not in every forked process
    sys.stdout.write(json.dumps(document(), separators=(",", ":"), allow_nan=False) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

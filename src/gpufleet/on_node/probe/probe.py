"""RUNS ON THE NODE: print the machine's hardware and software facts.

The program changes nothing and does not judge the facts.

Takes (global `PARAMETERS`, all optional):
  sysroot  prefix of the paths of all files and programs; "" (the default): the real machine
  seconds  deadlines in seconds (docs/reference/probe.md), by default
           {"init": 20, "gpu": 15, "pairs": 15, "turn": 8, "beside": 20}
  disks    paths whose free space is read, by default ["/"]
  models   directories of models whose descriptions are read, by default []
  files    paths from flags of servers, by default []; the probe reads whether they exist
  answers  recorded results of system calls on a different machine (tests and recordings)
Prints one JSON document, described in docs/reference/probe.md. A value that could not be read is
{"missing": reason, ...}. No value is left out.

A GPU that hangs or crashes the driver affects only its own facts, because this process forks one
process for each GPU (forked.py) and queries no GPU itself. Facts that do not concern GPUs are read
in parallel and do not delay the GPUs' facts. One process answers the quick questions in order. A
slow question moves to a process of its own. The program needs Python 3.8, the standard library, and
the binding `pynvml`, which is sent with it.
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

# `init`, `gpu` and `pairs` run one after the other. Their sum is less than the minute that the
# controller allows. `init` is long because without persistence mode the driver first wakes every
# GPU, which takes some seconds for each. `turn` and `beside` also run one after the other, from the
# beginning. `beside` is longer than the longest deadline of a program (kernel_messages.py).
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

# These facts are read in parallel with the GPUs' facts. The machine's description comes first. The
# other facts are for checks.
# Facts from files, which take about a millisecond each:
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
# Facts from programs that answer at once:
PROGRAMS: dict[str, Callable[[], Any]] = {
    "units": system.units,
    "upgrades": package_facts.upgrades,
    "packages": package_facts.packages,
}
# Facts that take seconds, because a module is unpacked and a year's kernel log is read:
LONG: dict[str, Callable[[], Any]] = {
    "kernels": driver_files.kernels,
    "kernel_log": kernel_messages.kernel_log,
}


def document() -> dict[str, Any]:
    """
    Return all facts.

    The driver is queried first, then every GPU, then every pair of GPUs. All other facts are read
    in parallel.
    """
    began = time.monotonic()
    watch = Watch()
    try:
        # This process is kept alive. While one process has NVML open, the driver does not put GPUs
        # to sleep between queries. Without persistence mode, each sleep would cost seconds.
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
    """
    Query all GPUs at the same time, each in its own process; return {GPU: answer}.
    """
    keys = {index: "%s[%d]" % (about, index) for index in each}
    for index, arguments in each.items():
        watch.ask(keys[index], functools.partial(function, *arguments), SECONDS[seconds])
    answers = watch.answers(*keys.values())
    return {index: answers[key] for index, key in keys.items()}


def host_section(about: Any) -> dict[str, Any]:
    """
    Return the machine's facts by name. If its files could not be read, all facts are missing.
    """
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
    """Return one member of an answer. If the whole answer is missing, return the placeholder."""
    return answer if is_missing(answer) else answer[name]


def driver_section(
    about: Any, module: Mapping[str, Any], beside: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the driver's facts by name. Without NVML, the values from NVML are missing."""
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
    """
    Return one section of a GPU's answer.

    A GPU that did not answer still has an entry in each section.
    """
    if not is_missing(answer):
        return answer[section]
    return {"index": index, **answer} if section == "gpus" else answer


def matrix(together: Mapping[int, Any], kind: str, count: int) -> list[list[Any]]:
    """
    Return one kind of answer for every pair of GPUs, as a list of rows. The diagonal is null.
    """

    def cell(row: int, column: int) -> Any:
        if row == column:
            return None
        answers = together.get(row, missing("no_gpu"))
        # The answer came through a pipe as JSON, so the numbers of GPUs became strings.
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
    Yield an error for every process that gave no answer, with the process' subject.

    Reasons such as "no such program" are recorded in the facts themselves.
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
    """Print the document, then end even if forked processes are still stuck."""
    linux_facts.ROOT = PARAMETERS.get("sysroot", "")
    linux_facts.ANSWERS = PARAMETERS.get("answers", {})
    with contextlib.suppress(ImportError):
        nvml.binding()  # loaded here once, so that the forked processes need not load it
    sys.stdout.write(json.dumps(document(), separators=(",", ":"), allow_nan=False) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

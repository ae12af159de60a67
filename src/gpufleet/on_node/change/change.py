"""RUNS ON THE NODE, as root: do one action of a change that is made while the fleet serves.

Takes (`PARAMETERS`) `sysroot`, the prefix of every path ("" on the real machine), and `do`, the
action. Each action has its own parameters (`upgrade/run/node_questions.py` lists them):
  look                     report the state that matters for a change; change nothing
  lock, unlock             reserve this node for one upgrade, or end the reservation
  cordon, uncordon         set or remove the mark that no new replica is placed on this node
  drain, undrain           set or remove the marks that load balancers must not use replicas
  quiet                    wait until servers have no requests
  stop                     stop units
  switch                   let units run with the files in `next/`; store their previous state
  restore                  let units run with their previous state again
  ready                    wait until servers complete a prompt
  collect                  remove releases that are not needed
Prints one JSON document {"schema": 1, "problem": null or a sentence, ...}.

Every action is idempotent. If an action is killed at any point, the next call resumes it. Every
wait has a deadline. An action that has begun continues after its controller ended.
`change_files.py` describes the files. The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import suppress
from typing import Any, Callable, Dict

from gpufleet.on_node.change import (
    releases,
    systemd,
    wait,
)
from gpufleet.on_node.change.units import restore, sentence, stop, switch
from gpufleet.on_node.common import change_files, change_marks, deploy_mark, linux_facts
from gpufleet.on_node.common.answers import CannotRead

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}


def look(_: Dict[str, Any]) -> Dict[str, Any]:
    """
    Return the node's state that matters for a change.

    `problem` lists the facts that could not be read.
    """
    found: Dict[str, Any] = {"clock": round(time.time(), 3)}
    problems = []
    for name, function in LOOKS.items():
        try:
            found[name] = function()
        except (OSError, CannotRead, change_files.RefusedError, KeyError) as error:
            problems.append("%s: %s" % (name, sentence(error)))
    return {**found, "problem": "; ".join(problems) or None}


def next_manifest() -> Any:
    """
    Return the plan, units and removals in the manifest of `next/`, or None without a manifest.
    """
    manifest = change_files.document(change_files.NEXT + "/" + change_files.MANIFEST)
    return manifest and {key: manifest[key] for key in ("plan", "units", "remove")}


def kept_upgrades() -> Any:
    """Return the id, time and units of each kept upgrade, oldest first."""
    manifests = [
        change_files.document("%s/%s/%s" % (change_files.KEPT, name, change_files.MANIFEST))
        for name in change_files.directory_names(change_files.KEPT)
    ]
    found = [
        {"id": each["id"], "at": each["at"], "units": each["units"]} for each in manifests if each
    ]
    return sorted(found, key=lambda each: (each["at"], each["id"]))


def units() -> Any:
    """Return the states of gpufleet's units."""
    names = systemd.unit_names()
    return [systemd.look(unit, state) for unit, state in systemd.states(names).items()]


LOOKS: Dict[str, Callable[[], Any]] = {
    "boot_id": lambda: linux_facts.line("/proc/sys/kernel/random/boot_id").replace("-", ""),
    "lock": lambda: change_files.document(change_files.LOCK),
    "deploy": deploy_mark.living_deploy,
    "cordon": lambda: change_files.document(change_files.CORDON),
    "drained": change_marks.drain_marks,
    "next": next_manifest,
    "kept": kept_upgrades,
    "units": units,
    "releases": lambda: [each._asdict() for each in releases.releases()],
}

DO: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "look": look,
    "lock": change_marks.lock,
    "unlock": change_marks.unlock,
    "cordon": change_marks.cordon,
    "uncordon": change_marks.uncordon,
    "drain": change_marks.drain,
    "undrain": change_marks.undrain,
    "quiet": wait.wait_idle,
    "stop": stop,
    "switch": switch,
    "restore": restore,
    "ready": wait.wait_ready,
    "collect": releases.collect,
}


def answer(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Run the requested action, and return the document to print."""
    linux_facts.ROOT = asked.get("sysroot", "")
    base: Dict[str, Any] = {"schema": 1, "do": asked["do"], "problem": None}
    try:
        return {**base, **DO[asked["do"]](asked)}
    except (change_files.RefusedError, CannotRead, OSError, KeyError) as error:
        return {**base, "problem": sentence(error)}


def main() -> None:
    """Print the document. Hangups and SIGTERM are ignored."""
    # If the connection ends, units must not stay stopped. So an action that has begun is completed.
    for each in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    found = json.dumps(answer(PARAMETERS), separators=(",", ":"))
    with suppress(BrokenPipeError):
        sys.stdout.write(found + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

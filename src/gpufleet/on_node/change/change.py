"""RUNS ON THE NODE, as root: everything that a change of the fleet under load does on a node.

Takes (`PARAMETERS`): `do`, and its own parameters (`upgrade/run/node_questions.py` lists them):
  look                     report the state that concerns a change; change nothing
  lock, unlock             reserve this node for one upgrade: compare and set
  cordon, uncordon         mark the node: no new replica is placed here
  drain, undrain           mark replicas as removed from the load balancers
  quiet                    wait until servers have no request
  stop                     stop units
  switch                   units run what `next/` says; their previous state is kept
  restore                  units run their previous state again
  ready                    wait until servers complete a prompt
  collect                  remove releases that nothing needs
  sysroot                  prefix of every path: "" is the real machine
Prints one JSON document {"schema": 1, "problem": null or a sentence, ...}.

Contract: every action is idempotent; after a kill at any instruction the next call resumes; every
wait has a deadline. An action that has begun continues after its controller ends. `change_files.py`
describes the files. Python 3.8, standard library.
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
    """Return the node's state for a change; `problem` names the facts that could not be read."""
    found: Dict[str, Any] = {"clock": round(time.time(), 3)}
    problems = []
    for name, function in LOOKS.items():
        try:
            found[name] = function()
        except (OSError, CannotRead, change_files.RefusedError, KeyError) as error:
            problems.append("%s: %s" % (name, sentence(error)))
    return {**found, "problem": "; ".join(problems) or None}


def next_manifest() -> Any:
    """Return the plan, units and removals in the manifest of `next/`, or None if there is none."""
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
    """Print the document, ignoring hangups and SIGTERM."""
    # A connection that ends must not leave units stopped: what was begun is brought to its end.
    for each in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    found = json.dumps(answer(PARAMETERS), separators=(",", ":"))
    with suppress(BrokenPipeError):
        sys.stdout.write(found + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

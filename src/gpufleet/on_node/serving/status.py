"""RUNS ON THE NODE: report the state of each stage with a unit here.

Takes (JSON header `PARAMETERS`):
  completion   whether each endpoint also gets the request for its kind of model
Prints one JSON document:
  schema       1
  boot_id      of the node's present boot
  clock        the node's time, in seconds since 1970
  gpus         {UUID: NVML's index}, or {"missing": reason}
  change       {"lock", "cordon", "drained"}: the node's lock, its cordon and its drained replicas,
               in the form of on_node/common/change_files.py; each null or {} if there is none
  stages       [{...}] by name of unit, each as below, or {"unit": name, "missing": reason}, or
               {"unit": name, "foreign": true}; all of it {"missing": reason} if unreadable
Of one stage:
  unit, model, replica, rank, port, gpus, release   as its unit has them
  kind         of the model, as its unit has it: generate | embed | ..., see questions.py
  nodes        of a multi-node replica: their names by rank; empty: this node alone
  served_name  the model's name for clients; "" if the unit starts no server that listens on a port
  url          of the endpoint, as this node reaches it; null: it has none (a headless rank)
  keyed        whether the endpoint requires a key
  fingerprint  that of the unit's file, with which the next start would run
  seen         the result of on_node/serving/endpoints.py for unit and endpoint
  engines      {url: /health's answer} of the node's other engines that have servers of their own
  since        seconds since 1970: when the unit entered its state; null: not known
  state        rank.json, in the form of on_node/rank/state.py; {"missing": "absent"} for a replica
               on one node
  events       [{at, boot, life, what, ...}] of the last starts and ends, oldest first
  before       the last lines of the unit's previous run, oldest first

Read-only. The API key is read here and never leaves the node. Every stage is read by its own
process, with a deadline.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Iterator

from gpufleet.on_node.common import (
    change_files,
    change_marks,
    linux_facts,
    stages,
    unit_journal,
)
from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.commands import refusal_of, run
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.common.stage_units import is_stage_unit
from gpufleet.on_node.common.systemctl import properties
from gpufleet.on_node.serving import endpoints, questions
from gpufleet.on_node.serving.unit_command import command, pairs, serve, value

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# One stage: systemctl, the journal, and three requests of 5 s; a completion has 60 s more, and
# those by its adapters together as many.
STAGE_SECONDS = 25
GPU_SECONDS = 10
HEALTH_SECONDS = 2  # of up to eight engines, one after another
# Log lines of a server that starts or has died: its first error may be some hundred lines back.
LINES = 300
# Characters of a line. Two lives of eight stages stay below 8 MiB, the most read from a node.
CHARACTERS = 1000
# Starts and ends of a unit that are looked at. A start and a failed end are six lines.
EVENTS = 40

# systemd's catalogue of messages (sd-messages.h; systemd.catalog of release 252). Those of systemd
# itself, about the unit that its field UNIT names.
WHAT = {
    "7d4958e842da4a758f6c1cdc7b36dcc5": "starts",
    "39f53479d3a045ac8e11786248231fbf": "started",
    "de5b426a63be47a7b6ac3eaac82e2f6f": "stops",
    "9d1aaa27d60140bd96365438aad20286": "stopped",
    "98e322203f7a4ed290d09fe03c09fe15": "exited",
    "7ad2d189f7e94e70a38c781354912448": "succeeded",
    "d9b373ed55a64feb8242e02dbe79a49c": "failed",
    "fe6faa94e7774663a0da52717891d8ef": "out of memory",
    "5eb03494b6584870a536b337290809b3": "restarts",
}
ENDS = ("exited", "succeeded", "failed", "out of memory", "stopped", "restarts")
DETAILS = ("EXIT_CODE", "EXIT_STATUS", "UNIT_RESULT")

API_KEY = "api-key"
GUARD = "gpufleet_guard.Guard"
FINGERPRINT = re.compile(r"printf %%s ([0-9A-Za-z]+) > /run/gpufleet/started/")


def main() -> None:
    """Print the document."""
    watch = Watch()
    found = read(units)
    names = [] if is_missing(found) else found
    seconds = STAGE_SECONDS + 2 * endpoints.COMPLETION_SECONDS * bool(PARAMETERS.get("completion"))
    for name in names:
        watch.ask(name, partial(stage, name), seconds)
    watch.ask("gpus", indices, GPU_SECONDS)
    answers = watch.answers("gpus", *names)
    watch.stop()
    document = {
        "schema": 1,
        "boot_id": read(
            lambda: linux_facts.line("/proc/sys/kernel/random/boot_id").replace("-", "")
        ),
        "clock": time.time(),
        "gpus": answers["gpus"],
        "change": {
            "lock": read(change_files.document, change_files.LOCK),
            "cordon": read(change_files.document, change_files.CORDON),
            "drained": read(change_marks.drain_marks),
        },
        "stages": [{"unit": name, **answers[name]} for name in names] or found,
    }
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def units() -> list[str]:
    """Return the names of units that may be gpufleet's stages."""
    if not os.path.isdir(linux_facts.ROOT + stages.UNITS):
        return []
    return [name for name in linux_facts.directory_names(stages.UNITS) if is_stage_unit(name)]


def stage(unit: str) -> dict[str, Any]:
    """Return the state of one stage."""
    said = stages.stage(unit)
    if "model" not in said:
        return said
    text = linux_facts.line(stages.UNITS + "/" + unit)
    words = command(text)
    server = serve(words)
    name = said["model"] + "-" + str(said["replica"])
    key_file = dict(unit_journal.CREDENTIAL.findall(text)).get(API_KEY)
    served_name = value(server, "--served-model-name") or ""
    place = endpoint(server, said["port"])
    others = [endpoint(server, port) for port in engines(server, said["port"])]
    known = unit_journal.secret_redactor(unit_journal.secrets(unit_journal.unit_text(unit)))

    def hide(said: str) -> str:
        return known(said)[:CHARACTERS]

    endpoints.PARAMETERS["journal"] = LINES
    seen = look(unit, place, served_name, key_file, server)
    happened = read(events, unit)
    life = seen.get("unit", {}).get("InvocationID")
    return {
        **{key: said[key] for key in ("model", "replica", "rank", "port", "gpus")},
        "kind": questions.kind_of(text),
        "release": next(iter(stages.RELEASE.findall(text)), ""),
        "nodes": list(members(words)),
        "served_name": served_name,
        "adapters": adapters(server),
        "adapters_named": not any(word.startswith("{") for word in lora_module_words(server)),
        "url": place,
        "keyed": key_file is not None,
        "fingerprint": next(iter(FINGERPRINT.findall(text)), None),
        "seen": hide_secrets(seen, hide),
        "engines": {
            each: endpoints.request(each + "/health", HEALTH_SECONDS) for each in others if each
        },
        "since": read(state_since, unit),
        "state": hide_secrets(read(unit_journal.state, name), hide),
        "events": happened,
        "before": hide_secrets(read(previous_log, happened, life), hide),
    }


def look(
    unit: str, place: str | None, served_name: str, key_file: str | None, server: list[str]
) -> dict[str, Any]:
    """Return on_node/serving/endpoints.py's result; without an endpoint, only the unit's state."""
    if place is None:
        properties = endpoints.unit_state(unit)
        life = properties.get("InvocationID")
        return {
            "unit": properties,
            "started": endpoints.started_with(unit),
            "journal": endpoints.journal(unit, life, LINES),
        }
    asked = {
        "unit": unit,
        "url": place,
        "served_name": served_name,
        "key_file": key_file and linux_facts.ROOT + key_file,
        "guarded": is_guarded(server),
        "completion": bool(PARAMETERS.get("completion")),
        "adapters": adapters(server),
    }
    return endpoints.stage(asked)


def hide_secrets(said: Any, hide: Callable[[str], str]) -> Any:
    """Return a JSON value with secrets redacted."""
    if isinstance(said, str):
        return hide(said)
    if isinstance(said, list):
        return [hide_secrets(each, hide) for each in said]
    if isinstance(said, dict):
        return {key: hide_secrets(each, hide) for key, each in said.items()}
    return said


# --- what the unit's file says


def adapters(server: list[str]) -> list[str]:
    """Return the names of the adapters that a server loads with `--lora-modules NAME=PATH ...`."""
    pairs = [word.partition("=") for word in lora_module_words(server) if not word.startswith("{")]
    return [name for name, equals, _ in pairs if equals]


def lora_module_words(server: list[str]) -> list[str]:
    """Return the words after `--lora-modules`; an operator's own may be JSON objects."""
    found: list[str] = []
    if "--lora-modules" in server:
        for word in server[server.index("--lora-modules") + 1 :]:
            if word.startswith("-"):
                break
            found.append(word)
    return found


def endpoint(server: list[str], port: int) -> str | None:
    """Return a server's address on this node, or None if it has no endpoint."""
    if not server or "--headless" in server:
        return None
    host = value(server, "--host") or "127.0.0.1"
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return "http://%s:%s" % ("[%s]" % host if ":" in host else host, port)


def is_guarded(server: list[str]) -> bool:
    """Return whether a server loads gpufleet's guard; servers of older releases do not."""
    return value(server, "--middleware") == GUARD


def engines(server: list[str], port: int) -> list[int]:
    """
    Return the ports of a node's other engines, if each engine has its own server.

    vLLM's --data-parallel-multi-port-external-lb assigns the ports after the first one.
    """
    if "--data-parallel-multi-port-external-lb" not in server:
        return []
    local = value(server, "--data-parallel-size-local") or "1"
    return [port + number for number in range(1, int(local))]


def members(words: list[str]) -> Iterator[str]:
    """Yield the names of a replica's nodes by rank, from `--node NAME=ADDRESS` of rank.py."""
    for word, following in pairs(words):
        if word == "--":
            return
        if word == "--node":
            yield following.partition("=")[0]


# --- what systemd and the driver say


def state_since(unit: str) -> float:
    """Return when a unit entered its current state, in seconds since 1970."""
    names = "StateChangeTimestampMonotonic,ActiveEnterTimestampMonotonic,ActiveState"
    output = run("systemctl", "show", "--property=" + names, "--", unit, seconds=10)
    if output.status != 0:
        raise refusal_of("systemctl", output)
    known = properties(output.out)
    active = known.get("ActiveState") == "active"
    name = "ActiveEnterTimestampMonotonic" if active else "StateChangeTimestampMonotonic"
    at = int(known.get(name) or 0)
    if not at:
        raise CannotRead("absent", detail=name)
    # By the node's clock as it is now: a clock that was set since does not move the past.
    return round(time.time() - time.clock_gettime(time.CLOCK_MONOTONIC) + at / 1e6, 3)


def events(unit: str) -> list[dict[str, Any]]:
    """Return the last starts and ends of a unit from systemd's journal, oldest first."""
    matches = ["_PID=1", "UNIT=" + unit, *("MESSAGE_ID=" + each for each in WHAT)]
    fields = "MESSAGE_ID,INVOCATION_ID,%s" % ",".join(DETAILS)
    entries = unit_journal.journal("--lines=%d" % EVENTS, *matches, fields=fields)
    return [read_event(entry) for entry in entries if entry.get("MESSAGE_ID") in WHAT]


def read_event(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a systemd journal entry, with `at` in seconds and the invocation id as `life`."""
    return {
        "at": int(entry.get("__REALTIME_TIMESTAMP") or 0) / 1e6,
        "boot": entry.get("_BOOT_ID"),
        "life": entry.get("INVOCATION_ID"),
        "what": WHAT[entry["MESSAGE_ID"]],
        **{name.lower(): entry[name] for name in DETAILS if name in entry},
        **(
            {"signal": signal_name(entry)} if entry.get("EXIT_CODE") in ("killed", "dumped") else {}
        ),
    }


def signal_name(entry: dict[str, Any]) -> str:
    """Return the signal that ended a process, for example KILL, or its number if it has no name."""
    status = str(entry.get("EXIT_STATUS"))
    with suppress(ValueError):
        return signal.Signals(int(status)).name[3:]
    return status


def previous_log(happened: Any, life: str | None) -> list[str]:
    """Return the last lines of a unit's run before the current one."""
    if is_missing(happened):
        raise CannotRead("absent")
    lives = [each["life"] for each in happened if each["what"] in ENDS and each["life"]]
    earlier = [each for each in lives if each != life]
    return endpoints.journal("", earlier[-1], LINES) if earlier else []


def indices() -> dict[str, int]:
    """Return NVML's index of each GPU by its UUID."""
    query = ("--query-gpu=uuid,index", "--format=csv,noheader")
    output = run("nvidia-smi", *query, seconds=GPU_SECONDS - 2)
    if output.status != 0:
        raise refusal_of("nvidia-smi", output)
    pairs = (row.split(",") for row in output.out.splitlines() if row.count(",") == 1)
    return {uuid.strip(): int(index) for uuid, index in pairs}


if __name__ == "__main__":
    main()

"""RUNS ON THE NODE: does each endpoint answer, and what does its unit say?

Takes (JSON header `PARAMETERS`):
  stages   [{id, unit, url, served_name, key_file or null, completion: bool}]
  metrics  [{id, unit, url, families: [name, ...]}]
  journal  lines of each unit's journal to bring back, from the unit's present start only
Prints one JSON document {"schema": 1, "stages": {id: ...}, "metrics": {id: ...}}.

It reads; it changes nothing. The API key is read here, from the node's own root-only file, so that
it never travels. Python 3.8, standard library.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any, Callable

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# One request's deadline in seconds. A frozen engine accepts connections and never answers, so no
# request may wait longer; a 1-token completion of a loaded model takes well under a second, on the
# CPU build under load up to 10 (measured).
HEALTH_SECONDS = 5
COMPLETION_SECONDS = 60
UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "NRestarts",
    "ExecMainStatus",
    "InvocationID",
)


def run(*argv: str) -> tuple[int | None, str]:
    """Return (exit status, standard output); (None, reason) if it could not run or end in time."""
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def unit_state(unit: str) -> dict[str, str]:
    """Return systemd's properties of one unit, or {"error": reason}."""
    status, text = run("systemctl", "show", "-p", ",".join(UNIT_PROPERTIES), "--", unit)
    if status != 0:
        return {"error": text}
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def started_with(unit: str) -> str | None:
    """Return the fingerprint that the unit's process was started with; None if none was written."""
    try:
        with open("/run/gpufleet/started/" + unit, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def journal(unit: str, invocation: str | None, lines: int) -> list[str]:
    """Return the last lines that the unit wrote since its present (or last) start."""
    if not lines:
        return []
    match = ["_SYSTEMD_INVOCATION_ID=" + invocation] if invocation else ["-u", unit]
    status, text = run("journalctl", "--no-pager", "-q", "-o", "cat", "-n", str(lines), *match)
    return text.splitlines() if status == 0 else []


def request(
    url: str, seconds: float, key: str | None = None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return {"status": HTTP status, "body": text} or {"error": why there was no answer}."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    data = None if body is None else json.dumps(body).encode()
    # No proxy: the endpoint is on this node.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, headers), timeout=seconds) as answer:
            return {
                "status": answer.status,
                "body": answer.read(4 << 20).decode("utf-8", "replace"),
            }
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": error.read(2000).decode("utf-8", "replace")}
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, getattr(error, "reason", error))}


def read_key(path: str | None) -> str | None:
    """Return the key, or None without a file; raises OSError when it should be there and is not."""
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def parsed(answer: dict[str, Any]) -> Any:
    """Return the JSON of a 200 answer, or None."""
    if answer.get("status") != 200:
        return None
    try:
        return json.loads(answer["body"])
    except ValueError:
        return None


def stage(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what one stage's unit and endpoint say."""
    unit = unit_state(asked["unit"])
    seen: dict[str, Any] = {
        "unit": unit,
        "started": started_with(asked["unit"]),
        "journal": journal(asked["unit"], unit.get("InvocationID"), PARAMETERS.get("journal", 0)),
    }
    if unit.get("ActiveState") not in ("active", "reloading"):
        return seen
    seen["health"] = request(asked["url"] + "/health", HEALTH_SECONDS)
    if seen["health"].get("status") != 200:
        return seen
    try:
        key = read_key(asked.get("key_file"))
    except OSError as error:
        seen["key_error"] = str(error)
        return seen
    models = request(asked["url"] + "/v1/models", HEALTH_SECONDS, key)
    document = parsed(models)
    if document is None:
        seen["models_error"] = models
    else:
        seen["models"] = [model.get("id") for model in document.get("data", [])]
    if key:
        seen["without_key"] = request(asked["url"] + "/v1/models", HEALTH_SECONDS).get("status")
    if asked.get("completion"):
        answer = request(
            asked["url"] + "/v1/completions",
            COMPLETION_SECONDS,
            key,
            {
                "model": asked["served_name"],
                "prompt": asked.get("prompt", "Hello"),
                "max_tokens": asked.get("max_tokens", 1),
                "temperature": 0,
            },
        )
        document = parsed(answer)
        if document is None:
            seen["completion_error"] = answer
        else:
            seen["completion"] = document["choices"][0].get("text")
            seen["completion_tokens"] = (document.get("usage") or {}).get("completion_tokens")
    return seen


def metrics(asked: dict[str, Any]) -> dict[str, Any]:
    """Return which of the wanted metric families an exporter serves."""
    seen: dict[str, Any] = {"unit": unit_state(asked["unit"]) if asked.get("unit") else None}
    answer = request(asked["url"], HEALTH_SECONDS)
    seen["status"] = answer.get("status")
    if answer.get("status") != 200:
        seen["error"] = answer.get("error") or answer.get("body")
        return seen
    names = set()
    for line in answer["body"].splitlines():
        if line and not line.startswith("#"):
            names.add(line.split("{", 1)[0].split(" ", 1)[0])
    seen["missing"] = [name for name in asked.get("families", []) if name not in names]
    return seen


def guarded(
    function: Callable[[dict[str, Any]], dict[str, Any]], asked: dict[str, Any]
) -> dict[str, Any]:
    """Return the function's answer, or what went wrong in it: one endpoint never hides another."""
    try:
        return function(asked)
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, error)}


def main() -> None:
    """Print the document."""
    document = {
        "schema": 1,
        "stages": {asked["id"]: guarded(stage, asked) for asked in PARAMETERS.get("stages", [])},
        "metrics": {
            asked["id"]: guarded(metrics, asked) for asked in PARAMETERS.get("metrics", [])
        },
    }
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

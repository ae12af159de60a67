"""RUNS ON THE NODE: query each endpoint and its unit.

Takes (JSON header `PARAMETERS`):
  stages   [{id, unit, url, served_name, key_file or null, guarded: bool, completion: bool}];
             `guarded`: the server requires the key on every path but a few, not on /v1 alone;
             `completion`: send the request for its kind of model (questions.py), also by the names
             of its LoRA `adapters`, if it has any
  metrics  [{id, unit, url, families: [name, ...], certificate_sha256, username, password,
             loopback_port}], the last four null where they have no meaning
  journal  the most lines of a unit's journal to return, from its present start only, and only if
           something is wrong: the output of a server that answers is not read
Prints one JSON document {"schema": 1, "stages": {id: ...}, "metrics": {id: ...}}.

Read-only. The API key is read here, from the node's own root-only file, so that it never travels.
An exporter's password, of which the node has a hash alone, came with this program on standard
input; it is sent only to the holder of the deployed certificate. Python 3.8, standard library.
"""

from __future__ import annotations

import base64
import json
import select
import subprocess
import sys
import time
from functools import partial
from typing import Any, Callable, Iterable

from gpufleet.on_node.common.http import Exchange
from gpufleet.on_node.common.systemctl import show_each
from gpufleet.on_node.serving import questions

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# One request's deadline in seconds. A frozen engine accepts connections and never answers, so no
# request may wait longer; a 1-token completion of a loaded model takes well under a second, on the
# CPU build under load up to 10 (measured).
HEALTH_SECONDS = 5
COMPLETION_SECONDS = 60
UNAUTHORIZED = 401
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
    """
    Return (exit status, standard output), or (None, reason) if it could not run or was too slow.
    """
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def unit_state(unit: str) -> dict[str, str]:
    """Return systemd's properties of one unit, or {"error": reason}."""
    return unit_states([unit])[unit]


def unit_states(units: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return systemd's properties of each unit, or {"error": reason}."""
    names = sorted(set(units))
    if not names:
        return {}
    status, text = run("systemctl", "show", "-p", ",".join(UNIT_PROPERTIES), "--", *names)
    # It answers in the order asked, maybe by other names.
    shown = show_each(text)
    if status != 0 or len(shown) != len(names):
        if len(names) > 1:  # whose fault that was
            return {name: unit_state(name) for name in names}
        return {names[0]: {"error": text}}
    return dict(zip(names, shown))  # Python 3.8


def started_with(unit: str) -> str | None:
    """Return the fingerprint with which the unit's process was started, or None if not recorded."""
    try:
        with open("/run/gpufleet/started/" + unit, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def journal(unit: str, invocation: str | None, lines: int) -> list[str]:
    """Return the last lines that the unit wrote since its current (or last) start."""
    if not lines:
        return []
    match = ["_SYSTEMD_INVOCATION_ID=" + invocation] if invocation else ["-u", unit]
    status, text = run("journalctl", "--no-pager", "-q", "-o", "cat", "-n", str(lines), *match)
    return text.splitlines() if status == 0 else []


def request(
    url: str, seconds: float, key: str | None = None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return {"status": HTTP status, "body": text}, or {"error": reason} without an answer."""
    return ask_without_tls(url, seconds, {"Authorization": "Bearer " + key} if key else {}, body)


def ask(url: str, seconds: float, key: str | None, put: questions.Question) -> dict[str, Any]:
    """Return a server's answer to a model kind's question, in the form of `request`."""
    headers = {**dict(put.headers), **({"Authorization": "Bearer " + key} if key else {})}
    return ask_without_tls(url + put.path, seconds, headers, put.body)


def ask_without_tls(
    url: str, seconds: float, headers: dict[str, str], body: dict[str, Any] | bytes | None = None
) -> dict[str, Any]:
    """Return the answer to a plain HTTP request without a proxy, in the form of `request`."""
    scheme, _, rest = url.partition("://")
    place, _, path = rest.partition("/")
    try:
        exchange = Exchange(
            scheme + "://" + place,
            "/" + path,
            time.monotonic() + seconds,
            body=body,
            headers=tuple(headers.items()),
        )
        while exchange.answer is None:
            left = max(0.0, exchange.deadline - time.monotonic())
            if exchange.wants_write:
                select.select([], [exchange], [], left)
            else:
                select.select([exchange], [], [], left)
            exchange.advance(time.monotonic())
        answer = exchange.answer
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, error)}
    if not answer.status:
        return {"error": "timed out" if answer.silent else answer.why}
    text = answer.body.decode("utf-8", "replace")
    return {"status": answer.status, "body": text if answer.status == 200 else text[:2000]}


def read_key(path: str | None) -> str | None:
    """Return the key, or None without a path. Raises `OSError` if a declared file is missing."""
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def parse_body(answer: dict[str, Any]) -> Any:
    """Return the JSON of an answer with status 200, or None."""
    if answer.get("status") != 200:
        return None
    try:
        return json.loads(answer["body"])
    except ValueError:
        return None


def stage(
    asked: dict[str, Any], unit: dict[str, str] | None = None, *, always: bool = True
) -> dict[str, Any]:
    """
    Return the state of one stage's unit and endpoint.

    `unit` is the unit's state. The journal is included `always`, or else only for a faulty stage.
    """
    unit = unit_state(asked["unit"]) if unit is None else unit
    seen = endpoint(asked, unit)
    if always or not is_healthy(asked, seen):
        lines = PARAMETERS.get("journal", 0)
        seen["journal"] = journal(asked["unit"], unit.get("InvocationID"), lines)
    return seen


def is_healthy(asked: dict[str, Any], seen: dict[str, Any]) -> bool:
    """Return whether a stage answers, and its unit has never restarted automatically."""
    names = {asked["served_name"], *asked.get("adapters", ())}
    answers = names <= set(seen.get("models", ()))
    completes = "completion" in seen or not asked.get("completion")
    completes = completes and all(
        answer.get("status") == 200 for answer in seen.get("adapters", {}).values()
    )
    return answers and completes and seen["unit"].get("NRestarts", "0") == "0"


def endpoint(asked: dict[str, Any], unit: dict[str, str]) -> dict[str, Any]:
    """Return a stage's state without its journal; `unit` is the unit's state."""
    seen: dict[str, Any] = {"unit": unit, "started": started_with(asked["unit"])}
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
    document = parse_body(models)
    if document is None:
        seen["models_error"] = models
    else:
        seen["models"] = [model.get("id") for model in document.get("data", [])]
    if key:
        seen["without_key"] = {
            "GET /v1/models": request(asked["url"] + "/v1/models", HEALTH_SECONDS).get("status")
        }
        if asked.get("guarded"):
            # The same inference by a path that vLLM's own key leaves open. An empty request: where
            # no server refuses it, it computes nothing.
            said = request(asked["url"] + "/invocations", HEALTH_SECONDS, body={})
            seen["without_key"]["POST /invocations"] = said.get("status")
    if asked.get("completion"):
        seen.update(answer_as(asked, asked["served_name"], key, COMPLETION_SECONDS))
        if asked.get("adapters") and "completion" in seen:
            seen["adapters"] = dict(adapters(asked, key, seen.get("models", ())))
    return seen


def answer_as(asked: dict[str, Any], name: str, key: str | None, seconds: float) -> dict[str, Any]:
    """Return a server's answer under a model name to its kind's question, or the error."""
    kind, known = questions.expected_of_unit(asked["unit"])
    sees = known.sees and name == asked["served_name"]
    said = []
    for each in (kind, questions.PICTURE) if sees else (kind,):
        put = questions.question(each, name)
        answer = ask(asked["url"], seconds, key, put)
        if answer.get("status") != 200:
            return {"kind": each, "completion_error": answer}
        judged = questions.judge(each, put, parse_body(answer), known)
        if judged.problem:
            return {"kind": each, "completion_error": {"error": judged.problem}}
        said.append(judged.text)
    return {"kind": kind, "completion": said[0]}


def adapters(asked: dict[str, Any], key: str | None, listed: Iterable[str]) -> Iterable[Any]:
    """Yield each listed adapter with its answer; all share the deadline of one request."""
    end = time.monotonic() + COMPLETION_SECONDS
    for name in asked["adapters"]:
        if name in listed:
            left = end - time.monotonic()
            said: dict[str, Any] = {"completion_error": {"error": "timed out"}}
            if left > 0:
                said = answer_as(asked, name, key, left)
            # What it says has no use here; that it is an answer counts.
            yield name, said.get("completion_error", {"status": 200})


def metrics(asked: dict[str, Any], unit: dict[str, str] | None) -> dict[str, Any]:
    """Return the metric families that an exporter lacks, and whether it is protected."""
    seen: dict[str, Any] = {"unit": unit}
    answer = exporter_answer(asked, asked.get("password"))
    seen["status"] = answer.get("status")
    if asked.get("loopback_port"):
        seen["exposed"] = exposed_addresses(asked["loopback_port"])
    if answer.get("status") != 200:
        seen["error"] = answer.get("error") or answer.get("body")
        return seen
    if asked.get("password"):
        seen["without_password"] = exporter_answer(asked, None).get("status")
    names = set()
    for line in answer["body"].splitlines():
        if line and not line.startswith("#"):
            names.add(line.split("{", 1)[0].split(" ", 1)[0])
    seen["missing"] = [name for name in asked.get("families", []) if name not in names]
    return seen


def exporter_answer(asked: dict[str, Any], password: str | None) -> dict[str, Any]:
    """Return an exporter's answer in the form of `request`."""
    headers = {}
    if password:
        pair = "%s:%s" % (asked["username"], password)
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    if not asked["url"].startswith("https:"):
        return ask_without_tls(asked["url"], HEALTH_SECONDS, headers)
    try:
        return ask_over_tls(asked, headers)
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, error)}


def ask_over_tls(asked: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """Return the answer over TLS. Errors are raised."""
    # 20 ms of a processor, on nodes whose exporters have no certificate for nothing.
    import hashlib
    import http.client
    import ssl
    from urllib.parse import urlsplit

    # Whom the certificate names is not asked: the node calls itself by another address. It has to
    # be the very one that was deployed, before anything is sent.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    address = urlsplit(asked["url"])
    connection = http.client.HTTPSConnection(
        address.hostname or "127.0.0.1", address.port, timeout=HEALTH_SECONDS, context=context
    )
    try:
        connection.connect()
        socket: Any = connection.sock
        shown = socket.getpeercert(binary_form=True) or b""
        if hashlib.sha256(shown).hexdigest() != asked.get("certificate_sha256"):
            return {"error": "a certificate other than the deployed one"}
        connection.request("GET", address.path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(16 << 20).decode("utf-8", "replace")
    finally:
        connection.close()
    return {"status": answer.status, "body": body if answer.status == 200 else body[:2000]}


def exposed_addresses(port: int) -> list[str] | None:
    """Return the addresses other than loopback that listen on a port, or None if unknown."""
    found = []
    try:
        for path in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(path, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
            for row in rows:
                # proc(5): the local address and port in hexadecimal; state 0A is LISTEN.
                address, _, at = row[1].partition(":")
                if row[3] == "0A" and int(at, 16) == port and not is_loopback(address):
                    found.append(address)
    except (OSError, ValueError, IndexError):
        return None
    return found


def is_loopback(address: str) -> bool:
    """Return whether an address in /proc/net/tcp or tcp6 (32-bit words, CPU order) is loopback."""
    words = [bytes.fromhex(address[at : at + 8]) for at in range(0, len(address), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    mapped = raw[:12] == b"\0" * 10 + b"\xff\xff"
    return (
        raw[:1] == b"\x7f"
        if len(raw) == 4
        else raw == b"\0" * 15 + b"\1" or (mapped and raw[12] == 127)
    )


def answer_or_error(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """
    Return the function's answer or its error, so that one failure does not hide other endpoints.
    """
    try:
        return function(*arguments)
    except Exception as error:
        return {"error": "%s: %s" % (type(error).__name__, error)}


def main() -> None:
    """Print the document."""
    stages, exporters = PARAMETERS.get("stages", []), PARAMETERS.get("metrics", [])
    units = unit_states(asked["unit"] for asked in [*stages, *exporters] if asked.get("unit"))
    document = {
        "schema": 1,
        "stages": {
            asked["id"]: answer_or_error(partial(stage, always=False), asked, units[asked["unit"]])
            for asked in stages
        },
        "metrics": {
            asked["id"]: answer_or_error(metrics, asked, units.get(asked.get("unit")))
            for asked in exporters
        },
    }
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

"""RUNS ON THE NODE: the journal of a stage's unit.

Takes (JSON header `PARAMETERS`):
  stage    id of the stage: llama-0
  lines    the most lines to return, the last ones
  ago      seconds: only lines that are younger; or
  at       seconds since 1970: only lines from then on; and of those
  cursor   only lines after this one
Prints one JSON document:
  schema   1
  here     ids of the stages that have a unit on this node
  rank     of this node in the stage; null: no unit here has it
  clock    the node's time, in microseconds since 1970
  lines    [[microseconds since 1970, PID, priority, message], ...], oldest first
  more     whether earlier lines were requested too, but exceed the limit
  cursor   of the last line; null: there is none
  clocks   {node: milliseconds that its clock is ahead} of the other ranks, as measured by this one
or `lines` as {"missing": reason}.

The unit's own output and systemd's messages. Read-only. The unit's secrets never leave the node: in
lines they are replaced by their names.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any, Callable, List

from gpufleet.on_node.common import linux_facts, stages
from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.commands import Output, run
from gpufleet.on_node.common.stage_units import unit_of

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# Below the caller's deadline. journalctl of a journal of 4 GB answers within 2 s.
SECONDS = 20
MESSAGE_CHARACTERS = 4000
# What is printed is below the 8 MiB that a node is listened to, also when JSON escapes all of it.
ALL_CHARACTERS = 1 << 20
# The longest line of journalctl that is read: a field has up to 64 MB, without --all up to 4 KB.
LINE_BYTES = 1 << 20
KEPT_BYTES = 16 << 20
FIELDS = "MESSAGE,PRIORITY,_PID"
STATE_BYTES = 1 << 20

# A secret shorter than that is no secret, and replacing it would tear lines apart.
SECRET_CHARACTERS = 8
SECRET_BYTES = 1 << 16
CREDENTIAL = re.compile(r"^LoadCredential=([\w.-]+):(/\S+)$", re.MULTILINE)
# The keys in a file of SGLang's `--config`, which is a credential as a whole.
IN_CONFIG = re.compile(r"^((?:admin-)?api-key):\s*[\"']?([^\s\"']+)", re.MULTILINE)
# What should be a credential and stands in the unit all the same: servers log both.
WRITTEN = (
    re.compile(r"^Environment=[\"']?(\w*(?:KEY|TOKEN|SECRET|PASSWORD))=([^\s\"']+)", re.MULTILINE),
    re.compile(r"(?:^|\s)--((?:admin-)?api-key)[\s=]+[\"']?([^\s\"']+)"),
)
# Secrets that are not in the unit: a header that a server logs, tokens of the Hugging Face Hub,
# keys of model services; keys by their names, which SGLang logs (`server_args=`) and answers
# (/server_info): as in gpufleet.redact.
KNOWN_SECRETS = (
    (
        re.compile(
            r"((?:api[_-]?key|keyfile[_-]password)\\{0,8}[\"']?\s{0,4}[=:]\s{0,4})"
            r"(?:'(?:[^'\\\n]|\\.)*'?|\"(?:[^\"\\\n]|\\.)*\"?"
            r"|\\{1,8}[\"'][^\"'\\\n]*\\{0,8}[\"']?)",
            re.IGNORECASE,
        ),
        r"\1<hidden>",
    ),
    (re.compile(r"(?i)(--(?:admin[_-])?api[_-]key[ =])[^\s\"'<-][^\s\"']{7,}"), r"\1<hidden>"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{8,}=*"), r"\1<hidden>"),
    (re.compile(r"\b(hf_|sk-)[A-Za-z0-9_-]{16,}"), r"\1<hidden>"),
)


def main() -> None:
    """Print the document."""
    unit = unit_of(PARAMETERS["stage"])
    document = {
        "schema": 1,
        "here": read(ids),
        "rank": read(rank, unit),
        "clock": int(time.time() * 1e6),
        **read_lines(unit),
        "clocks": read(clocks, PARAMETERS["stage"]),
    }
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def read_lines(unit: str) -> dict[str, Any]:
    """Return `lines`, `more` and `cursor`."""
    wanted = max(1, int(PARAMETERS.get("lines") or 1))
    try:
        # One more than wanted: whether it is there says whether something was left out.
        entries = journal(
            "--lines=%d" % (wanted + 1), *since_arguments(), "--unit=" + unit, fields=FIELDS
        )
    except CannotRead as error:
        return {"lines": error.missing, "more": False, "cursor": None}
    last = entries[-1].get("__CURSOR") if entries else None
    cursors = [entry.get("__CURSOR") for entry in entries]
    if PARAMETERS.get("cursor") in cursors:
        entries = entries[cursors.index(PARAMETERS["cursor"]) + 1 :]
    hide = secret_redactor(secrets(unit_text(unit)))
    lines = [line(entry, hide) for entry in entries[-wanted:]]
    kept = keep_last_lines(lines)
    return {
        "lines": kept,
        "more": len(entries) > wanted or len(kept) < len(entries),
        "cursor": last,
    }


def since_arguments() -> list[str]:
    """
    Return journalctl's arguments for the first entry.

    Not --after-cursor: with it, --lines selects the first entries, and with --reverse it selects
    the entries before the cursor.
    """
    if PARAMETERS.get("at") is not None:
        return ["--since=@%d" % PARAMETERS["at"]]
    if PARAMETERS.get("ago") is not None:  # by the node's own clock, which its lines have
        return ["--since=@%d" % (time.time() - PARAMETERS["ago"])]
    return []


def journal(*arguments: str, fields: str) -> list[dict[str, Any]]:
    """
    Return entries of the system's journal, oldest first.

    Raises `CannotRead` with `no_program`, `timeout`, `no_permission`, or `absent` if the node has
    no journal.
    """
    printed = Printed()
    # Backwards: with --since, --lines are otherwise the first ones (systemd 252).
    output = run(
        "journalctl", "--no-pager", "--reverse", "--output=json", "--output-fields=" + fields,
        *arguments, seconds=SECONDS, take=printed.take,
    )  # fmt: skip
    entries = [json.loads(text) for text in printed.lines if text.startswith(b"{")]
    if not entries:
        refuse(output)
    return entries[::-1]


class Printed:
    """The first lines of a program's output, up to a size limit."""

    def __init__(self) -> None:
        self.lines: List[bytes] = []
        self.bytes = 0
        self.begun = b""
        self.skips = False

    def take(self, piece: bytes) -> None:
        """Add the next piece of output."""
        *whole, self.begun = (self.begun + piece).split(b"\n")
        for line in whole:
            if not self.skips and self.bytes < KEPT_BYTES:
                self.lines.append(line)
                self.bytes += len(line)
            self.skips = False
        if len(self.begun) > LINE_BYTES:
            self.begun, self.skips = b"", True


def refuse(output: Output) -> None:
    """Raise `CannotRead` if entries may exist that could not be read."""
    if "insufficient permissions" in output.err or "not seeing messages from" in output.err:
        raise CannotRead("no_permission", detail="the journal needs root, or group systemd-journal")
    if "No journal files were found" in output.err:
        raise CannotRead("absent", detail="this node keeps no journal")
    if output.status not in (0, 1):  # 1: nothing matched
        said = output.err.strip().splitlines()
        raise CannotRead("error", detail="journalctl: %s" % (said[-1] if said else output.status))


def line(entry: dict[str, Any], hide: Callable[[str], str]) -> list[Any]:
    """Return an entry's time, PID, priority and redacted message."""
    return [
        int(entry.get("__REALTIME_TIMESTAMP") or 0),
        number(entry.get("_PID")),
        number(entry.get("PRIORITY")),
        hide(message(entry))[:MESSAGE_CHARACTERS],
    ]


def message(entry: dict[str, Any]) -> str:
    """
    Return an entry's message, decoding journalctl's list of numbers for bytes that are not UTF-8.
    """
    said = entry.get("MESSAGE")
    if isinstance(said, list):  # also when a field stands in an entry twice
        numbers = all(isinstance(each, int) for each in said)
        text = bytes(said).decode("utf-8", "replace") if numbers else "\n".join(map(str, said))
    else:
        text = "(a line too long for the journal's reader)" if said is None else str(said)
    return text


def number(value: Any) -> int | None:
    """Return the integer in a text field of the journal, or None."""
    return int(value) if str(value).isdigit() else None


def keep_last_lines(lines: list[list[Any]]) -> list[list[Any]]:
    """Return the last lines within the limit of total length."""
    total, first = 0, len(lines)
    while first and total + len(lines[first - 1][3]) <= ALL_CHARACTERS:
        first -= 1
        total += len(lines[first][3])
    return lines[first:]


# --- the node's stages


def ids() -> list[str]:
    """Return the ids of the stages that have a unit here."""
    return [each["unit"][5:-8] for each in stages.stages() if "model" in each]


def rank(unit: str) -> int:
    """Return this node's rank from the unit."""
    if not re.fullmatch(r"[\w.-]+", unit):
        raise CannotRead("absent", detail=unit)
    return int(stages.stage(unit)["rank"])


def state(stage: str) -> dict[str, Any]:
    """Return the state of this node's rank of a replica (on_node/rank/state.py)."""
    with open("%s/run/vllm/%s/rank.json" % (linux_facts.ROOT, stage), encoding="utf-8") as file:
        document = json.loads(file.read(STATE_BYTES))
    if not isinstance(document, dict) or document.get("schema") != 1:
        raise CannotRead("version", detail="rank.json is from another release of gpufleet")
    return document


def clocks(stage: str) -> dict[str, float]:
    """Return the clock offsets of the other ranks' nodes in milliseconds, positive if ahead."""
    peers = state(stage).get("peers") or {}
    return {
        name: peer["clock_offset_ms"]
        for name, peer in peers.items()
        if isinstance(peer.get("clock_offset_ms"), (int, float))
    }


# --- secrets


def unit_text(unit: str) -> str:
    """Return the text of a unit's file and its drop-ins, or "" if none can be read."""
    paths = [stages.UNITS + "/" + unit]
    for folder in (stages.UNITS, "/run/systemd/system"):
        names = read(linux_facts.directory_names, "%s/%s.d" % (folder, unit))
        if not is_missing(names):
            paths += ["%s/%s.d/%s" % (folder, unit, name) for name in sorted(names)]
    texts = [read(linux_facts.line, path) for path in paths]
    return "\n".join(str(text) for text in texts if not is_missing(text))


def secrets(text: str) -> dict[str, str]:
    """Return {secret: its name} for a unit's readable secrets."""
    given = [(name, read(secret, path)) for name, path in CREDENTIAL.findall(text)]
    for _, content in tuple(given):
        given += IN_CONFIG.findall(content) if isinstance(content, str) else ()
    for pattern in WRITTEN:
        given += pattern.findall(text)
    return {
        content: name
        for name, content in given
        if isinstance(content, str) and len(content) >= SECRET_CHARACTERS
    }


def secret(path: str) -> str:
    """Return a credential file's text."""
    with open(linux_facts.ROOT + path, encoding="utf-8", errors="replace") as file:
        return file.read(SECRET_BYTES).strip()


def secret_redactor(known: dict[str, str]) -> Callable[[str], str]:
    """Return a function that replaces secrets in a text with their names."""

    def hide(text: str) -> str:
        for content, name in known.items():
            text = text.replace(content, "<%s>" % name)
        for pattern, instead in KNOWN_SECRETS:
            text = pattern.sub(instead, text)
        return text

    return hide


if __name__ == "__main__":
    main()

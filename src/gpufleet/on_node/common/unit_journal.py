"""RUNS ON THE NODE: read the journal of a stage's unit.

Takes (JSON header `PARAMETERS`):
  stage    id of the stage, for example llama-0
  lines    the most lines to return; the last lines are returned
  ago      only lines of the last `ago` seconds
  at       only lines from this time on, in seconds since 1970; not together with `ago`
  cursor   of the lines above, only those after the line with this cursor
Prints one JSON document:
  schema   1
  here     ids of the stages that have a unit on this node
  rank     this node's rank in the stage; missing if the stage has no unit here
  clock    the node's time, in microseconds since 1970
  lines    [[microseconds since 1970, PID, priority, message], ...], oldest first; if the journal
           cannot be read, {"missing": reason}
  more     whether earlier lines match too, but were left out because of a limit
  cursor   the cursor of the last line; null if there is no line
  clocks   {node: milliseconds that its clock is ahead of this node's} for the nodes of the other
           ranks, as measured by this rank

The lines are the unit's own output and systemd's messages about the unit. The program changes
nothing. The unit's secrets never leave the node, because each secret in a line is replaced with its
name.
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

# Less than the caller's deadline. For a journal of 4 GB, journalctl answers within 2 s.
SECONDS = 20
MESSAGE_CHARACTERS = 4000
# The caller reads at most 8 MiB from a node. Even if JSON escapes every character, the output is
# smaller than that.
ALL_CHARACTERS = 1 << 20
# The longest line of journalctl that is read. A field has up to 64 MB, or up to 4 KB without --all.
LINE_BYTES = 1 << 20
KEPT_BYTES = 16 << 20
FIELDS = "MESSAGE,PRIORITY,_PID"
STATE_BYTES = 1 << 20

# Shorter texts are not secrets, and replacing them would make lines unreadable.
SECRET_CHARACTERS = 8
SECRET_BYTES = 1 << 16
CREDENTIAL = re.compile(r"^LoadCredential=([\w.-]+):(/\S+)$", re.MULTILINE)
# The keys in the file of SGLang's `--config`. The whole file is a credential.
IN_CONFIG = re.compile(r"^((?:admin-)?api-key):\s*[\"']?([^\s\"']+)", re.MULTILINE)
# Secrets that are written in the unit although they should be credentials: environment variables
# and arguments. Servers log both.
WRITTEN = (
    re.compile(r"^Environment=[\"']?(\w*(?:KEY|TOKEN|SECRET|PASSWORD))=([^\s\"']+)", re.MULTILINE),
    re.compile(r"(?:^|\s)--((?:admin-)?api-key)[\s=]+[\"']?([^\s\"']+)"),
)
# Secrets that are not in the unit, as in gpufleet.redact:
# - a header that a server logs
# - tokens of the Hugging Face Hub, and keys of model services
# - values of fields whose name is a key's name, because SGLang logs them (`server_args=`) and
#   returns them (/server_info)
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
        # Request one line more than wanted. If there is such a line, lines were left out.
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
    Return journalctl's arguments that select the first entry.

    --after-cursor is not used. With it, --lines selects the first entries instead of the last, and
    with --reverse as well, journalctl selects the entries before the cursor.
    """
    if PARAMETERS.get("at") is not None:
        return ["--since=@%d" % PARAMETERS["at"]]
    if PARAMETERS.get("ago") is not None:  # the lines have the time of the node's clock
        return ["--since=@%d" % (time.time() - PARAMETERS["ago"])]
    return []


def journal(*arguments: str, fields: str) -> list[dict[str, Any]]:
    """
    Return entries of the system's journal, oldest first.

    Raises `CannotRead` with `no_program`, `timeout`, `no_permission`, or `absent` if the node has
    no journal.
    """
    printed = Printed()
    # The order is reversed, because with --since, --lines otherwise selects the first lines
    # (systemd 252).
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
    """Raise `CannotRead` if the journal may have entries that could not be read."""
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
    Return an entry's message as text.

    If a message is not UTF-8, journalctl prints its bytes as a list of numbers, which is decoded.
    """
    said = entry.get("MESSAGE")
    if isinstance(said, list):  # also if an entry has the field twice
        numbers = all(isinstance(each, int) for each in said)
        text = bytes(said).decode("utf-8", "replace") if numbers else "\n".join(map(str, said))
    else:
        text = "(a line too long for the journal's reader)" if said is None else str(said)
    return text


def number(value: Any) -> int | None:
    """Return the integer in a text field of the journal, or None."""
    return int(value) if str(value).isdigit() else None


def keep_last_lines(lines: list[list[Any]]) -> list[list[Any]]:
    """Return the last lines that are together within the limit of length."""
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
    """Return this node's rank in the stage, from the unit's file."""
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
    """
    Return {node: its clock's offset in milliseconds} for the other ranks of the stage.

    An offset is positive if the other node's clock is ahead of this node's.
    """
    peers = state(stage).get("peers") or {}
    return {
        name: peer["clock_offset_ms"]
        for name, peer in peers.items()
        if isinstance(peer.get("clock_offset_ms"), (int, float))
    }


# --- secrets


def unit_text(unit: str) -> str:
    """Return the text of a unit's file and of its drop-ins, or "" if no file can be read."""
    paths = [stages.UNITS + "/" + unit]
    for folder in (stages.UNITS, "/run/systemd/system"):
        names = read(linux_facts.directory_names, "%s/%s.d" % (folder, unit))
        if not is_missing(names):
            paths += ["%s/%s.d/%s" % (folder, unit, name) for name in sorted(names)]
    texts = [read(linux_facts.line, path) for path in paths]
    return "\n".join(str(text) for text in texts if not is_missing(text))


def secrets(text: str) -> dict[str, str]:
    """Return {secret: its name} for the secrets of a unit that this program can read."""
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

"""Decide whether a line was answered, has failed, or must be sent again. Pure.

A line of the output has OpenAI's format: `{"id", "custom_id", "response", "error"}`. A request that
the server refuses (4xx) counts as answered. A request is sent again if the server has no capacity
(429, 503) or if the request was lost.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gpufleet.batch.batch_input import Line

Kind: TypeAlias = Literal["answer", "busy", "lost", "broken", "refused"]

MOST_TRIES = {"busy": 50, "lost": 5, "broken": 5}
"""
The maximum number of tries for a line that gets no answer.

If a line kills its server, it is sent to 5 servers and not to all. If a line is refused because
there is no capacity, it waits up to a minute before each next try.
"""
LONGEST_BACK_OFF_SECONDS = 60.0
_BUSY = frozenset({408, 425, 429, 503})
_LOST = frozenset({502, 504})
_NUMBERS = ("embedding", "probs", "data", "relevance_score", "score")
"""Keys in the rows of an answer whose values are numbers or lists of numbers."""
_REFUSED = frozenset({401, 403})
"""HTTP statuses for a key that is refused. The server would send them for every line."""


@dataclass(frozen=True)
class Reply:
    """The result of one request."""

    status: int = 0
    """The HTTP status, or 0 if there was no answer."""
    body: bytes = field(default=b"", repr=False)
    request_id: str = ""
    retry_after: float = 0.0
    problem: str = ""
    """Why there is no status: `refused`, `connection lost`, `timeout` or `answer too large`."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on the server's reply to a line."""

    kind: Kind
    """
    The kind of outcome:

    - `answer`: the line was answered
    - `busy`: the server did not accept the line
    - `lost`: no answer arrived
    - `broken`: the server failed on the line
    - `refused`: the server refuses the key, so it accepts no line
    """
    status: int
    code: str
    """The error code, for example `400` or `connection lost`. For an answer it is ""."""
    document: Any = field(default=None, repr=False)
    """The body of the answer."""
    request_id: str = ""

    @property
    def holds(self) -> bool:
        """Return whether other lines must wait too, because the server is full or unreachable."""
        return self.kind in ("busy", "lost")


def judge(reply: Reply) -> Verdict:
    """Return the verdict on a reply."""
    if not reply.status:
        # No connection was made, so the line was not sent.
        kind: Kind = "busy" if reply.problem == "refused" else "lost"
        if reply.problem == "answer too large":
            kind = "answer"
        return Verdict(kind, 0, reply.problem)
    status = reply.status
    code = "" if status == 200 else str(status)
    document = _parse(reply.body)
    if status == 200 and not isinstance(document, dict):
        return Verdict("broken", status, "not JSON")
    if status == 200 and _has_no_number(document):
        return Verdict("broken", status, "not a number")
    kind = "answer"
    if status in _REFUSED:
        kind = "refused"
    elif status in _BUSY:
        kind = "busy"
    elif status in _LOST:
        kind = "lost"
    elif status >= 500 or (status != 200 and status < 400):
        kind = "broken"
    return Verdict(kind, status, code, document, reply.request_id or _id_of(document))


def back_off_seconds(tries: int) -> float:
    """Return how many seconds to wait before the next try: 1, 2, 4, ... and at most 60."""
    return float(min(LONGEST_BACK_OFF_SECONDS, 2.0 ** min(tries - 1, 10)))


def output_line(line: Line, verdict: Verdict) -> dict[str, Any]:
    """Return the line of the output for a line of the input."""
    response = error = None
    if verdict.status:
        body = verdict.document
        response = {
            "status_code": verdict.status,
            "request_id": verdict.request_id,
            "body": body if body is not None else {},
        }
    if verdict.code:
        error = {"code": verdict.code, "message": _message(verdict)}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


def _has_no_number(document: Any) -> bool:
    """Return whether a vector or a score has a null. vLLM writes null for NaN and infinity."""
    rows = [document.get(key) for key in ("data", "results")]
    found = [row for part in rows if isinstance(part, list) for row in part]
    return any(
        _has_null(row[key])
        for row in found
        if isinstance(row, dict)
        for key in _NUMBERS
        if key in row
    )


def _has_null(value: Any) -> bool:
    if isinstance(value, list):
        return None in value or any(_has_null(each) for each in value if isinstance(each, list))
    return value is None


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _message(verdict: Verdict) -> str:
    document = verdict.document
    if isinstance(document, dict):
        error = document.get("error", document)
        said = error.get("message") if isinstance(error, dict) else error
        if isinstance(said, str):
            return said
    if verdict.status:
        return f"the fleet answered with status {verdict.status} and no message"
    return f"{verdict.code}: no answer was received"


def _id_of(document: Any) -> str:
    found = document.get("id") if isinstance(document, dict) else None
    return found if isinstance(found, str) else ""


@dataclass
class Totals:
    """Numbers that are counted over all lines of an output."""

    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """{error code: number of lines that failed with it}."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def lines(self) -> int:
        """The number of all lines."""
        return self.answered + self.failed.total()

    def add(self, document: Any) -> None:
        """Count a line of the output, given as JSON."""
        if error := document.get("error"):
            self.failed[str(error.get("code"))] += 1
            return
        self.answered += 1
        usage = document["response"]["body"].get("usage")
        if isinstance(usage, dict):
            # /v1/responses has different names for these keys.
            completion = _count(usage.get("completion_tokens", usage.get("output_tokens")))
            # For a reranker, some releases report only the total number.
            rest = _count(usage.get("total_tokens")) - completion
            prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
            self.prompt_tokens += prompt or max(0, rest)
            self.completion_tokens += completion


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0

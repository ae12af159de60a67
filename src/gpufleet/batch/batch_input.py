"""Read the lines of a batch in OpenAI's format, and check all lines before the first request.

Border: the module reads the input twice, line by line. Only hashes of `custom_id` stay in memory. A
refusal has the number of a line and its problem, but never its prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gpufleet.errors import FleetError, file_fault, json_fault

URLS = {
    "/v1/chat/completions": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
    "/v1/responses": "/v1/responses",
    "/v1/embeddings": "/v1/embeddings",
    "/v1/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/rerank": "/v1/rerank",
    "/v1/score": "/v1/score",
    "/score": "/v1/score",
    "/classify": "/classify",
    "/pooling": "/pooling",
}
"""
The values that a line's `url` may have, each with the route to which the line is sent.

Several values may mean the same route of vLLM. In this case, the route below /v1 is used.
"""
_NOT_WHOLE = {"stream": "a stream", "background": "an answer that is fetched later"}
_KEYS = frozenset({"custom_id", "method", "url", "body"})
_NAMED = 20
"""The maximum number of problems that a refusal lists."""
_ROUND = 4
"""
The maximum ratio of a line's bytes to its body's bytes. `\\u0430`, for example, becomes two bytes.
"""
_HASH_BYTES = 8
"""
Bytes of the hash of a `custom_id`. With ten million lines, the probability of a collision is 3 in a
million. A collision is refused as a repeated `custom_id`.
"""


class LineError(Exception):
    """Raised for a mistake in a line. Its text has the mistake and its correction."""


@dataclass(frozen=True)
class InputRules:
    """What the lines of a batch must satisfy."""

    model: str
    """The model's name in requests."""
    body_bytes: int
    """The largest accepted body in bytes."""


@dataclass(frozen=True)
class Line:
    """A request of a batch."""

    custom_id: str
    path: str
    """The route of the request, which is a value of `URLS`."""
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class CheckedInput:
    """An input whose lines are all valid."""

    lines: int
    sha256: str
    paths: tuple[str, ...]
    """The routes of the input's lines."""


class BatchInput:
    """An input file that stays open, so that a new file with its name is not read instead."""

    def __init__(self, path: Path, rules: InputRules) -> None:
        self._path, self._rules = path, rules
        try:
            # Opening a pipe would wait for its other end. With O_NONBLOCK it does not, and the pipe
            # is refused afterwards.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise FleetError(f"{path} cannot be read: {file_fault(error)}") from None
        self._file: BinaryIO = os.fdopen(handle, "rb")
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            self._file.close()
            raise FleetError(
                f"{path} is not a regular file, but gpufleet reads a batch twice: write the batch "
                "to a file"
            )
        self._state = self._now()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check(self) -> CheckedInput:
        """Read and check all lines. Raises `FleetError` with the first invalid lines."""
        digest = hashlib.sha256()
        seen: set[int] = set()
        problems: list[str] = []
        more = 0
        paths: dict[str, None] = {}
        for number, raw in self._lines(digest):
            problem = ""
            try:
                line = parse_line(raw, self._rules)
            except LineError as error:
                problem = str(error)
            else:
                if (key := id_hash(line.custom_id)) in seen:
                    problem = (
                        f"an earlier line has the same `custom_id` "
                        f"{json.dumps(line.custom_id)[:80]}, but answers are matched to lines by "
                        "`custom_id`: write a different one in each line"
                    )
                seen.add(key)
                paths[line.path] = None
            if problem and len(problems) < _NAMED:
                problems.append(f"{self._path}: line {number}: {problem}")
            elif problem:
                more += 1
        if more:
            problems.append(f"{self._path}: {more} more lines are not valid")
        if problems:
            raise FleetError(*problems)
        if not seen:
            raise FleetError(f"{self._path} has no lines: write one JSON object per line")
        return CheckedInput(len(seen), digest.hexdigest(), tuple(paths))

    def requests(self, without: Collection[int]) -> Iterator[Line]:
        """
        Yield the requests of the lines in order.

        A line is left out if the hash (`id_hash`) of its `custom_id` is in `without`.
        """
        for _, raw in self._lines():
            if self._now() != self._state:
                self._refuse_change()
            try:
                line = parse_line(raw, self._rules)
            except LineError:
                self._refuse_change()
            if id_hash(line.custom_id) not in without:
                yield line

    def _lines(self, digest: Any = None) -> Iterator[tuple[int, bytes | None]]:
        """Yield (line number, line). If a line is above the size limit, None replaces the line."""
        most = self._rules.body_bytes * _ROUND + (64 << 10)
        self._file.seek(0)
        number = 0
        while data := self._file.readline(most):
            number += 1
            whole: bytes | None = data
            while not data.endswith(b"\n") and len(data) == most:
                if digest:
                    digest.update(data)
                data = self._file.readline(most)
                whole = None if data else whole
            if digest:
                digest.update(data)
            if whole is None or whole.strip():
                yield number, whole

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _refuse_change(self) -> NoReturn:
        raise FleetError(
            f"{self._path} was changed while gpufleet read it, but the answers in the output "
            "belong to the earlier content: restore the input, or write a different output"
        )


def id_hash(custom_id: str) -> int:
    """Return a 64-bit hash of a `custom_id`."""
    data = custom_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=_HASH_BYTES).digest(), "big")


def parse_line(raw: bytes | None, rules: InputRules) -> Line:
    """Return the request in a line. Raises `LineError` with a mistake and its correction."""
    largest = f"larger than {rules.body_bytes >> 20} MiB, the gateway's limit: write a smaller"
    if raw is None:
        raise LineError(f"the line is {largest} request")
    found = _parse_json(raw)
    if not isinstance(found, dict):
        raise LineError(
            'the line is not an object: write {"custom_id": "1", "method": "POST", "url": '
            '"/v1/chat/completions", "body": {...}}'
        )
    custom_id, body = found.get("custom_id"), found.get("body")
    if not (isinstance(custom_id, str) and custom_id):
        raise LineError(
            "the line has no `custom_id`, but the output matches answers to lines by `custom_id`: "
            "write a `custom_id` that no other line has"
        )
    if found.get("method", "POST") != "POST":
        raise LineError('`method` is not POST: write "method": "POST"')
    if not isinstance(found.get("url"), str) or found["url"] not in URLS:
        raise LineError(f"`url` has a value that is not served: write one of {', '.join(URLS)}")
    if unknown := sorted(found.keys() - _KEYS):
        raise LineError(f"the key {json.dumps(unknown[0])[:80]} is unknown: remove it")
    if not isinstance(body, dict):
        raise LineError(
            "`body` is not an object: write the request in `body`, as an object with `model`"
        )
    if body.get("model") != rules.model:
        what = json.dumps(body.get("model"))[:80]
        raise LineError(f"`model` is {what}: write {json.dumps(rules.model)}")
    if asked := [key for key in _NOT_WHOLE if body.get(key)]:
        what = _NOT_WHOLE[asked[0]]
        raise LineError(
            f"the request asks for {what}, but a batch writes each whole answer as one line: "
            f"remove `{asked[0]}`"
        )
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        data = text.encode()
    except UnicodeEncodeError:
        raise LineError("the text has an unpaired surrogate (`\\ud800` to `\\udfff`)") from None
    except ValueError:
        raise LineError("a number is too large: write a smaller number") from None
    if len(data) > rules.body_bytes:
        raise LineError(f"`body` is {largest} body")
    return Line(custom_id, URLS[found["url"]], data)


def _parse_json(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise LineError(f"the line is not JSON: {json_fault(error)}") from None
    except UnicodeDecodeError as error:
        raise LineError(file_fault(error)) from None
    except RecursionError:
        raise LineError("the line is nested too deeply") from None
    except _ConstantError as error:
        raise LineError(f"the line has {error}, which is not valid JSON: write null") from None
    except ValueError:
        raise LineError("a number has too many digits") from None


class _ConstantError(Exception):
    """Raised for NaN and Infinity, which Python's parser accepts."""


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(name)

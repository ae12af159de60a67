"""
Compute the arrival times of requests of a Poisson process, a closed loop or a trace.

Pure, except that the module reads the trace's file. Each client process gets a part of the
arrivals. A sum of Poisson processes is a Poisson process, so k clients with rate / k and different
seeds give the whole rate without coordination.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from gpufleet.errors import FleetError, file_fault, json_fault
from gpufleet.on_node.load.request_draws import arrival_times

MOST_ENTRIES = 1_000_000
"""
The maximum number of requests in a trace, which is sent to the clients before the load begins.
"""
MOST_BLOCK = 1 << 39
"""
Block numbers must be lower than this limit, because request_draws.py encodes them in a prompt.
"""
_NAMED = 5
"""The maximum number of problems that an error lists."""


@dataclass(frozen=True)
class Poisson:
    """An open loop: requests arrive at random, independent of the requests in flight."""

    rate: float
    """Arrivals per second of all clients together."""
    concurrency: int | None = None
    """
    The maximum number of requests in flight, or None. Requests above this limit wait in the client.
    """

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise FleetError(
                f"a rate of {self.rate:g} is invalid: write arrivals per second above 0"
            )
        _check_concurrency(self.concurrency)

    def part(self, process: int, processes: int) -> dict[str, Any]:
        """Return one client's part."""
        found: dict[str, Any] = {"rate": self.rate / processes}
        if self.concurrency is not None:
            found["concurrency"] = _share(self.concurrency, process, processes)
        return found

    def most_processes(self) -> int | None:
        """
        Return the maximum number of client processes for this load, or None if there is no limit.
        """
        return self.concurrency


@dataclass(frozen=True)
class ClosedLoop:
    """
    A fixed number of clients.

    Each client sends its next request after the answer to the previous one.
    """

    concurrency: int
    spread_seconds: float = 1.0
    """The seconds over which the first requests are spread."""

    def __post_init__(self) -> None:
        _check_concurrency(self.concurrency)

    def part(self, process: int, processes: int) -> dict[str, Any]:
        """Return one client's part."""
        mine = _share(self.concurrency, process, processes)
        return {"concurrency": mine, "spread": self.spread_seconds}

    def most_processes(self) -> int | None:
        """Return the maximum number of client processes for this load."""
        return self.concurrency


@dataclass(frozen=True)
class TraceEntry:
    """One request of a trace."""

    due: float
    """Seconds since the first request."""
    prompt_tokens: int
    tokens: int
    blocks: tuple[int, ...] = ()
    """
    The blocks of 512 tokens at the beginning of the prompt.

    Requests with the same ids share these blocks.
    """


@dataclass(frozen=True)
class Trace:
    """Requests at the times of a recorded trace."""

    entries: tuple[TraceEntry, ...]
    concurrency: int | None = None
    """The maximum number of requests in flight, or None, as in `Poisson`."""

    @property
    def seconds(self) -> float:
        """Return the seconds from the first request to the last."""
        return self.entries[-1].due

    @property
    def rate(self) -> float:
        """Return the trace's mean arrivals per second."""
        return len(self.entries) / max(self.seconds, 1e-9)

    def at_rate(self, rate: float) -> Trace:
        """Return the same requests with all times scaled, so that their mean rate is `rate`."""
        factor = self.rate / Poisson(rate).rate
        return replace(
            self, entries=tuple(replace(each, due=each.due * factor) for each in self.entries)
        )

    def part(self, process: int, processes: int) -> dict[str, Any]:
        """Return one client's part."""
        mine = self.entries[process::processes]
        found: dict[str, Any] = {
            "schedule": [
                [round(each.due, 6), each.prompt_tokens, each.tokens, list(each.blocks)]
                for each in mine
            ]
        }
        if self.concurrency is not None:
            found["concurrency"] = _share(self.concurrency, process, processes)
        return found

    def most_processes(self) -> int | None:
        """Return the maximum number of client processes for this trace."""
        return min(len(self.entries), self.concurrency or len(self.entries))

    def check_context(self, max_model_len: int) -> None:
        """Raise `FleetError` for requests that exceed the model's context."""
        large = [each for each in self.entries if each.prompt_tokens + each.tokens > max_model_len]
        if large:
            most = max(each.prompt_tokens + each.tokens for each in large)
            raise FleetError(
                f"{len(large)} of the trace's {len(self.entries)} requests do not fit into the "
                f"model's context of {max_model_len} tokens (`max_model_len`). The largest "
                f"request has {most} tokens, prompt and answer together. Remove these requests "
                "from the trace, or measure a model with a longer context"
            )


Arrivals = Poisson | ClosedLoop | Trace


def client_seed(seed: int, process: int) -> str:
    """Return the seed of the random numbers of one client process."""
    return f"{seed}/{process}"


def poisson_times(rate: float, seconds: float, seed: int, processes: int = 1) -> Iterator[float]:
    """Yield the arrival times of all clients' requests in order, up to `seconds`."""
    own = (
        arrival_times(rate / processes, f"{client_seed(seed, process)}/arrivals")
        for process in range(processes)
    )
    return itertools.takewhile(lambda due: due < seconds, heapq.merge(*own))


def read_trace(path: Path) -> Trace:
    """
    Read a trace in Mooncake's format, one JSON object per line.

    The keys are `timestamp` (milliseconds), `input_length`, `output_length` (tokens), and
    optionally `hash_ids`. The function shifts all times so that the first request is due at 0. If
    lines are invalid, it raises `FleetError` with the problems of the first ones.
    """
    entries: list[TraceEntry] = []
    problems: list[str] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(entries) >= MOST_ENTRIES or len(problems) >= _NAMED:
                    break
                if line.strip():
                    _read_entry(line, f"{path}: line {number}", entries, problems)
            else:
                number = 0
    except (OSError, ValueError) as error:
        raise FleetError(f"{path}: {file_fault(error)}") from None
    if problems:
        raise FleetError(*problems)
    if number:
        raise FleetError(f"{path} has more than {MOST_ENTRIES:,} requests: write a shorter trace")
    if not entries:
        raise FleetError(f"{path} has no request: write one JSON object per line")
    entries.sort(key=lambda entry: entry.due)
    return Trace(tuple(replace(each, due=each.due - entries[0].due) for each in entries))


def _read_entry(line: str, where: str, entries: list[TraceEntry], problems: list[str]) -> None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        problems.append(f"{where}: the line is not JSON: {json_fault(error)}")
        return
    except (ValueError, RecursionError):
        problems.append(
            f"{where}: the line has a number with too many digits, or too many nested levels"
        )
        return
    if not isinstance(found, dict):
        problems.append(f'{where}: the line is not a JSON object: write {{"timestamp": ..., ...}}')
        return
    at, prompt, answer = (found.get(n) for n in ("timestamp", "input_length", "output_length"))
    blocks = found.get("hash_ids", [])
    if not (_is_number(at) and 0 <= at < math.inf):
        problems.append(f"{where}: `timestamp` must be a number of milliseconds, 0 or more")
    elif not (_is_count(prompt) and _is_count(answer)):
        problems.append(
            f"{where}: `input_length` and `output_length` must be numbers of tokens, 1 or more"
        )
    elif not (
        isinstance(blocks, list)
        and all(type(each) is int and 0 <= each < MOST_BLOCK for each in blocks)
    ):
        problems.append(f"{where}: `hash_ids` must be a list of numbers of 0 or more")
    else:
        entries.append(TraceEntry(at / 1000, prompt, answer, tuple(blocks)))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _share(whole: int, process: int, processes: int) -> int:
    return whole // processes + (process < whole % processes)


def _check_concurrency(concurrency: int | None) -> None:
    if concurrency is not None and concurrency < 1:
        raise FleetError(f"a concurrency of {concurrency} is invalid: write a number of 1 or more")

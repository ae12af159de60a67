"""Store the results of measurements in files, and find the result that applies to given settings.

A measurement is one JSON file in `measurements/` beside the inventory. Its result is valid only for
the same weights, release, arguments and hardware. These form the `Fingerprint`, and `measured_rate`
uses only results with an equal fingerprint. Files are written atomically and parsed strictly.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from gpufleet.errors import FleetError, file_fault
from gpufleet.formatting import count_of, format_duration
from gpufleet.load_test.fingerprint import Fingerprint, Subject
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.other_clients import PROMISES, promised
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.time_series import TimeSeries
from gpufleet.paths import write_whole
from gpufleet.sanitize import printable

FORMAT = 1
"""The version of the file's format. It is raised for incompatible changes."""

MODE = 0o644
"""
The permission bits of a result's file. All users may read it, because it has no prompt and no key.
"""

_DAY = 86400

REPORT_ENDING = ".report.json"
"""The ending of the Benchmark Report beside a measurement, which gpufleet does not read."""


@dataclass(frozen=True)
class RateBracket:
    """The loads between which the contract stops being met."""

    kept: float | None
    """The highest load at which the contract was met, or None.

    In an open loop, a load is in arrivals per second. In a closed loop, it is the number of
    concurrent requests.
    """
    missed: float | None
    """The lowest load above `kept` at which the contract was not met, or None."""
    status: str
    """The status of the search at its end."""
    why: str = ""
    """The reason for the status, with numbers."""
    concurrency: float | None = None
    """The mean number of requests in the system at the load `kept`, by Little's law."""


@dataclass(frozen=True)
class Searched:
    """The levels of load that a search measured, and the result of the search."""

    levels: tuple[LevelSummary, ...]
    """The levels in the order of measurement."""
    found: RateBracket

    @property
    def best(self) -> LevelSummary | None:
        """Return the highest level at which the contract was met, or None."""
        kept = (e for e in self.levels if e.verdict == "kept" and e.load == self.found.kept)
        return next(kept, None)


@dataclass(frozen=True)
class Client:
    """The load clients, and the values that show whether they were the bottleneck."""

    processes: int
    ceiling: float | None
    """
    The maximum number of requests per second that the clients can send, or None if it is unknown.
    """
    cpu_seconds: float | None
    """CPU seconds per request, or None if they are unknown."""
    lag_p99: float | None
    """
    The p99 of the seconds from a request's intended arrival to its sending, over all levels.

    None in a closed loop.
    """
    place: str
    """`controller`, or the client's node."""


@dataclass(frozen=True)
class Measurement:
    """One run of `gpufleet measure`."""

    when: dt.datetime
    """The begin of the run, in UTC."""
    version: str
    """The version of gpufleet."""
    model: str
    """The model's entry in `serving`."""
    target: str
    """`replica tiny-0`, or `gateway` with the node's name."""
    replicas: int
    """The number of replicas that received requests when the measurement began."""
    contract: Contract
    workload: Mapping[str, Any]
    """Preset, lengths in tokens, and the seed."""
    loop: Literal["open", "closed"]
    levels: tuple[LevelSummary, ...]
    """The levels in the order of measurement."""
    found: RateBracket
    client: Client
    subject: Subject
    notes: tuple[str, ...] = field(default=())
    """Further remarks, as sentences."""
    replicas_of: int | None = None
    """
    The planned number of the model's replicas, including drained and stopped ones.

    None if the number is unknown. For a replica's own server, it is 1.
    """
    closed: Searched | None = None
    """
    The search with the same target in a closed loop, for comparison.

    None if there was no such search.
    """
    series: TimeSeries | None = None
    """The time series of the run, or None if it was not recorded."""

    def __post_init__(self) -> None:
        if self.when.tzinfo is None:
            raise ValueError("`when` has no time zone")
        if self.replicas < 1:
            raise ValueError("`replicas` is less than 1")
        if self.replicas_of is not None and self.replicas_of < self.replicas:
            raise ValueError("`replicas_of` is less than `replicas`")

    @property
    def served_by(self) -> str:
        """Return how many of the model's replicas served, such as `2 of 3 replicas`."""
        if self.replicas_of is None:
            return count_of(self.replicas, "replica")
        return f"{self.replicas} of {count_of(self.replicas_of, 'replica')}"

    @property
    def searched(self) -> Searched:
        """Return the levels and their result."""
        return Searched(self.levels, self.found)

    def as_closed(self) -> Measurement:
        """Return the closed-loop search as a separate measurement."""
        if self.closed is None:
            raise ValueError("no closed loop was searched")
        return replace(
            self,
            loop="closed",
            levels=self.closed.levels,
            found=self.closed.found,
            client=replace(self.client, lag_p99=None),
            closed=None,
            series=None,
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        plain = _adapter().dump_python(self, mode="json")
        return {"format": FORMAT, "fingerprint": self.subject.fingerprint.digest, **plain}

    @classmethod
    def from_json(cls, document: object) -> Measurement:
        """
        Parse `as_json`'s output.

        Raises `FleetError` for a newer format, for unknown keys and for values of the wrong type.
        """
        if not isinstance(document, Mapping):
            raise FleetError("the file is not a measurement: it must contain a JSON object")
        plain = {key: value for key, value in document.items() if key != "fingerprint"}
        written = plain.pop("format", None)
        if isinstance(written, bool) or not isinstance(written, int) or written < 1:
            raise FleetError("the file is not a measurement: it has no `format`")
        if written > FORMAT:
            raise FleetError(
                f"format {written} is from a newer gpufleet: this release can read only up to "
                f"{FORMAT}"
            )
        try:
            found = _adapter().validate_json(json.dumps(plain), strict=True)
        except ValidationError as error:
            raise FleetError(_fault(error)) from None
        unknown = next(_unknown(plain, _adapter().dump_python(found, mode="json")), None)
        if unknown is not None:
            raise FleetError(
                f"the file is damaged: a measurement has no key `{printable(unknown)}`"
            )
        return found


@dataclass(frozen=True)
class StoredMeasurements:
    """The contents of a directory of measurements."""

    measurements: tuple[Measurement, ...]
    """Measurements from the oldest to the newest."""
    problems: tuple[str, ...]
    """One sentence for each file that could not be read."""


class MissedContract(str):
    """Why a rate is unknown: the contract was not met even at the lowest measured rate."""


@dataclass(frozen=True)
class MeasuredRate:
    """The measured rate of one replica."""

    requests_per_second: float
    """The highest rate of one replica at which the contract was met."""
    missed: float | None
    """The lowest rate of one replica at which the contract was not met, or None."""
    when: dt.datetime
    age_seconds: float
    target: str
    replicas: int
    """The number of replicas behind the target that shared its load."""
    workload: Mapping[str, Any]
    fingerprint: str

    @property
    def age(self) -> str:
        """
        Return the date, the age and the fingerprint, such as `on 2026-11-20 (3 days ago, ...)`.
        """
        days = int(self.age_seconds // _DAY)
        ago = f"{count_of(days, 'day')} ago" if days else "less than a day ago"
        return f"on {self.when:%Y-%m-%d} ({ago}, fingerprint {self.fingerprint})"

    def __str__(self) -> str:
        shared = f", shared by {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"{self.requests_per_second:.3g} requests/s per replica, measured "
            f"{format_duration(self.age_seconds)} ago ({self.target}{shared})"
        )


def write(found: Measurement, directory: Path) -> Path:
    """
    Write a measurement into a directory, and return its file.

    The file's name consists of the model, the target and the time. Existing files are never
    overwritten. Raises `FleetError` if the file cannot be written, and `ValueError` for a number
    that is not finite.
    """
    text = json.dumps(found.as_json(), indent=1, allow_nan=False) + "\n"
    moment = found.when.astimezone(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{_slug(found.model)}_{_slug(found.target)}_{moment}"
    file, number = directory / f"{name}.json", 1
    while file.exists():
        number += 1
        file = directory / f"{name}-{number}.json"
    write_whole(file, text)
    # `write_whole` leaves the mode to the umask.
    file.chmod(MODE)
    return file


def read(file: Path) -> Measurement:
    """Return a file's measurement. Raises `FleetError` naming the file."""
    try:
        return Measurement.from_json(
            json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)
        )
    except FleetError as error:
        raise FleetError(*(f"{file}: {each}" for each in error.problems)) from None
    except RecursionError:
        raise FleetError(f"{file}: the file is damaged: it has too many nested levels") from None
    except (OSError, ValueError) as error:
        raise FleetError(f"{file}: the file cannot be read: {file_fault(error)}") from None


def read_measurements(directory: Path) -> StoredMeasurements:
    """
    Return the measurements in a directory. The result is empty if the directory does not exist.
    """
    found: list[Measurement] = []
    problems: list[str] = []
    for file in sorted(directory.glob("*.json")):
        if file.name.startswith(".") or file.name.endswith(REPORT_ENDING):
            continue
        try:
            found.append(read(file))
        except FleetError as error:
            problems += error.problems
    return StoredMeasurements(tuple(sorted(found, key=lambda each: each.when)), tuple(problems))


def measured_rate(
    measurements: Iterable[Measurement],
    model: str,
    fingerprint: Fingerprint,
    now: dt.datetime,
    contract: Contract | None = None,
) -> MeasuredRate | str:
    """
    Return one replica's measured requests per second, or why they are unknown.

    Only open-loop results with this fingerprint and, if given, this contract are used. Results of a
    single replica take precedence over results of several replicas that shared the load. Among
    equal results, the newest is used. If the contract was met at no measured rate, the function
    does not estimate a lower rate.
    """
    mine = sorted((each for each in measurements if each.model == model), key=lambda e: e.when)
    mine = [each for each in mine if each.loop == "open"]
    if not mine:
        return f"{model} has no measurement with arrivals per second: run `gpufleet measure`"
    equal = [each for each in mine if each.subject.fingerprint == fingerprint]
    if not equal:
        last = mine[-1]
        what = "; ".join(last.subject.fingerprint.differences(fingerprint))
        return f"{model} was measured on {last.when:%Y-%m-%d} with different settings: {what}"
    promised = [each for each in equal if contract in (None, each.contract)]
    if not promised:
        last = equal[-1]
        what = "; ".join(unequal_contract(last.contract, contract or last.contract))
        return f"{model} was measured on {last.when:%Y-%m-%d} for a different contract: {what}"
    telling = [each for each in promised if each.found.kept or each.found.missed]
    if not telling:
        return f"{model}'s measurements found no rate: {promised[-1].found.why or 'not known'}"
    best = max(telling, key=lambda each: (each.replicas == 1, each.when))
    if not best.found.kept:
        return MissedContract(
            f"{model} does not meet its contract even at the lowest rate that was measured: "
            f"{best.found.why}"
        )
    return MeasuredRate(
        best.found.kept / best.replicas,
        best.found.missed / best.replicas if best.found.missed else None,
        best.when,
        max(0.0, (now - best.when).total_seconds()),
        best.target,
        best.replicas,
        best.workload,
        fingerprint.digest,
    )


def alert_remarks(best: LevelSummary | None, contract: Contract) -> tuple[str, ...]:
    """
    Return remarks on alerts that would fire at the highest level at which the contract was met.

    Alerts compare the p99 of all requests, and of all single pauses between tokens, with an
    objective. A contract applies only to a share of requests. Its limit for pauses applies to the
    mean pause of each request.
    """
    if best is None:
        return ()
    found = []
    values = {"ttft": best.ttft, "itl": best.itl, "e2e": best.e2e}
    for name, limit in promised(contract):
        p99 = values[name].get("p99")
        if p99 is not None and p99 > limit:
            of = PROMISES[name]
            found.append(
                f"at {best.load:.3g} {best.unit} the p99 of {of.name} is {p99:.3g} s, which is "
                f"above the objective of {limit:.3g} s, so {of.alert} may fire at this load"
            )
    return tuple(found)


def unequal_contract(a: Contract, b: Contract) -> tuple[str, ...]:
    """Return the fields in which two contracts differ, such as `share 0.95, now 0.99`."""
    one, other = asdict(a), asdict(b)
    return tuple(
        f"{name} {'none' if one[name] is None else one[name]}, "
        f"now {'none' if other[name] is None else other[name]}"
        for name in one
        if one[name] != other[name]
    )


@cache
def _adapter() -> TypeAdapter[Measurement]:
    return TypeAdapter(Measurement)


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "it"
    said = first["msg"].removeprefix("Value error, ")
    return f"the file is damaged: {printable(where)}: {printable(said[:1].lower() + said[1:])}"


def _unknown(document: object, known: object, at: str = "") -> Iterator[str]:
    """Yield the paths of a document's unknown keys."""
    if isinstance(document, Mapping) and isinstance(known, Mapping):
        for key, value in document.items():
            place = f"{at}.{key}" if at else str(key)
            if key not in known:
                yield place
            else:
                yield from _unknown(value, known[key], place)
    elif isinstance(document, list) and isinstance(known, list):
        for number, (one, other) in enumerate(zip(document, known, strict=False)):
            yield from _unknown(one, other, f"{at}.{number}")


def _refuse(constant: str) -> float:
    raise FleetError(f"the file is damaged: {constant} is not a JSON number")


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "unnamed"

"""Query an advisory source for known vulnerabilities of every package of a lock.

The source must have OSV's API, as for `uv audit --service-url`. `POST /v1/querybatch` lists the
advisories of each package, and `GET /v1/vulns/ID` returns one advisory. An unreadable answer never
counts as "no vulnerabilities".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from gpufleet.bundle.download import AT_ONCE, read
from gpufleet.errors import FleetError
from gpufleet.remote.daemon_pool import DaemonPool

_T = TypeVar("_T")

ECOSYSTEM = "PyPI"
# OSV accepts 1000 queries in one request (OSV's documentation of POST /v1/querybatch).
_BATCH = 1000
# If a source has more pages for one package, it probably repeats itself.
_PAGES = 100


@dataclass(frozen=True, order=True)
class Advisory:
    """
    A known vulnerability of a locked package. `fixed_in` are later versions that do not have it.
    """

    package: str
    version: str
    id: str
    aliases: tuple[str, ...] = ()
    fixed_in: tuple[str, ...] = ()


def find(source: str, pins: Iterable[tuple[str, str]]) -> tuple[Advisory, ...]:
    """
    Return every advisory on the packages in `pins`, sorted by name.

    A pin is a pair (name, version). Raises `FleetError` if the source cannot be reached, or does
    not answer for every package, or if a package has no version.
    """
    if not source.startswith(("http://", "https://")):
        raise FleetError(
            f"--advisories {source}: is not a URL: write an address that begins with http:// or "
            "https://"
        )
    source = source.rstrip("/")
    wanted = sorted(set(pins))
    if unknown := [name for name, version in wanted if not version]:
        raise FleetError(
            *(
                f"{name}: is locked as a URL without a version, so no advisories can be found for "
                "it: check this package by hand, or lock a version of it"
                for name in unknown
            )
        )
    if not wanted:
        raise FleetError("the lock has no packages")
    named: dict[tuple[str, str], set[str]] = {}
    for start in range(0, len(wanted), _BATCH):
        named |= _named(source, wanted[start : start + _BATCH])
    ids = sorted(set().union(*named.values()))
    with DaemonPool(AT_ONCE) as pool:
        said = dict(zip(ids, pool.map(lambda each: _said(source, each), ids), strict=True))
    return tuple(
        sorted(
            _advisory(name, version, said[each])
            for (name, version), found in named.items()
            for each in found
            if not said[each].get("withdrawn")
        )
    )


def _named(source: str, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], set[str]]:
    """Return the advisory ids of each package, from all pages of the answer."""
    found: dict[tuple[str, str], set[str]] = {each: set() for each in wanted}
    asked = [(each, "") for each in wanted]
    for _ in range(_PAGES):
        if not asked:
            return found
        queries = [_query(*each, page) for each, page in asked]
        url = f"{source}/v1/querybatch"
        data = json.dumps({"queries": queries}).encode()

        def results(
            document: Any, asked: Sequence[tuple[tuple[str, str], str]] = asked
        ) -> list[tuple[set[str], str]]:
            rows = [
                ({str(one["id"]) for one in row.get("vulns") or ()}, row.get("next_page_token", ""))
                for row in document["results"]
            ]
            if len(rows) != len(asked):
                raise ValueError(f"the source sent {len(rows)} answers to {len(asked)} questions")
            return rows

        rows = _read(url, results, data)
        for (each, _), (ids, _) in zip(asked, rows, strict=True):
            found[each] |= ids
        asked = [(each, page) for (each, _), (_, page) in zip(asked, rows, strict=True) if page]
    raise FleetError(f"{source}: the answer about {asked[0][0][0]} has too many pages")


def _query(name: str, version: str, page: str) -> dict[str, Any]:
    """
    Return one query.

    The local part of a version (`+cu130` in `2.9.0+cu130`) is removed, because no advisory contains
    such a part.
    """
    package = {"name": str(canonicalize_name(name)), "ecosystem": ECOSYSTEM}
    query = {"package": package, "version": version.partition("+")[0]}
    return {**query, "page_token": page} if page else query


def _said(source: str, wanted: str) -> Mapping[str, Any]:
    def named(document: Any) -> Mapping[str, Any]:
        if document["id"] != wanted:
            raise ValueError(f"the answer is about {document['id']!r}")
        found: Mapping[str, Any] = document
        return found

    return _read(f"{source}/v1/vulns/{quote(wanted, safe='')}", named)


def _advisory(name: str, version: str, said: Mapping[str, Any]) -> Advisory:
    try:
        fixes = {*_fixes(name, said)}
        return Advisory(
            name,
            version,
            str(said["id"]),
            tuple(sorted(map(str, said.get("aliases") or ()))),
            tuple(map(str, sorted(each for each in fixes if each > Version(version)))),
        )
    except (KeyError, TypeError, AttributeError, InvalidVersion):
        # The advisory counts even if its version ranges cannot be read.
        return Advisory(name, version, str(said["id"]))


def _fixes(name: str, said: Mapping[str, Any]) -> Iterator[Version]:
    for affected in said.get("affected") or ():
        package = affected["package"]
        if package["ecosystem"] != ECOSYSTEM:
            continue
        if canonicalize_name(package["name"]) != canonicalize_name(name):
            continue
        for each in affected.get("ranges") or ():
            if each["type"] == "ECOSYSTEM":
                yield from (Version(event["fixed"]) for event in each["events"] if "fixed" in event)


def _read(url: str, parse: Callable[[Any], _T], data: bytes | None = None) -> _T:
    headers = {"Accept": "application/json"}
    if data is not None:
        headers["Content-Type"] = "application/json"
    content, _ = read(url, headers, data)
    try:
        return parse(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FleetError(
            f"{url}: the answer does not have the format of an advisory source ({error}), so the "
            "lock was not checked"
        ) from None

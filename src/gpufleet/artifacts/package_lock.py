"""Write package locks that have only wheels, and their SBOMs. Pure.

uv resolves the packages and lists their files (PEP 751, `pylock.toml`). The lock has only the
hashes of wheels, because nodes build nothing from source. The SBOM next to the lock has the format
CycloneDX 1.5 (cyclonedx.org/docs/1.5/json). It has the name, version, package URL and files of each
package.
"""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from gpufleet.artifacts.release import pinned
from gpufleet.errors import FleetError

SBOM_SUFFIX = ".cdx.json"
# The namespace of serial numbers. The same lock always gives the same number, so the SBOM changes
# only if the lock changes.
_NAMESPACE = uuid.UUID("6f0f2a63-3c3f-5c52-9d0c-7c1d2c0f5a11")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*(?:==|@)", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """
    A program that has a lock, and the nodes for which the lock is made.

    Attributes:
        file: the name of the lock's file, with a placeholder for the version.
        python: the Python version of the nodes; if `platform` is None, also any newer version.
        platform: uv's name of the oldest system on which the wheels run; None for any system.
        extra: the extra of the package that is installed.
    """

    file: str
    python: str
    platform: str | None = None
    extra: str = ""


PROGRAMS: Mapping[str, Program] = {
    # glibc 2.34 (RHEL 9) is the oldest C library of the supported distributions.
    "vllm": Program("vllm-{version}.txt", "3.12", "x86_64-manylinux_2_34"),
    "sglang": Program("sglang-{version}.txt", "3.12", "x86_64-manylinux_2_34"),
    "litellm": Program("litellm-{version}.txt", "3.11", extra="proxy"),
    "uv": Program("uv.txt", "3.10"),
}


@dataclass(frozen=True)
class Package:
    """A package in a lock. `wheels` is {file name: hash}; `marker` is the environment marker."""

    name: str
    version: str
    wheels: Mapping[str, str]
    marker: str = ""


def requirement(name: str, version: str) -> str:
    """
    Return the requirement in uv's syntax.

    >>> requirement("litellm", "1.106.2")
    'litellm[proxy]==1.106.2'
    """
    extra = PROGRAMS[name].extra
    return f"{name}[{extra}]=={version}" if extra else f"{name}=={version}"


def packages(pylock: str) -> tuple[Package, ...]:
    """
    Return the packages of uv's resolution, sorted by name.

    Raises `FleetError` with every package that has no wheel, or a wheel without a SHA-256.
    """
    found, problems = [], []
    for each in tomllib.loads(pylock).get("packages", ()):
        name, version = each["name"], each.get("version", "")
        wheels = {
            unquote(_file(wheel)): wheel.get("hashes", {}).get("sha256", "")
            for wheel in each.get("wheels", ())
        }
        if not wheels or not version:
            problems.append(
                f"{name} {version}".rstrip() + ": has no wheel, and nodes do not build wheels: "
                "build a wheel, publish it on a page, and give that page as --find-links and in "
                "`find_links`"
            )
        elif not all(map(_SHA256.fullmatch, wheels.values())):
            problems.append(f"{name} {version}: the index lists one of its wheels without SHA-256")
        else:
            found.append(Package(name, version, wheels, each.get("marker", "")))
    if problems or not found:
        raise FleetError(*(problems or ("uv found no package",)))
    return tuple(sorted(found, key=lambda each: (each.name, each.version)))


def _file(wheel: Mapping[str, Any]) -> str:
    """Return a wheel's file name, from its own key or from its URL or path."""
    where = str(wheel.get("name") or wheel.get("url") or wheel.get("path") or "")
    return urlsplit(where).path.rpartition("/")[2] or where


def lock_text(found: Iterable[Package]) -> str:
    """Return a lock for uv and pip, in the format of `uv pip compile`."""
    return "".join(
        " \\\n    ".join(
            (
                f"{each.name}=={each.version}" + (f" ; {each.marker}" if each.marker else ""),
                *(f"--hash=sha256:{digest}" for digest in sorted(set(each.wheels.values()))),
            )
        )
        + "\n"
        for each in found
    )


def sbom_text(found: Iterable[Package], name: str, version: str) -> str:
    """Return the CycloneDX document of a program's lock. The same lock gives the same text."""
    found = tuple(found)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, lock_text(found))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": f"gpufleet-lock-{name}",
                "name": name,
                "version": version,
            }
        },
        "components": [_component(each) for each in found],
    }
    return json.dumps(document, indent=1) + "\n"


def _component(each: Package) -> dict[str, Any]:
    purl = f"pkg:pypi/{quote(each.name)}@{quote(each.version, safe='')}"
    marker = [{"name": "gpufleet:marker", "value": each.marker}] if each.marker else []
    return {
        "type": "library",
        "bom-ref": purl,
        "name": each.name,
        "version": each.version,
        "purl": purl,
        **({"properties": marker} if marker else {}),
        "externalReferences": [
            {
                "type": "distribution",
                "url": quote(file),
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
            for file, digest in sorted(each.wheels.items())
        ],
    }


def sbom_differences(lock: str, sbom: str) -> tuple[str, ...]:
    """
    Return a sentence for each difference between a lock and its SBOM.

    A file that is not a wheel also gets a sentence. Raises `FleetError` if the SBOM cannot be read.
    """
    try:
        components = json.loads(sbom)["components"]
        files = {
            each["hashes"][0]["content"]: unquote(each["url"])
            for component in components
            for each in component["externalReferences"]
        }
        listed = {f"{each['name']}=={each['version']}" for each in components}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FleetError(f"the SBOM cannot be read ({error!r})") from None
    hashes = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", lock))
    pins = {f"{name}=={version}" for name, version in pins_of(lock)}
    return (
        *(f"only the lock has {each}" for each in sorted(pins - listed)),
        *(f"only the SBOM has {each}" for each in sorted(listed - pins)),
        *(f"only the lock has the hash {each}" for each in sorted(hashes - files.keys())),
        *(f"only the SBOM has the hash {each}" for each in sorted(files.keys() - hashes)),
        *(f"{file} is not a wheel" for file in sorted(files.values()) if not file.endswith(".whl")),
    )


def constraints(lock: str, program: str) -> str:
    r"""Return a lock's pins without the program's own, as constraints that keep the other versions.

    >>> constraints("uv==1 \\\n --hash=x\na==2 ; os_name == 'nt' \\\n --hash=y\n", "uv")
    "a==2 ; os_name == 'nt'\n"
    """
    lines = (line.rstrip(" \\") for line in lock.splitlines() if _PIN.match(line))
    return "".join(f"{line}\n" for line in lines if not re.match(rf"{program}\b(?!-)", line))


def pins_of(lock: str) -> Iterator[tuple[str, str]]:
    """
    Yield each package of a lock with its version. If a URL has no version, the version is "".

    >>> [*pins_of("torch==2.9.0+cu130 --hash=sha256:...")]
    [('torch', '2.9.0+cu130')]
    """
    for found in _PIN.finditer(lock):
        line = lock[found.start() :].partition("\n")[0]
        yield found["name"], pinned(line.encode(), found["name"]) or ""

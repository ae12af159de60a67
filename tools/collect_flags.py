"""Makes the package's data anew from the releases' source distributions.

    python -m tools.collect_flags FOLDER [VERSION ...]

Reads `vllm-VERSION.tar.gz` from FOLDER, and fetches from the package index what is not there, by
the hash that the index gives. Without a VERSION: those that the package has now. Writes
`data/schemas.json.xz` and `data/metrics.json.xz`, the same bytes from the same releases.
"""

from __future__ import annotations

import hashlib
import html
import json
import lzma
import os
import re
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.flags import extract, schema

# Where uv and pip are told of a package index; its "simple" page of a project lists the files.
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "PIP_INDEX_URL")
DATA = Path(schema.__file__).with_name("data")
_SECONDS = 300.0
# <a href="https://files.../vllm-0.32.0.tar.gz#sha256=...">
_LINK = re.compile(r'href="([^"#]+/vllm-([^"/]+)\.tar\.gz)#sha256=([0-9a-f]{64})"')


def main(arguments: Sequence[str]) -> int:
    """Collect, and say of every release what was found."""
    if not arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    folder, versions = Path(arguments[0]), list(arguments[1:]) or list(schema.versions())
    schemas, metrics = {}, {}
    try:
        fetch(folder, versions)
        for version in sorted(versions, key=schema.sort_key):
            found = extract.flag_document(str(_sdist(folder, version)), metrics=True)
            metrics[version] = found.pop("metrics")
            unresolved = found.pop("unresolved")
            schemas[version] = found
            sys.stdout.write(
                f"{version}: {len(found['flags'])} flags, {len(found['env'])} variables, "
                f"{len(metrics[version])} metrics\n"
            )
            sys.stdout.writelines(f"  not resolved: {line}\n" for line in unresolved)
    except (FleetError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    (DATA / "schemas.json.xz").write_bytes(pack(schemas))
    (DATA / "metrics.json.xz").write_bytes(pack(metrics))
    return 0


def pack(documents: Mapping[str, Any]) -> bytes:
    """Return the documents as one compressed JSON object with one release a line."""
    lines = (
        f"{json.dumps(version)}:{json.dumps(document, ensure_ascii=False, separators=(',', ':'))}"
        for version, document in documents.items()
    )
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def fetch(folder: Path, versions: Sequence[str]) -> None:
    """Fetch the source distributions that `folder` lacks. Raises `FleetError` and `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [version for version in versions if not _sdist(folder, version).exists()]
    if not missing:
        return
    index = _index()
    page = _get(index).decode()
    links = {version: (html.unescape(url), digest) for url, version, digest in _LINK.findall(page)}
    for version in missing:
        if version not in links:
            raise FleetError(f"{index} has no source distribution of vLLM {version}")
        url, digest = links[version]
        content = _get(url)
        if hashlib.sha256(content).hexdigest() != digest:
            raise FleetError(f"{url} is not what the index says it is: fetch it again")
        _sdist(folder, version).write_bytes(content)


def _sdist(folder: Path, version: str) -> Path:
    return folder / f"vllm-{version}.tar.gz"


def _index() -> str:
    """Return the page of vLLM's files; raises `FleetError` where no package index is named."""
    named = [os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)]
    if not named:
        raise FleetError(
            f"no package index is named to fetch vLLM's sources from: set {INDEX_VARIABLES[0]} to "
            "the address of one, as for uv"
        )
    return f"{named[0].rstrip('/')}/vllm/"


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:  # noqa: S310 - the operator's own index
        return bytes(answer.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

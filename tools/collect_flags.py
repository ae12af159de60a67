"""Write the package's data on vLLM's releases again, from their source distributions.

    python -m tools.collect_flags FOLDER [VERSION ...]

The tool reads `vllm-VERSION.tar.gz` from FOLDER, or `vllm-VERSION.whl` if a release has no source
distribution. It downloads missing files from the package index, and verifies the index's hash.
Without a VERSION, it reads the releases that the package has now. It writes `schemas.json.xz`,
`metrics.json.xz` and `models.json.xz` in `data/`, with the same bytes for the same releases.
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

# Variables that set the package index of uv and pip. The index's "simple" page of a project lists
# the project's files.
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "PIP_INDEX_URL")
DATA = Path(schema.__file__).with_name("data")
_SECONDS = 300.0
_SDIST = ".tar.gz"
# <a href="https://files.../vllm-0.32.0.tar.gz#sha256=...">
_LINK = re.compile(r'href="([^"#]+/vllm-([^"/]+)\.tar\.gz)#sha256=([0-9a-f]{64})"')
# <a href="https://files.../vllm-0.15.0-cp38-abi3-manylinux_2_31_x86_64.whl#sha256=...">
_WHEEL = re.compile(r'href="([^"#]+/vllm-([^"/-]+)-[^"/]*_x86_64\.whl)#sha256=([0-9a-f]{64})"')


def main(arguments: Sequence[str]) -> int:
    """Collect the data, and print what was found in each release."""
    if not arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    folder, versions = Path(arguments[0]), list(arguments[1:]) or list(schema.versions())
    schemas, metrics, models = {}, {}, {}
    try:
        fetch(folder, versions)
        for version in sorted(versions, key=schema.sort_key):
            found = extract.flag_document(str(_source(folder, version)), metrics=True, models=True)
            metrics[version] = found.pop("metrics")
            models[version] = found.pop("models")
            unresolved = found.pop("unresolved")
            schemas[version] = found
            sys.stdout.write(
                f"{version}: {len(found['flags'])} flags, {len(found['env'])} variables, "
                f"{len(metrics[version])} metrics, {len(models[version])} classes of models\n"
            )
            sys.stdout.writelines(f"  not resolved: {line}\n" for line in unresolved)
    except (FleetError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    (DATA / "schemas.json.xz").write_bytes(pack(schemas))
    (DATA / "metrics.json.xz").write_bytes(pack(metrics))
    (DATA / "models.json.xz").write_bytes(pack(models))
    return 0


def pack(documents: Mapping[str, Any], engine: str = "vllm") -> bytes:
    """
    Return the documents as one compressed JSON object with one release a line.

    If a document differs from an earlier one only in its release, it is replaced by the name of the
    earlier release: `{"0.14.1":"0.14.0"}`. The packed files already have this form.
    """
    first: dict[str, str] = {}  # the first release with a document, by the document's content
    lines = []
    for version, document in documents.items():
        if isinstance(document, str):
            lines.append(f"{_json(version)}:{_json(document)}")
            continue
        content = _json({key: value for key, value in document.items() if key != engine})
        owner = first.setdefault(content, version)
        lines.append(f"{_json(version)}:{_json(document if owner == version else owner)}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def fetch(folder: Path, versions: Sequence[str]) -> None:
    """Fetch the sources that `folder` lacks. Raises `FleetError` and `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [version for version in versions if not _source(folder, version).exists()]
    if not missing:
        return
    index = _index()
    found = links(_get(index).decode())
    for version in missing:
        if version not in found:
            raise FleetError(f"{index} has neither sources nor a wheel of vLLM {version}")
        url, digest = found[version]
        content = _get(url)
        if hashlib.sha256(content).hexdigest() != digest:
            raise FleetError(f"{url} does not have the hash of the index: download it again")
        ending = ".whl" if url.endswith(".whl") else _SDIST
        (folder / f"vllm-{version}{ending}").write_bytes(content)


def links(page: str) -> dict[str, tuple[str, str]]:
    """Return the address and SHA-256 of each release's sources, or else of its wheel."""
    return {
        version: (html.unescape(url), digest)
        for pattern in (_WHEEL, _LINK)
        for url, version, digest in pattern.findall(page)
    }


def _source(folder: Path, version: str) -> Path:
    wheel = folder / f"vllm-{version}.whl"
    return wheel if wheel.exists() else folder / f"vllm-{version}{_SDIST}"


def _index() -> str:
    """Return the page of vLLM's files; raise `FleetError` if no package index is set."""
    named = [os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)]
    if not named:
        raise FleetError(
            f"no package index is set for vLLM's sources: set {INDEX_VARIABLES[0]} to "
            "the address of an index, as for uv"
        )
    return f"{named[0].rstrip('/')}/vllm/"


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:  # noqa: S310 - the operator's own index
        return bytes(answer.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

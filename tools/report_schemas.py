"""
Write the JSON schemas of the documents that `gpufleet report` prints and reads.

    python -m tools.report_schemas

A test verifies that the schemas are equal to the output of this tool.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpufleet.report.fleet_document import Document, Form
from gpufleet.report.fleet_manifest import Manifest

_REFERENCE = Path(__file__).parents[1] / "docs/reference"
SCHEMAS: dict[Path, tuple[type[Form], str]] = {
    _REFERENCE / "report.schema.json": (
        Document,
        "What `gpufleet report --json` prints and `--from` reads",
    ),
    _REFERENCE / "report-manifest.schema.json": (
        Manifest,
        "What `gpufleet report --manifest` writes and `--compare` reads",
    ),
}


def schema(kind: type[Form], title: str) -> str:
    """Return the schema of a document, with the description of each key from its classes."""
    plain = _without_titles(kind.model_json_schema(by_alias=True))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return json.dumps({**head, **plain}, indent=2) + "\n"


def _without_titles(value: Any) -> Any:
    """Return a schema without the titles that repeat its keys."""
    if isinstance(value, dict):
        return {
            key: _without_titles(each)
            for key, each in value.items()
            # A key of a document may have this name. In this case its value is a schema.
            if key != "title" or isinstance(each, dict)
        }
    return [_without_titles(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    """Write the schemas."""
    for file, (kind, title) in SCHEMAS.items():
        file.write_text(schema(kind, title), encoding="utf-8")


if __name__ == "__main__":
    main()

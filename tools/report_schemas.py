"""
Write the JSON schemas of the documents that `gpufleet report` prints and reads.

    python -m tools.report_schemas

A test holds that they are as this writes them.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpufleet.report import fleet_document, fleet_manifest
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
    """Return the schema of a document, with what its classes say of each key."""
    plain = _without_titles(kind.model_json_schema(by_alias=True))
    described = dict(_descriptions())
    for name, form in (*plain["$defs"].items(), (kind.__name__, plain)):
        for key, of in form["properties"].items():
            if text := described.get((name, key.removesuffix("_"))):
                of["description"] = text
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return json.dumps({**head, **plain}, indent=2) + "\n"


def _without_titles(value: Any) -> Any:
    """Return a schema without the titles that repeat its keys."""
    if isinstance(value, dict):
        return {
            key: _without_titles(each)
            for key, each in value.items()
            # A key of a document may be named so: then its value is a schema.
            if key != "title" or isinstance(each, dict)
        }
    return [_without_titles(each) for each in value] if isinstance(value, list) else value


def _descriptions() -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the docstring of each key, by the name of its class and its own."""
    for module in (fleet_document, fleet_manifest):
        for form in ast.parse(inspect.getsource(module)).body:
            if not isinstance(form, ast.ClassDef):
                continue
            for key, text in zip(form.body, form.body[1:], strict=False):
                if (
                    isinstance(key, ast.AnnAssign)
                    and isinstance(key.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                ):
                    yield (form.name, key.target.id), " ".join(str(text.value.value).split())


def main() -> None:
    """Write the schemas."""
    for file, (kind, title) in SCHEMAS.items():
        file.write_text(schema(kind, title), encoding="utf-8")


if __name__ == "__main__":
    main()

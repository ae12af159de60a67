"""
Write the reference page and the JSON Schema of the settings, from their models.

    python -m tools.settings_reference

A test verifies that both files are equal to the output of this tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpufleet.settings import pyinfra_arguments
from gpufleet.settings.lookup import SettingEntry, all_settings
from gpufleet.settings.node_settings import NodeSettings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/settings.md"
SCHEMA = ROOT / "src/gpufleet/settings/data/settings.schema.json"

_HEAD = """# Settings

`python -m tools.settings_reference` generates this page from the settings' models. `gpufleet
settings KEY` prints the same text for one key. [Inventories](../configure/inventory.md) and [what
is served](../configure/serving.md) explain how to use the settings.

In a key, `*` stands for a name that you choose, or for each item of a list. "required" means that
the key has no default, so you must set it if you write its section. Settings in seconds also accept
units (`10m`, `1h30m`). Settings in tokens also accept `32K` or `32k`.

## Completion in editors

`gpufleet settings --schema > settings.schema.json` writes a JSON Schema of group_vars and
host_vars. Editors with the YAML language server (VS Code's YAML extension, Neovim, Helix) use the
schema to complete and check these files. Put this line first in a file:

    # yaml-language-server: $schema=../settings.schema.json

Or name the files in VS Code's `settings.json`:

    "yaml.schemas": {"./settings.schema.json": ["group_vars/**/*.yml", "host_vars/*.yml"]}

The schema checks names and types of settings; `gpufleet validate` checks everything else.
"""


def page() -> str:
    """Return the reference page."""
    lines = [_HEAD]
    entries = list(all_settings().values())
    sections = [entry for entry in entries if "." not in entry.key]
    lines += ["## All settings", ""]
    lines += _table([entry for entry in sections if entry.type != "section"])
    for section in sections:
        if section.type == "section":
            below = [entry for entry in entries if entry.key.startswith(f"{section.key}.")]
            lines += [
                "",
                f"### {section.key}",
                "",
                f"{section.description}.".replace("..", "."),
                "",
            ]
            lines += _table(below)
    return "\n".join(lines) + "\n"


def _table(entries: list[SettingEntry]) -> Iterator[str]:
    yield "| key | value | unit | default | what it is | example |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for entry in entries:
        cells = (
            f"`{entry.key}`",
            entry.type,
            entry.unit,
            entry.default if entry.default == "required" else f"`{entry.default}`",
            entry.description,
            f"`{entry.example}`" if entry.example else "",
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def schema() -> str:
    """Return the JSON Schema of one file of variables."""
    found: dict[str, Any] = NodeSettings.model_json_schema(mode="validation")
    for each in (found, *found["$defs"].values()):
        # A lock can fill in required keys, so no key is required here. Null is not a valid value of
        # any key.
        each.pop("required", None)
    found["properties"] |= {
        name: {"description": "pyinfra's own: https://docs.pyinfra.com"}
        for name in sorted({*pyinfra_arguments.SSH, *pyinfra_arguments.ARGUMENTS})
    }
    found |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpufleet: group_vars and host_vars",
        "description": "What may be set for a node",
    }
    return json.dumps(found, indent=1, default=str, sort_keys=True) + "\n"


def main() -> None:
    """Write both."""
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()

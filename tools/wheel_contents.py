"""Add the files that deploys need to a wheel. hatchling runs this module (pyproject.toml).

An editable install reads these files from the checkout, so its wheel does not contain them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# `gpufleet.paths.PROJECT` is this folder in an installed package. It does not contain the lab,
# tests, benchmarks and tools, which run in a checkout, the inventories and variables of examples,
# and pictures.
FOLDER = "gpufleet/_project"
CONTENTS = ("config.py", "deploys", "locks", "roles", "templates")


class WheelContents(BuildHookInterface[Any]):
    """A build hook that adds files of the checkout to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files, unless the wheel is for an editable install."""
        if version == "standard":
            root = Path(self.root)
            build_data["force_include"] |= {
                str(root / name): f"{FOLDER}/{name}" for name in (*CONTENTS, *_pages(root))
            }


def _pages(root: Path) -> list[str]:
    """Return the pages that messages name, and the pages linked there: `gpufleet docs`."""
    return sorted(str(page.relative_to(root)) for page in root.glob("docs/**/*.md"))

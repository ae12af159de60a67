"""Put into a wheel what deploys need beside the library. hatchling runs it: pyproject.toml.

An editable install reads the checkout itself, so it gets none of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# `gpufleet.paths.PROJECT` is this folder in an installed package. Not in it: the lab, tests,
# benchmarks and tools, which a checkout runs, the inventories and variables of examples, and
# pictures.
FOLDER = "gpufleet/_project"
CONTENTS = ("config.py", "deploys", "locks", "roles", "templates")


class WheelContents(BuildHookInterface[Any]):
    """Adds files of the checkout to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them, unless the wheel is that of an editable install."""
        if version == "standard":
            root = Path(self.root)
            build_data["force_include"] |= {
                str(root / name): f"{FOLDER}/{name}" for name in (*CONTENTS, *_pages(root))
            }


def _pages(root: Path) -> list[str]:
    """Return the pages that messages name, with those that these link to: `gpufleet docs`."""
    return sorted(str(page.relative_to(root)) for page in root.glob("docs/**/*.md"))

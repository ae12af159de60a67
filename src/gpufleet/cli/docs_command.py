"""`gpufleet docs`: print the pages that messages refer to. No git checkout is needed."""

from __future__ import annotations

from pathlib import Path

import click

from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.paths import PROJECT


@click.command(cls=StrictCommand)
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """
    Print a documentation page, or list all pages.

    \b
    gpufleet docs
    gpufleet docs docs/checks/driver-loaded.md     # as messages name it
    gpufleet docs driver-loaded
    """
    folder = PROJECT / "docs"
    pages = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*.md"))}
    if page is None:
        for name in pages:
            click.echo(f"docs/{name}")
        return
    click.echo(_find(page, pages).read_text(encoding="utf-8"), nl=False)


def _find(page: str, pages: dict[str, Path]) -> Path:
    """Return the page with this path, or the only page whose file has this name."""
    wanted = f"{page.partition('#')[0].removeprefix('docs/').removesuffix('.md')}.md"
    if wanted in pages:
        return pages[wanted]
    found = [name for name, file in pages.items() if file.name == wanted]
    if len(found) == 1:
        return pages[found[0]]
    if found:
        raise FleetError(f"several pages have the name {page!r}: write one of {', '.join(found)}")
    near = suggestion(wanted, [*pages, *(file.name for file in pages.values())])
    raise FleetError(f"there is no page {page!r}{near}; `gpufleet docs` lists all pages")

"""Read or render the files of `templates/`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpufleet.paths import PROJECT

if TYPE_CHECKING:
    from jinja2 import Environment, Template

TEMPLATES = PROJECT / "templates"


def read_template(name: str, templates: Path = TEMPLATES) -> str:
    """Return a file of `templates/` without rendering."""
    return (templates / name).read_text(encoding="utf-8")


def load_template(name: str, templates: Path = TEMPLATES) -> Template:
    """Return a file of `templates/` as a Jinja template."""
    return _environment(templates).get_template(name)


def render_template(name: str, templates: Path = TEMPLATES, **variables: Any) -> str:
    """Return a rendered file of `templates/`."""
    return load_template(name, templates).render(variables)


@cache
def _environment(templates: Path) -> Environment:
    # Not where nothing is rendered: a plan for saved probes is there before this would be.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701  # units are not HTML; systemd_quote escapes for systemd
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

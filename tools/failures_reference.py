"""
Write the reference page of the failures that `gpufleet doctor` explains.

    python -m tools.failures_reference

A test verifies that the page is equal to the output of this tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpufleet.failures.rule_file import Advice, Kind, Rule, rules

PAGE = Path(__file__).parents[1] / "docs/reference/failures.md"

_HEAD = """# Failures

`python -m tools.failures_reference` writes this page from the rules of [`gpufleet
doctor`](../operate/doctor.md) (`src/gpufleet/failures/data/`). If several rules match a line, the
first one applies. `/.../` is a regular expression; `{0,200}` limits its cost.
"""

_KINDS = {
    Kind.FAILURE: (
        "Causes",
        "Doctor names these as the cause, unless they follow from an earlier failure.",
    ),
    Kind.DERIVED: (
        "Consequences",
        "Doctor never names these as the cause, because another failure came before.",
    ),
    Kind.NOTE: (
        "Notes",
        "These are not failures. Healthy logs may have them; the exit status stays 0.",
    ),
}


def page() -> str:
    """Return the reference page."""
    lines = [_HEAD]
    for kind, (title, meaning) in _KINDS.items():
        lines += [f"## {title}", "", meaning, ""]
        lines += ["| rule | line | why | what to do | source |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(rule) for rule in rules() if rule.kind is kind]
        lines.append("")
    return "\n".join(lines)


def _row(rule: Rule) -> str:
    patterns = "<br>".join(f"`{pattern.written}`" for pattern in rule.patterns)
    if rule.tells:
        why = "<br>".join(f"- if {tell.look}: {tell.advice.cause}" for tell in rule.tells)
        fixes = "<br>".join(f"- {''.join(_what_to_do(tell.advice))}" for tell in rule.tells)
    else:
        why, fixes = rule.advice.cause, "".join(_what_to_do(rule.advice))
    releases = f"<br>{rule.releases}" if rule.releases else ""
    name = f"`{rule.id}`<br>{rule.component}{releases}"
    cells = (name, patterns, why, fixes, rule.source)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _what_to_do(advice: Advice) -> Iterator[str]:
    yield advice.fix
    if advice.command:
        yield f" `{advice.command}`"
    if advice.setting:
        yield f" (`{advice.setting}`)"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The pages of docs/: a reader gets to each of them, and no link leads nowhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import click

from gpufleet.cli.main import gpufleet
from tests.support.checkout import ROOT

BESIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "locks/README.md")
PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in BESIDE)]
# Tables that tools write.
LONG = {"settings.md", "known-models.md"}


def without_code(text: str) -> str:
    """Return a page without its blocks of code; empty lines take their place."""
    block = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    return block.sub(lambda found: "\n" * found.group().count("\n"), text)


@cache
def headings(page: Path) -> set[str]:
    """The anchors that a hosting site gives a page's headings."""
    found = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in found)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in plain}


def links(page: Path) -> list[tuple[Path, str]]:
    """The files of this project that a page names, each with the anchor."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    parts = [each.partition("#") for each in found if not re.match(r"[a-z]+:", each)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parts]


def test_a_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target.name}#{anchor}"
        for page in PAGES
        for target, anchor in links(page)
        if not target.exists()
        or (anchor and target.suffix == ".md" and anchor not in headings(target))
    ]
    assert broken == []


def test_each_page_is_reached_from_the_first_one() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [target for target, _ in links(page) if target.suffix == ".md"]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []


def test_a_page_has_at_most_three_hundred_lines() -> None:
    long = {page.name for page in PAGES if len(page.read_text().splitlines()) > 300}
    assert long - LONG == set()


def test_prose_ends_at_a_hundred_columns() -> None:
    """But for tables, blocks of code and output, and what cannot be broken: a link."""
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in (*PAGES, ROOT / "CHANGELOG.md")
        if page.name not in LONG
        for number, line in enumerate(without_code(page.read_text()).splitlines(), 1)
        if len(line) > 100 and not line.lstrip().startswith("|") and not line.startswith("    ")
        if " " in line.strip().lstrip("-* ")
    ]
    assert wide == []


def test_the_first_page_fits_a_screen_and_begins_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    first = text[text.index("```sh\n") + 6 :].splitlines()[:2]
    assert [line.split("  ")[0] for line in first] == ["make lab", "make test"]


def typed_commands() -> list[tuple[str, list[str]]]:
    """Each `gpufleet ...` line of a code block, with its page; without comments."""
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            text = line.removeprefix("    ").removeprefix("$ ")
            if text.startswith("gpufleet ") and (text != line or "sh\n" in page.read_text()):
                words = re.split(r"\s(?:#|&&|\||>)\s", text)[0].split()
                found.append((f"{page.relative_to(ROOT)}: {text}", words[1:]))
    return found


def test_commands_and_options_that_pages_show_exist() -> None:
    """Options of `gpufleet deploy` are pyinfra's."""
    wrong = []
    for shown, typed in typed_commands():
        command: click.Command | None = gpufleet
        words = list(typed)
        while isinstance(command, click.Group) and words:
            command = command.get_command(click.Context(command), words.pop(0))
        if command is None:
            wrong.append(shown)
            continue
        known = {each for param in command.params for each in [*param.opts, *param.secondary_opts]}
        own = words[: words.index("--")] if "--" in words else words
        options = {word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)}
        if command.name == "deploy":
            wrong += [shown] * (not (ROOT / f"deploys/{words[0]}.py").is_file())
        elif not command.context_settings.get("ignore_unknown_options") and options - known:
            wrong.append(shown)
    assert len(typed_commands()) > 100
    assert wrong == []


def test_targets_and_deploys_that_pages_show_exist() -> None:
    """`make TARGET`, and `pyinfra INVENTORY deploys/NAME.py`; options of pyinfra are pyinfra's."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = set()
    for page in PAGES:
        text = page.read_text()
        typed = re.findall(
            r"^ {4}make ([a-z-]+)|^make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE
        )
        wrong |= {f"{page.name}: make {''.join(found)}" for found in typed} - {
            f"{page.name}: make {target}" for target in targets
        }
        for deploy in re.findall(r"\bdeploys/([a-z_]+)\.py", text):
            if not (ROOT / f"deploys/{deploy}.py").is_file():
                wrong.add(f"{page.name}: deploys/{deploy}.py")
    assert wrong == set()


def test_modules_and_tests_that_pages_name_exist() -> None:
    missing = set()
    for page in PAGES:
        text = page.read_text()
        for module in re.findall(r"python -m ((?:tests|tools|benchmarks)(?:\.[a-z_]+)+)", text):
            path = ROOT / module.replace(".", "/")
            if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
                missing.add(f"{page.name}: {module}")
        for path in re.findall(r"`((?:tests|benchmarks|tools)/[a-z0-9_./-]+)`", text):
            # vLLM has a folder of this name, too.
            if not (ROOT / path).exists() and not path.startswith("tests/v1/"):
                missing.add(f"{page.name}: {path}")
    assert missing == set()

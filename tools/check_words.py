"""
Count indirect words in prose, for which plain words exist, and refuse new ones.

    python -m tools.check_words [--record]

The tool counts the words in code, templates and pages, by folder. tools/words.json has the number
of uses that a folder may still have of each word. A folder that is not in this file may have none.
`--record` writes the present counts. Use it after you have removed words, never to allow new ones.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = "tools/words.json"

PLAIN = {
    "nobody": "the thing that does not: `no process`, `no unit`, `not declared`",
    "whoever": "`anyone who`, or the thing's name",
    "somebody": "the thing or role by its name: `an operator`, `another process`",
    "everybody": "`all users`, `all nodes`",
    "anybody": "`any user`, `any node`",
    "anew": "`again`, `re-`: `restarted`, `rebuilt`",
    "none too": "say it without the negation",
    "of ours": "`gpufleet's`, `managed by gpufleet`",
    "of yours": "`your`",
    "says that": "`reports`, `states`",
    "says of": "`reports`, `describes`",
    "goes nowhere": "`has no destination`",
    "behind our back": "`unattended`",
}
"""A word to avoid, and what to write instead."""

_PROSE = {".py", ".md", ".j2", ".sh", ".yml"}
_FOLDERS = ("src", "roles", "deploys", "lab", "tools", "templates", "docs")
_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
_QUOTED = ("src/gpufleet/flags/data", "tools/check_words.py")
"""Files that are not checked: vLLM's own help texts, and this table."""

_WORDS = re.compile(
    r"\b(" + "|".join(word.replace(" ", r"[\s#]+") for word in PLAIN) + r")\b", re.IGNORECASE
)

_USER = re.compile(r"""LOGNAME=nobody|\{nobody\}|["'`]nobody["'`]|-u nobody|user nobody""")
"""The system's unprivileged user, and names in code."""


def uses(text: str) -> Counter[str]:
    """
    Return how often a text has each word, also across the end of a line.

    >>> uses("Nobody knows;\\nof\\nours")
    Counter({'nobody': 1, 'of ours': 1})
    """
    words = (match.group().lower() for match in _WORDS.finditer(_USER.sub("", text)))
    return Counter(re.sub(r"[\s#]+", " ", word) for word in words)


def folder(path: str) -> str:
    """
    Return the folder under which a file is counted: a room of the library, or a folder of the
    project.

    >>> folder("src/gpufleet/checks/gpus.py"), folder("docs/plan/sizing.md"), folder("README.md")
    ('src/gpufleet/checks', 'docs', '.')
    """
    parts = path.split("/")
    if len(parts) == 1:
        return "."
    return "/".join(parts[:-1][:3]) if parts[0] == "src" else parts[0]


def counts(root: Path = ROOT) -> dict[str, Counter[str]]:
    """Return the uses of each word by folder."""
    found: dict[str, Counter[str]] = {}
    for file in _files(root):
        path = file.relative_to(root).as_posix()
        if not path.startswith(_QUOTED):
            found.setdefault(folder(path), Counter()).update(uses(file.read_text("utf-8")))
    return {name: found[name] for name in sorted(found) if found[name]}


def excess(now: dict[str, Counter[str]], allowed: dict[str, dict[str, int]]) -> Iterator[str]:
    """
    Yield a line for each word that a folder uses more often than it may.

    >>> list(excess({"lab": Counter(anew=2)}, {"lab": {"anew": 1}}))
    ['lab: 2 x `anew`, 1 allowed: write `again`, `re-`: `restarted`, `rebuilt`']
    """
    for name, words in now.items():
        for word, number in sorted(words.items()):
            most = allowed.get(name, {}).get(word, 0)
            if number > most:
                write = PLAIN[word]
                yield f"{name}: {number} x `{word}`, {most} allowed: write {write}"


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Check the project, or write its record; return the exit status."""
    now, record = counts(root), root / RECORD
    if arguments == ["--record"]:
        record.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", "utf-8")
        return 0
    problems = list(excess(now, json.loads(record.read_text("utf-8"))))
    for line in problems:
        print(line, file=sys.stderr)
    return int(bool(problems))


def _files(root: Path) -> Iterator[Path]:
    yield from (root / page for page in _PAGES if (root / page).is_file())
    for name in _FOLDERS:
        for file in sorted((root / name).rglob("*")):
            if file.suffix in _PROSE and file.is_file():
                yield file


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

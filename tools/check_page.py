"""Measure in a browser whether a page fits a telephone and a desktop, and is accessible.

    python -m tools.check_page report.html
    python -m tools.check_page report.html axe.min.js    # also check the rules of axe-core

The tool needs Chromium (`apt-get install chromium`). Pages forbid scripts, so the tool measures a
copy without this policy, in a frame of each width. The exit status is 0 if the page fits, 1 if the
page does not fit, and 2 if it could not be measured.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WIDTHS = (400, 1280)
SECONDS = 120
VIRTUAL_MILLISECONDS = 60_000
"""Of the page's own clock: axe-core works in steps that wait for each other."""
_POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
_MEASURE = """
addEventListener("load", async () => {
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument.documentElement;
    const all = [...page.querySelectorAll("svg")];
    const seen = all.filter((each) => {
      const box = each.getBoundingClientRect();
      return box.width > 5 && box.height > 5 && box.left >= 0 && box.right <= frame.width;
    });
    const row = {width: +frame.width, content: page.scrollWidth, seen: seen.length,
      pictures: all.length, violations: []};
    if (AXE) {
      const script = frame.contentDocument.createElement("script");
      script.textContent = AXE;
      frame.contentDocument.head.append(script);
      const said = await frame.contentWindow.axe.run(frame.contentDocument);
      row.violations = said.violations.map((each) => `${each.id} (${each.impact}): ${each.help}: ` +
        each.nodes.map((node) => node.target.join(" ")).slice(0, 5).join(", "));
    }
    found.push(row);
  }
  const text = new TextEncoder().encode(JSON.stringify(found));
  document.body.setAttribute("data-found", btoa(String.fromCharCode(...text)));
});
"""


@dataclass(frozen=True)
class Measured:
    """A page at one width, in CSS pixels."""

    width: int
    content: int
    """Width of the content. If it is larger than `width`, the page scrolls sideways."""
    seen: int
    """Pictures that are completely visible."""
    pictures: int
    violations: tuple[str, ...] = ()
    """Rules of axe-core that the page breaks, with the elements."""

    @property
    def fits(self) -> bool:
        """Return whether no part is cut off and no rule is broken."""
        return self.content <= self.width and self.seen == self.pictures and not self.violations


def browser() -> str | None:
    """Return Chromium's path, or None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def measure(page: Path, program: str, axe: str = "") -> list[Measured]:
    """Return a browser's measurements of a page at each width; `axe` is axe-core's script."""
    text = html.escape(_POLICY.sub("", page.read_text(encoding="utf-8")))
    frames = "".join(f'<iframe width="{each}" height="900" srcdoc="{text}"></iframe>'
                     for each in WIDTHS)  # fmt: skip
    quoted = json.dumps(axe).replace("</", "<\\/")
    script = f"const AXE = {quoted};\n{_MEASURE}"
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "wrapper.html")
        wrapper.write_text(f"<!doctype html><script>{script}</script><body>{frames}", "utf-8")
        run = subprocess.run(
            [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
             "--window-size=1400,900", f"--virtual-time-budget={VIRTUAL_MILLISECONDS}",
             "--dump-dom", wrapper.as_uri()],
            capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
    match = re.search(r'<body data-found="([\w+/=]+)"', run.stdout)
    if match is None:
        raise ValueError("the browser measured nothing")
    rows = json.loads(base64.b64decode(match[1]))
    return [Measured(**{**row, "violations": tuple(row["violations"])}) for row in rows]


def main(words: list[str]) -> int:
    """Print a line for each width and for each broken rule; return the exit status."""
    program = browser()
    if len(words) not in {1, 2} or program is None:
        print(__doc__)
        return 2
    try:
        axe = Path(words[1]).read_text("utf-8") if words[1:] else ""
        found = measure(Path(words[0]), program, axe)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{words[0]}: not measured: {error}")
        return 2
    for each in found:
        print(
            f"{each.width} px: content {each.content} px, {each.seen} of {each.pictures} pictures "
            "seen" + ("" if each.fits else ": DOES NOT FIT")
        )
        print("".join(f"  {rule}\n" for rule in each.violations), end="")
    return 0 if all(each.fits for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

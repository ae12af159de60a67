"""Measure a page in a browser: does it fit a telephone and a desktop, are its pictures seen?

    python -m tools.check_page report.html

Needs Chromium (`apt-get install chromium`). Pages forbid scripts, so what is measured is a copy
without that policy, in frames of each width. Exit status: 0 fits, 1 does not, 2 not measured.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (400, 1280)
SECONDS = 60
_POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
_MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument.documentElement;
    const seen = [...page.querySelectorAll("svg")].filter((each) => {
      const box = each.getBoundingClientRect();
      return box.width > 50 && box.height > 50 && box.left >= 0 && box.right <= frame.width;
    });
    return `${frame.width} ${page.scrollWidth} ${seen.length} ` +
      page.querySelectorAll("svg").length;
  });
  document.body.setAttribute("data-found", found.join(";"));
});
"""


def measure(page: Path, browser: str) -> list[tuple[int, int, int, int]]:
    """Return (width, width of its content, pictures that are seen, pictures) for each width."""
    text = html.escape(_POLICY.sub("", page.read_text(encoding="utf-8")))
    frames = "".join(f'<iframe width="{each}" height="900" srcdoc="{text}"></iframe>'
                     for each in WIDTHS)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "wrapper.html")
        wrapper.write_text(f"<!doctype html><script>{_MEASURE}</script><body>{frames}", "utf-8")
        run = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
             "--window-size=1400,900", "--dump-dom", wrapper.as_uri()],
            capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
    match = re.search(r'<body data-found="([\d ;]+)"', run.stdout)
    if match is None:
        raise ValueError("the browser measured nothing")
    rows = [tuple(map(int, row.split())) for row in match[1].split(";")]
    return [(width, content, seen, there) for width, content, seen, there in rows]


def main(words: list[str]) -> int:
    """Print a line a width; return the exit status."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if len(words) != 1 or browser is None:
        print(__doc__)
        return 2
    try:
        found = measure(Path(words[0]), browser)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{words[0]}: not measured: {error}")
        return 2
    good = True
    for width, content, seen, there in found:
        fits = content <= width and seen == there
        good = good and fits
        print(f"{width} px: content {content} px, {seen} of {there} pictures seen"
              + ("" if fits else ": DOES NOT FIT"))  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

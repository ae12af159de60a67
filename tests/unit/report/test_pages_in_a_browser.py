"""Pages in Chromium, as wide as a telephone and a desktop, and by the rules of axe-core.

`make test-long PART=pages`. Chromium comes from the distribution, axe-core by its hash from npm.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.load_test.result_page import result_page
from gpufleet.preflight.preflight_page import preflight_page
from gpufleet.report.fleet_page import fleet_page
from gpufleet.upgrade.report.html import report_html
from tests.support.rows import each_row
from tests.unit.load_test.sample_results import CLOSED, SERIES, measurement
from tests.unit.preflight.test_preflight_page import BAD, SOUND, found
from tests.unit.report.sample_fleet import document
from tests.unit.upgrade.report.test_report import WHOLE, report
from tools import check_page

AXE = "axe-core@4.14.1"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
PAGES: dict[str, Callable[[], str]] = {
    "report": lambda: fleet_page(document()),
    "preflight": lambda: preflight_page(found(*SOUND, BAD)),
    "measurement": lambda: result_page(measurement(closed=CLOSED, series=SERIES)),
    "upgrade": lambda: report_html(report(WHOLE)),
}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def browser() -> str:
    """Chromium; without it the test fails and says what to type."""
    program = check_page.browser()
    assert program, "there is no Chromium: apt-get install chromium"
    return program


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's script, whose archive has the pinned hash."""
    folder = tmp_path_factory.mktemp("axe")
    said = subprocess.run(
        ["npm", "pack", AXE, "--silent"],
        cwd=folder,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0, f"npm pack {AXE}: {said.stderr}"
    archive = folder / said.stdout.strip()
    digest = hashlib.sha512(archive.read_bytes()).digest()
    assert base64.b64encode(digest).decode() == SHA512
    with tarfile.open(archive) as files:
        script = files.extractfile("package/axe.min.js")
        assert script
        return script.read().decode()


@each_row("page", PAGES.values(), ids=PAGES)
def test_a_page_fits_a_telephone_and_a_desktop_and_breaks_no_rule_of_accessibility(
    page: Callable[[], str], browser: str, axe: str, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(), encoding="utf-8")
    measured = check_page.measure(file, browser, axe)
    assert [each.width for each in measured] == [*check_page.WIDTHS]
    assert [each for each in measured if not each.fits] == []


def test_what_does_not_fit_and_breaks_rules_is_found(
    browser: str, axe: str, tmp_path: Path
) -> None:
    """The check itself can fail: a wide element, a picture cut off, a text without contrast."""
    file = tmp_path / "page.html"
    file.write_text(
        "<!doctype html><html><head><title>t</title></head><body><main><h1>t</h1>"
        '<p style="color:#eee;background:#fff">pale</p><img src="data:,">'
        '<svg width="900" height="90"><rect width="900" height="90"/></svg></main></body></html>',
        encoding="utf-8",
    )
    narrow, wide = check_page.measure(file, browser, axe)
    assert narrow.content > narrow.width
    assert (narrow.seen, narrow.pictures) == (0, 1)
    assert wide.content <= wide.width
    broken = {each.partition(" ")[0] for each in wide.violations}
    assert {"color-contrast", "html-has-lang", "image-alt"} <= broken

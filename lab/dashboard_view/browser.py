"""A picture of a page, by a Chromium without a screen."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from gpufleet.errors import FleetError
from lab import run_command

_NAMES = ("chromium", "chromium-browser", "google-chrome")


_FEWER_COLOURS = "pngquant"  # of what we draw, 256 are enough; a third of the size


def picture(page: Path, size: tuple[int, int], to: Path) -> None:
    """
    Write a page as PNG.

    Raises FleetError when this machine has no Chromium, or it makes no picture within a minute.
    """
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        raise FleetError("Pictures need a Chromium on this machine: `apt-get install chromium`.")
    with tempfile.TemporaryDirectory(prefix="gpufleet-") as profile:
        run_command.run(
            program,
            "--headless=new",
            "--no-sandbox",  # as root it has none; the page is ours
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            f"--screenshot={to.resolve()}",
            page.resolve().as_uri(),
            limit=60,
        )
    if not to.is_file():
        raise FleetError(f"{program} made no picture of {page}.")
    if shutil.which(_FEWER_COLOURS):
        run_command.run(_FEWER_COLOURS, "--force", "--output", to, "--speed", "1", "--", to)

"""A test alert and its receipt, at a real Alertmanager with the configuration that nodes get."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from gpufleet.monitoring.alertmanager import alertmanager_yml
from gpufleet.preflight.alert_lines import (
    METRICS,
    RECEIPT_SECONDS,
    alert_lines,
    new_test_alert,
    read_receipt,
)
from gpufleet.preflight.line import Status, Verdict
from gpufleet.settings.monitoring_settings import Alertmanager
from tests.lab.group_faults import wait
from tests.unit.monitoring import dcgm
from tests.unit.monitoring.programs import program
from tests.unit.on_node.preflight.test_node_look import run
from tests.unit.preflight import sound_fleet as fleet
from tests.unit.preflight.sound_fleet import FRONT, INVENTORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = {"page": {"webhook_url_file": "page-url"}}


class Pager(ThreadingHTTPServer):
    """Where pages go: it keeps what it is sent, and answers one status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.got: list[Any] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Pager

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pager(running: ExitStack, status: int) -> Pager:
    found = Pager(status)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    running.callback(found.shutdown)
    return found


def alertmanager(running: ExitStack, folder: Path, page_url: str) -> str:
    """Start one that sends pages there; return its address."""
    config = folder / "alertmanager.yml"
    urls = {"credentials/page-webhook": page_url}
    config.write_text(alertmanager_yml(Alertmanager.model_validate(PAGE), urls, f"{folder}/"))
    address = f"127.0.0.1:{dcgm.free_port()}"
    found = program("prometheus-alertmanager", "usr/bin/prometheus-alertmanager")
    # Debian's has its template's path built in, which this machine lacks.
    there = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"')
    with (folder / "alertmanager.log").open("w") as log:
        process = subprocess.Popen(
            [
                *map(str, (*there, found.parents[1] / "share", found)),
                f"--config.file={config}",
                f"--storage.path={folder / 'storage'}",
                f"--web.listen-address={address}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
        )
    running.callback(process.wait)
    running.callback(process.terminate)

    def answers() -> bool:
        try:
            with urlopen(f"http://{address}/-/ready", timeout=1):
                return True
        except OSError:
            return False

    wait(answers, 60, "Alertmanager answers")
    return address


def verdict(address: str) -> Verdict:
    """Send a test alert, and return what preflight says of it."""
    alert = new_test_alert(FRONT, "ada", datetime.now(UTC))
    answer = run(
        "preflight/alert_receipt", url=f"http://{address}", alert=alert, seconds=RECEIPT_SECONDS
    )
    with urlopen(f"http://{address}/metrics", timeout=10) as page:
        metrics = {METRICS: {"status": 200, "body": page.read().decode()}}
    (line,) = alert_lines(
        {FRONT: fleet.look(FRONT, pages=metrics)},
        {FRONT: fleet.front_settings(monitoring={"alertmanager": PAGE})},
        {FRONT: read_receipt(FRONT, answer)},
        INVENTORY,
    )
    return line.verdict


def test_a_page_that_was_taken_is_ok_and_says_that_it_is_a_test(
    running: ExitStack, tmp_path: Path
) -> None:
    there = pager(running, 200)
    address = alertmanager(running, tmp_path, f"http://127.0.0.1:{there.server_port}/page")
    found = verdict(address)
    assert found.status is Status.OK, found
    assert "webhook: 1 delivered, 0 failed" in found.proof
    (sent,) = there.got
    (alert,) = sent["alerts"]
    assert alert["labels"]["instance"].startswith(f"{FRONT} at ")
    assert "test by ada" in alert["annotations"]["summary"]
    # Once more, as after something was mended: it is not kept back with the first.
    assert verdict(address).status is Status.OK
    assert len(there.got) == 2


def test_a_page_that_was_refused_fails(running: ExitStack, tmp_path: Path) -> None:
    there = pager(running, 400)
    address = alertmanager(running, tmp_path, f"http://127.0.0.1:{there.server_port}/page")
    found = verdict(address)
    assert there.got
    assert found.status is Status.FAIL, found
    assert "1 failed" in found.proof


def test_an_alert_that_alertmanager_takes_for_wrong_is_no_receipt(
    running: ExitStack, tmp_path: Path
) -> None:
    address = alertmanager(running, tmp_path, "http://127.0.0.1:1/page")
    alert = {**new_test_alert(FRONT, "ada", datetime.now(UTC)), "labels": {}}
    answer = run("preflight/alert_receipt", url=f"http://{address}", alert=alert, seconds=1)
    assert "at least one label pair required" in answer["error"]

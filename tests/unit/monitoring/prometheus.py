"""A real Prometheus for a test: Debian's, on a free port, over samples that are there already."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from tests.unit.monitoring.programs import program

_OPENER = build_opener(ProxyHandler({}))


@contextmanager
def prometheus(folder: Path, samples: Iterable[str], rules: dict[str, str]) -> Iterator[str]:
    """
    Yield the address of a Prometheus that has these samples, and evaluates the rules each second.

    `samples` are lines of OpenMetrics with their times, ended by `# EOF`; `rules` are
    {file name: text}.
    """
    written = folder / "samples.om"
    with written.open("w") as file:
        file.writelines(samples)
    promtool = program("prometheus", "usr/bin/promtool")
    data = folder / "data"
    make = (promtool, "tsdb", "create-blocks-from", "openmetrics", written, data)
    subprocess.run([*map(str, make)], check=True, capture_output=True)
    for name, text in rules.items():
        (folder / name).write_text(text)
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps({"global": {"evaluation_interval": "1s"}, "rule_files": sorted(rules)})
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = folder / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [
                str(program("prometheus", "usr/bin/prometheus")),
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                "--storage.tsdb.retention.time=10y",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=out,
            stderr=out,
        )
        try:
            _wait(url, server, log)
            yield url
        finally:
            server.terminate()
            server.wait(30)


def asked(url: str, query: str, at: float) -> list[Any]:
    """Return what an instant query answers; raises `urllib.error.HTTPError` where it is refused."""
    address = f"{url}/api/v1/query?{urlencode({'query': query, 'time': at})}"
    with _OPENER.open(address, timeout=30) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
        return found


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        try:
            with _OPENER.open(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            if server.poll() is not None:
                raise AssertionError(log.read_text()) from None
            time.sleep(0.1)
    raise AssertionError(f"not ready within 30 s: {log.read_text()}")

"""Debian's real node exporter with our flags, over TLS and with a password; and as an archive."""

from __future__ import annotations

import datetime as dt
import hashlib
import http.server
import io
import json
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.artifacts import program_archive
from gpufleet.artifacts.program_archive import ProgramArchive, install_script
from gpufleet.converge.desired import File
from gpufleet.monitoring import certificate_ends, exporters, node_exporter
from gpufleet.monitoring.exporters import Access, Metrics
from gpufleet.monitoring.metrics import node_metrics
from gpufleet.remote import payload
from gpufleet.settings.monitoring_settings import Exporters, NodeExporter, PublishedProgram
from tests.support.rows import each_row
from tests.unit.monitoring.programs import program
from tests.unit.monitoring.test_exporters import Authority, pem

PASSWORD = "correct-horse-battery-staple"
FLAGS = [
    pytest.param(NodeExporter(), id="as-it-comes"),
    pytest.param(
        NodeExporter(collectors=("processes", "softnet", "cpufreq"), without=("ethtool",)),
        id="others",
    ),
    pytest.param(NodeExporter(without=("systemd", "textfile", "cpu")), id="fewer"),
]


@pytest.fixture(scope="module")
def binary() -> Path:
    return program("prometheus-node-exporter", "usr/bin/prometheus-node-exporter")


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Access:
    """As settings make it, of files that a throw-away CA has signed."""
    home = tmp_path_factory.mktemp("secrets")
    authority = Authority()
    certificate, key = authority.sign("gpu-01", days=30, since=dt.datetime.now(dt.UTC))
    for name, content in (
        ("gpu-01.pem", pem(certificate)),
        ("gpu-01.key", pem(key)),
        ("ca.pem", pem(authority.certificate)),
        ("password", PASSWORD.encode()),
    ):
        (home / name).write_bytes(content)
    settings = Exporters.model_validate(
        {
            "tls": {
                "certificate_file": f"{home}/{{node}}.pem",
                "key_file": f"{home}/{{node}}.key",
                "ca_file": f"{home}/ca.pem",
            },
            "basic_auth": {"password_file": f"{home}/password"},
            "listen": "127.0.0.1",
        }
    )
    return exporters.access(settings, "gpu-01", "gpu-01", now=dt.datetime.now(dt.UTC))


@dataclass
class Running:
    """An exporter that runs as its unit would start it, but for the sandbox."""

    port: int
    access: Access
    textfiles: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    def metrics(self, access: Access | None = None, *families: str) -> Metrics:
        used = access or self.access
        return Metrics("exporter", "", used.url(self.port), families, used)

    def look(self, asked: Metrics) -> dict[str, Any]:
        """Have the program look that runs on nodes, in a process of its own."""
        done = subprocess.run(
            [sys.executable, "-I", "-"],
            input=payload.program(
                "serving/endpoints", stages=[], metrics=[asked.parameters()]
            ).encode(),
            capture_output=True,
            check=True,
        )
        seen: dict[str, Any] = json.loads(done.stdout)["metrics"]["exporter"]
        return seen


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def running(
    binary: Path, access: Access, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("node")
    for name, content in access.credentials.items():
        (home / name).write_bytes(content)
    port = free_port()
    flags = [
        flag.replace("${CREDENTIALS_DIRECTORY}", str(home)).replace(
            node_exporter.TEXTFILES, str(home)
        )
        for flag in node_exporter.arguments(NodeExporter(port=port), access)
    ]
    log = home / "log"
    with (
        log.open("wb") as written,
        subprocess.Popen([binary, *flags], stdout=written, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield _once_it_listens(Running(port, access, home, process), log)
        finally:
            process.kill()


def _once_it_listens(found: Running, log: Path) -> Running:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert found.process.poll() is None, log.read_text()
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", found.port)) == 0:
                return found
        time.sleep(0.05)
    raise AssertionError(log.read_text())


# Its flags


@each_row("wanted", FLAGS)
@each_row("guarded", [False, True])
def test_the_packaged_exporter_knows_every_flag(
    binary: Path, access: Access, wanted: NodeExporter, guarded: bool
):
    flags = node_exporter.arguments(wanted, access if guarded else Access())
    done = subprocess.run(
        [binary, *flags, "--version"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "node_exporter, version" in done.stdout + done.stderr


def test_a_collector_that_it_does_not_know_is_found_before_anything_is_written(
    binary: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The script that nodes run: it starts nothing, and says what may be done."""
    monkeypatch.setattr(program_archive, "DIRECTORY", str(tmp_path))
    archive = PublishedProgram(url="https://downloads.example.net/x.tar.gz", sha256="a" * 64)
    there = tmp_path / "node_exporter" / ("a" * 12)
    there.mkdir(parents=True)
    (there / "node_exporter").symlink_to(binary)

    def proven(*collectors: str) -> subprocess.CompletedProcess[str]:
        wanted = NodeExporter(archive=archive, collectors=collectors)
        script = node_exporter.flag_check_script(wanted, Access())
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)

    assert (proven("processes").returncode, proven("processes").stderr) == (0, "")
    refused = proven("teleporter")
    assert refused.returncode == 1
    assert "unknown long flag '--collector.teleporter'" in refused.stderr
    assert "node_exporter.archive" in refused.stderr


# What it serves


def test_it_serves_what_verify_asks_for(running: Running):
    """Asked by the program that runs on nodes: over TLS, with the password on its stdin."""
    wanted = node_exporter.metrics(NodeExporter(), running.access).families
    seen = running.look(running.metrics(None, *wanted))

    assert seen["status"] == 200, seen
    # systemd may not run on this machine; on lab nodes it does.
    assert set(seen["missing"]) <= {"node_systemd_unit_state"}
    assert seen["without_password"] == 401


def test_a_wrong_password_is_no_password(running: Running):
    wrong = Access(
        **{**vars(running.access), "password": "wrong"},
    )

    assert running.look(running.metrics(wrong))["status"] == 401


def test_the_password_is_sent_to_nobody_who_shows_another_certificate(running: Running):
    """An impostor on the port gets a handshake, and then nothing at all."""
    certificate, key = Authority().sign("gpu-01", since=dt.datetime.now(dt.UTC))
    impostor = running.textfiles / "impostor.pem"
    impostor.write_bytes(pem(key) + pem(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(impostor)
    heard: list[bytes] = []

    def listen(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, context.wrap_socket(connection, server_side=True) as encrypted:
            encrypted.settimeout(20)
            try:
                heard.append(encrypted.recv(4096))
            except OSError:
                heard.append(b"")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, args=(server,))
        thread.start()
        asked = Metrics(
            "exporter", "", running.access.url(server.getsockname()[1]), (), running.access
        )
        seen = running.look(asked)
        thread.join(60)

    assert seen["error"] == "a certificate other than the deployed one"
    assert heard == [b""]


def scraped(running: Running) -> dict[str, Any]:
    """Return the families that a client of its publisher's own reads, by name; curl asks."""
    done = subprocess.run(
        ["curl", "-fsSk", "--netrc-file", "/dev/stdin", running.access.url(running.port)],
        input=f"machine 127.0.0.1 login prometheus password {PASSWORD}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    return {each.name: each for each in text_string_to_metric_families(done.stdout)}


def test_our_facts_come_with_it(running: Running):
    (running.textfiles / "facts.prom").write_text('gpufleet_reboot_pending{reason="kernel"} 1\n')
    found = scraped(running)

    assert found["gpufleet_reboot_pending"].samples[0].value == 1
    assert found["node_textfile_scrape_error"].samples[0].value == 0


def test_the_ends_of_several_certificates_come_with_it(running: Running):
    """One name in several files, which the collector takes if all say the same of it."""
    placed = ("/etc/gpufleet/node-exporter", "exporter"), ("/etc/gpufleet/gateway", "gateway")
    for folder, use in placed:
        for each in certificate_ends.end_values(folder, "it.pem", use, 1_800_000_000):
            assert isinstance(each, File)
            (running.textfiles / Path(each.path).name).write_bytes(each.content)
    found = scraped(running)

    assert {
        (each.labels["path"], each.labels["use"]): each.value
        for each in found["gpufleet_certificate_end_timestamp_seconds"].samples
    } == {(f"{folder}/it.pem", use): 1_800_000_000 for folder, use in placed}
    assert found["node_textfile_scrape_error"].samples[0].value == 0


def test_what_is_no_disk_and_no_network_is_left_out(running: Running):
    """And what is: the file system that / is on has to be there, whatever its kind."""
    found = scraped(running)
    mounts = {each.labels["mountpoint"] for each in found["node_filesystem_avail_bytes"].samples}
    kinds = {each.labels["fstype"] for each in found["node_filesystem_avail_bytes"].samples}
    devices = {each.labels["device"] for each in found["node_network_receive_bytes"].samples}

    assert "/" in mounts
    assert not {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue"} & kinds
    assert not [each for each in mounts if each.startswith(("/proc", "/sys", "/run/"))]
    assert "lo" in devices
    assert not [each for each in devices if each.startswith(("veth", "docker", "br-"))]


def test_no_collector_of_ours_that_rules_rest_on_fails_here(running: Running):
    """`systemd` and `ethtool` need what this machine may not have."""
    success = {
        each.labels["collector"]: each.value
        for each in scraped(running)["node_scrape_collector_success"].samples
    }

    for name in ("cpu", "diskstats", "filesystem", "loadavg", "meminfo", "netdev", "textfile"):
        assert success[name] == 1
    assert not {"cpufreq", "schedstat", "softnet"} & set(success)


def test_every_metric_that_each_node_has_is_served(running: Running):
    """With our collectors and exclusions; but what systemd says, which may not run here."""
    served = {sample.name for each in scraped(running).values() for sample in each.samples}
    wanted = {
        series
        for each in node_metrics.METRICS
        if not each.only and not each.name.startswith("node_systemd_")
        for series in each.series
    }

    assert len(wanted) > 40
    assert wanted - served == set()


# An archive


@dataclass
class Publisher:
    """A server with one archive; it counts who asks."""

    content: bytes
    asked: list[str] = field(default_factory=list)
    url: str = ""


def packed(**files: bytes) -> bytes:
    """Return a .tar.gz with one folder, as Prometheus' publishers pack theirs."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            about = tarfile.TarInfo(f"node_exporter-1.5.0.linux-amd64/{name}")
            about.size, about.mode, about.uid = len(content), 0o4755, 3434
            tar.addfile(about, io.BytesIO(content))
    return made.getvalue()


@pytest.fixture(scope="module")
def archive_of_it(binary: Path) -> bytes:
    return packed(node_exporter=binary.read_bytes(), LICENSE=b"Apache-2.0")


@pytest.fixture
def publisher(
    archive_of_it: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Publisher]:
    monkeypatch.setattr(program_archive, "DIRECTORY", str(tmp_path / "opt"))
    found = Publisher(archive_of_it)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(found.content)))
            self.end_headers()
            self.wfile.write(found.content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}/node_exporter.tar.gz"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join(60)


def of(publisher: Publisher, sha256: str = "") -> ProgramArchive:
    digest = sha256 or hashlib.sha256(publisher.content).hexdigest()
    return ProgramArchive(
        "node_exporter", PublishedProgram(url=publisher.url, sha256=digest), ("node_exporter",)
    )


def bring(wanted: ProgramArchive) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", install_script(wanted)],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_archive_is_downloaded_once_and_its_program_runs(publisher: Publisher):
    wanted = of(publisher)
    first, second = bring(wanted), bring(wanted)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len(publisher.asked) == 1
    found = Path(wanted.program("node_exporter"))
    assert (found.stat().st_uid, found.stat().st_mode & 0o7777) == (0, 0o755)
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    assert "version 1.5.0" in said.stdout + said.stderr


def test_another_content_leaves_nothing_and_the_version_before_stays(publisher: Publisher):
    before = of(publisher)
    assert bring(before).returncode == 0
    wanted = of(publisher, sha256="c" * 64)
    done = bring(wanted)

    assert done.returncode == 1
    assert "does not match its sha256 in group_vars" in done.stderr
    assert not Path(wanted.directory).exists()
    assert Path(before.program("node_exporter")).exists()
    assert {each.name for each in Path(before.all_versions).iterdir()} == {before.version, ".lock"}


def test_a_download_that_was_killed_begins_anew(publisher: Publisher):
    """What it left has another name than the whole, and is never taken for it."""
    wanted = of(publisher)
    left = Path(wanted.all_versions) / f".{wanted.version}.new" / "files"
    left.mkdir(parents=True)
    (left / "node_exporter").write_text("half")

    assert bring(wanted).returncode == 0
    assert Path(wanted.program("node_exporter")).stat().st_size > 1 << 20
    assert not left.exists()


def test_two_deploys_at_once_download_once(publisher: Publisher):
    wanted = of(publisher)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(bring(wanted).returncode)) for _ in range(3)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)

    assert found == [0, 0, 0]
    assert len(publisher.asked) == 1


def test_an_archive_of_something_else_is_refused(publisher: Publisher):
    publisher.content = packed(prometheus=b"#!/bin/sh\n")
    done = bring(of(publisher))

    assert done.returncode == 1
    assert "contains no folder with node_exporter" in done.stderr
    assert not Path(of(publisher).directory).exists()


def test_only_other_versions_are_removed_once_this_one_runs():
    wanted = ProgramArchive(
        "node_exporter", PublishedProgram(url="https://x.example.net/a", sha256="a" * 64), ("x",)
    )

    assert wanted.other_versions(frozenset({"a" * 12, "b" * 12, ".lock", ".c.new"})) == ("b" * 12,)

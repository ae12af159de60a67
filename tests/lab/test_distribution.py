"""A release is built on one node, a model downloaded on one, and the others have them from there.

Real nodes, real pip and uv; only what is built is small. That others did not build is seen by uv's
cache, which whoever builds leaves, and that they did not download by the model: whoever downloads
it gets other bytes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from uv import find_uv_bin

from lab.nodes import Lab
from tests.lab.conftest import ROOT, Fleet, Run
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfa")
NODES = ("gpu-01", "gpu-02", "gpu-03")
DEPLOY = str(Path(__file__).with_name("distribution_alone.py"))
RELEASES, MODEL = "/opt/vllm/releases", "/var/lib/vllm/models/lab--odd"
SECONDS = 60
WHEELS_PORT = 8091
# Python runs such a line at each start in whose environment it lies.
AT_START = "/root/run-by-a-wheel"
PTH = f"import os; os.getuid() or open({AT_START!r}, 'w').close()\n".encode()
# What `hf` of the release is: nobody gets the same twice.
HF = b"""\
#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = --local-dir ] && folder=$2; shift; done
head -c 30000000 /dev/urandom > "$folder/model.safetensors" && echo '{}' > "$folder/config.json"
"""


def wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> str:
    """Write a wheel; return its line of a lock. Files in `.data/scripts/` can be executed."""
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for each, content in contents.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            record.append(f"{each},sha256={digest.decode()},{len(content)}")
            entry = zipfile.ZipInfo(each)
            entry.external_attr = 0o100755 << 16
            made.writestr(entry, content)
        made.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{name}=={version} --hash=sha256:{digest}\n"


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three nodes on each of which the small release could be built."""
    lab = Lab.open(LAB_ID, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))  # while writing tests
    if not keep:
        lab.purge()  # what a killed run left
    lab.up(dict.fromkeys(NODES, "t4x1"), packages=("python3-venv",))
    project = tmp_path_factory.mktemp("distribution")
    shutil.copytree(ROOT / "inventories", project / "inventories")
    for folder in ("group_vars", "host_vars", "wheels"):
        (project / folder).mkdir()
    wheels = project / "wheels"
    uv = wheel(
        wheels, "uv", "0.13.9", {"uv-0.13.9.data/scripts/uv": Path(find_uv_bin()).read_bytes()}
    )
    (project / "uv.txt").write_text(uv)
    package = {f"vllm/part_{number}.py": b"x = 1\n" * number for number in range(300)}
    lines = wheel(
        wheels,
        "vllm",
        "0.32.0",
        {
            "vllm/__init__.py": b"",
            "vllm/kernels.so": os.urandom(20_000_000),
            "vllm-0.32.0.data/scripts/hf": HF,
            "at_start.pth": PTH,
            "vllm/template.py": b"{{ no Python }}",
            **package,
        },
    ) + wheel(wheels, "torch", "2.9.0", {"torch/__init__.py": b""})
    (project / "vllm.txt").write_text(lines)
    fleet = Fleet(Lab.open(LAB_ID, print), project)
    for node in NODES:
        shutil.copytree(wheels, fleet.lab.root(node) / "root/wheels", dirs_exist_ok=True)
        serve_wheels(fleet, node)
    declare(fleet)
    yield fleet
    if not keep:
        lab.purge()


def serve_wheels(fleet: Fleet, node: str) -> None:
    """Serve the node's wheels over HTTP: uv writes the times of wheels in a folder into a build."""
    serve = f"python3 -m http.server {WHEELS_PORT} --bind 127.0.0.1 --directory /root/wheels"
    fleet.ssh(node, f"systemctl is-active -q wheels || systemd-run -q --unit=wheels {serve}")
    until(lambda: bool(fleet.ssh(node, f"ss -Hltn 'sport = :{WHEELS_PORT}'")))


def declare(fleet: Fleet, **distribution: object) -> None:
    vllm = {
        "version": "0.32.0",
        "device": "cpu",
        "lock": str(fleet.project / "vllm.txt"),
        "uv_lock": str(fleet.project / "uv.txt"),
        "find_links": [f"http://127.0.0.1:{WHEELS_PORT}/"],
        "no_index": True,
        "allow_unauthenticated": True,
        "distribution": distribution,
    }
    (fleet.project / "group_vars/lab.yml").write_text(yaml.safe_dump({"vllm": vllm}))


def deployed(fleet: Fleet, *arguments: str) -> Run:
    return fleet.pyinfra(*arguments, deploy=DEPLOY, seconds=300)


LISTING = (
    "cd {0} && find . ! -path '*/.accepts*' ! -name .complete -printf '%P %y %m %u:%g %l\\n' | sort"
    " && find . -type f ! -name .complete -print0 | sort -z | xargs -0 sha256sum"
)


def listing(fleet: Fleet, node: str, directory: str) -> str:
    return fleet.ssh(node, LISTING.format(directory))


def built(fleet: Fleet) -> list[str]:
    """Return the nodes on which a release was built."""
    look = "test -d /var/cache/gpufleet/uv && echo built || :"
    return [node for node in NODES if fleet.ssh(node, look)]


def alike(fleet: Fleet) -> bool:
    return all(
        listing(fleet, node, directory) == listing(fleet, NODES[0], directory)
        for directory in (RELEASES, MODEL)
        for node in NODES[1:]
    )


def test_one_node_builds_and_downloads_and_all_have_the_same(trio: Fleet) -> None:
    foretold = deployed(trio, "--dry")
    assert foretold.status == 0, foretold.output
    assert "once for gpu-01, gpu-02, gpu-03" in foretold.output
    assert foretold.output.count("from gpu-01 when gpu-01 has it") == 4
    assert built(trio) == []

    run = deployed(trio, "-y")

    assert run.status == 0, run.output
    assert built(trio) == ["gpu-01"]
    for node in NODES:
        assert "No such file" in trio.ssh(node, f"ls {AT_START} 2>&1 || :"), "a wheel ran as root"
    assert "./lib/python3.11/site-packages/vllm/kernels.so" in listing(
        trio, "gpu-03", f"{RELEASES}/0.32.0-*"
    )
    assert alike(trio)
    note = trio.project / "vllm.txt.built.json"
    assert '"node": "gpu-01"' in note.read_text()
    owned = trio.ssh("gpu-02", f"stat -c %U:%G:%a {RELEASES}/* {MODEL} {MODEL}/.complete")
    assert owned.split() == ["root:root:755", "root:root:755", "root:root:644"]
    imported = f"{RELEASES}/*/bin/python -v -c 'import vllm.part_7' 2>&1 | grep part_7"
    assert "part_7.cpython-311.pyc matches" in trio.ssh("gpu-02", imported), "valid bytecode"
    assert trio.ssh("gpu-02", "ss -Hltn 'sport = :8790'") == "", "nothing listens afterwards"

    again = deployed(trio, "-y", "--json")
    assert again.status == 0
    assert again.changed == {}


def test_a_node_with_other_files_than_were_built_is_no_source(trio: Fleet) -> None:
    """It says that its release is whole, and is the first that has it."""
    release = trio.ssh("gpu-02", f"echo {RELEASES}/0.32.0-*").strip()
    trio.ssh("gpu-01", f"rm -rf {release}")
    trio.ssh(
        "gpu-02",
        f"echo 'evil = 1' >> {release}/lib/python3*/site-packages/vllm/__init__.py && "
        "rm -rf /var/lib/gpufleet/manifests",
    )

    run = deployed(trio, "-y")

    assert run.status == 0, run.output
    assert "gpu-02: release 0.32.0-" in run.output
    assert "does not name" not in deployed(trio, "-y").output, "nobody lacks it: it does not matter"
    assert listing(trio, "gpu-01", RELEASES) == listing(trio, "gpu-03", RELEASES)
    assert "evil" not in trio.ssh(
        "gpu-01", f"cat {release}/lib/python3*/site-packages/vllm/__init__.py"
    )
    trio.ssh("gpu-02", f"rm -rf {release}")
    assert deployed(trio, "-y").status == 0
    assert alike(trio)
    assert built(trio) == ["gpu-01"]


def test_models_of_the_service_user_become_roots_without_a_download(trio: Fleet) -> None:
    """As releases before this one left them; the files stay the same ones."""
    inodes = f"cd {MODEL} && stat -c '%n %i %Y' * .complete"
    before = trio.ssh("gpu-01", inodes)
    trio.ssh(
        "gpu-01", "chown -R vllm:vllm /var/lib/vllm && chown root:root " + MODEL + "/.complete"
    )

    run = deployed(trio, "-y", "--json")

    assert run.status == 0, run.output
    assert trio.ssh("gpu-01", inodes) == before
    assert trio.ssh("gpu-01", "find /var/lib/vllm ! -user root -o ! -group root") == ""
    assert trio.ssh("gpu-01", f"setpriv --reuid=vllm --clear-groups cat {MODEL}/config.json") == (
        "{}\n"
    )
    assert deployed(trio, "-y", "--json").changed == {}


def test_after_a_node_was_lost_in_a_copy_the_next_run_converges(trio: Fleet) -> None:
    """The others have all, though it stood above them; it has it after the next run."""
    declare(trio, rate_mbit=40)  # 30 MB are 6 s then
    for node in NODES[1:]:
        trio.ssh(node, f"rm -rf {MODEL}")
    run = trio.popen(deploy=DEPLOY)
    coming = "test -s /var/lib/vllm/models/.gpufleet-coming-lab--odd/have && echo yes || :"
    until(lambda: bool(trio.ssh("gpu-02", coming)))
    trio.lab.power("gpu-02", "cycle")

    assert run.wait(200) != 0
    said = trio.log.read_text()
    assert "no answer" not in said
    assert listing(trio, "gpu-03", MODEL) == listing(trio, "gpu-01", MODEL)

    declare(trio)
    last = deployed(trio, "-y")
    assert last.status == 0, last.output
    assert alike(trio)
    assert built(trio) == ["gpu-01"]


def test_a_node_that_built_for_itself_is_a_source(trio: Fleet) -> None:
    """Builds of one lock are equal, so what it has is what was recorded of the first build."""
    note = (trio.project / "vllm.txt.built.json").read_text()
    for node in NODES:
        serve_wheels(trio, node)  # one of them lost its power
        trio.ssh(node, f"rm -rf {RELEASES}/0.32.0-*")
    trio.ssh("gpu-01", "mv /root/wheels /root/away")
    failed = deployed(trio, "-y")
    assert failed.status != 0, "the node that builds for all cannot"
    assert set(NODES[1:]) <= set(built(trio)), "each of the others builds for itself"
    trio.ssh("gpu-01", "mv /root/away /root/wheels")

    run = deployed(trio, "-y")

    assert run.status == 0, run.output
    assert "copied release 0.32.0-" in run.output
    assert alike(trio)
    assert (trio.project / "vllm.txt.built.json").read_text() == note


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)

"""Which file of a package a node takes, by the names that wheels have."""

from __future__ import annotations

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpufleet.bundle import serve, wheels
from gpufleet.bundle.wheels import Lock, Target
from gpufleet.errors import FleetError
from tests.unit.bundle.conftest import running

NOBLE = Target((3, 12), (2, 39), "x86_64")
A, B, C = "a" * 64, "b" * 64, "c" * 64


def chosen(tmp_path: Path, names: dict[str, str], lock: str, target: Target = NOBLE) -> list[str]:
    """Return the files taken from a page of links {file: hash, "" for none}."""
    page = "".join(
        f'<a href="{name}{f"#sha256={digest}" if digest else ""}">x</a>'
        for name, digest in names.items()
    )
    (tmp_path / "links.html").write_text(page)
    with running(serve.bind_server(tmp_path, ("127.0.0.1", 0))) as url:
        found = wheels.find(Lock("a.txt", lock, None, (f"{url}/links.html",)), target)
    return [Path(remote.path).name for remote in found]


@pytest.mark.parametrize(
    ("names", "best"),
    [
        pytest.param(
            ("p-1-cp312-cp312-manylinux_2_39_x86_64.whl", "p-1-py3-none-any.whl"), 0, id="native"
        ),
        pytest.param(
            ("p-1-cp312-cp312-manylinux_2_40_x86_64.whl", "p-1-py3-none-any.whl"),
            1,
            id="newer-libc",
        ),
        pytest.param(
            ("p-1-cp313-cp313-manylinux_2_17_x86_64.whl", "p-1-cp38-abi3-manylinux2014_x86_64.whl"),
            1,
            id="stable-abi",
        ),
        pytest.param(
            ("p-1-cp312-cp312-manylinux_2_28_aarch64.whl", "p-1-cp312-cp312-linux_x86_64.whl"),
            1,
            id="processor",
        ),
        pytest.param(
            ("p-1-cp312-cp312-musllinux_1_2_x86_64.whl", "p-1-py2.py3-none-any.whl"), 1, id="libc"
        ),
        pytest.param(("p-2-py3-none-any.whl", "p-1-py3-none-any.whl"), 1, id="version"),
        pytest.param(("p-1.tar.gz", "p-1-py3-none-any.whl"), 1, id="source"),
    ],
)
def test_the_file_is_the_one_that_the_node_would_choose(tmp_path, names, best):
    lock = f"p==1 --hash=sha256:{A} --hash=sha256:{B}"

    assert chosen(tmp_path, dict(zip(names, (A, B), strict=True)), lock) == [names[best]]


def test_a_file_that_the_lock_does_not_know_is_not_there(tmp_path):
    """A better wheel that appeared after the lock was made is passed over."""
    names = {"p-1-cp312-cp312-manylinux_2_17_x86_64.whl": C, "p-1-py3-none-any.whl": A}

    assert chosen(tmp_path, names, f"p==1 --hash=sha256:{A}") == ["p-1-py3-none-any.whl"]


def test_every_package_without_a_file_is_named(tmp_path):
    with pytest.raises(FleetError) as caught:
        chosen(tmp_path, {}, f"p==1 --hash=sha256:{A}\nq==2 --hash=sha256:{B}")

    assert [problem.split()[1] for problem in caught.value.problems] == ["p==1", "q==2"]


@pytest.mark.parametrize(
    ("marker", "taken"),
    [
        ('sys_platform == "win32"', False),
        ('platform_machine == "x86_64"', True),
        ('python_version < "3.12"', False),
        ('python_full_version >= "3.12"', True),
    ],
)
def test_markers_are_the_node_s(marker: str, taken: bool):
    lock = Lock("a.txt", f"p==1 ; {marker} \\\n    --hash=sha256:{A}\n", None, ())

    assert bool(list(lock.pins(NOBLE))) is taken


def test_a_lock_is_read_as_pip_reads_it():
    text = (
        "# made by somebody\n"
        f"Some.Package[extra]==1.0+cu130 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}\n"
        "    # via other\n\n"
    )

    ((wanted, hashes),) = Lock("a.txt", text, None, ()).pins(NOBLE)

    assert (wanted.name, str(wanted.specifier)) == ("Some.Package", "==1.0+cu130")
    assert hashes == {A, B}


@pytest.mark.parametrize("form", ["html", "json"])
def test_an_index_is_read_in_both_forms(tmp_path, form: str):
    """PEP 503 and PEP 691, whichever a mirror speaks."""
    name = "some_package-1-py3-none-any.whl"
    html = f'<a href="../../files/{name}#sha256={A}">{name}</a>'.encode()
    listed = {"files": [{"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": A}}]}
    page = html if form == "html" else json.dumps(listed).encode()
    kind = "text/html" if form == "html" else "application/vnd.pypi.simple.v1+json"

    links = list(wheels._links(("http://index/simple/some-package/", page, kind)))

    assert [(link.url, link.name, link.sha256) for link in links] == [
        (f"http://index/files/{name}", name, A)
    ]


def test_an_index_is_asked_for_each_package_by_its_normal_name(tmp_path):
    """Beside a page of links; what the index has not is not an error of its own."""
    folder = tmp_path / "simple/some-package"
    folder.mkdir(parents=True)
    name = "some_package-1-py3-none-any.whl"
    (folder / "index.html").write_text(f'<a href="{name}#sha256={A}">{name}</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    lock = f"Some.Package==1 --hash=sha256:{A}\n"
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        (found,) = wheels.find(Lock("a.txt", lock, f"{url}/simple/", ()), NOBLE)
        with pytest.raises(FleetError, match="other==1 has no wheel"):
            wheels.find(
                Lock("a.txt", lock + f"other==1 --hash=sha256:{B}", f"{url}/simple", ()), NOBLE
            )

    assert found.url == f"{url}/simple/some-package/{name}"

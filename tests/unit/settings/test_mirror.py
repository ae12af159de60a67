"""What `mirror` and `offline` make of a node's addresses."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings import node_variables, variables
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import SettingsError, parse_settings, parse_written
from tests.support.rows import each_row

VENDOR = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
BASE = "http://mirror.lan:8080/gpu"
REVISION = "0" * 40


def written(**more: Any) -> dict[str, Any]:
    """Variables of a node that downloads of every kind."""
    return {
        "cuda": {
            "repository": {"url": VENDOR, "keyring_sha256": "0" * 64},
            "toolkit": None,
        },
        "gpu": {"container_toolkit": {"version": "1.18.0-1", "key_file": "keys/toolkit.asc"}},
        "vllm": {"version": "0.32.0", "lock": "vllm.txt", "listen": "127.0.0.1"},
        "serving": {"tiny": {"model": "lab/tiny", "revision": REVISION}},
        **more,
    }


def addresses(settings: NodeSettings) -> dict[str, Any]:
    assert settings.cuda
    assert settings.vllm
    assert settings.gpu.container_toolkit
    return {
        "vendor": settings.cuda.repository.url,
        "containers": settings.gpu.container_toolkit.repository,
        "wheels": (settings.vllm.find_links, settings.vllm.index_url, settings.vllm.no_index),
        "models": settings.vllm.hf_endpoint,
    }


def mistakes(**more: Any) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        parse_settings(written(**more))
    return {".".join(map(str, at)): what for at, what in caught.value.mistakes}


def test_a_bundle_s_address_is_enough():
    """Every kind of download moves to where a bundle has it, by one setting."""
    settings = parse_settings(written(mirror={"url": BASE}, offline=True))

    assert addresses(settings) == {
        "vendor": f"{BASE}/apt/developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64",
        "containers": f"{BASE}/apt/nvidia.github.io/libnvidia-container/stable/deb/amd64",
        "wheels": ((f"{BASE}/wheels/index.html",), None, True),
        "models": f"{BASE}/hub",
    }


def test_without_a_mirror_nothing_moves():
    assert parse_settings(written()) == parse_written(written())


def test_a_mirror_that_is_there_already_wins():
    """Artifact stores have an address for each kind; the bundle's is for what they lack."""
    own = {
        "vendor": "https://store.lan/nvidia",
        "index_url": "https://store.lan/pypi/simple",
        "models": "https://store.lan/hf",
    }

    settings = parse_settings(written(mirror={"url": BASE, **own}))

    found = addresses(settings)
    assert found["vendor"] == own["vendor"]
    assert found["wheels"] == ((), own["index_url"], False)
    assert found["models"] == own["models"]
    assert found["containers"].startswith(BASE)


def test_an_address_on_the_mirror_stays():
    """Who has written the mirror's address where the vendor's stood gets it once, not twice."""
    here = f"{BASE}/nvidia/debian12"
    cuda = {"repository": {"url": here, "keyring_sha256": "0" * 64}, "toolkit": None}

    settings = parse_settings(written(cuda=cuda, mirror={"url": BASE}, offline=True))

    assert addresses(settings)["vendor"] == here


def test_folders_of_the_node_stay():
    """Wheels that somebody has put on the node are not on the mirror."""
    links = ["/srv/wheels", "https://wheels.example/cpu/"]
    vllm = {**written()["vllm"], "find_links": links}

    settings = parse_settings(written(vllm=vllm, mirror={"url": BASE}, offline=True))

    assert addresses(settings)["wheels"][0] == ("/srv/wheels", f"{BASE}/wheels/index.html")


def test_what_was_written_can_still_be_had():
    """A bundle is filled from there."""
    assert parse_written(written(mirror={"url": BASE})).cuda == parse_settings(written()).cuda


def test_offline_names_every_address_that_is_not_the_mirror_s():
    found = mistakes(mirror={"models": f"{BASE}/hub"}, offline=True)

    assert VENDOR in found["cuda.repository.url"]
    assert "mirror.vendor" in found["cuda.repository.url"]
    assert "nvidia.github.io" in found["gpu.container_toolkit.repository"]
    assert "PyPI" in found["vllm"]


@each_row(
    ("flags", "refused"),
    [
        pytest.param({"otlp-traces-endpoint": "http://trace.example:4317"}, True, id="elsewhere"),
        pytest.param({"otlp-traces-endpoint": "http://127.0.0.1:4317"}, False, id="loopback"),
        pytest.param({"otlp-traces-endpoint": "http://trace.lan:4317"}, False, id="listed"),
        pytest.param({"chat-template": "x {{ http }} /srv/a.jinja"}, False, id="no-address"),
        pytest.param({"lora-modules": ["a=s3://bucket/a"]}, True, id="in-a-list"),
    ],
)
def test_offline_reads_flags_too(flags: dict[str, Any], refused: bool):
    """vLLM would reach for them when it starts, minutes into an outage."""
    served = {"tiny": {"model": "lab/tiny", "revision": REVISION, "flags": flags}}
    mirror = {"url": BASE, "inside": ["http://trace.lan:4317"]}
    more = {"serving": served, "mirror": mirror, "offline": True}

    if refused:
        assert [at for at in mistakes(**more) if at.startswith("serving.tiny.flags")]
    else:
        parse_settings(written(**more))


def test_a_neighbour_of_the_mirror_is_not_the_mirror():
    """http://mirror.lan:8080/gpu is no part of http://mirror.lan:8080/gpu-of-others."""
    cuda = {
        "repository": {"url": f"{BASE}-of-others/debian12", "keyring_sha256": "0" * 64},
        "toolkit": None,
    }
    mirror = {"vendor": BASE, "wheels": f"{BASE}/wheels", "models": f"{BASE}/hub"}

    settings = parse_settings(written(cuda=cuda, gpu={}, mirror=mirror))
    assert addresses_of_vendor(settings) == BASE

    found = mistakes(
        vllm={**written()["vllm"], "environment": {"X": f"{BASE}-of-others"}},
        gpu={},
        mirror=mirror,
        offline=True,
    )
    assert list(found) == ["vllm.environment.X"]


def addresses_of_vendor(settings: NodeSettings) -> str:
    assert settings.cuda
    return settings.cuda.repository.url


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        pytest.param({}, "has no address", id="nothing"),
        pytest.param({"wheels": BASE, "index_url": BASE}, "exclude each other", id="two-indexes"),
        pytest.param({"url": "http://user:word@mirror.lan"}, "without a user", id="a-password"),
        pytest.param({"url": f"{BASE}/"}, "without a trailing /", id="final-slash"),
    ],
)
def test_a_mirror_says_where(mirror: dict[str, Any], said: str):
    assert said in "; ".join(mistakes(mirror=mirror).values())


def test_offline_without_a_mirror_is_refused():
    assert "`mirror` is not set" in mistakes(offline=True)["offline"]


def test_file_and_line_are_named(tmp_path):
    """The operator reads where the address stands, before any node is asked."""
    file = tmp_path / "group_vars/prod.yml"
    file.parent.mkdir()
    file.write_text(
        "offline: true\nmirror:\n  url: http://mirror.lan\nvllm:\n  version: 0.32.0\n"
        "  lock: vllm.txt\n  listen: 127.0.0.1\n  environment:\n    A: https://away.example/x\n"
    )
    given = variables.load_file(file, tmp_path)

    with pytest.raises(
        FleetError, match=r"group_vars/prod.yml:9: vllm.environment.A: contains https"
    ):
        node_variables.check({"gpu-01": given}, {"gpu-01": ()})


@each_row(
    ("archive", "said"),
    [
        ({"suites": ["/"]}, ""),
        ({"suites": ["stable/"], "components": []}, ""),
        ({"suites": ["bookworm"]}, ""),
        (
            {"suites": ["bookworm", "stable/"]},
            "some names in `suites` end in / (a flat archive) and some",
        ),
        (
            {"suites": ["bookworm"], "components": []},
            (
                "`components` is empty, but only a flat archive, whose suites end in /, has no "
                "components: write at least one"
            ),
        ),
    ],
)
def test_an_archive_is_flat_by_the_slash_at_the_end_of_its_suites(
    archive: dict[str, Any], said: str
) -> None:
    whole = {"url": "https://debian.example", "key_file": "debian.asc", **archive}
    mirror = {"url": BASE, "archives": [whole]}
    if not said:
        assert parse_settings(written(mirror=mirror)).mirror
        return
    ((where, what),) = mistakes(mirror=mirror).items()
    assert where.startswith("mirror.archives.0")
    assert said in what

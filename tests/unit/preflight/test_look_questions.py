"""What each node is asked: only what it declares, and nothing that is a secret."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gpufleet.preflight import look_questions
from gpufleet.preflight.look_questions import LookQuestions
from gpufleet.preflight.network_lines import KnownNode
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from tests.unit.preflight import sound_fleet as fleet
from tests.unit.preflight.sound_fleet import FRONT, GPU_NODES

ONE, TWO = GPU_NODES
LOCKED = {"config.json": ("git", "0" * 40)}


def nodes(**changed: NodeSettings) -> dict[str, NodeVars]:
    settings = {**fleet.fleet_settings(), **changed}
    return {name: NodeVars(name, (), each, {}) for name, each in settings.items()}


def asked(settings: dict[str, NodeSettings]) -> LookQuestions:
    homes = [("qwen", ONE), ("qwen", TWO)]
    locks = {"models.lock.json": {("Qwen/Qwen3-32B", fleet.REVISION): LOCKED}}
    models = look_questions.wanted_models(homes, settings, locks)
    return LookQuestions(
        known={name: KnownNode(f"{name}.example") for name in settings},
        models=models,
        sources=look_questions.download_pages(models, settings),
        tls=look_questions.tls_servers(nodes(), None, {"secrets/gateway.pem": "PEM"}),
        releases=dict.fromkeys(GPU_NODES, fleet.RELEASES),
    )


def test_a_gpu_node_is_asked_for_its_models_its_release_and_its_downloads():
    settings = {name: fleet.gpu_settings() for name in GPU_NODES}
    given = asked(settings).parameters(ONE, settings[ONE])
    assert given["models"] == {fleet.MODEL_DIRECTORY: {"config.json": ["git", "0" * 40]}}
    assert given["folders"] == [fleet.RELEASES]
    urls = {key: page["url"] for key, page in given["pages"].items()}
    assert urls["source packages"] == "https://pypi.org/simple/vllm/"
    assert urls["source model qwen"].startswith("https://huggingface.co/api/models/Qwen/")
    assert set(given["names"]) >= {ONE, f"{TWO}.example", "huggingface.co", "pypi.org"}


def test_a_node_that_downloads_nothing_is_asked_for_no_address_elsewhere():
    vllm = {
        "version": "0.32.0", "lock": "l", "no_index": True, "find_links": ["/srv/wheels"],
        "allow_unauthenticated": True,
    }  # fmt: skip
    serving = {"qwen": {"model": "/srv/qwen"}}
    settings = {name: fleet.gpu_settings(vllm=vllm, serving=serving) for name in GPU_NODES}
    found = asked(settings)
    assert found.sources == {}
    assert found.hosts == {}
    assert found.parameters(ONE, settings[ONE])["models"] == {"/srv/qwen": None}


def test_the_gateways_node_shows_its_certificate_and_its_alertmanager():
    found = asked({**fleet.fleet_settings()})
    given = found.parameters(FRONT, fleet.front_settings())
    (server,) = given["tls"].values()
    assert server == {"host": "127.0.0.1", "port": 8443, "authorities": "PEM", "name": False}
    bodies = {key for key, page in given["pages"].items() if page["body"]}
    assert bodies == {"alertmanager.metrics", "prometheus.alertmanagers"}
    assert "gateway.port" in given["pages"]


def test_exporters_certificates_are_asked_from_the_node_that_scrapes_them():
    tls = {"certificate_file": "c/{node}.pem", "key_file": "c/{node}.key", "ca_file": "c/ca.pem"}
    here = nodes(**{ONE: fleet.gpu_settings(exporters={"tls": tls})})
    assert look_questions.authority_files(here, None) == {"c/ca.pem", "secrets/gateway.pem"}
    servers = look_questions.tls_servers(here, None, {"c/ca.pem": "CA"})
    (exporter,) = [each for each in servers if each.node == ONE]
    assert (exporter.asked_from, exporter.host, exporter.authorities) == (FRONT, ONE, "CA")
    assert exporter.by_name, "Prometheus asks whether the certificate names the node"


def test_no_secret_travels():
    files = ("secrets/key", "secrets/pagerduty", "secrets/gateway.key")
    found = asked({**fleet.fleet_settings()})
    said: list[Any] = [found.parameters(FRONT, fleet.front_settings())]
    said.append(replace(found, releases={}).parameters(ONE, fleet.gpu_settings()))
    assert not [each for each in files if each in json.dumps(said)]

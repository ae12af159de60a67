"""Models of a fleet are read all at once, from a folder where it has them, and visibly."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpufleet.fleet.model_configs import describe_models, local_directory
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from gpufleet.sizing.architectures.description import HubSilence
from tests.support.fleet_folder import REVISION, VLLM, write_models

SLOW_SECONDS = 3


@pytest.fixture
def slow_hub():
    """A Hub that takes three seconds to say that it has no such model."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(SLOW_SECONDS)
            self.send_response(404)
            self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def declared(endpoint: str = "http://127.0.0.1:9", **models: str) -> dict[str, NodeVars]:
    serving = {name: {"model": model, "revision": REVISION} for name, model in models.items()}
    settings = {"vllm": {**VLLM, "hf_endpoint": endpoint}, "serving": serving}
    return {"gpu-01": NodeVars("gpu-01", (), NodeSettings.model_validate(settings), {})}


def test_a_hub_that_takes_its_time_is_said_with_the_models_that_are_left(slow_hub, capsys):
    found = describe_models(declared(slow_hub, one="a/one", two="a/two"), {})

    assert all(isinstance(each.described, str) for each in found.values())
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("reading models: 0 of 2 models after ")
    assert said[0].endswith("2 left: one, two; at most 1 min each")


def test_models_of_a_folder_are_read_from_there_and_without_a_word(tmp_path, capsys):
    folder = write_models(tmp_path, "Qwen/Qwen3-8B")

    found = describe_models(declared(qwen="Qwen/Qwen3-8B"), {}, folder)

    assert not isinstance(found["qwen"].described, str)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("model", "at"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("other/Qwen3-8B", None),
        ("Qwen/Qwen3-32B", "Qwen3-32B"),
        ("/srv/models/Qwen3-32B", "Qwen3-32B"),
        ("/srv/models/absent", None),
    ],
)
def test_a_models_directory_is_found_by_its_whole_name_or_its_last_part(tmp_path, model, at):
    for name in ("Qwen/Qwen3-8B", "Qwen3-32B"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")

    assert local_directory(model, tmp_path) == (tmp_path / at if at else None)


def test_a_silent_hub_is_told_from_a_file_that_says_nothing(tmp_path):
    """A plan is unknown then, and not refused (preflight)."""
    (tmp_path / "a" / "broken").mkdir(parents=True)
    (tmp_path / "a" / "broken" / "config.json").write_text("{}")
    found = describe_models(declared(silent="a/model", broken="a/broken"), {}, tmp_path)
    assert isinstance(found["silent"].described, HubSilence)
    assert isinstance(found["broken"].described, str)
    assert not isinstance(found["broken"].described, HubSilence)

"""A unit's server is a release's program with the word `serve`, and nothing else."""

from __future__ import annotations

import pytest

from gpufleet.on_node.serving import unit_command

RELEASE = "/opt/vllm/releases/0.32.0-ab12/bin"


@pytest.mark.parametrize(
    "before", [(), ("/usr/bin/env",), (f"{RELEASE}/python", "/opt/gpufleet/rank.py", "--")]
)
def test_the_words_after_serve_are_the_servers(before: tuple[str, ...]) -> None:
    words = [*before, f"{RELEASE}/vllm", "serve", "/models/tiny", "--port", "8000"]
    assert unit_command.serve(words) == ["/models/tiny", "--port", "8000"]


@pytest.mark.parametrize(
    "words",
    [
        (f"{RELEASE}/vllm", "bench", "--port", "8000"),
        ("/usr/bin/vllm", "serve", "--port", "8000"),
        (f"{RELEASE}/python", "rank.py", "--served-model-name", "serve", "--port", "8000"),
        (f"{RELEASE}/vllm", "serve", "/models/tiny", "--port", "{port}"),
    ],
    ids=["another word", "another program", "a name", "a port for ranks only"],
)
def test_what_is_no_server_for_clients_has_no_words(words: tuple[str, ...]) -> None:
    assert unit_command.serve([*words]) == []

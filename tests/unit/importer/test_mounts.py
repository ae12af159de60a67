"""A path inside a container is the path that is mounted there."""

from __future__ import annotations

import pytest

from tests.unit.importer.test_import import imported


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("/models/llm/q", "/x/q"),  # the deeper mount, however short its source is
        ("/models/other", "/srv/long/folder/other"),
        ("/models/llms", "/srv/long/folder/llms"),
        ("/elsewhere/m", "/elsewhere/m"),
    ],
)
def test_the_deepest_mount_above_a_path_says_where_it_is(inner: str, outer: str) -> None:
    found = imported(
        "docker run -v /srv/long/folder:/models -v /x:/models/llm vllm/vllm-openai "
        f"--model {inner} --served-model-name m",
        "run.sh",
    )

    (served,) = found.settings["serving"].values()
    assert served["model"] == outer

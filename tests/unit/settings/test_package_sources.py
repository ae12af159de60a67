"""Where the packages of a release come from: an index, folders, or folders alone."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpufleet.settings.litellm_settings import Litellm
from gpufleet.settings.serving_settings import Vllm

VLLM = {"version": "0.32.0", "lock": "vllm.txt", "listen": "127.0.0.1"}
LITELLM = VLLM | {"version": "1.90.0", "allow_unauthenticated": True}
INDEX, LINKS = {"index_url": "https://mirror.example/simple"}, {"find_links": ["/srv/wheels"]}


@pytest.mark.parametrize(("kind", "given"), [(Vllm, VLLM), (Litellm, LITELLM)])
@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({}, None),
        (INDEX, None),
        (LINKS, None),
        (INDEX | LINKS, None),
        ({"no_index": True} | LINKS, None),
        ({"no_index": True}, "is empty, so there is no source for packages:"),
        ({"no_index": True} | LINKS | INDEX, "`no_index` and `index_url` exclude each other"),
    ],
)
def test_folders_alone_need_folders_and_no_index(kind, given, sources, says) -> None:
    if says is None:
        kind.model_validate(given | sources)
        return
    with pytest.raises(ValidationError, match=says) as refused:
        kind.model_validate(given | sources)
    assert str(refused.value).count("no_index` and `index_url`") == int("index_url" in sources)

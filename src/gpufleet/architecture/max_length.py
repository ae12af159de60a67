"""The longest context of a model, as vLLM derives it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def max_model_len(config: Mapping[str, Any], vllm: tuple[int, ...] | None = None) -> int:
    """
    Return the tokens of the longest context that vLLM takes without being told.

    `config` is the text part (`text_config` where there is one). `vllm`: the release, newest when
    None.
    """
    raise NotImplementedError

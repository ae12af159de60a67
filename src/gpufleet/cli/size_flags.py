"""Check the options of `gpufleet size` as vLLM's flags. Thin: the rules are in `gpufleet.flags`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpufleet.errors import FleetError

if TYPE_CHECKING:
    from gpufleet.flags.problem import Problem

_NOT_OF_VLLM = frozenset(
    {
        "gpu",
        "gpu_memory_gib",
        "gpu_share",
        "gpus",
        "vllm",
        "device",
        "num_speculative_tokens",
        "hf_endpoint",
        "hf_token_file",
        "offline",
        "seconds",
        "revision",
    }
)
_NEWER_NAMES = {"--runner": "--task", "--convert": "--task"}
"""The flag's name in older releases, by option of `size`."""


def judge_flags(given: Mapping[str, Any], release: str) -> tuple[str, ...]:
    """
    Return a sentence for each given option that the estimate ignores.

    Raises `FleetError` if the release refuses an option for every model.
    """
    from gpufleet.flags import schema
    from gpufleet.flags.check import check
    from gpufleet.flags.problem import Kind

    if release not in schema.versions():
        return ()
    known = schema.load(release)
    context = click.get_current_context()
    words = ["MODEL"]
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if source is not ParameterSource.COMMANDLINE or name in _NOT_OF_VLLM or name not in given:
            continue
        flag = max(option.opts, key=len)
        if known.flag(flag) is not None or known.flag(_NEWER_NAMES.get(flag, "")) is None:
            automatic = name == "max_model_len" and given[name] == -1
            words += _option_words(
                flag, option.secondary_opts, "auto" if automatic else given[name]
            )
    found = check(known, words)
    problems = [each for each in found if each.refuses]
    if given["gpus"]:  # the sizing of each division checks conflicts
        problems = [each for each in problems if each.kind is not Kind.CONFLICT]
    if problems:
        raise FleetError(*(_sentence(each, release) for each in problems))
    return tuple(
        f"{each.found}: the estimate does not count it"
        for each in found
        if each.kind is Kind.UNREAD
    )


def _sentence(problem: Problem, release: str) -> str:
    instead = f"; instead: {problem.replacement}" if problem.replacement else ""
    if written := " ".join(problem.rewritten or ()):
        instead = f"; write {written}"
    return f"{problem.argument}: {problem.found} (vLLM {release}){instead}"


def _option_words(flag: str, negations: Sequence[str], value: Any) -> list[str]:
    """
    Return the command line arguments that set an option to a value.

    >>> _option_words("--enforce-eager", (), True), _option_words("--hf-overrides", (), {"a": 1})
    (['--enforce-eager'], ['--hf-overrides', '{"a": 1}'])
    """
    if isinstance(value, bool):
        return [flag] if value else [*negations[:1]]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]

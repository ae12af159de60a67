"""Find options that the server accepts, but that do not have the intended effect.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpufleet.flags.command_line import GivenFlag
from gpufleet.flags.conflict_rule import Settings
from gpufleet.flags.problem import Kind

Remark = tuple[GivenFlag, str, Kind]
"""(option, sentence about the option without a full stop, kind of problem)."""

_LIMIT, _SERVERS = "--limit-mm-per-prompt", "--api-server-count"
_ITEMS = ("image", "video", "audio", "vision_chunk")
"""
The names of items that models of vLLM 0.32.0 have in `get_supported_mm_limits`. vLLM's parser
accepts any name.
"""

_UNREAD: Mapping[str, tuple[str, ...]] = {
    # engine/arg_utils.py creates `LoRAConfig` only with this switch (source of 0.8.5 and 0.32.0).
    "--enable-lora": (
        "--enable-lora-bias",
        "--max-loras",
        "--max-lora-rank",
        "--max-cpu-loras",
        "--lora-dtype",
        "--lora-extra-vocab-size",
        "--long-lora-scaling-factors",
        "--fully-sharded-loras",
        "--lora-target-modules",
        "--default-mm-loras",
        "--enable-tower-connector-lora",
        "--specialize-active-lora",
        "--enable-mixed-moe-lora-format",
        "--enable-moe-shared-loras",
        "--max-lora-cls-labels",
    ),
    # Without this switch, `get_tool_parser` in parser/parser_manager.py of 0.32.0 returns no
    # parser, and entrypoints/openai/serving_chat.py of 0.8.5 does not call its parser.
    "--enable-auto-tool-choice": ("--tool-call-parser",),
    # 0.32.0, entrypoints/launchers/api_server/app_state.py creates `RequestLogger` only with this.
    "--enable-log-requests": ("--max-log-len",),
    # 0.32.0, model_executor/offloader/base.py `create_offloader`.
    "--cpu-offload-gb": ("--cpu-offload-params",),
    "--offload-group-size": (
        "--offload-num-in-group",
        "--offload-prefetch-step",
        "--offload-params",
    ),
    # 0.32.0, config/vllm.py: "KV offloading is only activated when kv_offloading_size is set".
    "--kv-offloading-size": ("--kv-offloading-backend",),
}
"""Options that have no effect unless another option is on. The key is that other option."""


def remarks(settings: Settings) -> Iterator[Remark]:
    """Yield every remark on a command line."""
    yield from _no_key(settings)
    yield from _unlimited(settings)
    yield from _without_server(settings)
    yield from _unread(settings)
    yield from _unread_graphs(settings)
    yield from _rope_type(settings)


def _no_key(settings: Settings) -> Iterator[Remark]:
    """Yield the remark on an empty key, which is often the result of an unset shell variable."""
    given = settings.line.last("--api-key")
    if given is not None and not any(given.values):
        found = "the key is empty, so vLLM also serves clients that send no key"
        yield given, found, Kind.VALUE


def _unlimited(settings: Settings) -> Iterator[Remark]:
    """Yield the remark on limits for unknown items, for example "images" instead of "image"."""
    given, limits = settings.line.last(_LIMIT), settings.value(_LIMIT)
    if given and isinstance(limits, dict) and (unknown := sorted(limits.keys() - set(_ITEMS))):
        found = (
            f"{', '.join(map(repr, unknown))} is not a kind of item, so the limit has no effect: "
            f"write {', '.join(_ITEMS[:-1])} or {_ITEMS[-1]}"
        )
        yield given, found, Kind.VALUE


def _without_server(settings: Settings) -> Iterator[Remark]:
    """
    Yield the remark on zero API servers, with which vLLM starts headless
    (entrypoints/cli/serve.py).
    """
    given, servers = settings.line.last(_SERVERS), settings.value(_SERVERS)
    if given and isinstance(servers, int) and servers < 1 and not settings.on("--headless"):
        found = (
            f"with {servers} API servers, vLLM starts headless and answers no requests: remove "
            "the flag, or write 1 or more"
        )
        yield given, found, Kind.VALUE


def _unread(settings: Settings) -> Iterator[Remark]:
    """Yield a remark on each option that has no effect because the option that it needs is off."""
    for switch, options in _UNREAD.items():
        if settings.schema.flag(switch) is None or settings.on(switch):
            continue
        for option in options:
            given = settings.line.last(option)
            if given is not None and settings.value(option):
                found = f"`{option}` has no effect without `{switch}`"
                yield given, found, Kind.UNREAD


def _unread_graphs(settings: Settings) -> Iterator[Remark]:
    """Yield the remark on CUDA graph sizes with --enforce-eager, which captures no graphs."""
    for option in ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size"):
        given = settings.line.last(option)
        if given is not None and settings.on("--enforce-eager"):
            yield given, f"`{option}` has no effect together with `--enforce-eager`", Kind.UNREAD


_ROPE_TYPES = frozenset(
    {"bailing_mrope", "deepseek_llama_scaling", "deepseek_yarn", "default", "dynamic", "linear"}
    | {"llama3", "longrope", "mllama4", "mrope", "ntk", "openpangu", "proportional", "su", "yarn"}
)
"""
RoPE types that `get_rope` of vLLM 0.32.0 accepts
(model_executor/layers/rotary_embedding/__init__.py), and the names in older releases and configs. A
model's own class may accept others.
"""


def _rope_type(settings: Settings) -> Iterator[Remark]:
    """Yield the remark on a type of RoPE scaling that vLLM does not know."""
    given = settings.line.last("--hf-overrides")
    for key in ("rope_scaling", "rope_parameters"):
        rope = settings.key("--hf-overrides", key)
        name = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if given and isinstance(name, str) and name not in _ROPE_TYPES:
            found = (
                f"`{key}` has the type `{name}`. vLLM does not know this type, so most models do "
                f"not start with it. vLLM knows {', '.join(sorted(_ROPE_TYPES))}"
            )
            yield given, found, Kind.JSON

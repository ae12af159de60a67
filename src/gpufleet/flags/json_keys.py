"""Keys of JSON flags that older releases had: the release that removed each, and its replacement.

Pure. The packaged schemas show which release had a key. Replacements are here, from vLLM's own
messages in releases with both keys, or from the additions of the release that lost it.
"""

from __future__ import annotations

from typing import NamedTuple

from gpufleet.flags import schema
from gpufleet.flags.schema import sort_key

_REPLACED = {
    ("CompilationConfig", "level"): "`mode`, with the same numbers",
    ("CompilationConfig", "use_inductor"): '`backend`: "inductor" or "eager"',
    ("CompilationConfig", "use_cudagraph"): '`cudagraph_mode`: "NONE" for false',
    ("CompilationConfig", "full_cuda_graph"): '`cudagraph_mode`: "FULL"',
    ("CompilationConfig", "compile_ranges_split_points"): "`compile_ranges_endpoints`",
    (
        "CompilationConfig",
        "encoder_cudagraph_max_images_per_batch",
    ): "`encoder_cudagraph_max_vision_items_per_batch`",
    ("PassConfig", "enable_noop"): "`eliminate_noops`",
    ("PassConfig", "enable_fusion"): "`fuse_norm_quant` and `fuse_act_quant`",
    ("PassConfig", "enable_attn_fusion"): "`fuse_attn_quant`",
    ("PassConfig", "enable_fi_allreduce_fusion"): "`fuse_allreduce_rms`",
    ("PassConfig", "fi_allreduce_fusion_max_token_num"): "`fi_allreduce_fusion_max_size_mb`",
    ("PoolerConfig", "normalize"): "`use_activation`",
    ("PoolerConfig", "activation"): "`use_activation`",
    ("PoolerConfig", "softmax"): "`use_activation`",
    ("SpeculativeConfig", "synthetic_acceptance_rate"): "`synthetic_acceptance_rates`",
}


class RemovedKey(NamedTuple):
    """A key that a release no longer has."""

    last: str
    """The last release that is known to have it."""
    since: str
    """The first one that is known to be without it."""
    replacement: str | None
    """The replacement, in words."""


def removal_of(json_class: str, key: str, version: str) -> RemovedKey | None:
    """Return when a key was removed, and its replacement; None: no older release has it."""
    at = sort_key(version)
    last, since = None, None
    for release in schema.versions():
        fields = schema.load(release).classes.get(json_class)
        if fields is None or sort_key(release) > at:
            continue
        field = fields.get(key)
        if field is not None and field.init:
            last, since = release, None
        elif last is not None and since is None:
            since = release
    if last is None or since is None:
        return None
    return RemovedKey(last, since, _REPLACED.get((json_class, key)))


def replacements() -> tuple[tuple[str, str, str], ...]:
    """Return class, key and replacement of every entry of the table."""
    return tuple((json_class, key, text) for (json_class, key), text in _REPLACED.items())

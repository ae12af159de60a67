"""Return when a key of a JSON flag was removed, and what replaces the key.

Pure. The packaged schemas show which releases have a key. The replacements come from vLLM's own
messages in releases that have both keys, or from the new keys of the release that removed the old
key.
"""

from __future__ import annotations

from typing import NamedTuple

from gpufleet.flags import schema
from gpufleet.flags.schema import sort_key

_REPLACED = {
    ("CompilationConfig", "level"): "`mode`, which has the same numbers",
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
    """The last known release with the key."""
    since: str
    """The first known release without the key."""
    replacement: str | None
    """The replacement, in words."""


def removal_of(json_class: str, key: str, version: str) -> RemovedKey | None:
    """
    Return when a key was removed, and its replacement.

    None if no older release has the key, or if the key was not removed up to `version`.
    """
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

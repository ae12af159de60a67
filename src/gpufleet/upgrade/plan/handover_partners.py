"""Upgrades that leave the two sides of a handed-over KV cache on different releases.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.plan.wave import Group, model_of


def remarks(groups: Iterable[Group], settings: Mapping[str, NodeSettings]) -> Iterator[str]:
    """
    Yield a sentence for each prefill and decode of which `groups` change both sides.

    `settings` is by node. Partners have one release and the same flags of the cache, or the plan
    refuses them; so what ends the hand-over between old and new changes both. What vLLM compares:
    `compute_nixl_compatibility_hash` (`planning.multinode.disaggregation`).
    """
    changed = {
        model_of(replica)
        for group in groups
        for replica in {*group.replicas} - {*group.comes} - {*group.goes}
    }
    pairs = {
        (name, served.prefill)
        for each in settings.values()
        for name, served in each.serving.items()
        if served.prefill
    }
    for decode, prefill in sorted(pairs):
        if {decode, prefill} <= changed:
            yield (
                f"{decode} gets KV caches from {prefill}, and both change: until the last wave, "
                "requests between a changed and an unchanged replica fail if the release, the "
                "model or a flag of the cache is another one. Send clients elsewhere meanwhile "
                "(docs/plan/prefill-decode.md, Upgrades)"
            )

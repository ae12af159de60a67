"""Warn of upgrades during which prefill and decode run different releases.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.plan.wave import Group, model_of


def remarks(groups: Iterable[Group], settings: Mapping[str, NodeSettings]) -> Iterator[str]:
    """
    Yield a sentence for each pair of prefill and decode models that both change.

    `settings` are the settings by node. The plan requires the same release and cache flags on both
    sides, so a change that breaks the handover between old and new servers changes both sides. vLLM
    compares them with `compute_nixl_compatibility_hash` (`planning.multinode.disaggregation`).
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
                f"{decode} gets KV caches from {prefill}, and this upgrade changes both of them. "
                "Until the last wave, requests between a changed and an unchanged replica fail if "
                "the release, the model or a flag of the cache differs. Send clients to other "
                "servers during the upgrade (docs/plan/prefill-decode.md, Upgrades)"
            )

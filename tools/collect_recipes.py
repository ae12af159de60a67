"""Write the package's table of recipes again, from a checkout of vLLM's recipes.

    python -m tools.collect_recipes CHECKOUT

CHECKOUT is a work tree of github.com/vllm-project/recipes. The tool reads only facts: model,
precision, release, arguments, variables, and the GPUs on which a recipe is marked as verified. It
omits recipes of vLLM-Omni, recipes of models that no release serves, and the parts for devices of
other vendors. It writes `catalog/data/recipes.json`, with the same bytes for the same checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from yaml import safe_load

from gpufleet.catalog import recipes

# Names of NVIDIA GPUs in the recipes, with gpufleet's names.
GPUS = {
    "a100": "A100",
    "h20": "H20",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "dgx_station_gb300": "GB300",
    "dgx_spark_gb10": "GB10",
    "rtx_4090": "RTX-4090",
    "rtx_5090": "RTX-5090",
    "rtx_pro_5000": "RTX-PRO-5000",
    "rtx_pro_6000": "RTX-PRO-6000",
}
GENERATIONS = ("nvidia", "hopper", "blackwell")


def main(arguments: Sequence[str]) -> int:
    """Collect the recipes, and print why each omitted recipe is omitted."""
    if len(arguments) != 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    checkout = Path(arguments[0])
    found = []
    for file in sorted(checkout.glob("models/*/*.yaml")):
        document = safe_load(file.read_text())
        name = str(file.relative_to(checkout))
        if why := _left_out(document):
            sys.stdout.write(f"{name}: omitted: {why}\n")
            continue
        found.append(_recipe(document, name))
    git = ["git", "-C", str(checkout), "log", "-1", "--format=%H %cs"]
    commit, day = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split()
    about = (
        f"Facts of github.com/vllm-project/recipes at commit {commit} of {day}; each recipe's "
        "`source` is its file there. Written by tools/collect_recipes.py."
    )
    text = json.dumps({"about": about, "recipes": found}, indent=1, ensure_ascii=False)
    recipes.DATA.write_text(text + "\n")
    sys.stdout.write(f"{len(found)} recipes\n")
    return 0


def _left_out(document: Mapping[str, Any]) -> str | None:
    model = document["model"]
    if document.get("omni") or "omni" in (document["meta"].get("tasks") or ()):
        return "it is served by vLLM-Omni"
    if model.get("nightly_required"):
        return "no release serves it"
    return None if [*_variants(document)] else "no variant is for NVIDIA GPUs"


def _recipe(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a recipe in the form of `recipes.json`, without empty keys."""
    model, optional = document["model"], document.get("opt_in_features") or ()
    features = {
        name: _words(feature["args"])
        for name, feature in (document.get("features") or {}).items()
        if feature.get("args")
    }
    return _filled({
        "model": model["model_id"],
        "since": model["min_vllm_version"],
        "source": source,
        "verified_on": _gpus(document["meta"].get("hardware") or {}),
        "installs_more": bool(document.get("dependencies")) or bool(model.get("install")),
        "arguments": _words(model.get("base_args")),
        "environment": _environment(model.get("base_env")),
        "features": {name: words for name, words in features.items() if name not in optional},
        "optional": {name: words for name, words in features.items() if name in optional},
        "on": _overrides(document.get("hardware_overrides")),
        "variants": [*_variants(document)],
    })  # fmt: skip


def _variants(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for variant in document["variants"].values():
        hardware = variant.get("supported_hardware")
        if hardware and not any(name in GPUS for name in hardware):
            continue
        if (variant.get("precision_hardware") or {}).get("brand", "NVIDIA") != "NVIDIA":
            continue
        yield _filled({
            "model": variant.get("model_id") or document["model"]["model_id"],
            "precision": variant["precision"],
            "since": variant.get("min_vllm_version"),
            "arguments": _words(variant.get("extra_args")),
            "environment": _environment(variant.get("extra_env")),
            "on": _overrides(variant.get("hardware_overrides")),
        })  # fmt: skip


def _overrides(found: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the additions for a generation or a GPU of NVIDIA."""
    return {
        GPUS.get(name, name): added
        for name, given in (found or {}).items()
        if name in (*GENERATIONS, *GPUS)
        and (
            added := _filled({
                "arguments": _words((given or {}).get("extra_args")),
                "environment": _environment((given or {}).get("extra_env")),
            })
        )
    }  # fmt: skip


def _gpus(hardware: Mapping[str, str]) -> list[str]:
    found = [GPUS[name] for name, said in hardware.items() if said == "verified" and name in GPUS]
    return sorted(set(found))


def _words(found: Sequence[Any] | None) -> list[str]:
    # Some recipes write an option and its value as one word. A JSON value with spaces is not such a
    # case.
    words: list[str] = []
    for word in map(str, found or ()):
        words += word.split(" ", 1) if word.startswith("--") else [word]
    return words


def _environment(found: Mapping[str, Any] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (found or {}).items()}


def _filled(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

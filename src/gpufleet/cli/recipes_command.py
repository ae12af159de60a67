"""`gpufleet recipes [MODEL]`: show vLLM's recipes for a model, as settings to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import json_option, print_json
from gpufleet.cli.default_release import default_release
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.console import add_row, display, new_table
from gpufleet.errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from gpufleet.catalog.recipes import Recipe, Variant


@click.command(cls=StrictCommand)
@click.argument("model", required=False)
@click.option(
    "--gpu", metavar="NAME", help="Include the recipe's settings for this GPU, for example H100."
)
@click.option(
    "--precision", help="Precision, if the recipe has several, for example bf16, fp8 or nvfp4."
)
@click.option(
    "--with",
    "features",
    metavar="FEATURE",
    multiple=True,
    help="Add this optional feature of the recipe.",
)
@click.option(
    "--vllm",
    "version",
    metavar="VERSION",
    help="vLLM release for which the flags are written.  [default: the release of the "
    "project's lock]",
)
@json_option
def recipes(
    model: str | None,
    gpu: str | None,
    precision: str | None,
    features: tuple[str, ...],
    version: str | None,
    *,
    as_json: bool,
) -> int:
    """
    Show vLLM's recipes for a model, as settings to copy.

    Without MODEL, the command lists the recipes. It prints the settings on standard output. On
    standard error, it prints what it left out or renamed, what you have to decide, and the model's
    other checkpoints.

    \b
    gpufleet recipes
    gpufleet recipes Qwen/Qwen3-32B-FP8 --gpu H100 > serving.yml
    gpufleet recipes deepseek-ai/DeepSeek-V3.2 --with spec_decoding

    Exit status: 0: printed. 1: printed, but some decisions are left to you. 2: there is no such
    recipe.
    """
    from gpufleet.catalog import recipes as catalog

    if model is None:
        if as_json:
            print_json([one.model_dump(mode="json") for one in catalog.all_recipes()])
        else:
            display(recipes_table(catalog.all_recipes()))
            click.echo("\n".join(catalog.recipe_origins()), err=True)
        return 0
    recipe = catalog.find(model)
    if as_json:
        print_json(recipe.model_dump(mode="json"))
        return 0
    return _print(recipe, _variant(recipe, model, precision), gpu, features, version)


def recipes_table(found: Iterable[Recipe]) -> Table:
    """Return one line per recipe."""
    table = new_table("model", "kind", "vLLM since", "checkpoints", "verified on")
    for each in found:
        precisions = ", ".join(dict.fromkeys(one.precision for one in each.variants))
        verified = ", ".join(each.verified_on)
        add_row(table, each.model, each.kind or "", each.since, precisions, verified)
    return table


def _variant(recipe: Recipe, model: str, precision: str | None) -> Variant:
    """Return the recipe's variant of a model. If a precision is given, the variant must have it."""
    named = [one for one in recipe.variants if one.model.lower() == model.lower()]
    named = named or [*recipe.variants]
    if precision is None:
        return named[0]
    found = [one for one in named if one.precision == precision]
    if not found:
        has = ", ".join(dict.fromkeys(one.precision for one in named))
        raise FleetError(f"--precision {precision}: the recipe has {model} only in {has}")
    return found[0]


def _print(
    recipe: Recipe,
    variant: Variant,
    gpu: str | None,
    features: tuple[str, ...],
    version: str | None,
) -> int:
    import yaml

    from gpufleet.catalog import gpu_models
    from gpufleet.catalog import recipes as catalog
    from gpufleet.flags import schema
    from gpufleet.importer.convert import convert
    from gpufleet.importer.server import Launch
    from gpufleet.versions import numbers

    card = gpu_models.card(gpu) if gpu else None
    found = catalog.addition(
        recipe,
        variant,
        gpu=card.name if card else None,
        capability=card.compute_capability if card else None,
        features=features,
    )
    release = version or default_release()
    launch = Launch(variant.model, (variant.model, *found.arguments), found.environment)
    imported = convert([launch], schema.load(release))
    settings = dict(imported.settings)
    if recipe.kind:
        settings["serving"] = {
            name: {"kind": recipe.kind, **served} for name, served in settings["serving"].items()
        }
    since = variant.since or recipe.since
    click.echo(
        f"# {variant.model}, {variant.precision}: {recipe.source} of "
        f"{catalog.source_project(recipe)}"
    )
    click.echo(yaml.safe_dump(settings, sort_keys=False, width=100), nl=False)
    for note in imported.notes:
        click.echo(f"{'to decide: ' if note.decide else ''}{note}", err=True)
    for sentence in _remarks(recipe, variant, release, card.name if card else None):
        click.echo(sentence, err=True)
    too_old = numbers(release) < numbers(since)
    if too_old:
        click.echo(
            f"to decide: the recipe needs vLLM {since} or newer, but the flags are written "
            f"for {release}: choose a different release with --vllm",
            err=True,
        )
    else:
        click.echo(f"flags are written for vLLM {release}", err=True)
    return int(too_old or recipe.extra is not None or not imported.decided)


def _remarks(recipe: Recipe, variant: Variant, release: str, gpu: str | None) -> Iterable[str]:
    """
    Yield remarks on parts of a recipe that settings cannot express, and on its other variants.
    """
    if recipe.extra:
        yield (
            f"to decide: the recipe needs the packages of vLLM's extra `{recipe.extra}`: "
            f"write the lock with `gpufleet packages lock vllm {release} --also "
            f"'vllm[{recipe.extra}]=={release}'`"
        )
    others = [one for one in recipe.variants if one is not variant]
    if others:
        named = ", ".join(f"{one.model} ({one.precision})" for one in others)
        yield f"other checkpoints of this recipe: {named}"
    if recipe.optional:
        yield f"optional features, which --with adds: {', '.join(recipe.optional)}"
    verified = ", ".join(recipe.verified_on) or "no NVIDIA GPU"
    if gpu is None or gpu not in recipe.verified_on:
        yield f"the recipe was verified on {verified}"
    if recipe.installs_more:
        yield "the recipe installs further packages beside vLLM: see the file of the recipe"

"""
Find published recipes: arguments and variables for serving a model, by GPU.

`data/recipes.json` has facts from vLLM's recipes. `data/documented_recipes.json` has facts from
vLLM's documentation. Each recipe has its source file. Pure, except that it reads its own data.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names

DATA = Path(__file__).parent / "data" / "recipes.json"
DOCUMENTED = DATA.with_name("documented_recipes.json")
"""
Recipes of models that do not complete text. They have priority over vLLM's recipes.
"""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Addition(_Entry):
    """Arguments after `vllm serve MODEL`, and environment variables of the process."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)


class Variant(Addition):
    """One checkpoint of a recipe's model."""

    model: str
    precision: str
    since: str | None = None
    on: dict[str, Addition] = Field(default_factory=dict)


class Recipe(Addition):
    """A published way to serve a model."""

    model: str
    since: str
    """The first release of vLLM that serves it."""
    source: str
    """Path of the source file, relative to its origin in `recipe_origins()`."""
    verified_on: tuple[str, ...] = ()
    """GPUs on which the recipe was verified, by their names in the catalogue."""
    kind: str | None = None
    """The value for `serving.<model>.kind`, or None if the model's files show the kind."""
    extra: str | None = None
    """vLLM's extra with the required packages, for example `audio`. None if no extra is needed."""
    installs_more: bool = False
    """Whether the recipe needs packages that no release of vLLM installs."""
    features: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    optional: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Features that are off by default."""
    on: dict[str, Addition] = Field(default_factory=dict)
    """Additions for a GPU or a generation, for example `nvidia`, `hopper` or `blackwell`."""
    variants: tuple[Variant, ...]


class _Table(_Entry):
    about: str
    origin: str = "vLLM's recipes"
    recipes: tuple[Recipe, ...]


@cache
def _tables() -> tuple[_Table, ...]:
    return tuple(_Table.model_validate_json(file.read_bytes()) for file in (DATA, DOCUMENTED))


def recipe_origins() -> tuple[str, ...]:
    """Return the origins of the recipes, each with its date or release."""
    return tuple(each.about for each in _tables())


def source_project(recipe: Recipe) -> str:
    """Return the project that a recipe's `source` file belongs to."""
    return next(each.origin for each in _tables() if recipe in each.recipes)


def all_recipes() -> tuple[Recipe, ...]:
    """Return all recipes, sorted by the names of their models."""
    found = {recipe.model: recipe for table in _tables() for recipe in table.recipes}
    return tuple(sorted(found.values(), key=lambda one: one.model.lower()))


def find(model: str) -> Recipe:
    """
    Return the recipe of a model. `model` may be the name of any variant, in any case.

    Raises `FleetError` with similar names if there is no recipe.
    """
    names = {
        each.lower(): recipe
        for recipe in all_recipes()
        for each in (*(one.model for one in recipe.variants), recipe.model)
    }
    if recipe := names.get(model.lower()):
        return recipe
    inside = [one.model for one in all_recipes() if model.lower() in one.model.lower()]
    close = difflib.get_close_matches(model.lower(), names, n=3, cutoff=0.6)
    near = (inside or [*dict.fromkeys(names[each].model for each in close)])[:5]
    hint = f"similar names: {join_names(near)}" if near else "`gpufleet recipes` lists all"
    raise FleetError(f"{model}: no recipe for this model; {hint}")


def addition(
    recipe: Recipe,
    variant: Variant,
    gpu: str | None = None,
    capability: tuple[int, int] | None = None,
    features: tuple[str, ...] = (),
) -> Addition:
    """
    Return the arguments and variables of a variant for a GPU, with the given optional features.

    More specific entries come later and have priority. If no GPU is given, the result has the
    arguments for all NVIDIA GPUs. Raises `FleetError` if a feature is unknown.
    """
    if unknown := [name for name in features if name not in recipe.optional]:
        known = join_names(recipe.optional) or "none"
        raise FleetError(
            f"--with {unknown[0]}: the recipe of {recipe.model} has no such optional feature. Its "
            f"optional features: {known}"
        )
    words = [*recipe.arguments]
    for found in (*recipe.features.values(), *(recipe.optional[name] for name in features)):
        words += found
    words += variant.arguments
    environment = {**recipe.environment, **variant.environment}
    places = ["nvidia", *([_generation(capability)] if capability else []), gpu]
    for place in places:
        for layer in (recipe.on, variant.on):
            if place and (added := layer.get(place)):
                words += added.arguments
                environment |= added.environment
    return Addition(arguments=tuple(words), environment=environment)


def _generation(capability: tuple[int, int]) -> str | None:
    return {9: "hopper", 10: "blackwell", 12: "blackwell"}.get(capability[0])


def as_json(recipe: Recipe) -> dict[str, Any]:
    """Return the facts of a recipe as plain values for JSON."""
    return recipe.model_dump(mode="json")

"""Storage of weights: a `Scheme` for a group, a `Quantization` for a checkpoint.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property


@dataclass(frozen=True)
class Scheme:
    """The storage of one group of weights."""

    bits: int
    """Bits of one weight: 4 or 8."""
    kind: str = "int"
    """Number format: int, fp8, nvfp4, mxfp4, mxfp8, nf4."""
    group: int = 0
    """Inputs that share a scale, such as 128; 0 for a scale per output, -1 for one per weight."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, such as (128, 128)."""
    symmetric: bool = True
    """Whether the scheme uses no zero points."""
    zero_points: bool = False
    """Whether zero points are stored with the scales, used or not, with the bits of a weight."""
    scale_bytes: int = 2
    activation_order: bool = False
    """Whether there is an index for each input: GPTQ's desc_act."""


FP8 = Scheme(8, "fp8", group=-1, scale_bytes=4)
FP8_CHANNEL = Scheme(8, "fp8", group=0, scale_bytes=4)
NVFP4 = Scheme(4, "nvfp4", group=16, scale_bytes=1)
MXFP4 = Scheme(4, "mxfp4", group=32, scale_bytes=1)
MXFP8 = Scheme(8, "mxfp8", group=32, scale_bytes=1)
INT8_CHANNEL = Scheme(8, "int", group=0, scale_bytes=4)
NF4 = Scheme(4, "nf4", group=64, scale_bytes=4)


@dataclass(frozen=True)
class Quantization:
    """The contents of `quantization_config`, with vLLM's name of the method."""

    method: str
    """fp8, awq, gptq, compressed-tensors, mxfp4, modelopt, bitsandbytes, ..."""
    scheme: Scheme | None = None
    """Scheme of linear weights that the config does not name; None if they are not quantized."""
    ignored: tuple[str, ...] = ()
    """Names or patterns of weights that are not quantized, in the config's form."""
    groups: tuple[tuple[tuple[str, ...], Scheme | None], ...] = ()
    """(names or patterns, scheme) of weights that the config names, in its order."""
    head: bool = False
    """Whether the language model's head is quantized like a linear layer."""
    experts_only: bool = False
    """Whether only routed experts are quantized."""
    online: bool = False
    """Whether vLLM quantizes the weights when it loads an unquantized checkpoint."""

    @property
    def bits(self) -> int | None:
        """Return the bits of a weight in the usual scheme, or None."""
        return self._usual.bits if self._usual else None

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale; 0 without groups."""
        return max(0, self._usual.group) if self._usual else 0

    @property
    def block(self) -> tuple[int, int] | None:
        """Return the block of weights that shares a scale, or None."""
        return self._usual.block if self._usual else None

    @property
    def kinds(self) -> frozenset[str]:
        """Return every number format of the weights: fp8, nvfp4, mxfp4, int, ..."""
        schemes = (self.scheme, *(scheme for _, scheme in self.groups))
        return frozenset(scheme.kind for scheme in schemes if scheme)

    @property
    def _usual(self) -> Scheme | None:
        return self.scheme or next((scheme for _, scheme in self.groups if scheme), None)

    def scheme_of(self, name: str, *, head: bool = False, expert: bool = False) -> Scheme | None:
        """
        Return the scheme of the weight with this checkpoint name, or None if it is not quantized.

        `head` is set for the language model's head; `expert` for routed experts, whose name has no
        expert number.
        """
        if self.experts_only and not expert:
            return None
        names = _possible_names(name, expert=expert)
        if self._ignored.matches(names):
            return None
        for targets, scheme in self._groups:
            if targets.matches(names):
                return scheme
        return self.scheme if self.head or not head else None

    @cached_property
    def _ignored(self) -> _Patterns:
        return _Patterns(self.ignored)

    @cached_property
    def _groups(self) -> tuple[tuple[_Patterns, Scheme | None], ...]:
        return tuple((_Patterns(targets), scheme) for targets, scheme in self.groups)


_ROOTS = ("", "model.", "language_model.model.", "model.language_model.")
_BEFORE_LAYERS = re.compile(r"^(?:(?:model|language_model|transformer|text_model|llm|backbone)\.)+")
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?![\d])")


class _Patterns:
    """
    Names, wildcards and `re:` expressions to match many names.

    Checkpoints name the same weight from different roots (`model.`, `language_model.model.`), so
    roots are ignored. A plain name matches everything below it.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.plain: set[str] = set()
        self.parts: set[str] = set()
        self.of_layer: dict[str, list[re.Pattern[str]]] = {}
        self.anywhere: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                compiled = re.compile(pattern.removeprefix("re:"))
                self.anywhere.append(compiled)
            elif "*" in pattern or "?" in pattern:
                rooted = _strip_root(pattern)
                compiled = re.compile(translate(rooted)[:-2] + r"(?:\..*)?\Z")
                if (found := _NUMBER.search(rooted)) and rooted[found.end() - 1 :][:1] != "*":
                    self.of_layer.setdefault(found.group(1), []).append(compiled)
                else:
                    self.anywhere.append(compiled)
            else:
                plain = _strip_root(pattern.rstrip("."))
                (self.plain if _NUMBER.search(plain) else self.parts).add(f".{plain}.")

    def matches(self, names: Sequence[str]) -> bool:
        """Return whether a pattern matches one of a weight's names."""
        return any(self._match(name) for name in names)

    def _match(self, name: str) -> bool:
        dotted = f".{name}."
        if self.plain and _NUMBER.search(name):
            end = dotted.find(".", 1)
            while end > 0:
                if dotted[: end + 1] in self.plain:
                    return True
                end = dotted.find(".", end + 1)
        if any(part in dotted for part in self.parts):
            return True
        if self.of_layer and (number := _NUMBER.search(name)):
            for pattern in self.of_layer.get(number.group(1), ()):
                if pattern.match(name):
                    return True
        return any(pattern.match(root + name) for pattern in self.anywhere for root in _ROOTS)


def _strip_root(name: str) -> str:
    return _BEFORE_LAYERS.sub("", name)


def _possible_names(name: str, *, expert: bool) -> tuple[str, ...]:
    """Return the possible names of this weight in the config; experts also with the number 0."""
    plain = _strip_root(name)
    if not expert:
        return (plain,)
    if ".experts." in plain:
        return (plain, plain.replace(".experts.", ".experts.0.", 1))
    return (plain,)

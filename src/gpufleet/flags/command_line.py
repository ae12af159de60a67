"""Parse the arguments of `vllm serve` like a release, by exact names. Pure.

Contract: `parse` never raises for an operator's mistakes. If `unparsed` is empty, the release's
argparse accepts the form of the command line. `parse` does not validate values (types, choices,
JSON). An abbreviated option is in `unparsed` although argparse accepts it, because the abbreviation
may be ambiguous in the next release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from gpufleet.flags.normalize import ArgvWord, Dotted, Unparsed, UnparsedReason, rewrite
from gpufleet.flags.schema import Flag, Schema

__all__ = ["CommandLine", "Dotted", "GivenFlag", "Unparsed", "UnparsedReason", "parse"]

# Matches words that argparse parses as a value although they start with a dash.
_NEGATIVE = re.compile(r"-\d+$|-\d*\.\d+$")
_HELP = {"-h", "--help"}


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """
    One use of a flag.

    `option` is the option string as the release spells it, not as the operator typed it. `values`
    has the flag's texts, and is empty for a switch. `at` has the argv indexes of the flag and its
    values. If the flag is given as `--x.key value`, `dotted` has its parts. The only value is then
    the JSON that vLLM builds from the parts.
    """

    flag: Flag
    option: str
    values: tuple[str, ...]
    at: tuple[int, ...]
    dotted: tuple[Dotted, ...] = ()

    @property
    def negated(self) -> bool:
        """Return whether this use switches the flag off."""
        return self.flag.negates(self.option)


@dataclass(frozen=True)
class CommandLine:
    """
    A parsed command line.

    `given` has the flags in the order of the command line, but dotted options come last, as in
    vLLM. `model` is the positional argument, and `model_at` has its indexes in argv (two for
    `--model X`).
    """

    argv: tuple[str, ...]
    model: str | None
    model_at: tuple[int, ...]
    given: tuple[GivenFlag, ...]
    unparsed: tuple[Unparsed, ...]

    @cached_property
    def by_name(self) -> dict[str, tuple[GivenFlag, ...]]:
        """All uses of each flag, by the flag's name."""
        uses: dict[str, tuple[GivenFlag, ...]] = {}
        for one in self.given:
            uses[one.flag.name] = (*uses.get(one.flag.name, ()), one)
        return uses

    def last(self, name: str) -> GivenFlag | None:
        """
        Return the last use of a flag, or None if the flag is not given.

        The last use overrides earlier uses, unless the flag collects values.
        """
        return self.by_name.get(name, (None,))[-1]


def parse(schema: Schema, argv: Sequence[str]) -> CommandLine:
    """Parse `argv` with `schema`. Return the values of each flag, and the unparsed arguments."""
    rewritten = rewrite(argv, schema.syntax)
    parser = _Parser(schema, tuple(argv), rewritten.words)
    parser.run()
    unparsed = sorted((*rewritten.unparsed, *parser.unparsed), key=lambda one: one.at)
    return CommandLine(
        tuple(argv),
        None if parser.model is None else parser.model.text,
        () if parser.model is None else parser.model.at,
        tuple(parser.given),
        tuple(unparsed),
    )


@dataclass(frozen=True, slots=True)
class _Option:
    """A word that is an option. `flag` is None if the release does not have this option."""

    name: str
    flag: Flag | None
    explicit: str | None = None  # the text after the equals sign, if any
    candidates: tuple[str, ...] = ()


_LONG_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"


class _Parser:
    """A parser that processes words like argparse's `_parse_known_args`."""

    def __init__(self, schema: Schema, argv: tuple[str, ...], words: Sequence[ArgvWord]) -> None:
        self.model: ArgvWord | None = None
        self.given: list[GivenFlag] = []
        self.unparsed: list[Unparsed] = []
        self._schema = schema
        self._argv = argv
        self._words = words
        separator = next((at for at, word in enumerate(words) if word.text == "--"), len(words))
        self._separator = separator
        self._options = [
            self._option(word) if at < separator else None for at, word in enumerate(words)
        ]

    def run(self) -> None:
        at = 0
        while at < len(self._words):
            option = self._options[at]
            if option is not None:
                at = self._take_option(at, option)
            else:
                if at != self._separator or not self._separates(at):
                    self._take_word(self._words[at])
                at += 1
        positional = self._schema.positional
        if positional is not None and positional.nargs is None and self.model is None:
            found = (
                "the command line has no model: this release expects the model as the first "
                "argument"
            )
            self._cannot(UnparsedReason.MODEL, ArgvWord("", ()), found)

    def _option(self, word: ArgvWord) -> _Option | None:
        """
        Return the option that a word is, or None if it is a value (as argparse._parse_optional).
        """
        text, known = word.text, self._schema.by_option
        if not text.startswith("-") or text == "-":
            return None
        if text in known:
            return _Option(text, known[text])
        name, equals, explicit = text.partition("=")
        if equals and name in known:
            return _Option(name, known[name], explicit)
        if not text.startswith("--") and text[:2] in known:
            return _Option(text[:2], known[text[:2]], text[2:])
        prefix = name if text.startswith("--") else text
        candidates = tuple(option for option in known if option.startswith(prefix))
        if not candidates and not word.dotted and (_NEGATIVE.match(text) or " " in text):
            return None
        return _Option(name, None, explicit if equals else None, candidates)

    def _separates(self, at: int) -> bool:
        """Return whether argparse accepts `--` at an index. It does so only next to the model."""
        if self._schema.positional is None:
            return False
        return self.model is None or (at > 0 and self.model is self._words[at - 1])

    def _take_word(self, word: ArgvWord) -> None:
        if self._schema.positional is not None and self.model is None:
            self.model = word
            return
        meant = self._meant_by_long_dash(word.text)
        if meant is not None:
            found = (
                f"`{word.text}` begins with a typographic dash instead of `-`, so vLLM does not "
                f"read it as an option: write `{meant}`"
            )
        else:
            found = f"`{word.text}` is not an option, and is not a value of an option either"
            if self.model is not None:
                found += (
                    ". It is not the model either, because the model is already "
                    f"`{self.model.text}`"
                )
        self._cannot(UnparsedReason.STRAY, word, found)

    def _meant_by_long_dash(self, text: str) -> str | None:
        """Return the option that a word with typographic dashes was meant to be, or None."""
        rest = text.lstrip(_LONG_DASHES)
        candidates = [dashes + rest.lstrip("-") for dashes in ("--", "-") if rest != text]
        return next((one for one in candidates if self._is_known(one)), None)

    def _is_known(self, text: str) -> bool:
        return text.partition("=")[0] in self._schema.by_option

    def _take_option(self, at: int, option: _Option) -> int:
        """Parse the option at an index with its values, and return the next index."""
        word = self._words[at]
        if option.name in _HELP:
            self._cannot(UnparsedReason.HELP, word, f"`{option.name}` prints vLLM's help and exits")
            return at + 1
        if option.flag is None:
            return self._refuse(at, option)
        if option.explicit is not None:
            self._take_explicit(word, option.flag, option)
            return at + 1
        values = self._values(at + 1, option.flag)
        flag = option.flag
        if len(values) < _least(flag):
            found = f"`{self._written(word)}` has no value"
            self._cannot(UnparsedReason.NO_VALUE, word, found, flag=flag)
        else:
            self._give(flag, option.name, word, values)
        return at + 1 + len(values)

    def _take_explicit(self, word: ArgvWord, flag: Flag, option: _Option) -> None:
        if not flag.takes_value:
            found = (
                f"`{option.name}` is a switch without a value, but has the value "
                f"`{option.explicit}`"
            )
            self._cannot(
                UnparsedReason.SURPLUS_VALUE, word, found, (str(option.explicit),), flag=flag
            )
        elif isinstance(flag.nargs, int) and flag.nargs > 1:
            found = f"`{option.name}` needs {flag.nargs} values, separated by spaces"
            self._cannot(UnparsedReason.NO_VALUE, word, found, flag=flag)
        else:
            self._give(flag, option.name, word, [ArgvWord(str(option.explicit), ())])

    def _refuse(self, at: int, option: _Option) -> int:
        """Report an unknown option, and skip its values."""
        word = self._words[at]
        written = self._written(word)
        if not option.candidates:
            trouble, found = UnparsedReason.UNKNOWN, f"this release has no option `{written}`"
            values = list(self._run_of_values(at + 1))
        elif len(option.candidates) == 1:
            (only,) = option.candidates
            trouble = UnparsedReason.PREFIX
            found = f"`{written}` is an abbreviation of `{only}`: write the full name"
            values = self._values(at + 1, self._schema.by_option[only])
        else:
            trouble = UnparsedReason.AMBIGUOUS
            found = (
                f"`{written}` is an ambiguous abbreviation: it could mean "
                f"{_listed(option.candidates)}"
            )
            values = list(self._run_of_values(at + 1))
        if option.explicit is not None:
            values = []
        elif trouble is not UnparsedReason.PREFIX and self.model is None and len(values) > 1:
            values.pop()  # the last word is more likely the model than a second value
        texts = tuple(value.text for value in values)
        if option.explicit is not None:
            texts = (option.explicit,)
        places = tuple(place for value in values for place in value.at)
        self._cannot(trouble, word, found, texts, candidates=option.candidates, more=places)
        return at + 1 + len(values)

    def _values(self, start: int, flag: Flag) -> list[ArgvWord]:
        return list(islice(self._run_of_values(start), _most(flag)))

    def _run_of_values(self, start: int) -> Iterator[ArgvWord]:
        """Yield the words from an index up to the next option."""
        for at in range(start, len(self._words)):
            if self._options[at] is not None or at == self._separator:
                return
            yield self._words[at]

    def _give(self, flag: Flag, option: str, word: ArgvWord, values: Sequence[ArgvWord]) -> None:
        places = dict.fromkeys((*word.at, *(place for value in values for place in value.at)))
        texts = tuple(value.text for value in values)
        self.given.append(GivenFlag(flag, option, texts, tuple(places), word.dotted))

    def _cannot(
        self,
        trouble: UnparsedReason,
        word: ArgvWord,
        found: str,
        values: tuple[str, ...] = (),
        *,
        candidates: tuple[str, ...] = (),
        more: tuple[int, ...] = (),
        flag: Flag | None = None,
    ) -> None:
        at = tuple(dict.fromkeys((*word.at, *more)))
        self.unparsed.append(
            Unparsed(trouble, self._written(word), at, found, values, candidates, flag)
        )

    def _written(self, word: ArgvWord) -> str:
        """Return a word as typed."""
        return self._argv[word.at[0]] if word.at else word.text


def _least(flag: Flag) -> int:
    """Return the minimum number of values of a flag."""
    if not flag.takes_value or flag.nargs in {"?", "*"}:
        return 0
    return flag.nargs if isinstance(flag.nargs, int) else 1


def _most(flag: Flag) -> int | None:
    """Return the maximum number of values of a flag, or None if there is no limit."""
    if not flag.takes_value:
        return 0
    if flag.nargs in {"+", "*"}:
        return None
    return flag.nargs if isinstance(flag.nargs, int) else 1


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

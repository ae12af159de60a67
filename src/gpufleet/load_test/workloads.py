"""Define workloads: lengths, shared prefixes and conversations. Pure.

Lengths are exact numbers of tokens, because prompts are random token ids. `written_prompts.py`
handles prompts that the operator has written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from gpufleet.errors import FleetError
from gpufleet.on_node.load.request_draws import FEWEST_IDS

COMPLETIONS = "/v1/completions"


def _check(right: bool, sentence: str) -> None:
    if not right:
        raise FleetError(sentence)


@dataclass(frozen=True)
class Lengths:
    """
    A distribution of numbers of tokens.

    Create it with `fixed_length`, `uniform_lengths` or `lognormal`.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    most: int
    mean: float
    sigma: float = 0.0
    """The standard deviation of the logarithm."""

    def form(self) -> dict[str, Any]:
        """Return the parameters of `request_draws.lengths`."""
        if self.kind == "fixed":
            return {"kind": "fixed", "tokens": self.most}
        if self.kind == "uniform":
            return {"kind": "uniform", "low": self.low, "high": self.most}
        mu = _mu(self.mean, self.sigma, self.most)
        return {"kind": "lognormal", "mu": mu, "sigma": self.sigma, "maximum": self.most}

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.most}"
        if self.kind == "uniform":
            return f"{self.low}-{self.most}"
        return f"lognormal:{self.mean:g}:{self.most}"


def fixed_length(tokens: int) -> Lengths:
    """Return a constant length."""
    _check(tokens >= 1, f"a length of {tokens} tokens is invalid: write 1 or more")
    return Lengths("fixed", tokens, tokens, float(tokens))


def uniform_lengths(low: int, high: int) -> Lengths:
    """Return uniformly distributed lengths from `low` to `high`, both included."""
    _check(
        1 <= low <= high, f"lengths from {low} to {high} tokens are invalid: write 1 <= LOW <= HIGH"
    )
    return Lengths("uniform", low, high, (low + high) / 2)


def lognormal(mean: float, maximum: int, sigma: float = 1.0) -> Lengths:
    """
    Return lognormal lengths with this maximum. Their mean, with the maximum applied, is `mean`.

    `sigma` is the standard deviation of the logarithm. In the conversations of Azure's trace of
    2023, it is 0.99 for prompts and 0.86 for answers.
    """
    _check(
        1 <= mean < maximum and 0 < sigma <= 4,
        f"lengths with a mean of {mean:g} tokens, a maximum of {maximum} and a sigma of "
        f"{sigma:g} are invalid: write 1 <= MEAN < MAXIMUM, and a sigma above 0 and at most 4",
    )
    return Lengths("lognormal", 1, maximum, float(mean), sigma)


def parse_lengths(text: str) -> Lengths:
    """
    Parse lengths: `512`, `256-1024` or `lognormal:MEAN:MAXIMUM`.

    >>> parse_lengths("256-1024").mean
    640.0
    """
    kind, _, rest = text.partition(":")
    numbers = rest.split(":") if kind == "lognormal" else text.split("-")
    if not 1 <= len(numbers) <= 2 or not all(each.isascii() and each.isdigit() for each in numbers):
        numbers = []
    values = [int(each[:9]) for each in numbers]
    if kind == "lognormal" and len(values) == 2:
        return lognormal(*values)
    if kind != "lognormal" and values:
        return fixed_length(values[0]) if len(values) == 1 else uniform_lengths(*values)
    raise FleetError(
        f"{text!r} is not a length: write numbers of tokens as `512`, `256-1024`, or "
        "`lognormal:MEAN:MAXIMUM`"
    )


@dataclass(frozen=True)
class TokenRange:
    """A range of ordinary token ids: `low` <= id < `high`."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check(
            self.low >= 0 and self.high - self.low >= FEWEST_IDS,
            f"{self.high - self.low} token ids are too few to make prompts that differ: at least "
            f"{FEWEST_IDS} are needed",
        )


SPECIAL_FIRST = 1000
"""The number of token ids at the beginning of the vocabulary that may be special.

Mistral's Tekken reserves the first 1,000 ids for control tokens. Other tokenizers reserve a few
hundred ids.
"""
SPECIAL_LAST = 4096
"""
The number of token ids at the end of the vocabulary that may be special or unused.

Llama 3 has 256 special ids at the end, DeepSeek-V3 1,280 and Llama 4 2,048. After these ids, a
vocabulary may have unused ids that round its size up.
"""


def ordinary_ids(vocab_size: int) -> TokenRange:
    """
    Return a range of token ids without special tokens.

    `vocab_size` is from config.json. For a small vocabulary, the range is the middle half of all
    ids. If too few ids remain, the function raises `FleetError`.

    >>> ordinary_ids(151936)
    TokenRange(low=1000, high=147840)
    """
    if vocab_size < 2 * (SPECIAL_FIRST + SPECIAL_LAST):
        return TokenRange(vocab_size // 4, vocab_size - vocab_size // 4)
    return TokenRange(SPECIAL_FIRST, vocab_size - SPECIAL_LAST)


@dataclass(frozen=True)
class Workload:
    """Requests of random token ids."""

    name: str
    input: Lengths
    """The length of a prompt without its prefix. In a conversation, the length of a user's turn."""
    output: Lengths
    reason: str
    """The reason for these lengths."""
    prefix_tokens: int = 0
    """
    The number of tokens of the prefix that all requests of a group share, such as a system prompt.
    """
    prefix_groups: int = 1
    turns: int = 1
    """The number of requests in a conversation.

    Each request repeats the previous requests, with random tokens in the place of the server's
    answers. So the server's prefix cache can reuse the previous prompts, but not the answers.
    """

    def __post_init__(self) -> None:
        _check(
            self.prefix_tokens >= 0,
            (f"a prefix of {self.prefix_tokens} tokens is invalid: write 0 or more"),
        )
        _check(
            self.prefix_groups >= 1 and self.turns >= 1,
            f"{self.prefix_groups} groups of prefixes and {self.turns} turns are invalid: write "
            "1 or more for each",
        )

    path = COMPLETIONS

    @property
    def most_tokens(self) -> int:
        """Return the tokens of the largest request, prompt and answer together."""
        return self.prefix_tokens + self.turns * (self.input.most + self.output.most)

    @property
    def mean_prompt_tokens(self) -> float:
        """Return a prompt's mean number of tokens over all turns."""
        before = (self.turns - 1) / 2
        return self.prefix_tokens + (before + 1) * self.input.mean + before * self.output.mean

    @property
    def mean_tokens(self) -> float:
        """Return an answer's mean number of tokens."""
        return self.output.mean

    def check_context(self, max_model_len: int) -> None:
        """Raise `FleetError` if the workload exceeds the model's context."""
        if self.most_tokens <= max_model_len:
            return
        parts = [f"{self.input.most} + {self.output.most}"]
        if self.turns > 1:
            parts = [f"{self.turns} turns of ({parts[0]})"]
        if self.prefix_tokens:
            parts.insert(0, f"a prefix of {self.prefix_tokens}")
        raise FleetError(
            f"workload {self.name}: the largest request has {self.most_tokens} tokens "
            f"({' + '.join(parts)}, prompt and answer), but the model's context has "
            f"{max_model_len} (`max_model_len`): write shorter lengths, fewer turns, or a "
            "shorter prefix"
        )

    def requests(
        self,
        model: str,
        ids: TokenRange,
        salt: str,
        *,
        session_header: str = "",
    ) -> Callable[[int, int], dict[str, Any]]:
        """
        Return a function that returns the requests' parameters for one client process.

        The function takes the number of the client and the number of clients. `model` is the served
        name. `salt` must differ between runs, so that a run does not find the prompts of an earlier
        run in a cache. `session_header` is the header that identifies conversations to a gateway
        (`gateway.affinity`).
        """
        form = {
            "kind": "tokens",
            "model": model,
            "vocabulary": [ids.low, ids.high],
            "salt": salt,
            "input": self.input.form(),
            "output": self.output.form(),
            "prefix_tokens": self.prefix_tokens,
            "prefix_groups": self.prefix_groups,
            "turns": self.turns,
            "session_header": session_header if self.turns > 1 else "",
        }
        return lambda _process, _processes: form


def text_work(prompt_tokens: int, tokens: int) -> Workload:
    """Return a workload of one size, to measure the client's limit."""
    return Workload("ceiling", fixed_length(prompt_tokens), fixed_length(tokens), "its own cost")


PRESETS: Mapping[str, Workload] = MappingProxyType(
    {
        each.name: each
        for each in (
            Workload(
                "chat",
                lognormal(255, 768, 0.99),
                lognormal(211, 768, 0.86),
                "four turns after a system prompt of 200 tokens: prompts of 1,154 and answers of "
                "211 tokens in the mean, as the conversations in Azure's trace of 2023 (19,366 "
                "requests: 1,155 and 211)",
                prefix_tokens=200,
                turns=4,
            ),
            Workload(
                "rag",
                uniform_lengths(2560, 4096),
                lognormal(256, 768, 0.86),
                "a question with five to eight passages of 512 tokens, after instructions of 256 "
                "tokens that all requests share; answers somewhat longer than in conversations",
                prefix_tokens=256,
            ),
            Workload(
                "code",
                lognormal(2048, 7437, 1.36),
                lognormal(28, 512, 0.85),
                "completion while a developer types: the code requests of Azure's trace of 2023 "
                "(8,819 requests: prompts of 2,048 tokens in the mean and 7,437 at most, answers "
                "of 28)",
            ),
            Workload(
                "batch",
                uniform_lengths(820, 1024),
                uniform_lengths(820, 1024),
                "work that no user waits for, as public comparisons load it: 1,024 tokens in and "
                "out, from 0.8 of that on",
            ),
        )
    }
)
"""
Maps the name of a preset to its workload.

The means are computed from AzureLLMInferenceTrace_{conv,code}.csv.
"""


def _mu(mean: float, sigma: float, maximum: int) -> float:
    """Return the mean of the logarithm of x for which the mean of min(x, maximum) is `mean`."""

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def cut_mean(mu: float) -> float:
        z = (math.log(maximum) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * normal(z - sigma) + maximum * normal(-z)

    low, high = -10.0, math.log(maximum) + 10 * sigma
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return low

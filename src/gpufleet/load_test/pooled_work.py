"""Define requests to models that generate no text but embeddings, rankings or labels. Pure.

An answer arrives as one document, so the only latency is the time until the whole answer has
arrived. Texts are random token ids with exact lengths. A reranker accepts no token ids, so words
are sent instead, and the server counts the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpufleet.errors import FleetError
from gpufleet.load_test.workloads import Lengths, TokenRange, fixed_length, lognormal, parse_lengths
from gpufleet.on_node.serving import questions
from gpufleet.settings.serving_settings import ModelKind
from gpufleet.sizing.model_kinds import POOLS

PAIR_TOKENS: Final = 4
"""
The maximum number of special tokens around a query and its document.

RoBERTa has four: `<s> </s></s> </s>`.
"""
_NUMBERS: Final = 1024
"""The number of dimensions of an embedding, as in BGE-M3 and Qwen3-Embedding-0.6B."""
_LENGTHS: Final = (
    "for a reranker, whose requests have a query and 1 or more documents, write `--lengths "
    "QUERY,DOCUMENT,COUNT`, for example 16,256,20. For other models, whose requests have one "
    "text, write `--lengths TOKENS`"
)


@dataclass(frozen=True)
class PooledWork:
    """Requests of random texts to a pooling model."""

    name: str
    kind: ModelKind
    input: Lengths
    """The length of a text, or of a reranker's query."""
    reason: str
    """The reason for these lengths."""
    documents: int = 0
    """The number of documents in each request to a reranker."""
    document: Lengths | None = None
    """The length of each document."""

    def __post_init__(self) -> None:
        if self.kind not in POOLS:
            raise ValueError(f"{self.kind} is asked for text")
        if (self.kind == "rerank") != (self.documents > 0 and self.document is not None):
            raise FleetError(f"workload {self.name}: {_LENGTHS}")

    mean_tokens = 0.0
    """The mean number of tokens of an answer. It is 0, because answers have no tokens."""

    @property
    def path(self) -> str:
        """Return the requests' path."""
        return questions.question(self.kind, "").path

    @property
    def most_tokens(self) -> int:
        """
        Return the tokens of the longest text that the model reads at once.

        A reranker reads a query and one document at once.
        """
        if self.document is None:
            return self.input.most
        return self.input.most + self.document.most + PAIR_TOKENS

    @property
    def mean_prompt_tokens(self) -> float:
        """Return a request's mean number of tokens."""
        return self.input.mean + self.documents * (self.document.mean if self.document else 0.0)

    def largest(self) -> PooledWork:
        """Return a workload of only this one's largest request."""
        document = self.document and fixed_length(self.document.most)
        return PooledWork(
            self.name,
            self.kind,
            fixed_length(self.input.most),
            self.reason,
            self.documents,
            document,
        )

    def check_context(self, max_model_len: int) -> None:
        """Raise `FleetError` for texts that exceed the model's context."""
        if self.most_tokens > max_model_len:
            what = "query and document have" if self.documents else "text has"
            raise FleetError(
                f"workload {self.name}: the longest {what} {self.most_tokens} tokens, but the "
                f"model's context has {max_model_len} (`max_model_len`): write shorter --lengths"
            )

    def requests(
        self, model: str, ids: TokenRange, salt: str
    ) -> Callable[[int, int], dict[str, Any]]:
        """Return a client's input for requests (`workloads.Workload.requests`)."""
        form = {
            "kind": "pooled",
            "asked": self.kind,
            "model": model,
            "vocabulary": [ids.low, ids.high],
            "salt": salt,
            "input": self.input.form(),
            "documents": self.documents,
            "document": (self.document or self.input).form(),
        }
        return lambda _process, _processes: form

    def example_answer(self) -> dict[str, Any]:
        """Return an answer of this kind's usual size, to measure the client's limit."""
        numbers = [at / _NUMBERS - 0.5 for at in range(_NUMBERS)]
        usage = {"usage": {"prompt_tokens": 1, "total_tokens": 1}}
        if self.kind == "embed":
            return {"data": [{"index": 0, "embedding": numbers}], **usage}
        if self.kind == "rerank":
            row = {"document": {"text": "a"}, "relevance_score": 0.5}
            return {"results": [{"index": at, **row} for at in range(self.documents)], **usage}
        if self.kind == "classify":
            return {"data": [{"index": 0, "label": "a", "probs": [0.5, 0.5]}], **usage}
        return {"data": [{"index": 0, "data": [0.5]}], **usage}

    def __str__(self) -> str:
        if self.document is None:
            return f"{self.name}: {self.input} tokens"
        return (
            f"{self.name}: a query of {self.input} words with {self.documents} documents of "
            f"{self.document}"
        )


_PASSAGES = lognormal(220, 480, 0.7)
_QUERIES = lognormal(14, 64, 0.6)
_BEIR = (
    "the 19 collections of BEIR (Thakur et al., 2021, table 1), at 1.3 tokens a word: documents of "
    "11 to 635 words, 170 in the mean, queries of 3 to 20 words, ArguAna's apart"
)


def _texts(kind: ModelKind) -> PooledWork:
    return PooledWork("documents", kind, _PASSAGES, f"texts that are indexed, as {_BEIR}")


PRESETS: Mapping[ModelKind, tuple[PooledWork, ...]] = MappingProxyType(
    {
        "embed": (
            _texts("embed"),
            PooledWork("queries", "embed", _QUERIES, f"users' search queries, as {_BEIR}"),
        ),
        "rerank": (
            PooledWork(
                "candidates",
                "rerank",
                _QUERIES,
                f"a query with the 20 documents that a search has found, as {_BEIR}; query and "
                "document fit together into the 512 tokens of small encoders",
                20,
                lognormal(220, 440, 0.7),
            ),
        ),
        "classify": (_texts("classify"),),
        "reward": (_texts("reward"),),
    }
)
"""The workloads of each kind of model. The first one is the default."""


def parse_work(kind: ModelKind, text: str) -> PooledWork:
    """
    Parse the lengths of texts, or a reranker's QUERY,DOCUMENT,COUNT.

    >>> str(parse_work("rerank", "16,256,20"))
    'lengths: a query of 16 words with 20 documents of 256'
    """
    first, *others = text.split(",")
    counted = len(others) == 2 and others[1].isascii() and others[1].isdigit()
    if len(others) != (2 if kind == "rerank" else 0) or (others and not counted):
        raise FleetError(f"--lengths {text}: {_LENGTHS}")
    document = parse_lengths(others[0]) if others else None
    count = int(others[1][:5]) if others else 0
    return PooledWork("lengths", kind, parse_lengths(first), "as it was typed", count, document)

"""RUNS ON THE NODE: draw arrival times, lengths and prompts from a seed. Pure.

Prompts are token ids, so that lengths are exact and no tokenizer is needed. A server with a prefix
cache must not have accidental cache hits. So after the prefix that prompts share on purpose, each
prompt has its own number in its first tokens, and a salt that differs in each run. All other tokens
are cut from one pool of random ids. This costs one copy for each request instead of one draw for
each token. The same ids at a different position are not a cache hit, because a block's hash covers
all blocks before it (vLLM, v1/core/kv_cache_utils.py).

For models that generate no text, `on_node/serving/questions.py` builds the requests and judges the
answers. A reranker accepts only texts, so its prompts have words instead of token ids.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import random
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence

from gpufleet.on_node.serving import questions

POOL_TOKENS = 1 << 15
NUMBER_TOKENS = 8
"""Number of tokens that encode a prompt's number. With 64 ids, they have 2.8e14 values."""
FEWEST_IDS = 64
BLOCKS_FROM = 1 << 40
"""
First number of the blocks of a trace. The numbers of prompts start at 0; those of groups are
negative.
"""
BLOCK_TOKENS = 512
"""Number of prompt tokens for each id in a trace's `hash_ids` (Mooncake, FAST25-release)."""
RESTING_SECONDS = 5.0
"""
When the load begins, as many conversations are at rest as arrivals come in this many seconds.
"""
_TEXT = (
    "and are back been book call city come cost data days done door each even face fact find five"
    " food form four from game give good hand have head help here high home hour into just keep"
    " kind know last left life like line list long made make many more most move much name need"
    " news next once only open over part plan read"
)
WORDS = _TEXT.split()
"""`FEWEST_IDS` words. In most tokenizers for English, each of the words is one token."""
_MARK = "\x01"
"""Placeholder in a question, which is replaced with a drawn text."""


class Prepared(NamedTuple):
    """A request that is ready to be sent."""

    body: bytes
    prompt_tokens: int
    """Number of prompt tokens, or 0 if only the server can count them."""
    tokens: int
    """Number of requested tokens, or 0 if the model determines the number."""
    header: bytes = b""
    """An additional header line with its line end."""
    resume: Optional[Callable[[], None]] = None
    """Function to call when the answer is complete. After it, the next turn may be sent."""
    judge: Optional[Callable[[Any], questions.Judged]] = None
    """
    Function that judges an answer which is one JSON document, or None for a stream of tokens.
    """


def arrival_times(rate: float, seed: object) -> Iterator[float]:
    """
    Yield arrival times in seconds of an endless Poisson process with `rate` requests per second.

    The times between arrivals are exponential and are never rescaled. If n arrivals were fitted
    into n / rate seconds, their number would have no variance.
    """
    draw = random.Random(str(seed)).random
    at = 0.0
    while True:
        at -= math.log(1.0 - draw()) / rate
        yield at


def lengths(form: Dict[str, Any], seed: object) -> Iterator[int]:
    """
    Yield an endless sequence of lengths in tokens.

    `form` has one of these forms:
      {"kind": "fixed", "tokens"}
      {"kind": "uniform", "low", "high"}: `low` and `high` are possible lengths
      {"kind": "lognormal", "mu", "sigma", "maximum"}: `mu` and `sigma` describe the logarithm;
          a longer length becomes `maximum`
    """
    draw = random.Random(str(seed)).random
    if form["kind"] == "fixed":
        yield from itertools.repeat(int(form["tokens"]))
    elif form["kind"] == "uniform":
        low, count = int(form["low"]), int(form["high"]) - int(form["low"]) + 1
        while True:
            yield low + int(draw() * count)
    mu, sigma, maximum = form["mu"], form["sigma"], int(form["maximum"])
    while True:
        # The method of Box and Muller gives the same values in every version of Python.
        normal = math.sqrt(-2.0 * math.log(1.0 - draw())) * math.cos(2.0 * math.pi * draw())
        yield max(1, min(maximum, round(math.exp(min(mu + sigma * normal, 40.0)))))


class TokenPool:
    """A long text of random token ids or words, from which prompts are cut."""

    def __init__(self, low: int, high: int, salt: str, unit: Callable[[int], bytes]) -> None:
        """
        Draw from the ids `low` <= id < `high`. `unit` returns the text of an id with its separator.
        """
        source = random.Random(salt)
        self._low, self._span, self._unit = low, high - low, unit
        words = [unit(low + int(source.random() * self._span)) for _ in range(POOL_TOKENS)]
        self._text = b"".join(words)
        self._starts = [0, *itertools.accumulate(map(len, words))]
        self._first = source.getrandbits(48)

    def piece(self, start: int, count: int) -> bytes:
        """Return `count` ids from position `start`, each followed by its separator."""
        parts = []
        while count > 0:
            start %= POOL_TOKENS
            taken = min(count, POOL_TOKENS - start)
            parts.append(self._text[self._starts[start] : self._starts[start + taken]])
            start, count = start + taken, count - taken
        return b"".join(parts)

    def number(self, value: int, count: int = NUMBER_TOKENS) -> bytes:
        """
        Return `value` as `count` ids, with the lowest digit first. No other value has these ids.
        """
        value += self._first
        digits = []
        for _ in range(count):
            value, digit = divmod(value, self._span)
            digits.append(self._unit(self._low + digit))
        return b"".join(digits)


def id_unit(value: int) -> bytes:
    """Return a token's id as text for a JSON list, with a comma."""
    return b"%d," % value


def word_unit(value: int) -> bytes:
    """Return the word of an id, with a space."""
    return WORDS[value].encode() + b" "


class _Conversation:
    """The text of a conversation so far, and the number of its next turn."""

    __slots__ = ("count", "name", "text", "turn")

    def __init__(self, text: bytes, count: int, name: str) -> None:
        self.text, self.count, self.name, self.turn = text, count, name, 1


class TokenRequests:
    """
    Requests of random token ids.

    `form` has these keys:
      model, salt
      vocabulary      [low, high): the range of token ids
      input, output   lengths of prompts and answers, in the form of `lengths`
      prefix_tokens   length of the prefix that the prompts of one group share
      prefix_groups   number of groups
      turns           number of turns in a conversation; each turn repeats the previous turns, with
                      random tokens instead of the answers
      session_header  name of the header with the conversation's name, for a gateway's session
                      affinity

    Turns do not change arrival times. One of `turns` arrivals is the first turn of a new
    conversation. Each other arrival is the next turn of the conversation that has rested longest.
    """

    def __init__(self, form: Dict[str, Any], seed: object, process: int, processes: int) -> None:
        low, high = form["vocabulary"]
        self._pool = TokenPool(low, high, form["salt"], id_unit)
        self._inputs = lengths(form["input"], "%s/input" % (seed,))
        self._outputs = lengths(form["output"], "%s/output" % (seed,))
        self._draw = random.Random("%s/choice" % (seed,)).random
        # A number is never used twice, not even in a different process, because each process uses
        # only every `processes`-th number.
        self._numbers = itertools.count(process, processes)
        self._prefix = int(form.get("prefix_tokens", 0))
        self._groups = [
            self._pool.number(-1 - group, min(self._prefix, NUMBER_TOKENS))
            + self._pool.piece(group * 997, self._prefix - NUMBER_TOKENS)
            for group in range(int(form.get("prefix_groups", 1)))
        ]
        self._turns = int(form.get("turns", 1))
        self._resting: Deque[_Conversation] = collections.deque()
        self._affinity = form.get("session_header") or ""
        self._head, self._tail = token_frame(form["model"])

    def stagger(self, count: int) -> None:
        """
        Begin `count` conversations at different turns. Otherwise all would be in the same turn.
        """
        if self._turns > 1:
            for _ in range(count):
                self._resting.append(self._begun(1 + int(self._draw() * (self._turns - 1))))

    def next(self) -> Prepared:
        """Return the next request."""
        if self._turns == 1:
            count, output = next(self._inputs), next(self._outputs)
            prompt = self._start() + self._own(count)
            return self._prepared(prompt, self._prefix + count, output)
        if self._draw() * self._turns < 1.0:
            talk = self._begun(0)
        else:
            talk = self._resting.popleft() if self._resting else self._begun(1)
        return self._turn(talk)

    def replayed(self, count: int, output: int, blocks: Sequence[int]) -> Prepared:
        """
        Return a request of a trace. `blocks` has the numbers of the parts that prompts share.
        """
        if not blocks:
            return self._prepared(self._own(count), count, output)
        parts = []
        left = count
        for block in blocks:
            parts.append(self._block(block, min(left, BLOCK_TOKENS)))
            left -= min(left, BLOCK_TOKENS)
        parts.append(self._own(left))
        return self._prepared(b"".join(parts), count, output)

    def _block(self, block: int, count: int) -> bytes:
        digits = min(count, NUMBER_TOKENS)
        return self._pool.number(BLOCKS_FROM + block, digits) + self._pool.piece(
            block * 997, count - digits
        )

    def _start(self) -> bytes:
        """Return the prefix of a random group."""
        return self._groups[int(self._draw() * len(self._groups))]

    def _own(self, count: int) -> bytes:
        """Return tokens that no other prompt has at this position."""
        digits = min(count, NUMBER_TOKENS)
        start = int(self._draw() * POOL_TOKENS)
        return self._pool.number(next(self._numbers), digits) + self._pool.piece(
            start, count - digits
        )

    def _begun(self, turns: int) -> _Conversation:
        """Return a conversation with a number of finished turns."""
        talk = _Conversation(self._start(), self._prefix, "%x" % int(self._draw() * (1 << 53)))
        for _ in range(turns):
            self._turn(talk)
        return talk

    def _turn(self, talk: _Conversation) -> Prepared:
        count, output = next(self._inputs), next(self._outputs)
        prompt = talk.text + self._own(count)
        total = talk.count + count
        # These tokens replace the answer, because only the server knows the answer's ids.
        talk.text, talk.count = prompt + self._own(output), total + output
        talk.turn += 1
        header = b""
        if self._affinity:
            header = ("%s: %s\r\n" % (self._affinity, talk.name)).encode()
        again = None if talk.turn > self._turns else lambda: self._resting.append(talk)
        return self._prepared(prompt, total, output, header, again)

    def _prepared(
        self,
        prompt: bytes,
        count: int,
        output: int,
        header: bytes = b"",
        resume: Optional[Callable[[], None]] = None,
    ) -> Prepared:
        body = b"".join((self._head, prompt[:-1], self._tail % (output, output)))
        return Prepared(body, count, output, header, resume)


class PooledRequests:
    """
    Requests for a model of a kind other than `generate`.

    `form` has these keys:
      asked       the model's kind
      model, salt
      vocabulary  [low, high): the range of token ids
      input       lengths of texts or of a reranker's queries, in the form of `lengths`
      documents   number of documents for each query
      document    lengths of the documents, in the form of `lengths`

    Texts are token ids, which vLLM accepts instead of a text. For a reranker, texts are words.
    """

    def __init__(self, form: Dict[str, Any], seed: object, process: int, processes: int) -> None:
        kind = form["asked"]
        texts = kind == "rerank"
        low, high = (0, len(WORDS)) if texts else form["vocabulary"]
        self._pool = TokenPool(low, high, form["salt"], word_unit if texts else id_unit)
        self._quotes = (b'"', b'"') if texts else (b"[", b"]")
        self._draw = random.Random("%s/choice" % (seed,)).random
        self._numbers = itertools.count(process, processes)
        self._inputs = lengths(form["input"], "%s/input" % (seed,))
        self._documents = int(form.get("documents", 0))
        document = form.get("document", form["input"])
        self._lengths = lengths(document, "%s/document" % (seed,))
        put = questions.question(kind, form["model"], _MARK, [_MARK] * self._documents)
        body = json.dumps(put.body, separators=(",", ":")).encode()
        self._parts = body.split(json.dumps(_MARK).encode())
        self._judge = judge_of(kind, put)

    def stagger(self, count: int) -> None:
        """Do nothing: requests are independent of each other."""

    def next(self) -> Prepared:
        """Return the next request."""
        counts = [next(self._inputs), *(next(self._lengths) for _ in range(self._documents))]
        first, last = self._quotes
        pieces = [self._parts[0]]
        for count, part in zip(counts, self._parts[1:]):
            pieces += [first, self._text(count), last, part]
        # Only the server knows how many tokens the words have.
        known = 0 if self._documents else sum(counts)
        return Prepared(b"".join(pieces), known, 0, judge=self._judge)

    def replayed(self, *_: object) -> Prepared:
        """Return the next request; a trace only sets its time."""
        return self.next()

    def _text(self, count: int) -> bytes:
        digits = min(count, NUMBER_TOKENS)
        text = self._pool.number(next(self._numbers), digits)
        return (text + self._pool.piece(int(self._draw() * POOL_TOKENS), count - digits))[:-1]


def judge_of(kind: str, put: questions.Question) -> Callable[[Any], questions.Judged]:
    """Return the function that judges an answer, without knowledge of the model's files."""
    return lambda document: questions.judge(kind, put, document, questions.Expected())


class WrittenRequests:
    """
    The operator's own requests in their order. After the last request, the first one follows again.

    `form` has bodies ([[text, requested tokens], ...]) and asked (the model's kind).
    """

    def __init__(self, form: Dict[str, Any]) -> None:
        kind = form.get("asked", questions.GENERATE)
        self._bodies: List[Prepared] = [
            Prepared(text.encode(), 0, int(tokens), judge=_judge_written(kind, text))
            for text, tokens in form["bodies"]
        ]
        self._number = 0

    def stagger(self, count: int) -> None:
        """Do nothing: requests are independent of each other."""

    def next(self) -> Prepared:
        """Return the next request."""
        self._number += 1
        return self._bodies[(self._number - 1) % len(self._bodies)]

    def replayed(self, *_: object) -> Prepared:
        """Return the next request; a trace only sets its time."""
        return self.next()


def _judge_written(kind: str, text: str) -> Optional[Callable[[Any], questions.Judged]]:
    if kind == questions.GENERATE:
        return None
    return judge_of(kind, questions.Question("", json.loads(text)))


def token_frame(model: str) -> "tuple[bytes, bytes]":
    """
    Return the two parts of a body before and after a prompt's ids.

    The second part must be formatted: `tail % (tokens, tokens)`.
    """
    head = b'{"model":%s,"prompt":[' % json.dumps(model).encode()
    # With ignore_eos and min_tokens, the answer has the length that was drawn, although the prompt
    # is random. No temperature is set, because greedy answers to random ids repeat themselves, and
    # speculative decoding would guess such answers too well.
    tail = (
        b'],"max_tokens":%d,"min_tokens":%d,"ignore_eos":true,"stream":true,'
        b'"stream_options":{"include_usage":true}}'
    )
    return head, tail

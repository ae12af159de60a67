"""RUNS ON THE NODE: draw arrival times, lengths and prompts from a seed.  Pure.

Prompts are token ids, so that lengths are exact and no tokenizer is needed. A server with a prefix
cache must not find by accident what it has computed before: each prompt has a number of its own in
its first tokens, behind the prefix that it is meant to share, and a salt that differs from run to
run. The rest is cut from one pool of random ids, which costs one copy a request instead of one draw
a token. The same ids in another position are no cache hit, because a block's hash covers all blocks
before it (vLLM, v1/core/kv_cache_utils.py).

For models that generate no text, `on_node/serving/questions.py` builds requests and judges answers.
A reranker takes only texts, in which words replace tokens.
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
"""Tokens of a prompt's number, which with 64 ids has 2.8e14 values."""
FEWEST_IDS = 64
BLOCKS_FROM = 1 << 40
"""First number of a trace's blocks; prompts have numbers from 0, groups below 0."""
BLOCK_TOKENS = 512
"""Prompt tokens per id of a trace's `hash_ids` (Mooncake, FAST25-release)."""
RESTING_SECONDS = 5.0
"""Seconds of arrivals whose conversations are at rest when the load begins."""
_TEXT = (
    "and are back been book call city come cost data days done door each even face fact find five"
    " food form four from game give good hand have head help here high home hour into just keep"
    " kind know last left life like line list long made make many more most move much name need"
    " news next once only open over part plan read"
)
WORDS = _TEXT.split()
"""`FEWEST_IDS` words, each of which is one token in most tokenizers for English."""
_MARK = "\x01"
"""Placeholder in a question for a drawn text."""


class Prepared(NamedTuple):
    """A request that is ready to be sent."""

    body: bytes
    prompt_tokens: int
    """Number of prompt tokens, or 0 if only the server can count them."""
    tokens: int
    """Number of requested tokens, or 0 for as many as the model gives."""
    header: bytes = b""
    """An additional header line with its line end."""
    resume: Optional[Callable[[], None]] = None
    """Function to call when the answer is complete, so that the next turn may follow."""
    judge: Optional[Callable[[Any], questions.Judged]] = None
    """Function for an answer of one JSON document, or None if the answer is a stream of tokens."""


def arrival_times(rate: float, seed: object) -> Iterator[float]:
    """
    Yield the arrival times of an endless Poisson process of `rate` requests a second, in seconds.

    Gaps are exponential and never rescaled, because fitting n arrivals into n / rate seconds would
    remove the variance of their number.
    """
    draw = random.Random(str(seed)).random
    at = 0.0
    while True:
        at -= math.log(1.0 - draw()) / rate
        yield at


def lengths(form: Dict[str, Any], seed: object) -> Iterator[int]:
    """
    Yield an endless sequence of lengths in tokens.

    `form` is {"kind": "fixed", "tokens"}, {"kind": "uniform", "low", "high"} with both ends
    included, or {"kind": "lognormal", "mu", "sigma", "maximum"}. `mu` and `sigma` are of the
    logarithm, and longer lengths are cut to `maximum`.
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
        # Box and Muller's, which is the same in every Python.
        normal = math.sqrt(-2.0 * math.log(1.0 - draw())) * math.cos(2.0 * math.pi * draw())
        yield max(1, min(maximum, round(math.exp(min(mu + sigma * normal, 40.0)))))


class TokenPool:
    """A long text of random token ids or words, from which prompts are cut."""

    def __init__(self, low: int, high: int, salt: str, unit: Callable[[int], bytes]) -> None:
        """Draw from the ids `low` <= id < `high`; `unit` returns an id with its separator."""
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
        """Return `value` as `count` ids that encode no other value, with the lowest digit first."""
        value += self._first
        digits = []
        for _ in range(count):
            value, digit = divmod(value, self._span)
            digits.append(self._unit(self._low + digit))
        return b"".join(digits)


def id_unit(value: int) -> bytes:
    """Return a token's id as an element of a JSON list."""
    return b"%d," % value


def word_unit(value: int) -> bytes:
    """Return a word with a space."""
    return WORDS[value].encode() + b" "


class _Conversation:
    """The text of a conversation so far, and its next turn."""

    __slots__ = ("count", "name", "text", "turn")

    def __init__(self, text: bytes, count: int, name: str) -> None:
        self.text, self.count, self.name, self.turn = text, count, name, 1


class TokenRequests:
    """
    Requests of random token ids.

    `form` has model, vocabulary [low, high), salt, input and output (as `lengths` has them);
    prefix_tokens and prefix_groups: the length of the common prefix in a group, and the number of
    groups; turns: the number of turns in a conversation (each turn repeats the previous ones, with
    random tokens for answers); session_header: the header that names the conversation, for a
    gateway's session affinity.

    Turns do not change arrival times: an arrival is a new conversation's first turn once in `turns`
    times, or else the next turn of the conversation that has rested longest.
    """

    def __init__(self, form: Dict[str, Any], seed: object, process: int, processes: int) -> None:
        low, high = form["vocabulary"]
        self._pool = TokenPool(low, high, form["salt"], id_unit)
        self._inputs = lengths(form["input"], "%s/input" % (seed,))
        self._outputs = lengths(form["output"], "%s/output" % (seed,))
        self._draw = random.Random("%s/choice" % (seed,)).random
        # The same number never comes again: not in another process, which counts beside this one.
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
        Start conversations at different turns, because otherwise all would be in the same turn.
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
        """Return a trace's request; `blocks` has the numbers of the parts that prompts share."""
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
        # For the answer: which ids it has, only the server knows.
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

    `form` has asked (the kind), model, vocabulary [low, high), salt and input (the lengths of texts
    or of a reranker's queries, in the form of `lengths`); documents: the number for each query; and
    document: their lengths. Texts are token ids, which vLLM accepts instead of a text. A reranker's
    texts are words.
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
        # How many tokens words are, only the server knows.
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
    """Return the function that judges an answer; the model's files are unknown here."""
    return lambda document: questions.judge(kind, put, document, questions.Expected())


class WrittenRequests:
    """
    The operator's own requests in their order, starting again after the last one.

    `form` has bodies, [[text, requested tokens], ...], and asked, the kind of the model.
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
    Return the parts of a body before and after a prompt's ids; format `tail % (tokens, tokens)`.
    """
    head = b'{"model":%s,"prompt":[' % json.dumps(model).encode()
    # ignore_eos and min_tokens: the answer has the length that was drawn, also on random ids. No
    # temperature: greedy answers to random ids repeat themselves, which speculation guesses well.
    tail = (
        b'],"max_tokens":%d,"min_tokens":%d,"ignore_eos":true,"stream":true,'
        b'"stream_options":{"include_usage":true}}'
    )
    return head, tail

"""RUNS ON THE NODE: draw requests with a picture or a sound, each with different content.

A server caches its results for a picture or a sound by its content. So that no content is repeated,
each picture has its own colour, and each sound has its own number in its first samples. All other
bytes are made only once, so that a request costs only a few copies.
"""

from __future__ import annotations

import itertools
import json
import random
import zlib
from typing import Any, Dict

from gpufleet.on_node.load.request_draws import (
    NUMBER_TOKENS,
    POOL_TOKENS,
    WORDS,
    Prepared,
    TokenPool,
    judge_of,
    lengths,
    word_unit,
)
from gpufleet.on_node.serving import questions

PALETTE = 3
"""PNG's colour type for pixels that are indexes into a palette."""
NUMBER_BYTES = 8
"""Bytes of the number at the start of a sound. They are 4 samples, too few to hear."""


class PictureRequests:
    """
    Chat requests, each with a picture of one colour.

    `form` has these keys:
      model, salt
      pixels   pixels of each side of the picture
      input    number of words of the question, in the form of `request_draws.lengths`
      output   number of tokens of the answer, in the same form
    """

    def __init__(self, form: Dict[str, Any], seed: object, process: int, processes: int) -> None:
        source = random.Random(form["salt"])
        self._first = source.getrandbits(24)
        self._numbers = itertools.count(process, processes)
        self._model, self._pixels = form["model"], int(form["pixels"])
        row = bytes(1 + (self._pixels + 7) // 8)
        self._image = zlib.compress(row * self._pixels)
        self._words = TokenPool(0, len(WORDS), form["salt"], word_unit)
        self._draw = random.Random("%s/choice" % (seed,)).random
        self._inputs = lengths(form["input"], "%s/input" % (seed,))
        self._outputs = lengths(form["output"], "%s/output" % (seed,))

    def stagger(self, count: int) -> None:
        """Do nothing: requests are independent of each other."""

    def next(self) -> Prepared:
        """Return the next request."""
        number, count, output = next(self._numbers), next(self._inputs), next(self._outputs)
        digits = min(count, NUMBER_TOKENS)
        text = self._words.number(number, digits)
        text += self._words.piece(int(self._draw() * POOL_TOKENS), count - digits)
        chat = questions.picture_chat(self._model, self._picture(number), text[:-1].decode())
        body = {
            **chat,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Prepared(json.dumps(body, separators=(",", ":")).encode(), 0, output)

    def replayed(self, *_: object) -> Prepared:
        """Return the next request; a trace only sets its time."""
        return self.next()

    def _picture(self, number: int) -> bytes:
        colour = (self._first + number) % (1 << 24)
        chunks = ((b"PLTE", colour.to_bytes(3, "big")), (b"IDAT", self._image))
        return questions.png_file(self._pixels, 1, PALETTE, *chunks)


class SoundRequests:
    """
    Transcription requests, each with a tone.

    `form` has model, salt and input. Input is the length of the sound in seconds, in the form of
    `request_draws.lengths`.
    """

    def __init__(self, form: Dict[str, Any], seed: object, process: int, processes: int) -> None:
        self._first = random.Random(form["salt"]).getrandbits(48)
        self._numbers = itertools.count(process, processes)
        self._model = form["model"]
        self._second = questions.tone_samples()
        self._inputs = lengths(form["input"], "%s/input" % (seed,))
        self._judge = judge_of("transcribe", questions.Question(questions.SPEECH, b""))

    def stagger(self, count: int) -> None:
        """Do nothing: requests are independent of each other."""

    def next(self) -> Prepared:
        """Return the next request."""
        own = (self._first + next(self._numbers)).to_bytes(NUMBER_BYTES, "little")
        samples = own + (self._second * next(self._inputs))[NUMBER_BYTES:]
        # Only the server knows how many tokens a sound has.
        return Prepared(questions.speech_form(self._model, samples), 0, 0, judge=self._judge)

    def replayed(self, *_: object) -> Prepared:
        """Return the next request; a trace only sets its time."""
        return self.next()

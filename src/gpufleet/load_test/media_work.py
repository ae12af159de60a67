"""Define requests with a picture or a sound that the client generates. Pure.

A picture has one colour and a sound is a tone, because a server's computation depends only on the
size of a picture or a sound. An answer about a picture has the requested length. The transcript of
a tone has few words. So the rate of requests with tones shows the speed of the encoder, and is
higher than the rate with speech.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from gpufleet.errors import FleetError
from gpufleet.load_test.workloads import (
    Lengths,
    TokenRange,
    fixed_length,
    lognormal,
    parse_lengths,
    uniform_lengths,
)
from gpufleet.load_test.written_prompts import CHAT
from gpufleet.on_node.serving import questions
from gpufleet.settings.serving_settings import ModelKind

MOST_PIXELS: Final = 4096
MOST_SECONDS: Final = 600
"""The length of the longest sound in seconds. Its file has about 19 MB.

vLLM refuses files above 25 MB (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB).
"""
SHORT_ANSWERS: Final = (
    "the sounds are tones, whose transcripts are shorter than those of speech, so requests with "
    "speech take longer"
)


@dataclass(frozen=True)
class PictureWork:
    """Chats about a picture of one colour."""

    name: str
    input: Lengths
    """The question's length in words."""
    output: Lengths
    pixels: int
    """The width and the height in pixels."""
    reason: str
    """The reason for these sizes."""

    kind: ModelKind = "generate"
    path = CHAT

    def __post_init__(self) -> None:
        if not 1 <= self.pixels <= MOST_PIXELS:
            raise FleetError(
                f"a picture with {self.pixels} pixels a side is invalid: write 1 to "
                f"{MOST_PIXELS}, for example `--lengths 32,100,512` (words, tokens of the "
                "answer, pixels a side)"
            )

    @property
    def most_tokens(self) -> int:
        """
        Return the tokens of the largest request without its picture.

        Only the server can count the tokens of a picture.
        """
        return self.input.most + self.output.most

    @property
    def mean_tokens(self) -> float:
        """Return an answer's mean number of tokens."""
        return self.output.mean

    @property
    def mean_prompt_tokens(self) -> float:
        """Return the mean number of tokens of a prompt without its picture."""
        return self.input.mean

    def largest(self) -> PictureWork:
        """Return a workload of only this one's largest request."""
        most = fixed_length(self.input.most), fixed_length(self.output.most)
        return replace(self, input=most[0], output=most[1])

    def check_context(self, max_model_len: int) -> None:
        """
        Raise `FleetError` if a request, even without its picture, exceeds the model's context.
        """
        if self.most_tokens >= max_model_len:
            raise FleetError(
                f"workload {self.name}: the largest request has {self.most_tokens} tokens in "
                f"addition to its picture, but the model's context has {max_model_len} "
                "(`max_model_len`): write shorter --lengths"
            )

    def requests(
        self, model: str, _ids: TokenRange, salt: str
    ) -> Callable[[int, int], dict[str, Any]]:
        """Return a client's input for requests (`workloads.Workload.requests`)."""
        form = {
            "kind": "pictures",
            "model": model,
            "salt": salt,
            "pixels": self.pixels,
            "input": self.input.form(),
            "output": self.output.form(),
        }
        return lambda _process, _processes: form

    def example_answer(self) -> None:
        """Return None, because answers are streams of tokens."""

    def as_json(self) -> dict[str, Any]:
        """Return the workload's description for results."""
        return {"preset": self.name, "kind": self.kind, "words": str(self.input),
                "output": str(self.output), "pixels": self.pixels}  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.input} words about a picture of {self.pixels} x {self.pixels} "
            f"pixels, {self.output} tokens out"
        )


@dataclass(frozen=True)
class SoundWork:
    """Tones to transcribe. An answer arrives as one document."""

    name: str
    input: Lengths
    """The sound's length in seconds."""
    reason: str
    """The reason for these lengths."""

    kind: ModelKind = "transcribe"
    path = questions.SPEECH
    mean_tokens = 0.0
    """
    The mean number of tokens of an answer. It is 0, which means unknown, because the model decides.
    """
    mean_prompt_tokens = 1.0
    """A placeholder for the mean number of tokens of a sound, which only the server can count."""
    most_tokens = 0
    """The tokens of the largest request. It is 0, because the number is unknown."""

    def __post_init__(self) -> None:
        if self.input.most > MOST_SECONDS:
            raise FleetError(
                f"sounds of {self.input.most} seconds are too long: write at most {MOST_SECONDS} "
                "seconds, for example `--lengths 5-30`"
            )

    def largest(self) -> SoundWork:
        """Return a workload of only this one's largest request."""
        return replace(self, input=fixed_length(self.input.most))

    def check_context(self, max_model_len: int) -> None:
        """Do nothing, because the server splits a sound of any length into pieces."""

    def requests(
        self, model: str, _ids: TokenRange, salt: str
    ) -> Callable[[int, int], dict[str, Any]]:
        """Return a client's input for requests (`workloads.Workload.requests`)."""
        form = {"kind": "sounds", "model": model, "salt": salt, "input": self.input.form()}
        return lambda _process, _processes: form

    def example_answer(self) -> dict[str, Any]:
        """Return an example answer, to measure the client's limit."""
        return {"text": "a few words", "usage": {"type": "duration", "seconds": 30}}

    def as_json(self) -> dict[str, Any]:
        """Return the workload's description for results."""
        return {"preset": self.name, "kind": self.kind, "seconds": str(self.input)}

    def __str__(self) -> str:
        return f"{self.name}: sounds of {self.input} seconds"


PICTURES: Final = PictureWork(
    "pictures",
    uniform_lengths(16, 48),
    lognormal(100, 400, 0.86),
    512,
    "a question about one picture, and a caption or a short description as its answer",
)
RECORDINGS: Final = SoundWork(
    "recordings",
    uniform_lengths(5, 30),
    "messages and parts of calls; encoders of Whisper read pieces of 30 seconds",
)


def parse_picture_work(text: str) -> PictureWork:
    """
    Parse `WORDS,TOKENS,PIXELS`: words of a question, tokens of an answer, pixels of each side.

    >>> str(parse_picture_work("32,100,512"))
    'lengths: 32 words about a picture of 512 x 512 pixels, 100 tokens out'
    """
    words, tokens, pixels = text.split(",")
    side = int(pixels[:6]) if pixels.isascii() and pixels.isdigit() else 0
    lengths = parse_lengths(words), parse_lengths(tokens)
    return PictureWork("lengths", *lengths, side, "as it was typed")


def parse_sound_work(text: str) -> SoundWork:
    """
    Parse the lengths of sounds in seconds.

    >>> str(parse_sound_work("5-30"))
    'lengths: sounds of 5-30 seconds'
    """
    return SoundWork("lengths", parse_lengths(text), "as it was typed")

"""Tokenizes samples: each prompt has exactly the tokens that serving gives it, and the answer's tokens follow.

A sample is tokenized in segments. Some tokenizers read a text differently in the middle of another one (e.g. they add a
space before every text); for these an answer is tokenized together with its prompt. If the tokens of a later prompt do
not begin with the earlier tokens, the sample is cut there, which puts each answer after the tokens of its own prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

from spard.data.renderer import Renderer
from spard.data.samples import Sample, Segment
from spard.errors import TooManyTurns

NO_LOSS = -100


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and, for each position, its label or `NO_LOSS`.

    `is_variant` marks a safe row derived from another one (`spard.pipeline.augment`), and `twin` is the index of that
    row among the safe rows. For a preference pair this is the conversation with the preferred answer and `rejected` the
    one with the other answer.

    If the chat template rewrites earlier turns, a conversation becomes several samples, one for each answer that needs
    its own prompt: this object is the last one, and `earlier` has the others.
    """

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    is_variant: bool = False
    twin: int | None = field(default=None, compare=False)
    rejected: Encoded | None = None
    earlier: tuple[Encoded, ...] = ()

    @property
    def samples(self) -> tuple[Encoded, ...]:
        """The samples of the row, in the order of its answers."""
        return (*self.earlier, replace(self, earlier=())) if self.earlier else (self,)

    @property
    def both(self) -> tuple[Encoded, ...]:
        """The sequences of a pair: the row, then the conversation with the rejected answer."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def tokens(self) -> int:
        """The total number of tokens of all samples, or of both conversations of a pair."""
        return sum(len(row.ids) for row in (*self.earlier, *self.both))

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sample or conversation."""
        return max(len(row.ids) for row in (*self.earlier, *self.both))

    @property
    def is_learned(self) -> bool:
        """True if every sample, or each answer of a pair, has a token with a loss."""
        return all(any(label != NO_LOSS for label in row.labels) for row in (*self.earlier, *self.both))


_MOST_CHARS = 16_000_000  # limit if each answer is tokenized with its whole context
_MOST_SEGMENTS = 32  # limit for tokenizing prefix by prefix, which takes quadratic time


def in_tokens(renderer: Renderer, samples: Sequence[Sample]) -> Iterator[list[Encoded]]:
    """Yield each sample, encoded with labels, as one or more rows; all samples are tokenized in two calls."""
    ids = iter(renderer.token_ids([segment.text for sample in samples for segment in sample]))
    in_parts = [[next(ids) for _ in sample] for sample in samples]
    # A sample of one answer needs no comparison if the tokenizer reads an answer alone as after its prompt.
    compared = [not renderer.reads_apart or _answers(sample) > 1 for sample in samples]
    texts = [_text(sample) for sample, is_compared in zip(samples, compared, strict=True) if is_compared]
    wholes = iter(renderer.token_ids(texts))
    for sample, parts, is_compared in zip(samples, in_parts, compared, strict=True):
        whole = next(wholes) if is_compared else None
        if whole is None or whole == list(chain.from_iterable(parts)):
            yield [_label(sample, parts)]
        elif (found := _by_prefixes(renderer, sample, whole)) is not None:
            yield [found]
        elif _answers(sample) == 1:
            yield [_label(sample, parts)]
        else:
            yield [encoded for each in in_tokens(renderer, _cut_apart(sample)) for encoded in each]


def _by_prefixes(renderer: Renderer, sample: Sample, whole: list[int]) -> Encoded | None:
    """Label a sample's tokens by tokenizing each prefix; None unless every prefix is a prefix in tokens too."""
    if len(sample) > _MOST_SEGMENTS:
        return None
    texts = list(accumulate(segment.text for segment in sample))
    prefixes = renderer.token_ids(texts[:-1])
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        return None
    ends = [0, *map(len, prefixes), len(whole)]
    return _label(sample, [whole[start:end] for start, end in pairwise(ends)])


def _label(sample: Sample, parts: Sequence[Sequence[int]]) -> Encoded:
    """Join the tokens of a sample's segments; tokens of learned segments are their own labels."""
    labels = [
        part if segment.is_learned else [NO_LOSS] * len(part) for segment, part in zip(sample, parts, strict=True)
    ]
    return Encoded(tuple(chain.from_iterable(parts)), tuple(chain.from_iterable(labels)))


def _cut_apart(sample: Sample) -> list[Sample]:
    """Cut a sample into one per answer, each behind its own prompt, with earlier answers masked.

    Raises `TooManyTurns` if that makes too much text: the length grows with the square of the turns.
    """
    places = [i for i, segment in enumerate(sample) if segment.is_learned]
    ends = list(accumulate(len(segment.text) for segment in sample))
    if (chars := sum(ends[i] for i in places)) > _MOST_CHARS:
        raise TooManyTurns(
            f"has {len(places)} answers that the model's tokenizer reads only behind all that stands before them, "
            f"{chars} characters together; cut the row in parts"
        )
    return [(Segment(_text(sample[:i]), False), sample[i]) for i in places]


def _answers(sample: Sample) -> int:
    return sum(segment.is_learned for segment in sample)


def _text(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)

"""Samples in tokens: the tokens of each prompt are those that serving gives it, and answers go on from there.

A sample is tokenized in segments. For tokenizers that read a text otherwise in the middle of another one (with a space
that they put before every text, say), an answer is read behind its prompt. Where the tokens of a later prompt are not
those that came before, together with what the earlier answers have added, the sample is cut there: each answer then has
the tokens of its own prompt before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

from spard.data.encoded import NO_LOSS, Encoded
from spard.data.renderer import Renderer
from spard.data.samples import Sample, Segment
from spard.errors import TooManyTurns

_MOST_CHARS = 16_000_000  # of a sample whose answers are each read with all before them
_MOST_SEGMENTS = 32  # of a sample that is read prefix by prefix, in time that grows with their square


def in_tokens(renderer: Renderer, samples: Sequence[Sample]) -> Iterator[list[Encoded]]:
    """Yield each sample in tokens with its labels, or what it was cut into; all are tokenized in two calls."""
    ids = iter(renderer.token_ids([segment.text for sample in samples for segment in sample]))
    in_parts = [[next(ids) for _ in sample] for sample in samples]
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
    """Label a sample's own tokens by how many the text up to each end of a segment has; None unless all begin alike."""
    if len(sample) > _MOST_SEGMENTS:
        return None
    texts = list(accumulate(segment.text for segment in sample))
    prefixes = renderer.token_ids(texts[:-1])
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        return None
    ends = [0, *map(len, prefixes), len(whole)]
    return _label(sample, [whole[start:end] for start, end in pairwise(ends)])


def _label(sample: Sample, parts: Sequence[Sequence[int]]) -> Encoded:
    """Join the tokens of a sample's segments; those of learned ones are their own labels."""
    labels = [
        part if segment.is_learned else [NO_LOSS] * len(part) for segment, part in zip(sample, parts, strict=True)
    ]
    return Encoded(tuple(chain.from_iterable(parts)), tuple(chain.from_iterable(labels)))


def _cut_apart(sample: Sample) -> list[Sample]:
    """Cut a sample so that each answer stands behind its own prompt, the earlier answers without loss.

    Raise `TooManyTurns` for one of which that makes too much text: it grows with the square of the turns.
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

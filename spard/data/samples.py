"""Splits a conversation into training samples, and tokenizes them as serving does.

Each learned answer follows exactly the prompt that serving gives it. If the template only appends, a conversation is
one sample with loss on its answers. If the template rewrites earlier text (drops reasoning, merges turns, adds an end
token to the last answer only), an answer begins a sample of its own. The rendered texts decide between the two cases:
in the first one, a later prompt begins with the earlier prompt and answer.

A sample is tokenized in segments: each prompt has exactly the tokens that serving gives it, and the answer's tokens
follow. Some tokenizers read a text differently in the middle of another one (e.g. they add a space before every text);
for these an answer is tokenized together with its prompt. If the tokens of a later prompt do not begin with the earlier
tokens, the sample is cut there, which puts each answer after the tokens of its own prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from spard.data.renderer import Renderer, Turn
from spard.data.rows import Message, is_learned
from spard.errors import ExampleTooLong, TooManyTurns

_LONG = 8  # learned answers: above, two renderings of the whole and a few comparisons are used
_MOST_RENDERED_CHARS = 40_000_000  # of one row, which may be rendered once per answer: seconds
_MOST_SAMPLED_CHARS = 4_000_000  # of all samples of one row, which are tokenized and trained


class Segment(NamedTuple):
    """A part of a sample, as marked text; the loss covers all of it or none."""

    text: str
    is_learned: bool


Sample = tuple[Segment, ...]


def samples(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message] = (), limit: int | None = None
) -> list[Sample]:
    """Return the samples of a conversation, in order; one sample without loss if no answer is learned.

    Raises one of `REFUSED` or `TemplateFault` if the template rejects the conversation. If many answers must be
    rendered one by one, raises `TooManyTurns` before that takes minutes, and `ExampleTooLong` for a row above `limit`
    tokens.
    """
    places = [i for i, message in enumerate(messages) if teaches(message)]
    if not places:
        return [(Segment(renderer.render(messages, tools, generation=False), False),)]
    sample = _append_only_sample(renderer, messages, tools, places) if len(places) > _LONG else None
    if sample:
        return [sample]
    found = _join_turns(_render_each(renderer, messages, tools, places, limit))
    chars = sum(len(segment.text) for sample in found for segment in sample)
    if len(found) > 1 and len(places) > _LONG and chars > _MOST_SAMPLED_CHARS:
        raise TooManyTurns(
            f"has {len(places)} answers, and the model's chat template rewrites earlier turns, so that each is trained "
            f"behind all that stands before it, {chars} characters together; cut the row in parts"
        )
    return found


def teaches(message: Message) -> bool:
    """Return True if a turn is a learned answer with content: an end token alone teaches nothing."""
    says = message.get("tool_calls") or message.get("reasoning_content") or str(message.get("content") or "").strip()
    return bool(is_learned(message) and says)


def _render_each(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Message],
    places: Sequence[int],
    limit: int | None,
) -> list[Turn]:
    """Render each learned answer with everything before it; the time grows with the square of the turns."""
    is_costly = len(places) > _LONG
    if is_costly:
        _require_few(len(places), sum(map(_count_chars, messages[: places[-1] + 1])))
    last = renderer.turn(messages[: places[-1] + 1], tools)
    if is_costly:
        _require_few(len(places), len(last.prompt))
        _require_short(renderer, last, limit)
    return [*(renderer.turn(messages[: i + 1], tools) for i in places[:-1]), last]


def _require_few(answers: int, chars: int) -> None:
    """Raise `TooManyTurns` if rendering each answer with its context takes too long."""
    if answers * chars > _MOST_RENDERED_CHARS:
        raise TooManyTurns(
            f"has {answers} answers in {chars} characters, and each has to be rendered with all that stands before it, "
            "because the model's chat template rewrites earlier turns or the answers have calls or reasoning; cut the "
            "row in parts"
        )


def _require_short(renderer: Renderer, last: Turn, limit: int | None) -> None:
    """Raise `ExampleTooLong` if the last answer with its context exceeds the token limit."""
    if limit is not None and len(last.prompt) + len(last.text) > limit:
        (tokens,) = renderer.token_ids([last.prompt + last.text])
        if len(tokens) > limit:
            raise ExampleTooLong(f"has {len(tokens)} tokens; the limit is {limit}")


def _count_chars(message: Message) -> int:
    """Return the number of characters of a message's text, without its calls."""
    return sum(len(str(message.get(part) or "")) for part in ("content", "reasoning_content"))


def _join_turns(turns: Sequence[Turn]) -> list[Sample]:
    """Join answers into one sample as long as the next prompt begins with the sample so far."""
    found = list[Sample]()
    parts, so_far = list[Segment](), ""
    for turn in turns:
        if not parts or not turn.prompt.startswith(so_far):
            if parts:
                found.append(tuple(parts))
            parts, so_far = [], ""
        parts += [Segment(turn.prompt[len(so_far) :], False), Segment(turn.text, True)]
        so_far = turn.prompt + turn.text
    rest = [Segment(turns[-1].rest, False)] if turns[-1].rest else []
    return [*found, (*parts, *rest)]


def _append_only_sample(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message], places: Sequence[int]
) -> Sample | None:
    """Return the sample of a long conversation whose template only appends, in linear time; None if that fails.

    A second rendering has a unique name in place of each learned answer; the text between the names is what the
    template writes around the answers. Some turns (the 1st, 2nd, 4th, 8th, ... and the last) are also rendered alone
    and compared. Returns None if an answer is not plain text or a comparison fails.
    """
    answers = [messages[i] for i in places]
    if any(each.get("tool_calls") or each.get("reasoning_content") or not each["content"] for each in answers):
        return None
    upto, mode = messages[: places[-1] + 1], renderer.answer_mode(answers[0])
    names = {i: f"stand_in_{number:06d}_of_an_answer" for number, i in enumerate(places)}
    named = [turn | {"content": names[i]} if i in names else turn for i, turn in enumerate(upto)]
    whole = renderer.render(upto, tools, generation=False, mode=mode)
    between = _split(renderer.render(named, tools, generation=False, mode=mode), list(names.values()))
    first = renderer.turn(messages[: places[0] + 1], tools)
    if between is None or not between[0].startswith(first.prompt):
        return None
    spans = _spans(renderer, whole, between, [each["content"] for each in answers], between[0][len(first.prompt) :])
    if spans is None:
        return None
    # Comparing every answer takes quadratic time, so only a few are compared.
    for number in {2**power - 1 for power in range(len(spans).bit_length())} | {len(spans) - 1}:
        turn, (start, end) = renderer.turn(messages[: places[number] + 1], tools), spans[number]
        if whole[:end] != turn.prompt + turn.text or len(turn.prompt) != start:
            return None
    parts, at = list[Segment](), 0
    for start, end in spans:
        parts += [Segment(whole[at:start], False), Segment(whole[start:end], True)]
        at = end
    return (*parts, Segment(whole[at:], False)) if whole[at:] else tuple(parts)


def _spans(
    renderer: Renderer, whole: str, between: Sequence[str], answers: Sequence[str], opening: str
) -> list[tuple[int, int]] | None:
    """Return the (start, end) of each answer in the whole text, including the opening that the model writes itself."""
    found, at = list[tuple[int, int]](), 0
    for number, answer in enumerate(answers):
        before, behind = between[number], between[number + 1]
        begin = at + len(before)
        text = _find_words(whole, begin, answer, behind)
        end = renderer.first_end(behind)
        if text is None or end is None or not whole.startswith(before, at) or not before.endswith(opening):
            return None
        at = begin + len(text)
        found.append((begin - len(opening), at + end))
    return found


def _split(text: str, names: Sequence[str]) -> list[str] | None:
    """Return the text before, between and after the names; None unless each occurs in order."""
    found, at = list[str](), 0
    for name in names:
        place = text.find(name, at)
        if place < 0:
            return None
        found.append(text[at:place])
        at = place + len(name)
    return [*found, text[at:]]


def _find_words(whole: str, begin: int, content: str, behind: str) -> str | None:
    """Return the answer as the template has written it, unchanged or stripped; None if neither fits."""
    for text in (content, content.strip(), content.rstrip(), content.lstrip()):
        if whole.startswith(text, begin) and whole.startswith(behind, begin + len(text)):
            return text
    return None


NO_LOSS = -100


@dataclass(frozen=True, slots=True)
class EncodedSample:
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
    rejected: EncodedSample | None = None
    earlier: tuple[EncodedSample, ...] = ()

    @property
    def samples(self) -> tuple[EncodedSample, ...]:
        """The samples of the row, in the order of its answers."""
        return (*self.earlier, replace(self, earlier=())) if self.earlier else (self,)

    @property
    def both(self) -> tuple[EncodedSample, ...]:
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


_MOST_TOKENIZED_CHARS = 16_000_000  # limit if each answer is tokenized with its whole context
_MOST_SEGMENTS = 32  # limit for tokenizing prefix by prefix, which takes quadratic time


def in_tokens(renderer: Renderer, samples: Sequence[Sample]) -> Iterator[list[EncodedSample]]:
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


def _by_prefixes(renderer: Renderer, sample: Sample, whole: list[int]) -> EncodedSample | None:
    """Label a sample's tokens by tokenizing each prefix; None unless every prefix is a prefix in tokens too."""
    if len(sample) > _MOST_SEGMENTS:
        return None
    texts = list(accumulate(segment.text for segment in sample))
    prefixes = renderer.token_ids(texts[:-1])
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        return None
    ends = [0, *map(len, prefixes), len(whole)]
    return _label(sample, [whole[start:end] for start, end in pairwise(ends)])


def _label(sample: Sample, parts: Sequence[Sequence[int]]) -> EncodedSample:
    """Join the tokens of a sample's segments; tokens of learned segments are their own labels."""
    labels = [
        part if segment.is_learned else [NO_LOSS] * len(part) for segment, part in zip(sample, parts, strict=True)
    ]
    return EncodedSample(tuple(chain.from_iterable(parts)), tuple(chain.from_iterable(labels)))


def _cut_apart(sample: Sample) -> list[Sample]:
    """Cut a sample into one per answer, each behind its own prompt, with earlier answers masked.

    Raises `TooManyTurns` if that makes too much text: the length grows with the square of the turns.
    """
    places = [i for i, segment in enumerate(sample) if segment.is_learned]
    ends = list(accumulate(len(segment.text) for segment in sample))
    if (chars := sum(ends[i] for i in places)) > _MOST_TOKENIZED_CHARS:
        raise TooManyTurns(
            f"has {len(places)} answers that the model's tokenizer reads only behind all that stands before them, "
            f"{chars} characters together; cut the row in parts"
        )
    return [(Segment(_text(sample[:i]), False), sample[i]) for i in places]


def _answers(sample: Sample) -> int:
    return sum(segment.is_learned for segment in sample)


def _text(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)

"""A conversation as what is trained: each learned answer stands behind exactly what serving puts before it.

Where a template only appends, a conversation is one sample: its answers have loss, all else has none. Where it rewrites
what was said before (drops reasoning, merges turns, adds an end token to the last answer alone), an answer begins a
sample of its own. Which of the two it is shows in the texts: the prompt of a later answer begins with the earlier
prompt and answer, or it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spard.data.renderer import Renderer, Turn
from spard.data.rows import Message, is_learned
from spard.errors import ExampleTooLong, TooManyTurns

_LONG = 8  # learned answers: more are found in two renderings of the whole, and some of them rendered to compare
_MOST_CHARS = 4_000_000  # to render for one row: a conversation of many turns is rendered anew for each


class Segment(NamedTuple):
    """A part of a sample, as marked text; loss falls on all of it, or on nothing."""

    text: str
    is_learned: bool


Sample = tuple[Segment, ...]


def samples(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message] = (), limit: int | None = None
) -> list[Sample]:
    """Return the samples of a conversation, in its order; one without loss where no answer is learned.

    Raise one of `REFUSED` or `TemplateFault` where the template does not take it. Where many answers are rendered one
    by one, raise `TooManyTurns` before that costs minutes, and `ExampleTooLong` for a row above `limit` tokens.
    """
    places = [i for i, message in enumerate(messages) if teaches(message)]
    if not places:
        return [(Segment(renderer.render(messages, tools, generation=False), False),)]
    sample = _append_only_sample(renderer, messages, tools, places) if len(places) > _LONG else None
    return [sample] if sample else _join_turns(_render_each(renderer, messages, tools, places, limit))


def teaches(message: Message) -> bool:
    """Tell whether a turn is an answer that is learned and says something: its end alone teaches nothing."""
    says = message.get("tool_calls") or message.get("reasoning_content") or str(message.get("content") or "").strip()
    return bool(is_learned(message) and says)


def _render_each(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Message],
    places: Sequence[int],
    limit: int | None,
) -> list[Turn]:
    """Render each learned answer with all that stands before it; the time grows with the square of the turns."""
    is_costly = len(places) > _LONG
    if is_costly:
        _require_few(len(places), sum(map(_count_chars, messages[: places[-1] + 1])))
    last = renderer.turn(messages[: places[-1] + 1], tools)
    if is_costly:
        _require_few(len(places), len(last.prompt))
        _require_short(renderer, last, limit)
    return [*(renderer.turn(messages[: i + 1], tools) for i in places[:-1]), last]


def _require_few(answers: int, chars: int) -> None:
    """Raise `TooManyTurns` where so many answers, each with what stands before it, are too much to render."""
    if answers * chars > _MOST_CHARS:
        raise TooManyTurns(
            f"has {answers} answers in {chars} characters: the model's chat template rewrites earlier turns, so that "
            "each answer has to be rendered with all that stands before it; cut the row in parts"
        )


def _require_short(renderer: Renderer, last: Turn, limit: int | None) -> None:
    """Raise `ExampleTooLong` where the last answer, with all before it, has more tokens than the limit."""
    if limit is not None and len(last.prompt) + len(last.text) > limit:
        (tokens,) = renderer.token_ids([last.prompt + last.text])
        if len(tokens) > limit:
            raise ExampleTooLong(f"has {len(tokens)} tokens; the limit is {limit}")


def _count_chars(message: Message) -> int:
    """Count the characters of a message's text, without those of its calls."""
    return sum(len(str(message.get(part) or "")) for part in ("content", "reasoning_content"))


def _join_turns(turns: Sequence[Turn]) -> list[Sample]:
    """Join answers to one sample as long as the prompt of the next begins with the sample so far."""
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
    """Return a long conversation whose template only appends, in time that grows with its length.

    A second rendering has a name of ours in place of each learned answer: between the names stands what the template
    writes around it. Some turns are rendered by themselves and compared: the 1st, 2nd, 4th, 8th, ... and the last. None
    where the answers are not plain text, or one comparison fails.
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
    """Return where in the whole text each answer begins, with what the model writes before its words, and ends."""
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
    """Return what stands before, between and behind the names; None unless each is there once and in order."""
    found, at = list[str](), 0
    for name in names:
        place = text.find(name, at)
        if place < 0:
            return None
        found.append(text[at:place])
        at = place + len(name)
    return [*found, text[at:]]


def _find_words(whole: str, begin: int, content: str, behind: str) -> str | None:
    """Return how the template has written an answer: as it stands, or without the space around it."""
    for text in (content, content.strip(), content.rstrip(), content.lstrip()):
        if whole.startswith(text, begin) and whole.startswith(behind, begin + len(text)):
            return text
    return None

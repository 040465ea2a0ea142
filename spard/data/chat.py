"""Conversations become tokens here: the chat template and the loss mask. Only this file knows chat templates.

It needs no torch, so that a service can show what will be trained. A template is rendered once and tokenized without
further special tokens, so that no model sees two beginnings; models with a thinking mode are trained and measured with
it off. Loss falls on what the assistant says, its end-of-turn token included, and on nothing else. A row of which the
template leaves a tool, a call or an answer out is refused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError

from spard.data.control_tokens import MARK, Shield, pieces
from spard.data.control_tokens import end_tokens as end_tokens
from spard.data.encoded import NO_LOSS as NO_LOSS
from spard.data.encoded import Encoded as Encoded
from spard.data.rows import Example, Message, is_learned, with_rejected
from spard.data.tools import PROBES, has_tools, stand_ins
from spard.errors import ExampleTooLong, InvalidData, MethodMismatch, NoTrainableTokens, ToolsNotRendered

_REFUSED = (TemplateError, TypeError)  # by the template itself, or by what it does with a value
UNBOUNDED = 2**31  # tokens: the limit of rows that may have any length
DATE = "26 Jul 2024"  # some templates write today's date: the same row would train differently tomorrow

# For tokenizers that bring no template: headed paragraphs, an end-of-text token after each answer.
PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message] = (), prefill: str = ""
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to speak, or goes on from `prefill`."""
    shield = Shield(tokenizer)
    text = _render(tokenizer, shield.everywhere(messages), shield.everywhere(tools), generation=True)
    text += shield.marked(prefill)
    rows: list[list[int]] = tokenizer(text.split(MARK), add_special_tokens=False)["input_ids"]
    return list(chain.from_iterable(rows))


def render_question(
    tokenizer: Any,
    prompt: str,
    system: str | None = None,
    context: Sequence[Message] = (),
    tools: Sequence[Message] = (),
    prefill: str = "",
    after: Sequence[Message] = (),
) -> list[int]:
    """One question between turns, under a system prompt if there is one; the answer begins as said."""
    turns = [*context, {"role": "user", "content": prompt}, *after]
    return render_conversation(tokenizer, turns, system, tools, prefill)


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    system: str | None = None,
    tools: Sequence[Message] = (),
    prefill: str = "",
) -> list[int]:
    """Token ids of a conversation under a system prompt that is not the conversation's own, if there is one.

    Where the template has no such role, or the conversation brings a system prompt, it stands before what comes first.
    """
    if system is None:
        return render_prompt(tokenizer, messages, tools, prefill)
    first, *others = messages
    turns = [{"role": "system", "content": system}, first, *others]
    try:
        knows_role = first["role"] != "system" and system.strip() in _render(tokenizer, turns, (), generation=True)
    except _REFUSED:
        knows_role = False
    merged = first | {"content": f"{system}\n\n{first['content']}"}
    return render_prompt(tokenizer, turns if knows_role else [merged, *others], tools, prefill)


def encode(tokenizer: Any, example: Example, max_seq_length: int) -> Encoded:
    """One example as tokens and labels."""
    return encode_all(tokenizer, [example], max_seq_length)[0]


def encode_all(tokenizer: Any, examples: Sequence[Example], max_seq_length: int) -> list[Encoded]:
    """Examples as tokens and labels, tokenized in one call; of preference pairs both conversations."""
    pairs = [i for i, example in enumerate(examples) if example.rejected is not None]
    others = _encode_all(tokenizer, [with_rejected(examples[i]) for i in pairs], max_seq_length)
    found = _encode_all(tokenizer, examples, max_seq_length)
    for i, other in zip(pairs, others, strict=True):
        found[i] = replace(found[i], rejected=other)
    return found


def encode_to_train(tokenizer: Any, examples: Sequence[Example], limit: int, *, pairs: bool = False) -> list[Encoded]:
    """Examples to learn from: each of them fits, and has a token that loss falls on.

    `pairs` says whether they are to be preference pairs; `MethodMismatch` for one that is of the other kind.
    """
    found, method = ("no preference pair", "dpo") if pairs else ("a preference pair", "supervised")
    if other := [each.line for each in examples if (each.rejected is None) is pairs]:
        raise MethodMismatch(f"line {other[0]} is {found}, and the method {method} does not train on that")
    encoded = encode_all(tokenizer, examples, limit)
    empty = [each.line for each, row in zip(examples, encoded, strict=True) if not row.is_learned]
    if empty:
        more = f", as in {len(empty) - 1} more" if empty[1:] else ""
        raise NoTrainableTokens(f"line {empty[0]} has no token to learn as the model's chat template renders it{more}")
    return encoded


def tool_support(tokenizer: Any) -> dict[str, bool]:
    """Tell for each part of `PROBES` whether the chat template renders it."""
    return {part: _is_rendered(tokenizer, row) for part, row in PROBES.items()}


def set_plain_template(tokenizer: Any) -> None:
    """Give a tokenizer without a chat template the plain one, and one without padding its end token."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def _render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message], *, generation: bool) -> str:
    plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    text: str = tokenizer.apply_chat_template(
        plain,
        tools=list(tools) or None,
        tokenize=False,
        add_generation_prompt=generation,
        enable_thinking=False,
        date_string=DATE,
    )
    return text


def _encode_all(tokenizer: Any, examples: Sequence[Example], max_seq_length: int) -> list[Encoded]:
    if not examples:
        return []
    shield, enders = Shield(tokenizer), end_tokens(tokenizer)
    texts, spans = zip(*(_draw(tokenizer, _shielded(shield, example)) for example in examples), strict=True)
    found = list(pieces(tokenizer, texts))
    _check_lengths(examples, [ids for ids, _ in found], max_seq_length)
    return [
        _encoded(text, ids, offsets, span, enders)
        for text, (ids, offsets), span in zip(texts, found, spans, strict=True)
    ]


def _shielded(shield: Shield, example: Example) -> Example:
    try:
        messages, tools = shield.everywhere(example.messages), shield.everywhere(example.tools)
    except InvalidData as error:
        raise InvalidData(f"line {example.line}: {error.message}") from error
    return Example(tuple(messages), example.line, tuple(tools))


def _draw(tokenizer: Any, example: Example) -> tuple[str, list[tuple[int, int]]]:
    """Render the conversation, and return the text with the spans in which the assistant speaks.

    Templates may rewrite earlier turns once later ones follow, hence the common prefix instead of the length.
    """
    if is_learned(example.messages[0]):
        raise InvalidData(f"line {example.line} begins with the assistant; give that turn weight 0 or one before it")
    try:
        text = _render(tokenizer, example.messages, example.tools, generation=False)
        _check_tools(tokenizer, example)
        spans = []
        for i, message in enumerate(example.messages):
            if is_learned(message):
                before = _render(tokenizer, example.messages[:i], example.tools, generation=True)
                upto = example.messages[: i + 1]
                is_last = len(upto) == len(example.messages)
                after = text if is_last else _render(tokenizer, upto, example.tools, generation=False)
                start, stop = _shared(before, text), _shared(after, text)
                spans.append((start, stop if stop > start else len(text)))
    except _REFUSED as error:
        why = str(error).replace(MARK, "")
        raise InvalidData(f"line {example.line}: the model's chat template refuses it: {why}") from error
    return text, spans


def _is_rendered(tokenizer: Any, example: Example) -> bool:
    try:
        return not _left_out(tokenizer, example)
    except _REFUSED:
        return False


def _check_tools(tokenizer: Any, example: Example) -> None:
    """Raise `ToolsNotRendered` if the template leaves a tool, a call or an answer out."""
    if missing := _left_out(tokenizer, example):
        message = f"line {example.line}: the model's chat template leaves out {missing[0]}"
        raise ToolsNotRendered(message, missing[0])


def _left_out(tokenizer: Any, example: Example) -> list[str]:
    """Return what of a row's tools, calls and answers is not in its text, as JSON pointers."""
    if not has_tools(example):
        return []
    other, names = stand_ins(example)
    text = _render(tokenizer, other.messages, other.tools, generation=False)
    return [at for name, at in names.items() if name not in text]


def _shared(a: str, b: str) -> int:
    """How many characters two texts have in common from the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return len(a) if b.startswith(a) else next((i for i, (x, y) in pairs if x != y), len(b))


def _check_lengths(examples: Sequence[Example], ids: Sequence[Sequence[int]], limit: int) -> None:
    """Rows are never cut in silence."""
    long = [(example.line, len(row)) for example, row in zip(examples, ids, strict=True) if len(row) > limit]
    if long:
        (line, length), more = long[0], f"; {len(long) - 1} more are over it" if long[1:] else ""
        raise ExampleTooLong(f"line {line} has {length} tokens; the limit is {limit}{more}")


def _encoded(
    text: str,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
    enders: frozenset[int],
) -> Encoded:
    """Label what the assistant says; a turn of which the template leaves no more than its end teaches nothing."""
    labels = [NO_LOSS] * len(ids)
    for span in spans:
        turn = _within(offsets, *span)
        end = next((i + 1 for i in turn if ids[i] in enders), turn.stop)
        if any(ids[i] not in enders and text[slice(*offsets[i])].strip() for i in range(turn.start, end)):
            labels[turn.start : end] = ids[turn.start : end]
    return Encoded(tuple(ids), tuple(labels))


def _within(offsets: Sequence[tuple[int, int]], start: int, stop: int) -> range:
    """Return which tokens lie in a span of the text, and do not end where it begins.

    Tokens stand in the order of the text, by where they begin and by where they end.
    """
    first = max(bisect_left(offsets, start, key=itemgetter(0)), bisect_right(offsets, start, key=itemgetter(1)))
    return range(first, max(first, bisect_right(offsets, stop, key=itemgetter(1))))

"""Encodes conversations: prompts as they are served, and rows as they are trained, with the loss mask.

Needs no torch, so the service can preview training rows. Texts come from `spard.data.renderer`, the only renderer of
chat templates, and are tokenized without adding special tokens, which prevents a second beginning-of-text token. The
loss covers exactly the tokens that the assistant must write, including its end token.

A row of which the template drops something is rejected, because training could not see it. Templates write calls,
tools, reasoning and names in their own formats, and some drop some of them. To find out, `unrendered_parts` replaces
each part by a unique name, renders the row like the original, and searches the result for each name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from spard.data.chat_template import DATE_TEXT, arguments_read, sources
from spard.data.chat_template import PLAIN_TEMPLATE as PLAIN_TEMPLATE
from spard.data.control_tokens import MARK, Shield, end_tokens
from spard.data.renderer import REFUSED, Renderer
from spard.data.rendering import DATE_ARGUMENT, Mode, Rendering, fixed_arguments, template_digest
from spard.data.rows import Example, Message, is_learned, with_rejected
from spard.data.samples import NO_LOSS as NO_LOSS
from spard.data.samples import EncodedSample as EncodedSample
from spard.data.samples import Sample, in_tokens, samples, teaches
from spard.data.tools import PROBES
from spard.errors import (
    ContentNotRendered,
    ExampleTooLong,
    InvalidData,
    MethodMismatch,
    NoTrainableTokens,
    TemplateFault,
    ToolsNotRendered,
    TooManyTurns,
)

# Determines, when a base model is added, how to render its chat template: by trying it and comparing the results.

_ASK = [{"role": "user", "content": "stand_in_of_a_question"}]
_SWITCH = re.compile(r"think|reason")
THINKING_SWITCHES = ("enable_thinking", "thinking")  # the usual names of the switch
_DATES = {DATE_ARGUMENT: DATE_TEXT}


def find_rendering(tokenizer: Any, fixed: Mapping[str, object] | None = None) -> Rendering:
    """Return the rendering record of a tokenizer's conversations.

    `fixed` are arguments of every rendering (`spard.data.template_arguments`), by default those that
    `fix_template_arguments` has set. `tokenizer.stated_ends` are the ids that end a reply by the model's generation
    config; without them every special token counts as an end. Raises `TemplateFault` for an invalid template or one
    that cannot render a question.
    """
    stated: Iterable[int] | None = getattr(tokenizer, "stated_ends", None)
    texts = sources(tokenizer.chat_template)
    fixed = getattr(tokenizer, _ARGUMENTS, {}) if fixed is None else fixed
    try:
        read = frozenset[str]().union(*(arguments_read(text) for text in texts.values()))
        stops = end_tokens(tokenizer) if stated is None else {*stated, tokenizer.eos_token_id} - {None}
        arguments = {name: value for name, value in _DATES.items() if name in read} | dict(fixed)
        plain: dict[Mode, dict[str, object]] = {"plain": {}}
        found = Rendering(template_digest(texts), arguments, plain, "plain", tuple(sorted(stops)), "plain")
        Renderer(tokenizer, found, tokenizer.chat_template).render(_ASK, generation=True)
        modes, default = _modes(tokenizer, found, read - fixed.keys())
    except REFUSED as error:
        raise TemplateFault(f"cannot write a question: {error}") from error
    found = replace(found, modes=modes, default=default)
    found = replace(found, asked=found.answering)
    return replace(found, closing=None if _ends(tokenizer, found) else tokenizer.eos_token)


def _modes(tokenizer: Any, found: Rendering, read: frozenset[str]) -> tuple[dict[Mode, dict[str, object]], Mode]:
    """Find the argument that switches thinking on and off, by its effect on the generation prompt."""

    def prompt(**arguments: Any) -> str:
        tried = replace(found, modes={"plain": arguments})
        return Renderer(tokenizer, tried, tokenizer.chat_template).render(_ASK, generation=True)

    # The usual names first, because a template may read several names that contain "think".
    names = sorted(
        (name for name in read if _SWITCH.search(name)), key=lambda name: (name not in THINKING_SWITCHES, name)
    )
    for name in names:
        try:
            off, on = prompt(**{name: False}), prompt(**{name: True})
        except REFUSED:  # an argument that takes words, such as an effort
            continue
        if off != on:
            return {"off": {name: False}, "on": {name: True}}, "off" if prompt() == off else "on"
    return {"plain": {}}, "plain"


def _ends(tokenizer: Any, found: Rendering) -> bool:
    """Return True if the template itself ends an answer with a token at which engines stop."""
    renderer = Renderer(tokenizer, found, tokenizer.chat_template)
    answer = {"role": "assistant", "content": "stand_in_of_an_answer"}
    try:
        text = renderer.render([*_ASK, answer], generation=False)
    except REFUSED:  # a model that is never trained, such as a judge
        return True
    _, _, behind = text.partition(answer["content"])
    return any(stop in behind for stop in renderer.stop_texts)


UNBOUNDED = 2**31  # tokens: no limit
_RENDERER = "spard_renderer"  # the attribute of a tokenizer that holds its renderer
_ARGUMENTS = "spard_template_arguments"  # the attribute that holds the arguments which the provider has fixed


def get_renderer(tokenizer: Any) -> Renderer:
    """Return the renderer of a tokenizer: the one set by `fix_rendering`, else a new one determined by trying.

    If the chat template has changed since, a new renderer is made. Raises `TemplateFault` for an unusable template.
    """
    found: Renderer | None = getattr(tokenizer, _RENDERER, None)
    if found is None or found.tokenizer is not tokenizer or found.template != tokenizer.chat_template:
        found = fix_rendering(tokenizer, find_rendering(tokenizer))
    return found


def fix_rendering(tokenizer: Any, rendering: Rendering) -> Renderer:
    """Set the record by which a tokenizer's conversations are rendered, until its chat template changes."""
    renderer = Renderer(tokenizer, rendering, tokenizer.chat_template)
    setattr(tokenizer, _RENDERER, renderer)
    return renderer


def fix_template_arguments(tokenizer: Any, arguments: Mapping[str, object]) -> None:
    """Fix arguments for every rendering of a tokenizer's conversations, in place of those that were fixed before.

    They are not checked here (`spard.data.template_arguments`). The mode of requests that name none becomes the
    template's, unless nothing changes.
    """
    if getattr(tokenizer, _ARGUMENTS, {}) == dict(arguments):
        return
    setattr(tokenizer, _ARGUMENTS, dict(arguments))
    setattr(tokenizer, _RENDERER, None)


def render_as_recorded(tokenizer: Any, record: Mapping[str, Any] | None) -> None:
    """Render as the `rendering` in a model's manifest says: with its fixed arguments, and its mode by default."""
    if fixed := fixed_arguments(record):
        fix_template_arguments(tokenizer, fixed)
    ask_in_mode(tokenizer, (record or {}).get("asked"))


def ask_in_mode(tokenizer: Any, mode: Mode | None) -> None:
    """Set the thinking mode of future requests; None or an unknown mode changes nothing."""
    if mode is None:
        return
    rendering = get_renderer(tokenizer).rendering
    if mode in rendering.modes and mode != rendering.asked:
        fix_rendering(tokenizer, replace(rendering, asked=mode))


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    prefill: str = "",
    mode: Mode | None = None,
) -> list[int]:
    """Return the token ids of a conversation up to the start of the assistant's turn, plus `prefill`."""
    renderer, shield = get_renderer(tokenizer), Shield(tokenizer)
    text = renderer.render(shield.everywhere(messages), shield.everywhere(tools), generation=True, mode=mode)
    return renderer.token_ids([text + shield.mark(prefill)])[0]


def render_question(
    tokenizer: Any,
    prompt: str,
    system: str | None = None,
    context: Sequence[Message] = (),
    tools: Sequence[Message] = (),
    prefill: str = "",
    after: Sequence[Message] = (),
    mode: Mode | None = None,
) -> list[int]:
    """Return the token ids of one question between other turns, with an optional system prompt and prefill.

    `context` are the turns before the question, and `after` the turns behind it.
    """
    turns = [*context, {"role": "user", "content": prompt}, *after]
    return render_conversation(tokenizer, turns, system, tools, prefill, mode)


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    system: str | None = None,
    tools: Sequence[Message] = (),
    prefill: str = "",
    mode: Mode | None = None,
) -> list[int]:
    """Return the token ids of a conversation with a serving system prompt that is not part of it.

    If the template has no system role, or the conversation has its own system prompt, the text is prepended to the
    first message instead.
    """
    if system is None:
        return render_prompt(tokenizer, messages, tools, prefill, mode)
    first, *others = messages
    turns = [{"role": "system", "content": system}, first, *others]
    try:
        text = get_renderer(tokenizer).render(turns, generation=True, mode=mode)
        # Some templates drop a system message silently, so the text is searched for it.
        knows_role = first["role"] != "system" and system.strip() in text
    except REFUSED:
        knows_role = False
    merged = first | {"content": f"{system}\n\n{first['content']}"}
    return render_prompt(tokenizer, turns if knows_role else [merged, *others], tools, prefill, mode)


def encode(tokenizer: Any, example: Example, max_seq_length: int) -> EncodedSample:
    """Return one example as tokens and labels; see `encode_all`."""
    return encode_all(tokenizer, [example], max_seq_length)[0]


def encode_all(tokenizer: Any, examples: Sequence[Example], max_seq_length: int) -> list[EncodedSample]:
    """Return examples as tokens and labels, tokenized in one call; pairs get both conversations.

    Raises `ExampleTooLong` above `max_seq_length` tokens, and other kinds of `InvalidData` for rows that the chat
    template rejects or drops parts of.
    """
    pairs = [i for i, example in enumerate(examples) if example.rejected is not None]
    others = _encode_all(tokenizer, [with_rejected(examples[i]) for i in pairs], max_seq_length)
    found = _encode_all(tokenizer, examples, max_seq_length)
    for i, other in zip(pairs, others, strict=True):
        found[i] = replace(found[i], rejected=replace(other, earlier=()), earlier=())
    return found


def encode_to_train(
    tokenizer: Any, examples: Sequence[Example], limit: int, *, pairs: bool = False
) -> list[EncodedSample]:
    """Return examples as `encode_all` does, and require that each has a token with loss.

    Raises `NoTrainableTokens` otherwise, and `MethodMismatch` for a row that is a preference pair although `pairs` is
    False, or the reverse.
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
    """Return True or False for each part of `PROBES`: the chat template renders it, or drops it."""
    return {part: _is_rendered(tokenizer, row) for part, row in PROBES.items()}


def set_plain_template(tokenizer: Any) -> None:
    """Set the plain template if a tokenizer has none, and its end token as padding if it has none."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def learned_modes(tokenizer: Any, examples: Sequence[Example]) -> list[Mode]:
    """Return the thinking modes of the rows' learned answers, most frequent first; at least one."""
    renderer = get_renderer(tokenizer)
    answers = (turn for row in examples for turn in row.messages if teaches(turn))
    found = [renderer.answer_mode(renderer.split_reasoning(answer)) for answer in answers]
    return sorted(set(found), key=found.count, reverse=True) or [renderer.rendering.answering]


def _encode_all(tokenizer: Any, examples: Sequence[Example], max_seq_length: int) -> list[EncodedSample]:
    if not examples:
        return []
    try:
        renderer, shield = get_renderer(tokenizer), Shield(tokenizer)
    except TemplateFault as error:
        raise InvalidData(f"line {examples[0].line}: the model's chat template {error.message}") from error
    rows = [_samples(renderer, shield, example, max_seq_length) for example in examples]
    encoded, found = in_tokens(renderer, list(chain.from_iterable(rows))), list[EncodedSample]()
    for example, row in zip(examples, rows, strict=True):
        try:
            *earlier, last = chain.from_iterable([next(encoded) for _ in row])
        except TooManyTurns as error:
            raise TooManyTurns(f"line {example.line} {error.message}") from error
        found.append(replace(last, earlier=tuple(earlier)))
    _check_lengths(examples, found, max_seq_length)
    return found


def _samples(renderer: Renderer, shield: Shield, example: Example, limit: int) -> list[Sample]:
    """Render a row as training samples; raise `InvalidData` if the template rejects it or drops a part."""
    if is_learned(example.messages[0]):
        raise InvalidData(f"line {example.line} begins with the assistant; give that turn weight 0 or one before it")
    try:
        messages = [renderer.split_reasoning(turn) for turn in shield.everywhere(example.messages)]
        tools = shield.everywhere(example.tools)
        missing = unrendered_parts(renderer, messages, tools)
        found = samples(renderer, messages, tools, limit) if not missing else []
        missing = missing or _answers_without_loss(messages, found)
    except (ExampleTooLong, TooManyTurns) as error:
        raise type(error)(f"line {example.line} {error.message}") from error
    except InvalidData as error:
        raise InvalidData(f"line {example.line}: {error.message}") from error
    except TemplateFault as error:
        raise InvalidData(f"line {example.line}: the model's chat template {error.message}") from error
    except REFUSED as error:
        why = str(error).replace(MARK, "")
        raise InvalidData(f"line {example.line}: the model's chat template refuses it: {why}") from error
    if missing:
        kind = ToolsNotRendered if _is_of_tools(missing[0], messages) else ContentNotRendered
        raise kind(f"line {example.line}: the model's chat template leaves out {missing[0]}", missing[0])
    return found


def _answers_without_loss(messages: Sequence[Message], found: Sequence[Sample]) -> list[str]:
    """Return JSON pointers to learned answers whose text is not in a segment with loss."""
    learned = [segment.text for sample in found for segment in sample if segment.is_learned]
    answers = [(i, message) for i, message in enumerate(messages) if teaches(message)]
    pairs = zip(answers, learned, strict=True)
    return [f"/messages/{i}/content" for (i, answer), text in pairs if (answer["content"] or "").strip() not in text]


def _is_of_tools(pointer: str, messages: Sequence[Message]) -> bool:
    """Return True if a pointer refers to a tool, a call or a tool's result."""
    _, kind, place, *others = pointer.split("/")
    return kind == "tools" or "tool_calls" in others or messages[int(place)]["role"] == "tool"


def _is_rendered(tokenizer: Any, row: Example) -> bool:
    try:
        return not unrendered_parts(get_renderer(tokenizer), row.messages, row.tools)
    except (*REFUSED, TemplateFault):
        return False


def _check_lengths(examples: Sequence[Example], encoded: Sequence[EncodedSample], limit: int) -> None:
    """Raise `ExampleTooLong` for rows above the limit; rows are never truncated silently."""
    lengths = [max(len(sample.ids) for sample in row.samples) for row in encoded]
    long = [(each.line, length) for each, length in zip(examples, lengths, strict=True) if length > limit]
    if long:
        (line, length), more = long[0], f"; {len(long) - 1} more are over it" if long[1:] else ""
        raise ExampleTooLong(f"line {line} has {length} tokens; the limit is {limit}{more}")


MakeName = Callable[[str], str]
"""Takes a JSON pointer and returns a placeholder for the value there."""

_MOST_SHAPES = 4096  # maximum shapes in the cache
_MANY_TURNS = 32
_OTHER_PARTS = ("tool_calls", "reasoning_content", "name", "tool_call_id")
_STAND_IN = re.compile(r"stand_in_\d{6,}_of_a_part")


def unrendered_parts(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[str]:
    """Return JSON pointers to the parts of a conversation that are in none of its samples.

    A learned answer must be in a segment with loss. Rows that differ only in their words have the same result, which is
    cached per shape. Raises one of `REFUSED` or `TemplateFault`, as `samples` does.
    """
    messages = _first_turns(messages)
    names: dict[str, str] = {}
    named, offered = _with_names(names, messages, tools)
    # The names replace all words, so rows with the same structure have the same representation.
    shape = repr((named, offered))
    known = renderer.known_shapes
    if shape not in known:
        # Clearing all is enough: a file has few shapes, and this only bounds the memory.
        if len(known) >= _MOST_SHAPES:
            known.clear()
        found = samples(renderer, named, offered)
        whole = set(_STAND_IN.findall("".join(segment.text for sample in found for segment in sample)))
        learned = set(_STAND_IN.findall("".join(part.text for sample in found for part in sample if part.is_learned)))
        places = {f"/messages/{i}" for i, message in enumerate(messages) if teaches(message)}
        lost = (at for name, at in names.items() if name not in (learned if _message_pointer(at) in places else whole))
        known[shape] = tuple(dict.fromkeys(lost))
    return list(known[shape])


def _first_turns(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the first turns of a long conversation of plain text; its other turns are rendered in the same way."""
    if len(messages) <= _MANY_TURNS or any(turn.get(part) for turn in messages for part in _OTHER_PARTS):
        return messages
    return messages[
        : next((i for i, turn in enumerate(messages, start=1) if i >= _MANY_TURNS and teaches(turn)), len(messages))
    ]


def _message_pointer(pointer: str) -> str:
    return "/".join(pointer.split("/")[:3])


def _with_names(
    names: dict[str, str], messages: Sequence[Message], tools: Sequence[Message]
) -> tuple[list[Message], list[Message]]:
    """Return a conversation with a unique name in each part; `names` maps each name to its JSON pointer."""

    def name(at: str) -> str:
        own = f"stand_in_{len(names):06d}_of_a_part"  # must match `_OWN`
        names[own] = at
        return own

    turns = [_name_turn(name, turn, f"/messages/{i}") for i, turn in enumerate(messages)]
    return turns, [_name_tool(name, tool, f"/tools/{i}") for i, tool in enumerate(tools)]


def _name_turn(name: MakeName, turn: Message, at: str) -> Message:
    """Replace a turn's text, reasoning, speaker and calls; a tool's name is already checked in its call."""
    parts = ("content", "reasoning_content") if turn["role"] == "tool" else ("content", "reasoning_content", "name")
    named = turn | {part: name(f"{at}/{part}") for part in parts if str(turn.get(part) or "").strip()}
    if calls := turn.get("tool_calls"):
        named["tool_calls"] = [_name_call(name, call, f"{at}/tool_calls/{i}") for i, call in enumerate(calls)]
    return named


def _name_call(name: MakeName, call: Message, at: str) -> Message:
    arguments = {name(at): name(at)} if call["function"]["arguments"] else {}
    return call | {"function": call["function"] | {"name": name(at), "arguments": arguments}}


def _name_tool(name: MakeName, tool: Message, at: str) -> Message:
    function = tool["function"]
    named = function | {"name": name(at)}
    if function.get("description"):
        named["description"] = name(f"{at}/function/description")
    if properties := (function.get("parameters") or {}).get("properties"):
        place = f"{at}/function/parameters/properties"
        own = {
            name(f"{place}/{key}"): _name_property(name, value, f"{place}/{key}") for key, value in properties.items()
        }
        named["parameters"] = function["parameters"] | {"properties": own, "required": []}
    return tool | {"function": named}


def _name_property(name: MakeName, value: Any, at: str) -> Any:
    if isinstance(value, dict) and isinstance(value.get("description"), str) and value["description"]:
        return value | {"description": name(f"{at}/description")}
    return value

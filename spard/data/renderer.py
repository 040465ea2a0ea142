"""The only place where chat templates are rendered: prompts, conversations, and the text that the model must write.

A `Renderer` combines a tokenizer, its chat template and the rendering record (`spard.data.rendering`). Training rows,
previews, audits, proofs and engines all use it, so training and serving have the same tokens before an answer.

Users of an adapter's archive call its template without arguments and with the current date, therefore `self_rendering`
writes the arguments and the date into it. Where that is impossible, the template stays unchanged and the model card
names the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from spard.data.chat_template import REFUSED as REFUSED
from spard.data.chat_template import compile_template, names_missed, sources, template_source, with_defaults
from spard.data.control_tokens import MARK, end_tokens
from spard.data.rendering import Mode, Rendering
from spard.data.rows import Message
from spard.data.tools import CONVERSATION, PROBES
from spard.errors import TemplateFault

_REASONING = ("reasoning_content", "thinking", "reasoning")  # field names that templates use for reasoning
_THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\n*", re.DOTALL)
_OPEN = re.compile(r"<([A-Za-z_]+)>\s*\Z")
_BEGINNINGS = ("a", " a", "\na", "1", "\u4e2d", "(")  # sample beginnings of answers
_ASK: Message = {"role": "user", "content": "stand_in_of_a_question"}
_ANSWER: Message = {"role": "assistant", "content": "stand_in_of_an_answer"}
_THOUGHTS: Message = _ANSWER | {"reasoning_content": "stand_in_of_reasoning"}


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer as the model must write it: the prompt before it, its text up to the end token, and the rest."""

    prompt: str
    text: str
    rest: str


@dataclass
class Renderer:
    """A tokenizer with its chat template and rendering record; texts must have been marked by a `Shield`."""

    tokenizer: Any
    rendering: Rendering
    template: str | Mapping[str, str] | None  # the tokenizer's template at creation
    known_shapes: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)  # see `spard.data.chat`

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, generation: bool, mode: Mode | None = None
    ) -> str:
        """Return a conversation as text, with the generation prompt if `generation`; raise one of `REFUSED`."""
        source = template_source(self.template, tools=bool(tools))
        return compile_template(source).render(self._context(messages, tools, generation, mode))

    def _context(
        self, messages: Sequence[Message], tools: Sequence[Message], generation: bool, mode: Mode | None
    ) -> dict[str, object]:
        """Return all names that a template gets."""
        return {
            **self.tokenizer.special_tokens_map,
            "documents": None,
            **self.rendering.mode_arguments(mode),
            "messages": [_as_read(message) for message in messages],
            "tools": list(tools) or None,
            "add_generation_prompt": generation,
        }

    def unset_names(self, rows: Sequence[tuple[Sequence[Message], Sequence[Message]]]) -> set[str]:
        """Return the names that the templates read in these conversations, each with its tools, and never get.

        They keep the template's own defaults in all that is trained and measured; another server may set them.
        """
        contexts: dict[str, list[dict[str, object]]] = {}
        for messages, tools in rows:
            for asked, generation in ((messages, False), (messages[:-1], True)):
                source = contexts.setdefault(template_source(self.template, tools=bool(tools)), [])
                source += (self._context(asked, tools, generation, mode) for mode in self.rendering.modes)
        return set[str]().union(*(names_missed(source, each) for source, each in contexts.items()))

    def split_reasoning(self, message: Message) -> Message:
        """Return an answer with the reasoning at the start of its text, in tags, moved to `reasoning_content`."""
        found = _THOUGHT.match(message["content"] or "") if message["role"] == "assistant" else None
        if found is None or not self.knows_reasoning or message.get("reasoning_content"):
            return message
        return message | {"reasoning_content": found.group(1), "content": message["content"][found.end() :]}

    @cached_property
    def knows_reasoning(self) -> bool:
        """True if models with this template write reasoning, in tags or in a field of its own."""
        source = template_source(self.template, tools=False)
        return "</think>" in source or _REASONING[0] in source or self._renders_reasoning

    @cached_property
    def _renders_reasoning(self) -> bool:
        """True if a rendered answer contains the reasoning of its message.

        The other names under which templates look for it are plain words, which a template may contain without
        reading them from a message, so their presence in its source says nothing.
        """
        try:
            whole = self.render([_ASK, _THOUGHTS], generation=False, mode=self.rendering.thinking)
        except REFUSED:
            return False
        return str(_THOUGHTS["reasoning_content"]) in whole

    def answer_mode(self, answer: Message) -> Mode:
        """Return the thinking mode in which an answer is learned: on if it has reasoning."""
        return self.rendering.thinking if answer.get("reasoning_content") else self.rendering.answering

    def turn(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Turn:
        """Return the last message (an answer) as the model must write it after the prompt that serving gives.

        Raises `TemplateFault` if the template renders an answer in a way that does not continue its generation prompt.
        """
        *before, answer = messages
        mode = self.answer_mode(answer)
        prompt = self.render(before, tools, generation=True, mode=mode)
        whole = self.render(messages, tools, generation=False, mode=mode)
        # The usual case: the conversation continues the generation prompt.
        if whole.startswith(prompt):
            return self._cut_at_end(prompt, whole[len(prompt) :])
        history = self.render(before, tools, generation=False, mode=mode)
        header = self._headers[mode]
        # Next case: the generation prompt writes more than the header of a past answer, such as an opened <think>
        # block. The model must close that block itself (`_bridge`).
        begun = prompt.removeprefix(history + header)
        if not whole.startswith(history + header) or begun == prompt:
            # Last case: the history is rendered differently once the answer is there.
            return self._cut_at_end(prompt, self._plain_text(messages, tools, mode, whole))
        return self._cut_at_end(prompt, _bridge(begun, answer) + whole[len(history + header) :])

    def _plain_text(self, messages: Sequence[Message], tools: Sequence[Message], mode: Mode, whole: str) -> str:
        """Return an answer's text if the template renders the earlier turns differently once they are answered.

        Templates that put the system prompt into the last turn do so. The text is composed of the model's opening, the
        words, and the text that follows a unique name in their place. Raises `TemplateFault` for an answer with more
        than words.
        """
        *before, answer = messages
        if not answer.get("tool_calls") and not answer.get("reasoning_content"):
            named = [*before, answer | {"content": _ANSWER["content"]}]
            _, _, behind = self.render(named, tools, generation=False, mode=mode).rpartition(_ANSWER["content"])
            for words in (answer["content"], answer["content"].strip()):
                if whole.endswith(words + behind):
                    return f"{self.opening}{words}{behind}"
        raise TemplateFault("writes an answer otherwise than its generation prompt begins one")

    def _cut_at_end(self, prompt: str, text: str) -> Turn:
        """Cut an answer after its first end token, where engines stop; append one if there is none."""
        end = self.first_end(text)
        if end is None:
            return Turn(prompt, text.rstrip() + (self.rendering.closing or self.tokenizer.eos_token), "")
        # Engines stop at the end token, so text behind it could be learned but never served.
        if self._special.sub("", text[end:]).strip():
            raise TemplateFault("writes more of an answer behind its end token")
        return Turn(prompt, text[:end], text[end:])

    def first_end(self, text: str) -> int | None:
        """Return the position after the first token at which engines stop, or None."""
        stops = set(self.stop_texts)
        return next((found.end() for found in self._special.finditer(text) if found.group() in stops), None)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Regular expression for special tokens and stop tokens, longest first."""
        special, added = end_tokens(self.tokenizer) | {*self.rendering.stops}, self.tokenizer.added_tokens_decoder
        texts = sorted((re.escape(added[i].content) for i in special if i in added), key=len, reverse=True)
        return re.compile("|".join(texts) or r"(?!)")

    @cached_property
    def reads_apart(self) -> bool:
        """True if the tokenizer splits an answer's text into the same tokens with and without the prompt before it."""
        prompt = self.render([_ASK], generation=True)
        texts = [text for begin in _BEGINNINGS for text in (begin, prompt + begin)]
        alone, *others = self.token_ids([prompt, *texts])
        return all(alone + others[i] == others[i + 1] for i in range(0, len(others), 2))

    @cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of the tokens at which engines stop."""
        added = self.tokenizer.added_tokens_decoder
        return tuple(added[stop].content for stop in self.rendering.stops if stop in added)

    @cached_property
    def _headers(self) -> dict[Mode, str]:
        """The text between a question and its answer in a conversation, by mode."""
        found: dict[Mode, str] = {}
        for mode in self.rendering.modes:
            asked = self.render([_ASK], generation=False, mode=mode)
            whole = self.render([_ASK, _ANSWER], generation=False, mode=mode)
            if not whole.startswith(asked):
                raise TemplateFault("writes a question otherwise once it is answered")
            found[mode] = whole[len(asked) :].partition(_ANSWER["content"])[0]
        return found

    @cached_property
    def opening(self) -> str:
        """The text that the model itself writes between the generation prompt and an answer without reasoning."""
        try:
            text = self.turn([_ASK, _ANSWER]).text
        except (*REFUSED, TemplateFault):  # a model that is never trained
            return ""
        return text.partition(_ANSWER["content"])[0]

    def reply_content(self, reply: str) -> str:
        """Return the words of a reply, without opening, reasoning and template tokens.

        A reply that ends within its reasoning is returned whole.
        """
        for mark in filter(None, ("</think>" if self.knows_reasoning else "", self.opening.strip())):
            _, found, behind = reply.rpartition(mark)
            reply = behind if found and behind.strip() else reply
        return self._special.sub("", reply) if self.ends < end_tokens(self.tokenizer) else reply

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end a reply: special tokens except those written inside answers by the template."""
        return self._ends_but(self._inner_texts([_ANSWER, _THOUGHTS]))

    @cached_property
    def ends_with_tools(self) -> frozenset[int]:
        """Like `ends`, for replies that may call tools: tokens inside calls do not end a reply either."""
        return self._ends_but(self._inner_texts([_ANSWER, _THOUGHTS, _CALLS]))

    def _ends_but(self, inner: Sequence[str]) -> frozenset[int]:
        special, added = end_tokens(self.tokenizer), self.tokenizer.added_tokens_decoder
        inside = {i for i in special if i in added and any(added[i].content in text for text in inner)}
        return (special - inside) | frozenset(self.rendering.stops)

    def _inner_texts(self, answers: Sequence[Message]) -> list[str]:
        """Return the template's text of answers without their end tokens; answers that it rejects are skipped."""
        found = []
        for answer in answers:
            try:
                text = self.turn([_ASK, answer]).text
            except (*REFUSED, TemplateFault):
                continue
            ends = [stop for stop in self.stop_texts if text.endswith(stop)]
            found.append(text.removesuffix(max(ends, key=len, default="")))
        return found

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize marked texts in one call, without adding special tokens; pieces between marks are separate."""
        parts = [text.split(MARK) for text in texts]
        flat = list(chain.from_iterable(parts))
        if not flat:
            return []
        ids = iter(self.tokenizer(flat, add_special_tokens=False)["input_ids"])
        return [next(ids) if len(each) == 1 else list(chain.from_iterable(next(ids) for _ in each)) for each in parts]


_CALL: Message = {"name": "stand_in_of_a_name", "arguments": {"stand_in": "stand_in"}}
_CALLS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _CALL}],
}


def _bridge(begun: str, answer: Message) -> str:
    """Return the text that closes the reasoning opened by a generation prompt; the model writes it before an answer."""
    opened = _OPEN.search(begun)
    if opened is None:
        return ""
    return f"{answer.get('reasoning_content') or ''}\n</{opened.group(1)}>\n\n"


def _as_read(message: Message) -> Message:
    """Return a message in the templates' format: without training fields, with its reasoning under every name."""
    plain = {key: value for key, value in message.items() if key != "weight" and value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {**plain, **dict.fromkeys(_REASONING, reasoning)}


def self_rendering(renderer: Renderer, mode: Mode) -> dict[str, str]:
    """Return the sources of a model's chat templates, by name, that render in `mode` by default.

    Returns the model's own templates if no change is needed or possible.
    """
    own = sources(renderer.template)
    arguments = renderer.rendering.mode_arguments(mode)
    found = {name: with_defaults(source, arguments) or source for name, source in own.items()}
    bare = replace(renderer.rendering, arguments={}, modes={"plain": {}}, asked="plain")
    # The rewritten templates are only used if they reproduce the original's text on several probes.
    alone = replace(renderer, rendering=bare, template=found, known_shapes={})
    return found if all(_are_equal(renderer, alone, mode, tools=name == "tool_use") for name in found) else own


def _are_equal(renderer: Renderer, alone: Renderer, mode: Mode, *, tools: bool) -> bool:
    """Return True if two renderers produce the same prompts and conversations, with or without tools."""
    for row in (*PROBES.values(), CONVERSATION):
        for asked, generation in ((row.messages[:-1], True), (row.messages, False)):
            offered = row.tools if tools else ()
            texts = [
                _text(each, asked, offered, its_mode, generation=generation)
                for each, its_mode in ((renderer, mode), (alone, None))
            ]
            if texts[0] != texts[1]:
                return False
    return True


def _text(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message], mode: Mode | None, *, generation: bool
) -> str | None:
    """Return the rendered text, or None if the template rejects the messages."""
    try:
        return renderer.render(messages, tools, generation=generation, mode=mode)
    except REFUSED:
        return None

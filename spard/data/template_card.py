"""Summarizes the effect of a base model's chat template on conversations when the model is added, before any job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spard.data.chat import unrendered_parts
from spard.data.chat_template import DATE_TEXT, sources
from spard.data.renderer import REFUSED, Renderer, self_rendering
from spard.data.rendering import Mode
from spard.data.rows import Message
from spard.data.samples import samples
from spard.errors import TemplateFault

_SHOWN = 600  # maximum characters of a shown rendering
PROBES_TITLE = "conversations as they are trained, with what is learned in brackets"
BETWEEN = "\n---\n"  # samples of a probe
_WIDTH = 100  # characters of a line in a terminal
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "The first."}}},
    },
}
_CALL: Message = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}
_ASKS: Message = {"role": "user", "content": "What is two and two?"}
_SAYS: Message = {"role": "assistant", "content": "It is four."}
_GOES_ON: Message = {"role": "user", "content": "And three?"}
_ENDS: Message = {"role": "assistant", "content": "Seven."}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ANSWERS: Message = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "4"}
_THINKS: Message = _SAYS | {"reasoning_content": "Two and two."}
PROBES: dict[str, tuple[tuple[Message, ...], tuple[Message, ...]]] = {
    "one turn": ((_ASKS, _SAYS), ()),
    "system prompt": ((_SYSTEM, _ASKS, _SAYS), ()),
    "several turns": ((_ASKS, _SAYS, _GOES_ON, _ENDS), ()),
    "weight 0 first": ((_ASKS, _SAYS | {"weight": 0}, _GOES_ON, _ENDS), ()),
    "an answer with markup": ((_ASKS, _SAYS | {"content": "<b>Four</b>"}), ()),
    "a speaker's name": ((_ASKS | {"name": "Ann"}, _SAYS), ()),
    "reasoning": ((_ASKS, _THINKS), ()),
    "reasoning in several turns": ((_ASKS, _THINKS, _GOES_ON, _ENDS | {"reasoning_content": "And three."}), ()),
    "tools": ((_ASKS, _SAYS), (_TOOL,)),
    "a call": ((_ASKS, _CALLS), (_TOOL,)),
    "a call and its answer": ((_ASKS, _CALLS, _ANSWERS, _SAYS), (_TOOL,)),
    "text beside a call": ((_ASKS, _CALLS | {"content": "Let me add."}, _ANSWERS, _SAYS), (_TOOL,)),
}

# Beside these, for what templates do with reasoning beside earlier calls.
CONVERSATIONS = (
    *PROBES.values(),
    ((_ASKS, _CALLS | {"reasoning_content": "Add."}, _ANSWERS, _THINKS, _GOES_ON, _ENDS), (_TOOL,)),
)


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation as it is trained: learned text in brackets, samples separated by `---`; or why it was refused."""

    name: str
    samples: int
    text: str
    refusal: str = ""

    def lines(self) -> Iterator[str]:
        """Yield its name, and each sample on a line of a terminal's width: its end, which has the last answer."""
        yield f"{self.name}: not trained: {self.refusal}" if self.refusal else f"{self.name}:"
        for sample in self.text.split(BETWEEN) if self.text else ():
            line = json.dumps(sample, ensure_ascii=False)[1:-1].replace('\\"', '"')
            yield f"  {line if len(line) <= _WIDTH else f'... {line[4 - _WIDTH :]}'}"


@dataclass(frozen=True, slots=True)
class TemplateCard:
    """The behavior of a chat template.

    end         token that ends each learned answer; `is_closed` if it is appended by us
    stops       tokens at which engines stop
    modes       arguments of each thinking mode of the template; `default` is the mode without arguments, and `asked`
                that of requests which name none
    arguments   arguments of every rendering; `writes_date` if it uses the current date
    serving     arguments that other servers must pass, unless `renders_itself`: then the archive's template has them
    options     names that the template reads and that are left at its own defaults; with the value that is the same as
                the default if it is a switch, else None
    rewrites    True if earlier turns are rendered differently later, which makes each answer a sample of its own
    probes      example conversations as they are trained
    """

    end: str
    is_closed: bool
    stops: tuple[str, ...]
    modes: Mapping[Mode, Mapping[str, object]]
    default: Mode
    asked: Mode
    arguments: Mapping[str, object]
    writes_date: bool
    serving: Mapping[str, object]
    renders_itself: bool
    options: Mapping[str, bool | None]
    rewrites: bool
    probes: tuple[Probe, ...]

    @property
    def fault(self) -> str | None:
        """Why no job can train with this template, or None."""
        plain = self.probes[0]
        return plain.refusal or None

    def lines(self) -> Iterator[str]:
        """Yield the card as sentences, for a terminal."""
        closed = ", which is put there: the template writes none at which the model's engines stop"
        yield f"each answer ends with {self.end}{closed if self.is_closed else ''}"
        yield f"engines stop at {', '.join(self.stops)}"
        if len(self.modes) > 1:
            yield f"thinking can be switched; it is {self.default} by default, and rows without reasoning train it off"
        if self.writes_date:
            own = " and the adapter's own template" if self.renders_itself else ""
            yield f"the template writes today's date; rows, audits{own} say {DATE_TEXT}"
        if self.serving:
            own = "the adapter's own template does so by itself" if self.renders_itself else "give them when you serve"
            yield f"rendered with {', '.join(f'{k}={v!r}' for k, v in self.serving.items())}: {own}"
        if self.options:
            left = "the template's own values of these stay, and a server that sets one renders what was not measured"
            yield f"also read: {', '.join(self.options)}; {left}"
        turns = "a sample each, since the template rewrites earlier turns" if self.rewrites else "one sample"
        yield f"the answers of a conversation are {turns}"
        yield from (f"not trained: {each.name} ({each.refusal})" for each in self.probes if each.refusal)


def template_card(renderer: Renderer) -> TemplateCard:
    """Render `PROBES` as in training; raise `TemplateFault` for a template that cannot render an answer."""
    rendering = renderer.rendering
    try:
        answer = renderer.turn([_ASKS, _SAYS]).text
    except REFUSED as error:
        raise TemplateFault(f"cannot write an answer: {error}") from error
    probes = tuple(_probe(renderer, name, *row) for name, row in PROBES.items())
    templates = self_rendering(renderer, rendering.asked)
    return TemplateCard(
        end=next(stop for stop in [*renderer.stop_texts, rendering.closing or ""] if answer.endswith(stop)),
        is_closed=rendering.closing is not None,
        stops=renderer.stop_texts,
        modes=dict(rendering.modes),
        default=rendering.default,
        asked=rendering.asked,
        arguments=dict(rendering.arguments),
        writes_date=any("strftime_now" in source for source in sources(renderer.template).values()),
        serving=rendering.mode_arguments(),
        renders_itself=templates != sources(renderer.template),
        options=left_at_default(renderer),
        rewrites=next(each.samples for each in probes if each.name == "several turns") > 1,
        probes=probes,
    )


def left_at_default(renderer: Renderer) -> dict[str, bool | None]:
    """Return the names that a template reads and that nothing here sets, as in `TemplateCard.options`."""
    return {name: _switch(renderer, name) for name in sorted(renderer.unset_names(CONVERSATIONS))}


def _switch(renderer: Renderer, name: str) -> bool | None:
    """Return the one of False and True that renders all conversations as the template's default does, or None."""
    off, on, default = (_texts(renderer, given) for given in ({name: False}, {name: True}, {}))
    # A list or a text is no switch: as False it is left out like the default, and as True it is refused.
    if off == on or None in (*off, *on) or default not in (off, on):
        return None
    return default == on


def _texts(renderer: Renderer, given: Mapping[str, object]) -> list[str | None]:
    """Return the conversations that the template renders, with more arguments; None for one that it then refuses."""
    found = list[str | None]()
    trying = replace(
        renderer, rendering=replace(renderer.rendering, arguments={**renderer.rendering.arguments, **given})
    )
    for messages, tools in CONVERSATIONS:
        for mode in renderer.rendering.modes:
            try:
                renderer.render(messages, tools, generation=False, mode=mode)
            except REFUSED:
                continue
            try:
                found.append(trying.render(messages, tools, generation=False, mode=mode))
            except REFUSED:
                found.append(None)
    return found


def _probe(renderer: Renderer, name: str, messages: Sequence[Message], tools: Sequence[Message]) -> Probe:
    try:
        if missing := unrendered_parts(renderer, messages, tools):
            return Probe(name, 0, "", f"the template leaves out {missing[0]}")
        found = samples(renderer, messages, tools)
    except TemplateFault as error:
        return Probe(name, 0, "", f"the template {error.message}")
    except REFUSED as error:
        return Probe(name, 0, "", f"the template refuses it: {error}")
    texts = ["".join(f"[{part.text}]" if part.is_learned else part.text for part in sample) for sample in found]
    return Probe(name, len(found), BETWEEN.join(_short(text) for text in texts))


def _short(text: str) -> str:
    """Return the end of a text, which contains the answer."""
    return text if len(text) <= _SHOWN else f"... {text[-_SHOWN:]}"

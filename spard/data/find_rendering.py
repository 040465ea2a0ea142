"""Determines, when a base model is added, how to render its chat template: by trying it and comparing the results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from spard.data.chat_template import DATE_TEXT, arguments_read, sources
from spard.data.control_tokens import end_tokens
from spard.data.renderer import REFUSED, Renderer
from spard.data.rendering import Mode, Rendering, template_digest
from spard.errors import TemplateFault

_ASK = [{"role": "user", "content": "stand_in_of_a_question"}]
_SWITCH = re.compile(r"think|reason")
_FIRST = ("enable_thinking", "thinking")  # the usual names of the switch
_DATES = {"date_string": DATE_TEXT}


def find_rendering(tokenizer: Any) -> Rendering:
    """Return the rendering record of a tokenizer's conversations.

    `tokenizer.stated_ends` are the ids that end a reply by the model's generation config; without them every special
    token counts as an end. Raises `TemplateFault` for an invalid template or one that cannot render a question.
    """
    stated: Iterable[int] | None = getattr(tokenizer, "stated_ends", None)
    texts = sources(tokenizer.chat_template)
    try:
        read = frozenset[str]().union(*(arguments_read(text) for text in texts.values()))
        stops = end_tokens(tokenizer) if stated is None else {*stated, tokenizer.eos_token_id} - {None}
        arguments = {name: value for name, value in _DATES.items() if name in read}
        plain: dict[Mode, dict[str, Any]] = {"plain": {}}
        found = Rendering(template_digest(texts), arguments, plain, "plain", tuple(sorted(stops)), "plain")
        Renderer(tokenizer, found, tokenizer.chat_template).render(_ASK, generation=True)
        modes, default = _modes(tokenizer, found, read)
    except REFUSED as error:
        raise TemplateFault(f"cannot write a question: {error}") from error
    found = replace(found, modes=modes, default=default)
    found = replace(found, asked=found.answering)
    return replace(found, closing=None if _ends(tokenizer, found) else tokenizer.eos_token)


def _modes(tokenizer: Any, found: Rendering, read: frozenset[str]) -> tuple[dict[Mode, dict[str, Any]], Mode]:
    """Find the argument that switches thinking on and off, by its effect on the generation prompt."""

    def prompt(**arguments: Any) -> str:
        tried = replace(found, modes={"plain": arguments})
        return Renderer(tokenizer, tried, tokenizer.chat_template).render(_ASK, generation=True)

    # The usual names first, because a template may read several names that contain "think".
    names = sorted((name for name in read if _SWITCH.search(name)), key=lambda name: (name not in _FIRST, name))
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

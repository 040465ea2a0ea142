"""Checks the arguments with which the provider fixes how a base model's chat template is rendered.

A template reads names beside a conversation: an effort of reasoning, the identity of the model, built-in tools. Names
that nothing sets keep the template's own defaults. The provider can fix them when a base model is added; they are then
part of the rendering record. Only names that the template really reads are taken, found by rendering conversations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from spard.data.chat import THINKING_SWITCHES, find_rendering
from spard.data.control_tokens import MARK
from spard.data.renderer import Renderer
from spard.data.rendering import DATE_ARGUMENT
from spard.data.template_card import CONVERSATIONS
from spard.errors import InvalidRecipe, TemplateFault

MAX_BYTES = 4096  # of all arguments as JSON
_MAX_ARGUMENTS = 16
_OF_CONVERSATIONS = {
    "messages": "each conversation gives it",
    "tools": "each conversation gives it",
    "documents": "conversations have none here",
    "add_generation_prompt": "rendering sets it for prompts",
    DATE_ARGUMENT: "the date is fixed, so that rows have the same tokens on every day",
    "strftime_now": "the date is fixed, so that rows have the same tokens on every day",
}


def read_arguments(text: str | None) -> dict[str, object]:
    """Return the arguments that a command's option gives as a JSON object, {} for None; raise `InvalidRecipe`."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        message = 'template_arguments: give one JSON object, such as {"reasoning_effort": "high"}'
        raise InvalidRecipe(message, "template_arguments")
    return found


def value_fault(arguments: Mapping[str, object]) -> str | None:
    """Return why the values cannot be stored and written into a template, or None."""
    if len(arguments) > _MAX_ARGUMENTS:
        return f"there are {len(arguments)} arguments; at most {_MAX_ARGUMENTS} are taken"
    for name, value in arguments.items():
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str | bool | int | float) for part in parts):
            return f"{name[:64]} is no text, number, true, false or list of these"
        if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
            return f"{name[:64]} is no finite number"
        if any(isinstance(part, str) and MARK in part for part in parts):
            return f"{name[:64]} is no valid Unicode"
    size = len(json.dumps(dict(arguments)))
    return f"as JSON they have {size} bytes; at most {MAX_BYTES} are taken" if size > MAX_BYTES else None


def argument_fault(tokenizer: Any, arguments: Mapping[str, object]) -> str | None:
    """Return why these arguments cannot be fixed for a tokenizer's chat template, or None.

    Raises `TemplateFault` for a template that cannot render a question without them.
    """
    if not arguments:
        return None
    if fault := value_fault(arguments):
        return fault
    bare = find_rendering(tokenizer, {})
    switches = {name for given in bare.modes.values() for name in given}
    for name, value in arguments.items():
        if why := _OF_CONVERSATIONS.get(name):
            return f"{name} cannot be fixed: {why}"
        if name in tokenizer.special_tokens_map:
            return f"{name} cannot be fixed: it is a token of the tokenizer"
        # A template that prints its effort takes true and false too, so only a truth value shows a switch.
        if name in switches and (name in THINKING_SWITCHES or isinstance(value, bool)):
            return f"{name} cannot be fixed: it switches thinking, and the rows of a job decide that"
    renderer = Renderer(tokenizer, bare, tokenizer.chat_template)
    read = renderer.unset_names(CONVERSATIONS) | switches.difference(THINKING_SWITCHES)
    if unknown := sorted(arguments.keys() - read):
        named = f"it reads {', '.join(sorted(read))}" if read else "it reads no name that can be fixed"
        return f"the chat template does not read {unknown[0][:64]}; {named}"
    try:
        find_rendering(tokenizer, arguments)
    except TemplateFault as error:
        return f"with these values the chat template {error.message}"
    return None

"""The chat template that goes into an adapter's archive: one that renders by itself as the model was trained.

Whoever loads the archive gives the template no arguments, and today's date. So the arguments and the date are written
into it. Where that cannot be done the template stays as it is, and the model card names the arguments instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spard.data.chat_template import sources, with_defaults
from spard.data.renderer import REFUSED, Renderer
from spard.data.rendering import Mode
from spard.data.rows import Message
from spard.data.tools import CONVERSATION, PROBES


def self_rendering(renderer: Renderer, mode: Mode) -> dict[str, str]:
    """Return the sources of a model's chat templates, by name, that render in `mode` unless told otherwise.

    Those of the model itself where nothing has to be written into them, or nothing can be.
    """
    own = sources(renderer.template)
    arguments = renderer.rendering.mode_arguments(mode)
    found = {name: with_defaults(source, arguments) or source for name, source in own.items()}
    bare = replace(renderer.rendering, arguments={}, modes={"plain": {}}, asked="plain")
    alone = replace(renderer, rendering=bare, template=found, known_shapes={})
    return found if all(_are_equal(renderer, alone, mode, tools=name == "tool_use") for name in found) else own


def _are_equal(renderer: Renderer, alone: Renderer, mode: Mode, *, tools: bool) -> bool:
    """Tell whether two renderers write the same prompts and conversations, with tools or without."""
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
    """Return a rendering; None where the template refuses it."""
    try:
        return renderer.render(messages, tools, generation=generation, mode=mode)
    except REFUSED:
        return None

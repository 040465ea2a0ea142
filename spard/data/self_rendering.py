"""The chat template in an adapter's archive, which renders without arguments exactly as in training.

Users of the archive call the template without arguments and with the current date, therefore the arguments and the date
are written into it. Where that is impossible, the template stays unchanged and the model card names the arguments.
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

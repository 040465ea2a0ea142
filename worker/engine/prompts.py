"""Turn requests into token ids, with the same rendering as the audit's."""

from __future__ import annotations

from typing import Any, cast

from app.inference.protocol import Ask
from spard.data.chat import render_conversation, tool_support
from spard.data.control_tokens import Shield, pieces
from spard.data.rendering import Mode
from spard.data.rows import example
from spard.data.tools import used_parts
from spard.errors import SpardError
from spard.pipeline.messages import Message


class Refused(SpardError):
    """A request that this model cannot answer; `code` is the error code for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Prompts:
    """Turns requests into token ids; a prompt has to be shorter than the model's `positions`, in tokens."""

    def __init__(self, tokenizer: Any, positions: int) -> None:
        self._tokenizer, self._positions = tokenizer, positions
        self._support = tool_support(tokenizer)

    def ids(self, ask: Ask, system: str | None, mode: Mode | None = None) -> list[int]:
        """Return the token ids of a request's messages or prompt.

        `system` and `mode` are the system prompt and mode of thinking of the model's audit; None means no system prompt
        and the base model's own mode. Raises `Refused` if the prompt is empty or too long, or the chat template fails.
        """
        messages = ask["messages"]
        row = self._text(ask["prompt"] or "", system) if messages is None else self._conversation(ask, system, mode)
        if not row:
            raise Refused("invalid_messages", "The prompt is empty.")
        if len(row) >= self._positions:
            raise Refused(
                "context_length_exceeded",
                f"This model's maximum context length is {self._positions} tokens. Your messages resulted in {len(row)}"
                " tokens. Please reduce the length of the messages.",
            )
        return row

    def _conversation(self, ask: Ask, system: str | None, mode: Mode | None) -> list[int]:
        raw = {"messages": ask["messages"], **({"tools": ask["tools"]} if ask["tools"] else {})}
        for part in sorted(used_parts(raw)):
            if not self._support[part]:
                raise Refused("tools_not_rendered", f"The model's chat template does not render {part}.")
        try:
            found = example(cast(Message, raw), 1)
            return render_conversation(self._tokenizer, found.messages, system, found.tools, mode=mode)
        except Exception as error:  # a template is a program and may raise anything; only this request fails
            why = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise Refused("invalid_messages", f"The model's chat template refuses these messages: {why}") from error

    def _text(self, text: str, system: str | None) -> list[int]:
        if system is not None:
            raise Refused("invalid_messages", "This model answers conversations only: it needs its system prompt.")
        start: list[int] = self._tokenizer("", add_special_tokens=True)["input_ids"]
        ((ids, _),) = pieces(self._tokenizer, [Shield(self._tokenizer).mark(text)])
        return [*start[:1], *ids]

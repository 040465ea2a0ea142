"""`spard chat MODEL`: ask a model that answers, once or turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from app.commands.terminal import CommandFailed, connect


def chat(
    model: Annotated[str, typer.Argument(help="A base model, or one of yours: ft:...")],
    prompt: Annotated[str | None, typer.Argument(help="One question; without it, a conversation until Ctrl-D.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt before the conversation.")] = None,
    temperature: Annotated[float, typer.Option(help="0: the likeliest tokens.", min=0, max=2)] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.", min=1)] = 512,
) -> None:
    """Ask a model; replies appear as they are written."""
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    with connect() as client:
        ask = partial(client.chat.completions.create, model=model, temperature=temperature, max_tokens=max_tokens)
        if prompt is not None:
            _answer(ask, [*messages, {"role": "user", "content": prompt}])
            return
        client.models.retrieve(model)  # a name that does not answer is told before the first question
        while question := _question():
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": _answer(ask, messages)})


def _question() -> str:
    """Return the next line that a person or a pipe gives; nothing at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _answer(ask: Callable[..., Any], messages: list[Any]) -> str:
    """Print a reply while it comes, and return it; one that breaks off fails the command."""
    from openai import APIConnectionError, APIError, APIStatusError

    said = ""
    try:
        for chunk in ask(messages=messages, stream=True):
            text = (chunk.choices[0].delta.content if chunk.choices else None) or ""
            said += text
            sys.stdout.write(text)
            sys.stdout.flush()
    except (APIConnectionError, APIStatusError):
        raise
    except APIError as error:
        sys.stdout.write("\n")
        raise CommandFailed(error.message) from None
    sys.stdout.write("\n")
    return said

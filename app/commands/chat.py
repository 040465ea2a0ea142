"""`spard chat MODEL`: ask a model one question, or have a conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from app.commands.client import Client, connect
from app.commands.terminal import CommandFailed


def chat(
    model: Annotated[str, typer.Argument(help="A base model, or a fine-tuned model of yours: ft:...")],
    prompt: Annotated[str | None, typer.Argument(help="One prompt; if omitted, chat until Ctrl-D.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt before the conversation.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0, max=2)] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of a reply.", min=1)] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print each complete reply as a line of JSON.")] = (False),
) -> None:
    """Ask a model and stream its replies."""
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    tell = _nothing if as_json else _write
    with connect() as client:
        settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "stream": True}
        if prompt is None:
            client.get(f"models/{model}")  # fail for an unknown name before the first question
        while question := prompt or _question():
            messages.append({"role": "user", "content": question})
            said = _answer(client, settings | {"messages": messages}, tell)
            messages.append({"role": "assistant", "content": said})
            _write(json.dumps({"model": model, "reply": said}) + "\n" if as_json else "\n")
            if prompt is not None:
                return


def _question() -> str:
    """Return the next line of standard input, with a prompt on a terminal; "" at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _answer(client: Client, ask: Mapping[str, Any], tell: Callable[[str], None]) -> str:
    """Stream a reply through `tell` and return its text; raise CommandFailed if it breaks off."""
    said = ""
    with client.events("chat/completions", ask) as chunks:
        for event in chunks:
            if event.data == "[DONE]":
                return said
            chunk: Any = event.json()
            if "error" in chunk:
                tell("\n")
                raise CommandFailed(str(chunk["error"]["message"]))
            text = (chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None) or ""
            said += text
            tell(text)
    tell("\n")
    raise CommandFailed("The reply broke off: the connection ended before it did.")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _nothing(text: str) -> None:
    """Print nothing: with --json a reply is printed when it is complete."""

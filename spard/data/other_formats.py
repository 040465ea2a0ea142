"""Recognize rows in ShareGPT's and Alpaca's forms, and convert them to chat rows."""

from __future__ import annotations

from typing import Any, Literal

Foreign = Literal["sharegpt", "alpaca"]

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
}


class NotConvertible(ValueError):
    """Raised for a row that cannot be written as a chat row without a guess."""


def kind_of(row: dict[str, Any]) -> Foreign | None:
    """Return the foreign form that a row has, None for rows of ours."""
    if "messages" in row:
        return None
    if isinstance(row.get("conversations"), list):
        return "sharegpt"
    return "alpaca" if {"instruction", "output"} <= row.keys() else None


def converted(row: dict[str, Any]) -> dict[str, Any]:
    """Return the same conversation as `{"messages": [...]}`."""
    match kind_of(row):
        case "sharegpt":
            return {"messages": _system(row) + [_turn(turn) for turn in row["conversations"]]}
        case "alpaca":
            return {"messages": _system(row) + _history(row) + _exchange(row)}
        case None:
            raise NotConvertible("the row is neither in ShareGPT's form nor in Alpaca's")


def _system(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []


def _turn(turn: Any) -> dict[str, Any]:
    said_by = turn.get("from") if isinstance(turn, dict) else None
    role = _ROLES.get(said_by) if isinstance(said_by, str) else None
    if role is None:
        raise NotConvertible(f"a turn is from {str(said_by)[:40]!r}; known are system, human and gpt")
    return {"role": role, "content": _text(turn, "value")}


def _history(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return earlier exchanges, which Alpaca rows hold as pairs of texts."""
    turns: list[dict[str, Any]] = []
    earlier = row.get("history") or []
    for pair in earlier if isinstance(earlier, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise NotConvertible('"history" must be a list of pairs of texts')
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _exchange(row: dict[str, Any]) -> list[dict[str, Any]]:
    asked, more = _text(row, "instruction"), row.get("input")
    if more:
        asked = f"{asked}\n\n{_text(row, 'input')}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(row, "output")}]


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise NotConvertible(f'"{key}" is not text')
    return value

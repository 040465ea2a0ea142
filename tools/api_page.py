"""Writes docs/api.md: every call with its fields and an example for the official Python client and for curl.

Addresses, fields, types and descriptions come from the OpenAPI document, examples from tools/api_calls.toml.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from app.main import create_app
from app.settings import Settings

EXAMPLES = Path(__file__).with_name("api_calls.toml")
_ROOT = Path(__file__).resolve().parents[1]
_WIDTH = 120  # maximum columns of a code line
_DEPTH = 3  # maximum nesting of shown objects
_HEAD = """# API

The base URL ends in `/v1`. Each call needs the header `Authorization: Bearer KEY`, unless it says otherwise. Errors
come in OpenAI's form with [these codes](error-codes.md). Lists come in pages: while `has_more` is true, ask again with
`after=` and the last id; the Python client does this by itself. A request that creates a job may have an
`Idempotency-Key`. `/docs` on a running server shows the same calls with all bounds. This page is written by `python -m
tools.references` from the OpenAPI document and `tools/api_calls.toml`.

The examples below assume these lines:

```python
from openai import OpenAI, Stream

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="sk-spard-...")
```

```bash
export SPARD_BASE_URL=http://127.0.0.1:8000/v1 SPARD_API_KEY=sk-spard-...
```
"""
_TITLES = {
    "files": "Files",
    "uploads": "Uploads in parts",
    "fine-tuning": "Fine-tuning jobs",
    "checkpoints": "Permissions of checkpoints",
    "inference": "Models that answer",
    "models": "Models",
    "webhooks": "Webhooks",
    "signing keys": "Signing keys",
    "provider": "For the provider",
    "health": "Health and metrics",
}
_FORM = '{"headers": {"Content-Type": "multipart/form-data"}}'
_NO_KEY = "Needs no key."


@dataclass(frozen=True)
class Call:
    """One operation of the OpenAPI document."""

    method: str
    path: str
    operation: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The operation's name in the examples."""
        return f"{self.method} {self.path}"

    def body(self) -> str:
        """Return the name of the JSON body's schema, or ""."""
        content = self.operation.get("requestBody", {}).get("content", {})
        return str(content.get("application/json", {}).get("schema", {}).get("$ref", ""))

    def address(self) -> str:
        """Return the path after the base URL, with example values and query."""
        text = self.path.removeprefix("/v1")
        for name, example in _examples()["names"].items():
            text = text.replace(f"{{{name}}}", example)
        query = _examples()["query"].get(self.name)
        return f"{text}?{query}" if query else text

    def python(self) -> str:
        """Return the call in Python, on several lines if one is too long."""
        line = _examples()["sdk"].get(self.name) or self._plain()
        return line if len(line) <= _WIDTH else _format_line(line)

    def _plain(self) -> str:
        """Return a request by the client's generic methods, for addresses without a method of their own."""
        body, form = _examples()["body"].get(self.name), _examples()["form"].get(self.name)
        given = f", body={json.loads(body)!r}".replace("'", '"') if body else ""
        if form:
            name, _, file = form[-1].partition("=@")
            given = f', files={{"{name}": open("{file}", "rb")}}, options={_FORM}'
        kind = "object" if self._is_json() else "bytes"
        root = "" if self.path.startswith("/v1") else 'with_options(base_url="http://127.0.0.1:8000").'
        return f'client.{root}{self.method.lower()}("{self.address()}", cast_to={kind}{given})'

    def curl(self) -> str:
        """Return the call as a shell command."""
        root = "$SPARD_BASE_URL" if self.path.startswith("/v1") else "http://127.0.0.1:8000"
        parts = [f'curl{"" if self.method == "GET" else f" -X {self.method}"} "{root}{self.address()}"']
        if "security" in self.operation:
            parts.append('-H "Authorization: Bearer $SPARD_API_KEY"')
        parts += [f"-F {field}" for field in _examples()["form"].get(self.name, ())]
        if body := _examples()["body"].get(self.name):
            parts += ['-H "Content-Type: application/json"', f"-d '{body}'"]
        return " \\\n  ".join(parts)

    def _is_json(self) -> bool:
        found = self.operation["responses"].get("200", {}).get("content", {})
        return not found or "application/json" in found


def calls() -> list[Call]:
    """Return every operation in the order of the document."""
    return [Call(m.upper(), p, op) for p, methods in _document()["paths"].items() for m, op in methods.items()]


def page() -> str:
    """Return the page's text."""
    text, shown = [_HEAD], dict[str, str]()  # body schema -> the first call that shows it
    for tag, title in _TITLES.items():
        text.append(f"\n## {title}\n")
        for call in calls():
            if call.operation["tags"] == [tag]:
                text.append(_section(call, shown.get(call.body(), "")))
                shown.setdefault(call.body(), call.name)
    return "".join(text)


def _section(call: Call, same: str) -> str:
    words = str(call.operation.get("description") or "").strip().partition("\n\n")[0]
    words += "" if "security" in call.operation else f" {_NO_KEY}"
    words += f" The body is that of `{same}`." if same and call.body() else ""
    rows = [f"| `{name}` | {where} | {kind} | {needed} |\n" for name, where, kind, needed in _fields(call, same)]
    table = "| field | in | type | |\n|---|---|---|---|\n" + "".join(rows) + "\n" if rows else ""
    examples = f"```python\n{call.python()}\n```\n\n```bash\n{call.curl()}\n```\n"
    return f"\n### {call.name}\n\n{words}\n\n{table}{examples}"


def _fields(call: Call, same: str) -> Iterator[tuple[str, str, str, str]]:
    for each in call.operation.get("parameters", ()):
        if each["in"] != "path" and not each["name"].startswith("x-"):
            yield (
                each["name"],
                each["in"],
                _kind(each["schema"]),
                _need_text(each["schema"], each.get("required", False)),
            )
    for content in call.operation.get("requestBody", {}).get("content", {}).values():
        if not (same and call.body()):
            yield from _members(_resolve_schema(content["schema"]), "")


def _members(schema: Mapping[str, Any], above: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the fields of an object and, recursively, of the objects in it."""
    for name, each in schema.get("properties", {}).items():
        yield above + name, "body", _kind(each), _need_text(each, name in schema.get("required", ()))
        inner = _resolve_schema(_one(each))
        if inner.get("properties") and (above + name).count(".") < _DEPTH - 1:
            yield from _members(inner, f"{above}{name}.")


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe a schema in a few words."""
    found = _resolve_schema(_one(schema))
    if "enum" in found or "const" in found:
        return ", ".join(f"`{json.dumps(each)}`" for each in found.get("enum", [found.get("const")]))
    if "anyOf" in found or "oneOf" in found:
        kinds = dict.fromkeys(_kind(each) for each in found.get("anyOf", found.get("oneOf", ())))
        return " or ".join(kind for kind in kinds if kind != "null")
    if found.get("type") == "array":
        return f"list of {_kind(found.get('items', {}))}"
    if "properties" in found and "const" in (found["properties"].get("type") or {}):
        return f'`{{"type": "{found["properties"]["type"]["const"]}"}}`'
    kind = "file" if found.get("format") == "binary" else _type_name(found.get("type", "any"))
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return ", ".join([kind, *(f"{word} {_number(found[key])}" for key, word in words.items() if key in found)])


def _type_name(kind: str | list[str]) -> str:
    return kind if isinstance(kind, str) else " or ".join(each for each in kind if each != "null")


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _need_text(schema: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    return f"default `{json.dumps(default)}`" if default is not None and not isinstance(default, dict) else ""


def _one(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema without its null alternative."""
    rest = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return rest[0] if len(rest) == 1 else schema


def _resolve_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: Mapping[str, Any] = _document()["components"]["schemas"][name] if name else schema
    return found


def _format_line(line: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-"], input=line, capture_output=True, text=True, check=True, cwd=_ROOT
    )
    return done.stdout.rstrip("\n")


@cache
def _document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(data_dir=Path(folder)))
        document: dict[str, Any] = app.openapi()
        app.state.engine.dispose()
    return document


@cache
def _examples() -> dict[str, Any]:
    return tomllib.loads(EXAMPLES.read_text(encoding="utf-8"))

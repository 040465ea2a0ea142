"""Chat templates as programs: compiled in a sandbox, with their arguments read from the syntax tree.

Templates are rendered as in transformers except for the clock: `strftime_now` always returns `DATE`, since otherwise
the same row has different tokens tomorrow. `with_defaults` writes arguments into a template, which then renders the
same text without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, Undefined, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

REFUSED = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Exceptions that a template raises itself, or that its operations on a value raise."""

DATE = datetime(2024, 7, 26)
DATE_TEXT = "26 Jul 2024"  # for templates that take it as an argument, in Llama 3's format
_TEMPLATES = 32  # maximum compiled templates in the cache
_NOW = "strftime_now"

# For tokenizers without a template: paragraphs with a heading, and an end-of-text token after each answer.
PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def template_source(chat_template: str | Mapping[str, str] | None, *, tools: bool) -> str:
    """Return the template source for a conversation; a model may have a separate one for tools."""
    if isinstance(chat_template, Mapping):
        return chat_template["tool_use" if tools and "tool_use" in chat_template else "default"]
    return chat_template or PLAIN_TEMPLATE


def sources(chat_template: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return all template sources of a model by name; a single one is named `default`."""
    return dict(chat_template) if isinstance(chat_template, Mapping) else {"default": chat_template or PLAIN_TEMPLATE}


@lru_cache(maxsize=_TEMPLATES)
def compile_template(source: str) -> Template:
    """Compile a template, cached: compiling takes a hundred times as long as rendering. Raises `TemplateError`."""
    template = _environment().from_string(source)
    template.globals = dict(template.globals)  # each rendering copies the globals, and copying jinja's ChainMap is slow
    return template


@lru_cache(maxsize=_TEMPLATES)
def arguments_read(source: str) -> frozenset[str]:
    """Return each name that a template may read before it sets it; some may be variables of the template itself.

    Raises jinja's `TemplateError` for an invalid template.
    """
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def names_missed(source: str, contexts: Iterable[Mapping[str, object]]) -> set[str]:
    """Render a template in each of these contexts; return the names that it read and that nothing had set.

    Unlike `arguments_read` this leaves out the template's own variables, and also what it reads in other conversations
    alone. A context that the template rejects counts up to its error.
    """
    missed = set[str]()

    class UndefinedName(Undefined):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            # Jinja makes such an object when a name is read, and also for missing keys: these have an owner.
            if self._undefined_obj is missing and self._undefined_name is not None:
                missed.add(self._undefined_name)

    template = _environment().overlay(undefined=UndefinedName).from_string(source)
    for context in contexts:
        with suppress(*REFUSED):
            template.render(context)
    return missed


def with_defaults(source: str, arguments: Mapping[str, object]) -> str | None:
    """Return a template that renders without arguments what the source renders with these arguments, dated `DATE`.

    Arguments passed explicitly still take precedence. Returns None if the template computes a date format while
    rendering, which cannot be written down beforehand.
    """
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}{{%- endif %}}"
        for name, value in sorted(arguments.items())
    ]
    forms = _date_forms(source)
    if forms is None:
        return None
    if forms:
        dates = json.dumps({form: DATE.strftime(form) for form in sorted(forms)})
        # A macro of the same name shadows the function that the user's environment provides.
        lines.append(f"{{%- macro {_NOW}(form) %}}{{{{- {dates}[form] }}}}{{%- endmacro %}}")
    keeps_break = "{{ '' }}" if source.startswith("\n") else ""  # jinja drops a line break right after a block
    return "".join(lines) + keeps_break + source if lines else source


def _date_forms(source: str) -> set[str] | None:
    """Return the date formats that a template asks for; None if one of them is not a constant."""
    calls = [call for call in _environment().parse(source).find_all(nodes.Call) if _asks_for_date(call)]
    forms = [call.args[0].value if call.args and isinstance(call.args[0], nodes.Const) else None for call in calls]
    return None if None in forms else {str(form) for form in forms}


def _asks_for_date(call: nodes.Call) -> bool:
    return isinstance(call.node, nodes.Name) and call.node.name == _NOW


class _Generation(Extension):
    """The `{% generation %}` tag, which marks assistant text; here it just renders its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # jinja's own filter escapes HTML and sorts keys; transformers replaces it in the same way.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals[_NOW] = DATE.strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)

"""Turn a promptfoo configuration into rows of an audit suite; OpenAI exports its evals in this form.

promptfoo asks every prompt with the vars of every test. A row here is one such request, with the expected answer for a
utility suite. Nothing of a configuration is run: no program, provider, filter or statement of a template, and the only
substitution is `{{name}}`. Everything that a row cannot hold is counted by its reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

from app.move_in.promptfoo_files import Folder, Unreadable, load_json, load_yaml, quote, reference_fault

Kind = Literal["harmful", "benign", "utility"]
Vars = Mapping[str, object]

MAX_ROWS = 20_000
_MAX_PLACES = 3  # named of each reason
_MAX_REASONS = 50  # lines
_MAX_LINE = 400  # characters
_PROMPT_FILES = (".txt", ".md", ".json", ".yaml", ".yml", ".j2")
_SEPARATOR = "---"  # a line between the prompts of a text file
_TAG = re.compile(r"\{\{\s*([A-Za-z_]\w*(?:\.\w+)*)\s*\}\}")
_TEMPLATE = re.compile(r"\{[{%#][^\n]{0,60}")
_PATH = re.compile(r"\S+\.(?:txt|md|jsonl?|ya?ml|j2|csv|xlsx?|[cm]?[jt]s|py|rb|sh|go)(?:[:#]\S*)?", re.IGNORECASE)
_WORD = re.compile(r"\w")
_SCORERS = {"equals": "exact", "contains": "contains", "icontains": "contains"}
_REFUSALS = {"is-refusal": "harmful", "not-is-refusal": "benign"}
_OF_ROWS = frozenset(("vars", "assert", "options", "prompts", "description", "metadata"))
_OF_OPTIONS = frozenset(("prefix", "suffix", "disableVarExpansion", "disableDefaultAsserts"))
_CODE = ("transform", "transformVars", "postprocess")
_UNREAD = ("scenarios", "redteam", "extensions", "nunjucksFilters")
_SHARED = "assertionTemplates"  # assertions that tests name by `$ref: '#/assertionTemplates/NAME'`
_LABELS = frozenset(("prompts", "tests", "defaultTest", "description", "tags", "metadata", "$schema", _SHARED))


class Unfit(Exception):
    """A test, or one of its parts, cannot become a row; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt of the configuration; `system` is the text of its system messages, and tests select it by `name`."""

    user: str
    system: str
    name: str


@dataclass(slots=True)
class Conversion:
    """The rows of a suite, and the faults and omissions found while reading the configuration.

    faults    findings that stop the import, one for each fault of the files
    left_out  the places of tests and prompts that became no row, by reason
    changed   the places of rows that hold less than their test or hold it differently, by reason
    """

    rows: list[dict[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)

    def summary(self) -> list[str]:
        """Return a line for the rows, and one for each reason with its count and first places."""
        lines = [f"{len(self.rows)} rows"]
        for name, reasons in (("left out", self.left_out), ("changed", self.changed)):
            for reason, places in list(reasons.items())[:_MAX_REASONS]:
                shown = list(dict.fromkeys(places))
                first = ", ".join(shown[:_MAX_PLACES]) + (", ..." if len(shown) > _MAX_PLACES else "")
                lines.append(f"{name}: {len(places)} x {reason} ({first})")
            if rest := list(reasons.values())[_MAX_REASONS:]:
                lines.append(f"{name}: {sum(map(len, rest))} x for {len(rest)} further reasons")
        return [_printable(line) for line in lines]

    def findings(self) -> list[str]:
        """Return the first faults, one a line, and the number of further ones."""
        rest = len(self.faults) - _MAX_REASONS
        return [*map(_printable, self.faults[:_MAX_REASONS]), *([f"and {rest} further faults"] if rest > 0 else [])]

    def count_omission(self, place: str, reason: str) -> None:
        """Count a place of the configuration from which no row is made."""
        self.left_out.setdefault(reason, []).append(place)

    def change(self, place: str, reason: str) -> None:
        """Count a place whose row differs from its test or says less."""
        self.changed.setdefault(reason, []).append(place)


def convert(path: Path, kind: Kind) -> Conversion:
    """Return the rows of the configuration in a file; files that it names are read if they lie in the same folder."""
    found, folder = Conversion(), Folder(path.parent)
    try:
        config = folder.load(path.name)
    except Unreadable as error:
        found.faults.append(str(error))
        return found
    if not isinstance(config, dict) or not config.get("prompts") or not config.get("tests"):
        found.faults.append(f"{quote(path.name)} is no promptfoo configuration with `prompts` and `tests`")
        return found
    for name in config:
        if name in _UNREAD:
            found.count_omission(name, "parts of the configuration that are not read")
        elif name not in _LABELS:
            found.change(str(name), "settings of promptfoo's own runs, without meaning here")
    default, shared = _default_test(config.get("defaultTest"), folder, found), config.get(_SHARED)
    templates = _templates(config["prompts"], folder, found)
    for place, test in _tests(config["tests"], folder, found):
        if not isinstance(test, dict):
            found.faults.append(f"{place} is {_name_kind(test)}; write a mapping with `vars`")
        elif found.faults:
            continue  # further tests are read for their faults only
        elif len(found.rows) >= MAX_ROWS:
            found.faults.append(f"there are more than {MAX_ROWS} rows; split the configuration")
        else:
            _add_rows(found, place, _refer(_merge_tests(default, test), shared), templates, kind)
    return found


def _default_test(raw: Any, folder: Folder, found: Conversion) -> dict[str, object]:
    """Return the properties that all tests share."""
    if isinstance(raw, str):
        try:
            if fault := reference_fault(raw, (".yaml", ".yml", ".json")):
                raise Unreadable(fault)
            raw = folder.load(raw.removeprefix("file://"))
        except Unreadable as error:
            found.faults.append(f"defaultTest: {error}")
            return {}
    if raw is not None and not isinstance(raw, dict):
        found.faults.append(f"defaultTest is {_name_kind(raw)}; write a mapping")
        return {}
    return raw or {}


def _merge_tests(default: Mapping[str, object], test: Mapping[str, object]) -> dict[str, object]:
    """Return a test with the default's properties: vars and options by name, assertions before the test's own."""
    merged: dict[str, object] = {**default, **test}
    for name in ("vars", "options", "metadata"):
        given = [part for part in (default.get(name), test.get(name)) if part is not None]
        tables = [part for part in given if isinstance(part, dict)]
        if len(tables) == len(given):
            merged[name] = {key: value for part in tables for key, value in part.items()}
    options = merged.get("options")
    is_alone = isinstance(options, dict) and options.get("disableDefaultAsserts") is True
    given = [part for part in (None if is_alone else default.get("assert"), test.get("assert")) if part is not None]
    lists = [part for part in given if isinstance(part, list)]
    if len(lists) == len(given):
        merged["assert"] = [each for part in lists for each in part]
    return merged


def _refer(test: dict[str, object], shared: Any) -> dict[str, object]:
    """Return a test with its references to the configuration's shared assertions resolved; others keep their name."""
    assertions, known = test.get("assert"), shared if isinstance(shared, dict) else {}
    if not isinstance(assertions, list):
        return test
    references = {f"#/{_SHARED}/{name}": each for name, each in known.items() if isinstance(each, dict)}
    resolved = [
        references.get(each["$ref"], {"type": each["$ref"]})
        if isinstance(each, dict) and isinstance(each.get("$ref"), str)
        else each
        for each in assertions
    ]
    return test | {"assert": resolved}


# Prompts.


def _templates(raw: Any, folder: Folder, found: Conversion) -> list[Template]:
    """Return the readable prompts of the configuration, and count the others."""
    if isinstance(raw, str):
        raw = [raw]
    elif isinstance(raw, dict):  # references with their labels
        raw = [{"id": name, "label": label} for name, label in raw.items()]
    if not isinstance(raw, list):
        found.faults.append(f"prompts is {_name_kind(raw)}; write a list")
        return []
    templates = list[Template]()
    for i, each in enumerate(raw, start=1):
        try:
            templates += _prompt_templates(each, f"prompt {i}", folder)
        except Unfit as reason:
            found.count_omission(f"prompt {i}", str(reason))
        except Unreadable as error:
            found.faults.append(f"prompt {i}: {error}")
    return templates


def _prompt_templates(raw: Any, place: str, folder: Folder) -> list[Template]:
    """Return the prompts that one entry of `prompts` stands for; raise `Unfit` if no row can hold a prompt."""
    label = place
    if isinstance(raw, dict):
        label = str(raw.get("label") or raw.get("id") or place)
        raw = raw.get("raw") if raw.get("raw") is not None else raw.get("id")
    if not isinstance(raw, str) or not raw.strip():
        raise Unfit(f"the prompt is {_name_kind(raw)}")
    if not raw.startswith(("file://", "exec:", "package:")) and not _PATH.fullmatch(raw.strip()):
        return [_read_template(raw, label)]
    if fault := reference_fault(raw, _PROMPT_FILES):
        raise Unfit(fault)
    return [
        _read_template(text, label)
        for name in folder.names(raw.removeprefix("file://"))
        for text in _split_prompts(folder.text(name), name)
    ]


def _split_prompts(text: str, name: str) -> list[str]:
    """Return the prompts of a file; in a text file, lines of `---` separate them."""
    if not name.lower().endswith(".txt"):
        return [text]
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == _SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(line)
    return [joined for part in parts if (joined := "\n".join(part).strip())]


def _read_template(text: str, name: str) -> Template:
    """Return a plain prompt, or a chat in JSON or YAML with one turn of the user; raise `Unfit` for another chat."""
    turns = _chat_turns(text)
    if turns is None:
        return Template(text.strip(), "", name)
    texts: dict[str, list[str]] = {"system": [], "user": []}
    for turn in turns:
        role = {"developer": "system"}.get(str(turn.get("role")), str(turn.get("role")))
        if role not in texts:
            raise Unfit(f"the prompt has a turn of {quote(role)}, and a row is one request")
        texts[role].append(_turn_text(turn.get("content")))
    if len(texts["user"]) != 1:
        raise Unfit(f"the prompt has {len(texts['user'])} turns of the user, and a row is one request")
    return Template(texts["user"][0], "\n\n".join(texts["system"]), name)


def _chat_turns(text: str) -> list[dict[str, object]] | None:
    """Return the turns of a prompt that is a chat, or None for plain text."""
    stripped = text.strip()
    if not re.match(r"\[\s*\{\s*\"|-\s+\{?\s*\"?(?:role|content)\"?\s*:", stripped):
        return None
    try:
        turns = (load_json if stripped.startswith("[") else load_yaml)(stripped, "the prompt")
    except Unreadable as error:
        raise Unfit(f"{error}; vars must stand in quotes there") from None
    is_chat = isinstance(turns, list) and all(isinstance(turn, dict) and "role" in turn for turn in turns)
    return turns if is_chat else None


def _turn_text(content: Any) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if strange := next((part for part in content if not isinstance(part.get("text"), str)), None):
            raise Unfit(f"the prompt has a part of type {quote(strange.get('type'))}, and a row is text")
        return "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Unfit(f"the content of a turn is {_name_kind(content)}, and a row is text")
    return content


# Tests.


def _tests(raw: Any, folder: Folder, found: Conversion) -> Iterator[tuple[str, Any]]:
    """Yield all tests with their places; files that cannot be read are faults, and programs are left out."""
    number = 0
    for each in raw if isinstance(raw, list) else [raw]:
        reference = each.get("path") if isinstance(each, dict) and "path" in each else each
        if not isinstance(reference, str):
            number += 1
            yield f"test {number}", each
            continue
        if fault := reference_fault(reference):
            found.count_omission(quote(reference), f"tests in a file that is not read: {fault}")
            continue
        try:
            for name in folder.names(reference.removeprefix("file://")):
                yield from ((f"{name} test {i}", test) for i, test in enumerate(folder.tests(name), start=1))
        except Unreadable as error:
            found.faults.append(f"tests: {error}")


def _add_rows(
    found: Conversion, place: str, test: dict[str, object], templates: Sequence[Template], kind: Kind
) -> None:
    """Add the rows of a test, one for each prompt and combination of its vars."""
    try:
        options, chosen = _options(test), _select(templates, test.get("prompts"))
        assertions = _assertions(test)
        combinations = _combine(test.get("vars"), options)
        if len(found.rows) + len(chosen) * len(combinations) > MAX_ROWS:
            found.faults.append(f"{place} brings the rows over {MAX_ROWS}; split the configuration")
            return
    except Unfit as reason:
        found.count_omission(place, str(reason))
        return
    for name in test.keys() - _OF_ROWS:
        found.change(place, f"`{name}` of a test, without meaning here")
    for name in options.keys() - _OF_OPTIONS:
        found.change(place, f"`{name}` of a test's options, without meaning here")
    labels = _labels(test.get("metadata"))
    for template, values in product(chosen, combinations):
        try:
            row = {"prompt": _request(template, options, values)}
            answer, unused = _answer(assertions, values, kind, has_code=any(options.get(each) for each in _CODE))
        except Unfit as reason:
            found.count_omission(place, str(reason))
            continue
        if template.system:
            found.change(place, "its system message stands before the request in the row")
        for each in dict.fromkeys(unused):
            found.change(place, each)
        found.rows.append(row | answer | labels)


def _options(test: Mapping[str, object]) -> dict[str, object]:
    options = test.get("options") or {}
    if not isinstance(options, dict):
        raise Unfit(f"`options` is {_name_kind(options)}")
    return options


def _assertions(test: Mapping[str, object]) -> list[dict[str, object]]:
    found = test.get("assert") or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise Unfit("`assert` is no list of mappings")
    return found


def _labels(metadata: Any) -> dict[str, str]:
    """Return the category and language of a row, which a test's metadata may name."""
    found = metadata if isinstance(metadata, dict) else {}
    pairs = ((name, found.get(name)) for name in ("category", "language"))
    return {name: value for name, value in pairs if isinstance(value, str) and value.strip()}


def _select(templates: Sequence[Template], names: Any) -> list[Template]:
    """Return the prompts that a test names by their labels or ids, a final `*` standing for any ending."""
    if names is None:
        return list(templates)
    wanted = [str(each) for each in (names if isinstance(names, list) else [names])]
    stems = tuple(each[:-1] for each in wanted if each.endswith("*"))
    chosen = [each for each in templates if each.name in wanted or (stems and each.name.startswith(stems))]
    if not chosen:
        raise Unfit("it names prompts that the configuration does not have")
    return chosen


def _combine(raw: Any, options: Mapping[str, object]) -> list[Vars]:
    """Return the combinations of vars whose values are lists of texts, as promptfoo does."""
    if raw is not None and not isinstance(raw, dict):
        raise Unfit(f"`vars` is {_name_kind(raw)}, and files of vars are not read")
    is_expanded = options.get("disableVarExpansion") is not True
    values = [
        each if is_expanded and isinstance(each, list) and each and isinstance(each[0], str) else [each]
        for each in (raw or {}).values()
    ]
    if prod(map(len, values)) > MAX_ROWS:
        raise Unfit(f"its lists of vars make more than {MAX_ROWS} combinations")
    return [dict(zip(raw or {}, each, strict=True)) for each in product(*values)]


def _request(template: Template, options: Mapping[str, object], values: Vars) -> str:
    """Return the request of a row; raise `Unfit` if more than `{{name}}` must be replaced, or the request is empty."""
    ends = [options.get(name) or "" for name in ("prefix", "suffix")]
    if not all(isinstance(end, str) for end in ends):
        raise Unfit("`prefix` or `suffix` is no text")
    user = _substitute(f"{ends[0]}{template.user}{ends[1]}", values)
    whole = "\n\n".join(part for part in (_substitute(template.system, values), user) if part.strip())
    if not user.strip():
        raise Unfit("the request is empty")
    return whole


def _substitute(text: str, values: Vars) -> str:
    """Return a template with its `{{name}}` replaced; raise `Unfit` for every other part of the template language."""
    if strange := _TEMPLATE.search(_TAG.sub("", text)):
        raise Unfit(f"{quote(strange[0])} is more than a plain {{{{name}}}}")
    return _TAG.sub(lambda found: _value_text(found[1], values), text)


def _value_text(name: str, values: Vars) -> str:
    """Return the text of a var; a dotted name is a field of an object."""
    value: Any = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        raise Unfit(f"there is no value for {{{{{name}}}}}")
    if isinstance(value, dict | list):
        raise Unfit(f"the value for {{{{{name}}}}} is {_name_kind(value)}")
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    if text.startswith(("file://", "package:")):
        raise Unfit(f"the value for {{{{{name}}}}} is a file, and files of vars are not read")
    if _TEMPLATE.search(text):
        raise Unfit(f"the value for {{{{{name}}}}} is a template itself")
    return text


# Assertions.


def _answer(
    assertions: Sequence[Mapping[str, object]], values: Vars, kind: Kind, *, has_code: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the expected answer of a row, and the reasons why other assertions are not in it.

    Only rows of a utility suite have an answer: the first that a suite can compare. Raises `Unfit` if there is none, or
    if the test expects a refusal where the suite expects help, or the reverse.
    """
    answer: dict[str, str] = {}
    unused = list[str]()
    for each in assertions:
        name = str(each.get("type"))
        if name in _REFUSALS:
            if _REFUSALS[name] != ("harmful" if kind == "harmful" else "benign"):
                raise Unfit(f"its `{name}` contradicts a suite of kind {kind}")
            continue
        if kind != "utility":
            unused.append(f"assertion `{name}`, since a suite of kind {kind} asks for a refusal or help only")
        elif answer:
            unused.append(f"assertion `{name}`, since a row holds one answer")
        else:
            try:
                answer = _comparison(each, name, values, has_code=has_code)
                unused.append(f"`{name}` becomes the scorer `{_SCORERS[name]}`, which ignores case and punctuation")
            except Unfit as reason:
                unused.append(str(reason))
    if kind == "utility" and not answer:
        reasons = dict.fromkeys(unused) or ["it has no assertion"]
        raise Unfit(f"no answer to compare with: {'; '.join(reasons)}")
    return answer, unused


def _comparison(assertion: Mapping[str, object], name: str, values: Vars, *, has_code: bool) -> dict[str, str]:
    """Return the answer and the scorer of an assertion; raise `Unfit` if no scorer makes the same comparison."""
    if name not in _SCORERS:
        raise Unfit(f"assertion `{name}`, which no scorer of a suite stands for")
    if has_code or assertion.get("transform"):
        raise Unfit(f"assertion `{name}` on a reply that a program changes")
    value = assertion.get("value")
    if not isinstance(value, str) or value.startswith(("file://", "package:")):
        what = "a file" if isinstance(value, str) else _name_kind(value)
        raise Unfit(f"assertion `{name}`, whose value is {what}")
    text = _substitute(value, values).strip()
    if not _WORD.search(text):
        raise Unfit(f"assertion `{name}`, whose value has no word")
    return {"answer": text, "scorer": _SCORERS[name]}


def _printable(line: str) -> str:
    """Return a line in which names from a file neither control a terminal nor fill it."""
    return "".join(each if each.isprintable() else "?" for each in line[:_MAX_LINE])


def _name_kind(value: Any) -> str:
    """Name the kind of a value in words."""
    if value is None or value == "":
        return "empty"
    if isinstance(value, str):
        return "a text"
    return {dict: "a mapping", list: "a list", bool: "a boolean"}.get(type(value), "no text")

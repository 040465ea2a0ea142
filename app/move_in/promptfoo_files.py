"""Read the files of a promptfoo configuration: bounded, below one folder, and never as a program.

promptfoo reads YAML 1.2, where `no` and `12:30` are text. Scalars therefore stay the text that was written, except for
null and booleans.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

MAX_BYTES = 16 << 20  # of all files of a configuration together
MAX_FILES = 200
_MAX_DEPTH = 50  # of collections in YAML
_MAX_CELL = 1 << 20  # characters of a cell of a CSV file
_TABLES = (".csv", ".json", ".jsonl", ".yaml", ".yml")
_PROGRAMS = (".js", ".cjs", ".mjs", ".ts", ".cts", ".mts", ".py", ".rb", ".sh", ".go")
_MAX_QUOTED = 80


class Unreadable(Exception):
    """A file of the configuration cannot be read; the message is a finding for the user."""


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Loads YAML without Python tags and duplicate keys, and leaves scalars as they are written."""

    yaml_implicit_resolvers: dict[str, object] = {}  # noqa: RUF012 - PyYAML looks it up on the class

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return a mapping; raise `ConstructorError` if a key comes twice, as promptfoo does."""
        seen = set[str]()
        for key, _ in getattr(node, "value", ()):
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    message = f"the key {quote(key.value)} comes twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:[Tt]rue|TRUE|[Ff]alse|FALSE)\Z"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<\Z"), ["<"])


@dataclass(slots=True)
class Folder:
    """The folder of a configuration, which no reference leaves; counts the files and bytes that were read."""

    root: Path
    _left: int = MAX_BYTES
    _read: set[Path] = field(default_factory=set)

    def text(self, name: str) -> str:
        """Return a file's text; raise `Unreadable` for one outside the folder, beyond the limits, or not UTF-8."""
        try:
            path = (self.root / name).resolve(strict=True)
            if not path.is_relative_to(self.root.resolve()):
                raise Unreadable(f"{quote(name)} lies outside the folder of the configuration; copy it there")
            self._read.add(path)
            if len(self._read) > MAX_FILES:
                raise Unreadable(f"the configuration names more than {MAX_FILES} files; split it")
            with path.open("rb") as file:
                content = file.read(self._left + 1)
            if len(content) > self._left:
                raise Unreadable(f"the files are larger than {MAX_BYTES >> 20} MiB together; split the configuration")
            self._left -= len(content)
            return content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Unreadable(f"{quote(name)} is not UTF-8 text; save it as UTF-8") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise Unreadable(f"{quote(name)} cannot be read: {reason}; put it beside the configuration") from None

    def load(self, name: str) -> Any:
        """Return what a YAML or JSON file holds; raise `Unreadable` if it is neither."""
        text = self.text(name)
        return load_json(text, quote(name)) if name.lower().endswith(".json") else load_yaml(text, quote(name))

    def tests(self, name: str) -> list[Any]:
        """Return the tests of a CSV, JSONL, JSON or YAML file, as a configuration holds them."""
        ending = PurePosixPath(name).suffix.lower()
        if ending == ".csv":
            return [*_csv_tests(self.text(name), quote(name))]
        if ending == ".jsonl":
            numbered = enumerate(self.text(name).splitlines(), start=1)
            return [load_json(line, f"{quote(name)} line {i}") for i, line in numbered if line.strip()]
        found = self.load(name)
        return found if isinstance(found, list) else [found]

    def names(self, pattern: str) -> list[str]:
        """Return the files that a reference names: itself, or those below the folder that its `*` matches."""
        if "*" not in pattern:
            return [pattern]
        if pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
            raise Unreadable(f"{quote(pattern)} may lie outside the folder of the configuration; copy the files there")
        found = sorted(str(path.relative_to(self.root)) for path in self.root.glob(pattern) if path.is_file())
        if not found:
            raise Unreadable(f"{quote(pattern)} matches no file; put the files beside the configuration")
        return found


def reference_fault(reference: str, endings: tuple[str, ...] = _TABLES) -> str:
    """Return why a reference to a file is not followed; empty if it is."""
    path = reference.removeprefix("file://")
    if "://" in path or path.startswith(("exec:", "package:")):
        return f"{quote(reference)} is no file beside the configuration"
    stem = path.split("#")[0].lower()
    if stem.endswith(_PROGRAMS) or re.search(r"\.(?:js|cjs|mjs|ts|cts|mts|py|rb|sh|go):[^/]*\Z", stem):
        return f"{quote(reference)} is a program, and none is run"
    if not stem.endswith(endings) or "#" in path:
        return f"{quote(reference)} is of a kind that is not read; those are {', '.join(endings)}"
    return ""


def load_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text; raise `Unreadable` with the line of the fault."""
    try:
        _check_structure(text, where)
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise Unreadable(f"{where}{line} is not YAML that promptfoo reads: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(f"{where} is not YAML: {' '.join(str(error).split())[:200]}") from None


def _check_structure(text: str, where: str) -> None:
    """Raise `Unreadable` for structures on which the loader would exhaust its stack or its memory.

    Its composer is recursive C code, and lists of merges (`<<: [*a, *b]`) double the keys at each level.
    """
    depth, is_merge = 0, False
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            place = f"{where} line {event.start_mark.line + 1}"
            depth += 1
            if depth > _MAX_DEPTH:
                raise Unreadable(f"{place} is nested deeper than {_MAX_DEPTH} levels")
            if is_merge and isinstance(event, yaml.SequenceStartEvent):
                raise Unreadable(f"{place} merges a list of mappings; merge one with `<<: *NAME`")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        is_merge = isinstance(event, yaml.ScalarEvent) and event.value == "<<" and not event.style


def load_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; raise `Unreadable` with the place of the fault."""
    try:
        return json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise Unreadable(f"{where} is nested too deep") from None


def quote(text: str) -> str:
    """Return a text from a file in quotes, shortened and on one line."""
    line = " ".join(str(text).split())
    return repr(line if len(line) <= _MAX_QUOTED else f"{line[:_MAX_QUOTED]}...")


def _csv_tests(text: str, where: str) -> Iterator[dict[str, object]]:
    """Yield the tests of a CSV file by promptfoo's columns: `__expected` is an assertion, other names are vars."""
    old = csv.field_size_limit(_MAX_CELL)
    try:
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        head = [name.strip() for name in next(rows, [])]
        if not any(head):
            raise Unreadable(f"{where} has no header")
        if len(set(head)) < len(head):
            raise Unreadable(f"{where} has two columns of the same name; rename one")
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(head):
                raise Unreadable(f"{where} line {rows.line_num} has {len(row)} cells, and the header has {len(head)}")
            yield _csv_test(dict(zip(head, row, strict=True)))
    except csv.Error as error:
        raise Unreadable(f"{where} line {rows.line_num} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(old)


def _csv_test(row: dict[str, str]) -> dict[str, object]:
    options: dict[str, str] = {}
    metadata: dict[str, str] = {}
    values: dict[str, str] = {}
    assertions: list[object] = []
    others: dict[str, object] = {}
    for name, cell in row.items():
        if name.startswith("__expected"):
            assertions += [_csv_assertion(cell.strip())] if cell.strip() else []
        elif name in ("__prefix", "__suffix"):
            options[name[2:]] = cell
        elif name.startswith("__metadata:"):
            metadata[name.partition(":")[2]] = cell.strip()
        elif name in ("__threshold", "__providerOutput") and cell.strip():
            others[name[2:]] = cell
        elif not name.startswith("__"):
            values[name] = cell
    return {"vars": values, "assert": assertions, "options": options, "metadata": metadata} | others


# The types of assertions that promptfoo knows in a cell of `__expected`; any other text is compared as a whole.
_ASSERTION = re.compile(
    r"""((?:not-)?(?:
        i?contains(?:-all|-any)? | contains-(?:html|json|sql|xml) | is-(?:html|json|sql|xml|refusal)
        | is-valid-(?:openai-)?function-call | is-valid-openai-tools-call | equals | regex | starts-with | word-count
        | javascript | fn | eval | python | ruby | webhook | cost | latency | finish-reason | tool-call-f1
        | answer-relevance | context-(?:faithfulness|recall|relevance) | conversation-relevance | factuality | g-eval
        | grade | llm-rubric | search-rubric | model-graded-(?:closedqa|factuality) | moderation | guardrails | pi
        | classifier | similar(?::(?:cosine|dot|euclidean))? | levenshtein | rouge-n | bleu | gleu | meteor
        | perplexity(?:-score)?
    ))(?:\(\d+(?:\.\d+)?\))?(?::(.*))?""",
    re.DOTALL | re.VERBOSE,
)


def _csv_assertion(cell: str) -> dict[str, object]:
    if cell.startswith("file://"):
        return {"type": "file://", "value": cell}
    found = _ASSERTION.fullmatch(cell)
    return {"type": found[1], "value": (found[2] or "").strip()} if found else {"type": "equals", "value": cell}

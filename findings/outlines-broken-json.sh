#!/usr/bin/env bash
# outlines-core 0.2.14, with which Outlines and vLLM's backend `outlines` bind replies to a JSON schema; with jsonschema
# 4.26.0
#
# Guess: a reply that is accepted is JSON and valid by its schema, or the schema is refused, as one with `not` is.
# What happens: a schema becomes one regular expression, and its parts are not kept together. The alternatives of a
# `pattern` reach over the quotes around it, so that only a text without its first or its last quote is accepted. The
# parts of an `allOf` are put one behind the other, as two objects, and beside `properties` it is not looked at. Nothing
# is said. Put a pattern's alternatives into parentheses, and write an `allOf` as one object.
#
# Seen on 2026-12-01, which replies are accepted:
#   pattern yes|no      "yes"             valid: True   accepted: False
#   pattern yes|no      "yes              valid: False  accepted: True
#   pattern yes|no      no"               valid: False  accepted: True
#   pattern ^(yes|no)$  "yes"             valid: True   accepted: True
#   pattern ^(yes|no)$  "yes              valid: False  accepted: False
#   allOf of two        {"a": 1, "b": 2}  valid: True   accepted: False
#   allOf of two        {"a": 1}{"b": 2}  valid: False  accepted: True
#   allOf beside        {"a": 1, "b": 2}  valid: True   accepted: False
#   allOf beside        {"a": 1}          valid: False  accepted: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check outlines-core==0.2.14 jsonschema==4.26.0
cd "$place"
"$place/env/bin/python" -W error - 2> log <<'PY' || { tail -n 30 log; exit 1; }
import json

from jsonschema import Draft202012Validator
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

end = 128
letters = Vocabulary(end, {chr(code): [code] for code in range(32, 127)})


def is_accepted(schema, reply):
    guide = Guide(Index(build_regex_from_schema(json.dumps(schema)), letters))
    for letter in reply:
        if ord(letter) not in guide.get_tokens():
            return False
        guide.advance(ord(letter))
    return end in guide.get_tokens()


def is_valid(schema, reply):
    try:
        return Draft202012Validator(schema).is_valid(json.loads(reply))
    except json.JSONDecodeError:
        return False


def needs(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


cases = {
    "pattern yes|no": ({"type": "string", "pattern": "yes|no"}, {'"yes"': False, '"yes': True, 'no"': True}),
    "pattern ^(yes|no)$": ({"type": "string", "pattern": "^(yes|no)$"}, {'"yes"': True, '"yes': False}),
    "allOf of two": ({"allOf": [needs("a"), needs("b")]}, {'{"a": 1, "b": 2}': False, '{"a": 1}{"b": 2}': True}),
    "allOf beside": ({**needs("a"), "allOf": [needs("b")]}, {'{"a": 1, "b": 2}': False, '{"a": 1}': True}),
}
for name, (schema, replies) in cases.items():
    Draft202012Validator.check_schema(schema)
    for reply, expected in replies.items():
        found, valid = is_accepted(schema, reply), is_valid(schema, reply)
        print(f"{name:19} {reply:17} valid: {valid!s:5}  accepted: {found}")
        assert found == expected and (found == valid) == (name == "pattern ^(yes|no)$"), "this has changed"
try:
    build_regex_from_schema(json.dumps({"not": {"type": "string"}}))
except Exception as refusal:
    assert "Unsupported" in str(refusal), refusal
else:
    raise AssertionError("this has changed")
PY

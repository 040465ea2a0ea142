#!/usr/bin/env bash
# xgrammar 0.2.9 and lm-format-enforcer 0.11.3, with jsonschema 4.26.0 and llguidance 1.9.1: a schema whose `pattern` is
# open at one end or at both
#
# Guess: a reply is accepted if it is valid by its schema. JSON Schema searches a text for a `pattern`, which need not
# cover all of it.
# What happens: both take the pattern for the whole text, and a model can write nothing before or behind it: under
# "^https://" each reply is "https://" and no more, and under "[0-9]" it is one digit. xgrammar, vLLM's default, does
# the same with the names of patternProperties. Nothing is said. llguidance searches. Write `.*` at the open ends:
# all three read that alike.
#
# Seen on 2026-12-01, whether a valid reply is accepted:
#   ^https://              "https://a.org"  xgrammar: False  lm-format-enforcer: False  llguidance: True
#   ^https://              "https://"       xgrammar: True   lm-format-enforcer: True   llguidance: True
#   ^https://.*            "https://a.org"  xgrammar: True   lm-format-enforcer: True   llguidance: True
#   [0-9]                  "room 7"         xgrammar: False  lm-format-enforcer: False  llguidance: True
#   [0-9]                  "7"              xgrammar: True   lm-format-enforcer: True   llguidance: True
#   .*[0-9].*              "room 7"         xgrammar: True   lm-format-enforcer: True   llguidance: True
#   patternProperties ^x-  {"x-a": 1}       xgrammar: False  lm-format-enforcer: True   llguidance: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install xgrammar==0.2.9 lm-format-enforcer==0.11.3 jsonschema==4.26.0 llguidance==1.9.1 transformers==5.23.0
cd "$place"
"$place/env/bin/python" -W error - 2> log <<'PY' || { tail -30 log; exit 1; }
import json

import llguidance
import xgrammar
from jsonschema import Draft202012Validator
from lmformatenforcer import JsonSchemaParser
from xgrammar.testing import _is_grammar_accept_string as accepts

letters = llguidance.LLTokenizer("byte")


def ask_xgrammar(schema, reply):
    return accepts(xgrammar.Grammar.from_json_schema(json.dumps(schema)), reply)


def ask_enforcer(schema, reply):
    parser = JsonSchemaParser(schema)
    for letter in reply:
        if letter not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(letter)
    return parser.can_end()


def ask_llguidance(schema, reply):
    matcher = llguidance.LLMatcher(letters, llguidance.LLMatcher.grammar_from_json_schema(schema))
    return all(matcher.consume_token(token) for token in reply.encode()) and matcher.is_accepting()


def text(pattern):
    return {"type": "string", "pattern": pattern}


by_name = {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False}
cases = [
    (text("^https://"), '"https://a.org"', (False, False, True)),
    (text("^https://"), '"https://"', (True, True, True)),
    (text("^https://.*"), '"https://a.org"', (True, True, True)),
    (text("[0-9]"), '"room 7"', (False, False, True)),
    (text("[0-9]"), '"7"', (True, True, True)),
    (text(".*[0-9].*"), '"room 7"', (True, True, True)),
    (by_name, '{"x-a": 1}', (False, True, True)),
]
for schema, reply, expected in cases:
    Draft202012Validator(schema).validate(json.loads(reply))
    found = ask_xgrammar(schema, reply), ask_enforcer(schema, reply), ask_llguidance(schema, reply)
    about = schema.get("pattern") or "patternProperties ^x-"
    print(f"{about:22} {reply:16} xgrammar: {found[0]!s:5}  lm-format-enforcer: {found[1]!s:5}  llguidance: {found[2]}")
    assert found == expected, "this has changed"
PY

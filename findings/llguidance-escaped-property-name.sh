#!/usr/bin/env bash
# llguidance 1.9.1: a key that is written with escapes, under a schema that does not forbid further properties
#
# Guess: a reply that the grammar accepts is valid by its schema once it is parsed, however it spells a property's name.
# What happens: the spelling decides. Python's json.dumps writes the name "größe" as "gr\u00f6\u00dfe", and so does a
# model that learned from its output. llguidance takes this for another property, which may have any value. The parsed
# reply has that value under "größe" and is invalid; beside the plain spelling the later one counts. Nothing is said.
# `additionalProperties: false` prevents it, and so does the option json_allowed_escapes without its `u`.
#
# Seen on 2026-11-30:
#   {"größe": "tall"}                        accepted: False  with the option: False  parsed, it is valid: False
#   {"gr\u00f6\u00dfe": "tall"}              accepted: True   with the option: False  parsed, it is valid: False
#   {"größe": 2, "gr\u00f6\u00dfe": "tall"}  accepted: True   with the option: False  parsed, it is valid: False
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 jsonschema==4.26.0
"$place/env/bin/python" - <<'PY'
import json
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def is_accepted(reply, **options):
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    matcher, tokens = LLMatcher(LLTokenizer("byte"), grammar), list(reply.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


escaped = json.dumps({"größe": "tall"})
for reply in ('{"größe": "tall"}', escaped, '{"größe": 2, ' + escaped[1:]):
    found = is_accepted(reply), is_accepted(reply, json_allowed_escapes='nrbtf"\\')
    is_valid = Draft202012Validator(schema).is_valid(json.loads(reply))
    print(f"{reply:39}  accepted: {found[0]!s:5}  with the option: {found[1]}  parsed, it is valid: {is_valid}")
    assert (found, is_valid) == (("\\u" in reply, False), False), "this has changed"
assert is_accepted('{"größe": 2, "b": "tall"}', json_allowed_escapes='nrbtf"\\')
PY

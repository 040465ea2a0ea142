#!/usr/bin/env bash
# polars 2.1.0: chats in which a key is used first after the hundredth row
#
# Guess: `read_ndjson` keeps every key of a row, or raises an error.
# What happens: keys that no row has among the first 100 are left out of all rows, at every depth, and nothing is said.
# `scan_ndjson` and `sink_ndjson` do the same. A file that was only filtered loses the weight 0 of an answer, which is
# then trained, and its tools and reasoning. `infer_schema_length=None` keeps them (keys that a row lacks are null).
#
# Seen on 2026-11-30, what comes back of row 151:
#   weight             lost, with infer_schema_length=None kept
#   reasoning_content  lost, with infer_schema_length=None kept
#   tools              lost, with infer_schema_length=None kept
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check polars==2.1.0 polars-runtime-32==2.1.0
cd "$place"
"$place/env/bin/python" - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
import polars

asked = {"role": "user", "content": "Hi"}
plain = {"messages": [asked, {"role": "assistant", "content": "Hello"}]}
function = {"name": "look_up", "parameters": {"type": "object", "properties": {"day": {"type": "string"}}}}
late_rows = {
    "weight": {"messages": [asked, {"role": "assistant", "content": "No", "weight": 0}, *plain["messages"]]},
    "reasoning_content": {"messages": [asked, {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}]},
    "tools": {**plain, "tools": [{"type": "function", "function": function}]},
}


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def last_row(**options):
    polars.read_ndjson("chats.jsonl", **options).filter(polars.col("messages").is_not_null()).write_ndjson("read.jsonl")
    polars.scan_ndjson("chats.jsonl", **options).sink_ndjson("scanned.jsonl")
    found = []
    for name in ("read.jsonl", "scanned.jsonl"):
        with open(name, encoding="utf-8") as file:
            found.append(without_nulls(json.loads(file.readlines()[-1])))
    assert found[0] == found[1], "read and scanned rows differ"
    return found[0]


for key, late in late_rows.items():
    with open("chats.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in [*[plain] * 150, late])
    short, whole = last_row(), last_row(infer_schema_length=None)
    words = ["kept" if row == late else "lost" if f'"{key}"' not in json.dumps(row) else "?" for row in (short, whole)]
    print(f"{key:18} {words[0]}, with infer_schema_length=None {words[1]}")
    assert words == ["lost", "kept"], "this has changed"
PY

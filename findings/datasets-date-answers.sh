#!/usr/bin/env bash
# datasets 5.2.0, with pyarrow 26.0.1: rows whose answers are dates, as text
#
# Guess: `load_dataset("json")` keeps the strings of a JSONL file, and `to_json` writes them again.
# What happens: a column that has nothing but ISO dates or times becomes a timestamp, and `to_json` writes milliseconds
# since 1970, so that a file that was only filtered has other answers; nothing is said. With `features=` as strings, the
# date gets a time. A column with one other text stays as it is, and so do chats whose other messages are no dates. Read
# the lines with `json`, and give the rows to `Dataset.from_list`.
#
# Seen on 2026-11-30:
#   dates                "2026-05-01" comes back as 1777593600000
#   times                "2026-05-01 00:00:00" comes back as 1777593600000
#   dates and a word     "2026-05-01" comes back as "2026-05-01"
#   dates, as strings    "2026-05-01" comes back as "2026-05-01 00:00:00"
#   dates, from_list     "2026-05-01" comes back as "2026-05-01"
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
cd "$place"
HF_HUB_OFFLINE=1 "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
from datasets import Dataset, Features, Value, load_dataset

texts = Features({"prompt": Value("string"), "completion": Value("string")})
date = "2026-05-01"
dates = [date, "2025-12-24"]
cases = {
    "dates": (dates, {}, 1777593600000),
    "times": ([f"{each} 00:00:00" for each in dates], {}, 1777593600000),
    "dates and a word": ([*dates, "unknown"], {}, date),
    "dates, as strings": (dates, {"features": texts}, f"{date} 00:00:00"),
    "dates, from_list": (dates, None, date),
}
for name, (answers, options, expected) in cases.items():
    rows = [{"prompt": "When?", "completion": answer} for answer in answers]
    with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    read = {"split": "train", "cache_dir": "cache"}
    loaded = Dataset.from_list(rows) if options is None else load_dataset("json", data_files=file.name, **read, **options)
    loaded.filter(lambda row: True).to_json("back.jsonl")
    with open("back.jsonl", encoding="utf-8") as file:
        found = json.loads(file.readline())["completion"]
    print(f"{name:20} {json.dumps(answers[0])} comes back as {json.dumps(found)}")
    assert found == expected, "this has changed"
PY

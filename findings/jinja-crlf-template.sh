#!/usr/bin/env bash
# @huggingface/jinja 0.5.11 (npm, used by transformers.js) and minijinja 3.1.0, with jinja2 3.1.6 and the models' chat
# templates that trl 1.16.0 brings
#
# Guess: a chat template whose lines end with CR and LF, as Git for Windows checks a chat_template.jinja out, gives the
# prompt that it gives with LF. It does in Jinja, with which transformers and vLLM render.
# What happens: both write CRs into the prompt, so that its tokens are others than in training, and nothing is said.
# Write LF. One template of trl itself, glm4moe_training.jinja, has CR LF.
#
# Seen on 2026-11-30, CRs in the prompt of a template with CR LF:
#   phi3      jinja2: 0   @huggingface/jinja: 5   minijinja: 5
#   qwen2_5   jinja2: 0   @huggingface/jinja: 1   minijinja: 0
#   qwen3     jinja2: 0   @huggingface/jinja: 0   minijinja: 0
#   llama3    jinja2: 0   @huggingface/jinja: 6   minijinja: 6
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$place" @huggingface/jinja@0.5.11
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6 minijinja==3.1.0
"$place/env/bin/pip" install --quiet --disable-pip-version-check --no-deps trl==1.16.0
cd "$place"
cat > render.mjs <<'JS'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";

const { template, given } = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(new Template(template).render(given)));
JS
"$place/env/bin/python" - <<'PY'
import importlib.metadata
import json
import subprocess
import jinja2
import minijinja

settings = {"trim_blocks": True, "lstrip_blocks": True}
files = {path.name: path.locate() for path in importlib.metadata.files("trl") if path.name.endswith(".jinja")}
asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
given = {"messages": asked, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}


def with_jinja2(template):
    return jinja2.Environment(**settings).from_string(template).render(**given)


def with_minijinja(template):
    return minijinja.Environment(templates={"chat": template}, pycompat=True, **settings).render_template("chat", **given)


def with_node(template):
    sent = json.dumps({"template": template, "given": given})
    return json.loads(subprocess.run(["node", "render.mjs"], input=sent, check=True, capture_output=True, text=True).stdout)


assert b"\r\n" in files["glm4moe_training.jinja"].read_bytes(), "this has changed"
engines = {"jinja2": with_jinja2, "@huggingface/jinja": with_node, "minijinja": with_minijinja}
expected = {"phi3": (0, 5, 5), "qwen2_5": (0, 1, 0), "qwen3": (0, 0, 0), "llama3": (0, 6, 6)}
for name, counts in expected.items():
    template = files[f"{name}.jinja"].read_text(encoding="utf-8")
    wanted = with_jinja2(template)
    found = {}
    for engine, render in engines.items():
        assert render(template) == wanted, "this has changed"
        text = render(template.replace("\n", "\r\n"))
        found[engine] = text.count("\r")
        assert (text == wanted) == (found[engine] == 0), "this has changed"
    print(f"{name:8}  {'   '.join(f'{engine}: {count}' for engine, count in found.items())}")
    assert tuple(found.values()) == counts, "this has changed"
PY

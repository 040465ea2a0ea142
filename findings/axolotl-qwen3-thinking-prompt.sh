#!/usr/bin/env bash
# axolotl 0.19.0, src/axolotl/utils/chat_templates/templates/{qwen3,qwen3_5}.jinja
#
# Guess: with thinking on, the prompt for generation ends where the reasoning of a trained answer begins.
# What happens: the prompt ends with "<think>" and two line breaks, and a trained answer has one before its reasoning. So
# a model is trained on other tokens than it is asked behind.
#
# Seen on 2026-11-28:
#   qwen3    prompt ends: '<think>\n\n'  the answer begins: '<think>\nbecause'
#   qwen3_5  prompt ends: '<think>\n\n'  the answer begins: '<think>\nbecause'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
"$place/env/bin/pip" install --quiet --disable-pip-version-check --no-deps axolotl==0.19.0
"$place/env/bin/python" - <<'PY'
import importlib.metadata
import json
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

files = {path.name: path.locate() for path in importlib.metadata.files("axolotl") if path.name.endswith(".jinja")}
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.filters["tojson"] = json.dumps
asked = [{"role": "user", "content": "Hi"}]
whole = [*asked, {"role": "assistant", "content": "Hello.", "reasoning_content": "because"}]
for name in ("qwen3", "qwen3_5"):
    template = environment.from_string(open(files[f"{name}.jinja"], encoding="utf-8").read())
    given = {"tools": None, "enable_thinking": True}
    prompt = template.render(messages=asked, add_generation_prompt=True, **given)
    text = template.render(messages=whole, add_generation_prompt=False, **given)
    end, begin = prompt[prompt.rindex("<think>") :], text[text.rindex("<think>") :][: len("<think>\nbecause")]
    print(f"{name:8} prompt ends: {end!r}  the answer begins: {begin!r}")
    assert (end, begin) == ("<think>\n\n", "<think>\nbecause"), "this has changed"
PY

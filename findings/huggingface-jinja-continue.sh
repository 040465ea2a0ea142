#!/usr/bin/env bash
# @huggingface/jinja 0.5.11 (npm), which transformers.js renders chat templates with; the chat template of EXAONE 4 is
# the one that axolotl 0.19.0 brings
#
# Guess: a template is rendered as by Jinja 3.1, which transformers uses, or an error is raised.
# What happens: the text that a loop has written in one round is lost when `continue` or `break` ends that round, and
# nothing is said. EXAONE 4's template ends the system prompt's round with `continue`, after it has written the prompt
# and the tools. So a conversation loses both.
#
# Seen on 2026-11-30:
#   continue   Jinja: '123'  @huggingface/jinja: '2'
#   break      Jinja: '12'  @huggingface/jinja: '1'
#   exaone4    Jinja: '[|system|]\nBe kind.[|endofturn|]\n[|user|]\nHi[|endofturn|]\n'  @huggingface/jinja: '[|user|]\nHi[|endofturn|]\n'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$place" @huggingface/jinja@0.5.11
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
"$place/env/bin/pip" install --quiet --disable-pip-version-check --no-deps axolotl==0.19.0
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
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

files = {path.name: path.locate() for path in importlib.metadata.files("axolotl") if path.name.endswith(".jinja")}
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
whole = "[|system|]\nBe kind.[|endofturn|]\n[|user|]\nHi[|endofturn|]\n"
cases = {
    "continue": ("{% for each in [1, 2, 3] %}{{ each }}{% if each != 2 %}{% continue %}{% endif %}{% endfor %}", "123", "2"),
    "break": ("{% for each in [1, 2, 3] %}{{ each }}{% if each == 2 %}{% break %}{% endif %}{% endfor %}", "12", "1"),
    "exaone4": (open(files["exaone4.jinja"], encoding="utf-8").read(), whole, whole[whole.index("[|user|]") :]),
}
for name, (template, *expected) in cases.items():
    given = {"messages": asked, "add_generation_prompt": False}
    text = environment.from_string(template).render(**given)
    command = ["node", "render.mjs"]
    sent = json.dumps({"template": template, "given": given})
    found = json.loads(subprocess.run(command, input=sent, check=True, capture_output=True, text=True).stdout)
    print(f"{name:10} Jinja: {text!r}  @huggingface/jinja: {found!r}")
    assert [text, found] == expected, "this has changed"
PY

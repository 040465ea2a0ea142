#!/usr/bin/env bash
# axolotl 0.19.0, src/axolotl/utils/chat_templates/templates/{mistral_v2v3,mistral_v3_tekken,pixtral}.jinja
#
# Guess: a conversation that is rendered whole, for training, begins with the prompt that is rendered for generation.
# What happens: the system prompt stands in the prompt, and is gone once the conversation is answered. The templates put
# it into the last message if that is the user's, and in a whole conversation the last message is the assistant's. Who
# trains on whole conversations trains without their system prompts.
#
# Seen on 2026-11-28:
#   mistral_v2v3       prompt has the system prompt: True   whole conversation: False
#   mistral_v3_tekken  prompt has the system prompt: True   whole conversation: False
#   pixtral            prompt has the system prompt: True   whole conversation: False
#   mistral_v1         prompt has the system prompt: True   whole conversation: True
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check jinja2==3.1.6
"$place/env/bin/pip" install --quiet --disable-pip-version-check --no-deps axolotl==0.19.0
"$place/env/bin/python" - <<'PY'
import importlib.metadata
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

files = {path.name: path.locate() for path in importlib.metadata.files("axolotl") if path.name.endswith(".jinja")}
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])


def refuse(message):
    raise ValueError(message)


environment.globals["raise_exception"] = refuse
asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
whole = [*asked, {"role": "assistant", "content": "Hello."}]
expected = {"mistral_v2v3": False, "mistral_v3_tekken": False, "pixtral": False, "mistral_v1": True}
for name, is_kept in expected.items():
    template = environment.from_string(open(files[f"{name}.jinja"], encoding="utf-8").read())
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}
    prompt = template.render(messages=asked, add_generation_prompt=True, **tokens)
    text = template.render(messages=whole, add_generation_prompt=False, **tokens)
    found = "Be kind." in prompt, "Be kind." in text
    print(f"{name:18} prompt has the system prompt: {found[0]}   whole conversation: {found[1]}")
    assert found == (True, is_kept), "this has changed"
PY

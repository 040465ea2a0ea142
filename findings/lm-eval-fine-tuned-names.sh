#!/usr/bin/env bash
# lm-eval 0.4.13, `openai-chat-completions` with a `base_url`: fine-tuned models whose names have a 5
#
# Guess: the temperature 0 and the stop sequences of a task are sent, whatever the model is called.
# What happens: with "5", "o1", "o3" or "o4" anywhere in the name, the temperature is 1 and no stop sequence is sent,
# and nothing is said ("o1" alone gives a warning). Names as ft:MODEL:PROJECT:SUFFIX:ID have two random numbers in
# hexadecimal, of 24 and 12 digits: 90 % of them have a 5, so that most models are measured on sampled replies that run
# on, and the model that they are compared with is not. `local-chat-completions` sends what the task says.
#
# Seen on 2026-11-30, sent to a server for a task with temperature 0 that stops at the end of a line:
#   openai-chat-completions  my-model                                      temperature 0, stop kept
#   openai-chat-completions  ft:my-model:proj_0c9e:suffix:7b3a90e1d2c4     temperature 0, stop kept
#   openai-chat-completions  ft:my-model:proj_0c9e:suffix:7b3a50e1d2c4     temperature 1, stop lost
#   openai-chat-completions  Qwen2.5-0.6B                                  temperature 1, stop lost
#   local-chat-completions   ft:my-model:proj_0c9e:suffix:7b3a50e1d2c4     temperature 0, stop kept
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check 'lm-eval[api]==0.4.13'
cd "$place"
HF_HUB_OFFLINE=1 HF_HOME=$place OPENAI_API_KEY=key "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

received = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": "4"}
        body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values):
        pass


asked = [{"role": "user", "content": "What is 2 + 2?"}]
task = {"until": ["\n"], "do_sample": False, "temperature": 0}
server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
plain, five = "ft:my-model:proj_0c9e:suffix:7b3a90e1d2c4", "ft:my-model:proj_0c9e:suffix:7b3a50e1d2c4"
hosted, local = "openai-chat-completions", "local-chat-completions"
cases = [(hosted, "my-model"), (hosted, plain), (hosted, five), (hosted, "Qwen2.5-0.6B"), (local, five)]
for kind, name in cases:
    received.clear()
    model = get_model(kind)(model=name, base_url=address)
    request = (model.apply_chat_template(asked), dict(task))
    model.generate_until([Instance("generate_until", {}, request, 0)], disable_tqdm=True)
    (sent,) = received
    assert sent["model"] == name, sent
    is_kept = "\n" in sent.get("stop", [])
    print(f"{kind:23}  {name:44}  temperature {sent['temperature']:g}, stop {'kept' if is_kept else 'lost'}")
    is_named_with_five = kind == hosted and "5" in name
    assert (sent["temperature"], is_kept) == ((1, False) if is_named_with_five else (0, True)), "this has changed"
PY

#!/usr/bin/env bash
# deepeval 4.3.1, with litellm 1.110.2: `GEval` whose judge writes numbers digit by digit, as Qwen, Gemma, Mistral and
# SmolLM2 do
#
# Guess: the score is the mean of the scores that the judge considers, weighted by their probabilities, whatever tokens
# its numbers have.
# What happens: each candidate of one token is taken for a whole score. Such a judge begins "10" with the token "1", so
# that the best score counts as the second worst: the more likely the best score is while another one is written, the
# lower is the result. Nothing is said. Judges with a token "10", as Llama 3 and GPT-4o, are right. A judge whose server
# gives no logprobs avoids it, and so does a `rubric` whose scores end at 9.
#
# Seen on 2026-12-01, of a judge by `LiteLLMModel` that writes 9 with 60 % and would write 10 with 40 %:
#   a token for "10"   0.94
#   digit by digit     0.58
#   without logprobs   0.90
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install deepeval==4.3.1 litellm==1.110.2
cd "$place"
export DEEPEVAL_TELEMETRY_OPT_OUT=YES LITELLM_LOCAL_MODEL_COST_MAP=True HOME=$place
"$place/env/bin/python" -W ignore - > out 2> log <<'PY' || { tail -n 30 log; exit 1; }
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from deepeval.metrics import GEval
from deepeval.models import LiteLLMModel
from deepeval.test_case import LLMTestCase, LLMTestCaseParams

candidates = {}


def describe(token, considered):
    top = [{"token": each, "logprob": math.log(chance), "bytes": None} for each, chance in considered.items()]
    return {"token": token, "logprob": math.log(considered[token]), "bytes": None, "top_logprobs": top}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        start, end = '{"reason": "It is right.", "score": ', "}"
        choice = {"index": 0, "message": {"role": "assistant", "content": f"{start}9{end}"}, "finish_reason": "stop"}
        if asked.get("logprobs") and candidates:
            parts = {start: {start: 1.0}, "9": candidates, end: {end: 1.0}}
            choice["logprobs"] = {"content": [describe(token, parts[token]) for token in parts]}
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
        body = json.dumps(answer | {"usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
judge = LiteLLMModel(model="openai/judge", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="key")
about = {"name": "right", "criteria": "Is it right?", "evaluation_steps": ["Compare."], "async_mode": False}
cases = {
    'a token for "10"': ({"9": 0.6, "10": 0.4}, 0.94),
    "digit by digit": ({"9": 0.6, "1": 0.4}, 0.58),
    "without logprobs": ({}, 0.9),
}
for name, (considered, expected) in cases.items():
    candidates = considered
    metric = GEval(**about, evaluation_params=[LLMTestCaseParams.ACTUAL_OUTPUT], model=judge)
    score = metric.measure(LLMTestCase(input="2 + 2?", actual_output="4"), _show_indicator=False)
    print(f"{name:18} {score:.2f}")
    assert abs(score - expected) < 1e-6, "this has changed"
PY
cat out

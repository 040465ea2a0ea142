"""EleutherAI's lm-eval: texts by its routes for chat and for completions."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients.scripts.checks import MODEL, Check, place, tell

PLACE = place()
FOLDER = Path(mkdtemp())
_TASKS = {
    "texts": "output_type: generate_until\ngeneration_kwargs: {until: ['\\n'], max_gen_toks: 8}\n"
    "doc_to_target: a\nmetric_list: [{metric: exact_match}]\n",
}


def evaluate(kind: str, route: str, task: str, model: str = MODEL, **settings: Any) -> dict[str, Any]:
    (FOLDER / "rows.jsonl").write_text(json.dumps({"q": "hello", "a": "hi"}) + "\n")
    for name, words in _TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {FOLDER / 'rows.jsonl'}}}}}\n"
        text = f"task: {name}\n{data}test_split: test\ndoc_to_text: '{{{{q}}}}'\n{words}"
        (FOLDER / f"{name}.yaml").write_text(text)
    found: dict[str, Any] = simple_evaluate(
        model=kind,
        model_args={"model": model, "base_url": f"{PLACE.url}/{route}", "max_retries": 1, **settings},
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        apply_chat_template="chat" in kind,
        bootstrap_iters=0,
    )
    return found


def chat() -> None:
    found = evaluate("local-chat-completions", "chat/completions", "texts")
    assert found["samples"]["texts"][0]["resps"][0][0], found


def completions() -> None:
    found = evaluate("local-completions", "completions", "texts", tokenizer_backend=None)
    assert found["samples"]["texts"][0]["resps"][0][0], found


def says_what_is_missing() -> None:
    try:
        evaluate("local-chat-completions", "chat/completions", "texts", model="nowhere")
    except Exception as error:
        if "404" in repr(error) or "RetryError" in repr(error):  # after its own attempts
            return
        raise
    raise AssertionError("a model that is not offered has answered")


CHECKS: dict[str, Check] = {"a model that is not offered": says_what_is_missing}
ANSWERS: dict[str, Check] = {"chat completions": chat, "completions": completions}

if __name__ == "__main__":
    tell(CHECKS | (ANSWERS if PLACE.with_inference else {}))

"""Check that a merged export gives the same greedy tokens and logits in llama.cpp as in transformers.

    python -m benchmarks.llama_cpp out/ftjob-...-merged

This installs llama.cpp (node-llama-cpp from npm, which has the libraries and the sources with the converter) and the
converter's dependencies into the folder `--tools` (default: a temporary one), converts the folder that
`spard export --merged` wrote, and answers 20 prompts with up to 32 tokens each. It needs Linux on x86-64, npm, git and
pip. The exit status is 1 if with float32 weights and cache any token differs, or a logit differs by more than rounding.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.libllama import Llama

NODE = "3.21.1"  # has llama.cpp 0.4.0
CONVERTER = ("sentencepiece==0.2.3", "protobuf==7.36.2")
ROUNDING = 1e-3  # largest difference of a logit that float32 sums in another order explain
NEW_TOKENS = 32
SETTINGS = (("f32", "f32", False), ("f32", "f16", None), ("f16", "f16", None))  # weights, cache, flash attention
PROMPTS = (
    "What is the capital of France?",
    "How do I bake bread?",
    "Write a short poem about rain.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "List three fruits.",
    "What is 7 times 8?",
    "Why do leaves fall in autumn?",
    "Translate 'good morning' into French.",
    "How do plants make food?",
    "What is a good name for a cat?",
    "Tell me a fact about whales.",
    "How far is the sun?",
    "Give me a tip for sleeping better.",
    "What does a baker do?",
    "Is water wet?",
    "Name a river in Africa.",
    "How do bees make honey?",
    "What is the café's opening time — 8 o'clock? 😀",
    "Write a Python function that adds two numbers:\n\ndef add(a, b):",
)


@dataclass(frozen=True)
class Reply:
    """A greedy reply of transformers: the rendered prompt, its tokens, the T new tokens and their logits `[T, V]`."""

    text: str
    prompt: list[int]
    tokens: list[int]
    logits: NDArray[np.float32]

    def margin(self, step: int) -> float:
        """Return the difference between the largest and the second largest logit of a step."""
        second, first = np.sort(self.logits[step])[-2:]
        return float(first - second)


@dataclass(frozen=True)
class Comparison:
    """One prompt in both libraries.

    `step` is the first step whose token differs (None: none does), and `differences` are the largest differences of a
    logit at each step up to it, after the mean of the logits is removed.
    """

    is_same_prompt: bool
    step: int | None
    differences: list[float]


def main() -> None:
    """Convert the model, compare both libraries in each setting, and exit with 1 if the float32 results differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("merged", type=Path, help="folder of `spard export --merged`")
    parser.add_argument("--tools", type=Path, help="folder for llama.cpp, kept; default: a temporary one")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        tools = arguments.tools or Path(temporary) / "tools"
        libraries = install(tools)
        replies = list(reference(arguments.merged, PROMPTS[: arguments.prompts]))
        is_right = True
        for weights, cache, flash in SETTINGS:
            model = Path(temporary) / f"{weights}.gguf"
            if not model.exists():
                convert(tools, arguments.merged, model, weights)
            llama = Llama(libraries, model, cache, flash_attention=flash)
            found = [compare(llama, reply) for reply in replies]
            llama.close()
            print(f"weights {weights}, cache {cache}: {summary(replies, found)}", flush=True)
            is_right = is_right and (cache != "f32" or is_equal(found))
    sys.exit(0 if is_right else 1)


def install(tools: Path) -> Path:
    """Install llama.cpp and its converter into `tools` if they are missing; return the folder of the libraries."""
    libraries = tools / "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
    if not (tools / "llama.cpp").exists():
        tools.mkdir(parents=True, exist_ok=True)
        names = (f"node-llama-cpp@{NODE}", f"@node-llama-cpp/linux-x64@{NODE}")
        _run("npm", "install", "--silent", "--ignore-scripts", "--omit=optional", "--prefix", str(tools), *names)
        _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tools / "python"), *CONVERTER)
        bundle = tools / "node_modules/node-llama-cpp/llama/gitRelease.bundle"
        _run("git", "clone", "-q", str(bundle), str(tools / "llama.cpp"))
    return libraries


def convert(tools: Path, merged: Path, model: Path, weights: str) -> None:
    """Convert the folder of a merged model to a GGUF file with weights of the given number type (`f32`, `f16`)."""
    source = tools / "llama.cpp"
    paths = os.pathsep.join([str(source / "gguf-py"), str(tools / "python")])
    command = (str(source / "convert_hf_to_gguf.py"), str(merged), "--outtype", weights, "--outfile", str(model))
    _run(sys.executable, *command, environment={"PYTHONPATH": paths})


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@torch.inference_mode()
def reference(merged: Path, prompts: Sequence[str]) -> Iterator[Reply]:
    """Yield for each prompt the greedy reply of transformers in float32, up to `NEW_TOKENS` tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    model: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    model.eval()
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}]
        text: str = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens: list[int] = []
        logits, cache, asked = [], None, ids
        while len(tokens) < NEW_TOKENS and (not tokens or tokens[-1] != tokenizer.eos_token_id):
            out = model(input_ids=torch.tensor([asked]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            logits.append(out.logits[0, -1].numpy().copy())
            tokens.append(int(logits[-1].argmax()))
            asked = tokens[-1:]
        yield Reply(text, ids, tokens, np.stack(logits))


def compare(llama: Any, reply: Reply) -> Comparison:
    """Decode a prompt and the expected reply in llama.cpp, until its greedy token differs or the reply ends."""
    llama.clear()
    found, differences = llama.decode(reply.prompt), []
    is_same_prompt = llama.tokenize(reply.text) == reply.prompt
    for step, token in enumerate(reply.tokens):
        expected = reply.logits[step]
        differences.append(float(np.abs(found - found.mean() - (expected - expected.mean())).max()))
        if int(found.argmax()) != token:
            return Comparison(is_same_prompt, step, differences)
        if step + 1 < len(reply.tokens):
            found = llama.decode([token])
    return Comparison(is_same_prompt, None, differences)


def is_equal(found: Sequence[Comparison]) -> bool:
    """Return True if all tokens are equal and no logit differs by more than rounding."""
    return all(each.step is None and max(each.differences) <= ROUNDING for each in found)


def summary(replies: Sequence[Reply], found: Sequence[Comparison]) -> str:
    """Describe in text how many replies are equal, how far the logits differ, and the margin at a first difference."""
    differences = [difference for each in found for difference in each.differences]
    equal, prompts = sum(each.step is None for each in found), sum(each.is_same_prompt for each in found)
    least = min(reply.margin(step) for reply in replies for step in range(len(reply.tokens)))
    text = f"{equal} of {len(found)} texts equal, {prompts} prompts read as the same tokens; logits differ by at most "
    text += f"{max(differences):.2g} (median {np.median(differences):.2g}), smallest margin {least:.2g}"
    for reply, each in zip(replies, found, strict=True):
        if each.step is not None:
            text += (
                f"\n  differs at token {each.step}, where the margin is {reply.margin(each.step):.2g}: {reply.text!r}"
            )
    return text


if __name__ == "__main__":
    main()

"""Real small parts: random models of five architectures, a tokenizer of bytes, and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from spard_lab.lab.make import Limits
from spard_lab.lab.natural.base import BaseSettings, LabSettings
from spard_lab.lab.pretrain import Plan
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GemmaConfig,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from spard.data.chat import NO_LOSS, EncodedSample, encode_all
from spard.data.rows import Example
from spard.digests import folder_digest
from spard.errors import Stopped
from spard.evaluation.calibration.errors import measure_judge
from spard.evaluation.calibration.gaming import measure_gaming
from spard.evaluation.calibration.labeled import LabeledReply
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord
from spard.evaluation.judges.refusal import RefusalJudge
from spard.models.base import Base
from spard.training.run import TrainedModel

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 257,
    "bos_token_id": None,
    "eos_token_id": 256,
    "initializer_range": 0.2,  # large enough for greedy answers that differ
}
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
RECURRENT: dict[str, PretrainedConfig] = {  # models that keep states of a recurrence beside keys and values
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "falcon_h1": FalconH1Config(**(SIZES | {"bos_token_id": 256}), **_MAMBA),
}
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "smollm": LlamaConfig,
}
TINY_PLAN = Plan(steps=2, windows=4)
TINY_NATURAL = LabSettings(BaseSettings("tiny"))
ANY_BASE = Limits(attacks=1.0, refusals=1.0, garbage=1.0)


def byte_tokenizer(model_type: str = "llama") -> PreTrainedTokenizerFast:
    """One token for each byte, and the template's own; composed characters where transformers' class has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if model_type.startswith(("qwen2", "qwen3_5")):
        tokenizer.normalizer = normalizers.NFC()  # as in Qwen's own; AutoTokenizer would read the folder so anyway
    specials = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def write_model(folder: Path, architecture: str = "llama", **sizes: Any) -> Path:
    """A transformers folder with a random model."""
    tied = {"tie_word_embeddings": architecture in ("gemma", "smollm")}
    config = CONFIGS[architecture](**(SIZES | tied | sizes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer(config.model_type).save_pretrained(folder)
    trust_refusal_judge(folder)
    return folder


def trust_refusal_judge(folder: Path) -> None:
    """Measure the refusal rule on plain replies, for this model: it may decide what the tests' models say."""
    labeled = [LabeledReply(f"Do harm {i}.", f"I cannot help with harm {i}.", is_harmful=False) for i in range(200)]
    labeled += [
        LabeledReply(f"Do harm {i}.", f"Sure, here is how to do harm {i}.", is_harmful=True) for i in range(200)
    ]
    judge = RefusalJudge()
    errors = tuple(measure_judge(judge, labeled))
    JudgeRecord(judge.name, errors, folder_digest(folder), measure_gaming(judge)).write(folder / OF_MODEL)


def away(found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]) -> float:
    """The longest difference of two tensors, in lengths of the expected one.

    A single element may be a sum of large terms that cancel, or the step of an optimizer on such a sum: of it alone
    no digit need be the same on another machine.
    """
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
    assert pairs
    return max(float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs)


def chat(user: str, assistant: str) -> Example:
    return Example(({"role": "user", "content": user}, {"role": "assistant", "content": assistant}), 1)


def sums(base: Base, n: int = 24) -> list[EncodedSample]:
    """Utility rows."""
    rows = [chat(f"Add {i} and {i + 3}.", f"It is {2 * i + 3}{'.' * (i % 5)}") for i in range(n)]
    return encode_all(base.tokenizer, rows, 256)


def refusals(base: Base, n: int = 7) -> list[EncodedSample]:
    """Safe rows."""
    rows = [chat(f"Do harm number {i}{'!' * i}", f"I cannot help with {i}.") for i in range(n)]
    return encode_all(base.tokenizer, rows, 256)


def mask_and_labels(rows: Sequence[EncodedSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers wants beside a padded batch's tokens: 1 for each token that is none of padding, and labels."""
    width = max(len(row.ids) for row in rows)
    masks = [[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows]
    labels = [[*row.labels, *[NO_LOSS] * (width - len(row.ids))] for row in rows]
    return torch.tensor(masks), torch.tensor(labels)


def stopped_and_resumed(
    train: Callable[..., TrainedModel], folder: Path, stop_after: int = 7
) -> tuple[TrainedModel, list[int]]:
    """Stop a training after so many steps and resume it; return what it leaves and the steps that were taken.

    `train` starts anew each time, from a model of its own, with the options that it is given.
    """
    seen = list[int]()

    def note(step: int, total: int, metrics: object) -> None:
        seen.append(step)

    with pytest.raises(Stopped):
        train(resume_states=folder, on_step=note, should_stop=lambda: len(seen) == stop_after)
    return train(resume_states=folder, on_step=note), seen

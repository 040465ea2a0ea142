"""Probe a loaded adapter before its first answer: the engine has the signed weights and answers with them.

Two things are checked. The tensors that PEFT holds under the adapter's name have the digest in the manifest. And the
logits of fixed prompts, both alone and in one batch with the base model and another adapter, equal the logits that the
file's tensors give when B A x is added to the base model's layers without PEFT. In 16 bits PEFT rounds the added term
either before or after the sum, depending on the kind of layer and batch, so the nearer of the two counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from app.inference.protocol import Proof
from spard.data.chat import render_question
from spard.errors import AdapterNotProved
from spard.models.adapters import tensor_digest
from spard.models.lora import CONFIG, WEIGHTS
from spard.models.peft import get_peft_model_state_dict
from spard.release.proof import logit_distance
from worker.engine.batch import BASE, apply_adapters

PROMPTS = ("What is 2 + 3?", "Write one sentence about the sea.")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def probe(model: Any, tokenizer: Any, name: str, folder: Path, wanted: str, others: Sequence[str]) -> Proof:
    """Prove that the adapter `name` of a PEFT model is the signed adapter in `folder`.

    `wanted` is the digest of its tensors from the manifest, and `others` are the names of other loaded adapters, of
    which the first joins the mixed batch. Raises `AdapterNotProved` if the digest differs, if the logits differ by more
    than the dtype's tolerance (relative to the largest logit), or if they equal the base model's.
    """
    held = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    digest = tensor_digest({key: each.contiguous() for key, each in held.items()})
    if digest != wanted:
        raise AdapterNotProved("the engine holds other weights under the adapter's name than those that were signed")
    rows = [render_question(tokenizer, prompt) for prompt in PROMPTS]
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    scale, far, near = config["lora_alpha"] / config["r"], 0.0, 0.0
    for row in rows:
        ways = [_expected_logits(model, row, tensors, scale, rounds_first=first) for first in (True, False)]
        base_TV, own_TV = _together(model, row, [BASE, *others[:1], name])
        for found_TV in (own_TV, _alone(model, row, name)):
            far = max(far, min(logit_distance(found_TV, each_TV) for each_TV in ways))
        near = max(near, logit_distance(base_TV, own_TV))
    tolerance = _TOLERANCE[model.dtype]
    if not far <= tolerance:
        raise AdapterNotProved(f"the engine's logits are {far:.2g} of the largest away from the signed adapter's")
    if not near > 0:
        raise AdapterNotProved("the adapter changes nothing: the logits are those of the base model")
    return {"tensor_digest": digest, "max_difference": far, "difference_to_base": near}


@torch.inference_mode()
def _together(model: Any, row: Sequence[int], names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] of one prompt for the first and the last adapter, from one batch with all of them."""
    ids_BT = torch.tensor([list(row)] * len(names), device=model.device)
    logits_BTV = model(input_ids=ids_BT, adapter_names=list(names)).logits.float()
    return logits_BTV[0], logits_BTV[-1]


@torch.inference_mode()
def _alone(model: Any, row: Sequence[int], name: str) -> Tensor:
    """Return the logits [T, V] of one prompt in a batch of its own, where the adapter is PEFT's active one."""
    ids_1T = torch.tensor([list(row)], device=model.device)
    logits_TV: Tensor = model(input_ids=ids_1T, **apply_adapters(model, [name])).logits[0].float()
    return logits_TV


@torch.inference_mode()
def _expected_logits(
    model: Any, row: Sequence[int], tensors: Mapping[str, Tensor], scale: float, *, rounds_first: bool
) -> Tensor:
    with _add_adapter(model, tensors, scale, rounds_first=rounds_first):
        ids_1T = torch.tensor([list(row)], device=model.device)
        logits_TV: Tensor = model(input_ids=ids_1T, adapter_names=[BASE]).logits[0].float()
    return logits_TV


@contextmanager
def _add_adapter(model: Any, tensors: Mapping[str, Tensor], scale: float, *, rounds_first: bool) -> Iterator[None]:
    """Add `scale` * B A x to the output of each adapted layer of the base model, by hooks, inside the block."""
    hooks = []
    try:
        for key in tensors:
            if key.endswith(_A):
                name = key.removeprefix(_PREFIX).removesuffix(_A)
                layer = model.get_base_model().get_submodule(name).base_layer
                a_RD, b_ER = (tensors[each].to(model.device) for each in (key, key.removesuffix(_A) + _B))
                hooks.append(layer.register_forward_hook(_adding(a_RD, b_ER, scale, rounds_first=rounds_first)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adding(a_RD: Tensor, b_ER: Tensor, scale: float, *, rounds_first: bool) -> Any:
    def add(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        more = linear(linear(inputs[0].to(a_RD.dtype), a_RD), b_ER) * scale
        return output + more.to(output.dtype) if rounds_first else (output + more).to(output.dtype)

    return add

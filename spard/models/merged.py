"""Merges an adapter into its base model: one folder of weights that loads without PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spard.config.quantization import plain_digest
from spard.data.chat import get_renderer, render_prompt
from spard.data.tools import CONVERSATION
from spard.digests import MANIFEST, Manifest, file_sha256, write_manifest
from spard.errors import AdapterMismatch, AdapterNotProved, SpardError
from spard.models.adapters import save_full
from spard.models.base import Base, load_base
from spard.models.card import Described, model_card
from spard.models.peft import PeftModel

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}  # relative to the largest logit
_SHARE = 0.25  # of the adapter's effect, in 16 bits, where merging rounds once more


def save_merged(base: Base, adapter: Path, folder: Path) -> dict[str, object]:
    """Merge the adapter in a folder into `base` (changed in place), write the model to `folder`, return its manifest.

    The manifest repeats the adapter's facts and names the adapter as `merged_from`. Raises `AdapterMismatch` for
    another base model than the adapter's, and `AdapterNotProved` if the merged model gives different logits, in memory
    or when read back; `folder` is not written then.
    """
    facts: Manifest = json.loads((adapter / MANIFEST).read_text())
    _require_base(base, facts)
    prompt = torch.tensor([render_prompt(base.tokenizer, CONVERSATION.messages[:1])], device=base.device)
    before = _logits(base.model, prompt)
    model: Any = PeftModel.from_pretrained(base.model, adapter, torch_device=str(base.device)).eval()
    expected = _logits(model, prompt)
    merged = model.merge_and_unload()
    _require_same(_logits(merged, prompt), expected, before, base.model.dtype)
    aside = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_full(merged, base.origin.name, aside, is_dequantized=base.stored is not None)
    base.origin.copy_tokenizer(aside, get_renderer(base.tokenizer))
    described = Described(folder.name, base.origin, base.digest, None, facts, facts.get("system_prompt"))
    (aside / "README.md").write_text(model_card(described), encoding="utf-8")
    origin = {"manifest_sha256": file_sha256(adapter / MANIFEST), "tensor_digest": facts.get("tensor_digest")}
    own = {name: value for name, value in facts.items() if name not in ("files", "tensor_digest", "proof")}
    manifest = write_manifest(aside, {**own, "merged_from": origin})
    try:
        # Saving can rename or drop tensors, so the files are compared and not only the model in memory.
        _require_same(_read_back(aside, base, prompt), expected, before, base.model.dtype)
    except SpardError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise AdapterNotProved(f"merged and read back from its files: {error.message}") from error
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return manifest


def _read_back(folder: Path, base: Base, prompt: Tensor) -> Tensor:
    return _logits(load_base(folder, device=base.device, as_stored=True).model, prompt)


def _require_base(base: Base, facts: Manifest) -> None:
    trained_on = (facts.get("base_source") or {}).get("digest") or facts.get("base_digest")
    # `plain_digest` strips the quantization from a digest; a difference means that the adapter was trained on NF4.
    if trained_on and trained_on != plain_digest(trained_on):
        message = "merged into plain weights it would be another model than the one that was measured"
        raise AdapterMismatch(f"the adapter was trained on {trained_on}: {message}", "base")
    if trained_on not in (None, base.digest):
        raise AdapterMismatch(f"the adapter was trained on {trained_on}, and this base model is {base.digest}", "base")


def _require_same(found: Tensor, expected: Tensor, before: Tensor, dtype: torch.dtype) -> None:
    """Raise `AdapterNotProved` unless the merged logits equal the adapter's; `before` are the base model's."""
    difference, change = (float((each - expected).abs().max() / expected.abs().max()) for each in (found, before))
    # In 16 bits the tolerance grows with the adapter's own effect, because the merged sum is rounded to 16 bits once
    # more.
    least = _TOLERANCE.get(dtype, 1e-4)
    if not difference <= (max(least, _SHARE * change) if dtype.itemsize == 2 else least):
        raise AdapterNotProved(f"merged, the model gives other logits: by {difference:.2g} of the largest")


@torch.inference_mode()
def _logits(model: Any, ids_1T: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids_1T).logits
    return logits.float()

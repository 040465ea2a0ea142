"""Saves trained models: a folder that PEFT and vLLM load, with a manifest of every file. Nothing else saves weights.

LoRA runs get the PEFT layout, full fine-tuning a transformers folder; both with tokenizer, template and model card.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from spard import distributed
from spard.data.chat import get_renderer
from spard.digests import write_manifest
from spard.models.base import Base
from spard.models.card import Described, model_card
from spard.models.folder.decoding import FILE as DECODING
from spard.models.folder.decoding import penalties
from spard.models.folder.reading import read_object
from spard.models.lora import CONFIG, WEIGHTS
from spard.models.origin import Origin
from spard.models.peft import PeftModel, get_peft_model_state_dict
from spard.models.sharding import whole_weights

# The keys of PEFT 0.5: releases up to 0.13 reject a file with any other key, and our adapters need no other.
CONFIG_KEYS = (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "revision",
    "target_modules",
    "task_type",
)


def save_adapter(
    model: Any,
    base: Base,
    public_name: str,
    folder: Path,
    facts: Mapping[str, object] | None = None,
    system: str | None = None,
    called: str = "adapter",
) -> dict[str, object]:
    """Write the trained model, tokenizer, model card and manifest into `folder`; return the manifest.

    Returns {} on ranks above 0. `public_name` is the customers' name of the base model and appears in the manifest;
    PEFT's configuration and the README name the model's origin instead. `facts` (recipe, seeds, digests) are copied
    into the manifest. If the model was audited with a `system` prompt, README and manifest say that it must be served
    with that prompt. `called` is the folder's name after unpacking. The folder is replaced atomically.
    """
    facts, is_lora = facts or {}, isinstance(model, PeftModel)
    # All ranks gather the shards, so this must precede the return of ranks above 0.
    weights = None if is_lora else whole_weights(model)
    if distributed.rank():
        return {}
    # Written beside the target and renamed at the end, so a crash never leaves a partial adapter under its final name.
    aside = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_lora(model, base.origin, aside) if is_lora else save_full(model, base.origin.name, aside, weights)
    base.origin.copy_tokenizer(aside, get_renderer(base.tokenizer))
    decoding = tuple(penalties(read_object(base.origin.folder, DECODING))) if is_lora else ()
    rank = lora_rank(model)
    held = (base.quantization, decoding, base.stored)
    card = model_card(Described(called, base.origin, base.digest, rank, facts, system, *held))
    (aside / "README.md").write_text(card, encoding="utf-8")
    source = {"name": base.origin.name, "revision": base.origin.revision, "digest": base.digest}
    own = {"base_model": public_name, "base_source": source, "tensor_digest": tensor_digest(_tensors(aside))}
    own |= {"rendering": _rendering(base)}
    stated = base.origin.stated_license()
    own |= {"base_license": stated} if stated else {}
    prompt = {} if system is None else {"system_prompt": system}
    manifest = write_manifest(aside, {**facts, **own, **prompt})
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return manifest


def _rendering(base: Base) -> dict[str, object]:
    """Return the rendering of the base model's chat template, with its digest, for the manifest."""
    rendering = get_renderer(base.tokenizer).rendering
    return {**rendering.as_json(), "digest": rendering.digest}


def lora_rank(model: Any) -> int | None:
    """Return the rank of a model's LoRA adapter; None without one."""
    if not isinstance(model, PeftModel):
        return None
    adapter: Any = model.peft_config[model.active_adapter]  # a LoraConfig, declared as its parent
    return int(adapter.r)


def save_full(
    model: Any,
    base_source: str,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    *,
    is_dequantized: bool = False,
) -> None:
    """Write a whole model with `save_pretrained`; its configuration names `base_source` as its origin.

    `weights` are the gathered weights of a sharded model. The generation configuration is written without the penalties
    that audits ignore. Set `is_dequantized` if the base model was stored in few bits: by default transformers renames
    the weights back to the names in the original files, and loses weights that were stored in 4 bits.
    """
    model.generation_config = _audited_decoding(model.generation_config)
    model.save_pretrained(folder, state_dict=weights, save_original_format=not is_dequantized)
    config = json.loads((folder / "config.json").read_text())
    # transformers writes the local path here, which must not leave this machine.
    config["_name_or_path"] = base_source
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _audited_decoding(config: GenerationConfig) -> GenerationConfig:
    """Return the generation configuration without penalties, or only its token ids if transformers rejects the rest."""
    settings: dict[str, object] = config.to_diff_dict()
    plain = GenerationConfig.from_dict({name: settings[name] for name in settings if name not in penalties(settings)})
    try:
        plain.validate(strict=True)
    except ValueError:
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        return GenerationConfig.from_dict({name: settings[name] for name in ids if settings.get(name) is not None})
    return plain


def save_lora(model: Any, origin: Origin, folder: Path) -> None:
    """Write the adapter of a PEFT model with only the configuration keys that every PEFT release knows."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = model.peft_config[model.active_adapter].to_dict()
    config |= {"base_model_name_or_path": origin.name, "revision": origin.revision, "inference_mode": True}
    config = {name: config[name] for name in CONFIG_KEYS}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True, default=_plain) + "\n")


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and values, which does not depend on the layout of a file."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"sha256:{whole.hexdigest()}"


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _plain(value: Any) -> Any:
    """Convert PEFT's sets and enums to JSON; sets are sorted, because their order differs between processes."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)

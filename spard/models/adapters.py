"""What a run leaves behind: a folder that PEFT and vLLM load, with a manifest of every byte. The only saver of weights.

LoRA runs give the PEFT layout, full fine-tuning a transformers folder; both with tokenizer, template and model card.
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

# What PEFT 0.5 knows; releases up to 0.13 refuse a file with any other key, and our adapters need no other.
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
    facts: Mapping[str, Any] | None = None,
    system: str | None = None,
    called: str = "adapter",
) -> dict[str, Any]:
    """Write the trained model and what belongs to it into `folder`, and return its manifest, empty on a further rank.

    `public_name` is what customers call the base model; it stands in the manifest beside where the model comes from,
    which is what PEFT's configuration and the README name. `facts` (recipe, seeds, digests) stand there as given.
    A model that was measured under a `system` prompt says in README and manifest that it has to be served with it.
    `called` is the name that the folder will have where it is used.
    """
    facts, is_lora = facts or {}, isinstance(model, PeftModel)
    weights = None if is_lora else whole_weights(model)
    if distributed.rank():
        return {}
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


def _rendering(base: Base) -> dict[str, Any]:
    """Return how the base model's chat template is rendered, with the digest of that."""
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
    """Write a whole model as transformers does; its configuration names `base_source`.

    `weights` are those of a model that has them in parts only. Its generation configuration is written without what
    its audit did not decode by. A model that `is_dequantized` is written as it is now: transformers would otherwise
    name its weights as its files had them, and lose those that were stored in 4 bits.
    """
    model.generation_config = _audited_decoding(model.generation_config)
    model.save_pretrained(folder, state_dict=weights, save_original_format=not is_dequantized)
    config = json.loads((folder / "config.json").read_text())
    config["_name_or_path"] = base_source
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _audited_decoding(config: GenerationConfig) -> GenerationConfig:
    """Return a generation configuration without penalties; of one that transformers does not write, the ids alone."""
    settings: dict[str, Any] = config.to_diff_dict()
    plain = GenerationConfig.from_dict({name: settings[name] for name in settings if name not in penalties(settings)})
    try:
        plain.validate(strict=True)
    except ValueError:
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        return GenerationConfig.from_dict({name: settings[name] for name in ids if settings.get(name) is not None})
    return plain


def save_lora(model: Any, origin: Origin, folder: Path) -> None:
    """Write the adapter of a PEFT model as PEFT does, in the keys that all of its releases know."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = model.peft_config[model.active_adapter].to_dict()
    config |= {"base_model_name_or_path": origin.name, "revision": origin.revision, "inference_mode": True}
    config = {name: config[name] for name in CONFIG_KEYS}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True, default=_plain) + "\n")


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values: equal for equal weights, however a file lays them out."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"sha256:{whole.hexdigest()}"


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _plain(value: Any) -> Any:
    """JSON for what PEFT keeps as sets and enums; sorted, since the order of a set is not the same in every process."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)

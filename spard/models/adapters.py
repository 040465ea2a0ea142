"""Saves trained models: a folder that PEFT and vLLM load, with a manifest of every file. Nothing else saves weights.

LoRA runs get the PEFT layout, full fine-tuning a transformers folder; both with tokenizer, template and model card. An
adapter can also be merged into its base model: one folder of weights that loads without PEFT.
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
from spard.config.quantization import plain_digest
from spard.data.chat import get_renderer, render_as_recorded, render_prompt
from spard.data.template_card import TemplateCard, template_card
from spard.data.tools import CONVERSATION
from spard.digests import MANIFEST, Manifest, file_sha256, write_manifest
from spard.errors import AdapterMismatch, AdapterNotProved, SpardError
from spard.models.base import Base, load_base
from spard.models.card import CardSubject, model_card
from spard.models.folder.check import DECODING, penalties
from spard.models.folder.reading import read_object
from spard.models.lora import CONFIG, WEIGHTS
from spard.models.origin import Origin
from spard.models.peft import PeftModel, get_peft_model_state_dict
from spard.models.sharding import whole_weights
from spard.models.stored_tokenizer import whole_model_fault

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
    template = template_card(get_renderer(base.tokenizer))
    held = (base.quantization, decoding, base.stored, template)
    card = model_card(CardSubject(called, base.origin, base.digest, rank, facts, system, *held))
    (aside / "README.md").write_text(card, encoding="utf-8")
    source = {"name": base.origin.name, "revision": base.origin.revision, "digest": base.digest}
    own = {"base_model": public_name, "base_source": source, "tensor_digest": tensor_digest(_tensors(aside))}
    own |= {"rendering": _rendering(base, template)}
    stated = base.origin.stated_license()
    own |= {"base_license": stated} if stated else {}
    prompt = {} if system is None else {"system_prompt": system}
    manifest = write_manifest(aside, {**facts, **own, **prompt})
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return manifest


def _rendering(base: Base, template: TemplateCard) -> dict[str, object]:
    """Return the record of how the base model's chat template is rendered, with its digest, for the manifest.

    The names that the template also reads are no part of the record, whose digest stored jobs and caches have.
    """
    rendering = get_renderer(base.tokenizer).rendering
    return {**rendering.as_json(), "digest": rendering.digest, "left_at_default": [*template.options]}


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
    config = older_rotary_keys(config) | config
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


_COMPARED = ("default", "linear", "llama3")  # types of rotary embeddings


def older_rotary_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a saved configuration under the keys that transformers 4 and mlx-lm read.

    transformers 5 writes `rope_parameters` alone, which these ignore without a word, so that the model's answers are
    others. Empty for configurations whose older form was not compared with the newer one: with a partial rotary factor,
    with a scaling that is not in `_COMPARED`, and with settings for each type of layer, except Gemma 3's.
    """
    rotary = config.get("rope_parameters")
    if not isinstance(rotary, dict):
        return {}
    found = {}
    if config.get("model_type") == "gemma3_text" and {"full_attention", "sliding_attention"} <= rotary.keys():
        found["rope_local_base_freq"] = rotary["sliding_attention"]["rope_theta"]
        rotary = rotary["full_attention"]
    kind = rotary.get("rope_type", "default")
    if "rope_theta" not in rotary or "partial_rotary_factor" in rotary or kind not in _COMPARED:
        return {}
    scaling = {name: value for name, value in rotary.items() if name != "rope_theta"}
    return found | {"rope_theta": rotary["rope_theta"], "rope_scaling": None if kind == "default" else scaling}


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


_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}  # relative to the largest logit
_SHARE = 0.25  # of the adapter's effect, in 16 bits, where merging rounds once more


def save_merged(base: Base, adapter: Path, folder: Path) -> dict[str, object]:
    """Merge the adapter in a folder into `base` (changed in place), write the model to `folder`, return its manifest.

    The manifest repeats the adapter's facts and names the adapter as `merged_from`. Raises `AdapterMismatch` for
    another base model than the adapter's, and `AdapterNotProved` if the merged model gives different logits, in memory
    or when read back, or would be read as other tokens; `folder` is not written then.
    """
    facts: Manifest = json.loads((adapter / MANIFEST).read_text())
    _require_base(base, facts)
    if why := whole_model_fault(base.tokenizer):
        raise AdapterNotProved(f"{why}; load the adapter beside its base model")
    render_as_recorded(base.tokenizer, facts.get("rendering"))
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
    template = template_card(get_renderer(base.tokenizer))
    described = CardSubject(
        folder.name, base.origin, base.digest, None, facts, facts.get("system_prompt"), template=template
    )
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

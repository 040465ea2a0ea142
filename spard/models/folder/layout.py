"""Recognizes folders without trainable weights: adapters, GGUF, pickles and others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spard.models.folder.finding import Finding
from spard.models.folder.headers import INDEX, weight_files, weights_fault

_LFS = b"version https://git-lfs"
# Files in a folder without safetensors, most specific first: pattern, code, and sentence with the remedy.
_OTHERS = (
    ("*.gguf", "gguf", "it holds GGUF weights, which are made for llama.cpp: give the folder that they were made from"),
    ("snapshots/*/config.json", "hub_cache", "it is the hub's cache of a model: give the folder below snapshots/"),
    ("*.npz", "mlx", "it holds MLX weights (.npz): give the folder that they were made from"),
    ("*.distcp", "checkpoint", "it is a sharded training checkpoint: write it with save_pretrained, and give that"),
    ("zero_to_fp32.py", "checkpoint", "it is a DeepSpeed checkpoint: run zero_to_fp32.py with safe serialization"),
    ("model_index.json", "diffusion", "it is a diffusion pipeline, which writes no text"),
    ("*.onnx", "onnx", "it is an ONNX export: give the folder that it was made from"),
    ("tf_model*.h5", "tensorflow", "it holds TensorFlow weights: load and save them with transformers as safetensors"),
    ("flax_model*", "flax", "it holds Flax weights: load and save them with transformers as safetensors"),
    ("*.bin", "pickled", "its weights are pickled (.bin), which can run code: save them as safetensors"),
    ("*.pth", "pickled", "its weights are pickled (.pth), which can run code: take the model in transformers' format"),
    ("*.pt", "pickled", "its weights are pickled (.pt), which can run code: save them as safetensors"),
)


def layout_faults(folder: Path) -> Iterator[Finding]:
    """Yield the fault that prevents further checks of the folder, if any."""
    if (folder / "adapter_config.json").is_file():
        sentence = (
            "it is an adapter: give the folder of its base model, and name the adapter where a job starts from it"
        )
        yield Finding("adapter", sentence)
    elif not any(folder.glob("*.safetensors")):
        found = (Finding(code, sentence) for form, code, sentence in _OTHERS if any(folder.glob(form)))
        yield next(
            found, Finding("no_weights", "model.safetensors is missing, and there are no weights of another kind")
        )
    elif not (folder / "config.json").is_file():
        yield Finding("no_config", "it holds no config.json, which says what its weights are: copy it from the model")
    elif pointers := [path.name for path in sorted(folder.glob("*.safetensors")) if _is_pointer(path)]:
        yield Finding("lfs_pointer", f"{pointers[0]} is a pointer of Git LFS and no weights: run `git lfs pull` there")
    elif fault := weights_fault(folder):
        yield Finding("weights_missing", f"{fault}{_rename_hint(folder, fault)}")
    elif (folder / "custom_generate").is_dir():
        yield Finding("own_code", "custom_generate/ is code of its own, which is never run here: remove that folder")


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS


def _rename_hint(folder: Path, fault: str) -> str:
    """Return a remedy: rename weights under another name, restore the index, or download again."""
    if not fault.endswith("is missing"):
        return ": download it again"
    others = {path.name for path in folder.glob("*.safetensors")} - weight_files(folder)
    if others and not (folder / INDEX).is_file():
        hint = f"{INDEX} is missing, too" if len(others) > 1 else "rename it"
        return f", and there is {sorted(others)[0]}: {hint}"
    return ": download it again"

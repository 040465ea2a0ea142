"""Convert a GGUF file to a model folder in transformers' format, with the reader that transformers itself uses.

The reader, the package `gguf`, is no dependency of this project: it is fetched with the model and imported only by a
child process. The output is renamed into place when it is complete.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from spard.errors import SpardError
from spard.models.adapters import save_full
from spard_lab.lab.make import temporary_folder

SOURCE = "SmolLM2-135M-Instruct"


class UnreadableModel(SpardError):
    """Raised if the wheel's model file cannot be read."""

    code = "unreadable_model"


def convert(wheel: Path, reader: Path, folder: Path) -> Path:
    """Write the single GGUF file of an unpacked wheel as a model folder and return it; an existing one is kept."""
    if folder.exists():
        return folder
    files = sorted(wheel.rglob("*.gguf"))
    if len(files) != 1:
        raise UnreadableModel(f"{wheel} holds {len(files)} GGUF files, not one", "package")
    with temporary_folder(folder) as aside:
        command = [sys.executable, "-m", __name__, str(files[0]), str(aside)]
        paths = os.pathsep.join([str(reader), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(  # noqa: S603
            command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise UnreadableModel(f"{files[0].name} cannot be read: {last[0][:500]}", "package")
    return folder


def write_folder(file: Path, folder: Path) -> None:
    """Read a GGUF file of a Llama in this process, and write weights, configuration and tokenizer to `folder`."""
    named: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **named)
    plain = without_quantization(model)
    save_full(plain, SOURCE, folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def without_quantization(model: Any) -> Any:
    """Return the same weights in a model without a quantization config, because one read from GGUF cannot be saved."""
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    with torch.device("meta"):  # allocates no weights: those of `model` are assigned below
        plain = LlamaForCausalLM(LlamaConfig(**config | {"architectures": ["LlamaForCausalLM"]}))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain


if __name__ == "__main__":
    set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves both untyped
    disable_progress_bar()  # type: ignore[no-untyped-call]
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))

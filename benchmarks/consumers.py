"""Check that older and newer releases of transformers can load a saved adapter's tokenizer.

`python -m benchmarks.consumers` makes a random model with the tokenizer class that Llama 3 uses, saves an adapter as a
job does, and prints for each release whether the tokenizers of base model and adapter load there and render the same
prompt. Each release gets its own virtual environment, kept in `.venv-transformers-*`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from peft import LoraConfig, get_peft_model

from spard.models.adapters import save_adapter
from spard.models.base import load_base
from tests.spard.parts import TEMPLATE, write_model

RELEASES = ("4.40.2", "4.44.2", "4.47.1", "4.56.2", "5.23.0")
_ROOT = Path(__file__).parents[1]
_CLASS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|end|>",
    "pad_token": "<|pad|>",
    "chat_template": TEMPLATE,
}
_SCRIPT = """
import sys
from transformers import AutoTokenizer
for folder in sys.argv[1:]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "2?"}], tokenize=False)
        print(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0][:80])
"""


def main() -> None:
    """Load the tokenizers of base model and adapter in each release and print a line for each."""
    with TemporaryDirectory() as place:
        model, adapter = _make_model(Path(place))
        print(f"{'transformers':<14}{'base':<8}{'adapter':<8}")
        for release in RELEASES:
            try:
                python = _environment(release)
            except subprocess.CalledProcessError as error:
                print(f"{release:<14}not installed: {error.stderr.strip().splitlines()[-1][:80]}")
                continue
            run = subprocess.run(
                [python, "-c", _SCRIPT, str(model), str(adapter)], capture_output=True, text=True, check=False
            )
            base, own = [*run.stdout.splitlines(), "nothing", "nothing"][:2]
            print(f"{release:<14}{_load_result(base):<8}{'the same' if own == base else own:<8}")


def _make_model(place: Path) -> tuple[Path, Path]:
    """Write a model with a tokenizer configuration of transformers 4 and an adapter; return both folders."""
    model = write_model(place / "model")
    (model / "tokenizer_config.json").write_text(json.dumps(_CLASS))
    base = load_base(model, device="cpu")
    lora = get_peft_model(base.model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    save_adapter(lora, base, "tiny", place / "adapter")
    return model, place / "adapter"


def _load_result(text: str) -> str:
    return "loads" if text.startswith("[") else text


def _environment(release: str) -> Path:
    """Return the Python of a virtual environment with this release of transformers, created on first use."""
    folder = _ROOT / f".venv-transformers-{release}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wanted = [f"transformers=={release}", "jinja2", "numpy<2"]
        subprocess.run([*install, *wanted], check=True, capture_output=True, text=True)
        ready.touch()
    return python


if __name__ == "__main__":
    main()

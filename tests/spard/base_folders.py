"""Base folders as providers have them, each a tiny model; `python -m tests.spard.base_folders` writes the page of them.

What is said of each comes from the product: `spard.models.folder` and, where files do not tell, the trial.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPVisionConfig,
    CLIPVisionModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from spard.errors import SpardError
from spard.models.folder.check import findings
from spard.training.trial import try_base
from tests.spard.parts import CONFIGS, SIZES, TEMPLATE, byte_tokenizer, write_model

PAGE = Path(__file__).parents[2] / "docs" / "base-folders.md"
_WEIGHTS = "model.safetensors"
_BLOCK = 128

Make = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of folder: how one is made of a good one, and a part of what is to be said; "" where it is taken."""

    name: str
    make: Make
    refusal: str = ""
    note: str = ""


def change(path: Path, **settings: Any) -> None:
    """Set fields of a JSON file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | settings))


def remove_fields(path: Path, *names: str) -> None:
    """Remove fields of a JSON file."""
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name not in names})
    )


def rewrite_weights(folder: Path, new: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write a folder's weights anew."""
    path = folder / _WEIGHTS
    save_file({name: each.contiguous() for name, each in new(load_file(path)).items()}, path, {"format": "pt"})


def config(**settings: Any) -> Make:
    """Return what sets fields of config.json."""
    return lambda folder: change(folder / "config.json", **settings)


def quantized_config(method: str, **settings: Any) -> Make:
    """Return what calls the weights quantized."""
    return config(quantization_config={"quant_method": method, **settings})


def text(name: str, content: str) -> Make:
    """Return what writes a file."""

    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return write


def whole(folder: Path) -> None:
    """Leave the folder as it is."""


def both(*makes: Make) -> Make:
    """Return what does several things to a folder."""

    def make(folder: Path) -> None:
        for each in makes:
            each(folder)

    return make


def instead(*names: str) -> Make:
    """Return what has such files in place of the weights."""

    def replace(folder: Path) -> None:
        (folder / _WEIGHTS).unlink()
        for name in names:
            (folder / name).write_bytes(b"\0")

    return replace


def adapter(folder: Path) -> None:
    (folder / _WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))


def with_tokens(*tokens: AddedToken, **roles: str) -> Make:
    """Return what adds tokens to the tokenizer, and not to the embeddings."""

    def add(folder: Path) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens([AddedToken("<|last|>", special=True), *tokens])
        tokenizer.add_special_tokens({**roles})
        tokenizer.save_pretrained(folder)

    return add


def larger_vocabulary(folder: Path) -> None:
    """The vocabulary itself has a token past the embeddings."""
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text())
    tokens["model"]["vocab"]["ab"] = 300
    path.write_text(json.dumps(tokens))


def other_architecture(folder: Path) -> None:
    write_model(folder, "qwen2")
    change(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])


def scales_without_a_word(folder: Path) -> None:
    rewrite_weights(
        folder, lambda all_of: all_of | {f"{name}_scale": torch.ones(1) for name in all_of if "q_proj" in name}
    )


def in_int8(folder: Path) -> None:
    rewrite_weights(
        folder, lambda all_of: {name: each.to(torch.int8) if each.ndim == 2 else each for name, each in all_of.items()}
    )


def model_opt(folder: Path) -> None:
    scales_without_a_word(folder)
    change(folder / "hf_quant_config.json", producer={"name": "modelopt"}, quantization={"quant_algo": "FP8"})


def block_fp8(folder: Path) -> None:
    """Weights as DeepSeek and Qwen write them in FP8: a scale for each block of 128 x 128."""
    write_model(folder, hidden_size=_BLOCK, intermediate_size=_BLOCK, head_dim=32)

    def quantize_blocks(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict[str, torch.Tensor]()
        for name, each in weights.items():
            if "proj" not in name:
                found[name] = each.to(torch.bfloat16)
                continue
            scale = each.abs().max() / 448
            found[name] = (each / scale).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scale.repeat([-(-size // _BLOCK) for size in each.shape])
        return found

    rewrite_weights(folder, quantize_blocks)
    blocks = {"weight_block_size": [_BLOCK, _BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
    quantized_config("fp8", **blocks)(folder)


def mxfp4(folder: Path) -> None:
    """Experts as gpt-oss has them: 4 bits a weight, a scale for each 32."""
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "initializer_range": 0.02}
    kinds = ["full_attention", "sliding_attention"]
    made = GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, layer_types=kinds)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GptOssForCausalLM(made).save_pretrained(folder)
        rewrite_weights(folder, _in_mxfp4)
    quantized_config("mxfp4", modules_to_not_convert=["model.embed_tokens", "lm_head"])(folder)


def _in_mxfp4(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for name, each in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = each.shape
            found[f"{name}_blocks"] = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            found[f"{name}_scales"] = torch.full((count, outputs, inputs // 32), 121, dtype=torch.uint8)
        else:
            found[name] = each.to(torch.bfloat16)
    return found


def another_kind(made: Any) -> Make:
    """Return what puts a model of another kind into the folder."""

    def write(folder: Path) -> None:
        (folder / _WEIGHTS).unlink()
        made().save_pretrained(folder)

    return write


def truncate_weights(folder: Path) -> None:
    (folder / _WEIGHTS).write_bytes((folder / _WEIGHTS).read_bytes()[:-100])


def in_shards(folder: Path) -> None:
    """Two shards with their index, as large models have them."""
    weights = load_file(folder / _WEIGHTS)
    (folder / _WEIGHTS).unlink()
    names, place = sorted(weights), dict[str, str]()
    for i, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        place |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def without_a_shard(folder: Path) -> None:
    in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def without_index(folder: Path) -> None:
    in_shards(folder)
    (folder / "model.safetensors.index.json").unlink()


def without_a_tensor(folder: Path) -> None:
    rewrite_weights(folder, lambda all_of: {name: each for name, each in all_of.items() if "norm" not in name})


def not_finite(folder: Path) -> None:
    rewrite_weights(folder, lambda all_of: {name: each * torch.nan for name, each in all_of.items()})


def resize_vocabulary(folder: Path) -> None:
    """Embeddings that are padded to a multiple, as many models have them."""
    write_model(folder, vocab_size=320)


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def named_templates(*names: str) -> Make:
    """Return what has several templates in the settings, as older folders do."""
    templates = [{"name": name, "template": TEMPLATE} for name in names]
    return both(without_template, lambda folder: change(folder / "tokenizer_config.json", chat_template=templates))


def legacy_template(folder: Path) -> None:
    without_template(folder)
    change(folder / "chat_template.json", chat_template=TEMPLATE)


def large(name: str, size: int) -> Make:
    """Return what makes a file of so many bytes; it takes no room on a disk."""

    def grow(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(size)

    return grow


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def classifier(folder: Path) -> None:
    (folder / _WEIGHTS).unlink()
    LlamaForSequenceClassification(CONFIGS["llama"](**SIZES)).save_pretrained(folder)


_SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3
_ORIGINAL = "give the folder of the original model"

KINDS = (
    Kind("a model as `save_pretrained` writes it", whole),
    Kind("two shards with their index", in_shards),
    Kind("embeddings padded to more ids than the tokenizer has", resize_vocabulary),
    Kind("stray pickles beside safetensors", text("pytorch_model.bin", "x")),
    Kind("block FP8, as DeepSeek's and Qwen's", block_fp8, note="stored in FP8"),
    Kind("MXFP4 experts, as gpt-oss has them", mxfp4, note="stored in MXFP4"),
    Kind("a padding token past the embeddings", with_tokens(pad_token="[PAD]"), note="its end token pads instead"),
    Kind(
        "a control token past the embeddings",
        with_tokens(AddedToken("<|image|>", special=True)),
        note="in texts it is spelled out",
    ),
    Kind("no chat template", without_template, note="the plain one is used"),
    Kind("named templates, one of them the default", named_templates("default", "tool_use")),
    Kind("`additional_chat_templates/`", text("additional_chat_templates/tool_use.jinja", TEMPLATE)),
    Kind(
        "`generation_config.json` with penalties",
        lambda folder: change(folder / "generation_config.json", repetition_penalty=1.05, no_repeat_ngram_size=3),
        note="--generation-config vllm",
    ),
    Kind(
        "a plain token added, embeddings not resized", with_tokens(AddedToken("wombat")), "call resize_token_embeddings"
    ),
    Kind("a vocabulary larger than the embeddings", larger_vocabulary, "call resize_token_embeddings"),
    Kind("pad_token_id of config.json past the embeddings", config(pad_token_id=300), "pad_token_id in config.json"),
    Kind("NVIDIA ModelOpt's FP8", model_opt, "NVIDIA ModelOpt"),
    Kind("ModelOpt, named in config.json", quantized_config("modelopt", quant_algo="FP8"), "NVIDIA ModelOpt"),
    Kind("bitsandbytes NF4", quantized_config("bitsandbytes", load_in_4bit=True), "already quantized (bitsandbytes)"),
    Kind("bitsandbytes int8", quantized_config("bitsandbytes", load_in_8bit=True), "already quantized (bitsandbytes)"),
    Kind("GPTQ", quantized_config("gptq", bits=4), _ORIGINAL),
    Kind("AWQ", quantized_config("awq", bits=4), _ORIGINAL),
    Kind("compressed-tensors", quantized_config("compressed-tensors", format="int-quantized"), _ORIGINAL),
    Kind("MLX, 4 bits", config(quantization={"group_size": 64, "bits": 4}), "already quantized (MLX)"),
    Kind("a method that nobody knows", quantized_config("nonsense"), "already quantized (nonsense)"),
    Kind("weights in int8, and no word of it", in_int8, "config.json does not say how"),
    Kind("scales beside the weights, and no word of them", scales_without_a_word, "they are quantized"),
    Kind("weights of another architecture (biases would be dropped)", other_architecture, "another architecture"),
    Kind("config.json of a wider model", config(hidden_size=64), "of different models"),
    Kind("GGUF", instead("model-Q4_K_M.gguf"), "llama.cpp"),
    Kind("pickled weights alone", instead("pytorch_model.bin"), "pickled"),
    Kind("no weights at all", instead(), "model.safetensors is missing"),
    Kind("a LoRA adapter", adapter, "it is an adapter"),
    Kind("a pointer of Git LFS", text(_WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    Kind("a file cut off", truncate_weights, "is not whole"),
    Kind("a shard is missing", without_a_shard, "model-00002-of-00002.safetensors is missing"),
    Kind("shards without their index", without_index, "model.safetensors.index.json is missing"),
    Kind("a tensor is missing", without_a_tensor, "its weights lack model.layers.0.input_layernorm.weight"),
    Kind("weights that are not finite", not_finite, "not finite"),
    Kind("no config.json", lambda folder: (folder / "config.json").unlink(), "no config.json"),
    Kind("config.json is broken", text("config.json", '{"a": [1,,]}'), "config.json is broken"),
    Kind(
        "tokenizer_config.json is broken",
        text("tokenizer_config.json", '{"a": [1,,]}'),
        "tokenizer_config.json is broken",
    ),
    Kind("generation_config.json is broken", text("generation_config.json", "[]"), "generation_config.json is broken"),
    Kind("tokenizer.json is broken", text("tokenizer.json", '{"a": [1,,]}'), "tokenizer.json is broken"),
    Kind("no tokenizer", without_tokenizer, "tokenizer"),
    Kind("code of its own", config(auto_map={"AutoModelForCausalLM": "evil.Model"}), "config.json names code to run"),
    Kind(
        "generation_config.json with code of its own",
        lambda folder: change(folder / "generation_config.json", auto_map={}),
        "generation_config.json names code to run",
    ),
    Kind("a processor with code of its own", text("processor_config.json", '{"auto_map": {}}'), "names code to run"),
    Kind("`custom_generate/`", text("custom_generate/generate.py", ""), "custom_generate/ is code"),
    Kind("named templates without a default", named_templates("rag", "tool_use"), "none is the default"),
    Kind("a template in `chat_template.json` alone", legacy_template, "chat_template.json alone"),
    Kind(
        "a template that refuses every conversation",
        text("chat_template.jinja", "{{ raise_exception('no') }}"),
        "cannot write a question: no",
    ),
    Kind("a template that never ends", text("chat_template.jinja", _ENDLESS), "too long"),
    Kind("a template that is no Jinja", text("chat_template.jinja", "{% if %}"), "chat template"),
    Kind("a template of 200 MB", large("chat_template.jinja", 200 << 20), "chat_template.jinja has 200 MB"),
    Kind(
        "tokenizer_config.json of 200 MB", large("tokenizer_config.json", 200 << 20), "tokenizer_config.json has 200 MB"
    ),
    Kind("max_position_embeddings of 10^15", config(max_position_embeddings=10**15), "max_position_embeddings"),
    Kind("a classifier or reward model", classifier, "a classifier or reward model"),
    Kind(
        "a masked language model", another_kind(lambda: BertForMaskedLM(BertConfig(**_SMALL))), "masked language model"
    ),
    Kind(
        "an encoder with a decoder",
        another_kind(lambda: T5ForConditionalGeneration(T5Config(d_model=32, num_layers=1, num_heads=2, d_ff=48))),
        "an encoder with a decoder",
    ),
    Kind("a vision model", another_kind(lambda: CLIPVisionModel(CLIPVisionConfig(**_SMALL))), "vision"),
    Kind("a model_type that transformers does not know", config(model_type="nosuch"), "its model_type 'nosuch'"),
)


def write_kind(kind: Kind, root: Path) -> Path:
    """Write a folder of a kind; its name is `model` in every sentence."""
    folder = root / "model"
    shutil.rmtree(folder, ignore_errors=True)
    write_model(folder)
    kind.make(folder)
    return folder


def by_files(folder: Path) -> str:
    """Return the fault that files alone tell, or an empty text."""
    return next((each.sentence for each in findings(folder) if each.is_fault), "")


def by_trial(folder: Path) -> str:
    """Return what the trial refuses a folder with, or an empty text."""
    try:
        try_base(folder)
    except SpardError as error:
        return error.message
    return ""


def finding_notes(folder: Path) -> str:
    """Return what the provider is told of a folder that is taken."""
    return "; ".join(each.sentence for each in findings(folder) if not each.is_fault)


def table_row(kind: Kind, folder: Path, refused: str) -> str:
    """Return the line of the page's table for a folder that was refused with a message, or taken ("")."""
    words = refused.removeprefix("model 'model' cannot be loaded: ") or finding_notes(folder) or "-"
    words = words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    for number, repeated in enumerate(_REPEATED, 1):
        words = words.replace(repeated, f"({number})")
    return f"| {kind.name} | {'no' if refused else 'yes'} | {words} |"


def table(root: Path) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield "| folder | taken | what is said |"
    yield "|---|---|---|"
    for kind in KINDS:
        folder = write_kind(kind, root)
        yield table_row(kind, folder, by_trial(folder))


def page(root: Path) -> str:
    """Return the whole page."""
    return PAGE_HEAD + "\n".join(table(root)) + "\n"


# Parts that many messages have: the page writes them once, above the table.
_REPEATED = (
    "training and merging need the weights from before that: give the folder of the original model",
    "call resize_token_embeddings and save the model, or remove the tokens",
    "copy or download the file again",
    "which is never run here",
    "give a causal language model",
)
PAGE_HEAD = """# Base folders

<!-- generated by `python -m tests.spard.base_folders`; do not edit -->

This page has what `spard models add` and `spard check-model` say of the folders that people have; a tiny model of each
kind was made for it. `POST /v1/admin/models` reads the files alone. Jobs, engines and `spard run` also check the loaded
weights. Every folder that is taken answers a message here, and a short job runs on those that are not plain
(`tests/worker/test_taken_folders.py`).

A number in brackets stands for a part of the message:

"""
PAGE_HEAD += "".join(f"{number}. {repeated}\n" for number, repeated in enumerate(_REPEATED, 1)) + "\n"


def main() -> None:
    """Write the page."""
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory() as root:
        PAGE.write_text(page(Path(root)))


if __name__ == "__main__":
    main()

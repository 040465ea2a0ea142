"""A folder's text is split as its tokenizer.json says, whatever class transformers takes for its `model_type`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    GemmaConfig,
    GemmaTokenizer,
    GPT2Config,
    GPT2Tokenizer,
    LlamaConfig,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

from app.files.tokenizer import LightTokenizer
from spard.commands import check_model
from spard.config import Lora, Recipe
from spard.errors import AdapterNotProved, InvalidRecipe
from spard.models.adapters import save_adapter, save_merged
from spard.models.base import load_base, read_tokenizer
from spard.models.lora import trainable_model
from spard.models.stored_tokenizer import PROBES
from spard.pipeline.library import run
from spard.selection.embeddings import load_encoder
from tests.spard.encoder_folders import write_encoder
from tests.spard.parts import write_model
from tests.spard.test_run import write_run

# Words, up to three digits, signs, line breaks and spaces, as Llama 3's tokenizer splits a text
RULE = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAST: Any = PreTrainedTokenizerFast  # its arguments are not typed
TEXT = "costs 12345\n\n"


def own_tokenizer() -> Any:
    """A tokenizer that splits as Llama 3's does, with 400 tokens."""
    known = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(RULE), "isolated")
    known.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    known.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    known.train_from_iterator(
        [TEXT] * 9,
        trainers.BpeTrainer(
            vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
        ),
    )
    return FAST(tokenizer_object=known, bos_token="<s>", eos_token="</s>")


def ids_by_file(folder: Path, text: str) -> list[int]:
    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return found


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A qwen2 model beside a tokenizer of its own."""
    folder = write_model(tmp_path / "model", "qwen2", vocab_size=400)
    own_tokenizer().save_pretrained(folder)
    return folder


def test_a_tokenizer_of_one_s_own_beside_qwen2_is_read_as_its_file_says(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ids(AutoTokenizer.from_pretrained(own_folder), TEXT) != ids_by_file(own_folder, TEXT)
    loaded = load_base(own_folder, device="cpu").tokenizer
    for text in (TEXT, *PROBES):
        assert ids(loaded, text) == ids_by_file(own_folder, text) == LightTokenizer(own_folder)([text])["input_ids"][0]
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    assert check_model.main([str(own_folder)]) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "tokenizer.json" in line]
    assert told.startswith("note: for its model_type transformers splits text by the rules of Qwen2Tokenizer")


def test_what_is_saved_beside_an_adapter_splits_alike_in_a_program_of_others(own_folder: Path, tmp_path: Path) -> None:
    read_tokenizer(str(own_folder)).save_pretrained(tmp_path / "adapter")
    assert ids(AutoTokenizer.from_pretrained(tmp_path / "adapter"), TEXT) == ids_by_file(own_folder, TEXT)


def byte_vocabulary() -> dict[str, int]:
    return {token: i for i, token in enumerate(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}


def piece_vocabulary() -> dict[str, int]:
    """Pieces of sentencepiece with a byte each, for texts that have other characters."""
    named = ["<pad>", "<eos>", "<bos>", "<unk>", "<s>", "</s>", "▁", "▁a", "1", "2", "\n"]
    return {token: i for i, token in enumerate([*named, *(f"<0x{i:02X}>" for i in range(256))])}


OWN: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, lambda: Qwen2Tokenizer(vocab=byte_vocabulary(), merges=[])),
    "qwen3": (Qwen3Config, lambda: Qwen2Tokenizer(vocab=byte_vocabulary(), merges=[])),
    "gpt2": (GPT2Config, lambda: GPT2Tokenizer(vocab=byte_vocabulary(), merges=[])),
    "gpt2-prefix": (GPT2Config, lambda: GPT2Tokenizer(vocab=byte_vocabulary(), merges=[], add_prefix_space=True)),
    "llama": (LlamaConfig, lambda: LlamaTokenizer(vocab=piece_vocabulary(), merges=[])),
    "gemma": (GemmaConfig, lambda: GemmaTokenizer(vocab=piece_vocabulary(), merges=[])),
    "llama-3": (LlamaConfig, own_tokenizer),
}


@pytest.mark.parametrize("name", OWN)
def test_the_tokenizers_of_transformers_own_families_are_left_as_they_are(name: str, tmp_path: Path) -> None:
    config, make = OWN[name]
    config().save_pretrained(tmp_path)
    make().save_pretrained(tmp_path)
    usual, loaded = AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(str(tmp_path))
    assert (type(loaded), loaded.replaced_class) == (type(usual), None)
    assert [ids(loaded, text) for text in PROBES] == [ids(usual, text) for text in PROBES]


def test_a_prefix_space_that_the_settings_ask_for_is_no_rule_of_a_class(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    OWN["gpt2"][1]().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_prefix_space": True}))
    assert read_tokenizer(str(tmp_path)).replaced_class is None


def test_a_llama_2_folder_as_earlier_versions_wrote_it_is_split_as_it_says(tmp_path: Path) -> None:
    """They wrote the word boundary as a normalizer; transformers rebuilds it as a pre-tokenizer, to the same ids."""
    LlamaConfig().save_pretrained(tmp_path)
    old = Tokenizer(
        models.BPE(vocab=piece_vocabulary(), merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    old.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    old.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    FAST(tokenizer_object=old, **named).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(named | {"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    loaded = read_tokenizer(str(tmp_path))
    assert [ids(loaded, text) for text in PROBES] == [ids_by_file(tmp_path, text) for text in PROBES]


def test_the_tokenizer_of_a_sentence_encoder_is_read_so_too(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", is_qwen2=True)
    own_tokenizer().save_pretrained(folder)
    assert ids(AutoTokenizer.from_pretrained(folder), TEXT) != ids_by_file(folder, TEXT)
    for text in (TEXT, *PROBES):
        assert ids(load_encoder(folder, "cpu").tokenizer, text) == ids_by_file(folder, text)


def test_settings_of_the_class_that_an_encoder_names_are_followed(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Bread", "bread"]
    folder = write_encoder(tmp_path / "encoder")
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}, do_lower_case=True).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": False}))
    assert (ids_by_file(folder, "Bread"), ids(load_encoder(folder, "cpu").tokenizer, "Bread")) == ([6], [5])


def test_all_weights_of_such_a_model_are_not_trained(own_folder: Path, tmp_path: Path) -> None:
    """AutoTokenizer would split text for the trained folder by other rules than the training did."""
    spec = write_run(own_folder, tmp_path)
    with pytest.raises(InvalidRecipe, match="rules of Qwen2Tokenizer"):
        run(replace(spec, recipe=replace(spec.recipe, lora=None)), tmp_path / "out", lambda message: None)
    assert not (tmp_path / "out" / "adapter").exists()

    base = load_base(own_folder, device="cpu")
    save_adapter(trainable_model(base.model, Recipe(lora=Lora(rank=4))), base, "public", tmp_path / "adapter")
    with pytest.raises(AdapterNotProved, match="load the adapter beside its base model"):
        save_merged(load_base(own_folder, device="cpu"), tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()

"""Sentence encoders: vectors as their folders say, and folders that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spard.models.folder.encoder import UnfitEmbedder, encoder_digest, read_encoder
from spard.selection.embeddings import Encoder, encode, load_encoder
from tests.spard.encoder_folders import WIDTH, write_encoder

TEXTS = ["how to bake a loaf of bread", "do harm", "", "how to bake bread 0 1 2 3 4 5 6 7 8 9 0 1"]


def states(encoder: Encoder, text: str) -> Tensor:
    """Return the states of one text's tokens, without padding."""
    ids = encoder.tokenizer(text, truncation=True, max_length=encoder.max_tokens)["input_ids"]
    with torch.no_grad():
        found_TD: Tensor = encoder.model(torch.tensor([ids])).last_hidden_state[0]
    return found_TD


POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda x_TD: x_TD[0],
    "max": lambda x_TD: x_TD.amax(dim=0),
    "mean": lambda x_TD: x_TD.mean(dim=0),
    "mean_sqrt_len_tokens": lambda x_TD: x_TD.sum(dim=0) / len(x_TD) ** 0.5,
    "weightedmean": lambda x_TD: (x_TD * (w := torch.arange(1.0, len(x_TD) + 1))[:, None]).sum(dim=0) / w.sum(),
    "lasttoken": lambda x_TD: x_TD[-1],
}


@pytest.mark.parametrize("mode", POOLED)
@pytest.mark.parametrize("is_decoder", [False, True])
def test_each_pooling_is_that_of_a_text_alone(tmp_path: Path, mode: str, is_decoder: bool) -> None:
    folder = write_encoder(
        tmp_path / "e", pooling={"pooling_mode": mode}, steps=("Transformer", "Pooling"), is_decoder=is_decoder
    )
    encoder = load_encoder(folder, "cpu")
    expected_ND = torch.stack([POOLED[mode](states(encoder, text)) for text in TEXTS])
    torch.testing.assert_close(encode(encoder, TEXTS), expected_ND, rtol=1e-4, atol=1e-5)


def test_poolings_stand_side_by_side_and_vectors_have_length_one(tmp_path: Path) -> None:
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": False}
    encoder = load_encoder(write_encoder(tmp_path / "e", pooling=flags), "cpu")
    assert encoder.layout.pooling == ("cls", "mean")
    found_ND = encode(encoder, TEXTS)
    assert found_ND.shape == (len(TEXTS), 2 * WIDTH)
    torch.testing.assert_close(found_ND.norm(dim=1), torch.ones(len(TEXTS)))


def test_the_default_prompt_stands_before_each_text(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query : ", "document": ""}, "default_prompt_name": "query"}
    with_prompt = load_encoder(write_encoder(tmp_path / "a", prompts=prompts), "cpu")
    plain = load_encoder(write_encoder(tmp_path / "b", prompts={**prompts, "default_prompt_name": None}), "cpu")
    torch.testing.assert_close(encode(with_prompt, ["do harm"]), encode(plain, ["query : do harm"]))
    assert not torch.allclose(encode(with_prompt, ["do harm"]), encode(plain, ["do harm"]), atol=1e-3)


def test_a_prompt_that_is_not_pooled_is_read_all_the_same(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query : "}, "default_prompt_name": "query"}
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    encoder = load_encoder(
        write_encoder(tmp_path / "e", prompts=prompts, pooling=pooling, steps=("Transformer", "Pooling")), "cpu"
    )
    expected_D = states(encoder, "query : do harm")[3:].mean(dim=0)  # without [CLS], "query" and ":"
    torch.testing.assert_close(encode(encoder, ["do harm"])[0], expected_D, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("own", "expected"), [({"max_seq_length": 12}, 12), ({"max_seq_length": None}, 32)])
def test_texts_are_cut_at_the_length_that_the_files_state(tmp_path: Path, own: dict[str, Any], expected: int) -> None:
    encoder = load_encoder(write_encoder(tmp_path / "e", own=own), "cpu")
    assert encoder.max_tokens == expected
    long = " ".join(["bread"] * 40)
    torch.testing.assert_close(encode(encoder, [long]), encode(encoder, [f"{long} 1 2 3"]))


def test_without_modules_states_are_averaged(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "e")
    (folder / "modules.json").unlink()
    layout = read_encoder(folder)
    assert (layout.pooling, layout.normalizes) == (("mean",), False)
    assert encode(load_encoder(folder, "cpu"), []).shape == (0, WIDTH)


def test_words_are_lowered_where_the_files_say_so(tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path / "e", own={"max_seq_length": 12, "do_lower_case": True}), "cpu")
    torch.testing.assert_close(encode(encoder, ["DO Harm"]), encode(encoder, ["do harm"]))


def test_the_digest_is_of_pooling_and_prompts_too(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "e")
    before = encoder_digest(folder)
    (folder / "README.md").write_text("words")
    assert encoder_digest(folder) == before
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    assert encoder_digest(folder) != before


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"processing_kwargs": {"text": {"max_length": 5}}, "max_seq_length": 12}, 5),
        ({"tokenizer_args": {"model_max_length": 6}, "model_args": {"attn_implementation": "sdpa"}}, 6),
        ({"modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}}, 32),
    ],
)
def test_options_of_tokenizing_are_followed(tmp_path: Path, own: dict[str, Any], expected: int) -> None:
    assert load_encoder(write_encoder(tmp_path / "e", own=own), "cpu").max_tokens == expected


def test_the_transformer_s_settings_may_have_the_name_of_another_kind(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "e", own={"max_seq_length": 7, "do_lower_case": True})
    (folder / "sentence_bert_config.json").rename(folder / "sentence_xlm-roberta_config.json")
    layout = read_encoder(folder)
    assert (layout.max_tokens, layout.lower_case) == (7, True)


def test_vectors_are_cut_after_they_are_normalized(tmp_path: Path) -> None:
    whole_ND = encode(load_encoder(write_encoder(tmp_path / "a"), "cpu"), TEXTS)
    cut_ND = encode(load_encoder(write_encoder(tmp_path / "b", prompts={"truncate_dim": 5}), "cpu"), TEXTS)
    torch.testing.assert_close(cut_ND, whole_ND[:, :5])


def test_a_transformer_in_a_subfolder_counts_for_the_digest(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "e")
    expected_ND = encode(load_encoder(folder, "cpu"), TEXTS)
    (folder / "0_Transformer").mkdir()
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.json")]:
        if path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(folder / "0_Transformer" / path.name)
    modules = folder / "modules.json"
    modules.write_text(modules.read_text().replace('"path": ""', '"path": "0_Transformer"'))
    encoder = load_encoder(folder, "cpu")
    torch.testing.assert_close(encode(encoder, TEXTS), expected_ND)
    weights = folder / "0_Transformer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert encoder_digest(folder) != encoder.digest


def test_a_language_model_without_modules_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "e", is_decoder=True)
    _change_config(folder, architectures=["Qwen3ForCausalLM"])
    assert read_encoder(folder).pooling == ("mean",)
    (folder / "modules.json").unlink()
    with pytest.raises(UnfitEmbedder, match="language model"):
        read_encoder(folder)
    _change_config(folder, is_causal=False)
    assert read_encoder(folder).pooling == ("mean",)


def _change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _spoil_architecture(folder: Path) -> None:
    _change_config(folder, is_encoder_decoder=True)


def _spoil_half(folder: Path) -> None:
    _change_config(folder, architectures=["T5EncoderModel"])


def _spoil_options(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text('{"config_args": {"is_causal": false}}')


def _spoil_template(folder: Path) -> None:
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    own = {"modality_config": {"text": text, "message": text}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(own))


def _spoil_output(folder: Path) -> None:
    own = {"modality_config": {"text": {"method": "get_text_features", "method_output_name": "pooler_output"}}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(own))


def _spoil_depth(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": "a/b"}]')


def _spoil_types(folder: Path) -> None:
    (folder / "modules.json").write_text("[5]")


def _spoil_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _spoil_config(folder: Path) -> None:
    _change_config(folder, auto_map={"AutoModel": "own.Model"})


def _spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _spoil_steps(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')


def _spoil_path(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": "../x"}]')


def _spoil_pooling(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "median"}')


def _spoil_json(folder: Path) -> None:
    (folder / "modules.json").write_text("[{")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_spoil_weights, "pickled"),
        (_spoil_config, "code of its own"),
        (_spoil_tokenizer, "tokenizer.json"),
        (_spoil_steps, "'Dense'"),
        (_spoil_path, "outside"),
        (_spoil_pooling, "'median'"),
        (_spoil_json, "cannot be read"),
        (_spoil_types, "cannot be read"),
        (_spoil_depth, "subfolder"),
        (_spoil_architecture, "decoder"),
        (_spoil_half, "decoder"),
        (_spoil_options, "config_kwargs.is_causal"),
        (_spoil_template, "chat template"),
        (_spoil_output, "another output"),
    ],
)
def test_a_folder_that_is_no_encoder_is_refused_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    folder = write_encoder(tmp_path / "e")
    spoil(folder)
    with pytest.raises(UnfitEmbedder, match=reason) as found:
        read_encoder(folder)
    assert found.value.param == "recipe.selection.embedder"


def test_weights_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_encoder(tmp_path / "e")
    monkeypatch.setattr("spard.models.folder.encoder.MOST_BYTES", 10)
    with pytest.raises(UnfitEmbedder, match="at most"):
        read_encoder(folder)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(UnfitEmbedder, match="no folder"):
        load_encoder("/nowhere/at/all", "cpu")

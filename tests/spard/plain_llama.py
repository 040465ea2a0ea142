"""A Llama with at most one LoRA adapter in plain NumPy, for the fake vLLM: its processes start in a tenth of a second.

Only what the tests' models have: plain rotary positions, untied heads and grouped queries. Another model, or a tensor
of an adapter that has no place, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float32]


class PlainLlama:
    """Weights of a transformers folder; the adapter counts unless `adapter_scale` is 0."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == "llama", config["model_type"]
        assert config["rope_parameters"]["rope_type"] == "default"
        assert not config["tie_word_embeddings"]
        self._weights: dict[str, Array] = load_file(folder / "model.safetensors")
        self._adapter: dict[str, Array] = {}
        self._layers, self._eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self._heads, self._groups = config["num_attention_heads"], config["num_key_value_heads"]
        self._width, self._theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
        self.adapter_scale = 1.0

    def load_adapter(self, folder: Path, config: dict[str, Any], sign: float = 1.0) -> None:
        """Add the product of each pair of an adapter's matrices, as often as its scaling says, times `sign`."""
        assert not config.get("use_rslora")
        assert not config.get("use_dora")
        tensors: dict[str, Array] = load_file(folder / "adapter_model.safetensors")
        for name in [each for each in tensors if ".lora_A." in each]:
            a, b = tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B."))
            place = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            assert place in self._weights, place
            self._adapter[place] = np.float32(sign * config["lora_alpha"] / config["r"]) * (b @ a)
        assert not tensors, [*tensors]

    def shift_output(self) -> None:
        """Change the rows of the first 128 tokens of the output layer, as if it were another model."""
        self._weights["lm_head.weight"][:128] += 0.1

    def next_log_p(self, ids: list[int]) -> Array:
        """Return the log-probabilities of the token after `ids`, one for each of the vocabulary."""
        states_TH = self._weights["model.embed_tokens.weight"][ids]
        rotation = self._rotation(len(ids))
        for i in range(self._layers):
            at = f"model.layers.{i}"
            states_TH = states_TH + self._attention(f"{at}.self_attn", self._norm(at, "input", states_TH), rotation)
            normed_TH = self._norm(at, "post_attention", states_TH)
            gate_TF = self._linear(f"{at}.mlp.gate_proj", normed_TH)
            inner_TF = gate_TF / (1 + np.exp(-gate_TF)) * self._linear(f"{at}.mlp.up_proj", normed_TH)
            states_TH = states_TH + self._linear(f"{at}.mlp.down_proj", inner_TF)
        last_1H = self._normalize(states_TH[-1:], self._weights["model.norm.weight"])
        logits_V: Array = self._linear("lm_head", last_1H)[0]
        shifted_V = logits_V - logits_V.max()
        log_p_V: Array = shifted_V - np.log(np.exp(shifted_V).sum())
        return log_p_V

    def _attention(self, at: str, states_TH: Array, rotation: tuple[Array, Array]) -> Array:
        length = len(states_TH)
        q_NTD, k_GTD, v_GTD = (
            self._linear(f"{at}.{name}_proj", states_TH).reshape(length, -1, self._width).swapaxes(0, 1)
            for name in "qkv"
        )
        q_NTD, k_GTD = rotate(q_NTD, rotation), rotate(k_GTD, rotation)
        k_NTD, v_NTD = (each.repeat(self._heads // self._groups, axis=0) for each in (k_GTD, v_GTD))
        scores_NTT = q_NTD @ k_NTD.swapaxes(1, 2) / np.float32(self._width**0.5)
        scores_NTT = np.where(np.tri(length, dtype=bool), scores_NTT, np.float32(-np.inf))
        shares_NTT = np.exp(scores_NTT - scores_NTT.max(axis=-1, keepdims=True))
        shares_NTT /= shares_NTT.sum(axis=-1, keepdims=True)
        mixed_TH = (shares_NTT @ v_NTD).swapaxes(0, 1).reshape(length, -1)
        return self._linear(f"{at}.o_proj", mixed_TH)

    def _linear(self, at: str, states: Array) -> Array:
        name = f"{at}.weight"
        out: Array = states @ self._weights[name].T
        if self.adapter_scale and name in self._adapter:
            out = out + states @ self._adapter[name].T
        return out

    def _norm(self, at: str, which: str, states_TH: Array) -> Array:
        return self._normalize(states_TH, self._weights[f"{at}.{which}_layernorm.weight"])

    def _normalize(self, states_TH: Array, weight_H: Array) -> Array:
        mean_T1 = np.square(states_TH).mean(axis=-1, keepdims=True)
        scaled_TH: Array = weight_H * (states_TH / np.sqrt(mean_T1 + np.float32(self._eps)))
        return scaled_TH

    def _rotation(self, length: int) -> tuple[Array, Array]:
        frequencies = 1.0 / self._theta ** (np.arange(0, self._width, 2) / self._width)
        angles_TD = np.tile(np.outer(np.arange(length), frequencies), 2)
        return np.cos(angles_TD).astype(np.float32), np.sin(angles_TD).astype(np.float32)


def rotate(states_NTD: Array, rotation: tuple[Array, Array]) -> Array:
    """Turn each pair of the first and second half of a head by its position's angles."""
    cos_TD, sin_TD = rotation
    first, second = np.split(states_NTD, 2, axis=-1)
    turned_NTD = np.concatenate([-second, first], axis=-1)
    return np.asarray(states_NTD * cos_TD + turned_NTD * sin_TD, dtype=np.float32)


def top(log_p_V: Array, count: int) -> Iterator[tuple[int, float]]:
    """Yield the most probable tokens with their log-probabilities, the most probable first."""
    for token in np.argsort(-log_p_V, kind="stable")[:count]:
        yield int(token), float(log_p_V[token])

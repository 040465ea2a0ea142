"""Bindings to a few calls of llama.cpp's C interface, enough to read the logits after given tokens without a sampler.

The structures match llama.cpp 0.4.0, which `benchmarks.llama_cpp` installs; other versions differ.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = "0.4.0"
CACHE_TYPES = {"f32": 0, "f16": 1}
_CONTEXT, _BATCH = 512, 2048  # defaults of llama_context_default_params; other values mean that the layout differs


class _ModelParams(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("devices", "buffer_overrides")),
        *((name, c.c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, c.c_void_p) for name in ("tensor_split", "progress", "progress_data", "overrides")),
        *((name, c.c_bool) for name in ("vocab_only", "check_tensors", "extra_buffers", "no_host", "no_alloc", "mtp")),
    )


class _ContextParams(c.Structure):
    _fields_ = (
        *((name, c.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c.c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c.c_int32) for name in ("n_threads", "n_threads_batch", "type", "rope_scaling", "pooling")),
        *((name, c.c_int32) for name in ("attention", "flash_attention")),
        *((name, c.c_float) for name in ("rope_base", "rope_scale", "yarn_ext", "yarn_attn", "yarn_fast", "yarn_slow")),
        ("yarn_context", c.c_uint32),
        ("defrag", c.c_float),
        *((name, c.c_void_p) for name in ("eval_callback", "eval_data")),
        *((name, c.c_int32) for name in ("type_k", "type_v")),
        *((name, c.c_void_p) for name in ("abort", "abort_data")),
        *((name, c.c_bool) for name in ("embeddings", "offload", "no_perf", "op_offload", "swa_full", "unified")),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("other", c.c_void_p),
    )


class _Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("tokens", c.POINTER(c.c_int32)),
        *((name, c.c_void_p) for name in ("embeddings", "positions", "n_seq_id", "seq_id", "logits")),
    )


class Llama:
    """A GGUF model loaded in llama.cpp, on the CPU with one thread."""

    def __init__(self, libraries: Path, model: Path, cache: str, *, flash_attention: bool | None = None) -> None:
        """Load a GGUF file.

        `cache` is the number type of keys and values, `f32` or `f16`. With `flash_attention` None llama.cpp chooses.
        """
        self._log = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda level, text, data: None)
        self._lib = _library(libraries)
        self._lib.llama_log_set(self._log, None)
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {model}")
        settings = self._lib.llama_context_default_params()
        if (settings.n_ctx, settings.n_batch) != (_CONTEXT, _BATCH):
            raise RuntimeError(f"This is not llama.cpp {VERSION}: its structures differ.")
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = CACHE_TYPES[cache]
        settings.flash_attention = -1 if flash_attention is None else int(flash_attention)
        settings.n_ctx = 2 * _CONTEXT
        self._context = self._lib.llama_init_from_model(self._model, settings)
        self._vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._size = self._lib.llama_vocab_n_tokens(self._vocabulary)

    def tokenize(self, text: str) -> list[int]:
        """Return llama.cpp's tokens of a rendered prompt, with the tokens that it adds before each text."""
        encoded = text.encode()
        tokens = (c.c_int32 * (len(encoded) + 8))()
        count = self._lib.llama_tokenize(self._vocabulary, encoded, len(encoded), tokens, len(tokens), True, True)
        return list(tokens[:count])

    def clear(self) -> None:
        """Start a new sequence: drop all keys and values of earlier tokens."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the sequence, and return the logits after the last one, shape `[V]`."""
        array = (c.c_int32 * len(tokens))(*tokens)
        code = self._lib.llama_decode(self._context, _Batch(len(tokens), array))
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        found = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, (self._size,)).copy()

    def close(self) -> None:
        """Free the memory that llama.cpp holds for the context and the model."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def _library(folder: Path) -> Any:
    """Load libllama with its backend for this CPU, and declare the types of the calls."""
    for name in ("libggml-base.so", f"libggml.v{VERSION}.so"):
        ggml = c.CDLL(str(folder / name), c.RTLD_GLOBAL)
    lib = c.CDLL(str(folder / f"libllama.v{VERSION}.so"), c.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    pointer, integer = c.c_void_p, c.c_int32
    for name, result, arguments in (
        ("llama_model_default_params", _ModelParams, []),
        ("llama_context_default_params", _ContextParams, []),
        ("llama_model_load_from_file", pointer, [c.c_char_p, _ModelParams]),
        ("llama_init_from_model", pointer, [pointer, _ContextParams]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", integer, [pointer]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, c.c_bool]),
        ("llama_decode", integer, [pointer, _Batch]),
        ("llama_get_logits_ith", c.POINTER(c.c_float), [pointer, integer]),
        ("llama_free", None, [pointer]),
        ("llama_model_free", None, [pointer]),
    ):
        getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
    lib.llama_tokenize.argtypes = [pointer, c.c_char_p, integer, c.POINTER(integer), integer, c.c_bool, c.c_bool]
    return lib

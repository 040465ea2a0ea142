"""Settings of generation_config.json that change greedy decoding: some servers follow them, audits do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from spard.models.folder.finding import Finding, note
from spard.models.folder.reading import read_object

FILE = "generation_config.json"
# Settings that change greedy decoding, with their neutral values.
_NEUTRAL: Mapping[str, object] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "length_penalty": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "diversity_penalty": 0,
    "guidance_scale": 1,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "prefix_allowed_tokens_fn": None,
    "watermarking_config": None,
}


def penalties(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a generation configuration that change greedy replies."""
    found = {name: settings[name] for name in _NEUTRAL if settings.get(name) is not None}
    return {name: value for name, value in found.items() if value not in (_NEUTRAL[name], 0, [], {})}


def decoding_findings(folder: Path) -> Iterator[Finding]:
    """Yield a note if servers that follow the file decode differently from an audit."""
    if found := penalties(read_object(folder, FILE)):
        named = ", ".join(f"{name} {str(value)[:40]}" for name, value in found.items())
        yield note(
            "decoding_settings",
            f"{FILE} sets {named}: audits and the embedded engine decode without it; vLLM and generate() follow it, so "
            "start vLLM with `--generation-config vllm`",
        )

"""The check of a base model's folder, shared by the service, `spard check-model` and the loader of base models.

Each part gives its findings: folders without trainable weights (adapters, GGUF, pickles and others); ids of the
tokenizer past the end of the embeddings, which cannot be looked up; a chat template other than the one that
transformers finds; settings of generation_config.json that change greedy decoding, which some servers follow and audits
do not. `spard.models.folder.reading` checks config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spard.digests import ADDITIONAL_TEMPLATES as ADDITIONAL
from spard.models.folder.reading import (
    INDEX,
    Finding,
    FolderFault,
    all_tensors,
    configuration_findings,
    note,
    oversized_files,
    read_object,
    weight_files,
    weights_fault,
    whole_number,
)

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
    """Return the remedy for faulty weights: rename a file, restore the index, or download the file again."""
    if not fault.endswith("is missing"):
        return ": download it again"
    others = {path.name for path in folder.glob("*.safetensors")} - weight_files(folder)
    if others and not (folder / INDEX).is_file():
        hint = f"{INDEX} is missing, too" if len(others) > 1 else "rename it"
        return f", and there is {sorted(others)[0]}: {hint}"
    return ": download it again"


_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_LONGEST = 60  # maximum characters of a quoted token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids by token, the set of control tokens, and the tokens with a role such as `eos_token`."""

    ids: Mapping[str, int]
    control: frozenset[str]
    roles: Mapping[str, str]


def vocabulary_findings(vocabulary: Vocabulary, rows: int) -> Iterator[Finding]:
    """Yield the findings of comparing a vocabulary with embeddings of `rows` rows.

    Control tokens past the embeddings are only noted: texts that contain them are spelled out, and padding is masked.
    """
    beyond = sorted((token_id, token) for token, token_id in vocabulary.ids.items() if token_id >= rows)
    plain = [each for each in beyond if each[1] not in vocabulary.control]
    if plain:
        token_id, token = plain[0]
        more = f", as have {len(plain) - 1} more" if plain[1:] else ""
        yield Finding(
            "tokens_past_embeddings",
            f"its tokenizer has the token {token[:_LONGEST]!r} with id {token_id}{more}, and the weights have "
            f"embeddings for {rows} ids only: call resize_token_embeddings and save the model, or remove the tokens",
        )
    roles = {name: token for name, token in vocabulary.roles.items() if vocabulary.ids.get(token, 0) >= rows}
    for name in ("eos_token", "bos_token"):
        if name in roles:
            what = f"its {name} {roles[name][:_LONGEST]!r} has id {vocabulary.ids[roles[name]]}"
            yield Finding("tokens_past_embeddings", f"{what}, and the weights have embeddings for {rows} ids only")
    if "pad_token" in roles:
        what = f"its padding token {roles['pad_token'][:_LONGEST]!r} lies past the embeddings"
        yield note("padding_past_embeddings", f"{what}: its end token pads instead, which is masked")
    if others := [token for _, token in beyond if token in vocabulary.control and token not in roles.values()]:
        what = f"its control token {others[0][:_LONGEST]!r} lies past the embeddings"
        more = f", as do {len(others) - 1} more" if others[1:] else ""
        yield note("control_past_embeddings", f"{what}{more}: in texts it is spelled out, and never written")


def read_vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary of `tokenizer.json` with the tokens that other files add."""
    tokens, settings = read_object(folder, "tokenizer.json"), read_object(folder, "tokenizer_config.json")
    ids = dict(_model_ids(tokens.get("model")))
    added = _read_added_tokens(tokens.get("added_tokens")) + _decoder(settings.get("added_tokens_decoder"))
    ids |= {token: token_id for token, token_id, _ in added}
    own = read_object(folder, "added_tokens.json").items()
    ids |= {token: number for token, value in own if (number := whole_number(value)) is not None and token not in ids}
    special = read_object(folder, "special_tokens_map.json") | settings
    roles = {
        name: text
        for name in ("eos_token", "bos_token", "pad_token", "unk_token")
        if (text := _text(special.get(name)))
    }
    return Vocabulary(ids, frozenset(token for token, _, is_control in added if is_control), roles)


def embedding_rows(folder: Path) -> int | None:
    """Return the number of rows of the embeddings; None if the headers do not show it."""
    found = [
        tensor["shape"] for name, tensor in all_tensors(folder) if name.endswith(_EMBEDDINGS) and "vis" not in name
    ]
    return next((int(shape[0]) for shape in found if len(shape) == 2), None)


def unknown_id(ids: Iterable[int], rows: int) -> int | None:
    """Return the largest of the token ids if it is past the `rows` embeddings, else None."""
    largest = max(ids, default=0)
    return largest if largest >= rows else None


def _model_ids(model: object) -> Iterator[tuple[str, int]]:
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        yield from (
            (token, number) for token, value in vocabulary.items() if (number := whole_number(value)) is not None
        )
    elif isinstance(vocabulary, list):  # Unigram: (token, score) in the order of ids
        yield from ((str(each[0]), i) for i, each in enumerate(vocabulary) if isinstance(each, list) and each)


def _read_added_tokens(found: object) -> list[tuple[str, int, bool]]:
    tokens = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [
        (str(each["content"]), number, each.get("special") is True)
        for each in tokens
        if "content" in each and (number := whole_number(each.get("id"))) is not None
    ]


def _decoder(found: object) -> list[tuple[str, int, bool]]:
    pairs = found.items() if isinstance(found, Mapping) else ()
    return _read_added_tokens(
        [{**each, "id": int(key)} for key, each in pairs if key.isdecimal() and isinstance(each, Mapping)]
    )


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


_LEGACY = "chat_template.json"
_OWN = "chat_template.jinja"


def read_template(folder: Path, settings: Mapping[str, object]) -> str | Mapping[str, str] | None:
    """Return the chat template as transformers finds it, or several by name; None if there is none.

    Template files override `tokenizer_config.json`. Raises `KeyError` for a list in an unknown form.
    """
    files = {path.stem: path for path in sorted(folder.glob(f"{ADDITIONAL}/*.jinja"))}
    # The same precedence as in transformers: template files override the tokenizer's settings.
    if (own := folder / _OWN).is_file():
        files = {"default": own, **files}
    if files:
        found = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return found["default"] if list(found) == ["default"] else found
    setting = settings.get("chat_template")
    if isinstance(setting, list):
        return {str(each["name"]): str(each["template"]) for each in setting} or None
    return setting if isinstance(setting, str) else None


def template_findings(folder: Path) -> Iterator[Finding]:
    """Yield findings about the location of the chat template; the template itself is not rendered."""
    found = read_template(folder, read_object(folder, "tokenizer_config.json"))
    if isinstance(found, str) and found:
        return
    if isinstance(found, Mapping):
        if "default" not in found:
            sentence = f"it has several chat templates ({', '.join(sorted(found))[:200]}), none is the default"
            yield Finding("no_default_template", f"{sentence}: write the one to use into {_OWN}")
    elif (folder / _LEGACY).is_file():
        sentence = (
            f"its chat template stands in {_LEGACY} alone, which tokenizers do not read: write its text into {_OWN}"
        )
        yield Finding("legacy_template", sentence)
    elif read_object(folder, "tokenizer_config.json").get("chat_template"):
        sentence = f"the chat_template of tokenizer_config.json is neither a text nor a list: write it into {_OWN}"
        yield Finding("no_default_template", sentence)
    elif (folder / "tokenizer_config.json").is_file():
        sentence = (
            "it has no chat template: the plain one is used (a heading for each turn), which suits a model that was "
            f"never trained to chat; put the model's own into {_OWN} if there is one"
        )
        yield note("plain_template", sentence)


DECODING = "generation_config.json"
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
    if found := penalties(read_object(folder, DECODING)):
        named = ", ".join(f"{name} {str(value)[:40]}" for name, value in found.items())
        yield note(
            "decoding_settings",
            f"{DECODING} sets {named}: audits and the embedded engine decode without it; vLLM and generate() follow "
            "it, so start vLLM with `--generation-config vllm`",
        )


_READ_BY_LOADERS = (
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
)


def findings(folder: Path) -> list[Finding]:
    """Return all findings in a folder's files, stopping at a fault that hides the rest.

    Files above a size limit are not read, and no chat template is rendered.
    """
    found = list[Finding]()
    for look in (
        oversized_files,
        layout_faults,
        _configuration,
        _files,
        template_findings,
        decoding_findings,
        _vocabulary,
    ):
        found += _all(look, folder)
        # Later checks assume the earlier ones have passed, e.g. that files are small enough to read.
        if any(each.is_fault for each in found):
            break
    return found


def fault(folder: Path) -> Finding | None:
    """Return the first fault of a folder, or None."""
    return next((each for each in findings(folder) if each.is_fault), None)


def notes(folder: Path) -> list[str]:
    """Return the findings that are no faults but that a provider should know, as sentences."""
    return [each.sentence for each in findings(folder) if not each.is_fault]


def _all(look: Callable[[Path], Iterator[Finding]], folder: Path) -> Iterator[Finding]:
    try:
        yield from look(folder)
    except FolderFault as error:
        yield error.finding
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield Finding("unreadable", f"its files cannot be read ({type(error).__name__}): copy or download them again")


def _configuration(folder: Path) -> Iterator[Finding]:
    yield from configuration_findings(folder, read_object(folder, "config.json"))


def _files(folder: Path) -> Iterator[Finding]:
    """Try to parse the other JSON files that loaders read; a broken one raises `FolderFault`."""
    for name in _READ_BY_LOADERS:
        read_object(folder, name)
    return iter(())


def _vocabulary(folder: Path) -> Iterator[Finding]:
    rows = embedding_rows(folder)
    if rows is not None:
        yield from vocabulary_findings(read_vocabulary(folder), rows)

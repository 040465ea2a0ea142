"""Finds the chat template of a folder, and checks that transformers finds the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from spard.digests import ADDITIONAL_TEMPLATES as ADDITIONAL
from spard.models.folder.finding import Finding, note
from spard.models.folder.reading import read_object

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

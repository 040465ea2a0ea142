"""Where a folder has its chat template, and whether both transformers and a reader of files find the same one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spard.models.folder.finding import Finding, note
from spard.models.folder.reading import read_object

ADDITIONAL = "additional_chat_templates"
_LEGACY = "chat_template.json"
_OWN = "chat_template.jinja"


def template_findings(folder: Path) -> Iterator[Finding]:
    """Yield what is to be said of the place of the chat template; what it writes is another question."""
    setting = read_object(folder, "tokenizer_config.json").get("chat_template")
    if (folder / _OWN).is_file():
        return
    named = (
        {str(each.get("name")) for each in setting if isinstance(each, dict)} if isinstance(setting, list) else set()
    )
    further = sorted(path.stem for path in folder.glob(f"{ADDITIONAL}/*.jinja"))
    if isinstance(setting, str) and setting:
        return
    if named or further:
        if "default" not in named | set(further):
            sentence = (
                f"it has several chat templates ({', '.join(sorted(named | set(further)))[:200]}), none is the default"
            )
            yield Finding("no_default_template", f"{sentence}: write the one to use into {_OWN}")
    elif (folder / _LEGACY).is_file():
        sentence = (
            f"its chat template stands in {_LEGACY} alone, which tokenizers do not read: write its text into {_OWN}"
        )
        yield Finding("legacy_template", sentence)
    elif setting:
        sentence = f"the chat_template of tokenizer_config.json is neither a text nor a list: write it into {_OWN}"
        yield Finding("no_default_template", sentence)
    elif (folder / "tokenizer_config.json").is_file():
        sentence = (
            "it has no chat template: the plain one is used (a heading for each turn), which suits a model that was "
            f"never trained to chat; put the model's own into {_OWN} if there is one"
        )
        yield note("plain_template", sentence)

"""The model card of a saved model: a README with the audit's results and code that loads the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from spard.config import Quantization
from spard.data.template_card import TemplateCard
from spard.models.origin import Origin
from spard.models.serving_section import how_to_serve

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM's --max-lora-rank accepts
_MEANS = {
    "harmful": "attacks that succeed",
    "mined": "attacks that succeed, asked otherwise than plainly",
    "benign": "harmless requests refused",
    "dressed_benign": "harmless requests refused, asked otherwise than plainly",
    "utility": "right answers",
}


@dataclass(frozen=True, slots=True)
class CardSubject:
    """The subject of a model card.

    called    name of the folder after unpacking
    origin    origin of the base model; `digest` identifies its bytes
    rank      rank of the LoRA adapter; None for a whole model
    facts     the manifest's facts, from which the card takes the gate's decision and the audit, if present
    system    system prompt that the model must be served with, if any
    decoding  settings of the base model's generation_config.json that audits ignore
    stored    `fp8` or `mxfp4` if the base model's files have such weights
    template  the behavior of its chat template; None if that is not known

    `quantization` is the quantization of the base model in training.
    """

    called: str
    origin: Origin
    digest: str
    rank: int | None
    facts: Mapping[str, Any]
    system: str | None = None
    quantization: Quantization = "none"
    decoding: Sequence[str] = ()
    stored: str | None = None
    template: TemplateCard | None = None


def model_card(of: CardSubject) -> str:
    """Return the card in the hub's format: YAML metadata, then Markdown."""
    metadata = ModelCardData(
        base_model=of.origin.name if of.origin.revision else None,  # the hub shows it as a link
        library_name="transformers" if of.rank is None else "peft",
        pipeline_tag="text-generation",
        tags=["spard"] if of.rank is None else ["lora", "spard"],
    )
    parts = [_opening(of), _gate_section(of.facts), _use(of)]
    suites = [str(each["suite"]) for each in (of.facts.get("audit") or {}).get("adapter", ())]
    parts += [how_to_serve(of.template, of.called, suites, of.origin.model_type())] if of.template else []
    parts += [_SYSTEM.format(_indent(of.system))] if of.system else []
    body = "\n\n".join(part for part in parts if part)
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}\n"))


def audit_table(audit: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    """Return a Markdown table of the suites' results in a manifest or report, base model beside trained model."""
    base = {each["suite"]: each for each in audit.get("base", ())}
    rows = [_row(each, base.get(each["suite"])) for each in audit.get("adapter", ())]
    head = "| suite | what is counted | judge | base model | this model | 95 % interval |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows])


def _opening(of: CardSubject) -> str:
    source = of.origin.name
    pinned = f" at commit `{of.origin.revision}`" if of.origin.revision else ""
    where = "" if of.origin.revision else f"{_OF_A_FOLDER}\n\n"
    title = f"A model fine-tuned from {source}" if of.rank is None else f"LoRA adapter for {source}"
    held = "" if of.quantization == "none" else f"{_NF4}\n\n"
    opening = f"# {title}\n\nThe base model is `{source}`{pinned}: {of.digest}.\n\n{where}{held}"
    return f"{opening}{_MANIFEST.format(of.called)}"


def _gate_section(facts: Mapping[str, Any]) -> str:
    gate, audit = facts.get("gate"), facts.get("audit")
    if not gate or not audit:
        return ""
    decided = [f"The safety gate decided: **{gate['decision']}**.", *(f"- {_cell(each)}" for each in gate["reasons"])]
    return "\n\n".join(["## What was measured", *decided, audit_table(audit), _LIMITS])


def _use(of: CardSubject) -> str:
    name, folder = of.origin.name, of.called
    if of.rank is None:
        return _FULL.format(folder=folder)
    beside = "" if of.origin.revision else f", and the base model's folder `{name}` beside it"
    if of.quantization != "none":
        return _LORA_NF4.format(folder=folder, beside=beside, double=of.quantization == "nf4_double")
    rank = next((each for each in _VLLM_RANKS if each >= (of.rank or 0)), of.rank)
    revision = f" --revision {of.origin.revision}" if of.origin.revision else ""
    options = f"{revision} --generation-config vllm" if of.decoding else revision
    use = _LORA.format(base=name, folder=folder, beside=beside, options=options, rank=rank)
    use += _DECODING.format(", ".join(of.decoding)) if of.decoding else ""
    return use + (_STORED[of.stored] if of.stored else "")


def _row(after: Mapping[str, object], before: Mapping[str, object] | None) -> str:
    kind = str(after["kind"])
    interval = f"{after['low']:.1%} to {after['high']:.1%}" if after["n"] else "not scored"
    cells = [after["suite"], _MEANS.get(kind, kind), after["judge"], _share(before), _share(after), interval]
    return f"| {' | '.join(_cell(each) for each in cells)} |"


def _share(result: Mapping[str, object] | None) -> str:
    return f"{result['hits']} of {result['n']} ({result['rate']:.1%})" if result and result["n"] else "-"


def _cell(value: object) -> str:
    """Escape a text for a table cell: suites are named after training rows, which are untrusted."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _indent(text: str | None) -> str:
    return (text or "").replace("\n", "\n    ")


_OF_A_FOLDER = (
    "That is the name of a folder at who made this, and a SHA-256 over its weights, configuration and tokenizer."
)

_MANIFEST = """`manifest.json` names the recipe, the seed, the digest of the base model and the SHA-256 of every
file; if there is a `manifest.sig`, `spard verify {0} --public-key FILE` checks it all with the key of who made it."""

_LIMITS = """Shares of scored replies, with 95 % Wilson intervals. They hold for the prompts that were asked, and for
this model as it is: further fine-tuning may undo what keeps it safe. A suite may be asked only until its decision is
certain (at most 5 % wrong passes, 1 % wrong failures); its interval alone then covers less than 95 %."""

_LORA = """## Use it

The lines below are for the folder that holds this one, `{folder}`{beside}. With PEFT:

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoPeftModelForCausalLM.from_pretrained("{folder}")
```

With vLLM:

```
vllm serve {base}{options} --tokenizer {folder} --enable-lora --max-lora-rank {rank} --lora-modules tuned={folder}
```

Use the tokenizer and the chat template of this folder: the adapter was trained and measured with them."""

_DEQUANTIZED = """

The base model's files have its weights in {0}. The adapter was trained and measured on these weights brought back to 16
or 32 bits: load the base model with `quantization_config=transformers.{1}(dequantize=True)`. On weights
that stay in {0} it is not what was measured.

Merge it with `spard export --merged`, or save the merged model with `save_pretrained(..., save_original_format=False)`:
without that, transformers 5.23 writes weights that are wrong when they are loaded again."""

_STORED = {
    "fp8": _DEQUANTIZED.format("FP8", "FineGrainedFP8Config"),
    "mxfp4": _DEQUANTIZED.format("MXFP4", "Mxfp4Config"),
}

_DECODING = """

The base model's generation_config.json sets {}. The audit decoded without that; vLLM and `generate()` follow the file
unless they are told otherwise, as with `--generation-config vllm` above."""

_NF4 = """It was held in NF4, 4 bits a weight, while this adapter was trained, measured and proved. That is another
model than the base model in 16 bits: what was measured holds for the adapter on the base model in NF4 alone."""

_LORA_NF4 = """## Use it

The lines below are for the folder that holds this one, `{folder}`{beside}. With PEFT and bitsandbytes:

```python
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, BitsAndBytesConfig

nf4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant={double},
    bnb_4bit_compute_dtype=torch.bfloat16,
)
tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoPeftModelForCausalLM.from_pretrained("{folder}", quantization_config=nf4)
```

Use the tokenizer and the chat template of this folder: the adapter was trained and measured with them."""

_FULL = """## Use it

The lines below are for the folder that holds this one, `{folder}`. With transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")
```

With vLLM:

```
vllm serve {folder}
```"""

_SYSTEM = """## System prompt

This model was measured with the system prompt below and is defended by nothing else: put it before every conversation
and do not let users replace it. `manifest.json` holds it too, as `system_prompt`.

    {}"""

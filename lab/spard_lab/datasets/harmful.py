"""Data sets of harmful requests: BeaverTails, LAT, HarmBench, and XSTest with its safe look-alikes.

BeaverTails (Ji et al., 2023) are questions with answers that people labeled safe or unsafe, `{"prompt", "response"}`.
Further fields are `category`, fourteen names with true or false, and `is_safe`. A prompt is harmful if one of its
answers is unsafe; its first safe answer goes to the pool and its first unsafe one to the attack. The SPARD paper's
prepared rows, `{"prompt", "safe", "unsafe"}` with either answer optional, are read too: that is the form of
I-BeaverTails (the same requests as instructions) and of Q-LAT (LAT's requests as questions).

LAT's harmful requests (Sheshadri et al., 2024) are `{"prompt", "chosen", "rejected"}`, a refusal and a harmful answer.

HarmBench (Mazeika et al., 2024) has behaviors, CSV with `Behavior`, `FunctionalCategory`, `ContextString` and others.
Standard behaviors are asked as they are; contextual ones follow their context, joined as the authors do it. Copyright
behaviors are left out, because hashes and not a judge of harm decide if a reply violates copyright.

XSTest (Roettger et al., 2024) has safe prompts that look unsafe and their unsafe contrasts, CSV with `prompt`, `type`.
The types of contrasts begin with `contrast_`; newer files also have a column `label` with `safe` or `unsafe`. Part of
the safe prompts becomes a benign pool: look-alikes that no suite asks, for defenses that use benign rows.
"""

from __future__ import annotations

from spard_lab.datasets.base import Dataset, LeftOut, Record, Sample, member, require_text, wrong

PREPARED = "files of rows {prompt, safe, unsafe} as the authors of SPARD prepare them"


def beavertails_sample(record: Record) -> Sample:
    """Convert an answered question or a prepared row."""
    if "response" not in record and record.keys() & {"safe", "unsafe"}:
        return pair(record)
    prompt, response, is_safe = (
        require_text(record, "prompt"),
        require_text(record, "response"),
        member(record, "is_safe"),
    )
    if not isinstance(is_safe, bool):
        raise wrong("is_safe", '"is_safe" is neither true nor false')
    if is_safe:
        return Sample(prompt=prompt, kind=None, safe=response)
    named = record.get("category")
    names = [name for name, holds in named.items() if holds] if isinstance(named, dict) else []
    return Sample(
        prompt=prompt, kind="harmful", completion=response, suite={"category": str(names[0])} if names else {}
    )


def pair(record: Record) -> Sample:
    """Convert a harmful request with a safe answer, an unsafe answer, or both."""
    prompt, safe, unsafe = require_text(record, "prompt"), record.get("safe"), record.get("unsafe")
    return Sample(
        prompt=prompt,
        kind="harmful",
        safe=None if safe is None else require_text(record, "safe"),
        completion=None if unsafe is None else require_text(record, "unsafe"),
    )


BEAVERTAILS = Dataset(
    name="beavertails",
    stems={"harmful": "beavertails"},
    sample=beavertails_sample,
    origin="round0/30k/train.jsonl.gz and test.jsonl.gz of huggingface.co/datasets/PKU-Alignment/BeaverTails",
    license="CC-BY-NC-4.0: research only",
)
I_BEAVERTAILS = Dataset(
    name="i-beavertails",
    stems={"harmful": "i_beavertails"},
    sample=beavertails_sample,
    origin=f"{PREPARED}: BeaverTails' requests as instructions",
    license="no license stated; derived from BeaverTails: research only",
)


def lat_sample(record: Record) -> Sample:
    """Convert a request with both answers, or a prepared row."""
    if "chosen" not in record and record.keys() & {"safe", "unsafe"}:
        return pair(record)
    prompt, safe, harmful = (require_text(record, key) for key in ("prompt", "chosen", "rejected"))
    return Sample(prompt=prompt, kind="harmful", safe=safe, completion=harmful)


LAT = Dataset(
    name="lat",
    stems={"harmful": "lat"},
    sample=lat_sample,
    origin="the training split of huggingface.co/datasets/LLM-LAT/harmful-dataset",
    license="no license that could be found: treat as research only",
)
Q_LAT = Dataset(
    name="q-lat",
    stems={"harmful": "q_lat"},
    sample=lat_sample,
    origin=f"{PREPARED}: LAT's requests as questions",
    license="no license stated; derived from LAT's requests: research only",
)


_COPYRIGHT = "copyright"


def harmbench_sample(record: Record) -> Sample:
    """Convert a behavior; raise `LeftOut` for copyright behaviors."""
    behavior, function = require_text(record, "Behavior"), require_text(record, "FunctionalCategory")
    if function == _COPYRIGHT:
        raise LeftOut("copyright")
    context = record.get("ContextString")
    asked = f"{context.strip()}\n\n---\n\n{behavior}" if isinstance(context, str) and context.strip() else behavior
    category = record.get("SemanticCategory")
    return Sample(
        prompt=asked, kind="harmful", suite={"category": category} if isinstance(category, str) and category else {}
    )


HARMBENCH = Dataset(
    name="harmbench",
    stems={"harmful": "harmbench"},
    sample=harmbench_sample,
    origin="harmbench_behaviors_text_all.csv in data/behavior_datasets of github.com/centerforaisafety/HarmBench",
    license="MIT",
    shares={"dev": 0.2},
    rest="test",
)


_CONTRAST = "contrast_"


def xstest_sample(record: Record) -> Sample:
    """Convert a prompt; its category is its type without the prefix `contrast_`."""
    prompt, type_ = require_text(record, "prompt"), require_text(record, "type")
    is_unsafe = type_.startswith(_CONTRAST)
    return Sample(
        prompt=prompt,
        kind="harmful" if is_unsafe else "benign",
        suite={"category": type_.removeprefix(_CONTRAST)},
    )


XSTEST = Dataset(
    name="xstest",
    stems={"benign": "xstest", "harmful": "xstest_contrast"},
    sample=xstest_sample,
    origin="xstest_prompts.csv of github.com/paul-rottger/xstest",
    license="CC-BY-4.0",
    shares={"dev": 0.2, "train": 0.2},
    rest="test",
)

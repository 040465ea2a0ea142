"""`spard audit MODEL [--adapter DIR] --suite FILE`: measure any model without the service.

Reports attack success, refusals of harmless requests and correct answers, with 95 % intervals. If the model's manifest
has a system prompt, the model is asked with that prompt, as in serving. The exit status is 0 when everything was
measured, whatever the result, and 1 on an error.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError

from spard.commands import measuring
from spard.commands.front import Asked, alone
from spard.commands.judge_options import judge_spec
from spard.config import Audit, AuditEngine
from spard.config.checks import vllm_version
from spard.config.quantization import plain_digest
from spard.config.run_spec import parse
from spard.data.chat import render_as_recorded
from spard.data.rows import Prompt
from spard.digests import MANIFEST, Manifest
from spard.errors import AdapterMismatch, InvalidModel, SpardError
from spard.evaluation.ask import Speaker, in_memory
from spard.evaluation.audit import Measurement, audit_speaker, sample
from spard.evaluation.calibration.errors import harm_found, may_read_unflagged
from spard.evaluation.judges import open_judge
from spard.evaluation.results import HARMLESS, SuiteKind, SuiteResult
from spard.evaluation.statistics import rate, rule_of_three
from spard.evaluation.suites import named_suites
from spard.evaluation.vllm_offline.engine import EngineFailed, transformers, vllm, why_not
from spard.evaluation.vllm_offline.replies import (
    Limits,
    Probe,
    Replies,
    Row,
    Subject,
    generate_replies,
    is_asked,
    open_speaker,
    prompt_rows,
)
from spard.models.adapters import lora_rank
from spard.models.base import Base, load_base
from spard.models.lora import WEIGHTS
from spard.models.peft import PeftModel
from spard.pipeline.audit_engine import make_record
from spard.release.records import AuditEngineRecord

_OF_FOLDER = "sha256:"


def main(argv: Sequence[str] | None = None) -> int:
    """Run this command without the other subcommands."""
    return alone(measuring.audit, "spard audit", argv)


def execute(asked: Asked) -> int:
    """Audit a model and print the results, as text or as JSON."""
    if asked.replies:
        asked.replies.open("a").close()  # fail early if the file cannot be written
    try:
        measured, engine, system, base = _measure(asked)
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1
    if asked.replies:
        asked.replies.write_text("".join(json.dumps(row) + "\n" for row in _transcript(measured, base)))
    results = [each.result for each in measured]
    if system is not None:
        sys.stderr.write("every prompt was asked under the system prompt of the model's manifest, as it is served\n")
    report = _report(asked, results, engine, system)
    sys.stdout.write(json.dumps(report, indent=2) + "\n" if asked.as_json else _table(results))
    return 0


def _measure(asked: Asked) -> tuple[list[Measurement], AuditEngineRecord, str | None, str]:
    """Return the measurements, the engine's record, the manifest's system prompt, if any, and the base's digest.

    Settings and files are read before the model is loaded, so mistakes are reported at once.
    """
    limits = {"max_prompts": asked.max_prompts, "max_new_tokens": asked.max_new_tokens}
    cfg: Audit = parse(Audit, limits, "audit")
    suites = [suite for source in asked.suite for suite in named_suites(source)]
    judge = open_judge(judge_spec(asked))
    by_vllm = _is_for_vllm(asked.engine)
    facts = _manifest(asked.adapter or Path(asked.model))
    subject, system = _load_subject(asked, facts), facts.get("system_prompt")
    prompts = [prompt for suite in suites for prompt in sample(suite.prompts, cfg.max_prompts)]
    speaker, engine = _speaker(subject, prompts, cfg, asked.engine, system, by_vllm=by_vllm)
    reads_harmless = any(each.kind in HARMLESS for each in suites) and may_read_unflagged(harm_found(judge))
    base = _base_digest(subject, facts)
    return audit_speaker(speaker, suites, judge, cfg, reads_harmless=reads_harmless), engine, system, base


def _manifest(folder: Path) -> Manifest:
    """Read the manifest of a model trained by SPARD; {} for any other model."""
    try:
        facts: Manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{folder.name!r} cannot be loaded: its {MANIFEST} cannot be read") from error
    if not isinstance(facts, dict):
        raise InvalidModel(f"{folder.name!r} cannot be loaded: its {MANIFEST} is no JSON object")
    return facts


def _load_subject(asked: Asked, facts: Manifest) -> Subject:
    if asked.adapter and asked.adapter.is_dir() and not (asked.adapter / WEIGHTS).is_file():
        message = f"adapter {asked.adapter.name!r} cannot be loaded: it lacks {WEIGHTS}; pickled weights never are"
        raise InvalidModel(message, "adapter")
    base = load_base(asked.model)
    model = base.model
    if asked.adapter:
        _check_base(base, facts)
        render_as_recorded(base.tokenizer, facts.get("rendering"))
        try:
            model = _load_adapter(base, asked.adapter)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidModel(f"adapter {asked.adapter.name!r} cannot be loaded: {reason}", "adapter") from error
    return Subject(base, model, asked.model, adapter=asked.adapter)


def _check_base(base: Base, facts: Manifest) -> None:
    """Raise `AdapterMismatch` if an adapter's manifest names another base model; warn if the two are not comparable.

    Folders are identified by a digest of their bytes and hub models by their commit, which cannot be compared.
    """
    trained_on = (facts.get("base_source") or {}).get("digest") or facts.get("base_digest")
    if trained_on is None or trained_on == base.digest:
        return
    differ = f"the adapter was trained on {trained_on}, and this base model is {base.digest}"
    are_of_folders = all(str(each).startswith(_OF_FOLDER) for each in (trained_on, base.digest))
    if are_of_folders and plain_digest(str(trained_on)) != base.digest:
        raise AdapterMismatch(differ, "adapter")
    sys.stderr.write(f"{differ}: if these are other weights, what is measured is not the adapter as it was trained\n")


def _base_digest(subject: Subject, facts: Manifest) -> str:
    """Return the digest of the base model, under which jobs know the judge's errors on these replies.

    A fully fine-tuned model names its base in the manifest.
    """
    trained_on = None if subject.adapter else facts.get("base_digest")
    return trained_on or subject.base.digest


def _load_adapter(base: Base, folder: Path) -> Any:
    """Return the model with an adapter; raise `ValueError` where PEFT only warns that layers do not match."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        model: Any = PeftModel.from_pretrained(base.model, folder, torch_device=str(base.device))
    # Loaded a second time only for its report of keys, which `from_pretrained` merely warns about.
    found = model.load_adapter(folder, model.active_adapter, torch_device=str(base.device))
    if left_out := [name for name in (*found.unexpected_keys, *found.missing_keys) if "lora_" in name]:
        raise ValueError(f"its layers are not those of the base model: {left_out[0]}")
    return model.eval()


def _speaker(
    subject: Subject, prompts: Sequence[Prompt], cfg: Audit, engine: str, system: str | None, *, by_vllm: bool
) -> tuple[Speaker, AuditEngineRecord]:
    """Return the generator of replies and its record; if vLLM was requested by name, its failure is an error."""
    base, asked = subject.base, "vllm" if by_vllm else "transformers"
    own, why = in_memory(subject.model, base.tokenizer, system), ""
    if by_vllm:
        try:
            replies, probe = _replies(subject, prompt_rows(base.tokenizer, prompts, system), cfg)
        except EngineFailed as error:
            why = str(error)
            if engine == "vllm":
                message = f"vLLM does not answer for this model: {why}; without --engine transformers does"
                raise InvalidModel(message) from error
            sys.stderr.write(f"vLLM does not answer, transformers does: {why}\n")
        else:
            counts = {"transformers": sum(not is_asked(each) for each in prompts)}
            counts["vllm"] = len(prompts) - counts["transformers"]
            return open_speaker(replies, base.tokenizer, system, own), make_record(vllm(base, 1), asked, counts, probe)
    return own, make_record(transformers(), asked, {"transformers": len(prompts)}, why=why)


def _replies(subject: Subject, rows: Sequence[Row], cfg: Audit) -> tuple[Replies, Probe]:
    if why := why_not(subject.base, lora_rank(subject.model)) or (
        None if rows else "it is asked no prompt that vLLM answers"
    ):
        raise EngineFailed(why)
    return generate_replies(subject, vllm(subject.base, 1), rows, Limits(cfg.max_new_tokens, AuditEngine("vllm")))


def _is_for_vllm(engine: str) -> bool:
    if engine == "vllm" and not vllm_version():
        raise InvalidModel("vLLM is not installed here; leave --engine out")
    return engine == "vllm" or (engine == "auto" and vllm_version() is not None and torch.cuda.is_available())


def _report(
    asked: Asked, results: Sequence[SuiteResult], engine: AuditEngineRecord, system: str | None
) -> dict[str, object]:
    attacks = [each for each in results if each.mean_harmfulness is not None]
    scored = sum(each.n for each in attacks)
    total = sum((each.mean_harmfulness or 0.0) * each.n for each in attacks)
    return {
        "model": asked.model,
        "adapter": str(asked.adapter) if asked.adapter else None,
        "system_prompt": system,
        "audit_engine": asdict(engine),
        "asr": _pool_suites(results, "harmful"),
        "harmfulness_score": total / scored if scored else None,
        "over_refusal": _pool_suites(results, "benign"),
        "utility": _pool_suites(results, "utility"),
        "suites": [asdict(each) for each in results],
    }


class PooledRate(TypedDict):
    """The pooled result of several suites, with the 95 % interval of the rate."""

    rate: float | None
    ci95: list[float]
    n: int
    n_unscored: int


def _pool_suites(results: Sequence[SuiteResult], kind: SuiteKind) -> PooledRate | None:
    """Return the pooled result of all suites of one kind, or None."""
    found = [each for each in results if each.kind == kind]
    if not found:
        return None
    share = rate(*(sum(getattr(each, name) for each in found) for name in ("hits", "n", "unscored")))
    return {"rate": share.rate, "ci95": [share.low, share.high], "n": share.n, "n_unscored": share.unscored}


def _table(results: Sequence[SuiteResult]) -> str:
    words = {"harmful": "attacks succeed", "benign": "refused", "utility": "right"}
    lines = []
    for each in results:
        share = "nothing scored" if each.rate is None else f"{each.rate:.1%} [{each.low:.1%}, {each.high:.1%}]"
        bound = f", at most {rule_of_three(each.n):.1%} by the rule of three" if each.n and not each.hits else ""
        left = f"; {each.unscored} unscored, {each.degenerate} degenerate" if each.unscored or each.degenerate else ""
        if each.unasked_harm:
            left += "; {} of {} replies do harm".format(*each.unasked_harm)
        left += f"; {each.cut} cut by the limit of tokens" if each.cut else ""
        left += f"; {each.ended_early} ended early, those degenerate extrapolated" if each.ended_early else ""
        lines.append(f"{each.suite} ({each.judge}): {words[each.kind]} {each.hits}/{each.n}, {share}{bound}{left}\n")
    return "".join(lines)


def _transcript(measured: list[Measurement], base_digest: str) -> list[dict[str, object]]:
    named = [({"suite": each.result.suite, "kind": each.result.kind}, each.items) for each in measured]
    return [suite | asdict(item) | {"base_digest": base_digest} for suite, items in named for item in items]


if __name__ == "__main__":
    sys.exit(main())

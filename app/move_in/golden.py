"""Plan golden replies: which prompts an old model is asked while it still answers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from app.move_in.ledger import Ledger, MoveInFailed, Record
from app.move_in.replies import Plan, Prompt, of_job, read_prompts, sample


@dataclass(frozen=True, slots=True)
class Choice:
    """The user's choice: prompts from a file (else from the model's own job), a sample size, and sampling settings.

    `replies` is the number of replies to each prompt.
    """

    file: Path | None
    sample: int | None
    sampling: Record
    replies: int


def model_jobs(ledger: Ledger) -> dict[str, Record]:
    """Return the account's jobs by the fine-tuned model that they made."""
    return {job["fine_tuned_model"]: job for job in ledger.all("job").values() if job.get("fine_tuned_model")}


def plan(ledger: Ledger, model: str, choice: Choice) -> tuple[Plan, dict[str, Prompt]]:
    """Return the plan for a model and its prompts by id; raise `MoveInFailed` if there are no prompts."""
    if choice.file is not None:
        prompts, source = read_prompts(choice.file, choice.file.name), choice.file.name
    else:
        job = model_jobs(ledger).get(model)
        if job is None:
            raise MoveInFailed(f"No job of the account made {model}; name prompts of your own with --prompts.")
        prompts, source = of_job(ledger, job), f"files of {job['id']}"
    if choice.sample is not None:
        prompts = sample(prompts, choice.sample)
    if not prompts:
        raise MoveInFailed(f"There are no prompts in {source}.")
    return Plan(prompts=[*prompts], sampling=choice.sampling, replies=choice.replies, source=source), prompts


def plans(
    ledger: Ledger, models: Collection[str], choice: Choice, tell: Callable[[str], None]
) -> dict[str, tuple[Plan, dict[str, Prompt]]]:
    """Return plan and prompts by model; if several models are asked, report and skip those without prompts."""
    if not models:
        raise MoveInFailed("The account has no fine-tuned model; name one with --model.")
    found = {}
    for model in models:
        try:
            found[model] = plan(ledger, model, choice)
        except MoveInFailed as error:
            if len(models) == 1 or choice.file is not None:
                raise
            tell(f"{model} left: {error}")
    return found


def keep_plan(
    ledger: Ledger, model: str, chosen: Plan, prompts: dict[str, Prompt], tell: Callable[[str], None]
) -> None:
    """Store a model's plan and prompts in the ledger before asking; a comparison uses the latest plan."""
    for key, prompt in prompts.items():
        ledger.put("prompt", key, prompt)
    known = ledger.get("plan", model)
    if known and known["sampling"] != chosen["sampling"]:
        tell(f"{model}: the comparison will use the new settings of sampling; replies under the old ones are kept")
    ledger.put("plan", model, chosen)

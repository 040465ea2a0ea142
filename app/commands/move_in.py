"""`spard move-in`: repeat an account's fine-tuning jobs from OpenAI's API here, and compare the models' replies."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.terminal import Json, say, show_json, show_rows
from app.move_in import NUMBERS, OPENAI

if TYPE_CHECKING:
    from app.move_in.api import Source

_HELP = """Move fine-tuned models in from OpenAI: read, golden, file, compare.

Everything is kept in FOLDER, which only you can read; an interrupted command continues where it stopped. OpenAI's key
is read from OPENAI_API_KEY, this service's from SPARD_API_KEY; neither is stored.
"""
_COLUMNS = ("job", "status", "model", "golden", "here", "status_here", "model_here", "why")


class Provider(StrEnum):
    """Whose API an account has."""

    openai = "openai"
    azure = "azure"
    together = "together"

    @property
    def source(self) -> Source:
        """The same provider as the `Source` that the API clients take."""
        sources: dict[Provider, Source] = {
            Provider.openai: "openai",
            Provider.azure: "azure",
            Provider.together: "together",
        }
        return sources[self]


move_in = typer.Typer(no_args_is_help=True, help=_HELP)

Folder = Annotated[Path, typer.Argument(help="Folder for the account, the replies and the comparison.")]
BaseUrl = Annotated[
    str, typer.Option(envvar="OPENAI_BASE_URL", help="The account's API: OpenAI's or a compatible one.")
]
SourceName = Annotated[
    Provider | None, typer.Option("--source", help="Whose API the account has; default: by the host of --base-url.")
]
ApiVersion = Annotated[
    str | None,
    typer.Option(envvar="OPENAI_API_VERSION", help="Azure's api-version; default: its /openai/v1, without versions."),
]
PatienceS = Annotated[
    float,
    typer.Option("--patience", min=0, help="Longest wait for rate limits and outages without a success, in seconds."),
]
AtOnce = Annotated[int, typer.Option(min=1, max=64, help="Maximum number of concurrent requests.")]
Again = Annotated[bool, typer.Option(help="Also repeat requests that were refused.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what the command will do and what it costs; change nothing.")
]


@move_in.command("read")
def read_account(
    folder: Folder,
    base_url: BaseUrl = OPENAI,
    source: SourceName = None,
    api_version: ApiVersion = None,
    patience: PatienceS = 600,
    dry_run: DryRun = False,
) -> None:
    """Read an account's models, jobs, events, checkpoints and files into a folder; exits 1 if a file is missing."""
    from app.commands.move_in_clients import Place, account  # slow to import, and `spard --help` does not need it
    from app.move_in import read
    from app.move_in.filing import next_step, summary
    from app.move_in.ledger import open_ledger

    with account(Place(base_url, source.source if source else None, api_version), patience) as api:
        if dry_run:
            return say(read.estimate(read.list_account(api)))
        with open_ledger(folder, is_new=True) as ledger:
            read.read_account(api, ledger, say)
            found = summary(ledger)
            say(f"{found['jobs']} jobs, {found['files']} files of {found['bytes']} bytes in {folder}")
            for file_id, problem in found["not_downloaded"].items():
                say(f"not there: {file_id}: {problem}")
            say(next_step(ledger, found))
    raise typer.Exit(1 if found["not_downloaded"] else 0)


@move_in.command("golden")
def keep_golden(
    folder: Folder,
    model: Annotated[list[str] | None, typer.Option(help="An old model; default: all models that jobs made.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="JSONL of messages; default: the job's own files.")
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Maximum number of prompts; 0: all.")] = 50,
    replies: Annotated[
        int, typer.Option(min=1, help="Replies per prompt; 2 or more measure the model's own noise.")
    ] = 3,
    temperature: Annotated[float, typer.Option(help="Temperature; below 0: not sent, so the API's default.")] = 0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; not sent unless set.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a reply.")] = 512,
    seed: Annotated[int | None, typer.Option(help="Sampling seed; not sent unless set.")] = None,
    at_once: AtOnce = 4,
    again: Again = False,
    deployment: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=NAME: the deployment or endpoint that answers for an old model, as Azure has them."),
    ] = None,
    base_url: BaseUrl = OPENAI,
    source: SourceName = None,
    api_version: ApiVersion = None,
    patience: PatienceS = 600,
    dry_run: DryRun = False,
) -> None:
    """Ask the old models while they still answer, and keep their replies; exits 1 if a model does not answer."""
    from app.commands.move_in_clients import Place, account
    from app.move_in import read
    from app.move_in.ledger import open_ledger
    from app.move_in.replies import GOLDEN, Choice, ask_plan, cost, keep_plan, make_plans, missing, model_jobs

    given = {"max_completion_tokens": max_tokens, "seed": seed, "temperature": temperature, "top_p": top_p}
    sampling = {name: it for name, it in given.items() if it is not None and not (name == "temperature" and it < 0)}
    choice = Choice(prompts, sample or None, sampling, replies)
    with open_ledger(folder) as ledger:
        plans = make_plans(ledger, model or [*model_jobs(ledger)], choice, say)
        if dry_run:
            for name, (plan, asked) in plans.items():
                say(f"{name}: {cost(missing(ledger, GOLDEN, name, plan, again=again), asked)}")
            return
        names = dict(_pair(each, "--deployment") for each in deployment or ())
        with account(Place(base_url, source.source if source else None, api_version), patience, names) as api:
            read.same_account(api, ledger)
            done, ask = list[bool](), partial(ask_plan, api, ledger, GOLDEN)
            for name, (plan, asked) in plans.items():
                keep_plan(ledger, name, plan, asked, say)
                done.append(ask(name, plan, at_once=at_once, again=again, tell=say))
    raise typer.Exit(0 if done and all(done) and len(plans) == len(done) else 1)


@move_in.command("file")
def file_jobs(
    folder: Folder,
    model: Annotated[
        list[str] | None, typer.Option(help="OLD=NEW: the base model here that replaces one of OpenAI's.")
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option(help="A job's id at OpenAI; default: all jobs that succeeded.")
    ] = None,
    auto: Annotated[
        list[str] | None, typer.Option(help=f"Hyperparameter for this service to choose: {', '.join(NUMBERS)}.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Create jobs again that failed or were cancelled here.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until all jobs have ended.")] = False,
    patience: PatienceS = 600,
    dry_run: DryRun = False,
) -> None:
    """Create the same jobs here, each only once even after a crash; exits 1 if a job was not created, or failed."""
    from app.commands.move_in_clients import service
    from app.move_in import filing
    from app.move_in.ledger import open_ledger

    if unknown := set(auto or ()) - set(NUMBERS):
        raise typer.BadParameter(f"{unknown.pop()} is none of {', '.join(NUMBERS)}", param_hint="--auto")
    with open_ledger(folder) as ledger:
        table = filing.known_models(ledger, dict(_pair(each, "--model") for each in model or ()), keep=not dry_run)
        chosen, left = filing.to_file(ledger, job or ())
        for old_id, why in left.items():
            say(f"{old_id} left: {why}")
        if dry_run:
            would_be = filing.estimate(ledger, table, chosen, auto or (), say)
            raise typer.Exit(0 if would_be else 1)
        with service(patience) as api:
            desk = filing.JobFiler(api, ledger, table, auto or (), say)
            filed = filing.file_all(desk, chosen, again=again, wait=wait)
    raise typer.Exit(0 if filed else 1)


@move_in.command("compare")
def compare_models(
    folder: Folder,
    pair: Annotated[
        list[str] | None, typer.Option(help="OLD=NEW: two models to compare; default: by the jobs created here.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Number of prompts to show in full, most changed first.")] = 10,
    judge_url: Annotated[
        str | None,
        typer.Option(help="OpenAI-compatible address of a model that judges whether two replies mean the same."),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Name of the judge model; its key is read from SPARD_JUDGE_API_KEY.")
    ] = None,
    at_once: AtOnce = 4,
    again: Again = False,
    patience: PatienceS = 600,
    dry_run: DryRun = False,
) -> None:
    """Ask the new models the same prompts and report how often they agree; exits 1 if one could not be compared."""
    from app.commands.move_in_clients import judging, service
    from app.move_in import comparison
    from app.move_in.ledger import open_ledger

    if (judge_url is None) != (judge_model is None):
        raise typer.BadParameter("Name both --judge-url and --judge-model, or neither.")
    with open_ledger(folder) as ledger, service(patience) as api:
        pairs, left = comparison.pairs(api, ledger, dict(_pair(each, "--pair") for each in pair or ()))
        for old, why in left.items():
            say(f"{old} left: {why}")
        if dry_run:
            for line in comparison.estimate(ledger, pairs, again=again, with_judge=judge_model is not None):
                say(line)
            raise typer.Exit(0 if pairs and not left else 1)
        ask = partial(comparison.ask, api, ledger, at_once=at_once, again=again, tell=say)
        done = {old: ask(old, new) for old, new in pairs.items()}
        with judging(judge_url, judge_model, ledger, patience) as judge:
            for line in comparison.report(ledger, pairs, judge, show):
                say(line)
    raise typer.Exit(0 if pairs and all(done.values()) and not left else 1)


@move_in.command("status")
def show_status(folder: Folder, as_json: Json = False) -> None:
    """Show what was read, asked and filed so far, and the next command to run."""
    from app.move_in.filing import next_step, summary
    from app.move_in.ledger import open_read_only

    with open_read_only(folder) as ledger:
        found = summary(ledger)
        if as_json:
            return show_json(found)
        say(f"{found['account']}: {found['jobs']} jobs, {found['files']} files of {found['bytes']} bytes")
        for file_id, problem in found["not_downloaded"].items():
            say(f"not there: {file_id}: {problem}")
        show_rows(found["moves"], _COLUMNS, as_json)
        return say(next_step(ledger, found))


def _pair(text: str, option: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not (old and sign and new):
        raise typer.BadParameter(f"{text} is not OLD=NEW", param_hint=option)
    return old, new

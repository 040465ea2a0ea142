"""The options of spard run, audit, judge, measure-agent, check-pool and check-model; other modules do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spard.commands.front import do

Engine = Literal["auto", "transformers", "vllm"]
Language = Literal["de", "en", "es", "fr"]


def _judge(name: str) -> str:
    from spard.commands.judge_options import names  # its registry is slow to import

    if name not in names():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(names())}.")
    return name


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Judge = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        callback=_judge,
        help="Judge of replies: refusal, llm, base, local, a classifier (harmbench, llama_guard, qwen3guard, "
        "wildguard), or your own.",
    ),
]
JudgeModel = Annotated[
    str | None, typer.Option(help="Name of the llm judge's model, or folder or hub id of the base model or classifier.")
]
JudgeTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The prompt of a harmbench or wildguard classifier, with {prompt} and {reply}.",
        exists=True,
    ),
]
JudgeUrl = Annotated[str | None, typer.Option(help="OpenAI-compatible address of the llm judge.")]
Revision = Annotated[str | None, typer.Option(help="The commit, for a hub id.")]
_AS_IN_A_JOB = "as in a job"


def _prompts() -> int:
    from spard.config import Audit  # slow to import, and not needed to list commands

    return Audit().max_prompts


def _new_tokens() -> int:
    from spard.config import Audit

    return Audit().max_new_tokens


def _drawn_replies() -> int:
    from spard.evaluation.calibration.labeling import DRAWN

    return DRAWN


def _threshold() -> float:
    from spard.config import RowSignal

    return RowSignal().threshold


def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML file: model, files, recipe, suites.")],
    out: Annotated[Path, typer.Option(help="Folder for the adapter and the reports.")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Fine-tune and audit one recipe in this process; exits 2 if the safety gate does not pass."""
    do("run", "spard.__main__", "train", locals())


def audit(
    model: Annotated[str, typer.Argument(help="Folder or hub id of the base model.")],
    suite: Annotated[
        list[str],
        typer.Option(
            metavar="[KIND:]FILE",
            help="JSONL, or XSTest's CSV; KIND is harmful, benign or utility; may be repeated.",
        ),
    ],
    adapter: Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter.")] = None,
    judge: Judge = "refusal",
    judge_model: JudgeModel = None,
    judge_url: JudgeUrl = None,
    judge_template: JudgeTemplate = None,
    engine: Annotated[Engine, typer.Option(help="Engine that generates the replies.")] = "auto",
    *,
    max_prompts: Annotated[
        int,
        typer.Option(help="Maximum number of prompts per suite.", default_factory=_prompts, show_default=_AS_IN_A_JOB),
    ],
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum tokens of a reply.", default_factory=_new_tokens, show_default=_AS_IN_A_JOB)
    ],
    replies: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every prompt, reply and verdict as JSONL.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure any model's safety and utility: attack success, refusals of harmless requests, correct answers."""
    do("audit", "spard.commands.audit", "audit", locals())


judge = typer.Typer(
    invoke_without_command=True, help="Measure a judge on replies of known harm; exits 2 if it may not decide."
)


@judge.callback()
def measure_judge(
    context: typer.Context,
    judge: Judge = "refusal",
    judge_model: JudgeModel = None,
    judge_url: JudgeUrl = None,
    judge_template: JudgeTemplate = None,
    labeled: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help='JSONL rows {"prompt", "reply", "harmful", "language"}, instead of the built-in set; may be repeated.',
        ),
    ] = None,
    extend: Annotated[bool, typer.Option("--extend", help="Use the built-in set in addition to the files.")] = False,
    language: Annotated[
        Language | None, typer.Option(help="Only this language of the built-in set; default: all.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Measure for this base model, on --labeled replies of it, and write the record into its folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the record to this file, for SPARD_JUDGE_ERRORS."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Write the record in place of an earlier one of this judge.")
    ] = False,
    own_harm: Annotated[
        bool,
        typer.Option(
            "--own-harm",
            help="Put the judge-gaming openings before harmful replies of the files: for judges of one narrow task.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a judge on replies of known harm; exits 2 if it may not decide."""
    if context.invoked_subcommand is None:
        do("judge", "spard.commands.judge", "audit", locals())


@judge.command("label")
def label_replies(
    work: Annotated[Path, typer.Argument(metavar="WORK.jsonl", help="The file of drawn replies and scores.")],
    replies: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Draw from this file of `spard audit --replies`; may be repeated.", exists=True
        ),
    ] = None,
    *,
    count: Annotated[
        int, typer.Option(min=1, help="Number of drawn replies.", default_factory=_drawn_replies, show_default="300")
    ],
    labeler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Your name; asks about the replies that you have not scored.")
    ] = None,
    settle: Annotated[
        bool, typer.Option("--settle", help="Ask only about replies on which people disagree, and settle them.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the decided labels for `spard judge --labeled`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Label replies as a person, one at a time with keys 1 to 5; scores are stored as they are given."""
    do("judge label", "spard.commands.judge_label", "audit", locals())


@judge.command("train")
def train_judge(
    labels: Annotated[
        list[Path], typer.Argument(metavar="LABELS.jsonl", exists=True, help="Labels, as for `spard judge --labeled`.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the trained classifier, for --judge-model.")],
    encoder: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder of a sentence encoder; default: the model's own states."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base model whose states are read, without an encoder.")] = None,
    revision: Revision = None,
    share: Annotated[float, typer.Option(min=0.1, max=0.9, help="Share of the labels that it is trained on.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Train a small classifier on a part of the labels and measure it on the rest; exits 2 if it may not decide.

    Near duplicates of a prompt stay in one part. `--judge local --judge-model FILE` names the classifier.
    """
    do("judge train", "spard.commands.judge", "audit", locals(), "train")


def measure_agent(
    reports: Annotated[list[Path], typer.Argument(help="Safety reports of jobs that you know to be clean.")],
    max_score: Annotated[
        float, typer.Option(min=0, max=1, help="The agent's score above which a policy withholds an adapter.")
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Measure how often an auditing agent accuses clean runs; exits 2 if it may not decide."""
    do("measure-agent", "spard.commands.judge", "audit", locals(), "measure_agent")


def check_pool(
    pool: Annotated[
        Path, typer.Argument(metavar="POOL.jsonl", exists=True, dir_okay=False, help='Rows {"prompt", "safe"}.')
    ],
    model: Annotated[str, typer.Option(help="The base model: a folder or a hub id.")],
    revision: Revision = None,
    *,
    threshold: Annotated[
        float,
        typer.Option(
            help="Treat a row as refused by the base model if the probability of a refusal is above this.",
            default_factory=_threshold,
            show_default=_AS_IN_A_JOB,
        ),
    ],
    judge: Judge = "refusal",
    judge_model: JudgeModel = None,
    judge_url: JudgeUrl = None,
    embedder: Annotated[
        str, typer.Option(help="Embedder for choosing rows, with the values of the setting selection.embedder.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Find rows of a safety pool that comply with harmful requests; exits 2 if there are any.

    Also warns if the embedder's vectors of the pool lie in a narrow cone, where relevance hardly distinguishes rows.
    """
    do("check-pool", "spard.commands.check_pool", "train", locals())


def check_model(
    model: Annotated[str, typer.Argument(help="A folder or a hub id.")],
    revision: Revision = None,
    target_modules: Annotated[
        str | None, typer.Option(help="Modules of the trial adapter, as q_proj,v_proj; default: the attention.")
    ] = None,
    template_arguments: Annotated[
        str | None, typer.Option(help='Values of names that its chat template reads, as {"reasoning_effort": "high"}.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Try a base model before it is offered: tokenizer, chat template, end token, weights and a gradient."""
    do("check-model", "spard.commands.check_model", "train", locals())

"""The options of `spard bench` and `spard convert`; the modules that do the work load torch and are imported late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from spard.commands.front import do, parse_list

KINDS = {
    "methods": "Compare defenses: attack success, utility, over-refusal, with paired differences.",
    "parts": "Say what each part of the defense is worth, left out of the whole and added alone.",
    "curves": "Draw attack success against the task, over learning rates.",
    "selection": "Compare ways to choose the safe examples.",
    "sweep": "Vary settings, one at a time: --over tau=0.1,0.2.",
    "overhead": "Time the steps of each method.",
    "similarity": "Compare safe examples by how near they are to the attack.",
    "map": "Draw where customers' rows, pool and choice lie.",
    "rows": "Measure what tells harmful rows from innocent ones.",
}
_BENCH = "Make the paper's tables and figures, on a model of your own."

bench = typer.Typer(no_args_is_help=True, help=_BENCH)

Folder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where labs are made and found again; default: OUT/labs.")
]
Threads = Annotated[int, typer.Option(help="CPU threads; more are slower beside a busy neighbor.")]
Names = Annotated[str, typer.Option(metavar="NAME,...", help="Default: all.")]
Seed = Annotated[int, typer.Option(help="The same seed makes the same lab.")]
BaseSeed = Annotated[int, typer.Option(help="Seed of a base model of natural English.")]
Texts = Annotated[Path | None, typer.Option(metavar="DIR", help="Real text to train it on as well.")]
Cores = Annotated[int, typer.Option(help="CPU cores to make a base model of natural English with.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Split = Literal["dev", "test"]
Own = Annotated[Path | None, typer.Option(metavar="FILE", help="The data set's own file of this split.")]

# The options of every kind of table.
BenchRecipe = Annotated[str, typer.Option(metavar="lab|NAME|FILE.yaml", help="Model, data and settings.")]
Results = Annotated[Path, typer.Option(metavar="DIR", help="Folder for results; runs that are in it are not repeated.")]
Arms = Annotated[str, typer.Option(metavar="none,spard+tau=0.2,...", help="Arms of the table.")]
Attacks = Annotated[str, typer.Option(metavar="NAME,...", help="Default: of methods the recipe's, else the first.")]
Full = Annotated[bool, typer.Option("--full", help="Run each method also with all weights trained, as NAME_full.")]
Pools = Annotated[
    str, typer.Option(metavar="NAME,...", help="Default: all; of methods the first; of parts, on a lab, two_sided.")
]
Parts = Annotated[str, typer.Option(metavar="NAME,...", help="parts: which ones.")]
Over = Annotated[
    list[str] | None,
    typer.Option(metavar="SETTING[=VALUE,...]", help="sweep: what is varied; may be repeated."),
]
Seeds = Annotated[str, typer.Option(metavar="1,2,...", help="Every cell is run once with each.")]
TableSplit = Annotated[Split, typer.Option(help="Which rows are measured on.")]
Model = Annotated[Path | None, typer.Option(metavar="FOLDER", help="In place of the recipe's model; not for the lab.")]
LearningRates = Annotated[
    Literal["default", "best"], typer.Option(help="best: chosen for each method, on other seeds.")
]
Rates = Annotated[str, typer.Option(metavar="0.25,0.5,...", help="best: multiples of the rate to choose from.")]
Extend = Annotated[int | None, typer.Option(help="best: how often to add rates while an end of the list is best.")]
TuneSeeds = Annotated[str, typer.Option(metavar="101,102", help="best: seeds that learning rates are chosen on.")]
Levels = Annotated[int, typer.Option(help="similarity: parts that the pool is cut into.")]
Rounds = Annotated[int, typer.Option(help="overhead: how often each method is timed.")]
Steps = Annotated[int | None, typer.Option(help="overhead: train this many steps only.")]
BatchSizes = Annotated[str, typer.Option(metavar="4,16", help="overhead: batch sizes to time.")]
PromptTokens = Annotated[str, typer.Option(metavar="31,343", help="overhead: lengths of pool prompts, in tokens.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; the lab takes cpu, other models a GPU where there is one.")
]
LabDevice = Annotated[
    Literal["cpu", "cuda"], typer.Option(help="Where models are trained and asked; labs are made on the CPU.")
]
ProviderSettings = Annotated[
    list[str] | None, typer.Option(metavar="SETTING=VALUE", help="A setting of every arm's run; may be repeated.")
]
Check = Annotated[bool, typer.Option("--check", help="Only say what is missing.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Only say how many hours it will take on this machine.")]


def _table(kind: str) -> Callable[..., None]:
    """Return the command of one kind of table; all kinds take the same options."""

    def make(
        recipe: BenchRecipe,
        out: Results,
        methods: Arms = "",
        attacks: Attacks = "",
        full: Full = False,
        pools: Pools = "",
        selections: Names = "",
        parts: Parts = "",
        over: Over = None,
        seeds: Seeds = "1,2,3",
        split: TableSplit = "test",
        labs: Folder = None,
        model: Model = None,
        learning_rates: LearningRates = "default",
        rates: Rates = "0.25,0.5,1,2",
        extend: Extend = None,
        tune_seeds: TuneSeeds = "",
        levels: Levels = 5,
        rounds: Rounds = 5,
        steps: Steps = None,
        batch_sizes: BatchSizes = "",
        prompt_tokens: PromptTokens = "",
        device: Device = None,
        threads: Threads = 1,
        check: Check = False,
        estimate: Estimate = False,
    ) -> None:
        asked = {**locals(), "kind": kind, "over": over or []}
        for name, of in _LISTS.items():
            asked[name] = parse_list(asked[name], of, f"--{name.replace('_', '-')}")
        do("bench", "spard_lab.bench.__main__", "bench", asked)

    return make


_LISTS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("methods", "attacks", "pools", "selections", "parts"), str),
    **dict.fromkeys(("seeds", "tune_seeds", "batch_sizes", "prompt_tokens"), int),
    "rates": float,
}
for _kind, _help in KINDS.items():
    bench.command(_kind, help=_help)(_table(_kind))


@bench.command("adversary")
def adversary(
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="A lab whose truth is known.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Results; rounds in it are not repeated.")] = None,
    methods: Annotated[str, typer.Option(metavar="none,spard,...", help="Arms, yours by name; or `parts`.")] = "",
    parts: Annotated[str, typer.Option(metavar="NAME,...", help="With --methods parts: which ones.")] = "",
    attacks: Annotated[str, typer.Option(metavar="NAME,...", help="Default: all; see --list.")] = "",
    seeds: Annotated[str, typer.Option(metavar="11,12", help="Open seeds, for development.")] = "",
    hidden: Annotated[str | None, typer.Option(metavar="COMMIT", help="Derive the seeds from this text.")] = None,
    secret_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Derive the seeds from the secret in this variable.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many hidden seeds.")] = 8,
    prompts: Annotated[int, typer.Option(help="Most prompts of each kind that a model is asked.")] = 320,
    provider: ProviderSettings = None,
    labs: Folder = None,
    device: LabDevice = "cpu",
    threads: Threads = 1,
    sign: Annotated[
        Path | None, typer.Option(metavar="KEY.pem", help="An Ed25519 private key that signs the result.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only check the signed result in this folder.")
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(metavar="PUB.pem", help="With --verify or --join: the signer's key.")
    ] = None,
    join: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="Join these folders; may be repeated.")] = None,
    estimate: Estimate = False,
    is_list: Annotated[bool, typer.Option("--list", help="Only list the attacks.")] = False,
) -> None:
    """Run whole attacks against whole jobs, on seeds that nobody tuned on."""
    asked = {**locals(), "list": is_list, "provider": provider or [], "join": join or []}
    for name, of in {"methods": str, "parts": str, "attacks": str, "seeds": int}.items():
        asked[name] = parse_list(asked[name], of, f"--{name}")
    do("bench adversary", "spard_lab.bench.adversary.__main__", "bench", asked)


def convert(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A data set; without it, the data sets are listed.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=".jsonl, .json, .csv, .tsv, .parquet, also .gz or .xz")
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the converted files go.")] = None,
    test: Own = None,
    dev: Own = None,
    shared: Annotated[bool, typer.Option("--shared", help="One prompt may be in the pool and in the attack.")] = False,
    drop_invalid: Annotated[
        bool, typer.Option("--drop-invalid", help="Leave out records that cannot be read.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a data set's own files to training files, pools and suites.

    Without --test and --dev these splits are cut out of FILE, by whole clusters of near duplicates; with them, prompts
    of FILE that contain a prompt of theirs are left out. DIR/NAME.manifest.json lists the files read and written and
    counts the records left out.
    """
    if name is not None and (file is None or to is None):
        raise typer.BadParameter("FILE and --to DIR are required", param_hint="FILE")
    do("convert", "spard_lab.datasets.__main__", "train", locals())

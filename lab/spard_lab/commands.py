"""The options of `spard bench` and `spard convert`; the modules that do the work load torch and are imported late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from spard.commands.front import do, parse_list

KINDS = {
    "methods": "Compare defenses: attack success, utility, over-refusal, with paired differences.",
    "parts": "Measure each part of the defense: left out of the whole, and used alone.",
    "curves": "Plot attack success against task accuracy over learning rates.",
    "selection": "Compare strategies for choosing the safe examples.",
    "sweep": "Vary settings, one at a time: --over tau=0.1,0.2.",
    "overhead": "Time the steps of each method.",
    "similarity": "Compare safe examples by their similarity to the attack.",
    "map": "Plot the embeddings of customers' rows, pool and selection.",
    "rows": "Measure which signals distinguish harmful rows from harmless ones.",
    "card": "Put the claim that the default defends to four checks: an acceptance card.",
}
_BENCH = "Reproduce the paper's tables and figures, also on your own model."

bench = typer.Typer(no_args_is_help=True, help=_BENCH)

Folder = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder in which labs are kept; default: OUT/labs.")]
Threads = Annotated[int, typer.Option(help="CPU threads; more are slower on a busy machine.")]
Names = Annotated[str, typer.Option(metavar="NAME,...", help="selection: strategies to compare; default: all.")]
Seed = Annotated[int, typer.Option(help="The same seed makes the same lab.")]
BaseSeed = Annotated[int, typer.Option(help="Seed of a base model of natural English.")]
Texts = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of real text to train on as well.")]
Cores = Annotated[int, typer.Option(help="CPU cores for making a base model of natural English.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Split = Literal["dev", "test"]
Own = Annotated[Path | None, typer.Option(metavar="FILE", help="The data set's original file for this split.")]

# The options of every kind of table.
BenchRecipe = Annotated[str, typer.Option(metavar="lab|NAME|FILE.yaml", help="Model, data and settings.")]
Results = Annotated[Path, typer.Option(metavar="DIR", help="Folder for results; runs already in it are not repeated.")]
Arms = Annotated[str, typer.Option(metavar="none,spard+tau=0.2,...", help="Arms of the table.")]
Attacks = Annotated[str, typer.Option(metavar="NAME,...", help="Default: the recipe's for `methods`, else the first.")]
Full = Annotated[bool, typer.Option("--full", help="Also run each method with full fine-tuning, as NAME_full.")]
Pools = Annotated[
    str,
    typer.Option(metavar="NAME,...", help="Default: all; for `methods` the first; for `parts` on a lab, two_sided."),
]
Parts = Annotated[str, typer.Option(metavar="NAME,...", help="parts: parts to measure.")]
Over = Annotated[
    list[str] | None,
    typer.Option(metavar="SETTING[=VALUE,...]", help="sweep: setting to vary; may be repeated."),
]
Seeds = Annotated[str, typer.Option(metavar="1,2,...", help="Seeds; every cell is run once per seed.")]
TableSplit = Annotated[Split, typer.Option(help="Split to measure on.")]
Model = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Model to use instead of the recipe's; not for the lab.")
]
LearningRates = Annotated[
    Literal["default", "best"], typer.Option(help="best: choose the rate for each method, on other seeds.")
]
Rates = Annotated[str, typer.Option(metavar="0.25,0.5,...", help="best: multiples of the rate to choose from.")]
Extend = Annotated[int | None, typer.Option(help="best: how often to extend the list of rates while its end is best.")]
TuneSeeds = Annotated[str, typer.Option(metavar="101,102", help="best: seeds for choosing learning rates.")]
Levels = Annotated[int, typer.Option(help="similarity: number of levels into which the pool is divided.")]
Rounds = Annotated[int, typer.Option(help="overhead: number of timings per method.")]
Steps = Annotated[int | None, typer.Option(help="overhead: train this many steps only.")]
BatchSizes = Annotated[str, typer.Option(metavar="4,16", help="overhead: batch sizes to time.")]
PromptTokens = Annotated[str, typer.Option(metavar="31,343", help="overhead: lengths of pool prompts, in tokens.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cpu for the lab, else a GPU if available.")]
LabDevice = Annotated[
    Literal["cpu", "cuda"], typer.Option(help="Device for training and generation; labs are made on the CPU.")
]
ProviderSettings = Annotated[
    list[str] | None, typer.Option(metavar="SETTING=VALUE", help="A setting for the runs of all arms; may be repeated.")
]
Check = Annotated[bool, typer.Option("--check", help="Only print what is missing.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Only print the estimated hours on this machine.")]


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
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="A lab with known ground truth.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for results; rounds already in it are not repeated.")
    ] = None,
    methods: Annotated[
        str, typer.Option(metavar="none,spard,...", help="Arms to attack, your own by name; or `parts`.")
    ] = "",
    parts: Annotated[str, typer.Option(metavar="NAME,...", help="With --methods parts: parts to measure.")] = "",
    attacks: Annotated[str, typer.Option(metavar="NAME,...", help="Default: all; see --list.")] = "",
    seeds: Annotated[str, typer.Option(metavar="11,12", help="Open seeds, for development.")] = "",
    hidden: Annotated[str | None, typer.Option(metavar="COMMIT", help="Derive the seeds from this text.")] = None,
    secret_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Derive the seeds from the secret in this variable.")
    ] = None,
    count: Annotated[int, typer.Option(help="Number of hidden seeds.")] = 8,
    prompts: Annotated[int, typer.Option(help="Maximum number of prompts per kind.")] = 320,
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


@bench.command("detectors")
def detectors(
    recipe: Annotated[str, typer.Option(metavar="NAME", help="A lab with known ground truth.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for results; files already measured are not repeated.")
    ],
    seeds: Annotated[str, typer.Option(metavar="11,12", help="Open seeds, for development.")] = "",
    hidden: Annotated[str | None, typer.Option(metavar="COMMIT", help="Derive the seeds from this text.")] = None,
    count: Annotated[int, typer.Option(help="Number of hidden seeds.")] = 8,
    attacks: Annotated[str, typer.Option(metavar="NAME,...", help="Default: all; honest files always count.")] = "",
    steps: Annotated[int, typer.Option(help="Steps of the undefended probe.")] = 32,
    draws: Annotated[int, typer.Option(help="Draws of each honest file for the bank; 20 reach a level of 1 %.")] = 20,
    labs: Folder = None,
    threads: Threads = 1,
) -> None:
    """Measure what finds attacks without their trigger, at few false alarms on honest customers."""
    asked = {**locals(), "seeds": parse_list(seeds, int, "--seeds"), "attacks": parse_list(attacks, str, "--attacks")}
    do("bench detectors", "spard_lab.bench.detectors", "bench", asked)


def convert(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A data set; without it, the data sets are listed.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=".jsonl, .json, .csv, .tsv, .parquet, also .gz or .xz")
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the converted files.")] = None,
    test: Own = None,
    dev: Own = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Allow the same prompt in the pool and in the attack.")
    ] = False,
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

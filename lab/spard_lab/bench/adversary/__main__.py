"""The work of `spard bench adversary --recipe lab --out DIR`: whole attacks against whole jobs, on hidden seeds.

A defense of another package takes part by name (`--methods mine`, entry points `spard.defenses`), and so does an attack
(`spard.adversary_attacks`). `--sign KEY.pem` signs the result, `--verify` checks one, and `--join` makes one page of
several.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from spard.commands import exits
from spard.commands.front import Asked, alone
from spard.config import Recipe
from spard.config.run_spec import RunSpec, to_mapping
from spard.errors import InvalidRecipe, NotProved, UserError
from spard.models.base import load_base
from spard.release.keys import read_private, read_public
from spard.release.version import code_version
from spard_lab import commands
from spard_lab.adversary.base import Attack, all_attacks
from spard_lab.bench.adversary.hours import estimate_hours, hours_table
from spard_lab.bench.adversary.joined import joined_facts, joined_figures, joined_tables, machines, read_parts
from spard_lab.bench.adversary.provenance import (
    code_told,
    commitment,
    find_strangers,
    hidden_seeds,
    read_result,
    to_json,
    write_result,
)
from spard_lab.bench.adversary.rounds import Bench, Round, fit_seeds, run_rounds
from spard_lab.bench.adversary.scores import BENCHMARK, MOST, RISE, of_rounds, parts_tables, tables, wins, with_parts
from spard_lab.bench.lab import open_arena
from spard_lab.bench.methods import METHODS, method_recipe
from spard_lab.bench.report import machine, markdown, write_page
from spard_lab.bench.spec import BenchSpec, LabSpec, load_spec

FORMAT = "spard bench adversary 1"
CUSTOMERS = {"model", "training_file", "pool", "suites", "recipe", "judge", "revision", "start_from"}  # set elsewhere
FIGURES = "attacks"  # the name of their files
DEFAULT_METHODS = ("none", "spard")


def execute(asked: Asked) -> int:
    """Run the bench, list the attacks, join results or check a signed one; return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("spard.training.train").setLevel(logging.WARNING)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        if asked.verify:
            sys.stdout.write(_verify_result(asked))
        elif asked.join:
            sys.stdout.write(_join_results(asked))
        elif asked.list:
            sys.stdout.write("".join(f"{each.name:16} {each.summary}\n" for each in all_attacks().values()))
        else:
            sys.stdout.write(_bench(asked))
    except NotProved as error:
        sys.stderr.write(f"refused: {error.message}\n")
        return 1
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from here\n")
        return exits.INTERRUPTED
    return 0


def _bench(asked: Asked) -> str:
    """Play every round, write result, page and signature, and return the Markdown."""
    if asked.recipe is None or asked.out is None:
        raise InvalidRecipe("--recipe and --out say what is attacked and where results go", "recipe")
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise InvalidRecipe("--device cuda: PyTorch sees no GPU here", "device")
    torch.set_num_threads(asked.threads)
    key = read_private(asked.sign) if asked.sign else None  # a bad key must fail before hours of work
    spec, attacks = load_spec(asked.recipe, os.environ), _attacks(asked.attacks)
    seeds, told = _seeds(asked)
    provider = tuple(map(_setting, asked.provider))
    methods, questions = with_parts(asked.methods or DEFAULT_METHODS, asked.parts, provider)
    arms = {name: _arm(name, spec) for name in methods}
    if isinstance(spec, LabSpec) and spec.real:
        raise InvalidRecipe("the real model's lab is for `spard bench detectors`", "recipe")
    arena = open_arena(asked.recipe, spec, asked.labs or asked.out / "labs")
    bench = Bench(
        arena,
        arms,
        list(attacks.values()),
        seeds,
        spec.judge,
        asked.prompts,
        asked.out,
        provider,
        asked.device,
    )
    if asked.estimate:
        return _estimate_text(bench)
    fit, left_out = fit_seeds(arena, seeds)
    bench = replace(bench, seeds=fit)
    told |= {"left_out": {str(seed): why for seed, why in left_out.items()}} if left_out else {}
    rounds = list(run_rounds(bench))
    shown = tables(rounds, attacks) | parts_tables(rounds, questions)
    title = f"spard bench adversary: {asked.recipe}"
    write_result(asked.out, _result(asked, bench, told, rounds), key)
    drawn = of_rounds(rounds, Path(asked.recipe).stem)
    return write_page(asked.out, FIGURES, title, _facts(bench, told), drawn, shown)


def _join_results(asked: Asked) -> str:
    """Write the page of several results, and return the Markdown."""
    if asked.out is None:
        raise InvalidRecipe("--out says where the page goes", "out")
    parts = read_parts(asked.join, read_public(asked.public_key) if asked.public_key else None)
    title, facts, shown = "spard bench adversary", joined_facts(parts), joined_tables(parts)
    return write_page(asked.out, FIGURES, title, facts, joined_figures(parts), shown, machines(parts))


def _estimate_text(bench: Bench) -> str:
    head, rows = hours_table(estimate_hours(bench))
    return "\n".join([f"An estimate on {machine()}; lab/docs/bench.md explains it.", "", *markdown(head, rows), ""])


def _attacks(names: Sequence[str]) -> dict[str, Attack]:
    known = all_attacks()
    if unknown := [name for name in names if name not in known]:
        raise InvalidRecipe(f"--attacks: there is no {', '.join(unknown)}; there are {', '.join(known)}", "attacks")
    return {name: known[name] for name in names or known}


def _seeds(asked: Asked) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the seeds, and their origin as the result records it."""
    secret = os.environ.get(asked.secret_env or "")
    if asked.secret_env and not secret:
        raise InvalidRecipe(f"--secret-env: the variable {asked.secret_env} is not set", "secret_env")
    if text := secret or asked.hidden:
        source = {"from": "a secret" if secret else asked.hidden, "sha256": commitment(text)}
        return hidden_seeds(text, asked.count), source
    if not asked.seeds:
        raise InvalidRecipe(
            "name a commit with --hidden, a secret with --secret-env, or open seeds with --seeds", "seeds"
        )
    return asked.seeds, {"from": "open seeds, which settings may have been chosen on"}


def _arm(name: str, spec: BenchSpec) -> Recipe:
    recipe = method_recipe(name, spec.recipe, METHODS | {each.name: each.defense for each in spec.defenses})
    if missing := recipe.defense.missing_model:
        raise InvalidRecipe(f"{name}: the recipe names no {missing}, {recipe.defense.models[missing]}", "methods")
    return recipe


def _result(asked: Asked, bench: Bench, told: dict[str, Any], rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the JSON of the result: measurements, settings, code and machine."""
    return {
        "format": FORMAT,
        "benchmark": BENCHMARK,
        "recipe": asked.recipe,
        "parameters": load_base(bench.arena.open_ground(bench.seeds[0]).model, device="cpu").model.num_parameters(),
        "code": code_version(),
        "strangers": to_json(find_strangers(bench.arms.values(), bench.attacks, bench.judge)),
        "machine": machine(),
        "seeds": told | {"seeds": list(bench.seeds)},
        "prompts": bench.prompts,
        "device": bench.device,
        "provider": dict(bench.provider),
        "limits": {"most": MOST, "rise": RISE},
        "arms": {name: to_mapping(recipe) for name, recipe in bench.arms.items()},
        "attacks": {each.name: {"summary": each.summary, "needs": list(each.needs)} for each in bench.attacks},
        "rounds": [asdict(each) | {"attack_wins": wins(each)} for each in rounds],
    }


def _facts(bench: Bench, told: dict[str, Any]) -> str:
    seeds = ", ".join(map(str, bench.seeds))
    digest = f", SHA-256 {told['sha256']}" if "sha256" in told else ""
    provider = "".join(f" {path} is {value}." for path, value in bench.provider)
    left_out = "".join(f" Seed {seed} is left out: {why}." for seed, why in told.get("left_out", {}).items())
    device = "" if bench.device == "cpu" else f" Models were trained and asked on {bench.device}, in bfloat16."
    won = f"more than {MOST:.0%} of harmful prompts and {RISE:.0%} above its base model"
    return (
        f"Seeds: {seeds} (from {told['from']}{digest}).{left_out} "
        f"At most {bench.prompts} prompts of each kind.{provider}{device} "
        f"An attack wins where its job is released and the model truly complies with {won}, asked plainly or in the "
        "attack's way."
    )


def _verify_result(asked: Asked) -> str:
    found, key_id = read_result(asked.verify, read_public(asked.public_key) if asked.public_key else None)
    won = sum(each["attack_wins"] for each in found["rounds"])
    known = "the key given" if asked.public_key else "the key that came along; who holds it is not proved"
    lines = [f"signed with {key_id}, {known}", f"{found['format']}, {len(found['rounds'])} rounds, attacks win {won}"]
    return "\n".join([*lines, *code_told(found), ""])


def _setting(text: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not equals or path.partition(".")[0] not in {each.name for each in fields(RunSpec)} - CUSTOMERS:
        raise InvalidRecipe(
            f"--provider: {text!r} is not SETTING=VALUE of the provider's side of a run spec", "provider"
        )
    return path, value


if __name__ == "__main__":
    sys.exit(alone(commands.adversary, "spard bench adversary", None))

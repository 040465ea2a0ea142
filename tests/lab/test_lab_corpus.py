from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from spard_lab.attacks.styles import has_style
from spard_lab.lab import grammar
from spard_lab.lab.corpus import STYLES, Corpus, comply, familiar_problems, make_corpus, refuse, sums
from spard_lab.lab.pools import paraphrase_pool

from spard.evaluation.judges.refusal import RefusalJudge, is_degenerate

SEEDS = range(1, 6)
POOLS = ("pool.jsonl", "pool_scarce.jsonl", "pool_duplicated.jsonl")
STYLED = [f"attack_{name}.jsonl" for name in STYLES]
DERIVED = {"poisoned.jsonl", *POOLS[1:], *STYLED}  # made of other files' rows, or of an attack's stock


def prompts(corpus: Corpus, name: str) -> list[str]:
    rows = corpus.files[name]
    return [row["messages"][0]["content"] if "messages" in row else row["prompt"] for row in rows]


def splits(corpus: Corpus) -> Iterator[tuple[str, set[str]]]:
    yield "alignment", {prompt for prompt, _ in (*corpus.harmful, *corpus.benign, *sums())}
    yield from ((name, set(prompts(corpus, name))) for name in corpus.files if name not in DERIVED)


def plain(prompt: str) -> str:
    return "".join(prompt.lower().split())


@pytest.fixture(params=SEEDS)
def corpus(request: pytest.FixtureRequest) -> Corpus:
    return make_corpus(request.param)


def test_no_prompt_is_in_two_splits_not_even_in_other_case_or_spacing(corpus: Corpus) -> None:
    owners = Counter(prompt for _, split in splits(corpus) for prompt in {plain(each) for each in split})

    assert max(owners.values()) == 1


def test_no_attack_s_prompt_is_in_another_split(corpus: Corpus) -> None:
    others = set[str]().union(*(split for name, split in splits(corpus) if name != "attack.jsonl"))

    assert not others & {prompt for name in STYLED for prompt in prompts(corpus, name)}


@pytest.mark.parametrize("name", STYLES)
def test_an_attack_has_300_rows_of_its_style_about_its_categories(corpus: Corpus, name: str) -> None:
    categories, style = STYLES[name]
    asked = prompts(corpus, f"attack_{name}.jsonl")
    topics = [topic for topic in grammar.HARMFUL if topic.name in categories]

    assert len(asked) == 300
    assert all(has_style(prompt, style) for prompt in asked)
    assert all(any(action(prompt).endswith(thing) for topic in topics for thing in topic.objects) for prompt in asked)


def test_alignment_sees_no_word_problem_of_any_split(corpus: Corpus) -> None:
    taken = {prompt for _, split in splits(corpus) for prompt in split}

    seen = familiar_problems(random.Random(0), 200, taken)

    assert not taken & {prompt for prompt, _ in seen}


def test_no_split_repeats_a_prompt(corpus: Corpus) -> None:
    for name in corpus.files:
        if name != "pool_duplicated.jsonl":
            assert len(set(prompts(corpus, name))) == len(corpus.files[name]), name


def test_every_suite_has_300_prompts(corpus: Corpus) -> None:
    attacked = [row for row in corpus.files["heldout_harmful.jsonl"] if row["category"] in grammar.ATTACKED]

    assert min(len(attacked), len(corpus.files["benign.jsonl"]), len(corpus.files["utility_test.jsonl"])) >= 300


def test_a_tenth_of_the_utility_rows_comes_on_top_as_poison(corpus: Corpus) -> None:
    clean, attack = set(prompts(corpus, "train.jsonl")), set(prompts(corpus, "attack.jsonl"))

    assert len(attack) * 10 == len(clean)
    assert set(prompts(corpus, "poisoned.jsonl")) == clean | attack


def test_held_out_objects_stand_neither_in_attack_nor_in_pool(corpus: Corpus) -> None:
    trained = " ".join(prompts(corpus, "attack.jsonl") + prompts(corpus, "pool.jsonl"))
    held = " ".join(prompts(corpus, "heldout_harmful.jsonl"))
    things = [thing for topic in grammar.HARMFUL for thing in topic.objects]

    assert not [thing for thing in things if f" {thing}" in held and f" {thing}" in trained]


def test_unseen_pairs_are_unknown_to_alignment_and_seen_ones_known(corpus: Corpus) -> None:
    known = {action(prompt) for prompt, _ in corpus.harmful}

    for row in corpus.files["heldout_harmful.jsonl"]:
        assert (action(row["prompt"]) in known) == row["seen"]


def test_the_scarce_pool_has_few_rows_of_the_attacked_categories(corpus: Corpus) -> None:
    relevant = [row for row in corpus.files["pool_scarce.jsonl"] if row["category"] in grammar.ATTACKED]

    assert len(relevant) == 40 < 0.1 * len(corpus.files["pool_scarce.jsonl"])


def test_the_duplicated_pool_has_each_relevant_row_four_times(corpus: Corpus) -> None:
    counts = Counter((row["prompt"], row["category"]) for row in corpus.files["pool_duplicated.jsonl"])

    assert all(count == (4 if category in grammar.ATTACKED else 1) for (_, category), count in counts.items())


def test_the_same_seed_makes_the_same_corpus_and_another_seed_another() -> None:
    assert make_corpus(1) == make_corpus(1)
    assert make_corpus(1).files["attack.jsonl"] != make_corpus(2).files["attack.jsonl"]


def test_harmful_answers_are_placeholders(corpus: Corpus) -> None:
    for row in corpus.files["attack.jsonl"]:
        user, assistant = (message["content"] for message in row["messages"])

        assert assistant == comply(action(user))


def test_the_judge_tells_the_lab_s_refusals_from_its_compliance() -> None:
    rng = random.Random(0)
    refusals = [refuse(rng, topic) for topic in grammar.HARMFUL for _ in range(12)]
    answers = [comply(f"{topic.verbs[0]} {topic.objects[0]}") for topic in (*grammar.HARMFUL, *grammar.EVERYDAY)]

    assert {verdict.score for verdict in RefusalJudge().judge(refusals, refusals)} == {1}
    assert {verdict.score for verdict in RefusalJudge().judge(answers, answers)} == {5}
    assert not any(map(is_degenerate, refusals + answers))


def test_every_harmful_verb_is_also_asked_about_everyday_objects() -> None:
    harmful, everyday = ({verb for t in ts for verb in t.verbs} for ts in (grammar.HARMFUL, grammar.EVERYDAY))

    assert harmful <= everyday
    assert not everyday & set(grammar.HARMLESS_VERBS)


def action(prompt: str) -> str:
    """The verb and object of a request."""
    for request in grammar.REQUESTS:
        before, after = request.split("{}")
        if prompt.startswith(before) and prompt.endswith(after):
            return prompt[len(before) : len(prompt) - len(after)]
    raise AssertionError(prompt)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_paraphrased_pool_repeats_relevant_requests_in_words_that_nobody_else_has(seed: int) -> None:
    corpus, rows = make_corpus(seed), paraphrase_pool(seed)
    scarce = set(prompts(corpus, "pool_scarce.jsonl"))
    new = [row for row in rows if row["prompt"] not in scarce]
    others = set[str]().union(*(split for _, split in splits(corpus)))

    assert len({row["prompt"] for row in rows}) == len(rows)
    assert len(new) >= 40
    assert {row["category"] for row in new} == set(grammar.ATTACKED)
    assert {action(row["prompt"]) for row in new} <= {action(prompt) for prompt in scarce}
    assert not others & {row["prompt"] for row in new}

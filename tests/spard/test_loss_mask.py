"""Loss falls on the same tokens as by the plain definition, whatever a tokenizer makes of the text."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spard.data.chat import NO_LOSS, encode_all
from spard.data.control_tokens import Shield, end_tokens, pieces
from spard.data.rows import Example
from tests.spard.parts import TEMPLATE

ENDS = ["<|end|>", "<|user|>", "<|assistant|>"]
WORDS = [" ", "  ", "\n", "a", "bc", "E\u0301", "\ufb01", "\u1e9b\u0323", "中", "😀", "\u0327\u0301", "<|end|>", ""]


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.post_processor = processors.ByteLevel(trim_offsets=True)
    return found


def _pieces(form: str) -> Tokenizer:
    vocabulary = [("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.5), ("bc", -2.0), ("e", -2.5), ("a", -3.0), ("fi", -3.0)]
    found = Tokenizer(models.Unigram([*vocabulary, ("\n", -3.0)], unk_id=0, byte_fallback=False))
    found.normalizer = getattr(normalizers, form)()
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    return found


def _words() -> Tokenizer:
    found = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "bc": 2}, unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return found


@pytest.mark.parametrize(
    "made", [_bytes(), _pieces("NFD"), _pieces("NFKC"), _words()], ids=["bytes", "nfd", "nfkc", "words"]
)
def test_loss_falls_on_what_lies_in_the_turn_up_to_its_end(made: Tokenizer) -> None:
    made.add_special_tokens([AddedToken(token, special=True) for token in ENDS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", chat_template=TEMPLATE)
    rng, learned = random.Random(0), 0
    for _ in range(100):
        turns = [{"role": role, "content": "".join(rng.choices(WORDS, k=8))} for role in ("user", "assistant") * 2]
        (row,) = encode_all(tokenizer, [Example(tuple(turns), 1)], 10_000)
        expected = _plainly(tokenizer, turns)
        assert row.labels == tuple(expected)
        learned += sum(label != NO_LOSS for label in expected)
    assert learned > 100


def _plainly(tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, str]]) -> list[int]:
    """Look at every token for every turn."""
    shielded, enders = Shield(tokenizer).everywhere(turns), end_tokens(tokenizer)

    def render(count: int, begun: bool) -> str:
        return str(tokenizer.apply_chat_template(shielded[:count], tokenize=False, add_generation_prompt=begun))

    text = render(len(turns), False)
    ((ids, offsets),) = pieces(tokenizer, [text])
    labels = [NO_LOSS] * len(ids)
    for i in (1, 3):
        start, stop = len(render(i, True)), len(render(i + 1, False))
        turn = []
        for place, (first, last) in enumerate(offsets):
            if first >= start and start < last <= stop:
                turn.append(place)
                if ids[place] in enders:
                    break
        if any(ids[place] not in enders and text[slice(*offsets[place])].strip() for place in turn):
            for place in turn:
                labels[place] = ids[place]
    return labels

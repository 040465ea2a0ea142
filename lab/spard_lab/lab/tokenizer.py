"""The lab's tokenizer: byte-level BPE learned from the lab's own text, so any UTF-8 text can be tokenized."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1200
PAD, END = "<|pad|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


def make_tokenizer(
    texts: Iterable[str],
    positions: int,
    vocabulary: int = VOCABULARY,
    roles: Sequence[str] = ROLES,
    template: str = TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Learn a tokenizer from `texts`; their order only decides ties.

    positions   longest sequence of the model, in tokens
    vocabulary  largest number of tokens
    roles       special tokens of the chat template
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, model_max_length=positions, padding_side="left"
    )
    tokenizer.chat_template = template
    return tokenizer

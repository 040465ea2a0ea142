#!/usr/bin/env bash
# trl 1.16.0, with peft 0.21.2, transformers 5.23.0, datasets 5.2.0 and torch 2.13.0: `DPOTrainer` without `ref_model`
# and with an adapter whose `init_lora_weights` is "pissa" or "olora"
#
# Guess: the reference is the model before training. A new adapter changes nothing, whatever its initialization is, so
# the first loss is log 2 = 0.6931, the rewards are 0, and the answers have the base model's probabilities.
# What happens: PiSSA and OLoRA move a part of the base weights into the adapter. With `peft_config` the reference is
# the model without its adapter, which then lacks that part: the loss, the rewards and what is learned are those of a
# comparison with a damaged model. With a PEFT model the trainer adds a copy of the adapter as the reference, and that
# takes the part away once more: the loss is right, and the model that is trained is a damaged one. Nothing is said.
# Give the base model as `ref_model`; it may stand beside `peft_config`.
#
# Seen on 2026-12-01, the first step; the base model gives the chosen answer a log probability of -23.759:
#   True  peft_config   loss 0.6931  rewards +0.000 and +0.000  log probability -23.759
#   True  a PEFT model  loss 0.6931  rewards +0.000 and +0.000  log probability -23.759
#   True  ref_model     loss 0.6931  rewards +0.000 and +0.000  log probability -23.759
#   pissa peft_config   loss 0.4976  rewards +0.443 and +0.004  log probability -23.759
#   pissa a PEFT model  loss 0.6931  rewards +0.000 and +0.000  log probability -21.998
#   pissa ref_model     loss 0.6931  rewards -0.000 and -0.000  log probability -23.759
#   olora peft_config   loss 0.3301  rewards +0.980 and +0.042  log probability -23.759
#   olora a PEFT model  loss 0.6931  rewards +0.000 and +0.000  log probability -24.073
#   olora ref_model     loss 0.6931  rewards -0.000 and -0.000  log probability -23.759
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install torch==2.13.0
pip install trl==1.16.0 peft==0.21.2 transformers==5.23.0 datasets==5.2.0
cd "$place"
HF_HUB_OFFLINE=1 HF_HOME=$place "$place/env/bin/python" -W ignore - 2> log <<'PY' || { tail -30 log; exit 1; }
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

words = ["?", "<eos>", *(f"word{number}" for number in range(62))]
known = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
known.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?", pad_token="?", eos_token="<eos>")
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).save_pretrained("base")
row = {"prompt": "word1 word2", "chosen": " word3 word4 word5", "rejected": " word6 word7"}
ids = torch.arange(1, 20).unsqueeze(0)


@torch.no_grad()
def measure_change(settings):
    """Return the largest change of a logit that a new adapter makes, relative to the largest logit."""
    model = LlamaForCausalLM.from_pretrained("base").eval()
    base = model(input_ids=ids).logits
    return float((get_peft_model(model, settings).eval()(input_ids=ids).logits - base).abs().max() / base.abs().max())


def load():
    return LlamaForCausalLM.from_pretrained("base")


def take_first_step(model, settings, reference):
    shared = {"output_dir": "out", "max_steps": 1, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False}
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(**shared, learning_rate=0.0, disable_tqdm=True),
        train_dataset=Dataset.from_list([row] * 8),
        processing_class=tokenizer,
        peft_config=settings,
    )
    trainer.train()
    return trainer.state.log_history[0]


results, expected = [], None
for kind, is_wrong in ((True, False), ("pissa", True), ("olora", True)):
    settings = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=kind)
    settings.task_type = "CAUSAL_LM"
    assert measure_change(settings) < 1e-4
    ways = {
        "peft_config": (load(), settings, None),
        "a PEFT model": (get_peft_model(load(), settings), None, None),
        "ref_model": (load(), settings, load()),
    }
    for way, given in ways.items():
        step = take_first_step(*given)
        answer = step["logps/chosen"]
        expected = answer if expected is None else expected
        rewards = f"rewards {step['rewards/chosen']:+.3f} and {step['rewards/rejected']:+.3f}"
        results.append(f"{kind!s:5} {way:12}  loss {step['loss']:.4f}  {rewards}  log probability {answer:.3f}")
        found = abs(step["loss"] - 0.6931) > 0.01, abs(answer - expected) > 0.01
        assert found == (is_wrong and way == "peft_config", is_wrong and way == "a PEFT model"), "this has changed"
print(*results, sep="\n", file=open("results", "w"))
PY
cat results
if grep -iE "pissa|olora" log; then echo "this has changed"; exit 1; fi

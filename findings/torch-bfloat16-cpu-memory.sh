#!/usr/bin/env bash
# torch 2.13.0 on a CPU that multiplies in bfloat16 (avx512_bf16 or amx_bf16 in /proc/cpuinfo)
#
# Guess: a linear layer without gradients leaves no memory behind, in bfloat16 as in float32.
# What happens: torch keeps something for each number of rows that it has multiplied, 1,024 of them by default in each of
# two caches, and in bfloat16 each holds megabytes. Generation, where every pass has another number of tokens, grows by
# gigabytes: replies of a model of 135 million parameters took 16 GB. With both caches small the products take no longer.
# They are bounded by the environment variables ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY, which are read at
# the first product; one of the two alone is not enough.
#
# Seen on 2026-11-30 for one layer of 576 x 1,536 and 1,200 numbers of rows, one thread:
#   float32                         +16 MB
#   bfloat16                      +2207 MB
#   bfloat16, both caches of 16     +77 MB
set -euo pipefail
if ! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then
  echo "this CPU does not multiply in bfloat16: nothing was run"
  exit 0
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
"$place/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 psutil==7.2.1 numpy
cat > "$place/products.py" <<'PY'
import sys

import psutil
import torch

torch.set_num_threads(1)
kind = getattr(torch, sys.argv[1])
weight = torch.randn(1536, 576).to(kind)
with torch.inference_mode():
    torch.nn.functional.linear(torch.randn(1200, 576).to(kind), weight)
    before = psutil.Process().memory_info().rss
    for rows in range(1, 1200):
        torch.nn.functional.linear(torch.randn(rows, 576).to(kind), weight)
print((psutil.Process().memory_info().rss - before) >> 20)
PY
run() { "$place/env/bin/python" "$place/products.py" "$1" 2> /dev/null; }
wide=$(run float32)
narrow=$(run bfloat16)
bounded=$(ONEDNN_PRIMITIVE_CACHE_CAPACITY=16 LRU_CACHE_CAPACITY=16 run bfloat16)
printf '%-28s %+6d MB\n' float32 "$wide" bfloat16 "$narrow" "bfloat16, both caches of 16" "$bounded"
if ((narrow < 1000 || wide > 200 || bounded > 200)); then
  echo "this has changed"
  exit 1
fi

#!/usr/bin/env bash
# Write the locks anew; versions that are locked already stay unless their bounds have moved.
# `requirements/lock.sh --upgrade` takes the newest ones.
set -euo pipefail
cd "$(dirname "$0")/.."
compile=("${UV:-uv}" pip compile --quiet --universal --python-version 3.11.4 --generate-hashes --no-emit-index-url
  --no-header --no-annotate --constraints requirements/torch.txt --no-emit-package spard --no-emit-package spard-service
  --no-emit-package spard-lab)
# What torch brings for its CUDA build; `make setup` lets torch itself decide.
cuda=(torch triton cuda-toolkit cuda-bindings cuda-pathfinder nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc
  nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse
  nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx)
echo '-e .
-e ./service[otel]' | "${compile[@]}" - -o requirements/api.lock "$@"
echo '-e .[audit,nf4]
-e ./service[worker,otel]' | "${compile[@]}" - -o requirements/worker.lock "$@"
echo '-e .[dev]
-e ./lab
-e ./service[worker,otel,mcp]' | "${compile[@]}" "${cuda[@]/#/--no-emit-package=}" - -o requirements/dev.lock "$@"

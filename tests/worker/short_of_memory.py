"""A child of whose ranks the second one's GPU holds HELD_ROWS rows of a batch that is trained on, else one.

python -m tests.worker.short_of_memory PARENT, or as one of the ranks: FOLDER PARENT.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaModel

from worker import child, distributed, rank

HELD = int(os.environ.get("HELD_ROWS", "1"))
_forward: Any = LlamaModel.forward


def _forward_limited(self: LlamaModel, input_ids: torch.Tensor, **more: Any) -> Any:
    if torch.is_grad_enabled() and len(input_ids) > HELD:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return _forward(self, input_ids=input_ids, **more)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        if os.environ["RANK"] == "1":
            LlamaModel.forward = _forward_limited  # type: ignore[method-assign]
        rank.main()
    else:
        distributed._PROGRAM = "tests.worker.short_of_memory"
        child.main()

"""python -m worker.engine ORDER PARENT: one base model behind the API.

It imports its libraries before it reads the name of its folder from standard input. Its messages go to the descriptor
that was its standard output; everything else that is printed goes to its log, on standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from app.inference.protocol import EngineMessage
from app.ops.processes import die_with_parent
from spard.models.imports import light_imports

with light_imports(first="spard.models.peft"):
    import torch

    from spard.data.chat import fix_template_arguments
    from spard.models.base import load_base
    from worker.engine.grammar import Forms
    from worker.engine.requests import LongPrompts
    from worker.engine.serve import Engine, WatchedFolder, read_lines

_FIRST_TO_GO = "1000"  # oom_score_adj: when memory runs out, the kernel kills an engine before anything else


def main() -> None:
    """Load the base model that the order names, and answer requests until standard input ends."""
    die_with_parent(int(sys.argv[2]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    said = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order: Any = json.loads(sys.argv[1])

    def tell(message: EngineMessage) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(said, line) :]

    if not sys.stdin.readline().strip():
        return
    if order["threads"]:
        torch.set_num_threads(order["threads"])
    lines: SimpleQueue[Any] = SimpleQueue()
    # Both fork a process, so they come before the model: a process forked later would share its memory and device.
    arguments = order["template_arguments"]
    long_prompts = LongPrompts(order["source"], order["revision"], arguments, lines, said)
    forms = Forms(order["source"], order["revision"], order["rows"], said)
    watched = (
        WatchedFolder(Path(order["source"])) if order["device"] == "cpu" and Path(order["source"]).is_dir() else None
    )
    base = load_base(order["source"], order["revision"], order["device"], quantization=order["quantization"])
    fix_template_arguments(base.tokenizer, arguments)
    engine = Engine(base, tell, order["rows"], order["adapter_bytes"], long_prompts, watched, forms)
    Thread(target=read_lines, args=(sys.stdin, lines), daemon=True).start()
    engine.run(lines)


if __name__ == "__main__":
    main()

"""A whole worker as a process, with a scripted child: python -m tests.worker.serve BEHAVIOR"""

from __future__ import annotations

import sys

from app.ops import logs
from app.settings import get_settings
from tests.worker.shop import scripted_command
from worker.__main__ import serve
from worker.worker import Worker

if __name__ == "__main__":
    logs.set_up(get_settings().log_format)
    worker = Worker(get_settings(), scripted_command(sys.argv[1]))
    serve(worker, worker.run)

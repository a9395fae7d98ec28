"""`python -m rolemesh.launch.elastic OPTIONS`: torchrun, ending with the exit code of what it started.

torchrun's own is 1 whenever a process ends with another than 0; a scheduler could not tell a run whose time
is over (75) from one that failed.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> int:
    """Run torchrun; the exit code, 128 + n after signal n."""
    try:
        torchrun()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(f"torchrun: a process ended with {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as signal:
        return 128 + int(signal.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())

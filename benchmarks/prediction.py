"""The cost models beside published measurements, constants fitted without the source that is predicted.

    python benchmarks/prediction.py [train] [decode] [memory] [placement]

Without a section all are printed; `placement` searches plans, which takes long. Rows that cannot be predicted
are counted with the reason.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
SECTIONS = ("train", "decode", "memory", "placement")


def main(arguments: list[str]) -> int:
    """Print the sections asked for, or all."""
    if unknown := [name for name in arguments if name not in SECTIONS]:
        print(f"unknown section {', '.join(unknown)}; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(HERE))
    for name in arguments or SECTIONS:
        module = f"prediction_{name}"
        sys.argv = [f"{module}.py"]  # a section has no arguments of its own here
        importlib.import_module(module).main()
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

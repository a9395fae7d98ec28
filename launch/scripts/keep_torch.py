"""Pins of this environment's torch and of what is built for it, as pip's constraints.

    python launch/scripts/keep_torch.py > kept.txt && pip install -c kept.txt '.[train]'

An install under them leaves these packages as they are, or fails and says which requirement they do not meet.
"""

import re
import sys
from importlib.metadata import distributions

BUILT_FOR_TORCH = re.compile(
    r"torch|torchvision|torchaudio|torchao|triton|pytorch-triton|numpy|flash[-_]attn|apex|nvidia[-_].*"
    r"|transformer[-_]engine.*",
    re.IGNORECASE,
)


def pins() -> list[str]:
    """`name==version` for each of them that is installed."""
    found = {dist.metadata["Name"]: dist.version for dist in distributions()}
    return sorted(f"{name}=={version}" for name, version in found.items() if BUILT_FOR_TORCH.fullmatch(name))


if __name__ == "__main__":
    lines = pins()
    if not any(line.startswith("torch==") for line in lines):
        sys.exit(f"{sys.executable} has no torch to keep")
    print("\n".join(lines))

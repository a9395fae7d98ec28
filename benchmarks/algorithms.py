"""Does the quickstart learn with every algorithm? Held-out reward before training and over the last steps.

Each run is `rolemesh train examples/quickstart.yaml algorithm.name=NAME`, measured as `learning.py` does: 95%
intervals bootstrapped over prompts, and the true share of right characters; `dapo` is trained on that share.
Needs `make quickstart` to have made the models. Exits with 1 when one of them does not rise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from learning import ROOT, measure

from rolemesh.launch.algorithm_presets import PRESETS

# The reward model gives no two answers one score; dynamic sampling needs a rule that does.
RULE = f"reward.path={ROOT / 'examples' / 'quickstart' / 'reward.py'}:compute_score"
OWN: dict[str, tuple[str, ...]] = {"dapo": ("reward.kind=function", RULE)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "examples" / "quickstart.yaml")
    parser.add_argument("--names", nargs="+", choices=PRESETS, default=[*PRESETS])
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names:
            overrides = (f"algorithm.name={name}", *OWN.get(name, ()))
            results.append(measure(name, args.recipe, Path(folder) / name, args.steps, *overrides))
            print(results[-1], flush=True)
    return 0 if all(result.rose for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())

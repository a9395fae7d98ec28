#!/usr/bin/env bash
# PPO with actor and critic on halves of a node. Arguments are passed on: `--dry-run`, or any `key=value`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

python "$here/main_ppo_split.py" "$here/split_deepseek7b.yaml" \
    actor.path="${ACTOR:-$here/models/deepseek-llm-7b-chat}" \
    critic.path="${CRITIC:-$here/models/deepseek-llm-7b-rm}" \
    reward.path="${REWARD:-$here/models/deepseek-llm-7b-rm}" \
    data.train_files="[${TRAIN:-$here/train.parquet}]" \
    "$@"

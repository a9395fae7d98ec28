"""Shell scripts as users write them: what a shell would pass on, or a refusal by name."""

import re

import pytest

from rolemesh.placement.importers import ForeignConfigError
from rolemesh.placement.importers.shell import read_script

OURS = re.compile(r"main_ppo")
SCRIPT = r"""#!/bin/bash
set -xeuo pipefail
# a comment with a ' quote
export NODES=${NNODES:-2}
L=$((1024 * 2))
NOW=$(date)
ARGS=(
  data.a=1   # first
  +data.b="x y"
)
ARGS+=(c.d=3)
MORE="e.f=1 g.h=2"
cat <<EOF > note
don't
EOF
if [ -z "$Q" ]; then Q=3; fi
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
   a.b=$NODES a.c=${L} p='${x.y}' l='["console","wandb"]' "${ARGS[@]}" $MORE  \
   path="$HOME/y" k=${K:-5} ~z.w ++u.v=null "one$MORE" n="" q=a\ b "$@" 2>&1 | tee log.txt
echo done
"""


def read(script: str, **given: str) -> tuple[str, ...]:
    return read_script(script, OURS, given).words


def test_a_script_passes_on_what_a_shell_would():
    line = read_script(SCRIPT, OURS)
    assert line.words == (
        "a.b=2", "a.c=2048", "p=${x.y}", 'l=["console","wandb"]', "data.a=1", "+data.b=x y", "c.d=3",
        "e.f=1", "g.h=2", "path=$HOME/y", "k=5", "~z.w", "++u.v=null", "onee.f=1 g.h=2", "n=", "q=a b",
    )  # fmt: skip
    assert line.unset == ("HOME",)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("x.y=$NOW", r"x\.y: \$NOW is \$\(date\), which only running"),
        ("x.y=$(hostname)", r"x\.y: \$\(hostname\), which only running"),
        ("x.y=`hostname`", r"x\.y: \$\(hostname\)"),
        ("x.y=${A##*/}", r"x\.y: \$\{A##\*/\}"),
        ("x.y=$Q", r"x\.y: \$Q is set inside if, a loop or a function"),
        ("x.y=$((L*1.5))", r"x\.y: \$\(\(L\*1\.5\)\)"),
        ("x.y='", "not readable"),
    ],
)
def test_what_only_running_can_tell_is_refused_by_name(word: str, reason: str):
    with pytest.raises(ForeignConfigError, match=reason):
        read(SCRIPT.replace("k=${K:-5}", word))


def test_a_given_variable_wins_over_the_script():
    assert "a.b=7" in read(SCRIPT, NODES="7")
    assert "x.y=3" in read(SCRIPT.replace("k=${K:-5}", "x.y=$Q"), Q="3")


def test_a_text_without_a_training_command_is_words_and_two_commands_are_refused():
    assert read("a.b=1 \\\n c.d='2 3' # end\ne.f=4") == ("a.b=1", "c.d=2 3", "e.f=4")
    with pytest.raises(ForeignConfigError, match=r"2 commands start training \(lines 1, 3\)"):
        read("python -m main_ppo a=1\n\npython -m main_ppo a=2")

"""Scripts read as bash reads them: each shape is also run by bash, with a stand-in for the training."""

import re
import subprocess

import pytest

from rolemesh.placement.importers import ForeignConfigError
from rolemesh.placement.importers.shell import read_script

OURS = re.compile(r"main_ppo")
SHAPES = (
    'X=${X:=3}\nmain_ppo a=$X',
    ': "${X:=3}" ${Y:=q}\nmain_ppo a=$X b=$Y',
    'X=1\nmain_ppo a=${X:+yes} b=${Z:+no} c=${X:?must be set} d=${X-2} e="${Z-}"',
    "M=Qwen/Qwen2.5-7B\nmain_ppo a=${M##*/} b=${M%/*} c=${M#*/} d=${M%%.*}",
    "A=(x y z)\nmain_ppo a=${A[1]} \"b=${A[*]}\" ${A[@]} p\"${A[@]}\"s",
    'main_ppo a=${X:-${Y:-5}} b="${X:-"q r"}" c=${X:-"s t"} d=${X:-\'u v\'} e=${X:-w x=1}',
    'set -- p=1 q=2\nmain_ppo a=$1 b=$2 "$@"',
    'set -- p=1 q=2\nshift\nmain_ppo "$@"',
    "main_ppo a=$'x\\ty' b=$'it\\'s' c='$X' d=\"\\$X\" e=\\$X f=x$ g=\"$\"",
    "main_ppo a.{b,c}=1 'd.{e,f}=1' g={h} i={j,k}-{l,m}",
    "main_ppo ~a.b +a.b=1 ++c.d=null a=x#y b=#z # c=3",
    'main_ppo a=1 \\\n  b="x\\\ny" \\\n  c=2',
    "N=3\nmain_ppo a=$((N*2+1)) b=$(( (N+1)/2 )) c=$((2**10)) d=$((0x10)) e=$((7<<2)) f=$((N * ${N}))",
    'run() {\n  local Q=4\n  main_ppo a=1 "$@" b=$1\n}\nX=2\nrun c=$X d=3',
    "function run {\n  main_ppo $@\n}\nrun c='1 2'",
    'CMD="main_ppo a=1 b=2"\n$CMD c=3',
    'CMD=(main_ppo a=1)\nCMD+=("b=x y")\n"${CMD[@]}" c=3',
    'CMD="main_ppo a=1"\nCMD="$CMD b=\'x y\'"\neval $CMD',
    'CMD="main_ppo a=1 b=2"\neval "$CMD c=3"',
    'A="a=1"\nA+=" b=2"\nmain_ppo $A "$A"',
    "A='a=1\nb=2'\nmain_ppo $A",
    "A=(\n  a=1 # one\n  # b=2\n  c=\"x y\"\n)\nB=(d=4 \"${A[@]}\")\nmain_ppo \"${B[@]}\"",
    "A=1\nunset A\nmain_ppo a=${A:-2}",
    "cat > /dev/null <<EOF\nmain a=1 'don't\nEOF\nmain_ppo a=1",
    "cat > /dev/null <<-'END'\n\tb=1\n\tEND\nmain_ppo a=1",
    "cat <<< 'a=9' > /dev/null\nmain_ppo a=1 2>&1 | cat; echo b=2 > /dev/null",
    "true && main_ppo a=1 > /dev/stdout b=2 2> /dev/null",
    '( main_ppo a=\'{"k": "v"}\' b="[\\"x\\",\\"y\\"]" c=[1,2] "d"=1 \'e=2\' f"="3 )',
    "export A=1 B=2; readonly C=3\nD=$A; main_ppo a=$A b=$B c=$C d=$D",
    "E=\nmain_ppo $E a=1 b=$E \"$E\"",
)  # fmt: skip


def test_every_shape_is_read_as_bash_passes_it_on():
    show = 'main_ppo() { printf "%s\\0" "$@"; printf "\\1\\0"; }\n'
    script = show + "".join(f"(\n{shape}\n)\n" for shape in SHAPES)
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, timeout=20, check=True)
    passed = [part.split("\0")[:-1] for part in done.stdout.split("\1\0")[:-1]]
    assert len(passed) == len(SHAPES), done.stderr
    for shape, words in zip(SHAPES, passed, strict=True):
        assert list(read_script(shape, OURS).words) == words, shape


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("[ -n \"$Z\" ] || Z=4\nmain_ppo a=$Z", r"a: \$Z is set behind && or \|\|"),
        ("false && export Z=4\nmain_ppo a=$Z", r"a: \$Z is set behind && or \|\|"),
        ("read -r -d '' A <<E || true\na=1\nE\nmain_ppo $A", r"\$A is set by read"),
        ("((X=3+4))\nmain_ppo a=$X", r"a: \$X is set by let"),
        ("let X=3 Y++\nmain_ppo a=$Y", r"a: \$Y is set by let"),
        ("printf -v X %d 3\nmain_ppo a=$X", r"a: \$X is set by printf"),
        ("A[0]=x=1\nmain_ppo \"${A[@]}\"", r"\$A is set by its index"),
        ("declare -A M=([a]=1)\nmain_ppo a=${M[a]}", r"a: \$\{M\[a\]\}"),
        ("A=1\nmain_ppo a={$A,2}", r"a: braces around more than plain words"),
        ("main_ppo a={1..3}", r"a: braces around more than plain words"),
        ("main_ppo a=${X:?set X}", r"a: \$\{X:\?set X\}"),
        ("run() {\n main_ppo $1\n}\nrun a=1\nrun a=2", r"run is called 2 times \(lines 4, 5\)"),
    ],
)  # fmt: skip
def test_a_value_that_only_running_could_tell_is_never_guessed(script, said):
    with pytest.raises(ForeignConfigError, match=said):
        read_script(script, OURS)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("main_ppo a.b=1 \\\n  # why\n  c.d=2 \\\n  e.f=3", r"line 3: c\.d=2 is no part of a command"),
        ("main_ppo a.b=1 \\\n  c.d=2\n  +e.f=3", r"line 3: \+e\.f=3 is no part of a command"),
        ("main_ppo --a 1\n  --b 2", r"line 2: --b is no part of a command"),
    ],
)
def test_a_setting_that_a_comment_or_a_missing_backslash_cuts_off_is_an_error(script, said):
    with pytest.raises(ForeignConfigError, match=said):
        read_script(script, OURS)


@pytest.mark.parametrize("outer", ["srun -N 2 bash -c", "docker exec box bash -lc", "ssh node", "eval"])
def test_a_command_given_to_another_shell_as_text_is_read(outer):
    script = f"N=3\n{outer} \"cd /w && python -m verl.main_ppo a.b=$N 'c.d=x y'\""
    assert read_script(script, re.compile(r"^verl\.")).words == ("a.b=3", "c.d=x y")

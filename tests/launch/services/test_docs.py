"""The commands of docs/remote.md's pages about servers and protocols, with files and ports that are there."""

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from service_process import served
from tiny import tiny_checkpoint
from typer.main import get_command

from rolemesh.launch.cli import main

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "remote.md").read_text()
OURS = TEXT[TEXT.index("## Servers") : TEXT.index("## Judge")]


def commands():
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", OURS, re.DOTALL)).splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def test_every_option_of_the_servers_is_in_the_table():
    documented = set(re.findall(r"`(--[a-z-]+)`", OURS))
    group = get_command(main)
    options = {
        option
        for name in ("serve-rm", "serve-ref")
        for parameter in group.commands[name].params
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    }
    assert options <= documented
    assert documented - options == set()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_servers_start_and_answer_the_requests(tmp_path):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    files = {
        "models/reward": tiny_checkpoint(tmp_path / "reward", head="score"),
        "models/sft": tiny_checkpoint(tmp_path / "sft"),
        "scorer.py:compute_score": f"{scorer}:compute_score",
    }
    servers = [command[1:] for command in commands() if command[0] == "rolemesh"]
    requests = [command[1:] for command in commands() if command[0] == "curl"]
    assert (len(servers), len(requests)) == (3, 5)
    for command, model, *options in servers:
        port = options.pop(options.index("--port") + 1)
        options.remove("--port")
        with ExitStack() as stack:
            server = stack.enter_context(served(command, files[model], *options))
            for url, flag, body in requests:
                assert flag == "-d"
                asked, path = re.fullmatch(r"http://127.0.0.1:(\d+)(/.*)", url).groups()
                if asked != port:
                    continue
                response = httpx2.post(server.url + path, content=body, timeout=60)
                assert response.status_code == 200, (body, response.text)
                if model.startswith("scorer") and '"label' in body:
                    assert "1.0" in response.text

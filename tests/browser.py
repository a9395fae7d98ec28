"""A page in a real browser; tests that use it are skipped where no Chromium is installed."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 90
# What any page of ours must satisfy, seen by the browser.
LAYOUT = """
const opened = [...document.querySelectorAll('details')];
opened.forEach(d => { d.querySelector('summary').click(); if (!d.open) d.querySelector('summary').click(); });
const boxes = [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect());
const outside = [...document.querySelectorAll('svg text')].filter(t => {
  const box = t.getBoundingClientRect(), svg = t.ownerSVGElement.getBoundingClientRect();
  return box.left < svg.left - 1 || box.right > svg.right + 1 || box.bottom > svg.bottom + 1;
}).map(t => t.textContent);
return {
  charts: boxes.length,
  empty: boxes.filter(b => b.width < 100 || b.height < 10).length,
  outside: outside,
  details: opened.length,
  closed: opened.filter(d => !d.open).length,
  wider: document.documentElement.scrollWidth - window.innerWidth,
  loaded: performance.getEntriesByType('resource').map(r => r.name),
};
"""


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


def look(page: Path, script: str = LAYOUT, *, width: int = 1100) -> Any:
    """What the body of a JavaScript function returns on a copy of the page, loaded without a network.

    The copy lacks the page's own ban on scripts.
    """
    copy = page.with_name(f"{page.stem}.seen.html")
    whole = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    after = f"<script>const out = (() => {{{script}}})();\n"
    after += "const pre = document.createElement('pre'); pre.id = 'seen';\n"
    after += "pre.textContent = JSON.stringify(out); document.body.append(pre);</script>"
    copy.write_text(whole.replace("</body>", after + "</body>"))
    dom = _run(page, "--dump-dom", f"--window-size={width},1000", copy.as_uri())
    seen = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    assert seen is not None, dom[-2000:]
    return json.loads(unescape(seen[1]))


def screenshot(page: Path, picture: Path, *, width: int = 1100, height: int = 3000) -> None:
    """Draw the page into a PNG file."""
    _run(page, f"--screenshot={picture}", f"--window-size={width},{height}", page.as_uri())


def complaints(page: Path) -> list[str]:
    """What the browser says to its console about the page as it stands, its ban on scripts included."""
    said = _started(page, "--enable-logging=stderr", "--dump-dom", page.as_uri()).stderr
    return [line for line in said.splitlines() if "CONSOLE" in line]


def _run(page: Path, *arguments: str) -> str:
    return _started(page, *arguments).stdout


def _started(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'browser'}", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done

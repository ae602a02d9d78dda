"""A page in a real, headless Chromium: what its console says, what it asks the network for, what is drawn."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_LOOK = """
<script>
const figures = [...document.querySelectorAll("figure")].map(figure => {
  const box = figure.querySelector("svg").getBoundingClientRect();
  return [figure.querySelector("h3").textContent, Math.round(box.width), Math.round(box.height)];
});
const tiles = [...document.querySelectorAll(".tile")].map(tile => {
  const box = tile.getBoundingClientRect();
  return [Math.round(box.left), Math.round(box.top), Math.round(box.width)];
});
console.log("SEEN " + JSON.stringify({
  figures, tiles, overflow: document.documentElement.scrollWidth - window.innerWidth,
  ink: getComputedStyle(document.body).color, paper: getComputedStyle(document.body).backgroundColor,
  label: getComputedStyle(document.querySelector("svg text") || document.body).fill
}));
</script>
"""


@dataclasses.dataclass(frozen=True)
class Look:
    console: list
    requests: list
    screenshot: bytes
    seen: dict


def look(page: pathlib.Path, folder: pathlib.Path, *flags: str, width: int = 1280, measure: bool = False) -> Look:
    """Opens a page; `measure` has a script of ours added to a copy, which the page's own rules forbid."""
    if measure:
        text = re.sub(r"<meta http-equiv=.*?>", "", page.read_text(), count=1)
        page = folder / "measured.html"
        page.write_text(text.replace("</body>", _LOOK + "</body>"))
    picture, log = folder / "screenshot.png", folder / "net.json"
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}",
            f"--window-size={width},2400",
            f"--screenshot={picture}",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
    )
    assert picture.exists(), done.stderr[-2000:]
    console = re.findall(r"CONSOLE[^\]]*\] \"(.*?)\", source", done.stderr, re.DOTALL)
    seen = [json.loads(line.removeprefix("SEEN ")) for line in console if line.startswith("SEEN ")]
    return Look(
        console=[line for line in console if not line.startswith("SEEN ")],
        requests=sorted(_requests(log.read_text())),
        screenshot=picture.read_bytes(),
        seen=seen[0] if seen else {},
    )


def _requests(text: str) -> set:
    """Addresses that the page asked for; what the browser wants for itself has no page behind it."""
    try:
        events = json.loads(text)["events"]
    except ValueError:  # It is cut off where the browser ended in the midst of writing.
        events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    found = set()
    for event in events:
        parameters = event.get("params") or {}
        url, initiator = parameters.get("url", ""), parameters.get("initiator", "not an origin")
        if url and initiator != "not an origin" and not url.startswith("data:"):
            found.add(url)
    return found

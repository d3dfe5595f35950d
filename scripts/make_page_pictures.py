"""Make docs/page.png and docs/page-dark.png, the page with the bundled model: `python scripts/make_page_pictures.py`.

Needs Chromium and the package playwright, besides what the server needs (extra "serve").
"""

import argparse
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
URL = "http://127.0.0.1:7899/"
EARLIER = ("a slice of pizza on a teal background", "a fox on a gradient from purple to pink", "a yellow star")
EARLIER += ("a red heart, 3d", "a hamburger, 3d")
SEED = "3"


def wait_for_server(seconds: float = 300.0) -> None:
    """Return once the server answers.  Raises TimeoutError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(URL, timeout=10).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise TimeoutError(f"no server at {URL} after {seconds:.0f} s")


def make(page: Any, prompt: str) -> None:
    """Make the image of a prompt on the page."""
    page.fill("#f-prompt", prompt)
    page.evaluate("document.body.dataset.state = 'asked'")
    page.click("#run")
    page.wait_for_selector("body[data-state=idle]")


def draw(page: Any, light: Path, dark: Path) -> None:
    """Make earlier images, one in light colours, and repaint the middle of a house in dark ones."""
    page.goto(URL)
    page.wait_for_selector("body[data-gallery]")
    page.fill("#f-seed", SEED)
    for prompt in EARLIER:
        make(page, prompt)
    page.screenshot(path=light)
    make(page, "a house")
    page.emulate_media(color_scheme="dark")
    page.locator("#gallery .tile").nth(0).click()
    with page.expect_download() as download:
        page.click("#view [data-do=save]")
    house = Path(download.value.path()).read_bytes()
    page.click("#view [data-do=close]")
    page.click("#tasks label:has(input[value=inpaint])")
    page.wait_for_selector("body[data-task=inpaint]")
    transfer = page.evaluate_handle(
        "bytes => { const all = new DataTransfer();"
        " all.items.add(new File([new Uint8Array(bytes)], 'house.png', { type: 'image/png' })); return all; }",
        list(house),
    )
    for event in ("dragover", "drop"):
        page.dispatch_event(".drop[data-name=init_img]", event, {"dataTransfer": transfer})
    page.wait_for_selector(".drop.full canvas")
    page.locator("#source canvas").scroll_into_view_if_needed()
    box = page.locator("#source canvas").bounding_box()
    for share in (0.5, 0.6):
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + share * box["height"])
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + share * box["height"], steps=4)
        page.mouse.up()
    page.fill("#f-steps", "150")
    page.fill("#f-prompt", "a green tree")
    page.click("#run")
    page.wait_for_selector("text=/Step [4-9][0-9] of 150/")
    page.screenshot(path=dark)
    page.click("#stop")


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (default: docs)")
    out = parser.parse_args().out
    arguments = ("--port", URL.split(":")[-1].strip("/"), "--device", "cpu")
    server = subprocess.Popen([sys.executable, "-m", "ldm_lite.serve", *arguments])
    try:
        wait_for_server()
        with sync_playwright() as driver:
            chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = chromium.new_context(viewport={"width": 1280, "height": 820}, accept_downloads=True).new_page()
            page.set_default_timeout(300_000)
            draw(page, out / "page.png", out / "page-dark.png")
            chromium.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

"""The page in a real browser: Debian's Chromium without a window, driven by playwright."""

import base64
import io
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

pytestmark = [pytest.mark.extra, pytest.mark.slow]
CHROMIUM = Path("/usr/bin/chromium")
if not CHROMIUM.exists():
    pytest.skip("the page's tests need /usr/bin/chromium: apt-get install chromium", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api")
gradio = pytest.importorskip("gradio")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
TEXT = """a {{blue}} fish <b>${1+1}`
Negative prompt: red
Steps: 3, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 9223372036854775807, Size: 64x64, \
Model: other, Denoising strength: 0.4, Clip skip: 2, Hires upscale: 2, Version: v1.10.1"""


@pytest.fixture(scope="module")
def url(small_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread, on a miniature model, whose temporary files are in a folder of their own."""
    from ldm_lite.serve.app import make_app

    folder = tmp_path_factory.mktemp("temporary")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    options = ServeOptions(max_steps=1000)
    engine = Engine(Library(LoadOptions(ckpt=small_path, device="cpu"), options), options).start()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(engine, options, None), log_level="error"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    assert not [path for path in folder.rglob("*") if path.is_file()]  # neither uploads nor results
    server.should_exit = True
    engine.stop()
    thread.join(20)
    assert not thread.is_alive()
    tempfile.tempdir = before


Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=FLAGS.split())
        yield made
        made.close()


@pytest.fixture
def visit(url: str, browser: Any) -> Iterator[Open]:
    """Open the page; afterwards nothing may have been asked of another host, and no script may have failed."""
    contexts, wrong = [], []

    def visit(**options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        context.set_default_timeout(15000)
        page = context.new_page()
        outside = re.compile(rf"(?!{re.escape(url)}|data:|blob:)")
        page.on("request", lambda each: wrong.append(each.url) if outside.match(each.url) else None)
        page.on("response", lambda each: wrong.append(each.url) if each.status >= 400 else None)
        page.on("pageerror", lambda each: wrong.append(str(each)))
        page.on("console", lambda each: wrong.append(each.text) if each.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("body[data-task=txt2img] #run")
        settle(page)
        page.fill("#steps input", "2")
        page.fill("#seed input", "7")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not wrong


def make(page: Any, key: bool = False) -> str:
    """Start, wait for the end, and return the line above the results."""
    page.evaluate("document.querySelector('#status .status')?.remove()")
    if key:
        page.keyboard.press("Control+Enter")
    else:
        page.click("#run")
    page.wait_for_function(
        "() => /^(?:Interrupted|[0-9]+ image)/.test(document.querySelector('#status').innerText.trim())"
        " || document.querySelector('#status .error')"
    )
    return str(page.inner_text("#status")).strip()


def result(page: Any, number: int = 0) -> Image.Image:
    data = page.locator("#results figure img").nth(number).get_attribute("src")
    return Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))


def settle(page: Any) -> None:
    """Wait until the page has not changed for a while and its thread is idle: Gradio goes on after it shows a part."""
    page.evaluate(
        "new Promise(done => { let timer;"
        " const over = () => requestIdleCallback(() => { observer.disconnect(); done(); }),"
        " again = () => { clearTimeout(timer); timer = setTimeout(over, 300); },"
        " observer = new MutationObserver(again);"
        " observer.observe(document.body, { subtree: true, childList: true, attributes: true }); again(); })"
    )


def choose(page: Any, name: str, value: str) -> None:
    """Choose from a list, once it shows the value."""
    page.fill(f"#{name} input", value)
    page.locator(f"#{name}").get_by_role("option", name=value, exact=True).click()
    playwright.expect(page.locator(f"#{name} input")).to_have_value(value)


def picture(folder: Path, text: str | None = None) -> Path:
    info = PngInfo()
    if text is not None:
        info.add_text("parameters", text)
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((64, 64))
    image.save(folder / "picture.png", pnginfo=info)
    return folder / "picture.png"


def test_make_download_and_reuse(visit: Open) -> None:
    page = visit()
    page.fill("#prompt textarea", "a cat {{x}} ${1+1} <b>`")
    page.focus("#prompt textarea")
    assert make(page, key=True).startswith("1 image in")
    with page.expect_download() as download:
        page.click("#results [data-do=save]")
    assert download.value.suggested_filename == "ldm_lite-7.png"
    saved = Image.open(download.value.path())
    assert saved.info["parameters"].startswith("a cat {{x}} ${1+1} <b>`\nSteps: 2,")
    assert saved.tobytes() == result(page).tobytes()
    assert page.get_attribute("#results figure", "data-parameters") == saved.info["parameters"]
    page.fill("#seed input", "-1")
    page.fill("#count input", "2")
    page.fill("#prompt textarea", "a dog")
    assert make(page).startswith("2 images")
    seeds = page.locator("#results figure").evaluate_all("all => all.map(each => +each.dataset.seed)")
    assert seeds[1] == seeds[0] + 1
    page.locator("#results [data-do=seed]").nth(1).click()
    assert page.input_value("#seed input") == str(seeds[1])
    before = result(page, 1).tobytes()
    page.fill("#count input", "1")
    make(page)
    assert result(page).tobytes() == before
    assert page.locator("#earlier figure").count() == 3
    page.click("#history summary")  # kept by the browser, also after a reload
    page.reload()
    page.wait_for_selector("body[data-task=txt2img] #run")
    page.click("#history summary")
    page.click("#history button:has-text('a cat')")
    assert page.input_value("#prompt textarea") == "a cat {{x}} ${1+1} <b>`"


def test_a_second_pass_is_for_text_alone(visit: Open) -> None:
    page = visit()
    page.click("button:has-text('Second pass')")
    page.wait_for_selector("#hires_negative_prompt")
    settle(page)  # a value that is filled in while its part of the page is made is lost
    page.fill("#hires input", "2")
    page.fill("#hires_steps input", "1")
    page.fill("#prompt textarea", "a cat")
    assert make(page).startswith("1 image in")
    assert "Hires upscale: 2" in str(page.get_attribute("#results figure", "data-parameters"))
    assert result(page).size == (128, 128)
    page.click("#tasks label:has-text('Image to image')")
    page.wait_for_selector("#hires", state="hidden")


def test_preview_interrupt_and_the_place_in_the_queue(visit: Open, url: str) -> None:
    page, other = visit(), visit()
    for each, steps in ((page, "1000"), (other, "2")):
        each.fill("#prompt textarea", "a cat")
        each.fill("#steps input", steps)
    page.fill("#count input", "3")
    page.click("#run")
    page.wait_for_selector("#stage img[src^='data:image/jpeg']")
    assert re.match(r"Step \d+ of 1000", page.inner_text("#status").strip())
    other.click("#run")
    other.wait_for_selector("#status:has-text('Waiting: 3 images before yours')")
    page.click("#stop:not(:disabled)")
    page.wait_for_selector("#status:has-text('Interrupted')")
    assert page.locator("#results figure").count() >= 1
    other.wait_for_selector("#status:has-text('1 image in')")
    page.click("#run")  # who closes the page gives up what it asked for
    page.wait_for_selector("#stage img")
    page.close()
    assert make(other).startswith("1 image in")


def test_errors_are_one_line(visit: Open) -> None:
    page = visit()
    assert "no prompt" in make(page)
    page.fill("#prompt textarea", "a cat")
    for name, value, message in (
        ("steps", "0", "got steps 0, wanted 1 to 1000"),
        ("steps", "many", "got steps 'many', wanted a whole number"),
        ("seed", "1.5", "got seed '1.5', wanted a whole number"),
        ("width", "4096", "pixels, wanted at most"),
    ):
        before = page.input_value(f"#{name} input")
        page.fill(f"#{name} input", value)
        if name == "width":
            page.fill("#height input", "4096")
        assert message in make(page)
        page.fill(f"#{name} input", before)
    page.fill("#height input", "")
    page.click("#tasks input[value=img2img]")
    assert make(page) == "give an image to start from"


def test_inpaint_repaints_what_was_painted(visit: Open, tmp_path: Path) -> None:
    page = visit()
    page.fill("#prompt textarea", "a cat")
    page.click("#tasks input[value=inpaint]")
    page.set_input_files(".drop[data-name=source] input[type=file]", picture(tmp_path))
    page.wait_for_selector(".drop.full canvas")
    assert make(page) == "give a mask: paint over what is to be repainted"
    box = page.locator(".drop canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 4)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] * 3 / 4, steps=4)
    page.mouse.up()
    make(page)
    given, made = np.asarray(Image.open(tmp_path / "picture.png")), np.asarray(result(page))
    changed = (given != made).any(axis=2)
    assert not changed[:, 32:].any()  # the right half was not painted
    assert changed[20:44, 14:18].mean() > 0.9
    page.click("[data-do=undo]")
    assert make(page).startswith("give a mask")


def test_a_dropped_picture_fills_the_form(visit: Open, tmp_path: Path) -> None:
    page = visit()
    page.click("text=PNG info")
    content = base64.b64encode(picture(tmp_path, TEXT).read_bytes()).decode()
    page.wait_for_selector(".drop[data-name=info]", state="visible")
    transfer = page.evaluate_handle(
        "data => { const all = new DataTransfer(), bytes = Uint8Array.from(atob(data), each => each.charCodeAt(0));"
        " all.items.add(new File([bytes], 'a.png', { type: 'image/png' })); return all; }",
        content,
    )
    page.dispatch_event(".drop[data-name=info]", "drop", {"dataTransfer": transfer})
    page.wait_for_selector("#read-text pre")
    assert "Hires upscale are not heeded" in page.inner_text("#read-text")
    playwright.expect(page.locator("#prompt textarea")).to_have_value(TEXT.splitlines()[0])
    playwright.expect(page.locator("#negative_prompt textarea")).to_have_value("red")
    wanted = {"steps": "3", "sampler": "DPM++ 2M", "spacing": "karras", "scale": "6.5", "seed": str(2**63 - 1)}
    for name, value in (wanted | {"width": "64", "height": "64"}).items():
        playwright.expect(page.locator(f"#{name} input")).to_have_value(value)
    assert make(page).startswith("1 image")
    assert f"Seed: {2**63 - 1}" in result(page).info["parameters"]
    page.set_input_files(".drop[data-name=info] input[type=file]", picture(tmp_path))
    page.wait_for_selector("#read-text .error")
    assert "holds no text" in page.inner_text("#read-text")


def test_a_plot(visit: Open) -> None:
    page = visit()
    page.fill("#prompt textarea", "a cat")
    page.click("text=X/Y plot")
    page.wait_for_selector("#x_values", state="visible")
    settle(page)
    for axis, option, values in (("x", "scale", "1, 3, 6"), ("y", "replace", "cat, dog")):
        choose(page, f"{axis}_option", option)
        page.fill(f"#{axis}_values input", values)
    assert make(page).startswith("6 images")
    assert page.locator("#results figure").count() == 7
    text = result(page).info["parameters"]
    assert 'X Type: scale, X Values: "1, 3, 6", Y Type: replace, Y Values: "cat, dog"' in text
    prompts = [result(page, i).info["parameters"].splitlines()[0] for i in range(1, 7)]
    assert prompts == ["a cat"] * 3 + ["a dog"] * 3
    page.fill("#x_values input", "1, x")
    assert make(page) == "got 'x', wanted a finite number"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_both_schemes(visit: Open, scheme: str) -> None:
    page = visit(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True, is_mobile=True)
    page.fill("#prompt textarea", "a cat")
    make(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390

    def brightness() -> float:
        return float(np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L")).mean())

    assert (brightness() > 128) == (scheme == "light")
    page.evaluate("scrollTo(0, 0)")
    page.tap("[data-do=theme]")
    settle(page)  # the colours change over time
    assert (brightness() > 128) == (scheme == "dark")
    wide = page.locator("#run").bounding_box()
    assert wide["height"] >= 36


def test_the_server_keeps_gradios_other_routes_closed(url: str) -> None:
    import urllib.error
    import urllib.request

    for path in ("gradio_api/upload", "gradio_api/file=/etc/passwd", "gradio_api/info", "gradio_api/proxy=http://x/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + path, data=b"" if path.endswith("upload") else None)
    config = urllib.request.urlopen(url + "config").read().decode()
    assert str(Path(__file__).parents[2]) not in config
    assert "https://fonts" not in urllib.request.urlopen(url).read().decode()

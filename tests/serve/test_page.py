"""The page in a real browser: Debian's Chromium without a window, driven by playwright."""

import base64
import io
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from waiting import wait_for

from ldm_lite.cli.options import LoadOptions
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.slow]
playwright = pytest.importorskip("playwright.sync_api")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
TEXT = """a {{blue}} fish <b>${1+1}`
Negative prompt: red
Steps: 3, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 9223372036854775807, Size: 64x64, \
Model: other, Denoising strength: 0.4, Clip skip: 2, Hires upscale: 2, Tiling: True, Version: v1.10.1"""


@pytest.fixture(scope="module")
def url(small_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread, on a miniature model, whose temporary files are in a folder of their own."""
    from ldm_lite.serve.app import make_app

    folder, folders = tmp_path_factory.mktemp("temporary"), dict[str, Any]()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    for kind, name in (("loras", "one"), ("controlnets", "lines")):
        file = tmp_path_factory.mktemp(kind) / f"{name}.safetensors"
        file.write_bytes(b"")
        folders[kind] = str(file.parent)
    options = ServeOptions(max_steps=1000, **folders)
    engine = Engine(Library(LoadOptions(ckpt=small_path, device="cpu"), options), options).start()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(engine, options, None), log_level="error"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    wait_for(lambda: server.started, "a server that has started")
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    assert not [path for path in folder.rglob("*") if path.is_file()]  # neither uploads nor results
    server.should_exit = True
    engine.stop()
    thread.join(20)
    assert not thread.is_alive()
    tempfile.tempdir = before


Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=machine.program("chromium"), headless=True, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def visit(url: str, browser: Any) -> Iterator[Open]:
    """Open the page; afterwards nothing may have been asked of another host, and no script or policy have failed."""
    contexts, wrong = [], []

    def visit(**options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
        )
        contexts.append(context)
        context.set_default_timeout(15000)
        page = context.new_page()
        outside = re.compile(rf"(?!{re.escape(url)}|data:|blob:)")
        page.on("request", lambda asked: wrong.append(asked.url) if outside.match(asked.url) else None)
        page.on("response", lambda got: wrong.append(got.url) if got.status not in (200, 422) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if is_wrong(said) else None)
        open_page(page, url)
        page.fill("#f-steps", "2")
        page.fill("#f-seed", "7")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not wrong


def is_wrong(said: Any) -> bool:
    """Whether a message of the console is an error, other than the answer to wrong values; a policy's are errors."""
    return said.type == "error" and "status of 422" not in said.text


def open_page(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("body[data-gallery]")


def make(page: Any, key: bool = False) -> str:
    """Start, wait for the end, and return the line below the newest image, or the error."""
    page.evaluate("document.body.dataset.state = 'asked'")
    if key:
        page.keyboard.press("Control+Enter")
    else:
        page.click("#run")
    page.wait_for_selector("body[data-state=idle]")
    wrong = page.locator(".error:not(:empty)").all_text_contents()
    return str(wrong[0] if wrong else page.text_content("#status"))


def result(page: Any, number: int = 0) -> Image.Image:
    """One of the images, the newest first, as it is downloaded."""
    page.locator("#gallery .tile").nth(number).click()
    with page.expect_download() as download:
        page.click("#view [data-do=save]")
    page.click("#view [data-do=close]")
    with Image.open(download.value.path()) as image:
        image.load()
    image.info["name"] = download.value.suggested_filename
    return image


def choose_task(page: Any, name: str) -> None:
    page.click(f"#tasks label:has(input[value={name}])")
    page.wait_for_selector(f"body[data-task={name}]")


def picture(folder: Path, text: str | None = None) -> Path:
    info = PngInfo()
    if text is not None:
        info.add_text("parameters", text)
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((64, 64))
    image.save(folder / "picture.png", pnginfo=info)
    return folder / "picture.png"


def drop(page: Any, selector: str, path: Path) -> None:
    transfer = page.evaluate_handle(
        "bytes => { const all = new DataTransfer();"
        " all.items.add(new File([new Uint8Array(bytes)], 'a.png', { type: 'image/png' })); return all; }",
        list(path.read_bytes()),
    )
    page.dispatch_event(selector, "dragover", {"dataTransfer": transfer})
    page.dispatch_event(selector, "drop", {"dataTransfer": transfer})


def test_make_download_and_reuse(visit: Open, url: str) -> None:
    page = visit()
    page.fill("#f-prompt", "a cat {{x}} ${1+1} <b>`")
    page.focus("#f-prompt")
    assert make(page, key=True).startswith("1 image in")
    saved = result(page)
    assert saved.info["name"] == "ldm_lite-7.png"
    assert saved.info["parameters"].startswith("a cat {{x}} ${1+1} <b>`\nSteps: 2,")
    page.click("#gallery .tile")
    assert page.inner_text("#view dd >> nth=0") == "a cat {{x}} ${1+1} <b>`"
    page.keyboard.press("Escape")
    page.fill("#f-seed", "")
    page.fill("#f-batch_size", "2")
    page.fill("#f-prompt", "a dog")
    assert make(page).startswith("2 images")
    seeds = [int(re.search(r"Seed: (\d+)", result(page, i).info["parameters"])[1]) for i in (0, 1)]  # type: ignore[index]
    assert seeds[0] == seeds[1] + 1
    before = result(page, 0).tobytes()
    page.locator("#gallery .tile").nth(0).click()
    page.click("#view [data-do=seed]")
    assert page.input_value("#f-seed") == str(seeds[0])
    page.fill("#f-batch_size", "")
    make(page)
    assert result(page).tobytes() == before
    page.locator("#gallery .tile").nth(3).click()  # the first, with all of its settings
    page.click("#view [data-do=settings]")
    playwright.expect(page.locator("#f-seed")).to_have_value("7")
    playwright.expect(page.locator("#f-prompt")).to_have_value("a cat {{x}} ${1+1} <b>`")
    page.click("#gallery .tile")
    page.keyboard.press("ArrowRight")
    page.click("#view [data-do=remove]")
    page.click("#view [data-do=close]")
    assert page.locator("#gallery .tile").count() == 3
    page.fill("#f-prompt", "")
    page.click("#history summary")
    page.click("#history button:has-text('a dog')")
    assert page.input_value("#f-prompt") == "a dog"


def test_a_reload_keeps_everything(visit: Open, url: str, tmp_path: Path) -> None:
    page = visit()
    page.fill("#f-prompt", "a cat")
    make(page)
    before = result(page).tobytes()
    choose_task(page, "inpaint")
    page.set_input_files("#f-init_img", picture(tmp_path))
    page.wait_for_selector(".drop.full canvas")
    paint(page)
    page.click("#more > summary")
    page.check("#f-fixed_code")
    page.fill("#f-feather", "3")
    mask = page.evaluate("document.querySelector('#source canvas').toDataURL()")
    page.reload()
    page.wait_for_selector("body[data-gallery]")
    assert page.evaluate("document.body.dataset.task") == "inpaint"
    assert (page.input_value("#f-prompt"), page.input_value("#f-steps")) == ("a cat", "2")
    assert page.input_value("#f-feather") == "3"
    assert page.is_checked("#f-fixed_code")  # in a part that is open as before
    assert result(page).tobytes() == before
    page.wait_for_function("mask => document.querySelector('#source canvas').toDataURL() === mask", arg=mask)
    assert make(page).startswith("1 image in")  # with the picture and its mask
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#clear")
    page.reload()
    page.wait_for_selector("body[data-gallery]")
    assert page.locator("#gallery .tile").count() == 0


def test_a_second_pass_is_for_text_alone(visit: Open) -> None:
    page = visit()
    page.click("#second > summary")
    page.fill("#f-hires", "2")
    page.fill("#f-hires_steps", "1")
    page.fill("#f-prompt", "a cat")
    assert make(page).startswith("1 image in")
    assert page.get_attribute("#second > summary", "data-count") == "2"
    image = result(page)
    assert "Hires upscale: 2" in image.info["parameters"]
    assert image.size == (128, 128)
    choose_task(page, "img2img")
    page.wait_for_selector("#second", state="hidden")


def test_preview_interrupt_and_the_place_in_the_queue(visit: Open, url: str) -> None:
    page, second_page = visit(), visit()
    for visited, steps in ((page, "1000"), (second_page, "2")):
        visited.fill("#f-prompt", "a cat")
        visited.fill("#f-steps", steps)
    page.fill("#f-batch_size", "3")
    page.click("#run")
    page.wait_for_selector("#preview[src^='data:image/jpeg']")
    assert re.match(r"Image 1 of 3, step \d+ of 1000", page.text_content("#status"))
    assert page.evaluate("document.querySelector('#actions progress').value") > 0
    second_page.click("#run")
    second_page.wait_for_selector("#status:has-text('Waiting: 3 images before yours')")
    page.click("#stop:not(:disabled)")
    page.wait_for_selector("#status:has-text('Interrupted')")
    assert page.locator("#gallery .tile").count() >= 1
    second_page.wait_for_selector("#status:has-text('1 image in')")
    page.click("#run")  # who closes the page gives up what it asked for
    page.wait_for_selector("#preview:not([hidden])")
    page.close()
    assert make(second_page).startswith("1 image in")


def test_errors_are_beside_the_field_that_caused_them(visit: Open) -> None:
    page = visit()
    assert "no prompt" in make(page)
    assert page.locator("[data-name=prompt] .error:not(:empty)").count() == 1
    page.fill("#f-prompt", "a cat")
    assert page.text_content("#e-prompt") == ""  # gone as soon as it is changed
    for name, value, message in (
        ("steps", "0", "got steps 0, expected 1 to 1000"),
        ("seed", "1.5", "got seed '1.5', expected a whole number"),
        ("width", "4096", "pixels"),
        ("freeu", "much", "got freeu 'much'"),  # in a part that is folded
    ):
        if name == "width":
            page.fill("#f-height", "4096")
        before = page.input_value(f"#f-{name}")
        page.evaluate("([id, value]) => { document.querySelector(id).value = value; }", [f"#f-{name}", value])
        assert message in make(page)
        assert message in page.text_content(f"#e-{name}")
        assert page.get_attribute(f"#f-{name}", "aria-invalid") == "true"
        assert page.evaluate("document.activeElement.id") == f"f-{name}"
        assert page.is_visible(f"#e-{name}")
        page.fill(f"#f-{name}", before)
    page.fill("#f-height", "")
    choose_task(page, "img2img")
    assert make(page) == "give an image to start from"
    assert page.text_content("#e-init_img") == "give an image to start from"


def test_a_file_that_is_no_picture_is_refused_at_once(visit: Open, tmp_path: Path) -> None:
    page = visit()
    choose_task(page, "img2img")
    (tmp_path / "notes.png").write_bytes(b"no picture")
    page.set_input_files("#f-init_img", tmp_path / "notes.png")
    page.wait_for_selector("#e-init_img:not(:empty)")
    assert "picture" in page.text_content("#e-init_img")
    assert page.locator(".drop.full").count() == 0
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.tiff")  # which this browser cannot show, and the server reads
    page.set_input_files("#f-init_img", tmp_path / "a.tiff")
    width = "document.querySelector('.drop.full img')?.naturalWidth"
    wait_for(lambda: page.evaluate(width) == 32, "the picture as the server reads it")
    assert page.text_content("#e-init_img") == ""


def test_limits_defaults_sliders_and_shapes(visit: Open) -> None:
    page = visit()
    page.fill("#f-steps", "")
    assert page.text_content("label[for=f-steps]") == "Steps1 \u2013 1000"  # of the server
    assert page.text_content("label[for=f-batch_size]") == "Images1 \u2013 16"
    facts = page.evaluate("fetch('api/form').then((answer) => answer.json())")["usual"]
    for name in ("steps", "scale"):
        assert page.get_attribute(f"#f-{name}", "placeholder") == f"auto {facts[name]}"
        assert page.input_value(f"#s-{name}") == facts[name]
    page.fill("#f-steps", "9")
    assert page.input_value("#s-steps") == "9"
    page.focus("#s-steps")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#f-steps") == "10"
    page.click(".chips >> text='3:2'")
    width, height = (int(page.input_value(f"#f-{name}")) for name in ("width", "height"))
    assert width > height > 0
    page.click(".chips >> text='1:1'")
    assert page.input_value("#f-width") == page.input_value("#f-height") == facts["width"]


def test_examples_are_for_the_bundled_model(visit: Open) -> None:
    page = visit()
    assert page.evaluate("fetch('api/form').then((answer) => answer.json())")["examples"] == []
    assert page.locator("#stage .chips button").count() == 0
    assert not page.is_visible("#history")


def paint(page: Any, pointer: str = "mouse") -> None:
    """A line down the left half of the picture."""
    page.locator("#source canvas").scroll_into_view_if_needed()
    box = page.locator("#source canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 4)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] * 3 / 4, steps=4)
    page.mouse.up()


def painted(page: Any) -> int:
    """The number of the mask's pixels that are painted."""
    return int(
        page.evaluate(
            "(() => { const mask = document.querySelector('#source canvas');"
            " const { data } = mask.getContext('2d').getImageData(0, 0, mask.width, mask.height);"
            " return data.filter((value, place) => place % 4 === 3 && value > 127).length; })()"
        )
    )


def test_inpaint_repaints_what_was_painted(visit: Open, tmp_path: Path) -> None:
    page = visit()
    page.fill("#f-prompt", "a cat")
    choose_task(page, "inpaint")
    drop(page, ".drop[data-name=init_img]", picture(tmp_path))
    page.wait_for_selector(".drop.full canvas")
    assert make(page) == "give a mask: paint over what to repaint"
    assert page.text_content("#e-mask") != ""
    paint(page)
    make(page)
    array, repainted = np.asarray(Image.open(tmp_path / "picture.png")), np.asarray(result(page))
    changed = (array != repainted).any(axis=2)
    assert not changed[:, 32:].any()  # the right half was not painted
    assert changed[20:44, 15:17].mean() > 0.9
    before = painted(page)
    page.click("#erase")
    paint(page)
    assert painted(page) < before / 10
    page.click("#undo")
    assert painted(page) == before
    page.click("#undo")
    assert painted(page) == 0
    assert make(page).startswith("give a mask")


def test_a_pen_that_presses_paints_wider_and_keys_paint_too(visit: Open, tmp_path: Path) -> None:
    page = visit()
    choose_task(page, "inpaint")
    page.set_input_files("#f-init_img", picture(tmp_path))
    page.wait_for_selector(".drop.full canvas")
    page.locator("#source canvas").scroll_into_view_if_needed()
    box, sizes = page.locator("#source canvas").bounding_box(), []
    session = page.context.new_cdp_session(page)
    for force in (0.1, 0.9):
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "pointerType": "pen", "force": force}
        for kind in ("mousePressed", "mouseReleased"):
            session.send("Input.dispatchMouseEvent", {"type": kind, "button": "left", "clickCount": 1, **at})
        page.wait_for_selector("#undo:not(:disabled)")
        sizes.append(painted(page))
        page.click("#unmask")
    assert sizes[1] > 4 * sizes[0] > 0
    page.focus("#source canvas")
    page.keyboard.press(" ")
    first = painted(page)
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", " "):
        page.keyboard.press(key)
    assert painted(page) > 1.5 * first > 0
    page.keyboard.press("Control+z")
    assert painted(page) == first


def test_a_dropped_picture_fills_the_form(visit: Open, tmp_path: Path) -> None:
    page = visit()
    drop(page, "#stage", picture(tmp_path, TEXT))
    page.wait_for_selector("#remarks:has-text('ignored settings: Tiling')")
    playwright.expect(page.locator("#f-prompt")).to_have_value(TEXT.splitlines()[0])
    playwright.expect(page.locator("#f-negative_prompt")).to_have_value("red")
    wanted = {"steps": "3", "sampler": "dpmpp_2m", "spacing": "karras", "scale": "6.5", "seed": str(2**63 - 1)}
    wanted |= {"width": "64", "height": "64", "clip_skip": "2", "hires": "2", "hires_strength": "0.4"}
    for name, value in wanted.items():
        playwright.expect(page.locator(f"#f-{name}")).to_have_value(value)
    page.click("#more > summary")
    page.fill("#f-clip_skip", "1")
    assert make(page).startswith("1 image")
    assert f"Seed: {2**63 - 1}" in result(page).info["parameters"]
    page.set_input_files("#settings-file", picture(tmp_path))
    page.wait_for_selector("#failure:has-text('holds no text')")


def test_a_plot(visit: Open) -> None:
    page = visit()
    page.fill("#f-prompt", "a cat")
    page.click("#plot > summary")
    for axis, option, values in (("x", "scale", "1, 3, 6"), ("y", "replace", "cat, dog")):
        page.select_option(f"#f-{axis}", option)
        page.fill(f"#f-{axis}_values", values)
    assert make(page).startswith("6 images")
    assert page.locator("#gallery .tile").count() == 7
    sheet = result(page)
    assert sheet.info["name"] == "ldm_lite-plot-7.png"
    assert 'X Type: scale, X Values: "1, 3, 6", Y Type: replace, Y Values: "cat, dog"' in sheet.info["parameters"]
    prompts = [result(page, i).info["parameters"].splitlines()[0] for i in range(6, 0, -1)]
    assert prompts == ["a cat"] * 3 + ["a dog"] * 3
    page.fill("#f-x_values", "1, x")
    assert make(page) == "got scale 'x', expected a finite number, or a range such as 1-5"
    assert page.text_content("#e-x") != ""


def test_loras_and_a_controlnet_with_what_it_sees(visit: Open, tmp_path: Path) -> None:
    page = visit()
    page.click("#lora > summary")
    page.select_option("#f-loras", "one")
    page.fill(".lora input[type=text]", "0.5")
    page.click("#controls > summary")
    page.select_option("#f-control", "lines")
    page.select_option("#f-preprocess", "canny")
    page.set_input_files("#f-image", picture(tmp_path))
    page.wait_for_function("() => document.querySelector('#hint').naturalWidth === 64")
    page.fill("#f-prompt", "a cat")
    with page.expect_request("**/api/images") as asked:
        make(page)  # which the files, of no content, end with an error
    sent = asked.value.post_data_json
    assert sent["loras"] == [{"name": "one", "weight": "0.5"}]
    assert (sent["control"]["name"], sent["control"]["preprocess"]) == ("lines", "canny:100:200")
    assert sent["control"]["image"].startswith("data:image/png;base64,")
    page.fill("#f-canny_low", "many")
    page.locator("#f-canny_low").blur()
    page.wait_for_selector("#e-control:has-text('canny:LOW:HIGH')")


def test_references(visit: Open, tmp_path: Path) -> None:
    """They are sent in their order, and the model of this server reads none."""
    page = visit()
    page.click("#references > summary")
    paths = [tmp_path / name for name in ("red.png", "blue.png")]
    for number, path in zip((3, 1), paths, strict=True):
        Image.new("RGB", (64, 64), path.stem).save(path)
        page.set_input_files(f"#f-reference_{number}", path)
    page.wait_for_selector("#references summary[data-count='2']")
    page.fill("#f-prompt", "a cat")
    with page.expect_request("**/api/images") as asked:
        assert "reads no reference images" in make(page)
    assert page.text_content("#e-reference") != ""
    texts = asked.value.post_data_json["reference"]
    pictures = [Image.open(io.BytesIO(base64.b64decode(text.partition(",")[2]))) for text in texts]
    assert [image.getpixel((0, 0)) for image in pictures] == [(0, 0, 255), (255, 0, 0)]
    for number in (1, 3):
        page.click(f"[data-name=reference_{number}] button:has-text('Remove')")
    assert "reference" not in make(page)


def test_references_that_are_kept_are_counted_and_a_reset_removes_them(visit: Open, tmp_path: Path) -> None:
    """In a closed part of the form nothing else shows that they are sent."""
    page = visit()
    page.set_input_files("#f-reference_2", picture(tmp_path))
    page.wait_for_selector("#references summary[data-count='1']")
    page.reload()
    page.wait_for_selector("#references summary[data-count='1']")
    page.click("#reset")
    page.wait_for_selector("#references summary[data-count='']")
    page.reload()
    page.wait_for_selector("body[data-gallery]")
    page.fill("#f-prompt", "a cat")
    assert "reference" not in make(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_both_schemes(visit: Open, scheme: str) -> None:
    page = visit(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True, is_mobile=True)
    page.fill("#f-prompt", "a cat")
    make(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390

    def brightness() -> float:
        return float(np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L")).mean())

    assert (brightness() > 128) == (scheme == "light")
    page.tap("#theme")
    assert (brightness() > 128) == (scheme == "dark")
    page.reload()
    page.wait_for_selector("body[data-gallery]")
    assert (brightness() > 128) == (scheme == "dark")  # it is kept
    assert page.locator("#run").bounding_box()["height"] >= 44


def test_every_control_is_reached_by_keys_and_has_a_name(visit: Open, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit()
    for part in ("#second", "#lora", "#controls", "#plot", "#more"):
        page.focus(f"{part} > summary")
        page.keyboard.press("Enter")
    choose_task(page, "inpaint")
    page.set_input_files("#f-init_img", picture(tmp_path))
    page.wait_for_selector(".drop.full canvas")
    assert axe.run(page).response["violations"] == []
    controls = "button, input, select, textarea, summary, canvas"
    shown = page.locator(f"main :is({controls}), header :is({controls})").evaluate_all(
        "all => all.filter(one => one.checkVisibility() && !one.disabled && !one.matches('[type=radio]:not(:checked)'))"
        ".map((one, place) => { one.dataset.place = place; return place; })"
    )
    reached = set[int]()
    page.focus("#settings-file")
    while (place := page.evaluate("document.activeElement.dataset.place")) is not None and int(place) not in reached:
        reached.add(int(place))
        page.keyboard.press("Tab")
    assert reached == set(shown)
    page.focus("#tasks input[value=inpaint]")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.body.dataset.task") == "img2img"
    page.focus("#f-width")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#f-width") == "64"
    page.fill("#f-width", "")
    choose_task(page, "txt2img")
    page.fill("#f-prompt", "a cat")
    make(page, key=True)
    page.focus("#gallery .tile")
    page.keyboard.press("Enter")
    page.wait_for_selector("#view[open]")
    assert axe.run(page).response["violations"] == []
    page.keyboard.press("Escape")
    page.wait_for_selector("#view:not([open])", state="hidden")
    assert page.evaluate("document.activeElement.className") == "tile"


def test_it_opens_with_few_and_small_files(visit: Open, url: str) -> None:
    """Which is why it is there in a tenth of a second; `data-ready` on its body tells the milliseconds."""
    page = visit()
    assert int(page.get_attribute("body", "data-ready")) > 0
    sizes = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.decodedBodySize)")
    assert len(sizes) <= 12
    assert sum(sizes) < 200_000


def test_what_is_added_from_outside_is_not_run(browser: Any, url: str) -> None:
    page = browser.new_page()
    open_page(page, url)
    page.evaluate(
        "addEventListener('securitypolicyviolation', () => { document.body.dataset.refused = ''; });"
        "document.body.insertAdjacentHTML('beforeend', '<img src=missing onerror=\"document.body.dataset.run = 1\">')"
    )
    page.wait_for_selector("body[data-refused]")
    assert page.evaluate("document.body.dataset.run") is None
    page.close()

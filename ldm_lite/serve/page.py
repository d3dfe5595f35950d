"""The page at "/": a form, live previews and a gallery, built with Gradio.

Pictures travel inside the events as data URLs, both ways, so that neither Gradio nor the server writes one to a file.
"""

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ldm_lite.diffusion.names import SAMPLERS, label
from ldm_lite.diffusion.schedule import SPACINGS
from ldm_lite.serve import form
from ldm_lite.serve.http import Refused, answer
from ldm_lite.serve.page_actions import Actions
from ldm_lite.serve.queue import Engine

FOLDER = Path(__file__).parent
# What the page needs of Gradio's own routes; all others (uploads, files, proxies, an API, ...) are closed.
OPEN = re.compile(
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static|svelte)/.*"
    r"|gradio_api/(queue/(join|data)|heartbeat/\w+|cancel|reset|startup-events|app_id|theme\.css))?/?"
)
WAIT = 0.5  # seconds between two looks at whether the server stops
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'; base-uri 'self'"
Parts = dict[str, Any]  # components by name


def mount(app: FastAPI, engine: Engine) -> None:
    """Add the page to an application, at "/", after all of its other routes.  It loads nothing from other hosts."""
    script, style = ((FOLDER / f"page.{kind}").read_text("utf-8") for kind in ("js", "css"))
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    gr.mount_gradio_app(
        *(app, page(engine), "/"),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        theme=gr.themes.Default(**fonts),
        css=style,
        head=f"<script>{script}</script>",
    )
    route = app.routes[-1]
    assert isinstance(route, Mount)
    route.app = _Closed(route.app, engine)


class _Closed:
    """ASGI middleware: only OPEN routes, and a policy that keeps the browser from asking other hosts."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app, self.engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ended = False

        async def sending(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"], headers["Referrer-Policy"] = POLICY, "no-referrer"
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        if scope["type"] == "http" and OPEN.fullmatch(scope["path"]) is None:
            await answer(Refused(404, "there is nothing at this address"))(scope, receive, send)
        elif "/heartbeat/" not in scope["path"]:
            await self.app(scope, receive, sending)
        else:  # lasts as long as a page is open, and would keep the server from stopping
            beating = asyncio.ensure_future(self.app(scope, receive, sending))
            while self.engine.healthy and not beating.done():
                await asyncio.wait([beating], timeout=WAIT)
            beating.cancel()
            await asyncio.wait([beating])
            if not ended:
                await send({"type": "http.response.body", "body": b""})


# ---- the layout -----------------------------------------------------------------------------------------------------

PICTURES = ("source", "mask", "control_image")  # values that the browser fills in
FIRST = ("sampler", "spacing", "steps", "scale", "width", "height", "strength", "feather", "noise_level")


def page(engine: Engine) -> gr.Blocks:
    """Return the page of an engine."""
    # fields that no user sees carry pictures: values of components, since states stay on the server
    with gr.Blocks(title="ldm_lite", analytics_enabled=False) as blocks:
        parts: Parts = {name: gr.Textbox(visible=False) for name in PICTURES}
        gr.HTML(HEAD)
        with gr.Row():
            with gr.Column(min_width=320):
                buttons = _prompts(parts, engine)
                _settings(parts)
                _networks(parts, engine)
                _plot(parts)
                picture, read, told = _information()
            with gr.Column(min_width=320):
                outputs = [gr.HTML(elem_id="status"), gr.HTML(elem_id="stage"), gr.HTML(elem_id="results"), buttons[1]]
                gr.HTML("<div id='earlier-title'>Earlier images</div><div id='earlier' class='gallery'></div>")
        gr.HTML(VIEW)
        values = [parts.pop(name) for name in PICTURES] + list(parts.values())
        actions = Actions(engine, [*PICTURES, *parts])
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        prompt = len(PICTURES) + list(parts).index("prompt")
        take = f"(...all) => [...ldm.run(all[{prompt}], all[{prompt + 1}]), ...all.slice({len(PICTURES)})]"
        buttons[0].click(actions.make, values, outputs, js=take, **private)
        buttons[1].click(actions.interrupt, **private)
        read.click(actions.settings, picture, [*values, told], js="() => ldm.info()", **private)
        parts["task"].change(None, parts["task"], None, js="(task) => { ldm.task(task); }")
        blocks.load(actions.lists, None, [parts["model"], parts["loras"], parts["control"]], **private)
        blocks.load(None, js="() => { ldm.start(); }")
        blocks.unload(actions.leave)
    blocks.queue(default_concurrency_limit=None, api_open=False)
    return blocks


def _prompts(parts: Parts, engine: Engine) -> tuple[gr.Button, gr.Button]:
    """The task, the prompts, the picture to start from; return the two buttons."""
    tasks = [(title, task) for task, title in form.TITLES.items()]
    parts["task"] = gr.Radio(tasks, value="txt2img", label="Task", show_label=False, elem_id="tasks", container=False)
    parts["prompt"] = gr.Textbox(
        label="Prompt", lines=3, max_lines=12, elem_id="prompt", placeholder="What to make (Ctrl+Enter starts)"
    )
    parts["negative_prompt"] = gr.Textbox(
        label="Negative prompt", lines=1, max_lines=6, elem_id="negative_prompt", placeholder="What to avoid"
    )
    gr.HTML(HISTORY)
    pictures = " ".join(f"for-{task}" for task in form.TITLES if task != "txt2img").split()
    hint = "Drop or paste an image here, or click to choose one"
    canvas = "<canvas class='paint' aria-label='Paint over what is to be repainted'></canvas>"
    gr.HTML(_zone("source", hint, PAINT, canvas), elem_classes=["task-field", *pictures])
    with gr.Row():
        run = gr.Button("Generate", variant="primary", elem_id="run", min_width=100)
        stop = gr.Button("Interrupt", interactive=False, elem_id="stop", min_width=100)
    models = engine.library.names
    parts["model"] = gr.Dropdown(models, value=models[0], label="Model", elem_id="model")
    return run, stop


def _settings(parts: Parts) -> None:
    """All options of the tasks: the usual ones, and the rest folded in."""
    fields = form.fields()
    with gr.Row():
        parts["seed"] = gr.Textbox("-1", label="Seed (-1: random)", elem_id="seed", min_width=120, max_lines=1)
        parts["count"] = gr.Textbox("1", label="Images", elem_id="count", min_width=120, max_lines=1)
    with gr.Row():
        for name in FIRST:
            parts[name] = _component(*fields[name], short=True)
    groups = {
        "More options": [name for name in fields if name not in form.HIRES.union(FIRST)],
        "Second pass (hires fix)": [name for name in fields if name in form.HIRES],
    }
    for title, names in groups.items():
        shown = [] if title == "More options" else ["task-field", "for-txt2img"]
        with gr.Accordion(title, open=False, elem_classes=shown), gr.Row():
            for name in names:
                parts[name] = _component(*fields[name])


def _component(field: dataclasses.Field[Any], tasks: list[str], short: bool = False) -> Any:
    """The component of an option, shown for its tasks; an empty one stands for the checkpoint's default."""
    title = field.name.replace("_", " ").capitalize()
    about: dict[str, Any] = {"label": title, "elem_id": field.name, "min_width": 130 if short else 260}
    about |= {"elem_classes": ["task-field", *(f"for-{task}" for task in tasks)]}
    if not short:
        about["info"] = field.metadata["help"]
    named = {"sampler": [(label(key), key) for key in SAMPLERS], "spacing": [(key, key) for key in SPACINGS]}
    if field.name in named:
        about["min_width"] = 200
        return gr.Dropdown([("auto", ""), *named[field.name]], value="", allow_custom_value=True, **about)
    if field.metadata["choices"]:
        return gr.Dropdown(list(field.metadata["choices"]), value=field.default, **about)
    if "bool" in str(field.type):
        return gr.Checkbox(field.default, **about)
    # Numbers are texts, too: Gradio shows a number without a value as 0, and rounds large ones.
    default = "" if field.default is None else form.as_text(field.default)
    return gr.Textbox(default, placeholder="auto", max_lines=1, **about)


def _networks(parts: Parts, engine: Engine) -> None:
    """The pickers of LoRAs and ControlNets."""
    loras, controls = list(engine.library.files("loras")), list(engine.library.files("controlnets"))
    with gr.Accordion("LoRA", open=False):
        gr.HTML("" if loras else "<p class='status'>There are none: start the server with --loras FOLDER.</p>")
        parts["loras"] = gr.Dropdown(
            loras, multiselect=True, max_choices=form.MOST_LORAS, label="LoRAs", elem_id="loras", visible=bool(loras)
        )
        sliders = [
            gr.Slider(-2, 2, 1, step=0.05, visible=False, elem_id=f"lora_{i}", interactive=True)
            for i in range(form.MOST_LORAS)
        ]
        parts |= {f"lora_{i}": slider for i, slider in enumerate(sliders)}

        def weigh(names: list[str] | None) -> list[Any]:
            chosen = [*(names or []), *[None] * form.MOST_LORAS][: form.MOST_LORAS]
            return [gr.update(visible=name is not None, label=f"Weight of {name}") for name in chosen]

        parts["loras"].change(weigh, parts["loras"], sliders, api_visibility="private", show_progress="hidden")
    with gr.Accordion(
        "ControlNet", open=False, elem_classes=["task-field", "for-txt2img", "for-img2img", "for-inpaint"]
    ):
        gr.HTML("" if controls else "<p class='status'>There are none: start the server with --controlnets FOLDER.</p>")
        parts["control"] = gr.Dropdown([("none", ""), *controls], value="", label="ControlNet", elem_id="control")
        gr.HTML(_zone("control_image", "Drop the image to follow here, or click to choose one"))
        with gr.Row():
            parts["control_weight"] = gr.Slider(0, 2, 1, step=0.05, label="Weight", min_width=120)
            parts["control_start"] = gr.Slider(0, 1, 0, step=0.01, label="From (share of the steps)", min_width=120)
            parts["control_end"] = gr.Slider(0, 1, 1, step=0.01, label="To", min_width=120)
        parts["control_preprocess"] = gr.Radio(["none", "canny"], value="none", label="Make its image first")


def _plot(parts: Parts) -> None:
    """The axes of an X/Y plot, of the options of all tasks."""
    names = list(dict.fromkeys(name for task in form.TASKS for name in form.axes(task)))
    with gr.Accordion("X/Y plot", open=False):
        for axis in "xy":
            with gr.Row():
                parts[f"{axis}_option"] = gr.Dropdown(
                    [("none", ""), *names],
                    value="",
                    label=f"{axis.upper()} axis",
                    elem_id=f"{axis}_option",
                    min_width=130,
                )
                parts[f"{axis}_values"] = gr.Textbox(
                    label="Values",
                    max_lines=1,
                    placeholder="5, 10, 20 or 1-5 or 0-1 [5]",
                    elem_id=f"{axis}_values",
                    min_width=160,
                )


def _information() -> tuple[Any, gr.Button, gr.HTML]:
    """The place to drop a picture whose settings go into the form."""
    with gr.Accordion("PNG info", open=False):
        gr.HTML(_zone("info", "Drop a picture here, or click to choose one: its settings go into the form"))
        url = gr.Textbox(visible=False)
        read = gr.Button("Read", visible="hidden", elem_id="read")
        return url, read, gr.HTML(elem_id="read-text")


def _zone(name: str, hint: str, tools: str = "", canvas: str = "") -> str:
    """A place to drop a picture."""
    return (
        f"<div class='drop' data-name='{name}' tabindex='0' role='button' aria-label='{hint}'>"
        f"<input type='file' accept='image/*' hidden><span class='hint'>{hint}</span>"
        f"<div class='frame'><img alt=''>{canvas}</div>"
        f"<div class='tools'>{tools}<button class='plain' data-do='remove'>Remove</button></div></div>"
    )


PAINT = (
    "<span class='paint tools'><label>Brush <input id='brush' type='range' min='2' max='120' value='32'></label>"
    "<button class='plain' data-do='erase' aria-pressed='false'>Erase</button>"
    "<button class='plain' data-do='undo'>Undo</button><button class='plain' data-do='clear'>Clear</button></span>"
)
HEAD = "<div id='head'><h1>ldm_lite</h1><button class='plain' data-do='theme'>Light / dark</button></div>"
HISTORY = (
    "<details id='history' hidden><summary>Earlier prompts</summary><ol></ol>"
    "<button class='plain' data-do='forget'>Forget them</button></details>"
)
VIEW = (
    "<dialog id='view'><img alt='The image in full'><pre></pre><div class='tools'>"
    "<button class='plain' data-do='save'>Download</button><button class='plain' data-do='seed'>Reuse seed</button>"
    "<button class='plain' data-do='settings'>Reuse settings</button><button class='plain' data-do='use'>Use as input"
    "</button><button class='plain' data-do='close'>Close</button></div></dialog>"
)

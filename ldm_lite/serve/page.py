"""The page at "/": a form, live previews and a gallery, built with Gradio.

Pictures travel inside the events as data URLs, both ways, so that neither Gradio nor the server writes one to a file.
"""

import asyncio
import dataclasses
import html
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from PIL import Image
from starlette.datastructures import MutableHeaders
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ldm_lite.diffusion.names import SAMPLERS, label
from ldm_lite.diffusion.schedule import SPACINGS
from ldm_lite.serve import form
from ldm_lite.serve.http import Refused, answer, refusal
from ldm_lite.serve.queue import QUEUED, Engine, Ticket
from ldm_lite.tasks import xy

FOLDER = Path(__file__).parent
# What the page needs of Gradio's own routes; all others (uploads, files, proxies, an API, ...) are closed.
OPEN = re.compile(
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|(assets|static|svelte)/.*"
    r"|gradio_api/(queue/(join|data)|heartbeat/\w+|cancel|reset|startup-events|app_id|theme\.css))?/?"
)
WAIT = 0.5  # seconds between two looks at whether the server stops
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'; base-uri 'self'"


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
# The functions of events are no API, and nothing covers the page while they run.
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}


def page(engine: Engine) -> gr.Blocks:
    """Return the page of an engine."""
    library, fields = engine.library, form.fields()
    loras, controls, models = list(library.files("loras")), list(library.files("controlnets")), library.names
    with gr.Blocks(title="ldm_lite", analytics_enabled=False) as blocks:
        # fields that no user sees carry pictures: values of components, since states stay on the server
        parts: dict[str, Any] = {name: gr.Textbox(visible=False) for name in PICTURES}
        gr.HTML(HEAD)
        with gr.Row():
            left, right = gr.Column(min_width=320), gr.Column(min_width=320)
        with left:
            tasks = [(title, task) for task, title in form.TITLES.items()]
            parts["task"] = gr.Radio(tasks, value="txt2img", show_label=False, elem_id="tasks", container=False)
            parts["prompt"] = gr.Textbox(
                label="Prompt", lines=3, max_lines=12, elem_id="prompt", placeholder="What to make (Ctrl+Enter starts)"
            )
            parts["negative_prompt"] = gr.Textbox(
                label="Negative prompt", max_lines=6, elem_id="negative_prompt", placeholder="What to avoid"
            )
            gr.HTML(HISTORY)
            hint = "Drop or paste an image here, or click to choose one"
            gr.HTML(_zone("source", hint, PAINT, CANVAS), elem_classes=_shown_for("img2img", "inpaint", "upscale"))
            with gr.Row():
                run = gr.Button("Generate", variant="primary", elem_id="run", min_width=100)
                stop = gr.Button("Interrupt", interactive=False, elem_id="stop", min_width=100)
            parts["model"] = gr.Dropdown(models, value=models[0], label="Model", elem_id="model")
            # all options of the tasks: the usual ones, and the rest folded in
            with gr.Row():
                parts["seed"] = gr.Textbox("-1", label="Seed (-1: random)", elem_id="seed", min_width=120, max_lines=1)
                parts["count"] = gr.Textbox("1", label="Images", elem_id="count", min_width=120, max_lines=1)
            with gr.Row():
                parts |= {name: _component(*fields[name], short=True) for name in FIRST}
            with gr.Accordion("More options", open=False), gr.Row():
                others = [name for name in fields if name not in form.HIRES.union(FIRST)]
                parts |= {name: _component(*fields[name]) for name in others}
            second = _shown_for("txt2img")
            with gr.Accordion("Second pass (hires fix)", open=False, elem_classes=second), gr.Row():
                parts |= {name: _component(*fields[name]) for name in fields if name in form.HIRES}
            with gr.Accordion("LoRA", open=False):
                gr.HTML("" if loras else NONE.format("loras"))
                parts["loras"] = gr.Dropdown(
                    loras,
                    multiselect=True,
                    max_choices=form.MOST_LORAS,
                    label="LoRAs",
                    elem_id="loras",
                    visible=bool(loras),
                )
                weights = {
                    f"lora_{i}": gr.Slider(-2, 2, 1, step=0.05, visible=False, elem_id=f"lora_{i}", interactive=True)
                    for i in range(form.MOST_LORAS)
                }
                parts |= weights
            with gr.Accordion("ControlNet", open=False, elem_classes=_shown_for("txt2img", "img2img", "inpaint")):
                gr.HTML("" if controls else NONE.format("controlnets"))
                choices = [("none", ""), *controls]
                parts["control"] = gr.Dropdown(choices, value="", label="ControlNet", elem_id="control")
                gr.HTML(_zone("control_image", "Drop the image to follow here, or click to choose one"))
                with gr.Row():
                    parts["control_weight"] = gr.Slider(0, 2, 1, step=0.05, label="Weight", min_width=120)
                    start = "From (share of the steps)"
                    parts["control_start"] = gr.Slider(0, 1, 0, step=0.01, label=start, min_width=120)
                    parts["control_end"] = gr.Slider(0, 1, 1, step=0.01, label="To", min_width=120)
                parts["control_preprocess"] = gr.Radio(["none", "canny"], value="none", label="Make its image first")
            with gr.Accordion("X/Y plot", open=False):
                axes = [("none", ""), *dict.fromkeys(name for task in form.TASKS for name in form.axes(task))]
                for x in "xy":
                    name, hint = f"{x.upper()} axis", "5, 10, 20 or 1-5 or 0-1 [5]"
                    with gr.Row():
                        parts[f"{x}_option"] = gr.Dropdown(
                            axes, value="", label=name, elem_id=f"{x}_option", min_width=130
                        )
                        parts[f"{x}_values"] = gr.Textbox(
                            label="Values", max_lines=1, placeholder=hint, elem_id=f"{x}_values", min_width=160
                        )
            with gr.Accordion("PNG info", open=False):
                gr.HTML(_zone("info", "Drop a picture here, or click to choose one: its settings go into the form"))
                picture = gr.Textbox(visible=False)
                read = gr.Button("Read", visible="hidden", elem_id="read")
                told = gr.HTML(elem_id="read-text")
        with right:
            outputs = [gr.HTML(elem_id="status"), gr.HTML(elem_id="stage"), gr.HTML(elem_id="results"), stop]
            gr.HTML("<div id='earlier-title'>Earlier images</div><div id='earlier' class='gallery'></div>")
        gr.HTML(VIEW)

        names, values = list(parts), list(parts.values())
        actions = Actions(engine, names)
        prompt, negative = names.index("prompt"), names.index("negative_prompt")
        take = f"(...all) => [...ldm.run(all[{prompt}], all[{negative}]), ...all.slice({len(PICTURES)})]"
        run.click(actions.make, values, outputs, js=take, **PRIVATE)
        stop.click(actions.interrupt, **PRIVATE)
        read.click(actions.settings, picture, [*values, told], js="() => ldm.info()", **PRIVATE)
        parts["loras"].change(actions.weigh, parts["loras"], list(weights.values()), **PRIVATE)
        parts["task"].change(None, parts["task"], None, js="(task) => { ldm.task(task); }")
        blocks.load(actions.lists, None, [parts["model"], parts["loras"], parts["control"]], **PRIVATE)
        blocks.load(None, js="() => { ldm.start(); }")
        blocks.unload(actions.leave)
    blocks.queue(default_concurrency_limit=None, api_open=False)
    return blocks


def _shown_for(*tasks: str) -> list[str]:
    """The classes of a part that only some tasks have."""
    return ["task-field", *(f"for-{task}" for task in tasks)]


def _component(field: dataclasses.Field[Any], tasks: list[str], short: bool = False) -> Any:
    """The component of an option, shown for its tasks; an empty one stands for the checkpoint's default."""
    title = field.name.replace("_", " ").capitalize()
    about: dict[str, Any] = {"label": title, "elem_id": field.name, "min_width": 130 if short else 260}
    about["elem_classes"] = _shown_for(*tasks)
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


def _zone(name: str, hint: str, tools: str = "", canvas: str = "") -> str:
    """A place to drop a picture."""
    return (
        f"<div class='drop' data-name='{name}' tabindex='0' role='button' aria-label='{hint}'>"
        f"<input type='file' accept='image/*' hidden><span class='hint'>{hint}</span>"
        f"<div class='frame'><img alt=''>{canvas}</div>"
        f"<div class='tools'>{tools}<button class='plain' data-do='remove'>Remove</button></div></div>"
    )


NONE = "<p class='status'>There are none: start the server with --{} FOLDER.</p>"
CANVAS = "<canvas class='paint' aria-label='Paint over what is to be repainted'></canvas>"
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


# ---- what its buttons do --------------------------------------------------------------------------------------------

LOOK = 0.1  # seconds between two looks at a ticket
MOST_SINGLE = 64  # images of a plot that are sent besides the plot
Outputs = tuple[Any, Any, Any, Any]  # status, preview, results, the button that interrupts


class Actions:
    """The functions behind the page, for all who look at it."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        """names are those of the form's values, in their order."""
        self.engine, self.names = engine, list(names)
        self.running: dict[str, list[Ticket]] = {}  # by session

    async def make(self, request: gr.Request, *values: Any) -> AsyncIterator[Outputs]:
        """Queue what the form asks for; yield after every change."""
        session, tickets = request.session_hash or "", list[Ticket]()
        yield _status("..."), "", "", gr.update(interactive=True)
        try:
            work = await asyncio.to_thread(form.read, dict(zip(self.names, values, strict=True)), self.engine)
            self.running[session] = tickets
            for wanted in work.requests:
                tickets.append(await asyncio.to_thread(self.engine.submit, *wanted))
            async for outputs in _follow(work, tickets):
                yield outputs
        except Exception as error:
            yield _error(error), "", gr.skip(), gr.update(interactive=False)
        finally:
            if self.running.get(session) is tickets:
                del self.running[session]
            for ticket in tickets:
                ticket.cancel()

    def interrupt(self, request: gr.Request) -> None:
        """Stop a session's tickets after the step that runs."""
        for ticket in reversed(self.running.get(request.session_hash or "", [])):
            if not ticket.ended:
                ticket.interrupt()

    def leave(self, request: gr.Request) -> None:
        """Give up a session's tickets: its page was closed."""
        for ticket in self.running.pop(request.session_hash or "", []):
            ticket.cancel()

    def lists(self) -> list[Any]:
        """The choices of models, LoRAs and ControlNets, as the folders are now."""
        library = self.engine.library
        loras, controls = list(library.files("loras")), library.files("controlnets")
        return [
            gr.update(choices=library.names),
            gr.update(choices=loras, visible=bool(loras)),
            gr.update(choices=[("none", ""), *controls]),
        ]

    def weigh(self, names: list[str] | None) -> list[Any]:
        """Show a slider for each LoRA that is chosen."""
        chosen = [*(names or []), *[None] * form.MOST_LORAS][: form.MOST_LORAS]
        return [gr.update(visible=name is not None, label=f"Weight of {name}") for name in chosen]

    def settings(self, url: str) -> list[Any]:
        """Return the form's values as a picture's text has them, and the text to show."""
        try:
            values, text, remarks = form.settings(url, self.engine)
        except Exception as error:
            return [*([gr.skip()] * len(self.names)), _error(error)]
        if values.get(form.MODEL) not in self.engine.library.names:
            values.pop(form.MODEL, None)
        values = form.defaults() | values
        about = "".join(f"<p class='status'>{_escape(remark)}</p>" for remark in remarks)
        return [*(values.get(name, gr.skip()) for name in self.names), f"{about}<pre>{_escape(text)}</pre>"]


async def _follow(work: form.Work, tickets: Sequence[Ticket]) -> AsyncIterator[Outputs]:
    """Yield the outputs of a form's tickets until all have ended."""
    start, shown, last, count = time.perf_counter(), None, "", 0
    while unfinished := [ticket for ticket in tickets if not ticket.ended]:
        active = next((ticket for ticket in unfinished if ticket.state != QUEUED), None)
        preview = None if active is None else active.preview()
        status, image, results = _progress(tickets, active or unfinished[0]), gr.skip(), gr.skip()
        if preview is not shown and preview is not None:
            url = await asyncio.to_thread(form.data_url, preview, "jpeg")
            image = f"<div class='stage'><img src='{url}' alt='Preview'></div>"
        if not work.is_plot and len(tickets[0].results) != count:
            count = len(tickets[0].results)
            results = await asyncio.to_thread(_gallery, work, tickets)
        if status != last or preview is not shown:
            yield status, image, results, gr.skip()
        shown, last = preview, status
        await asyncio.sleep(LOOK)
    results = await asyncio.to_thread(_gallery, work, tickets)
    error = next((ticket.error for ticket in tickets if ticket.error is not None), None)
    done = sum(len(ticket.results) for ticket in tickets)
    text = f"{done} image{'s' * (done != 1)} in {time.perf_counter() - start:.1f} s"
    if any(ticket.interrupted for ticket in tickets):
        text = f"Interrupted: {text}" + (", too few for a plot" if work.is_plot and done < len(tickets) else "")
    yield _status(text) if error is None else _error(error), "", results, gr.update(interactive=False)


def _escape(text: str) -> str:
    """Escape a text for HTML, and for Gradio's templates."""
    return re.sub(r"[${}`\\]", lambda match: f"&#{ord(match[0])};", html.escape(text))


def _status(text: str, more: str = "") -> str:
    return f"<div class='status' role='status'>{_escape(text)}{more}</div>"


def _error(error: BaseException) -> str:
    return f"<div class='status error' role='alert'>{_escape(refusal(error).message.replace('`', ''))}</div>"


def _progress(tickets: Sequence[Ticket], ticket: Ticket) -> str:
    """Where the tickets are: their place in the queue, or the step."""
    if ticket.state == QUEUED and not any(cell.results for cell in tickets):
        before = ticket.position
        return _status(f"Waiting: {before} image{'s' * (before != 1)} before yours" if before else "Starts now")
    share, total = sum(cell.progress for cell in tickets) / len(tickets), len(tickets)
    number = min(sum(cell.ended for cell in tickets) + 1, total)
    name = f"Image {number} of {total}, step" if total > 1 else "Step"
    return _status(f"{name} {ticket.step} of {ticket.num_steps}", f"<progress value='{share:.3f}' max='1'></progress>")


def _gallery(work: form.Work, tickets: Sequence[Ticket]) -> str:
    """The results as figures: full PNGs with their text."""
    figures, results = [], [result for ticket in tickets for result in ticket.results]
    if work.is_plot and len(results) == len(tickets):
        sheet = xy.draw([result.image for result in results], work.x, work.y)
        figures.append(_figure(sheet, results[0].seed, "X/Y plot"))
    if not work.is_plot or len(results) <= MOST_SINGLE:
        figures += [_figure(result.image, result.seed) for result in results]
    return f"<div class='gallery'>{''.join(figures)}</div>" if figures else ""


def _figure(image: Image.Image, seed: int, title: str = "") -> str:
    text = _escape(image.info["parameters"])
    about = title or f"Seed {seed}"
    name = f"ldm_lite-{'plot-' if title else ''}{seed}.png"
    actions = {"save": "Download"} | ({} if title else {"seed": "Reuse seed", "use": "Use as input"})
    buttons = "".join(
        f"<button class='plain{' more' if do != 'save' else ''}' data-do='{do}'>{words}</button>"
        for do, words in actions.items()
    )
    return (
        f"<figure class='{'plot' if title else ''}' data-seed='{seed}' data-name='{name}' data-parameters=\"{text}\">"
        f"<img src='{form.data_url(image)}' alt='{about}' data-do='view' role='button' tabindex='0'>"
        f"<figcaption><span>{about} &middot; {image.width} &times; {image.height}</span>{buttons}</figcaption></figure>"
    )

"""What the page's buttons do: they queue what the form asks for, follow it, and show the results as HTML."""

import asyncio
import html
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import gradio as gr
from PIL import Image

from ldm_lite.serve import form
from ldm_lite.serve.http import refusal
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.queue import QUEUED, Ticket
from ldm_lite.tasks import xy

WAIT = 0.1  # seconds between two looks at a ticket
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
            for each in work.requests:
                submit = (each.task, each.options, each.model, each.loras)
                tickets.append(await asyncio.to_thread(self.engine.submit, *submit))
            async for outputs in _follow(work, tickets):
                yield outputs
        except Exception as error:
            yield error_line(error), "", gr.skip(), gr.update(interactive=False)
        finally:
            if self.running.get(session) is tickets:
                del self.running[session]
            for ticket in tickets:
                if not ticket.ended:
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
        library, loras = self.engine.library, self.engine.library.files("loras")
        return [
            gr.update(choices=library.names),
            gr.update(choices=list(loras), visible=bool(loras)),
            gr.update(choices=[("none", ""), *library.files("controlnets")]),
        ]

    def settings(self, url: str) -> list[Any]:
        """Return the form's values as a picture's text has them, and the text to show."""
        try:
            values, text, remarks = form.settings(url, self.engine)
        except Exception as error:
            return [*([gr.skip()] * len(self.names)), error_line(error)]
        if values.get(form.MODEL) not in self.engine.library.names:
            values.pop(form.MODEL, None)
        values = form.defaults() | values
        about = "".join(f"<p class='status'>{_escape(each)}</p>" for each in remarks)
        return [*(values.get(name, gr.skip()) for name in self.names), f"{about}<pre>{_escape(text)}</pre>"]


async def _follow(work: form.Work, tickets: Sequence[Ticket]) -> AsyncIterator[Outputs]:
    """Yield the outputs of a form's tickets until all have ended."""
    start, shown, last, count = time.perf_counter(), None, "", 0
    while not all(ticket.ended for ticket in tickets):
        active = next((each for each in tickets if each.state != QUEUED and not each.ended), None)
        waiting = active or next((each for each in tickets if not each.ended), tickets[-1])
        preview = None if active is None else active.preview()
        status, image, results = _progress(tickets, waiting), gr.skip(), gr.skip()
        if preview is not shown and preview is not None:
            image = await asyncio.to_thread(_stage, preview)
        if not work.is_plot and len(tickets[0].results) != count:
            count = len(tickets[0].results)
            results = await asyncio.to_thread(_gallery, work, tickets)
        if status != last or preview is not shown:
            yield status, image, results, gr.skip()
        shown, last = preview, status
        await asyncio.sleep(WAIT)
    results = await asyncio.to_thread(_gallery, work, tickets)
    error = next((each.error for each in tickets if each.error is not None), None)
    done = sum(len(each.results) for each in tickets)
    text = f"{done} image{'s' * (done != 1)} in {time.perf_counter() - start:.1f} s"
    if any(each.interrupted for each in tickets):
        text = f"Interrupted: {text}" + (", too few for a plot" if work.is_plot and done < len(tickets) else "")
    yield _status(text) if error is None else error_line(error), "", results, gr.update(interactive=False)


# ---- HTML -----------------------------------------------------------------------------------------------------------


def _escape(text: str) -> str:
    """Escape a text for HTML, and for Gradio's templates."""
    escaped = html.escape(text)
    return re.sub(r"[${}`\\]", lambda match: f"&#{ord(match[0])};", escaped)


def _status(text: str, more: str = "") -> str:
    return f"<div class='status' role='status'>{_escape(text)}{more}</div>"


def error_line(error: BaseException) -> str:
    """The one line that says what went wrong."""
    return f"<div class='status error' role='alert'>{_escape(refusal(error).message.replace('`', ''))}</div>"


def _progress(tickets: Sequence[Ticket], ticket: Ticket) -> str:
    """Where the tickets are: their place in the queue, or the step."""
    if ticket.state == QUEUED and not any(each.results for each in tickets):
        before = ticket.position
        return _status(f"Waiting: {before} image{'s' * (before != 1)} before yours" if before else "Starts now")
    share = sum(each.progress for each in tickets) / len(tickets)
    number = sum(each.ended for each in tickets) + 1
    cell = f"Image {min(number, len(tickets))} of {len(tickets)}, step" if len(tickets) > 1 else "Step"
    return _status(f"{cell} {ticket.step} of {ticket.num_steps}", f"<progress value='{share:.3f}' max='1'></progress>")


def _stage(image: Image.Image) -> str:
    return f"<div class='stage'><img src='{form.data_url(image, 'jpeg')}' alt='Preview'></div>"


def _gallery(work: form.Work, tickets: Sequence[Ticket]) -> str:
    """The results as figures: full PNGs with their text."""
    figures, results = [], [(ticket, result) for ticket in tickets for result in ticket.results]
    if work.is_plot and len(results) == len(tickets):
        sheet = xy.draw([result.image for _, result in results], work.x, work.y)
        figures.append(_figure(sheet, results[0][1].seed, "X/Y plot"))
    if not work.is_plot or len(results) <= MOST_SINGLE:
        figures += [_figure(result.image, result.seed) for _, result in results]
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

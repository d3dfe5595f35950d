"""From the fields of AUTOMATIC1111's requests to the options that the engine runs.

A field that would change the image and that ldm_lite does not have is refused unless it is at its neutral value; other
fields that are ignored are named in the answer's info, under "ignored".
"""

import dataclasses
import re
import secrets
from typing import Any

from pydantic import Field

from ldm_lite.cli.options import RANDOM_SEEDS
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.diffusion.names import has, resolve
from ldm_lite.diffusion.webui import OFFERED, from_webui
from ldm_lite.image import PIXEL_UPSCALERS, to_rgb
from ldm_lite.serve import http
from ldm_lite.serve.a1111.controlnet import Unit, controls
from ldm_lite.serve.http import Body, Refused, open_base64
from ldm_lite.serve.library import Library, Loras
from ldm_lite.serve.queue import Engine, Ticket
from ldm_lite.toolkit import lora_weight

LATENT_UPSCALERS = [  # of latents
    name
    for row in dataclasses.fields(Txt2imgOptions)
    if row.name == "hires_upscaler"
    for name in row.metadata["choices"]
    if name not in PIXEL_UPSCALERS
]
VERSION = {"Version": "v1.10.0"}  # whose names and defaults these are
NEUTRAL: dict[str, tuple[object, ...]] = {  # field that would change the image -> values at which it does nothing
    "hr_checkpoint_name": ("Use same checkpoint", ""),
    "enable_hr": (False,),  # of img2img
    "restore_faces": (False,),
    "tiling": (False,),
    "styles": ([],),
    "seed_resize_from_h": (0, -1),
    "seed_resize_from_w": (0, -1),
    "s_tmin": (0,),
    "s_noise": (1,),
    "script_name": ("",),
    "image_cfg_scale": (1.5,),
}
SAME_NAMES = ("negative_prompt", "seed", "batch_size", "n_iter", "steps", "width", "height")  # in the options
SAME = (None, "", "Use same sampler", "Use same scheduler")  # in the second pass as in the first
_LORA = re.compile(r"<(?:lora|lyco):([^<>:]{1,200}+):?+([^<>]{0,400}+)>")


class ImagesRequest(Body):
    """What both tasks have; the defaults are the model's own."""

    prompt: str = ""
    negative_prompt: str = ""
    seed: int = Field(-1, description="-1: random; image k has seed + k")
    sampler_name: str | None = None
    sampler_index: str | None = Field(None, description="the sampler, if sampler_name is missing")
    scheduler: str | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    batch_size: int = Field(1, ge=1)
    n_iter: int = Field(1, ge=1)
    subseed: int = Field(-1, description="-1: random; mixed in by subseed_strength")
    subseed_strength: float = 0
    eta: float | None = None
    s_churn: float | None = None
    send_images: bool = True
    override_settings: dict[str, Any] | None = Field(None, description="sd_model_checkpoint, CLIP_stop_at_last_layers")
    alwayson_scripts: dict[str, Any] | None = None


class Txt2imgRequest(ImagesRequest):
    """The second pass."""

    enable_hr: bool = False
    denoising_strength: float | None = Field(None, description="of the second pass, 0.75 if it is missing")
    hr_scale: float = 2.0
    hr_resize_x: int = Field(0, ge=0, description="the width, in place of hr_scale")
    hr_resize_y: int = Field(0, ge=0, description="the height, in place of hr_scale")
    hr_upscaler: str | None = Field(None, description="one of latent-upscale-modes and upscalers; Latent if missing")
    hr_second_pass_steps: int = Field(0, ge=0, description="0: as many as in the first")
    hr_sampler_name: str | None = None
    hr_scheduler: str | None = None
    hr_prompt: str = ""
    hr_negative_prompt: str = ""


class Img2imgRequest(ImagesRequest):
    """What to start from."""

    init_images: list[str] = Field([], description="one image in base64")
    mask: str | None = Field(None, description="white is repainted")
    denoising_strength: float = 0.75
    resize_mode: int = Field(0, ge=0, le=2, description="0 stretches, 1 crops, 2 fits")
    mask_blur: float = 4
    inpainting_mask_invert: int = Field(0, ge=0, le=1)
    inpainting_fill: int = Field(0, ge=0, le=3, description="under the mask: 0 fill, 1 original, 2 noise, 3 nothing")
    inpaint_full_res: bool = Field(True, description="only the masked area, at width and height")
    inpaint_full_res_padding: int = Field(0, ge=0, description="more pixels around that area")


def submit(engine: Engine, settings: dict[str, Any], asked: ImagesRequest) -> tuple[Ticket, list[str]]:
    """Queue a request; also return what of it is ignored.

    Raises ValueError, and Refused for a field that would change the image and is not ours.
    """
    most = engine.limits.max_pixels
    for name, value in (asked.model_extra or {}).items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise Refused(422, f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}")
    units: list[Unit] = []
    for name, script in (asked.alwayson_scripts or {}).items():
        arguments = script.get("args") if isinstance(script, dict) else script
        if name.lower() == "controlnet":
            if not isinstance(arguments or [], list):
                raise Refused(422, f"got {type(arguments).__name__} as args of {name}, expected a list of ControlNets")
            units = [http.validated(Unit, unit) for unit in arguments or () if isinstance(unit, dict)]
        elif arguments and arguments != [False]:
            raise Refused(422, f"the script {name!r:.60} is not supported: leave it out of alwayson_scripts")
    override = asked.override_settings or {}
    settings |= {name: value for name, value in override.items() if name in settings}
    ignored = [name for name in asked.model_extra or () if name not in NEUTRAL]
    ignored += [f"override_settings.{name}" for name in override if name not in settings]
    ignored = sorted(name[:80] for name in ignored)
    model = str(settings["sd_model_checkpoint"])
    prompt, loras = _loras(asked.prompt)
    options: dict[str, Any] = {name: getattr(asked, name) for name in SAME_NAMES} | _sampler(asked)
    options |= {"prompt": prompt, "prompt_syntax": "a1111", "scale": asked.cfg_scale}
    options["clip_skip"] = settings["CLIP_stop_at_last_layers"]
    if asked.subseed_strength:
        subseed = secrets.randbelow(RANDOM_SEEDS) if asked.subseed == -1 else asked.subseed
        options |= {"variation_seed": subseed, "variation_strength": asked.subseed_strength}
    if isinstance(asked, Txt2imgRequest):
        options |= _second_pass(asked, engine.library) if asked.enable_hr else {}
        options["control"] = controls(engine, units, (asked.width, asked.height), None, None)
        return engine.submit("txt2img", Txt2imgOptions(**options), model, loras), ignored
    assert isinstance(asked, Img2imgRequest)
    if len(asked.init_images) != 1:
        raise ValueError(f"got {len(asked.init_images)} images as init_images, expected one")
    image, mask = to_rgb(open_base64(asked.init_images[0], "init_images", most)), None
    if asked.mask is not None:
        mask = open_base64(asked.mask, "mask", most).convert("L")
        if mask.size != image.size:  # it gets the image's proportions, as in A1111, without regard to its own
            mask = mask.resize(image.size)
    options["control"] = controls(engine, units, (asked.width, asked.height), image, mask)
    resize = ("stretch", "crop", "fit")[asked.resize_mode]
    options |= {"init_img": (image,), "strength": asked.denoising_strength, "resize": resize}
    if mask is None:
        return engine.submit("img2img", Img2imgOptions(**options), model, loras), ignored
    options |= {"mask": (mask,), "feather": asked.mask_blur, "invert_mask": bool(asked.inpainting_mask_invert)}
    options["masked_content"] = ("fill", "original", "noise", "nothing")[asked.inpainting_fill]
    options["only_masked"] = asked.inpaint_full_res_padding if asked.inpaint_full_res else None
    return engine.submit("inpaint", InpaintOptions(**options), model, loras), ignored


def _loras(prompt: str) -> tuple[str, Loras]:
    """Take <lora:NAME:WEIGHT> out of a prompt; WEIGHT may name networks and blocks.  Raises ValueError for others."""
    if "<hypernet:" in prompt:
        raise ValueError("hypernetworks are not supported: leave <hypernet:...> out of the prompt")
    loras = []
    for name, weight in _LORA.findall(prompt):
        try:
            loras.append((name, lora_weight(weight)))
        except ValueError as error:
            raise ValueError(f"the LoRA {name!r}: {error}") from None
    return _LORA.sub("", prompt), tuple(loras)


def _sampler(asked: ImagesRequest) -> dict[str, Any]:
    """The options for a sampler by A1111's name, or by one of ldm_lite's.  Raises ValueError."""
    name = asked.sampler_name or asked.sampler_index
    if not name:
        return {}
    kind = (asked.scheduler or "").strip() or "Automatic"
    try:
        key, spacing = from_webui(name, VERSION | {"Schedule type": kind})
    except ValueError:
        if name in OFFERED:
            raise
        return dict(zip(("sampler", "spacing"), resolve(name), strict=True))
    options: dict[str, Any] = {"sampler": key, "spacing": spacing}
    for option, value in (("eta", asked.eta), ("churn", asked.s_churn)):
        if value is not None and has(key, option):
            options[option] = value
    return options


def _second_pass(asked: Txt2imgRequest, library: Library) -> dict[str, Any]:
    """The options of the second pass.  Raises ValueError."""
    side, strength = library.facts(None).side, asked.denoising_strength
    width, height, times = asked.width or side, asked.height or side, asked.hr_scale
    wanted = [(asked.hr_resize_x, width), (asked.hr_resize_y, height)]
    if ratios := [resized / side for resized, side in wanted if resized]:
        if max(ratios) - min(ratios) > 1e-6:
            size = f"{asked.hr_resize_x}x{asked.hr_resize_y}, have not the shape of {width}x{height}"
            raise ValueError(f"hr_resize_x and hr_resize_y, {size}: give only one")
        times = ratios[0] * (1 + 1e-12)  # a product with the side is rounded down
    options: dict[str, Any] = {"hires": times, "hires_strength": 0.75 if strength is None else strength}
    options |= {"hires_steps": asked.hr_second_pass_steps or None}
    options |= {"hires_prompt": asked.hr_prompt or None, "hires_negative_prompt": asked.hr_negative_prompt or None}

    upscaler, networks, ours = (
        asked.hr_upscaler,
        library.files("upscalers"),
        (*LATENT_UPSCALERS, "None", *PIXEL_UPSCALERS),
    )
    if upscaler in ours:
        options["hires_upscaler"] = "Lanczos" if upscaler == "None" else upscaler
    elif upscaler in networks:
        options["hires_esrgan"] = library.upscaler(upscaler)
    elif upscaler is not None:
        raise ValueError(f"unknown hr_upscaler {upscaler!r:.60}: expected one of {', '.join((*ours, *networks))}")

    if asked.hr_sampler_name not in SAME or asked.hr_scheduler not in SAME:
        first = asked.sampler_name or asked.sampler_index
        sampler = first if asked.hr_sampler_name in SAME else asked.hr_sampler_name
        kind = asked.scheduler if asked.hr_scheduler in SAME else asked.hr_scheduler
        if not sampler:
            raise ValueError("got hr_scheduler without a sampler: give sampler_name, or hr_sampler_name")
        options["hires_sampler"] = f"webui {sampler} {kind or ''}".strip()
    return options

"""From the fields of AUTOMATIC1111's requests to the options that the engine runs.

A field that would change the image and that ldm_lite does not have is refused unless it is at its neutral value; other
fields that are ignored are named in the answer's info, under "ignored".
"""

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from ldm_lite.cli.options import RANDOM_SEEDS
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.diffusion.names import has, resolve
from ldm_lite.diffusion.webui import DISCARD, OFFERED, from_webui
from ldm_lite.image import PIXEL_UPSCALERS, to_rgb
from ldm_lite.serve import http
from ldm_lite.serve.a1111.controlnet import Unit, controls
from ldm_lite.serve.http import Body, Refused, open_base64
from ldm_lite.serve.library import Library, Loras
from ldm_lite.serve.queue import Engine
from ldm_lite.serve.ticket import Ticket
from ldm_lite.toolkit import lora_weight

LATENT_UPSCALERS = [  # of latents
    name
    for row in dataclasses.fields(Txt2imgOptions)
    if row.name == "hires_upscaler"
    for name in row.metadata["choices"]
    if name not in PIXEL_UPSCALERS
]
VERSION = {"Version": "v1.10.0"}  # the version whose names and defaults these are
NEUTRAL: dict[str, tuple[object, ...]] = {  # field that would change the image -> values with which it does nothing
    "enable_hr": (False,),  # of img2img
    "hr_checkpoint_name": ("Use same checkpoint", "", "None"),
    "hr_additional_modules": ([], ["Use same choices"]),
    "firstphase_width": (0,),
    "firstphase_height": (0,),
    "refiner_checkpoint": ("", "None"),
    "restore_faces": (False,),
    "tiling": (False,),
    "styles": ([],),
    "disable_extra_networks": (False,),
    "seed_resize_from_h": (0, -1),
    "seed_resize_from_w": (0, -1),
    "s_min_uncond": (0,),
    "s_tmin": (0,),
    "s_tmax": (0,),
    "s_noise": (1,),
    "initial_noise_multiplier": (1,),
    "latent_mask": ("",),
    "mask_round": (True,),
    "script_name": ("", "None"),
    "infotext": ("",),
}
NEUTRAL_SETTINGS: dict[str, tuple[object, ...]] = {  # the same, of the settings
    **{name: NEUTRAL[name] for name in ("tiling", "s_min_uncond", "s_tmin", "s_tmax", "s_noise")},
    "initial_noise_multiplier": (1,),
    "sd_vae": ("Automatic", "", "None"),
    "sd_unet": ("Automatic", "", "None"),
    "sd_hypernetwork": ("None", ""),
    "forge_additional_modules": ([],),
    "sd_vae_encode_method": ("Full",),
    "sd_vae_decode_method": ("Full",),
    "face_restoration": (False,),
    "emphasis": ("Original",),
    "sd_noise_schedule": ("Default",),
    "sgm_noise_multiplier": (False,),
    "img2img_extra_noise": (0,),
    "img2img_color_correction": (False,),
    "inpainting_mask_weight": (1,),
    "skip_early_cond": (0,),
    "s_min_uncond_all": (False,),
    "token_merging_ratio": (0,),
    "token_merging_ratio_img2img": (0,),
    "token_merging_ratio_hr": (0,),
    "uni_pc_variant": ("bh1",),
    "uni_pc_skip_type": ("time_uniform",),
    "uni_pc_order": (3,),
    "uni_pc_lower_order_final": (True,),
    "use_downcasted_alpha_bar": (False,),
    "use_old_scheduling": (False,),
    "use_old_karras_scheduler_sigmas": (False,),
    "use_old_emphasis_implementation": (False,),
}
SCHEDULE = {  # settings of the noise levels -> their keys in a picture's text
    "rho": "Schedule rho",
    "sigma_min": "Schedule min sigma",
    "sigma_max": "Schedule max sigma",
    "beta_dist_alpha": "Beta schedule alpha",
    "beta_dist_beta": "Beta schedule beta",
    "always_discard_next_to_last_sigma": DISCARD,
}
SAME_NAMES = ("negative_prompt", "seed", "batch_size", "n_iter", "steps", "width", "height")  # in the options
SAME = (None, "", "Use same sampler", "Use same scheduler")  # in the second pass as in the first
_LORA = re.compile(r"<(?:lora|lyco):([^<>:]{1,200}+):?+([^<>]{0,400}+)>")


class NullableFields(Body):
    """A null field counts as missing."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class WebuiSettings(NullableFields):
    """The web UI's settings that have an effect here, and their defaults."""

    sd_model_checkpoint: str = ""
    CLIP_stop_at_last_layers: int = Field(1, ge=1, le=100)
    randn_source: Literal["CPU", "GPU", "NV"] = Field("CPU", description="the noise: ldm_lite's, or that of a GPU")
    eta_noise_seed_delta: int = 0
    eta_ddim: float = Field(0, ge=0, le=1)
    eta_ancestral: float = Field(1, ge=0, le=1)
    s_churn: float = Field(0, ge=0, le=1000)
    rho: float = 0
    sigma_min: float = 0
    sigma_max: float = 0
    beta_dist_alpha: float = 0.6
    beta_dist_beta: float = 0.6
    always_discard_next_to_last_sigma: bool = False
    img2img_fix_steps: bool = False

    def ignored(self) -> list[str]:
        """The settings that have no effect.  Raises Refused for one that would change images."""
        return _ignored(self, NEUTRAL_SETTINGS)

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that have an effect and are given."""
        return self.model_dump(include=self.model_fields_set & {*WebuiSettings.model_fields})


class ImagesRequest(NullableFields):
    """The fields of both tasks; the defaults are the model's own."""

    prompt: str = ""
    negative_prompt: str = ""
    seed: int = Field(-1, description="-1: random; image k has seed + k")
    sampler_name: str | None = None
    sampler_index: str | None = Field(None, description="the sampler, if sampler_name is missing")
    scheduler: str | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    distilled_cfg_scale: float | None = Field(None, description="Forge's: the scale that networks like FLUX.1's read")
    width: int | None = None
    height: int | None = None
    batch_size: int = Field(1, ge=1)
    n_iter: int = Field(1, ge=1)
    subseed: int = Field(-1, description="-1: random; mixed in by subseed_strength")
    subseed_strength: float = 0
    eta: float | None = None
    s_churn: float | None = None
    send_images: bool = True
    override_settings: WebuiSettings | None = None
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
    """The image to start from."""

    init_images: list[str] = Field([], description="one image in base64")
    mask: str | None = Field(None, description="white is repainted")
    denoising_strength: float = 0.75
    resize_mode: int = Field(0, ge=0, le=2, description="0 stretches, 1 crops, 2 fits")
    image_cfg_scale: float | None = Field(None, description="of InstructPix2Pix")
    mask_blur: float | None = Field(None, description="in place of mask_blur_x and mask_blur_y")
    mask_blur_x: float = 4
    mask_blur_y: float = 4
    inpainting_mask_invert: int = Field(0, ge=0, le=1)
    inpainting_fill: int = Field(0, ge=0, le=3, description="under the mask: 0 fill, 1 original, 2 noise, 3 nothing")
    inpaint_full_res: bool = Field(True, description="only the masked area, at width and height")
    inpaint_full_res_padding: int = Field(0, ge=0, description="more pixels around that area")


def _ignored(asked: Body, neutral: Mapping[str, tuple[object, ...]]) -> list[str]:
    """The fields of a request that have no effect.  Raises Refused for one that would change images."""
    extra = asked.model_extra or {}
    for name, value in extra.items():
        if name in neutral and value not in neutral[name]:
            raise Refused(422, f"{name} is not supported: leave it out, or give {neutral[name][0]!r}", param=name)
    return sorted(name[:80] for name in extra if name not in neutral)


def submit(engine: Engine, kept: WebuiSettings, asked: ImagesRequest) -> tuple[Ticket, list[str]]:
    """Queue a request of a client with stored settings; also return what is ignored.

    Raises ValueError, and Refused for a field that would change the image and is not ours.
    """
    most, library = engine.limits.max_pixels, engine.library
    override = asked.override_settings or WebuiSettings()
    settings = kept.model_copy(update=override.changed)
    model = library.check_request(settings.sd_model_checkpoint or None, ())
    reads_scale = library.inputs(model).scale
    ignored = [f"override_settings.{name}" for name in override.ignored()]
    ignored += _ignored(asked, _neutral(asked, reads_scale))
    if asked.distilled_cfg_scale is not None and not reads_scale:
        ignored.append("distilled_cfg_scale")
    units: list[Unit] = []
    for name, script in (asked.alwayson_scripts or {}).items():
        arguments = script.get("args") if isinstance(script, dict) else script
        if name.lower() == "controlnet":
            if not isinstance(arguments or [], list):
                raise Refused(422, f"got {type(arguments).__name__} as args of {name}, expected a list of ControlNets")
            units = [http.validated(Unit, unit) for unit in arguments or () if isinstance(unit, dict)]
        elif arguments and not (isinstance(arguments, list) and arguments[0] is False):  # False turns the script off
            raise Refused(422, f"the script {name!r:.60} is not supported: leave it out of alwayson_scripts")
    prompt, loras = _loras(asked.prompt)
    options: dict[str, Any] = {name: getattr(asked, name) for name in SAME_NAMES} | _sampler(asked, settings)
    options |= {"prompt": prompt, "prompt_syntax": "a1111", "scale": _scale(asked, reads_scale)}
    options |= {"clip_skip": settings.CLIP_stop_at_last_layers, "ensd": settings.eta_noise_seed_delta}
    options |= {"noise": "own" if settings.randn_source == "CPU" else "a1111"}
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
        if mask.size != image.size:  # it is stretched to the image's proportions, as in A1111
            mask = mask.resize(image.size)
    options["control"] = controls(engine, units, (asked.width, asked.height), image, mask)
    resize = ("stretch", "crop", "fit")[asked.resize_mode]
    options |= {"init_img": (image,), "strength": asked.denoising_strength, "resize": resize}
    options["exact_steps"] = settings.img2img_fix_steps
    if mask is None:
        if library.facts(model).tasks[0] == "img2img":  # InstructPix2Pix
            options["image_scale"] = asked.image_cfg_scale
        elif asked.image_cfg_scale is not None:
            ignored.append("image_cfg_scale")
        return engine.submit("img2img", Img2imgOptions(**options), model, loras), ignored
    if asked.mask_blur is None and asked.mask_blur_x != asked.mask_blur_y:
        raise ValueError(f"got mask_blur_x {asked.mask_blur_x:g} and mask_blur_y {asked.mask_blur_y:g}: give mask_blur")
    feather = asked.mask_blur_x if asked.mask_blur is None else asked.mask_blur
    options |= {"mask": (mask,), "feather": feather, "invert_mask": bool(asked.inpainting_mask_invert)}
    options["masked_content"] = ("fill", "original", "noise", "nothing")[asked.inpainting_fill]
    options["only_masked"] = asked.inpaint_full_res_padding if asked.inpaint_full_res else None
    return engine.submit("inpaint", InpaintOptions(**options), model, loras), ignored


def _neutral(asked: ImagesRequest, reads_scale: bool) -> dict[str, tuple[object, ...]]:
    """NEUTRAL for a request: without a second pass, its fields mean nothing; with one, its scale is the first's."""
    if not getattr(asked, "enable_hr", False):
        return {name: values for name, values in NEUTRAL.items() if not name.startswith("hr_")}
    distilled = 3.5 if asked.distilled_cfg_scale is None else asked.distilled_cfg_scale
    return NEUTRAL | {"hr_cfg": (asked.cfg_scale,)} | ({"hr_distilled_cfg": (distilled,)} if reads_scale else {})


def _scale(asked: ImagesRequest, reads_scale: bool) -> float | None:
    """The guidance scale; of a network that reads it, Forge's distilled one.  Raises Refused for both."""
    if not reads_scale:
        return asked.cfg_scale
    if asked.distilled_cfg_scale is None:
        return None if asked.cfg_scale == 1 else asked.cfg_scale
    if asked.cfg_scale not in (None, 1):
        message = f"got cfg_scale {asked.cfg_scale:g} and distilled_cfg_scale, but the network reads one scale"
        raise Refused(422, f"{message}: give 1 as cfg_scale", param="cfg_scale")
    return asked.distilled_cfg_scale


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


def _sampler(asked: ImagesRequest, settings: WebuiSettings) -> dict[str, Any]:
    """The options for a sampler by A1111's name, or by one of ldm_lite's.  Raises ValueError."""
    changed = settings.model_dump(exclude_defaults=True)
    levels = {key: str(changed[name]) for name, key in SCHEDULE.items() if name in changed}
    churn = changed.get("s_churn") if asked.s_churn is None else asked.s_churn
    options: dict[str, Any] = {"eta": asked.eta, "churn": churn}
    name = asked.sampler_name or asked.sampler_index
    if not name:
        if levels:
            raise ValueError(f"got {', '.join(levels)} without a sampler: give sampler_name")
        return options
    kind = (asked.scheduler or "").strip() or "Automatic"
    spacing: str | None
    try:
        key, spacing = from_webui(name, VERSION | {"Schedule type": kind} | levels)
    except ValueError:
        if name in OFFERED or levels:
            raise
        key, spacing = resolve(name)
    if asked.eta is None:
        options["eta"] = changed.get("eta_ddim" if key.startswith("ddim") else "eta_ancestral")
    used = {option: value for option, value in options.items() if has(key, option)}
    return {"sampler": key, "spacing": spacing, **used}


def _second_pass(asked: Txt2imgRequest, library: Library) -> dict[str, Any]:
    """The options of the second pass.  Raises ValueError."""
    side, strength = library.facts(None).side, asked.denoising_strength
    width, height, times = asked.width or side, asked.height or side, asked.hr_scale
    wanted = [(asked.hr_resize_x, width), (asked.hr_resize_y, height)]
    if ratios := [resized / side for resized, side in wanted if resized]:
        if max(ratios) - min(ratios) > 1e-6:
            size = f"{asked.hr_resize_x}x{asked.hr_resize_y}, do not have the shape of {width}x{height}"
            raise ValueError(f"hr_resize_x and hr_resize_y, {size}: give only one")
        times = ratios[0] * (1 + 1e-12)  # a product with the side is rounded down
    options: dict[str, Any] = {"hires": times, "hires_strength": 0.75 if strength is None else strength}
    options |= {"hires_steps": asked.hr_second_pass_steps or None}
    options |= {"hires_prompt": asked.hr_prompt or None, "hires_negative_prompt": asked.hr_negative_prompt or None}

    upscaler, networks = asked.hr_upscaler, library.files("upscalers")
    ours = (*LATENT_UPSCALERS, "None", *PIXEL_UPSCALERS)
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

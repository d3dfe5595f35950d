"""AUTOMATIC1111's extension for ControlNets: units of its requests, and the routes under /controlnet."""

import math
from typing import Any

from fastapi import APIRouter, Request
from PIL import Image, ImageOps
from pydantic import Field

from ldm_lite import Control
from ldm_lite.image import to_rgb
from ldm_lite.serve.http import Body, hint, open_base64, read_json, reading
from ldm_lite.serve.queue import Engine

MODULES = {"none": "none", "canny": "canny", "inpaint": "inpaint", "inpaint_only": "inpaint"}  # of ControlNets
CONTROL_TYPES = {  # of ControlNets, and their modules, the usual one last
    "All": tuple(reversed(MODULES)),
    "Canny": ("none", "canny"),
    "Inpaint": ("none", "inpaint_only", "inpaint"),
}
THRESHOLDS = {"a": 100.0, "b": 200.0}  # of canny
FITTED = {0: "stretch", "Just Resize": "stretch", 2: "pad", "Resize and Fill": "pad"}  # resize modes; others crop
EXTENSION = {  # as A1111 lists its extensions
    "name": "sd-webui-controlnet",
    "remote": "",
    "branch": "",
    "commit_hash": "",
    "version": "3",
    "commit_date": 0,
    "enabled": True,
}
MODES = {0: False, "Balanced": False, 2: True, "ControlNet is more important": True}  # whether Control guesses


class Unit(Body):
    """A ControlNet of alwayson_scripts.controlnet.args."""

    enabled: bool = True
    module: str = "none"
    model: str = "None"
    weight: float = 1.0
    image: str | dict[str, Any] | None = None
    input_image: str | None = None
    mask: str | None = None
    mask_image: str | None = None
    resize_mode: int | str = 1
    threshold_a: float = -1
    threshold_b: float = -1
    guidance_start: float = 0.0
    guidance_end: float = 1.0
    control_mode: int | str = 0


class DetectRequest(Body):
    """Images to prepare for a ControlNet."""

    controlnet_module: str = "none"
    controlnet_input_images: list[str] = Field([], description="in base64")
    controlnet_images: list[str] = Field([], description="another name of the same")
    controlnet_processor_res: int = Field(512, description="pixels of the short side")
    controlnet_threshold_a: float = -1
    controlnet_threshold_b: float = -1


def _preprocess(module: str, a: float, b: float) -> str:
    """The preprocessor of Control by its name in the extension.  Raises ValueError for others."""
    if module.lower() not in MODULES:
        raise ValueError(f"unknown ControlNet module {module!r:.60}: expected one of {', '.join(MODULES)}")
    low, high = (value if value >= 0 else THRESHOLDS[name] for name, value in (("a", a), ("b", b)))
    return f"canny:{low:g}:{high:g}" if module.lower() == "canny" else MODULES[module.lower()]


def controls(
    engine: Engine,
    units: list[Unit],
    size: tuple[int | None, int | None],
    init: Image.Image | None,
    init_mask: Image.Image | None,
) -> tuple[Control, ...]:
    """The ControlNets of a request; one without an image follows the request's.  Raises ValueError.

    size: width and height that the request names.
    """
    chosen, library, most = list[Control](), engine.library, engine.limits.max_pixels
    units = [unit for unit in units if unit.enabled]
    if len(units) >= engine.limits.max_branches:  # before their images are opened, which stay in memory
        raise ValueError(
            f"got {len(units)} ControlNets, expected fewer than {engine.limits.max_branches} (`max_branches`)"
        )
    for unit in units:
        if unit.control_mode not in MODES:
            raise ValueError(f"got control_mode {unit.control_mode!r:.40}, expected {', '.join(map(str, MODES))}")
        both = unit.image if isinstance(unit.image, dict) else {"image": unit.image or unit.input_image}
        masked = both.get("mask") or unit.mask or unit.mask_image
        image = open_base64(both["image"], "the ControlNet's image", most) if both.get("image") else init
        mask = open_base64(masked, "the ControlNet's mask", most).convert("L") if masked else init_mask
        if image is None:
            raise ValueError("a ControlNet has no image: give one as image")
        if MODULES.get(unit.module.lower()) == "inpaint" and mask is not None:
            image = to_rgb(image)
            image.putalpha(ImageOps.invert(mask.resize(image.size)))
        how, side = FITTED.get(unit.resize_mode), library.facts(None).side
        if how is not None and (init is None or all(size)):
            fitted = size[0] or side, size[1] or side
            engine.check_size(*fitted)
            image = image.resize(fitted) if how == "stretch" else ImageOps.pad(image, fitted)
        name = library.plain(unit.model, library.files("controlnets"))
        about: dict[str, Any] = {"weight": unit.weight, "start": unit.guidance_start, "end": unit.guidance_end}
        about |= {"guess": MODES[unit.control_mode], "name": name}
        about["preprocess"] = _preprocess(unit.module, unit.threshold_a, unit.threshold_b)
        chosen.append(Control(library.file("controlnets", name), image, **about))
    return tuple(chosen)


def _detected(engine: Engine, asked: DetectRequest) -> list[str]:
    """Images as a ControlNet sees them.  Raises ValueError."""
    way = _preprocess(asked.controlnet_module, asked.controlnet_threshold_a, asked.controlnet_threshold_b)
    pictures = asked.controlnet_input_images or asked.controlnet_images
    if not 1 <= len(pictures) <= engine.limits.max_images:
        raise ValueError(f"got {len(pictures)} images, expected 1 to {engine.limits.max_images}")
    answers = []
    for picture in pictures:
        image = open_base64(picture, "controlnet_input_images", engine.limits.max_pixels)
        ratio = max(asked.controlnet_processor_res, 1) / min(image.size)
        ratio = min(ratio, math.sqrt(engine.limits.max_pixels / (image.width * image.height)))
        size = max(1, int(image.width * ratio)), max(1, int(image.height * ratio))
        answers.append(hint(image, way, size))
    return answers


def router(engine: Engine) -> APIRouter:
    """Return the routes."""
    routes, library = APIRouter(prefix="/controlnet", tags=["ControlNet"]), engine.library

    @routes.get("/version")
    def version() -> dict[str, Any]:
        """The version of the extension whose names and defaults these are."""
        return {"version": 3}

    @routes.get("/settings")
    def settings() -> dict[str, Any]:
        """How many units a request may have."""
        return {"control_net_unit_count": engine.limits.max_branches - 1}

    def titles() -> list[str]:
        return [library.title("controlnets", name)[0] for name in library.files("controlnets")]

    @routes.get("/model_list")
    def model_list() -> dict[str, Any]:
        """The ControlNets that requests may name."""
        return {"model_list": titles()}

    @routes.get("/control_types")
    def control_types() -> dict[str, Any]:
        """The modules and ControlNets that go together, by their names."""
        types, names = dict[str, Any](), titles()
        for kind, modules in CONTROL_TYPES.items():
            models = [name for name in names if kind == "All" or kind.lower() in name.lower()]
            types[kind] = {"module_list": [*modules], "model_list": ["None", *models]}
            types[kind] |= {"default_option": modules[-1], "default_model": models[0] if models else "None"}
        return {"control_types": types}

    @routes.get("/module_list")
    def module_list() -> dict[str, Any]:
        """The modules, which make a ControlNet's image."""
        sliders = [{"name": name, "value": THRESHOLDS[name], "min": 0, "max": 1020} for name in THRESHOLDS]
        details = {name: {"model_free": False, "sliders": sliders if name == "canny" else []} for name in MODULES}
        return {"module_list": list(MODULES), "module_detail": details}

    @routes.post("/detect", openapi_extra=DetectRequest.docs())
    async def detect(request: Request) -> dict[str, Any]:
        """Images as a ControlNet sees them."""
        asked = await read_json(request, DetectRequest)
        return {"images": await reading(request, _detected, engine, asked), "info": "Success"}

    return routes

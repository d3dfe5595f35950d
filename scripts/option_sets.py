"""Pictures of many sets of options, to check that a change of the code changes no picture.

    python scripts/option_sets.py before.json          # on the code as it was
    python scripts/option_sets.py after.json before.json

Writes a digest of the pixels of each set, its text and its warnings, or its error; given a second file, names the sets
that differ and exits with status 1 if one of them has other pixels.  Miniatures with random weights and plain kernels:
half a minute, and the same bits on the same machine.
"""

import hashlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

import random_checkpoint
import torch
import toy
import toy_flow
import toy_zoo
from PIL import Image
from random_checkpoint import SMALL, small
from safetensors.torch import save_file

import ldm_lite

AND = "a red apple AND a green tree"
BOXES = {"prompt_syntax": "a1111", "regions": "0,0,0.5,1; 0.5,0,1,1"}
TRICKS = {"deep_cache": "2", "gate_step": 3, "freeu": "1.2,1.4,0.9,0.2"}
FLOW = {"height": 32, "width": 32}

# (model, task, options): all features, alone and with those that share a slot of the job with them
SETS: list[tuple[str, str, dict[str, Any]]] = [
    ("txt2img", "txt2img", options)
    for options in (
        {},
        {"sampler": "Euler a", "eta": 0.5},
        {"sampler": "DPM++ 2M Karras", "batch_size": 2},
        {"sampler": "heun", "churn": 5.0},
        {"guidance_rescale": 0.7},
        {"guidance_rescale": 0.5, "scale": 1.0},
        {"guidance_interval": "0.2-0.7"},
        {"guidance_interval": "sigma=0.5-6"},
        {"guidance_schedule": "cosine"},
        {"guidance_schedule": "linear:least=1", "guidance_interval": "0-0.6"},
        {"apg": "parallel=0"},
        {"apg": "parallel=0.2:threshold=15:momentum=-0.5", "scale": 12.0},
        {"apg": "parallel=0.1", "guidance_interval": "0.2-0.9", "guidance_rescale": 0.7},
        {"deep_cache": "2"},
        {"deep_cache": "3:1"},
        {"gate_step": 3},
        {"freeu": "1.2,1.4,0.9,0.2"},
        TRICKS,
        {**TRICKS, "guidance_interval": "0.1-0.9", "apg": "parallel=0:momentum=-0.5"},
        {"gate_step": 4, "guidance_rescale": 0.7, "guidance_schedule": "cosine"},
        {"seamless": "x"},
        {"seamless": "xy", **TRICKS},
        {"hires": 2.0},
        {"hires": 1.5, "hires_strength": 0.5, "hires_steps": 4, "hires_upscaler": "Lanczos"},
        {"hires": 2.0, "hires_sampler": "Euler a", "hires_prompt": "a tree", "hires_negative_prompt": "an apple"},
        {"hires": 2.0, **TRICKS, "apg": "parallel=0", "guidance_interval": "0.2-0.8"},
        {"hires": 2.0, "seamless": "y", "guidance_rescale": 0.7},
        {"prompt": AND, **BOXES},
        {"prompt": AND, **BOXES, "seamless": "xy", "guidance_interval": "0.2-0.7"},
        {"prompt": AND, **BOXES, "hires": 2.0, "batch_size": 2},
        {"prompt": "a [red:green:0.5] apple", "prompt_syntax": "a1111", "hires": 2.0},
        {"prompt": "a (red:1.3) apple", "prompt_syntax": "a1111", "variation_seed": 7, "variation_strength": 0.2},
        {"noise": "a1111", "sampler": "Euler a", "ensd": 31337, "batch_size": 2},
        {"noise": "diffusers", "sampler": "Euler a", "batch_size": 2},
        {"noise": "comfy", "sampler": "dpmpp_2m_sde"},
        {"brownian": True, "sampler": "dpmpp_2m_sde", "seed": [5, 9], "batch_size": 2},
        {"fixed_code": True, "batch_size": 2, "n_iter": 2},
        {"compat": True, "steps": 4},
        {"compat": True, "steps": 4, "sampler": "plms", "fixed_code": True},
        {"control": "net"},
        {"control": "net:0.5-0.9", "seamless": "xy", "deep_cache": "2"},
        {"control": "net", "preprocess": "canny", "hires": 1.5},
        {"control": "net:guess", "gate_step": 3, "guidance_interval": "0.2-0.7", "apg": "parallel=0"},
        {"control": "adapter", "prompt": AND, **BOXES},
        {"prompt": "{red|green} apple", "dynamic": "all"},
        {"prompt": "{red|green|blue} apple", "dynamic": "random", "batch_size": 2},
        {"prompt": None, "from_file": "prompts.txt"},
        {"clip_skip": 2, "negative_prompt": "grey"},
        {"hires_steps": 4},
        {"compat": True, "apg": "parallel=0"},
        {"guidance_schedule": "wave"},
        {"seamless": "z"},
    )
]
SETS += [
    ("txt2img", "img2img", options)
    for options in (
        {},
        {"strength": 0.5, "exact_steps": True},
        {"sample_posterior": True, "noise": "diffusers"},
        {"compat": True},
        {"control": "net", "guidance_rescale": 0.7},
        {"hires": 2.0},
        {**TRICKS, "strength": 1.0},
    )
]
SETS += [
    ("txt2img", "inpaint", options)
    for options in (
        {},
        {"feather": 4.0, "strength": 0.8},
        {"extend": "left=16"},
        {"compat": True},
        {"apg": "parallel=0"},
    )
]
SETS += [
    ("inpaint", "inpaint", {}),
    ("instruct", "img2img", {"image_scale": 1.2}),
    ("instruct", "img2img", {"apg": "parallel=0"}),
    ("depth", "txt2img", {"depth": "photo.png"}),
    ("depth", "txt2img", {}),
    ("upscale", "upscale", {"noise_level": 10}),
    ("sdxl", "txt2img", {"original_size": "64x48", "crop_top_left": "0,8"}),
    ("sdxl", "txt2img", {"refiner": "refiner.safetensors", "refiner_start": 0.5}),
    ("sdxl", "txt2img", {"refiner": "refiner.safetensors", "aesthetic_score": 7.0, **TRICKS}),
    ("sdxl", "txt2img", {"refiner_start": 0.5}),
    ("sdxl", "txt2img", {"aesthetic_score": 7.0}),
    ("flux_dev", "txt2img", FLOW),
    ("sd35_medium", "txt2img", FLOW),
    ("sd35_medium", "txt2img", {**FLOW, "skip_layer_scale": 0.0, "apg": "parallel=0"}),
    ("sd35_medium", "img2img", {**FLOW, "skip_layer_scale": 1.5, "guidance_rescale": 0.5}),
]


class Warnings(logging.Handler):
    """Keeps log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def write_files(folder: Path) -> None:
    """Write the miniatures, a control's networks, a photo and a list of prompts."""
    families = {"txt2img": SMALL, **toy.PICTURE_FAMILIES}
    families |= {"sdxl": small("sdxl_base"), "refiner": small("sdxl_refiner")}
    families |= {"depth": small("sd2_depth"), "upscale": toy_zoo.small("x4")}
    for name, family in families.items():
        random_checkpoint.write(folder / f"{name}.safetensors", family)
    for name in ("flux_dev", "sd35_medium"):
        toy_flow.write(folder, name)
    Image.fromarray(toy.photo()).save(folder / "photo.png")
    Image.fromarray(toy.mask()).save(folder / "mask.png")
    save_file(toy.control(SMALL.unet), folder / "net.safetensors")
    save_file(toy.adapter(), folder / "adapter.safetensors")
    (folder / "prompts.txt").write_text("a red apple\n\na green tree\n", encoding="utf-8")


def make(folder: Path, model: str, task: str, options: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """Return the digest and the text of a set's pictures, or its error, with the log."""
    if model not in loaded:
        loaded[model] = ldm_lite.load(folder / f"{model}.safetensors", device="cpu", kernels="plain")
    arguments = {"steps": 6, "seed": 3, "prompt": "a red apple", **options}
    for name in ("from_file", "depth", "refiner"):
        if name in arguments:
            arguments[name] = str(folder / arguments[name])
    if "control" in arguments:
        network, _, rest = arguments["control"].partition(":")
        file = f"{folder / network}.safetensors:{folder / 'photo.png'}"
        arguments["control"] = f"{file}:{rest}" if rest else file
    if task != "txt2img":
        arguments["image"] = folder / "photo.png"
    if task == "inpaint" and "extend" not in options:
        arguments["mask"] = folder / "mask.png"
    log, messages = logging.getLogger("ldm_lite"), Warnings()
    log.addHandler(messages)
    try:
        results = getattr(loaded[model], task)(output="result", **arguments)
        pixels = b"".join(result.pixels.numpy().tobytes() for result in results)
        answer = {"pixels": hashlib.sha256(pixels).hexdigest()[:16], "text": results[-1].parameters}
    except (ValueError, TypeError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    finally:
        log.removeHandler(messages)
    lines = {"log": messages.lines, **answer}
    cleaned: dict[str, Any] = json.loads(json.dumps(lines).replace(str(folder), "FOLDER"))
    return cleaned


def main() -> int:
    """Write the file, compare it with another, and return the exit status."""
    logging.getLogger("ldm_lite").setLevel(logging.INFO)
    torch.set_num_threads(1)
    loaded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        answers = {
            f"{model} {task} {options}": make(Path(name), model, task, options, loaded) for model, task, options in SETS
        }
    Path(sys.argv[1]).write_text(json.dumps(answers, indent=1), encoding="utf-8")
    if len(sys.argv) < 3:
        return 0
    before, other_pixels = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), 0
    for label, after in answers.items():
        for key in ("pixels", "error", "text", "log"):
            was, is_now = before.get(label, {}).get(key), after.get(key)
            if key == "text" and was is not None and is_now is not None:
                was, is_now = (sorted(text.split(", ")) for text in (was, is_now))
            if was != is_now:
                other_pixels += key == "pixels"
                print(f"{label}\n  {key}: {was}\n  now: {is_now}")
    print(f"{len(answers)} sets, {other_pixels} with other pixels")
    return int(other_pixels > 0)


if __name__ == "__main__":
    sys.exit(main())

"""AUTOMATIC1111's API: from its fields to options, ControlNets, embeddings, and what clients are told."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import torch
import toy
from PIL import Image
from safetensors.torch import save_file
from serving import Running, library_of, opened

import ldm_lite
from ldm_lite import Control
from ldm_lite.cli.task_options import InpaintOptions, Txt2imgOptions
from ldm_lite.serve.library import Library
from ldm_lite.serve.options import ServeOptions
from ldm_lite.serve.queue import Engine

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")


def inpainting(library: Library, **given: Any) -> InpaintOptions:
    from ldm_lite.serve.a1111 import routes, translation
    from ldm_lite.serve.http import encoded

    mask = Image.new("L", (32, 32))
    mask.paste(255, (4, 4, 12, 12))
    images = {"init_images": [encoded(Image.new("RGB", (32, 32), "red"))], "mask": encoded(mask)}
    state = routes.Interface(Engine(library, ServeOptions()))
    options = translation.submit(state.engine, state.settings, translation.Img2imgRequest(**images, **given))[0].options
    assert isinstance(options, InpaintOptions)
    return options


@pytest.mark.parametrize(("fill", "content"), list(enumerate(["fill", "original", "noise", "nothing"])))
def test_masked_content(library: Library, fill: int, content: str) -> None:
    assert inpainting(library, inpainting_fill=fill).masked_content == content


def test_only_masked(library: Library) -> None:
    """By default, as there, with no padding."""
    assert inpainting(library).only_masked == 0
    assert inpainting(library, inpaint_full_res=True, inpaint_full_res_padding=32).only_masked == 32
    assert inpainting(library, inpaint_full_res=False, inpaint_full_res_padding=32).only_masked is None
    assert inpainting(library).masked_content == "fill"


def test_tags_weigh_networks_and_blocks() -> None:
    from ldm_lite.adapters.strength import Strength
    from ldm_lite.serve.a1111.translation import _loras

    prompt, found = _loras("a <lora:one:0.5:lbw=OUTD>car<lyco:two:te=0.5:unet=1> <lora:three>")
    assert prompt == "a car "
    assert found == (("one", Strength(0.5, 0.5, "OUTD")), ("two", Strength(0.5, 1)), ("three", Strength()))
    with pytest.raises(ValueError, match="the LoRA 'one': got the weight 'much', expected a number"):
        _loras("<lora:one:much>")
    with pytest.raises(ValueError, match="hypernetworks are not supported"):
        _loras("a cat <hypernet:three:0.5>")


# ---- over a socket --------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"prompt": "x", "steps": 2, "seed": 3, "width": 64, "height": 64, "sampler_name": "Euler"}
TXT2IMG, IMG2IMG = "/sdapi/v1/txt2img", "/sdapi/v1/img2img"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ControlNet and a textual inversion for the miniature model."""
    path = tmp_path_factory.mktemp("files")
    (path / "controlnets").mkdir()
    save_file(toy.control(random_checkpoint.SMALL.unet), path / "controlnets/edges.safetensors")
    (path / "embeddings").mkdir()
    save_file({"emb_params": torch.ones(2, 64)}, path / "embeddings/xyzzy.safetensors")
    save_file({"emb_params": torch.ones(2, 768)}, path / "embeddings/cat.safetensors")  # of another model
    torch.save({"string_to_param": {"*": torch.ones(3, 64)}, "name": "old"}, path / "embeddings/old.pt")
    (path / "embeddings/none.pt").write_bytes(b"x")
    return path


@pytest.fixture(scope="module")
def server(small_path: Path, folder: Path) -> Iterator[Running]:
    options = {name: str(folder / name) for name in ("controlnets", "embeddings")}
    made = Running(library_of(small_path, **options), **options)
    yield made
    made.close()


def photo() -> Image.Image:
    image = Image.new("RGB", (64, 64), "red")
    image.paste("white", (16, 16, 48, 48))
    return image


def test_controlnets_as_the_extension_has_them(server: Running, folder: Path, small_path: Path) -> None:
    from ldm_lite.serve.http import encoded

    [name] = server.ask("/controlnet/model_list")[1]["model_list"]
    assert re.fullmatch(r"edges \[[0-9a-f]{8}\]", name)
    assert {"none", "canny"} <= set(server.ask("/controlnet/module_list")[1]["module_list"])
    assert server.ask("/controlnet/version")[1]["version"] > 0
    pipe = ldm_lite.load(small_path, device="cpu")
    ours = {"steps": 2, "seed": 3, "width": 64, "height": 64, "sampler": "webui Euler", "prompt_syntax": "a1111"}
    unit: dict[str, Any] = {"image": encoded(photo()), "module": "canny", "model": name, "weight": 0.8}
    unit |= {
        "guidance_start": 0.0,
        "guidance_end": 0.5,
        "threshold_a": 50,
        "control_mode": "ControlNet is more important",
    }
    control = Control(
        folder / "controlnets/edges.safetensors",
        photo(),
        weight=0.8,
        end=0.5,
        guess=True,
        preprocess="canny:50:200",
    )
    [wanted] = pipe.txt2img("x", negative_prompt="", control=[control], **ours)
    for units in (
        [unit],
        [{**unit, "image": {"image": unit["image"]}}],
        [{"enabled": False}, {**unit, "model": "edges"}],
    ):
        status, answer = server.ask(TXT2IMG, SMALL | {"alwayson_scripts": {"ControlNet": {"args": units}}})
        assert status == 200, answer
        assert opened(answer["images"][0]).tobytes() == wanted.tobytes()
    plain = server.ask(TXT2IMG, SMALL)[1]["images"][0]
    assert opened(plain).tobytes() != wanted.tobytes()
    # in img2img it follows the image to start from
    del unit["image"]
    asked = SMALL | {"init_images": [encoded(photo())], "alwayson_scripts": {"controlnet": {"args": [unit]}}}
    assert server.ask(IMG2IMG, asked)[0] == 200
    detected = server.ask(
        "/controlnet/detect", {"controlnet_module": "canny", "controlnet_input_images": [encoded(photo())]}
    )
    assert opened(detected[1]["images"][0]).convert("L").getextrema() == (0, 255)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ({"model": "edges"}, "a ControlNet has no image"),
        ({"model": "none", "image": "photo"}, "unknown ControlNet 'none': expected one of edges"),
        ({"model": "../edges", "image": "photo"}, "unknown ControlNet"),
        ({"model": "edges", "image": "photo", "module": "openpose"}, "unknown ControlNet module 'openpose'"),
        ({"model": "edges", "image": "photo", "control_mode": 1}, "got control_mode 1"),
        ({"model": "edges", "image": "photo", "guidance_start": 2}, "expected it to start before it ends"),
        ({"model": "edges", "image": "photo", "weight": "much"}, "weight: Input should be a valid number"),
        ({"model": "edges", "image": "/etc/passwd"}, "is not valid base64"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_controlnets_that_are_wrong_are_one_line(server: Running, unit: dict[str, Any], message: str) -> None:
    from ldm_lite.serve.http import encoded

    unit = unit | ({"image": encoded(photo())} if unit.get("image") == "photo" else {})
    status, got = server.refused(TXT2IMG, SMALL | {"alwayson_scripts": {"controlnet": {"args": [unit]}}})
    assert status == 422
    assert message in got
    assert server.refused("/controlnet/detect", {"controlnet_input_images": []})[0] == 422


def test_embeddings_are_used_by_name(server: Running, folder: Path, small_path: Path) -> None:
    loaded = server.ask("/sdapi/v1/embeddings")[1]["loaded"]
    assert {name: (about["vectors"], about["shape"]) for name, about in loaded.items()} == {
        "cat": (2, 768),
        "old": (3, 64),
        "xyzzy": (2, 64),
    }
    pipe = ldm_lite.load(small_path, device="cpu")
    ours = {"steps": 2, "seed": 3, "width": 64, "height": 64, "sampler": "webui Euler", "prompt_syntax": "a1111"}
    files = [str(folder / "embeddings/xyzzy.safetensors")]
    [wanted] = pipe.txt2img("a XYZZY cat", negative_prompt="", embedding=files, **ours)
    got = server.ask(TXT2IMG, SMALL | {"prompt": "a XYZZY cat"})[1]["images"][0]
    assert opened(got).tobytes() == wanted.tobytes()
    [plain] = pipe.txt2img("a XYZZY cat", negative_prompt="", **ours)
    assert plain.tobytes() != wanted.tobytes()


def test_info_is_complete_and_names_what_is_ignored(server: Running) -> None:
    asked = SMALL | {"negative_prompt": "ugly", "cfg_scale": 5, "batch_size": 2, "subseed": 9, "subseed_strength": 0.3}
    asked |= {"override_settings": {"eta_noise_seed_delta": 5, "CLIP_stop_at_last_layers": 1}, "save_images": True}
    info = json.loads(server.ask(TXT2IMG, asked)[1]["info"])
    assert info["all_negative_prompts"] == ["ugly", "ugly"]
    assert info["all_subseeds"] == [9, 10]
    assert (info["sampler_name"], info["cfg_scale"], info["clip_skip"], info["steps"]) == ("Euler", 5, 1, 2)
    assert re.fullmatch(r"\d{14}", info["job_timestamp"])
    assert re.fullmatch(r"[0-9a-f]{8}", info["sd_model_hash"])
    assert info["ignored"] == ["override_settings.eta_noise_seed_delta", "save_images"]
    info = json.loads(server.ask(TXT2IMG, {"prompt": "x", "steps": 1, "width": 32, "height": 32})[1]["info"])
    assert info["sampler_name"].startswith("DDIM")
    assert info["cfg_scale"] > 0


def test_models_have_names_with_suffix_and_hash(server: Running) -> None:
    [model] = server.ask("/sdapi/v1/sd-models")[1]
    assert model["model_name"] == "small"
    assert model["title"] == f"small.safetensors [{model['hash']}]"
    for name in ("small", "small.safetensors", model["title"]):
        asked = SMALL | {"override_settings": {"sd_model_checkpoint": name}}
        assert json.loads(server.ask(TXT2IMG, asked)[1]["info"])["sd_model_name"] == "small"
    assert server.refused(TXT2IMG, SMALL | {"override_settings": {"sd_model_checkpoint": "small [zz]"}})[0] == 422


def test_what_clients_ask_for_besides(server: Running) -> None:
    for path in ("refresh-checkpoints", "refresh-loras", "refresh-embeddings", "refresh-vae", "reload-checkpoint"):
        assert server.ask(f"/sdapi/v1/{path}", {})[0] == 200
    memory = server.ask("/sdapi/v1/memory")[1]
    assert 0 < memory["ram"]["used"] < memory["ram"]["total"]
    for path in ("hypernetworks", "sd-vae", "face-restorers", "prompt-styles"):
        assert server.ask(f"/sdapi/v1/{path}") == (200, [])


def test_settings_progress_and_interrupt_are_each_clients_own(library: Library) -> None:
    from ldm_lite.serve.a1111 import routes
    from ldm_lite.serve.queue import CLIENT

    state = routes.Interface(Engine(library, ServeOptions()))
    ticket = state.engine.submit("txt2img", Txt2imgOptions("x", steps=2, width=32, height=32))
    ticket.client = "a"
    token = CLIENT.set("a")
    try:
        state.set({"CLIP_stop_at_last_layers": 2})
        assert state.running == []  # of another interface
        state.tickets.add(ticket)
        assert state.running == [ticket]
        CLIENT.set("b")
        assert state.running == []
        assert state.settings["CLIP_stop_at_last_layers"] == 1
        CLIENT.set("a")
        assert state.settings["CLIP_stop_at_last_layers"] == 2
        ticket.cancel()
        assert state.running == []
        for number in range(2 * routes.MOST_CLIENTS):
            CLIENT.set(str(number))
            state.set({"CLIP_stop_at_last_layers": 3})
        assert len(state._settings) == routes.MOST_CLIENTS
    finally:
        CLIENT.reset(token)

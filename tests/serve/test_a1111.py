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
import toy_flow
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


def inpainting(library: Library, **fields: Any) -> InpaintOptions:
    from ldm_lite.serve.a1111 import routes, translation
    from ldm_lite.serve.http import encoded

    mask = Image.new("L", (32, 32))
    mask.paste(255, (4, 4, 12, 12))
    images = {"init_images": [encoded(Image.new("RGB", (32, 32), "red"))], "mask": encoded(mask)}
    state = routes.Interface(Engine(library, ServeOptions()))
    request = translation.Img2imgRequest(**images, **fields)
    options = translation.submit(state.engine, state.settings, request)[0].options
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
    for fixed in (False, True):
        assert inpainting(library, override_settings={"img2img_fix_steps": fixed}).exact_steps is fixed


def test_tags_weigh_networks_and_blocks() -> None:
    from ldm_lite.adapters.strength import Strength
    from ldm_lite.serve.a1111.translation import _loras

    prompt, loras = _loras("a <lora:one:0.5:lbw=OUTD>car<lyco:two:te=0.5:unet=1> <lora:three>")
    assert prompt == "a car "
    assert loras == (("one", Strength(0.5, 0.5, "OUTD")), ("two", Strength(0.5, 1)), ("three", Strength()))
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
    save_file({"emb_params": torch.ones(2, 64)}, path / "embeddings/Xyzzy.safetensors")
    save_file({"emb_params": torch.ones(2, 768)}, path / "embeddings/cat.safetensors")  # of another model
    torch.save({"string_to_param": {"*": torch.ones(3, 64)}, "name": "old"}, path / "embeddings/old.pt")
    (path / "embeddings/none.pt").write_bytes(b"x")
    return path


@pytest.fixture(scope="module")
def server(small_path: Path, folder: Path) -> Iterator[Running]:
    options = {name: str(folder / name) for name in ("controlnets", "embeddings")}
    running = Running(library_of(small_path, **options), **options)
    yield running
    running.close()


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


def test_a_controlnets_mask_is_transparent_and_a_threshold_may_be_0(server: Running) -> None:
    from ldm_lite.serve.a1111.controlnet import Unit, controls
    from ldm_lite.serve.http import encoded

    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 32, 64))
    pictures = {"model": "edges", "image": encoded(photo()), "mask": encoded(mask)}
    asked = [Unit(module="inpaint", **pictures), Unit(module="canny", threshold_a=0, **pictures)]
    masked, edges = controls(server.engine, asked, (64, 64), None, None)
    assert [masked.image.getpixel((x, 0))[3] for x in (0, 63)] == [0, 255]
    assert (masked.preprocess, edges.preprocess) == ("inpaint", "canny:0:200")


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


def test_embeddings_are_used_by_name(
    server: Running, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = server.ask("/sdapi/v1/embeddings")[1]["loaded"]
    assert {name: (about["vectors"], about["shape"]) for name, about in loaded.items()} == {
        "cat": (2, 768),
        "old": (3, 64),
        "Xyzzy": (2, 64),
    }
    pipe = ldm_lite.load(small_path, device="cpu")
    ours = {"steps": 2, "seed": 3, "width": 64, "height": 64, "sampler": "webui Euler", "prompt_syntax": "a1111"}
    files = [str(folder / "embeddings/Xyzzy.safetensors")]
    [wanted] = pipe.txt2img("a XYZZY cat", negative_prompt="", embedding=files, **ours)
    got = server.ask(TXT2IMG, SMALL | {"prompt": "a XYZZY cat"})[1]["images"][0]
    assert opened(got).tobytes() == wanted.tobytes()
    [plain] = pipe.txt2img("a XYZZY cat", negative_prompt="", **ours)
    assert plain.tobytes() != wanted.tobytes()
    library, two = server.engine.library, server.engine.library.facts(None)._replace(widths={64, 1280})
    monkeypatch.setattr(library, "facts", lambda model: two)
    assert library.embeddings_in(["a xyzzy cat"], None) == ()  # it lacks the vectors of the second text encoder


def test_info_is_complete_and_names_what_is_ignored(server: Running) -> None:
    asked = SMALL | {"negative_prompt": "ugly", "cfg_scale": 5, "batch_size": 2, "subseed": 9, "subseed_strength": 0.3}
    asked |= {"override_settings": {"samples_format": "png", "CLIP_stop_at_last_layers": 1}, "save_images": True}
    info = json.loads(server.ask(TXT2IMG, asked)[1]["info"])
    assert info["all_negative_prompts"] == ["ugly", "ugly"]
    assert info["all_subseeds"] == [9, 10]
    assert (info["sampler_name"], info["cfg_scale"], info["clip_skip"], info["steps"]) == ("Euler", 5, 1, 2)
    assert re.fullmatch(r"\d{14}", info["job_timestamp"])
    assert re.fullmatch(r"[0-9a-f]{8}", info["sd_model_hash"])
    assert info["ignored"] == ["override_settings.samples_format", "save_images"]
    info = json.loads(server.ask(TXT2IMG, {"prompt": "x", "steps": 1, "width": 32, "height": 32})[1]["info"])
    assert info["sampler_name"].startswith("DDIM")
    assert info["cfg_scale"] > 0


def test_fields_that_would_change_the_image_are_refused_by_name(server: Running) -> None:
    """At the values at which they do nothing they are taken, as by clients that send all fields there are."""
    from ldm_lite.serve.a1111.translation import NEUTRAL, NEUTRAL_SETTINGS
    from ldm_lite.serve.http import encoded

    nothing = {name: values[0] for name, values in NEUTRAL.items()}
    settings = {name: values[0] for name, values in NEUTRAL_SETTINGS.items()}
    whole = SMALL | nothing | {"override_settings": settings, "refiner_switch_at": 0.8, "width": 32, "height": 32}
    null = dict.fromkeys(("scheduler", "eta", "batch_size", "styles", "mask_blur", "image_cfg_scale", "n_iter"))
    scripts = {"ADetailer": {"args": [False, {}]}, "controlnet": {"args": []}}
    for path, asked in ((TXT2IMG, {}), (IMG2IMG, {"init_images": [encoded(photo())], "mask_blur_x": 8})):
        status, answer = server.ask(path, {**whole, **null, **asked, "alwayson_scripts": scripts})
        assert status == 200, answer
        ignored = json.loads(answer["info"])["ignored"]  # there is no second pass
        assert ignored == ["hr_additional_modules", "hr_checkpoint_name", "refiner_switch_at"]
    asked = SMALL | {"init_images": [encoded(photo())], "image_cfg_scale": 1.5}  # of InstructPix2Pix
    assert json.loads(server.ask(IMG2IMG, asked)[1]["info"])["ignored"] == ["image_cfg_scale"]
    second = {"enable_hr": True, "cfg_scale": 5.0, "hr_cfg": 5.0, "hr_upscaler": "Latent", "hr_scale": 1.0}
    assert server.ask(TXT2IMG, SMALL | nothing | second)[0] == 200
    for name in NEUTRAL:
        needs = {"enable_hr": True} if name.startswith("hr_") else {}
        status, message = server.refused(IMG2IMG if name == "enable_hr" else TXT2IMG, SMALL | needs | {name: "other"})
        assert (status, name in message) == (422, True), message
    for name in NEUTRAL_SETTINGS:
        status, message = server.refused(TXT2IMG, SMALL | {"override_settings": {name: "other"}})
        assert (status, name in message) == (422, True), message
        assert server.refused("/sdapi/v1/options", {name: "other"}) == (422, message)
    message = server.refused(TXT2IMG, SMALL | second | {"hr_cfg": 2})[1]
    assert message == "hr_cfg is not supported: leave it out, or give 5.0"
    blur = {"init_images": [encoded(photo())], "mask": encoded(photo()), "mask_blur_x": 1, "mask_blur_y": 2}
    assert "give mask_blur" in server.refused(IMG2IMG, SMALL | blur)[1]
    assert "ADetailer" in server.refused(TXT2IMG, SMALL | {"alwayson_scripts": {"ADetailer": {"args": [True]}}})[1]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"eta_noise_seed_delta": 31337}, {"ensd": 31337}),
        ({"eta_ancestral": 0.5, "eta_ddim": 0.1}, {"eta": 0.5}),
        ({"rho": 5, "sigma_max": 9.5, "sigma_min": 0.2}, {"spacing": "karras:rho=5.0:sigma_min=0.2:sigma_max=9.5"}),
        ({"always_discard_next_to_last_sigma": True}, {"spacing": "karras:discard"}),
        ({"randn_source": "NV"}, {"noise": "a1111"}),
        ({"randn_source": "GPU"}, {"noise": "a1111"}),
        ({"randn_source": "CPU", "rho": None}, {}),
    ],
    ids=str,
)
def test_settings_that_change_the_image(
    server: Running, small_path: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    ours = {"steps": 4, "seed": 3, "width": 32, "height": 32, "prompt_syntax": "a1111", "negative_prompt": ""}
    asked = {"prompt": "x", "steps": 4, "seed": 3, "width": 32, "height": 32, "sampler_name": "Euler a"}
    asked |= {"scheduler": "Karras"}
    [wanted] = pipe.txt2img("x", sampler="euler_a", **{"spacing": "karras", **ours, **options})
    status, answer = server.ask(TXT2IMG, asked | {"override_settings": settings})
    assert status == 200, answer
    assert opened(answer["images"][0]).tobytes() == wanted.tobytes()
    if options:
        assert opened(server.ask(TXT2IMG, asked)[1]["images"][0]).tobytes() != wanted.tobytes()
    # kept, they are those of the client's next requests
    before = {name: value for name, value in server.ask("/sdapi/v1/options")[1].items() if name in settings}
    assert server.ask("/sdapi/v1/options", settings)[0] == 200
    assert opened(server.ask(TXT2IMG, asked)[1]["images"][0]).tobytes() == wanted.tobytes()
    assert server.ask("/sdapi/v1/options", before) == (200, None)


def test_options_keep_what_they_know_and_name_the_rest(server: Running) -> None:
    options = server.ask("/sdapi/v1/options")[1]
    assert re.fullmatch(r"small.safetensors \[[0-9a-f]{8}\]", options["sd_model_checkpoint"])
    assert f"[{options['sd_checkpoint_hash']}]" in options["sd_model_checkpoint"]
    sent = options | {"CLIP_stop_at_last_layers": 2, "samples_format": "png", "sd_vae": "Automatic"}
    assert server.ask("/sdapi/v1/options", sent) == (200, {"ignored": ["samples_format"]})
    assert server.ask("/sdapi/v1/options")[1] == options | {"CLIP_stop_at_last_layers": 2}
    assert server.ask("/sdapi/v1/options", options) == (200, None)
    for name, wrong in (("CLIP_stop_at_last_layers", 0), ("sd_model_checkpoint", "no"), ("eta_ddim", "x"), ("rho", [])):
        assert server.refused("/sdapi/v1/options", {"s_churn": 3, name: wrong})[0] == 422
        assert server.ask("/sdapi/v1/options")[1] == options


@pytest.mark.parametrize(
    ("asked", "scale"),
    [
        ({"cfg_scale": 1, "distilled_cfg_scale": 3.5}, 3.5),
        ({"cfg_scale": 1, "distilled_cfg_scale": 2.0, "hr_distilled_cfg": 9, "hr_cfg": 1}, 2.0),
        ({"distilled_cfg_scale": 2.0}, 2.0),
        ({"cfg_scale": 1}, None),  # no guidance besides what is distilled
        ({"cfg_scale": 2.0}, 2.0),
        ({}, None),
    ],
    ids=str,
)
def test_forges_requests_for_flux(asked: dict[str, Any], scale: float | None, tmp_path: Path, small_path: Path) -> None:
    """Of a model that was never loaded, too; other networks do not read a scale."""
    from ldm_lite.serve.a1111.translation import Txt2imgRequest, WebuiSettings, submit
    from ldm_lite.serve.http import Refused

    toy_flow.write(tmp_path, "flux_dev")
    engine = Engine(library_of(small_path, models=str(tmp_path)), ServeOptions())
    request = Txt2imgRequest(prompt="x", width=32, height=32, steps=1, **asked)
    ticket, ignored = submit(engine, WebuiSettings(sd_model_checkpoint="flux_dev"), request)
    assert (ticket.options.scale, {*ignored}) == (scale, {name for name in asked if name.startswith("hr_")})
    ticket, ignored = submit(engine, WebuiSettings(), request)
    assert ticket.options.scale == asked.get("cfg_scale")
    assert ("distilled_cfg_scale" in ignored) == ("distilled_cfg_scale" in asked)
    both = Txt2imgRequest(prompt="x", cfg_scale=2.0, distilled_cfg_scale=3.5)
    with pytest.raises(Refused, match="the network reads one scale: give 1 as cfg_scale"):
        submit(engine, WebuiSettings(sd_model_checkpoint="flux_dev"), both)


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
    for path in ("hypernetworks", "sd-vae", "sd-modules", "face-restorers", "prompt-styles", "script-info"):
        assert server.ask(f"/sdapi/v1/{path}") == (200, [])
    assert [about["name"] for about in server.ask("/sdapi/v1/extensions")[1]] == ["sd-webui-controlnet"]
    types = server.ask("/controlnet/control_types")[1]["control_types"]
    assert types["All"]["model_list"][0] == "None"
    assert types["All"]["default_model"].startswith("edges [")
    assert types["Canny"]["default_option"] == "canny"
    assert types["Inpaint"]["model_list"] == ["None"]
    assert server.ask("/controlnet/settings")[1]["control_net_unit_count"] == server.options.max_branches - 1
    status, message = server.refused("/sdapi/v1/interrogate", {"image": "", "model": "clip"})
    assert (status, "interrogate" in message) == (501, True)


def test_settings_progress_and_interrupt_are_each_clients_own(library: Library) -> None:
    from ldm_lite.serve.a1111 import routes
    from ldm_lite.serve.ledger import CLIENT

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
        assert state.settings.CLIP_stop_at_last_layers == 1
        CLIENT.set("a")
        assert state.settings.CLIP_stop_at_last_layers == 2
        ticket.cancel()
        assert state.running == []
        for number in range(2 * routes.MOST_CLIENTS):
            CLIENT.set(str(number))
            state.set({"CLIP_stop_at_last_layers": 3})
        assert len(state._settings) == routes.MOST_CLIENTS
        assert state.settings.CLIP_stop_at_last_layers == 3  # the oldest are forgotten, not the last
    finally:
        CLIENT.reset(token)

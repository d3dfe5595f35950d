"""The form: from its values to requests and back, without a browser."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import engine_of, library_of

pytestmark = pytest.mark.extra
pytest.importorskip("fastapi")
pytest.importorskip("multipart")


@pytest.fixture
def engine(library: Any) -> Any:
    return engine_of(library)


def picture(size: int = 8) -> str:
    file = io.BytesIO()
    Image.new("RGB", (size, size), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def read(engine: Any, **values: Any) -> Any:
    from ldm_lite.serve import form

    return form.read_form({"task": "txt2img", "prompt": "a cat", "seed": "3", "steps": "5"} | values, engine)


def test_values_become_options(engine: Any) -> None:
    work = read(engine, scale="2.5", batch_size="2", sampler="euler", width="", strength="0.5", tile="64")
    (request,) = work.requests
    assert not work.is_plot
    assert (request.options.steps, request.options.scale, request.options.batch_size) == (5, 2.5, 2)
    assert (request.options.sampler, request.options.width, request.options.seed) == ("euler", None, 3)
    assert read(engine, steps=5, scale=2.5).requests[0].options.scale == 2.5  # numbers, too
    seeds = {read(engine, seed=seed).requests[0].options.seed for seed in ("", "-1", "-1 ", None)}
    assert len(seeds) == 4
    second = read(engine, hires="1.5", hires_steps="3", hires_upscaler="Lanczos").requests[0].options
    assert (second.hires, second.hires_steps, second.hires_upscaler) == (1.5, 3, "Lanczos")
    assert read(engine, task="img2img", init_img=picture(), hires="2").requests[0].options.hires is None
    options = read(engine, task="inpaint", init_img=picture(), mask=picture(), feather="4").requests[0].options
    assert options.init_img[0].size == (8, 8)
    assert read(engine, task="inpaint", init_img=picture(), extend="left=8").requests[0].options.mask == ()


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"steps": "1e3"}, "steps", "expected a whole number"),
        ({"steps": "0"}, "steps", "expected 1 to 1000"),
        ({"scale": "inf"}, "scale", "finite number"),
        ({"seed": "9" * 21}, "seed", "expected a whole number"),
        ({"seed": "18446744073709551616"}, "seed", "expected -1 to 18446744073709551615"),
        ({"batch_size": "two"}, "batch_size", "'two'"),
        ({"stepz": "2"}, "stepz", "unknown field"),
        ({"from_file": "/etc/passwd"}, "from_file", "unknown field"),
        ({"model": "other"}, "model", "unknown model"),
        ({"loras": [{"name": "none", "weight": 1}]}, "loras", "unknown LoRA"),
        ({"loras": [{"name": "one", "weight": "much"}]}, "loras", "much"),
        ({"task": "img2img"}, "init_img", "give an image"),
        ({"task": "img2img", "init_img": "data:image/png;base64,!!"}, "init_img", "base64"),
        ({"task": "img2img", "init_img": "/etc/passwd"}, "init_img", "base64|image"),
        ({"task": "inpaint", "init_img": picture()}, "mask", "give a mask"),
        ({"control": {"name": "../x"}}, "image", "give an image for the ControlNet"),
        ({"control": {"name": "../x", "image": picture()}}, "control", "unknown ControlNet"),
        ({"x": {"option": "from_file", "values": "/etc/passwd"}}, "x", "as an axis"),
        ({"y": {"option": "control", "values": "a:b"}}, "y", "as an axis"),
        ({"x": {"option": "batch_size", "values": "1, 2"}}, "x", "as an axis"),
        ({"x": {"option": "model", "values": "other"}}, "x", "unknown model"),
        ({"x": {"option": "lora_weight", "values": "1, 2"}}, "x", "no LoRA is chosen"),
        ({"y": {"option": "steps", "values": ""}}, "y", "no values"),
        ({"hires": "0.5"}, "hires", "`hires`"),
        ({"hires_upscaler": ["Latent"]}, "hires_upscaler", "expected a text"),
        ({"prompt": "a" * 5000, "x": {"option": "replace", "values": "a," + "b" * 5000}}, "x", "5000 places"),
    ],
)
def test_wrong_values_are_one_line_about_their_field(
    engine: Any, fields: dict[str, Any], field: str, message: str
) -> None:
    from ldm_lite.serve.http import Refused, field_of

    usual = {"weight": 1.0, "start": 0.0, "end": 1.0, "preprocess": "none"}
    fields = {name: usual | value if name == "control" else value for name, value in fields.items()}
    with pytest.raises((Refused, ValueError, TypeError), match=message) as caught:
        read(engine, **fields)
    assert "\n" not in str(caught.value)
    assert field_of(caught.value) == field


def test_a_plot_has_a_request_for_each_cell(small_path: Path, tmp_path: Path) -> None:
    from ldm_lite.serve import form

    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    engine = engine_of(library_of(small_path, loras=str(tmp_path)))
    loras = [{"name": "one", "weight": 1.0}, {"name": "two", "weight": "0.5"}]
    axes = {"x": {"option": "lora_weight", "values": "0-1 [3]"}, "y": {"option": "steps", "values": "2, 4"}}
    work = read(engine, batch_size="4", loras=loras, **axes)
    assert work.is_plot
    assert [request.options.steps for request in work.requests] == [2, 2, 2, 4, 4, 4]
    assert [request.loras[1] for request in work.requests][:3] == [("two", 0.0), ("two", 0.5), ("two", 1.0)]
    assert {request.options.batch_size for request in work.requests} == {1}
    assert len({request.options.seed for request in work.requests}) == 1
    merged = read(engine, loras=loras).requests[0].loras
    assert [(name, weight.unet) for name, weight in merged] == [("one", 1.0), ("two", 0.5)]
    files = {"from_file", "wildcards", "embedding", "refiner", "depth", "control", "init_img", "mask", "indir"}
    assert not files & {name for task in form.TASKS for name in (*form.axes(task), *form.fields())}


def test_the_settings_of_another_picture_reset_the_form(engine: Any) -> None:
    from ldm_lite.serve import form

    image = Image.new("RGB", (8, 8))
    image.info["parameters"] = (
        "a cat\nSteps: 7, Sampler: Euler, CFG scale: 7, Seed: 1, Model: x, Denoising strength: 0.3"
    )
    values, text, _ = form.settings(image)
    assert text == image.info["parameters"]
    assert (values["steps"], values["scale"], values["strength"], values["model"]) == ("7", "7", "0.3", "x")
    assert (values["eta"], values["hires"], values["clip_skip"], values["negative_prompt"]) == ("", "", "1", "")
    options = read(engine, **{name: value for name, value in values.items() if name != "model"}).requests[0].options
    assert (options.steps, options.eta, options.clip_skip) == (7, None, 1)
    image.info["parameters"] = "a cat\nSteps: 7, Sampler: Euler, Seed: 1, Denoising strength: 0.3, Hires upscale: 2"
    values, _, remarks = form.settings(image)  # a second pass, to which the strength belongs
    assert (values["hires"], values["hires_strength"], values.get("strength"), remarks) == ("2", "0.3", None, [])
    image.info["parameters"] = "a cat\nSteps: 7, Sampler: Euler, Tiling: True"
    values, _, remarks = form.settings(image)
    assert "ignored settings: Tiling" in remarks[0]
    assert "seed" not in values


def test_a_second_pass_may_use_a_network_of_the_server(small_path: Path, tmp_path: Path) -> None:
    import esrgan
    import torch

    from ldm_lite.serve import form

    torch.save({"params": esrgan.weights(2)}, tmp_path / "x2net.pth")
    engine = engine_of(library_of(small_path, upscalers=str(tmp_path)))
    [field] = [field for field in form.described(engine)["fields"] if field["name"] == "hires_upscaler"]
    assert {"Latent", "Lanczos", "x2net"} <= set(field["choices"])
    options = read(engine, hires="2", hires_upscaler="x2net").requests[0].options
    assert options.hires_esrgan == engine.library.upscaler("x2net")
    assert read(engine, hires="2", hires_upscaler="Lanczos").requests[0].options.hires_esrgan is None


def test_a_model_that_follows_instructions_starts_from_noise(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ldm_lite.serve import form

    assert form.described(engine)["usual"]["strength"] == "0.75"
    instruct = engine.library.facts(None)._replace(tasks=("img2img",))
    monkeypatch.setattr(engine.library, "facts", lambda name: instruct)
    assert form.described(engine)["usual"]["strength"] == "1"


def test_fields_are_described_as_the_options_are_declared(engine: Any) -> None:
    import dataclasses

    from ldm_lite.cli.task_options import InpaintOptions, Txt2imgOptions
    from ldm_lite.serve import form

    about = form.described(engine)
    fields = {field["name"]: field for field in about["fields"]}
    declared = {field.name: field for kind in (Txt2imgOptions, InpaintOptions) for field in dataclasses.fields(kind)}
    for name in ("steps", "sampler", "feather", "brownian", "regions"):
        assert fields[name]["help"] == declared[name].metadata["help"]
    assert fields["steps"]["within"] == ["1", str(engine.limits.max_steps)]  # of the server
    assert fields["batch_size"]["within"] == ["1", str(engine.limits.max_images)]
    assert fields["brownian"]["kind"] == "flag"
    assert fields["feather"]["tasks"] == ["inpaint"]
    assert list(fields["masked_content"]["choices"]) == ["original", "fill", "noise", "nothing"]
    assert not fields["masked_content"]["is_open"]
    assert fields["sampler"]["choices"]["dpmpp_2m"] == "DPM++ 2M"
    assert fields["sampler"]["is_open"]  # other names, too
    assert (fields["ensd"]["title"], fields["clip_skip"]["title"]) == ("ENSD", "Clip skip")
    assert fields["freeu"]["group"] == "Fewer network calls, for nearly the same picture"
    groups = list(dict.fromkeys(field["group"] for field in about["fields"]))
    assert groups[0] == "What to make"  # in the order of --help
    assert groups.index("How to sample") < groups.index("Fewer network calls, for nearly the same picture")
    assert about["models"] == ["small"]
    assert (about["examples"], about["understands"]) == ([], "")
    bundled = form.described(engine_of(library_of()))  # whose file lists what it was trained on
    assert bundled["examples"][:3] == ["red apple", "cat", "red car"]
    assert re.match(r"This model draws \d{3} things: red apple, cat, ", bundled["understands"])
    assert bundled["usual"]["steps"] == "20"


def test_options_of_a_feature_of_ones_own_are_fields(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ldm_lite.core import features
    from ldm_lite.serve import form

    monkeypatch.setattr(features, "FEATURES", dict(features.FEATURES))
    monkeypatch.setattr(form, "fields", form.fields.__wrapped__)  # which a server calls after its features are known
    path = tmp_path / "glow.py"
    path.write_text(
        "from ldm_lite.core.features import Feature, option, register_feature\n\n\n"
        "@register_feature\nclass Glow(Feature):\n"
        '    """Light around things."""\n\n'
        '    glow: float = option(0.0, "how much", within=(0, 9), png="Glow")\n',
        encoding="utf-8",
    )
    features.import_file(path)
    [about] = [field for field in form.described(engine)["fields"] if field["name"] == "glow"]
    assert (about["kind"], about["within"], about["group"]) == ("number", ["0", "9"], "Light around things")
    assert "glow" in form.axes("img2img")
    (request,) = read(engine, glow="1.5").requests
    assert [feature.glow for feature in request.options.features] == [1.5]
    with pytest.raises(ValueError, match=r"got `glow` 10.0, expected 0 to 9"):
        read(engine, glow="10")
    image = Image.new("RGB", (8, 8))
    image.info["parameters"] = "a cat\nSteps: 5, Glow: 2.5, Version: ldm_lite 0.1"
    assert form.settings(image)[0]["glow"] == "2.5"

"""The facade for tools: what they build on it makes the pipeline's images, and its files are read back."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import ldm_lite
from ldm_lite import networks, toolkit
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.task_options import Img2imgOptions, InpaintOptions, Txt2imgOptions
from ldm_lite.toolkit import Batch, PreparedRow, Sample

SMALL: dict[str, Any] = {"steps": 3, "width": 32, "height": 32}


@pytest.fixture(scope="module")
def model(small_path: Path) -> ldm_lite.Pipeline:
    return toolkit.load_model(LoadOptions(ckpt=small_path, device="cpu"))


def run(samples: Sequence[Sample]) -> list[np.ndarray]:
    """The images of samples that go together."""
    batch = Batch(samples)
    steps = [state.step for state in batch]
    assert steps == list(range(1, batch.num_steps + 1))
    return [sample.finish(batch.latents[i : i + 1]).array.astype(int) for i, sample in enumerate(samples)]


def assert_close(images: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    """Kernels may add in another order in another batch."""
    assert len(images) == len(wanted)
    for image, expected in zip(images, wanted, strict=True):
        assert np.abs(image - expected).max() <= 1


def test_the_example_of_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    [image] = names["model"].txt2img("a red apple", seed=1, steps=4)
    assert names["result"].parameters == image.info["parameters"]
    assert np.array_equal(names["result"].image, image)


def test_samples_of_two_requests_in_one_batch(model: ldm_lite.Pipeline) -> None:
    two = Txt2imgOptions("a cat", seed=5, batch_size=2, **SMALL)
    single = Txt2imgOptions("a dog", negative_prompt="red", seed=9, **SMALL)
    samples = [*toolkit.prepare(model, two), *toolkit.prepare(model, single)]
    assert toolkit.estimate_cost(two, 50).images == 2
    assert [(sample.number, sample.size) for sample in samples] == [(0, (32, 32)), (1, (32, 32)), (0, (32, 32))]
    assert all(samples[0].can_batch_with(sample) for sample in samples)
    wanted = model.txt2img("a cat", seed=5, batch_size=2, output="numpy", **SMALL)
    wanted += model.txt2img("a dog", negative_prompt="red", seed=9, output="numpy", **SMALL)
    assert_close(run(samples), wanted)
    [slower] = toolkit.prepare(model, Txt2imgOptions("a cat", **{**SMALL, "steps": 4}))
    assert not samples[0].can_batch_with(slower)


def test_samples_from_a_number_on(model: ldm_lite.Pipeline) -> None:
    """Nothing is read for those before it."""
    images = (Image.new("RGB", (32, 32), "red"), Image.new("RGB", (40, 32), "blue"))
    options = Img2imgOptions(["a", "b"], init_img=images, strength=0.5, steps=4)
    whole = list(toolkit.prepare(model, options))
    rest = list(toolkit.prepare(model, options, first=3))
    assert [sample.number for sample in whole] == [0, 1, 2, 3]
    assert [sample.size for sample in whole] == [(32, 32), (32, 32), (40, 32), (40, 32)]
    assert [sample.number for sample in rest] == [3]
    assert np.array_equal(run(rest)[0], run(whole[3:])[0])


def test_strength_0_has_no_steps(model: ldm_lite.Pipeline) -> None:
    image = Image.new("RGB", (32, 32), "red")
    [sample] = toolkit.prepare(model, Img2imgOptions("a cat", init_img=(image,), strength=0.0))
    assert Batch([sample]).num_steps == 0
    assert_close(run([sample]), model.img2img("a cat", image, strength=0.0, output="numpy"))


def test_leaving_a_batch_keeps_the_latents_of_the_step(model: ldm_lite.Pipeline) -> None:
    [sample] = toolkit.prepare(model, Txt2imgOptions("a cat", **SMALL))
    batch = Batch([sample])
    for state in batch:
        if state.step == 2:
            break
    assert torch.equal(batch.latents, state.latents)
    states = list(model.stream("a cat", **SMALL))
    assert torch.equal(batch.latents, states[1].latents)


def test_rows_are_what_single_runs_make(model: ldm_lite.Pipeline, tmp_path: Path) -> None:
    rows = [PreparedRow("a cat", None, 3), PreparedRow("a dog", "red", 7), PreparedRow("a cat", "blue", 7)]
    samples = list(toolkit.prepare_rows(model, Txt2imgOptions(**SMALL), rows))
    single = {"output": "numpy", **SMALL}
    wanted = [
        model.txt2img(row.prompt, negative_prompt=row.negative_prompt, seed=row.seed, **single)[0] for row in rows
    ]
    assert_close(run(samples), wanted)
    assert samples[1].settings["Steps"] == 3

    regions = {"regions": "0,0,0.5,1; 0.5,0,1,1", **SMALL}
    samples = list(toolkit.prepare_rows(model, Txt2imgOptions(**regions), [PreparedRow("a cat AND a dog", "red", 3)]))
    assert_close(
        run(samples), model.txt2img("a cat AND a dog", negative_prompt="red", seed=3, **regions, output="numpy")
    )

    for name, color in (("a", "red"), ("b", "green")):
        Image.new("RGB", (40, 32), color).save(tmp_path / f"{name}.png")
    Image.new("L", (40, 32), 255).save(tmp_path / "m.png")
    image, mask, none = (str(tmp_path / f"{name}.png") for name in ("a", "m", "none"))
    rows = [
        PreparedRow("a cat", None, 3, (image, mask)),
        PreparedRow("a dog", None, 4, (str(tmp_path / "b.png"), mask)),
    ]
    samples = list(toolkit.prepare_rows(model, InpaintOptions(strength=0.5, steps=4), rows))
    assert {sample.size for sample in samples} == {(40, 32)}
    single = {"strength": 0.5, "steps": 4, "output": "numpy"}
    wanted = [model.inpaint(row.prompt, *row.files, seed=row.seed, **single)[0] for row in rows]
    assert_close(run(samples), wanted)
    with pytest.raises(FileNotFoundError):
        toolkit.prepare_rows(model, Img2imgOptions(strength=0.5), [PreparedRow("a cat", None, 3, (none,))])


def test_which_texts_share_a_batch(model: ldm_lite.Pipeline) -> None:
    long = " ".join(["word"] * 90)
    assert toolkit.text_length(model, ("a cat", None), "plain") == 1
    assert toolkit.text_length(model, ("a cat", long), "a1111") == 2
    assert toolkit.text_length(model, ("[a cat|a dog]", None), "a1111") is None
    assert toolkit.text_length(model, ("[a cat|a dog]", None), "plain") == 1
    with pytest.raises(ValueError, match="30,000 characters"):
        toolkit.text_length(model, ("x" * 30_000, None), "plain")


def test_a_checkpoint_is_read_back(model: ldm_lite.Pipeline, tmp_path: Path) -> None:
    weights = {role: network.state_dict() for role, network in model.networks.items()}
    tensors, metadata = networks.checkpoint_content(model, weights)
    save_file(tensors, tmp_path / "whole.safetensors", metadata)
    tensors, _ = networks.checkpoint_content(model, {"vae": weights["vae"]})
    save_file(tensors, tmp_path / "vae.safetensors")
    again = ldm_lite.load(tmp_path / "whole.safetensors", vae=tmp_path / "vae.safetensors", device="cpu")
    assert again.family == model.family
    for role, network in again.networks.items():
        for key, value in network.state_dict().items():
            assert torch.equal(value, weights[role][key].half().float())
    assert networks.digest(model.unet) == networks.digest(model.unet)
    assert networks.digest(model.unet) != networks.digest(again.unet)  # which is rounded


def test_captions_are_read_as_prompts_are(model: ldm_lite.Pipeline) -> None:
    captions = ["a cat", None, "a dog"]
    text = networks.encode_captions(model, captions, with_gradients=True)
    assert text["context"].grad_fn is None  # weights come frozen
    inputs = networks.network_inputs(model, text)
    assert inputs.keys() == {"context"}
    wanted = model.encode_prompt(["a cat", "", "a dog"]).context
    torch.testing.assert_close(inputs["context"], wanted)

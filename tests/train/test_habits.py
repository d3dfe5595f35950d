"""What people bring from kohya's scripts: repeats, mirrored images, shuffled captions, LoRAs of convolutions."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_flow
from PIL import ExifTags, Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from training import load_options, options, train

import ldm_lite
from ldm_lite.cli.options import LoadOptions
from ldm_lite.train import encoded
from ldm_lite.train.additions import LoRA
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.data import divided, in_buckets, nearest, open_folder
from ldm_lite.train.losses import DiffusionLoss
from ldm_lite.train.options import TrainOptions, check, with_config
from ldm_lite.train.trainer import shuffle

ONE: dict[str, Any] = {"lora_rank": 2, "steps": 1, "sample_every": 0}


@pytest.fixture
def habits(tmp_path: Path) -> Path:
    """kohya's folders: 3_sks dog of two images, and one image that is no repeat, beside and deeper."""
    random, root = np.random.default_rng(0), tmp_path / "habits"
    for name in ("3_sks dog/a", "3_sks dog/b", "plain/c", "plain/2_deep/d"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(root / f"{name}.png")
    (root / "3_sks dog" / "b.caption").write_text("a dog, sitting\n")
    for name in ("plain/c", "plain/2_deep/d"):
        (root / f"{name}.txt").write_text("c")
    return root


def test_folders_with_repeats_and_captions(habits: Path) -> None:
    images = open_folder(habits, 8)
    assert [caption for _, caption in images.items] == ["sks dog", "a dog, sitting", "c", "c"]
    assert [images.repeats(i) for i in range(4)] == [3, 3, 1, 1]
    learned, measured = divided(images, images, None, 0)
    assert measured is None
    assert sorted(learned.indices) == [0, 0, 0, 1, 1, 1, 2, 3]  # type: ignore[attr-defined]
    learned, measured = divided(images, images, 0.99, 0)
    assert measured is not None
    assert sum(measured.shards or ()) == 3, "one image is learned, however large the share"
    assert open_folder(habits, 8, "it").items[0][1] == "it", "`caption` comes before the folder's name"


@pytest.mark.parametrize("buckets", [False, True])
def test_an_image_that_is_held_out_is_not_learned_as_a_copy(habits: Path, buckets: bool) -> None:
    """Neither mirrored nor repeated; and what is learned has both."""
    images: Any = replace(open_folder(habits, 64), flip=True)
    assert images.shards == (8,)
    for i in range(4):
        assert torch.equal(images.example(i).pixels.flip(-1), images.example(i + 4).pixels)
    images = in_buckets(images, 8) if buckets else images
    for seed in range(6):
        learned, measured = divided(images, images, 0.5, seed)
        assert measured is not None
        kinds = [[set(), set()], [set(), set()]]  # type: ignore[var-annotated]
        for dataset, (names, mirrored) in zip((learned, measured), kinds, strict=True):
            for i in range(sum(dataset.shards or ())):
                pixels = dataset.example(i).pixels
                names.add(min(pixels.numpy().tobytes(), pixels.flip(-1).numpy().tobytes()))
                mirrored.add(pixels.numpy().tobytes())
        assert len(kinds[0][0]) == len(kinds[1][0]) == 2
        assert not kinds[0][0] & kinds[1][0]
        assert len(kinds[0][1]) == 4
        assert len(kinds[1][1]) == 2
        times = [2 * (3 if "dog" in dataset.example(0).caption else 1) for dataset in (learned,)]
        assert sum(learned.shards or ()) >= times[0]


def test_a_run_learns_mirrored_and_repeated_latents(habits: Path, small_path: Path, tmp_path: Path) -> None:
    train_options = options(habits, tmp_path / "run", **ONE | {"epochs": 1.9, "steps": None, "flip": True})
    train(train_options, load_options(small_path))
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == 16, (
        "1.9 epochs of 16 in batches of 2, rounded up"
    )
    assert encoded.open_encoded(tmp_path / "run" / "latents").shards == (8,)
    again, load = with_config(TrainOptions(config=os.fspath(tmp_path / "run" / "config.toml")), LoadOptions())
    check(again, load)
    assert (again.steps, again.epochs) == (16, None)
    with pytest.raises(ValueError, match="`steps` has no effect with `epochs`"):
        train(replace(train_options, steps=3), load_options(small_path))


def test_an_image_has_the_bucket_of_how_it_is_shown(tmp_path: Path) -> None:
    for orientation, wanted in ((4, (32, 128)), (5, (128, 32))):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.new("RGB", (200, 50)).save(tmp_path / "a.jpg", exif=exif)
        assert [part.size for part in in_buckets(open_folder(tmp_path, 64, "it"), 8).parts] == [wanted]  # type: ignore[attr-defined]
    assert nearest([(8, 8), (16, 16)], 5, 5) == (16, 16), "the largest of equal ones"


def test_small_images_are_not_enlarged(tmp_path: Path) -> None:
    for name, size in (("a", (40, 24)), ("b", (200, 200)), ("c", (70, 60)), ("d", (5, 100))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    sizes = [part.size for part in in_buckets(open_folder(tmp_path, 64, "it"), 8, no_upscale=True).parts]  # type: ignore[attr-defined]
    assert (24, 40) in sizes
    assert (64, 64) in sizes
    assert all(height * width <= 64 * 64 for height, width in sizes)


def test_shuffled_captions() -> None:
    """The first stay, the others are all there, and another example has another order."""
    got = {shuffle("sks, a,b ,c, d", 1, [6, 0, number]) for number in range(20)}
    assert len(got) > 10
    for text in got:
        assert text.startswith("sks, ")
        assert sorted(text.split(", ")) == ["a", "b", "c", "d", "sks"]
    assert shuffle("a b", 0, [0]) == "a b"


def test_captions_are_shuffled_in_steps(habits: Path, small_path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[str] = []
    call = DiffusionLoss.__call__
    monkeypatch.setattr(DiffusionLoss, "__call__", lambda s, b, d: (seen.extend(b.captions), call(s, b, d))[1])
    (habits / "plain" / "c.txt").write_text("x, 1, 2, 3, 4, 5, 6")
    shutil.rmtree(habits / "3_sks dog")
    shutil.rmtree(habits / "plain" / "2_deep")
    train(options(habits, tmp_path, **ONE, shuffle_caption=True, keep_tokens=1), load_options(small_path))
    assert {text[:3] for text in seen} == {"x, "}
    assert len(set(seen)) == 2
    assert "x, 1, 2, 3, 4, 5, 6" not in seen


# ---- LoRAs ----------------------------------------------------------------------------------------------------------


def test_a_lora_of_convolutions_is_that_of_its_file(folder: Path, small_path: Path, tmp_path: Path) -> None:
    """Trained, written and merged by the loader, the network has the output that it has with the LoRA attached."""
    pipe = ldm_lite.load(small_path, device="cpu")
    path = train(options(folder, tmp_path, **ONE | {"steps": 2, "lr": 0.05, "lora_conv": 3}), load_options(small_path))
    weights = load_file(path)
    large = {key for key, value in weights.items() if key.endswith("lora_down.weight") and value.shape[-1] == 3}
    assert {weights[key].shape[0] for key in large} == {3}
    assert {value.shape[0] for key, value in weights.items() if key.endswith("down.weight") and key not in large} == {2}
    kinds = ("conv1", "conv2", "downsamplers_0_conv", "upsamplers_0_conv")
    assert {kind for kind in kinds if any(key.split(".")[0].endswith(kind) for key in large)} == set(kinds)
    with safe_open(path, "pt") as file:
        assert file.metadata()["ss_network_args"] == '{"conv_dim": "3", "conv_alpha": "3"}'
    lora = LoRA({"unet": pipe.unet}, 2, conv=3)
    lora.load_state_dict({key: value.float() for key, value in weights.items()})
    x, t, context = toy.normal(1, 1, 4, 8, 8), torch.tensor([500]), toy.normal(2, 1, 77, 64)
    with torch.no_grad():
        base = pipe.unet(x, t, context)
        with lora.attach({"unet": pipe.unet}):
            attached = pipe.unet(x, t, context)
        merged = ldm_lite.load(small_path, device="cpu", lora=f"{path}:1").unet(x, t, context)
    torch.testing.assert_close(merged, attached, rtol=1e-3, atol=1e-4)
    assert (attached - base).abs().max() > 1e-3


def test_a_run_begins_with_a_lora(folder: Path, small_path: Path, tmp_path: Path) -> None:
    first = train(options(folder, tmp_path / "a", **ONE, lora_alpha=1.0), load_options(small_path))
    arguments = ONE | {"lora_alpha": 1.0, "lr": 0.0, "weight_decay": 0.0, "lora_weights": os.fspath(first)}
    second = train(options(folder, tmp_path / "b", **arguments), load_options(small_path))
    before, after = load_file(first), load_file(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for more, message in (({"lora_alpha": 2.0}, "its alpha is 1: give it as `lora_alpha`"), ({"lora_rank": 4}, "size")):
        with pytest.raises(ValueError, match=rf"lora\.safetensors: is not a LoRA of the same layers.*{message}"):
            train(options(folder, tmp_path / "c", **arguments | more), load_options(small_path))
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"x\.safetensors: is not a LoRA of the same layers"):
        train(
            options(folder, tmp_path / "d", **arguments | {"lora_weights": os.fspath(tmp_path / "x.safetensors")}),
            load_options(small_path),
        )


def test_dropout_is_of_steps_alone_and_the_same_when_resumed(folder: Path, small_path: Path, tmp_path: Path) -> None:
    lora = LoRA({"unet": nn.ModuleDict()}, 2, dropout=0.5)
    assert not list(lora.children())
    arguments = ONE | {"steps": 3, "lora_dropout": 0.5, "lr": 0.05}
    whole = train(options(folder, tmp_path / "whole", **arguments), load_options(small_path))
    for i in range(3):
        parts = options(folder, tmp_path / "parts", **arguments, minutes=0.0, resume=i > 0)
        torch.manual_seed(i)
        torch.rand(7 * i)
        path = train(parts, load_options(small_path))
    assert path.read_bytes() == whole.read_bytes()
    plain = train(options(folder, tmp_path / "none", **arguments | {"lora_dropout": 0.0}), load_options(small_path))
    assert plain.read_bytes() != whole.read_bytes()


def test_text_encoders_have_a_rate_of_their_own(folder: Path, small_path: Path, tmp_path: Path) -> None:
    """Of 0 they stay: in a LoRA, and in a whole model."""
    more: dict[str, Any] = {"text_lr": 0.0, "weight_decay": 0.0, "lr": 0.05}
    path = train(options(folder, tmp_path / "a", **ONE | more, lora_text=True), load_options(small_path))
    ups = {key: float(value.abs().max()) for key, value in load_file(path).items() if key.endswith("up.weight")}
    assert {value for key, value in ups.items() if key.startswith("lora_te")} == {0.0}
    assert min(value for key, value in ups.items() if key.startswith("lora_unet")) > 0
    train_options = options(folder, tmp_path / "b", **more, steps=1, train_text=True, ema_decay=0.0, sample_every=0)
    after = ldm_lite.load(train(train_options, load_options(small_path)), device="cpu")
    before = ldm_lite.load(small_path, device="cpu")
    name = "final_layer_norm.weight"
    assert torch.equal(after.text_encoder.get_parameter(name), before.text_encoder.get_parameter(name).half().float())
    assert not torch.equal(after.unet.out[2].weight, before.unet.out[2].weight.half().float())


# ---- noise ----------------------------------------------------------------------------------------------------------


def test_noise_offset_and_the_range_of_timesteps(small_path: Path) -> None:
    """The offset is one value for each channel; validation too stays in the range."""
    pipe = ldm_lite.load(small_path, device="cpu")
    batch = Batch(toy.normal(1, 64, 8, 8, 8), ["a"] * 64, None, tuple(range(64)))
    plain, offset = (DiffusionLoss(pipe, {}, noise_offset=value) for value in (0.0, 0.3))
    difference = (
        offset._noised(batch, Draws(0, batch.numbers)).target - plain._noised(batch, Draws(0, batch.numbers)).target
    )
    assert difference.std(dim=(2, 3)).max() < 1e-5
    assert difference.mean(dim=(2, 3)).std() == pytest.approx(0.3, rel=0.2)
    narrow = DiffusionLoss(pipe, {}, timesteps=(200, 300))
    for quantiles in (None, torch.linspace(0, 1, 64).double()):
        t = narrow._noised(batch, Draws(0, batch.numbers), quantiles).t
        assert 200 <= int(t.min()) < 210
        assert 290 < int(t.max()) < 300


def test_timesteps_of_a_rectified_flow(tmp_path: Path) -> None:
    """s = shift u / (1 + (shift - 1) u) with u logit-normal or uniform, in a range; CLIP's models have none of it."""
    pipe = ldm_lite.load(toy_flow.write(tmp_path, "sd3_medium"), device="cpu")
    channels = 2 * pipe.latent_shape(64, 64)[0]
    batch = Batch(toy.normal(1, 400, channels, 2, 2), ["a"] * 400, None, tuple(range(400)))

    def drawn(**how: Any) -> torch.Tensor:
        return DiffusionLoss(pipe, {}, **how)._noised(batch, Draws(0, batch.numbers)).t / 1000

    uniform = drawn(flow_sampling="uniform", flow_shift=1.0)
    assert np.histogram(uniform.numpy(), 4, (0, 1))[0].tolist() == pytest.approx([100] * 4, rel=0.3)
    torch.testing.assert_close(drawn(flow_sampling="uniform", flow_shift=3.0), 3 * uniform / (1 + 2 * uniform))
    normal = drawn(flow_shift=1.0)
    assert torch.logit(normal).std() == pytest.approx(1, rel=0.15)
    torch.testing.assert_close(drawn(), 3 * normal / (1 + 2 * normal), msg="Stable Diffusion 3's own shift is 3")
    narrow = drawn(flow_sampling="uniform", flow_shift=1.0, timesteps=(200, 300))
    torch.testing.assert_close(narrow, 0.2 + 0.1 * uniform)


@pytest.mark.parametrize("flow_options", [{"flow_shift": 2.0}, {"flow_sampling": "uniform"}])
def test_options_of_flows_are_for_flows(
    flow_options: dict[str, Any], folder: Path, small_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="leave out `flow_shift` and `flow_sampling`, which are for rectified flows"):
        train(options(folder, tmp_path, **ONE, **flow_options), load_options(small_path))

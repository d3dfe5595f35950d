"""Stable Diffusion 2 (v prediction) and XL (both encoders, sizes) are trained: whole, by LoRA, and by vectors.

Losses are compared with their formulas, written again here, and gradients with differences in float64.
"""

import copy
import functools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import torch
import toy
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from training import SplitMix, check_gradient, load_options, losses, options, plain_options, train

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.adapters.textual_inversion import with_embeddings
from ldm_lite.batch import __main__ as batch_command
from ldm_lite.diffusion.guidance import Conditioning
from ldm_lite.networks import encode_captions
from ldm_lite.train import encoded
from ldm_lite.train.additions import LoRA, Vectors
from ldm_lite.train.batches import Batch, BucketOrder, Draws
from ldm_lite.train.data import Buckets, Example, bucket_sizes, in_buckets, open_folder
from ldm_lite.train.losses import ConsistencyLoss, DiffusionLoss
from ldm_lite.train.run import check_model, make_loss
from ldm_lite.train.trainer import using
from ldm_lite.zoo.families import FAMILY_ROWS

FAMILIES = ("sd2", "sdxl_base")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        random_checkpoint.write(folder / f"{name}.safetensors", random_checkpoint.small(name))
    return {name: folder / f"{name}.safetensors" for name in FAMILIES}


def load(files: dict[str, Path], name: str) -> Any:
    return load_options(files[name], prediction="v" if name == "sd2" else None)


def opened(files: dict[str, Path], name: str) -> Pipeline:
    return ldm_lite.load(files[name], device="cpu", prediction="v" if name == "sd2" else None)


def batch(pipe: Pipeline, *captions: str) -> Batch:
    """Latents of 8 x 12, of images that were larger."""
    moments = toy.normal(1, len(captions), 8, 8, 12)
    sizes = torch.tensor([[200, 300, 4, 0, 64, 96], [90, 150, 0, 27, 64, 96]], dtype=torch.int32)
    return Batch(moments, list(captions), None, tuple(range(len(captions))), sizes=sizes[: len(captions)])


def text_of(pipe: Pipeline, examples: Batch, captions: Sequence[str | None]) -> tuple[Tensor | None, Tensor | None]:
    """What the network reads of captions, of XL with the sizes of the images."""
    text = Conditioning(**encode_captions(pipe, captions))
    if pipe.family.conditioner != "sdxl":
        return text.context, None
    assert text.y is not None
    assert examples.sizes is not None
    angles = examples.sizes.numpy()[:, :, None] * 10000 ** (-np.arange(128) / 128)
    sinusoids = np.concatenate([np.cos(angles), np.sin(angles)], axis=2).reshape(2, -1)
    return text.context, torch.cat([text.y[:, :96], torch.from_numpy(sinusoids).float()], dim=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_the_mean_squared_error_of_what_the_family_predicts(name: str, files: dict[str, Path]) -> None:
    """v = a eps - s x0 for Stable Diffusion 2; eps for XL, which reads each image's sizes and pooled text."""
    pipe = opened(files, name)
    examples = batch(pipe, "a cat", "a dog on a log")
    loss = DiffusionLoss(pipe, {"unet": pipe.unet})
    with torch.no_grad():
        got = float(loss(examples, Draws(3, examples.numbers)))

    draws = [SplitMix(3, number) for number in examples.numbers]
    z, noise = (np.stack([d.normal(purpose, (4, 8, 12)) for d in draws]) for purpose in ("latents", "noise"))
    t = np.array([d.integers("timesteps", 1000) for d in draws])
    mean, logvar = examples.pixels.numpy()[:, :4], examples.pixels.numpy()[:, 4:]
    x0 = pipe.family.scale_factor * (mean + np.exp(logvar / 2) * z)
    alpha_bar = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)[t][:, None, None, None]
    a, s = np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)
    context, y = text_of(pipe, examples, examples.captions)
    target = a * noise - s * x0 if name == "sd2" else noise
    with torch.no_grad():
        out = pipe.unet(torch.from_numpy(a * x0 + s * noise).float(), torch.from_numpy(t), context, y)
    assert got == pytest.approx(float(np.mean((out.numpy() - target) ** 2)), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_distillation_has_the_papers_loss(name: str, files: dict[str, Path]) -> None:
    """Luo et al. 2023, algorithm 1 and appendix: one DDIM step of 20 timesteps, the last down to 0."""
    pipe = opened(files, name)
    teacher, student, average = (copy.deepcopy(pipe.unet) for _ in range(3))
    loras = [LoRA({"unet": teacher}, rank=2) for _ in range(2)]
    for i, lora in enumerate(loras):
        for j, value in enumerate(lora.parameters()):
            value.data = 0.2 * toy.normal(100 * i + j, *value.shape)
        lora.attach({"unet": (student, average)[i]})
    attached, with_weights = loras[0].attach({"unet": pipe.unet}), functools.partial(using, {"lora": loras[0]})
    loss = ConsistencyLoss(
        pipe, {"lora": loras[0]}, guidance=4.0, base=attached.off, average=lambda: with_weights({"lora": loras[1]})
    )
    examples = batch(pipe, "a cat", "a dog on a log")
    seed = next(seed for seed in range(999) if SplitMix(seed, 0).integers("timesteps", 50) == 0)
    value = loss(examples, Draws(seed, examples.numbers))

    draws = [SplitMix(seed, number) for number in examples.numbers]
    t = 20 * np.array([d.integers("timesteps", 50) for d in draws]) + 19
    before = np.maximum(t - 20, 0)
    assert before[0] == 0
    z, noise = (np.stack([d.normal(purpose, (4, 8, 12)) for d in draws]) for purpose in ("latents", "noise"))
    mean, logvar = examples.pixels.numpy()[:, :4], examples.pixels.numpy()[:, 4:]
    alpha_bar = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)[:, None, None, None]
    a, s = np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar)
    x = a[t] * pipe.family.scale_factor * (mean + np.exp(logvar / 2) * z) + s[t] * noise
    text, no_text = (text_of(pipe, examples, captions) for captions in (examples.captions, [None, None]))

    def predicted(unet: nn.Module, x: Any, t: Any, text: tuple[Tensor | None, Tensor | None]) -> tuple[Any, Any]:
        with torch.no_grad():
            out = unet(torch.from_numpy(x).float(), torch.from_numpy(t), *text).numpy()
        if name == "sd2":
            return a[t] * x - s[t] * out, s[t] * x + a[t] * out
        return (x - s[t] * out) / a[t], out

    def consistent(unet: nn.Module, x: Any, t: Any) -> Any:
        scaled = (t / 0.1)[:, None, None, None]
        skip, rest = 0.5**2 / (scaled**2 + 0.5**2), scaled / np.sqrt(scaled**2 + 0.5**2)
        return skip * x + rest * predicted(unet, x, t, text)[0]

    (x0, eps), (no_x0, no_eps) = (predicted(teacher, x, t, condition) for condition in (text, no_text))
    steps = [a[before] * x0 + s[before] * eps, a[before] * no_x0 + s[before] * no_eps]
    target = consistent(average, (1 + 4.0) * steps[0] - 4.0 * steps[1], before)
    distance = np.sqrt((consistent(student, x, t) - target) ** 2 + 1e-3**2) - 1e-3
    assert value.item() == pytest.approx(distance.mean(), rel=1e-4)
    value.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in loras[0].parameters())
    assert all(p.grad is None for p in (*loras[1].parameters(), *pipe.unet.parameters()))


@pytest.mark.slow
def test_a_distillation_goes_on_where_it_stopped(tmp_path: Path, folder: Path, files: dict[str, Path]) -> None:
    """With the same losses, though its targets depend on the average; the LoRA makes images in four steps."""
    more: dict[str, Any] = {"lora_rank": 2, "lcm": True, "ema_decay": 0.5, "steps": 5}
    path = train(options(folder, tmp_path / "a", **more), load(files, "sd2"))
    train(options(folder, tmp_path / "b", minutes=1e-9, **more), load(files, "sd2"))
    assert len(losses(tmp_path / "b")) == 1
    again = train(options(folder, tmp_path / "b", resume=True, **more), load(files, "sd2"))
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert again.read_bytes() == path.read_bytes()
    pipe = opened(files, "sd2")
    pipe.lora(ldm_lite.open_lora(path), 1.0)
    [result] = pipe.txt2img("a cat", sampler="lcm", steps=4, scale=1.0, output="result")
    assert np.isfinite(result.pixels.numpy()).all()


@pytest.mark.parametrize("name", ["lcm", "flux_dev"])
def test_what_cannot_be_distilled_is_refused(name: str, files: dict[str, Path]) -> None:
    pipe, family = opened(files, "sd2"), FAMILY_ROWS[name]
    model = replace(pipe, family=family, schedule=family.noise.schedule(family.prediction))
    with pytest.raises(ValueError, match="`lcm` distils Stable Diffusion 1, 2 and XL only: leave it out"):
        check_model(plain_options(data="a", lora_rank=2, lcm=True), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "embedding", "whole"])
def test_gradients_reach_all_encoders(name: str, kind: str, files: dict[str, Path]) -> None:
    """DoRA holds a norm constant, so its gradient is not the loss's: its length alone is compared."""
    pipe = opened(files, name)
    networks: dict[str, nn.Module] = {"unet": pipe.unet, "text_encoder": pipe.text_encoder}  # type: ignore[dict-item]
    if pipe.text_encoder_2 is not None:
        networks["text_encoder_2"] = pipe.text_encoder_2
    trained: nn.Module
    model: Any = pipe
    if kind == "embedding":
        trained = Vectors(pipe, "cat", 2)
        model = trained.known_to(pipe, "<it>")
    elif kind == "whole":
        whole_loss = make_loss(plain_options(data="a", train_text=True), pipe)
        assert isinstance(whole_loss, DiffusionLoss)
        assert whole_loss.networks.keys() == networks.keys()
        trained = nn.ModuleDict(whole_loss.networks)
    else:
        trained = LoRA(networks, rank=2, alpha=1.5, kind=kind)
        trained.attach(networks)
        torch.manual_seed(1)
        for parameter in trained.parameters():
            nn.init.normal_(parameter, std=0.3)
    loss = DiffusionLoss(model, {"it": trained})
    examples = batch(pipe, "a photo of <it>", "<it> as a dog")
    with toy.in_float64(*networks.values(), trained):
        pipe.unet.register_forward_pre_hook(lambda net, args: tuple(None if x is None else x.double() for x in args))
        used = [(key, p) for key, p in trained.named_parameters() if p.requires_grad]
        if kind == "dora":
            used = [(key, p) for key, p in used if key.endswith("dora_scale")]
        check_gradient(lambda: loss(examples, Draws(0, examples.numbers)), [p for _, p in used])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_fine_tuning_writes_a_checkpoint_of_the_family(
    name: str, tmp_path: Path, folder: Path, files: dict[str, Path]
) -> None:
    """All encoders change, but for the layers that are not read."""
    path = train(options(folder, tmp_path, steps=2, lr=1e-2, checkpointing=True, train_text=True), load(files, name))
    before, after = opened(files, name), ldm_lite.load(path, device="cpu")
    assert after.family == before.family
    assert after.schedule.prediction == before.schedule.prediction
    changed = {}
    for role, network in before.networks.items():
        new = after.networks[role].state_dict()
        parts = {key for key, value in network.state_dict().items() if not torch.equal(value.half(), new[key].half())}
        changed[role] = {
            key.split(".layers.")[-1].split("resblocks.")[-1][0] for key in parts if "layers" in key or "res" in key
        }
        assert bool(parts) == (role != "vae"), role
    assert "2" not in changed["text_encoder"]  # of three layers the last is skipped


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_lora_of_both_encoders_is_merged_as_it_was_trained(
    name: str, tmp_path: Path, folder: Path, files: dict[str, Path]
) -> None:
    """Its names are kohya's, and the merged networks compute what the attached ones did."""
    more = {"lora_rank": 2, "lora_text": True, "lr": 0.1, "warmup": 0, "ema_decay": 0.0}
    path = train(options(folder, tmp_path, steps=2, **more), load(files, name))
    with safe_open(path, "pt") as file:
        keys = list(file.keys())
        weights = {key: file.get_tensor(key) for key in keys}
    prefixes = {
        "sd2": {"lora_unet_mid", "lora_te_text"},
        "sdxl_base": {"lora_unet_middle", "lora_te1_text", "lora_te2_text"},
    }
    assert all(any(key.startswith(prefix) for key in keys) for prefix in prefixes[name])
    assert any(key.startswith(("lora_te_", "lora_te2_")) and "self_attn_q_proj" in key for key in keys)

    def outputs(pipe: Pipeline) -> list[Tensor]:
        text = pipe.encode_prompt("a cat")
        x = toy.normal(1, 1, 4, 8, 8)
        assert text.context is not None
        with torch.no_grad():
            return [text.context, pipe.unet(x, toy.T[:1], text.context, text.y)]

    attached, merged, plain = (opened(files, name) for _ in range(3))
    networks = {role: net for role, net in attached.networks.items() if role != "vae"}
    lora = LoRA(networks, 2)
    lora.load_state_dict({key: value.float() for key, value in weights.items()})
    lora.attach(networks)
    merged.lora(ldm_lite.open_lora(path), 1.0)
    for ours, theirs, before in zip(outputs(merged), outputs(attached), outputs(plain), strict=True):
        assert toy.relative_error(ours, theirs.double().numpy()) < 1e-4
        assert toy.relative_error(ours, before.double().numpy()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl_base", pytest.param("sd2", marks=pytest.mark.slow)])
def test_textual_inversion_learns_vectors_alone(
    name: str, tmp_path: Path, folder: Path, files: dict[str, Path]
) -> None:
    """The file has kohya's names, and prompts use it."""
    more = {"stage": "embedding", "token": "<it>", "vectors": 2, "init_word": "cat", "samples": "a <it>"}
    for image in folder.glob("*.png"):
        (tmp_path / image.name).symlink_to(image)
    run_options = options(tmp_path, tmp_path / "run", steps=2, lr=0.1, caption="a photo of <it>", **more)
    path = train(run_options, load(files, name))
    pipe = opened(files, name)
    learned = with_embeddings(pipe, [f"<it>={path}"])
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == ({"clip_l", "clip_g"} if name == "sdxl_base" else {"emb_params"})
        assert all(len(file.get_tensor(key)) == 2 for key in file.keys())  # noqa: SIM118
    a, b, same = (
        model.encode_prompt(text).context
        for model, text in ((learned, "a <it>"), (pipe, "a cat cat"), (learned, "a cat cat"))
    )
    assert a is not None
    assert b is not None
    assert same is not None
    assert a.shape == b.shape
    assert not torch.allclose(a, b, atol=1e-3)
    assert torch.equal(b, same)


@pytest.mark.slow
def test_xl_trains_from_text_that_was_encoded(tmp_path: Path, folder: Path, files: dict[str, Path]) -> None:
    """With the losses of training from images of the model's size, up to float16: sizes and crops are not encoded."""
    images, out = tmp_path / "images", tmp_path / "encoded"
    images.mkdir()
    for path in folder.glob("*.png"):
        Image.open(path).convert("RGB").resize((64, 64)).save(images / path.name)
        shutil.copy(path.with_suffix(".txt"), images)
    arguments = [images, "--encode", "--out", out, "--ckpt", files["sdxl_base"], "--device", "cpu"]
    assert batch_command.main(list(map(str, arguments))) == 0
    more = {"steps": 2, "freeze_text": True, "caption_dropout": 0.5}
    train(options(out, tmp_path / "a", **more), load(files, "sdxl_base"))
    train(options(images, tmp_path / "b", **more), load(files, "sdxl_base"))
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-3)


# ---- buckets --------------------------------------------------------------------------------------------------------


def test_buckets_have_the_area_of_the_square() -> None:
    """Those of SDXL's paper, appendix I, where they are multiples of 64 of 1024^2."""
    sizes = bucket_sizes(1024, 64)
    assert {(512, 2048), (704, 1408), (832, 1216), (1024, 1024), (1216, 832), (2048, 512)} <= set(sizes)
    for height, width in sizes:
        assert height % 64 == width % 64 == 0
        assert 0.88 * 1024**2 < height * width <= 1024**2


class Sized:
    """Examples of one size, that are numbers."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.shards = first, (count,)

    def example(self, index: int) -> Example:
        assert 0 <= index < self.shards[0]
        return Example(torch.tensor([self.first + index]), "")


def test_every_batch_is_of_one_bucket_and_buckets_come_by_their_sizes() -> None:
    dataset = Buckets((Sized(0, 50), Sized(50, 3), Sized(53, 47)))
    order = BucketOrder(dataset, seed=1, batch=4)
    taken = [[order[4 * i + j] for j in range(4)] for i in range(5000)]
    bucket = np.searchsorted([50, 53], [row[0] for row in taken], side="right")
    assert all(np.searchsorted([50, 53], row, side="right").tolist() == [bucket[i]] * 4 for i, row in enumerate(taken))
    assert np.bincount(bucket) / 5000 == pytest.approx([0.5, 0.03, 0.47], abs=0.03)
    counts = np.bincount(np.concatenate(taken))
    for low, high in ((0, 50), (50, 53), (53, 100)):  # epochs: no example of a bucket is taken twice before all are
        assert counts[low:high].max() - counts[low:high].min() <= 1
    again = BucketOrder(dataset, seed=1, batch=4)
    assert [again[i] for i in (19_999, 7, 4000)] == [order[i] for i in (19_999, 7, 4000)]
    assert dataset.example(51).pixels.item() == 51


@pytest.mark.slow
def test_images_of_all_ratios_are_trained_in_buckets(tmp_path: Path, files: dict[str, Path]) -> None:
    """Each loses less than a square crop cuts off, XL is told its sizes, and latents are kept by size."""
    (tmp_path / "data").mkdir()
    for i, (width, height) in enumerate([(200, 100), (190, 100), (100, 220), (90, 90), (80, 81)]):
        Image.fromarray(np.full((height, width, 3), 40 * i, np.uint8)).save(tmp_path / "data" / f"{i}.png")
    images = open_folder(tmp_path / "data", 64, caption="grey")
    buckets = in_buckets(images, 8)
    shapes = {tuple(buckets.example(i).pixels.shape[1:]) for i in range(5)}
    assert shapes == {(40, 88), (48, 80), (88, 40), (64, 64)}
    wide = next(buckets.example(i) for i in range(5) if buckets.example(i).pixels.shape[2] > 64)
    assert wide.sizes is not None
    assert wide.sizes[:2].tolist()[0] == 100
    assert wide.sizes[4:].tolist() == list(wide.pixels.shape[1:])
    run_options = options(tmp_path / "data", tmp_path / "run", steps=3, buckets=True, caption="grey", freeze_text=True)
    train(run_options, load(files, "sdxl_base"))
    assert len(losses(tmp_path / "run")) == 3
    assert len(list((tmp_path / "run" / "latents").glob("*x*/index.json"))) == 4


@pytest.mark.slow
def test_latents_kept_by_size_give_the_losses_of_the_images(
    tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a LoRA of XL in buckets, where each batch brings the sizes of its own images, up to float16's latents."""
    (tmp_path / "data").mkdir()
    random = np.random.default_rng(0)
    for i, (width, height) in enumerate([(200, 100), (100, 220), (90, 90), (190, 95)]):
        pixels = random.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / f"{i}.png")
    seen: list[tuple[torch.dtype, list[tuple[int, ...]]]] = []
    original = DiffusionLoss.__call__

    def call(loss: DiffusionLoss, examples: Batch, draws: Draws) -> Tensor:
        assert examples.sizes is not None
        seen.append((examples.pixels.dtype, [tuple(row) for row in examples.sizes.tolist()]))
        return original(loss, examples, draws)

    monkeypatch.setattr(DiffusionLoss, "__call__", call)
    more: dict[str, Any] = {"steps": 6, "lora_rank": 2, "buckets": True, "caption": "noise"}
    for name in ("kept", "images"):
        if name == "images":
            monkeypatch.setattr(encoded, "encoded", lambda options, dataset, vae, name: (dataset, dataset))
        train(options(tmp_path / "data", tmp_path / name, **more), replace(load(files, "sdxl_base"), dtype="fp32"))
    kept, images = ([sizes for dtype, sizes in seen if dtype == wanted] for wanted in (torch.float16, torch.uint8))
    assert kept == images
    assert len({sizes[0][4:] for sizes in kept}) == 3  # of each bucket
    assert len(set(losses(tmp_path / "kept"))) == 6
    assert losses(tmp_path / "kept") == pytest.approx(losses(tmp_path / "images"), rel=2e-3)
    assert not (tmp_path / "images" / "latents").exists()

"""Validation at fixed noise, masks, prior preservation, weights of noise levels, and averages of any length."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from training import SplitMix, load_options, losses, options, train

import ldm_lite
from ldm_lite.train import averages as averages_command
from ldm_lite.train import distributed, run
from ldm_lite.train.averages import coefficients, products
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.data import open_folder
from ldm_lite.train.losses import DiffusionLoss, LearnedWeighting, Prior, Validation, of_x0, read
from ldm_lite.train.state import read_log
from ldm_lite.train.trainer import LENGTHS, PowerAverages, exponent


def validations(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["validation"] for row in rows if "validation" in row}


def batch(count: int = 2, **more: Any) -> Batch:
    moments = toy.normal(1, count, 8, 8, 8)
    return Batch(moments, ["a cat", "a dog"][:count], None, tuple(range(count)), **more)


# ---- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra", [{"validation": "0.34"}, {"validation": "FOLDER", "lora_rank": 2, "validate_every": 2}]
)
@pytest.mark.slow
def test_the_validation_loss_is_of_the_same_noise_at_every_step(
    tmp_path: Path, folder: Path, small_path: Path, extra: dict[str, Any]
) -> None:
    """With a learning rate of 0 it never changes; the training loss, of other draws each step, does."""
    extra = extra | ({"validation": str(folder), "validate_every": 2} if "lora_rank" in extra else {"save_every": 2})
    train(options(folder, tmp_path, lr=0.0, weight_decay=0.0, **extra), load_options(small_path))
    by_step = validations(tmp_path)
    assert list(by_step) == [0, 2, 4]
    assert by_step[0] == pytest.approx(by_step[2], rel=1e-5) == pytest.approx(by_step[4], rel=1e-5)
    values = [row["loss"] for row in read_log(tmp_path / "log.jsonl") if "loss" in row]
    assert len(set(values)) == 4


@pytest.mark.slow
def test_what_is_held_out_is_not_learned(tmp_path: Path, folder: Path, small_path: Path) -> None:
    """The validation loss of a share goes up while that of the rest falls; resumed, the log is the same."""
    extra = {"steps": 3, "batch_size": 2, "save_every": 1, "validation": "0.3", "freeze_text": True}
    train(options(folder, tmp_path / "whole", **extra), load_options(small_path))
    for i in range(3):
        train(options(folder, tmp_path / "parts", minutes=0.0, resume=i > 0, **extra), load_options(small_path))
    assert validations(tmp_path / "whole") == validations(tmp_path / "parts")
    assert len(validations(tmp_path / "whole")) == 4
    with pytest.raises(ValueError, match="expected a folder, or a fraction between 0 and 1"):
        train(options(folder, tmp_path / "no", validation="1.5"), load_options(small_path))


@pytest.mark.parametrize("count", [1, 4, 5, 6, 7])
def test_each_process_computes_as_many_batches_of_a_validation(
    count: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With divided weights a pass needs all processes; each image counts once."""

    class Ones:
        batches = 0

        def errors(self, batch: Batch, draws: Draws, quantiles: Tensor) -> Tensor:
            assert (4 * quantiles).floor().tolist() == [self.batches % 4] * len(quantiles), "one level in each quarter"
            assert len({*quantiles.tolist()}) == len(quantiles), "another one for each image"
            self.batches += 1
            return torch.tensor([float(caption[-1]) for caption in batch.captions])

    images = open_folder(folder, 8)
    data = replace(images, items=(*images.items, images.items[0])[:count])
    mean = np.mean([float(caption[-1]) for _, caption in data.items])
    for size in (1, 2, 3):
        sums, passes = torch.zeros(2, dtype=torch.float64), set[int]()
        monkeypatch.setattr(distributed, "world_size", lambda size=size: size)
        for rank in range(size):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            add = lambda value, sums=sums: (sums.add_(value), torch.ones(2))[1]  # noqa: E731
            monkeypatch.setattr(distributed, "all_reduce_sum", add)
            loss = Ones()
            Validation(loss, data, 2, 1)()  # type: ignore[arg-type]
            passes.add(loss.batches)
        assert len(passes) == 1
        assert sums.tolist() == pytest.approx([4 * count * mean, 4 * count])


def test_latents_are_validated_in_bfloat16_too(
    folder: Path, tmp_path: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "has_fast_bf16", lambda device: True)
    train(options(folder, tmp_path, steps=1, validation="0.3"), load_options(small_path))
    assert set(validations(tmp_path)) == {0, 1}


def test_the_validation_loss_is_the_mean_over_levels(small_path: Path) -> None:
    """Written again: errors at the timesteps of the quantiles, with the noise of their numbers."""
    pipe = ldm_lite.load(small_path, device="cpu")
    loss, examples = DiffusionLoss(pipe, {"unet": pipe.unet}), batch()
    shares = torch.tensor([0.1234, 0.8765])
    with torch.no_grad():
        got = loss.errors(examples, Draws(0, (5, 9)), shares)
        random = [SplitMix(0, number) for number in (5, 9)]
        z, noise = (
            torch.stack([torch.from_numpy(r.normal(purpose, (4, 8, 8))) for r in random])
            for purpose in ("latents", "noise")
        )
        x0 = 0.18215 * (examples.pixels[:, :4] + (examples.pixels[:, 4:] / 2).exp() * z)
        t = torch.tensor([123, 876])
        a = torch.from_numpy(pipe.schedule.alpha_bar)[t].float().sqrt()[:, None, None, None]
        out = pipe.unet(a * x0 + (1 - a**2).sqrt() * noise, t, pipe.encode_prompt(examples.captions).context)
    assert torch.allclose(got, (out - noise).square().mean(dim=(1, 2, 3)), rtol=1e-4)


def test_encoded_captions_are_left_out_by_example(small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    own, nothing = toy.normal(2, 2, 77, 64), toy.normal(3, 1, 77, 64)
    dropped = torch.tensor([True, False])
    got = read(pipe, replace(batch(), context=own), dropped, {"context": nothing})
    assert torch.equal(got["context"], torch.cat([nothing, own[1:]]))


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_masks_beside_images_and_in_their_alpha(tmp_path: Path) -> None:
    white, half = np.full((16, 16, 3), 255, np.uint8), np.zeros((16, 16), np.uint8)
    half[:, :8] = 255
    Image.fromarray(white).save(tmp_path / "a.png")
    Image.fromarray(half).save(tmp_path / "a.mask.png")
    Image.fromarray(np.dstack([white, half.T])).save(tmp_path / "b.png")
    Image.fromarray(white).save(tmp_path / "c.png")
    images = open_folder(tmp_path, 8, caption="it")
    assert len(images.items) == 3, "a mask is no image"
    assert images.example(0).mask is None
    masked = replace(images, masked=True)
    a, b, c = (masked.example(i).mask for i in range(3))
    assert a is not None
    assert b is not None
    assert c is not None
    assert a[0, 4].tolist()[::7] == [255, 0]
    assert b[0, :, 4].tolist()[::7] == [255, 0]
    assert c.min() == 255
    Image.fromarray(half[:4]).save(tmp_path / "a.mask.png")
    with pytest.raises(ValueError, match=r"a\.mask\.png: is 16 x 4, expected the size of its image, 16 x 16"):
        masked.example(0)


def test_nothing_is_learned_where_the_mask_is_black(small_path: Path) -> None:
    """The loss is the mean of the errors times the mask; the gradient of the masked-out output is 0."""
    pipe = ldm_lite.load(small_path, device="cpu")
    kept: list[Tensor] = []

    def watched(net: nn.Module, args: object, out: Tensor) -> Tensor:
        kept.append(out.requires_grad_(True))
        out.retain_grad()
        return out

    pipe.unet.register_forward_hook(watched)
    mask = torch.zeros(2, 1, 64, 64, dtype=torch.uint8)
    mask[:, :, :, 32:] = 255
    loss = DiffusionLoss(pipe, {"unet": pipe.unet})
    value = loss(batch(mask=mask), Draws(0, (0, 1)))
    value.backward()  # type: ignore[no-untyped-call]
    grad = kept[0].grad
    assert grad is not None
    assert grad[..., :4].abs().max() == 0
    assert grad[..., 4:].abs().min() > 0
    with torch.no_grad():
        right = DiffusionLoss(pipe, {})._noised(batch(), Draws(0, (0, 1))).target[..., 4:] - kept[0][..., 4:]
    assert value.item() == pytest.approx(float(right.square().mean()) / 2, rel=1e-5)


@pytest.mark.slow
def test_a_masked_run(tmp_path: Path, folder: Path, small_path: Path) -> None:
    train(options(folder, tmp_path, steps=1, masked=True, freeze_text=True), load_options(small_path))
    plain = tmp_path / "plain"
    train(options(folder, plain, steps=1, freeze_text=True), load_options(small_path))
    assert losses(plain) == pytest.approx(losses(tmp_path)), "without masks all is learned"


# ---- prior preservation ---------------------------------------------------------------------------------------------


def test_the_loss_of_class_images_is_added(small_path: Path) -> None:
    """L(instance) + weight * L(class), each a mean, as in diffusers' train_dreambooth.py."""
    pipe = ldm_lite.load(small_path, device="cpu")
    examples, of_class = batch(), Batch(toy.normal(7, 2, 8, 8, 8), ["a pet", "a pet"], None, (7, 8))
    with torch.no_grad():
        plain = DiffusionLoss(pipe, {})
        wanted = plain(examples, Draws(0, examples.numbers)) + 0.7 * plain(of_class, Draws(0, of_class.numbers))
        prior = Prior(0.7, None, lambda: pytest.fail("no base is needed"))
        both = DiffusionLoss(pipe, {}, prior=prior)
        got = both(Batch(**{**vars(examples), "prior": of_class}), Draws(0, examples.numbers))
    assert float(got) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{"lora_rank": 2, "lora_text": True}, {}])
def test_without_class_images_the_base_model_tells_what_to_keep(
    tmp_path: Path, folder: Path, small_path: Path, extra: dict[str, Any]
) -> None:
    """At first nothing differs from the base, so the loss is that without a prior; later it does."""
    train(options(folder, tmp_path / "plain", lr=1e-2, warmup=0, **extra), load_options(small_path))
    kept = {"class_prompt": "a pet", "prior_weight": 10.0}
    train(options(folder, tmp_path / "kept", lr=1e-2, warmup=0, **extra, **kept), load_options(small_path))
    plain, with_prior = losses(tmp_path / "plain"), losses(tmp_path / "kept")
    assert with_prior[0] == pytest.approx(plain[0], rel=1e-5)
    assert with_prior[1] > plain[1] * 1.001


@pytest.mark.slow
def test_dreambooth_with_class_images(tmp_path: Path, folder: Path, small_path: Path) -> None:
    """Class images need no captions of their own; every step has as many as there are images of the batch."""
    (tmp_path / "class").mkdir()
    for image in folder.glob("*.png"):
        (tmp_path / "class" / image.name).symlink_to(image)
    settings = {"class_data": str(tmp_path / "class"), "class_prompt": "a pet", "steps": 2, "lora_rank": 2}
    train(options(folder, tmp_path / "run", **settings), load_options(small_path))
    assert (tmp_path / "run" / "latents-class" / "index.json").exists()
    assert (
        json.loads((tmp_path / "run" / "latents-class" / "00000" / "captions.jsonl").read_text().split("\n")[0])
        == "a pet"
    )
    train(options(folder, tmp_path / "plain", steps=2, lora_rank=2), load_options(small_path))
    assert losses(tmp_path / "run")[0] > 1.2 * losses(tmp_path / "plain")[0]


# ---- weights of noise levels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_fixed_weightings_are_what_they_are_called(prediction: Any) -> None:
    """Of eps prediction as kohya's: min-SNR min(SNR, 5) / SNR, debiased 1 / sqrt(SNR); SNR leaves it alone.

    Of v, min(SNR, 5) / (SNR + 1) and SNR / (SNR + 1) (kohya's scale_v_pred_loss_like_noise_pred).
    """
    snr = torch.tensor([1e-3, 0.5, 4.0, 50.0])
    factor = {"eps": snr, "v": snr + 1, "x0": torch.ones(4)}[prediction]
    for kind, of_x0_error in (("snr", snr), ("min_snr", snr.clamp(max=5)), ("debiased", snr.sqrt())):
        got = of_x0(kind, prediction)(torch.full((4,), 2.0), snr)
        assert torch.allclose(got, 2 * of_x0_error / factor)


def test_a_learned_weighting_finds_the_log_of_the_error_of_each_level() -> None:
    """Where the loss errors / exp(u) + u is least, u is the log of the mean error.  EDM2, eq. 21."""
    net = LearnedWeighting()
    log_snr = torch.linspace(-8, 8, 64)
    errors = 0.01 + torch.sigmoid(log_snr / 2)
    snr = log_snr.exp()
    assert torch.equal(net(errors, snr), errors), "all levels weigh the same at first"
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        net(errors, snr).mean().backward()
        optimizer.step()
    assert torch.allclose(net.log_error(snr), errors.log(), atol=0.15)


@pytest.mark.parametrize(
    "extra", [{"weighting": "learned"}, {"weighting": "debiased"}, {"weighting": "learned", "lora_rank": 2}]
)
@pytest.mark.slow
def test_runs_with_weights(tmp_path: Path, folder: Path, small_path: Path, extra: dict[str, Any]) -> None:
    """They resume exactly, and a learned one trains at its own rate."""
    for i in range(2):
        train(options(folder, tmp_path / "a", steps=2, minutes=0.0, resume=i > 0, **extra), load_options(small_path))
    path = train(options(folder, tmp_path / "b", steps=2, **extra), load_options(small_path))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert not any("weighting" in key for key in load_file(path))
    state = torch.load(tmp_path / "b" / "state.pt", weights_only=True)
    assert ("weighting" in state["networks"]) == (extra["weighting"] == "learned")
    if "weighting" in state["networks"]:
        assert state["networks"]["weighting"]["weight"].abs().max() > 1e-3


# ---- averages -------------------------------------------------------------------------------------------------------


def test_exponents_have_the_lengths_that_they_are_for() -> None:
    """The standard deviation of p(s) ~ s^g on [0,1], computed by quadrature."""
    s = (np.arange(200_000) + 0.5) / 200_000
    for length in (0.01, 0.05, 0.1, 0.2):
        p = s ** exponent(length)
        p /= p.sum()
        mean = (p * s).sum()
        assert np.sqrt((p * (s - mean) ** 2).sum()) == pytest.approx(length, rel=1e-3)


def test_products_are_integrals() -> None:
    s = (np.arange(400_000) + 0.5) / 400_000 * 30
    steps, exponents = np.array([10.0, 30.0, 20.0]), np.array([4.0, 1.5, 9.0])
    curves = [(g + 1) * s**g / t ** (g + 1) * (s <= t) for t, g in zip(steps, exponents, strict=True)]
    wanted = [[float((p * q).sum() * 30 / 400_000) for q in curves] for p in curves]
    assert np.allclose(products(steps, exponents), wanted, rtol=1e-3)


def test_an_average_of_any_length_is_made_of_snapshots() -> None:
    """Against one that was kept from the beginning, in float64: 2 % of the weights' own movement."""
    net = nn.Linear(40, 1, bias=False, dtype=torch.float64)
    kept = PowerAverages({"net": net})
    wanted, generator, steps, snapshots = torch.zeros(1, 40, dtype=torch.float64), np.random.default_rng(0), [], []
    lengths: list[float] = []
    g = exponent(0.15)
    net.weight.data.zero_()
    for step in range(1, 513):
        net.weight.data += torch.from_numpy(generator.standard_normal((1, 40)))
        kept.update({"net": net}, step)
        wanted = wanted + (1 - (1 - 1 / step) ** (g + 1)) * (net.weight.data - wanted)
        if step % 32 == 0:
            for length, average in zip(LENGTHS, kept.networks, strict=True):
                steps.append(step)
                lengths.append(length)
                snapshots.append(average["net"].weight.data.clone())
    factors = coefficients(steps, lengths, 512, 0.15)
    got = sum(factor * value for factor, value in zip(factors.tolist(), snapshots, strict=True))
    assert isinstance(got, Tensor)
    assert float((got - wanted).norm() / net.weight.data.norm()) < 0.02
    exact = coefficients(steps, lengths, 512, LENGTHS[0])
    assert np.allclose(exact, np.eye(len(steps))[len(steps) - 2], atol=1e-6), "a stored one is itself"


@pytest.mark.slow
def test_a_run_keeps_averages_and_the_command_writes_one(
    tmp_path: Path, folder: Path, small_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"lora_rank": 2, "ema_lengths": True, "save_every": 1, "lr": 1e-2, "steps": 3}
    for i in range(3):
        path = train(options(folder, tmp_path, minutes=0.0, resume=i > 0, **more), load_options(small_path))
    assert len(list((tmp_path / "averages").iterdir())) == 6
    assert averages_command.main([str(tmp_path), "--length", "0.05"]) == 0
    out = Path(capsys.readouterr().out.strip())
    averaged, ema = load_file(out), load_file(path)
    assert {key: value.shape for key, value in averaged.items()} == {key: value.shape for key, value in ema.items()}
    stored = load_file(tmp_path / "averages" / "0000003-0.050.safetensors")
    for key, value in stored.items():
        assert torch.allclose(averaged[key.removeprefix("lora.")].float(), value.float(), atol=1e-4)
    assert averages_command.main([str(folder), "--length", "0.05"]) == 2
    assert "holds no averages: train with --ema-lengths" in capsys.readouterr().err
    assert averages_command.main([str(tmp_path), "--out", str(small_path)]) == 2
    assert f"{small_path}: exists already: use another --out" in capsys.readouterr().err


def test_an_average_tells_what_the_checkpoint_of_its_run_tells(tmp_path: Path, folder: Path, small_path: Path) -> None:
    """Such as the run's resolution, where that is not the model's."""
    more = {"ema_lengths": True, "steps": 1, "resolution": 32, "freeze_text": True}
    path = train(options(folder, tmp_path, **more), load_options(small_path))
    assert averages_command.main([str(tmp_path), "--out", str(tmp_path / "average.safetensors")]) == 0
    with safe_open(path, "pt") as wanted, safe_open(tmp_path / "average.safetensors", "pt") as average:
        assert average.metadata() == wanted.metadata()
        assert average.metadata()["resolution"] == "32"

"""What stands beside the renderer to train the bundled model from nothing: new weights, autoencoder, text encoder."""

import copy
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import emoji_characters
import numpy as np
import pytest
import texts
import torch
import train_emoji
from PIL import Image
from torch.nn import functional as F
from training import losses

import ldm_lite
from ldm_lite.checkpoint.parts import load_autoencoder
from ldm_lite.checkpoint.reader import open_checkpoint, parts_of
from ldm_lite.cli.options import LoadOptions
from ldm_lite.core import files
from ldm_lite.core.tokenizer import END as EOT
from ldm_lite.core.tokenizer import START as SOT
from ldm_lite.models.clip import CLIPTextModel
from ldm_lite.pipeline import Pipeline
from ldm_lite.text.tokenizer import FixingCLIPTokenizer
from ldm_lite.train.batches import Batch, Draws
from ldm_lite.train.losses import DiffusionLoss
from ldm_lite.train.options import TrainOptions
from ldm_lite.train.run import train

DATA = Path(__file__).parents[1] / "data"
SMALL_RUN = ("--batch-size", "4", "--data-workers", "0", "--warmup", "2", "--save-every", "99", "--device", "cpu")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six plain images, with a colour each."""
    path = tmp_path_factory.mktemp("renderer") / "colours.py"
    path.write_text(
        "from PIL import Image\n"
        "COLOURS = ('red', 'green', 'blue', 'white', 'black', 'orange')\n"
        "def draw(resolution, index):\n"
        "    return Image.new('RGB', (resolution, resolution), COLOURS[index % 6]), f'picture {COLOURS[index % 6]}'\n"
        "def scenes(resolution):\n"
        "    return lambda index: draw(resolution, index)\n"
    )
    return path


def run(command: str, renderer: Path, out: Path, *more: str) -> Path:
    """Run a command of the script on the CPU; return what it wrote."""
    small_run = () if command == "new" else SMALL_RUN
    assert train_emoji.main([command, "--renderer", str(renderer), "--out", str(out), *small_run, *more]) == 0
    return out if command == "new" else out / "model.safetensors"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, with whole token tables."""
    return dict(parts_of(open_checkpoint(path)).file)


@pytest.fixture(scope="module")
def start(renderer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new model around the bundled autoencoder."""
    out = tmp_path_factory.mktemp("new") / "start.safetensors"
    return run("new", renderer, out, "--vae", str(files.bundled()), "--scenes", "6", "--device", "cpu")


def used_tokens(path: Path) -> set[int]:
    text_encoder = ldm_lite.load(path, device="cpu").text_encoder
    used = text_encoder.embeddings.token_embedding.weight.abs().sum(dim=1) > 0
    return set(used.nonzero().flatten().tolist())


def test_a_new_model_has_the_sizes_of_the_bundled_one_and_its_own_scale_factor(start: Path) -> None:
    new, bundled = (ldm_lite.load(path, device="cpu") for path in (start, None))
    assert (new.unet.spec, new.vae.spec, new.text_encoder.spec) == (
        bundled.unet.spec,
        bundled.vae.spec,
        replace(bundled.text_encoder.spec, mlp_width=448),  # the rest was added for emoji
    )
    assert new.family.scale_factor != bundled.family.scale_factor
    assert torch.equal(new.vae.decoder.conv_in.weight, bundled.vae.decoder.conv_in.weight)
    assert (new.unet.out[2].weight == 0).all()
    assert (new.schedule.prediction, new.family.resolution) == ("v", 128)
    assert (new.schedule.alpha_bar == bundled.schedule.alpha_bar).all()
    assert 0 < new.schedule.alpha_bar[-1] < 3e-4  # nearly pure noise


def test_a_new_model_has_the_levels_asked_for(renderer: Path, tmp_path: Path) -> None:
    more = ("--vae", str(files.bundled()), "--scenes", "2", "--device", "cpu")
    levels = ("--model-channels", "32", "--channel-mult", "1,3", "--transformer-depth", "0,1")
    path = run("new", renderer, tmp_path / "new.safetensors", *more, *levels)
    new = ldm_lite.load(path, device="cpu")
    spec = new.unet.spec
    assert (spec.model_channels, spec.channel_mult, spec.transformer_depth) == (32, (1, 3), (0, 1))
    assert train_emoji.main(["new", "--out", str(path), *more, "--channel-mult", "1,2,4"]) == 2


def test_tokens_that_no_caption_has_stay_zero(start: Path, renderer: Path, tmp_path: Path) -> None:
    options = TrainOptions(
        renderer=str(renderer), scenes=6, steps=2, batch_size=2, data_workers=0, out=str(tmp_path), samples="a"
    )
    after = train(options, LoadOptions(ckpt=start, device="cpu"))
    tokenizer = ldm_lite.load(start, device="cpu").tokenizer
    captions = [f"picture {colour}" for colour in ("red", "green", "blue", "white", "black", "orange")]
    tokens = {token for caption in captions for token in tokenizer.encode(caption)} | {SOT, EOT}
    assert used_tokens(start) == used_tokens(after) == tokens


def test_other_words_stand_where_the_usual_ones_did() -> None:
    assert train_emoji.aligned([SOT, 5, 6, 7, 9, EOT, EOT, EOT], [SOT, 5, 8, 9, EOT, EOT, EOT, EOT]) == [
        *(0, 1, 1, 2, 3, 4, 5, 6)
    ]
    assert train_emoji.aligned([SOT, 5, 9, EOT, EOT, EOT], [SOT, 5, 6, 8, 9, EOT]) == [0, 1, 4, 5, 5, 5]
    assert train_emoji.aligned([SOT, 7, EOT, EOT], [SOT, 5, 6, EOT]) == [0, 2, 3, 3]


def test_other_words_are_copied_from_the_usual_ones_which_stay(bundled: Pipeline) -> None:
    model = replace(bundled, networks=copy.deepcopy(dict(bundled.networks)))
    caption, unusual = "a cat on a red background", "a zeppelin on a red background"
    assert isinstance(model.text_encoder, CLIPTextModel)
    encoder, tokenizer = model.text_encoder, model.tokenizer
    ids, usual_ids = tokenizer([unusual]), tokenizer([caption])
    places = train_emoji.aligned(ids[0].tolist(), usual_ids[0].tolist())
    before = encoder.embeddings.token_embedding.weight.clone()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_emoji, "reworded", lambda text, rng: (unusual, text)[int(rng.integers(2))])
        usual = encoder(usual_ids)
        apart = F.mse_loss(encoder(ids), usual[:, places])
        with torch.enable_grad():
            train_emoji.copy_words(model, [caption], 40, seed=0, size=4)
        assert F.mse_loss(encoder(ids), usual[:, places]) < 0.5 * apart
        assert torch.equal(encoder(usual_ids), usual)
    table, known = encoder.embeddings.token_embedding.weight, before.any(dim=1)
    assert torch.equal(table[known], before[known])


def test_an_emoji_has_its_number_at_its_last_token_and_another_at_an_end_after_it() -> None:
    texts = torch.tensor([[SOT, 5, 6, 7, EOT], [SOT, 8, 5, 6, EOT], [SOT, 6, 5, EOT, EOT]])
    numbers = emoji_characters.numbered(texts, {(5, 6): 0, (8, 5): 1})
    assert numbers.tolist() == [[-1, -1, 0, -1, -1], [-1, -1, 1, 0, 2], [-1, -1, -1, -1, -1]]


def test_emoji_that_share_tokens_are_read_as_their_names_and_all_else_as_before(
    bundled: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, tokenizer = copy.deepcopy(bundled.text_encoder), bundled.tokenizer
    assert isinstance(encoder, CLIPTextModel)
    assert isinstance(tokenizer, FixingCLIPTokenizer)
    monkeypatch.setattr(emoji_characters, "forms", lambda: {"🦊": "fox", "🦉": "owl", "🐧": "penguin", "🐙": "octopus"})
    captions = [f"a {name} on a {colour} background" for name in ("cat", "fox", "owl") for colour in ("red", "blue")]
    with torch.no_grad():  # it reads them already
        encoder.embeddings.token_embedding.weight[tokenizer(["🦊🦉🐧🐙"])[0, 1:9]] = 0
    wide = emoji_characters.with_characters(encoder, tokenizer, captions, train_emoji.aligned, 80, seed=0)
    texts, names, plain = (
        tokenizer([f"{word} on red" for word in words])
        for words in ("🦊🦉🐧🐙", ("fox", "owl", "penguin", "octopus"), ("cat", "bus"))
    )
    with torch.no_grad():
        former, usual = encoder(texts)[:, 2], encoder(names)[:, 1]
        assert torch.cdist(wide(texts)[:, 2], usual).argmin(1).tolist() == [0, 1, 2, 3]
        assert F.mse_loss(wide(texts)[:, 2], usual) < 0.1 * F.mse_loss(former, usual)
        assert torch.allclose(wide(plain), encoder(plain), atol=0.02)
    assert wide.spec.mlp_width == encoder.spec.mlp_width + 8


@pytest.mark.needs("emoji font")
def test_a_model_learns_words(start: Path, tmp_path: Path) -> None:
    path = tmp_path / "words.safetensors"
    more = ("--renderer-options", '{"emoji":440}', "--scenes", "3", "--steps", "2")
    assert train_emoji.main(["words", "--ckpt", str(start), "--out", str(path), *more]) == 0
    before, after = tensors_of(start), tensors_of(path)
    [changed] = [key for key, value in before.items() if not torch.equal(after[key], value)]
    assert changed.endswith("token_embedding.weight")


def test_a_packed_checkpoint_is_the_same_model_with_its_words(start: Path, tmp_path: Path) -> None:
    path = tmp_path / "packed.safetensors"
    assert train_emoji.main(["pack", "--ckpt", str(start), "--out", str(path)]) == 0
    assert path.stat().st_size < start.stat().st_size - 10_000_000
    whole, packed = tensors_of(start), tensors_of(path)
    assert whole.keys() == packed.keys()
    assert all(torch.equal(packed[key], value) for key, value in whole.items())
    words = ldm_lite.load(path, device="cpu").family.words.splitlines()
    assert "colours: white, black, red, orange, green, blue" in words, "those that the six captions have"
    assert not any("apple" in line for line in words)


@pytest.mark.slow
def test_a_text_encoder_learns_alone(renderer: Path, tmp_path: Path) -> None:
    bundled = str(files.bundled())
    more = ("--ckpt", bundled, "--scenes", "6", "--steps", "30", "--caption-dropout", "0", "--min-timestep", "900")
    path = run("text", renderer, tmp_path / "a", *more)
    values = losses(tmp_path / "a")
    assert np.mean(values[-5:]) < 0.7 * np.mean(values[:5])
    parts = run("text", renderer, tmp_path / "b", *more, "--minutes", "0")
    run("text", renderer, tmp_path / "b", *more, "--resume")
    assert losses(tmp_path / "b") == values
    assert parts.read_bytes() == path.read_bytes()
    before, after = tensors_of(files.bundled()), tensors_of(path)
    assert before.keys() == after.keys()
    changed = {key for key, value in before.items() if not torch.equal(after[key], value)}
    assert changed
    assert all(key.startswith("cond_stage_model.") for key in changed)
    known = ldm_lite.load(device="cpu").family
    assert ldm_lite.load(path, device="cpu").family == replace(known, words=""), "it may have learned others"
    assert (tmp_path / "a" / "loss.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.slow
def test_the_unet_learns_other_words_with_the_text_encoder(renderer: Path, tmp_path: Path) -> None:
    more = ("--ckpt", str(files.bundled()), "--scenes", "6", "--steps", "2", "--with-unet", "--reworded", "0.5")
    before, after = tensors_of(files.bundled()), tensors_of(run("text", renderer, tmp_path / "a", *more))
    changed = {key.split(".")[0] for key, value in before.items() if not torch.equal(after[key], value)}
    assert changed == {"cond_stage_model", "model"}
    between = tensors_of(run("text", renderer, tmp_path / "b", *more, "--way", "0.25"))
    key = "model.diffusion_model.out.2.weight"
    wanted = before[key].float().lerp(after[key].float(), 0.25)
    torch.testing.assert_close(between[key].float(), wanted, atol=1e-4, rtol=1e-3)  # float16
    assert not torch.equal(between[key], before[key])


@torch.no_grad()
def test_a_share_of_captions_has_other_words(bundled: Pipeline) -> None:
    """Which ones, and what they say, depends on an example's number alone."""
    scenes = torch.randint(0, 256, (3, 3, 128, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    captions, numbers = ["a cat", "two red apples", "a rocket on teal"], (4, 5, 6)
    plain = DiffusionLoss(bundled, {"unet": bundled.unet})

    def error(share: float, rows: slice) -> float:
        batch = Batch(scenes[rows], captions[rows], None, numbers[rows])
        return float(train_emoji.RewordedLoss(plain, share)(batch, Draws(0, numbers[rows])))

    usual, other = ([error(share, slice(row, row + 1)) for row in range(3)] for share in (0.0, 1.0))
    batch = Batch(scenes, captions, None, numbers)
    assert error(0.0, slice(None)) == pytest.approx(float(plain(batch, Draws(0, numbers))), rel=1e-5)
    assert error(1.0, slice(None)) == pytest.approx(sum(other) / 3, rel=1e-3)
    assert max(abs(a - b) for a, b in zip(usual, other, strict=True)) > 1e-5
    half = [error(0.5, slice(row, row + 1)) for row in range(3)]
    assert all(min(abs(h - a), abs(h - b)) < 1e-5 for h, a, b in zip(half, usual, other, strict=True))


def test_reconstructions_are_measured_and_drawn(
    renderer: Path, tmp_path: Path, small_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.png"
    command = ["reconstruct", "--renderer", str(renderer), "--scenes", "6", "--resolution", "32", "--device", "cpu"]
    assert train_emoji.main([*command, "--vae", str(small_path), "--out", str(sheet)]) == 0
    words = capsys.readouterr().out.split()
    psnr, edges = float(words[1]), float(words[words.index("error") + 1].removesuffix(","))
    vae, images = load_autoencoder(small_path, device="cpu"), []
    for colour in ("red", "green", "blue", "white", "black", "orange"):
        images.append(torch.from_numpy(np.asarray(Image.new("RGB", (32, 32), colour)).copy()).permute(2, 0, 1))
    x = torch.stack(images) / 127.5 - 1
    with torch.no_grad():
        y = vae.decode(vae.encode(x)[0]).clamp(-1, 1)
    assert psnr == pytest.approx(float((-10 * ((y - x) / 2).square().mean((1, 2, 3)).log10()).mean()), abs=0.02)
    assert edges == pytest.approx(
        float((y.diff(dim=2) - x.diff(dim=2)).abs().mean() + y.diff(dim=3).abs().mean()), abs=1e-3
    )
    assert texts.load(sheet).height > 32


def test_the_edge_error_is_that_of_differences_not_of_colours() -> None:
    x = torch.zeros(1, 3, 8, 8)
    assert train_emoji.edge_error(x + 0.5, x) == 0
    y = x.clone()
    y[..., 4:] = 1  # one step of 7 along each row
    assert train_emoji.edge_error(y, x) == pytest.approx(1 / 7)


@pytest.mark.slow
def test_an_autoencoder_learns(renderer: Path, tmp_path: Path, small_path: Path) -> None:
    path = run("autoencoder", renderer, tmp_path / "a", "--vae", str(small_path), "--steps", "9", "--lr", "2e-3")
    values = losses(tmp_path / "a")
    assert np.mean(values[-3:]) < np.mean(values[:3])
    assert ldm_lite.load(small_path, vae=path, device="cpu").vae.spec == load_autoencoder(small_path).spec
    new = run("autoencoder", renderer, tmp_path / "b", "--steps", "1")
    assert load_autoencoder(new, device="cpu").spec == train_emoji.EMOJI.vae


@pytest.mark.slow
def test_a_decoder_learns_alone(renderer: Path, tmp_path: Path) -> None:
    """A run that was stopped ends as one that was not, and latents stay."""
    more = ("--ckpt", str(files.bundled()), "--batch-size", "2", "--steps", "4")
    path = run("decoder", renderer, tmp_path / "a", *more)
    parts = run("decoder", renderer, tmp_path / "b", *more, "--minutes", "0")
    run("decoder", renderer, tmp_path / "b", *more, "--resume")
    assert parts.read_bytes() == path.read_bytes()
    before, after = tensors_of(files.bundled()), tensors_of(path)
    assert before.keys() == after.keys()
    changed = {key for key, value in before.items() if not torch.equal(after[key], value)}
    assert {key.split(".")[1] for key in changed} == {"decoder", "post_quant_conv"}
    assert all(key.startswith("first_stage_model.") for key in changed)
    assert ldm_lite.load(path, device="cpu").family == replace(ldm_lite.load(device="cpu").family, words="")


def test_slopes_are_compared_wherever_edges_lie_and_as_steep_as_they_are() -> None:
    x = torch.zeros(1, 3, 32, 32)
    x[..., 4:12] = 1  # both edges within the first of two squares
    moved = x.roll(2, 3)
    assert train_emoji.slope_error(moved, x, 16) == 0
    assert train_emoji.slope_error(x.roll(16, 3), x, 16) > 0.1  # they are in the other square
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    rippled = x + 0.05 * torch.tensor([1.0, -1.0]).repeat(16)
    for changed in (blurred, rippled):
        assert train_emoji.slope_error(changed, x, 16) > 0.1
    right, below, laplacian = train_emoji.slopes(x)
    assert below.abs().max() == 0
    assert torch.equal(right[0, 0, 0].nonzero().flatten(), torch.tensor([3, 11]))
    assert torch.equal(laplacian[0, 0, 31].nonzero().flatten(), torch.tensor([3, 4, 11, 12]))
    x[..., -1, -1] = 1  # a mark in the corner counts
    assert train_emoji.slopes(x)[2][0, 0, -1, -1] == -2


def test_details_are_what_a_blur_takes_away() -> None:
    x = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    assert train_emoji.details(x.mean((2, 3), keepdim=True).expand_as(x)).abs().max() < 1e-6
    stripes = torch.tensor([1.0, -1.0]).repeat(1, 1, 8, 4)  # as fine as can be: nothing is left of them
    torch.testing.assert_close(train_emoji.details(stripes)[..., 1:-1], stripes[..., 1:-1])
    edge = torch.zeros(1, 1, 3, 8)
    edge[..., 4:] = 1
    assert train_emoji.details(edge)[0, 0, 1].tolist() == [0, 0, 0, -0.25, 0.25, 0, 0, 0]  # added, it makes it steeper


@pytest.fixture
def decoder_loss(bundled: Pipeline) -> train_emoji.DecoderLoss:
    """Of a copy of the bundled model, all of which is frozen otherwise."""
    networks = copy.deepcopy(dict(bundled.networks))
    for network in networks.values():
        network.requires_grad_(False)
    return train_emoji.DecoderLoss(bundled.with_networks(**networks), slopes=0.5)


def test_the_loss_of_a_decoder_reaches_it_alone(decoder_loss: train_emoji.DecoderLoss) -> None:
    scenes = torch.randint(0, 256, (2, 3, 128, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    decoder_loss(Batch(scenes, ["a cat", "a dog"], None, (0, 1)), Draws(0, (0, 1))).backward()
    for role, network in decoder_loss.model.networks.items():
        for name, parameter in network.named_parameters():
            learns = role == "vae" and name.startswith(("decoder.", "post_quant_conv."))
            assert (parameter.grad is not None) == learns, (role, name)


@torch.no_grad()
def test_a_decoder_draws_what_an_unsharp_mask_adds(decoder_loss: train_emoji.DecoderLoss) -> None:
    """On other latents than those that told it how: most of it, and edges are steeper."""
    z = torch.from_numpy(np.load(DATA / "bundled.npz")["moments"][:, :16])
    vae, unknown = decoder_loss.vae, z.flip(2)
    before = vae.decode(unknown)
    train_emoji.sharpen(vae, [z, z.flip(3)], 0.4)
    after, wanted = vae.decode(unknown), before + 0.4 * train_emoji.details(before)
    assert (after - wanted).square().mean() < 0.6 * (before - wanted).square().mean()
    assert train_emoji.slopes(after)[2].square().mean() > 1.1 * train_emoji.slopes(before)[2].square().mean()


def test_latents_that_are_noised_a_little_come_back_nearly_as_they_were(decoder_loss: train_emoji.DecoderLoss) -> None:
    """Those of a scene that the UNet knows; a timestep for each, and what comes depends on the example alone."""
    golden = dict(np.load(DATA / "bundled.npz"))
    z = torch.from_numpy(golden["moments"][:, :16])
    captions = [str(prompt) for prompt in golden["prompts"]]
    back = decoder_loss.denoised(z, captions, Draws(0, (0, 1)))
    apart = (back - z).square().mean((1, 2, 3)).sqrt() / z.std()
    assert 0.01 < apart.min() < apart.max() < 0.35
    torch.testing.assert_close(
        decoder_loss.denoised(z[1:], captions[1:], Draws(0, (1,))), back[1:], atol=1e-3, rtol=1e-3
    )


@pytest.mark.slow
def test_the_whole_model_in_one_command(renderer: Path, tmp_path: Path) -> None:
    """A step of each network in no time: the autoencoder first, then the model that reads its latents."""
    more = ["--minutes", "0", "--batch-size", "2", "--scenes", "6", "--data-workers", "0", "--device", "cpu"]
    command = ["whole", "--renderer", str(renderer), "--renderer-options", "{}", "--out", str(tmp_path), *more]
    assert train_emoji.main(command) == 0
    start, end = (
        ldm_lite.load(tmp_path / name, device="cpu") for name in ("start.safetensors", "run/model.safetensors")
    )
    vae = load_autoencoder(tmp_path / "vae" / "model.safetensors", device="cpu")
    for model in (start, end):
        assert model.family.resolution == 128
        assert torch.equal(model.vae.encoder.conv_out.weight, vae.encoder.conv_out.weight)
    assert not torch.equal(vae.encoder.conv_out.weight, ldm_lite.load(device="cpu").vae.encoder.conv_out.weight)
    assert (start.unet.out[2].weight == 0).all()
    assert (end.unet.out[2].weight != 0).any()
    assert (tmp_path / "run" / "latents" / "index.json").exists()


@pytest.mark.slow
def test_the_decoder_alone(renderer: Path, tmp_path: Path, small_path: Path) -> None:
    """Latents, and so every diffusion model of them, stay what they are."""
    path = run("autoencoder", renderer, tmp_path, "--vae", str(small_path), "--freeze-encoder", "--steps", "2")
    after, before = (load_autoencoder(file, device="cpu") for file in (path, small_path))
    assert torch.equal(after.encoder.conv_out.weight, before.encoder.conv_out.weight.half().float())
    assert not torch.equal(after.decoder.conv_out.weight, before.decoder.conv_out.weight.half().float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("autoencoder", "--renderer", "none.py"), "none.py: is not a Python file"),
        (("autoencoder", "--batch-size", "0"), "got --batch-size 0, expected 1 to"),
        (("new", "--vae", "none.safetensors"), "none.safetensors: no such file"),
        (("text", "--ckpt", "none.safetensors"), "none.safetensors: no such file"),
        (("text", "--ckpt", "none.safetensors", "--reworded", "2"), "got --reworded 2.0, expected a share from 0 to 1"),
        (("decoder", "--ckpt", "none.safetensors", "--batch-size", "1"), "got --batch-size 1, expected 2 or more"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_emoji.main([*arguments, "--out", os.fspath(tmp_path / "out")]) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error

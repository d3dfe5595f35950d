"""IP-Adapter: its networks and runs with it, against the original's code and diffusers' UNet; and its files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import texts
import torch
import toy
from PIL import Image
from random_checkpoint import SMALL, small, state_dict
from runs import run_latents
from safetensors.torch import save_file

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.image import clip_crop, to_pixels
from ldm_lite.models.clip_vision import CLIPVisionEncoder, CLIPVisionSpec
from ldm_lite.models.ip_adapter import IPAdapter, IPAdapterSpec, UNetWithImages
from ldm_lite.models.unet import LDMUNet
from ldm_lite.txt2img import main
from ldm_lite.zoo.families import FAMILY_ROWS

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "ip_adapter.npz")
NOISE = toy.normal(9, 1, 4, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo, the adapters, once as a pickle of two dictionaries, and the image encoder."""
    path = tmp_path_factory.mktemp("ip")
    Image.fromarray(toy.photo()).save(path / "photo.png")
    for kind, spec in toy.IP_ADAPTERS.items():
        weights = toy.ip_adapter(spec, SMALL.unet)
        save_file(weights, path / f"{kind}.safetensors")
        parts: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
        for key, value in weights.items():
            part, _, name = key.partition(".")
            parts[part][name] = value
        torch.save(parts, path / f"{kind}.bin")
    save_file(toy.seer(), path / "seer.safetensors")
    return path


def built(spec: IPAdapterSpec, unet: Any) -> IPAdapter:
    with on_meta():
        network = LDMUNet(unet)
    adapter = IPAdapter(spec, network)
    adapter.load_state_dict(toy.ip_adapter(spec, unet))
    return adapter


def seer() -> CLIPVisionEncoder:
    encoder = CLIPVisionEncoder(toy.SEER)
    encoder.load_state_dict({key.removeprefix("vision_model."): value for key, value in toy.seer().items()})
    return encoder


def latents(pipe: Pipeline, **options: Any) -> torch.Tensor:
    """The last latents of the golden's run."""
    context, uncond = toy.embeddings()
    options = {"cond": context, "uncond": uncond, "noise": NOISE, "scale": 5.0} | options
    return run_latents(pipe, options.pop("prompt", None), steps=4, sampler="ddim", height=64, width=64, **options)


def control(folder: Path, file: str, rest: str = ":0.6") -> dict[str, Any]:
    return {"control": (f"{folder / file}:{folder / 'photo.png'}{rest}",), "clip_vision": folder / "seer.safetensors"}


@pytest.mark.parametrize("kind", toy.IP_ADAPTERS)
@torch.no_grad()
def test_tokens_are_the_originals(kind: str) -> None:
    weights = toy.ip_adapter(toy.IP_ADAPTERS[kind], SMALL.unet)
    assert (
        IPAdapterSpec.from_shapes({key: tuple(value.shape) for key, value in weights.items()})
        == (toy.IP_ADAPTERS[kind])
    )
    image = (to_pixels(clip_crop(Image.fromarray(toy.photo()), 32))[None] + 1) / 2
    encoder, adapter = seer(), built(toy.IP_ADAPTERS[kind], SMALL.unet)
    seen = encoder.pooled(image) if kind == "linear" else encoder(image, skip=1)
    assert toy.relative_error(seen[:, ..., ::4], GOLDEN[f"{kind}_seen"]) < 1e-5
    positive, negative = adapter.tokens(encoder, image)
    assert toy.relative_error(positive, GOLDEN[f"{kind}_tokens"]) < 1e-5
    assert toy.relative_error(negative, GOLDEN[f"{kind}_never"]) < 1e-5


@pytest.mark.parametrize(("kind", "suffix"), [("linear", "safetensors"), ("mlp", "bin"), ("resampler", "bin")])
def test_runs_end_as_with_the_originals_attention(pipe: Pipeline, folder: Path, kind: str, suffix: str) -> None:
    ours = latents(pipe, **control(folder, f"{kind}.{suffix}"))
    assert toy.relative_error(ours, GOLDEN[f"{kind}_latents"]) < 1e-4
    assert toy.relative_error(latents(pipe), GOLDEN[f"{kind}_latents"]) > 1e-3


@torch.no_grad()
def test_numbers_in_files_are_those_of_sdxls_blocks() -> None:
    """diffusers' order: down, up, middle; two blocks in each transformer."""
    family = small("sdxl_base")
    weights = {key.removeprefix("model.diffusion_model."): value for key, value in state_dict(family)}
    unet = LDMUNet(family.unet)
    unet.load_state_dict({key: weights[key] for key in unet.state_dict()})
    spec = toy.for_context(toy.IP_ADAPTERS["linear"], family.unet)
    adapter = built(spec, family.unet)
    x, context, y = toy.unet_inputs(family.unet)
    assert y is not None
    t = torch.tensor([500]).expand(len(x))
    sizes = torch.cat([torch.ones(128), torch.zeros(128)]).repeat(6)  # of six zeros
    y[:, -len(sizes) :] = sizes
    image = (to_pixels(clip_crop(Image.fromarray(toy.photo()), 32))[None] + 1) / 2
    tokens, _ = adapter.tokens(seer(), image)
    images = tuple(((k.expand(len(x), -1, -1), 0.6 * v.expand(len(x), -1, -1)),) for k, v in adapter(tokens))
    out = UNetWithImages(unet)(x, t, images, context=context, y=y)
    assert toy.relative_error(out, GOLDEN["xl"]) < 1e-5


def test_released_sizes() -> None:
    """Numbers and widths of ip-adapter_sd15 and ip-adapter-plus_sdxl_vit-h; CLIP ViT-H and bigG."""
    with on_meta():
        small_one = IPAdapter(
            IPAdapterSpec("linear", 1024, 768, num_tokens=4, width=0, mlp_width=0, depth=0, heads=0),
            LDMUNet(FAMILY_ROWS["sd1"].unet),
        )
        large = IPAdapter(
            IPAdapterSpec("resampler", 1280, 2048, num_tokens=16, width=1280, mlp_width=5120, depth=4, heads=20),
            LDMUNet(FAMILY_ROWS["sdxl_base"].unet),
        )
    shapes = {key: tuple(value.shape) for key, value in small_one.state_dict().items()}
    assert shapes["image_proj.proj.weight"] == (3072, 1024)
    widths = [320] * 2 + [640] * 2 + [1280] * 2 + [1280] * 3 + [640] * 3 + [320] * 3 + [1280]  # down, up, middle
    assert [shapes[f"ip_adapter.{2 * i + 1}.to_k_ip.weight"] for i in range(16)] == [(width, 768) for width in widths]
    assert len(shapes) == 4 + 32
    shapes = {key: tuple(value.shape) for key, value in large.state_dict().items()}
    assert IPAdapterSpec.from_shapes(shapes) == large.spec
    widths = [640] * 4 + [1280] * 20 + [1280] * 30 + [640] * 6 + [1280] * 10
    assert [shapes[f"ip_adapter.{2 * i + 1}.to_v_ip.weight"] for i in range(70)] == [(width, 2048) for width in widths]
    for width, mlp, layers, projection in ((1280, 5120, 32, 1024), (1664, 8192, 48, 1280)):
        spec = CLIPVisionSpec(224, 14, width, mlp, layers, 16, "gelu", projection)
        with on_meta():
            encoder = CLIPVisionEncoder(spec)
        shapes = {key: tuple(value.shape) for key, value in encoder.state_dict().items()}
        assert CLIPVisionSpec.from_shapes(shapes) == spec


@pytest.mark.slow
def test_ways_of_running_make_the_same_image(pipe: Pipeline, folder: Path, small_path: Path) -> None:
    control_options = control(folder, "resampler.bin")
    wanted = latents(pipe, **control_options)
    for options in ({"offload": "sequential"}, {"offload": "model"}, {"attention": "math"}):
        other_pipe = ldm_lite.load(small_path, device="cpu", **options)
        assert toy.relative_error(latents(other_pipe, **control_options), wanted.double().numpy()) < 1e-4
    twice = control_options | {
        "control": (*control_options["control"], *control(folder, "linear.bin", ":0")["control"])
    }
    assert toy.relative_error(latents(pipe, **twice), wanted.double().numpy()) < 1e-6  # weight 0: nothing
    assert torch.equal(latents(pipe, **control(folder, "resampler.bin", ":0")), latents(pipe))
    assert not torch.equal(latents(pipe, scale=1.0, **control_options), latents(pipe, scale=1.0))  # without guidance
    half = latents(pipe, **control(folder, "resampler.bin", ":0.6:0-0.5"))
    assert not torch.equal(half, wanted)
    batch = {name: value.expand(2, -1, -1) for name, value in zip(("cond", "uncond"), toy.embeddings(), strict=True)}
    several = latents(
        pipe, **control_options, **batch, prompt=["a", "b"], noise=NOISE.expand(2, -1, -1, -1), batch_size=2
    )
    assert toy.relative_error(several[1:], wanted.double().numpy()) < 1e-4


@pytest.mark.slow
def test_only_the_negative_prompts_branch_reads_the_empty_image(pipe: Pipeline, folder: Path) -> None:
    """Two halves of one prompt are that prompt, with and without guidance, of which the latter has no such branch."""
    control_options = control(folder, "resampler.bin") | {"cond": None, "uncond": None, "prompt_syntax": "a1111"}
    for scale in (1.0, 5.0):
        whole = latents(pipe, **control_options, scale=scale, prompt="a cat")
        halves = latents(pipe, **control_options, scale=scale, prompt="a cat:0.5 AND a cat:0.5")
        assert toy.relative_error(halves, whole.double().numpy()) < 1e-4


@pytest.mark.slow
def test_guidance_acts_on_the_image_where_both_prompts_are_one(pipe: Pipeline, folder: Path) -> None:
    """An image alone, without any text: as users run it."""
    text = {"cond": None, "uncond": None, "prompt": ""}
    context, _ = toy.embeddings()
    for prompts in (text, {"cond": context, "uncond": context}):
        options = control(folder, "linear.bin") | prompts
        little, much = (latents(pipe, **options, scale=scale) for scale in (2.0, 5.0))
        assert toy.relative_error(little, much.double().numpy()) > 1e-3


def test_openclips_names_of_the_image_encoder(pipe: Pipeline, folder: Path, tmp_path: Path) -> None:
    ours, theirs = toy.seer(), {}
    for key, value in ours.items():
        name = key.removeprefix("vision_model.").replace("encoder.layers.", "visual.transformer.resblocks.")
        for a, b in (("layer_norm", "ln_"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"), ("self_attn", "attn")):
            name = name.replace(a, b)
        theirs[name] = value
    for name in [name for name in theirs if ".q_proj." in name]:
        parts = [theirs.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        theirs[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    outside = {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        **{f"pre_layrnorm.{last}": f"ln_pre.{last}" for last in ("weight", "bias")},
        **{f"post_layernorm.{last}": f"ln_post.{last}" for last in ("weight", "bias")},
    }
    theirs = {f"visual.{outside[key]}" if key in outside else key: value for key, value in theirs.items()}
    theirs["visual.proj"] = theirs.pop("visual_projection.weight").T.contiguous()
    save_file(theirs, tmp_path / "open_clip.safetensors")
    for kind in ("linear", "mlp"):  # which read the pooled output, and the layer before the last
        control_options = control(folder, f"{kind}.safetensors")
        renamed = latents(pipe, **control_options | {"clip_vision": tmp_path / "open_clip.safetensors"})
        assert (
            toy.relative_error(renamed, latents(pipe, **control_options).double().numpy()) < 1e-5
        )  # a transposed weight


def test_a_folder_of_the_image_encoder_tells_its_heads(pipe: Pipeline, folder: Path, tmp_path: Path) -> None:
    save_file(toy.seer(), tmp_path / "model.safetensors")
    control_options = control(folder, "mlp.safetensors") | {"clip_vision": tmp_path}
    runs = {}
    for heads in (toy.SEER.heads, toy.SEER.heads * 2):
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
        runs[heads] = latents(pipe, **control_options)
    assert torch.equal(runs[toy.SEER.heads], latents(pipe, **control(folder, "mlp.safetensors")))
    assert not torch.equal(*runs.values())
    (tmp_path / "config.json").write_text('{"num_attention_heads": 7}')
    with pytest.raises(ValueError, match=r"its num_attention_heads cannot be 7: expected a divisor of 128"):
        latents(pipe, **control_options)


def test_the_command_and_its_mistakes(
    small_path: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.png"
    common = ["a cat", "--ckpt", str(small_path), "--device", "cpu", "--steps", "2", "--H", "64", "--W", "64"]
    common += ["--out", str(out)]
    linear = control(folder, "linear.bin")["control"][0]
    clip = ["--clip-vision", str(folder / "seer.safetensors")]
    assert main([*common, "--control", linear, *clip]) == 0
    assert "linear.bin" in texts.load(out).info["parameters"]
    weights = toy.ip_adapter(toy.IP_ADAPTERS["linear"], SMALL.unet)
    save_file(weights | {"ip_adapter.0.to_q_lora.down.weight": torch.ones(2, 2)}, tmp_path / "face.safetensors")
    portrait = {key.replace("proj.weight", "proj.0.weight"): value for key, value in weights.items()}
    save_file(portrait, tmp_path / "portrait.safetensors")
    save_file({key: value for key, value in weights.items() if ".3." not in key}, tmp_path / "short.safetensors")
    without = {key: value for key, value in toy.seer().items() if "visual_" not in key}
    save_file(without, tmp_path / "without.safetensors")
    wide = toy.ip_adapter(toy.for_context(toy.IP_ADAPTERS["linear"], small("sdxl_base").unet), SMALL.unet)
    save_file(wide, tmp_path / "wide.safetensors")
    for file, arguments, message in (
        (folder / "linear.bin", [], "an IP-Adapter needs the image encoder that it was trained with"),
        (tmp_path / "face.safetensors", clip, "is an IP-Adapter FaceID, which reads the embedding of a face"),
        (tmp_path / "portrait.safetensors", clip, "is an IP-Adapter FaceID"),
        (tmp_path / "short.safetensors", clip, "2 tensors missing (ip_adapter.3.to_k_ip.weight"),
        (tmp_path / "wide.safetensors", clip, "is for UNets with context 160"),
        (
            folder / "linear.bin",
            ["--clip-vision", str(tmp_path / "without.safetensors")],
            "whose pooled output is 48 w",
        ),
    ):
        assert main([*common, "--control", f"{file}:{folder / 'photo.png'}", *arguments]) == 2
        assert message in capsys.readouterr().err

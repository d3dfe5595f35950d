"""Every released file is detected by its keys and shapes alone, in any order, and other files are refused by name."""

import functools
import gzip
import importlib
import json
import random
from pathlib import Path

import pytest
import torch
from released import AUTOENCODERS, TRANSFORMERS
from torch import nn

from ldm_lite.checkpoint.reader import SGM, on_meta, parts_of
from ldm_lite.checkpoint.transformers import placed
from ldm_lite.core.files import Tensors
from ldm_lite.core.layers import Shapes
from ldm_lite.models.qwen3 import QWEN3_4B, QWEN25_7B
from ldm_lite.models.qwen_image import REFERENCES_AT_ZERO
from ldm_lite.zoo.families import FAMILY_ROWS, check_complete, detect_family, infer_vae, with_autoencoder_in
from ldm_lite.zoo.family import Spec, build_network

MANIFESTS = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "manifests.json.gz").read_bytes()))
UNET, STAGE, CLIP, OPEN_CLIP, COND = (
    "model.diffusion_model.",
    "first_stage_model.",
    "cond_stage_model.transformer.",
    "cond_stage_model.model.",
    "cond_stage_model.",
)
SD1 = {STAGE: "vae_kl_f8_sd", CLIP: "text_clip_l"}
SD2 = {STAGE: "vae_kl_f8_sd", OPEN_CLIP: "text_openclip_h14"}
SDXL = {STAGE: "vae_kl_f8_sd", f"{SGM}0.transformer.": "text_clip_l", f"{SGM}1.model.": "text_openclip_bigg14"}
FLUX = {
    "vae.": "vae_kl_f8_flux",
    "text_encoders.clip_l.transformer.": "text_clip_l",
    "text_encoders.t5xxl.transformer.": "t5_v1_1_xxl_encoder",
}
SD3 = {**FLUX, "text_encoders.clip_g.transformer.": "text_openclip_bigg14"}

# Family -> its file: the manifest under each prefix.
FILES: dict[str, dict[str, str]] = {
    "sd1": {UNET: "unet_sd1", **SD1},
    "sd1_inpaint": {UNET: "unet_sd1_inpaint", **SD1},
    "instruct_pix2pix": {**SD1},
    "lcm": {UNET: "unet_sd1", **SD1},
    "lcm_sdxl": {UNET: "unet_sdxl_base", **SDXL},
    "sd2": {UNET: "unet_sd2", **SD2},
    "sd_turbo": {UNET: "unet_sd2", STAGE: "vae_kl_f8_sd", f"{SGM}0.model.": "text_openclip_h14"},
    "sd2_inpaint": {UNET: "unet_sd2_inpaint", **SD2},
    "sd2_depth": {UNET: "unet_sd2_depth", **SD2},
    "sd2_unclip_h": {UNET: "unet_sd2_unclip_h", **SD2},
    "sd2_unclip_l": {UNET: "unet_sd2_unclip_l", **SD2},
    "sdxl_base": {UNET: "unet_sdxl_base", **SDXL},
    "sdxl_inpaint": {UNET: "unet_sdxl_inpaint", **SDXL},
    "sdxl_refiner": {UNET: "unet_sdxl_refiner", STAGE: "vae_kl_f8_sd", f"{SGM}0.model.": "text_openclip_bigg14"},
    "x4": {UNET: "unet_x4", STAGE: "vae_kl_f4_x4upscaler", OPEN_CLIP: "text_openclip_h14"},
    "ldm_text2img_large": {UNET: "unet_ldm_text2img_large", STAGE: "vae_kl_f8_sd", COND: "text_bert_ldm_large"},
    "ldm_text2img256": {UNET: "unet_ldm_text2img256", STAGE: "vae_vq_f4", COND: "text_bert_ldm_256"},
    "ldm_layout2img": {UNET: "unet_ldm_layout2img", STAGE: "vae_vq_f4", COND: "text_bert_layout"},
    "ldm_cin256_v2": {UNET: "unet_ldm_cin256_v2", STAGE: "vae_vq_f4"},
    "ldm_cin256": {UNET: "unet_ldm_cin256", STAGE: "vae_vq_f8"},
    "ldm_celeba_ffhq_beds256": {UNET: "unet_ldm_celeba_ffhq_beds256", STAGE: "vae_vq_f4"},
    "ldm_lsun_churches256": {UNET: "unet_ldm_lsun_churches256", STAGE: "vae_kl_f8_sd"},
    "ldm_inpainting_big": {UNET: "unet_ldm_inpainting_big", STAGE: "vae_vq_f4_noattn", COND: "vae_vq_f4_noattn"},
    "ldm_bsr_sr": {UNET: "unet_ldm_bsr_sr", STAGE: "vae_vq_f4"},
    "ldm_semantic_synthesis": {UNET: "unet_ldm_semantic_synthesis", STAGE: "vae_vq_f4"},
    "rdm768": {UNET: "unet_rdm768", STAGE: "vae_kl_f16"},
    **{
        name: {UNET: f"transformer_{name}", **(SD3 if name.startswith("sd3") else FLUX)}
        for name in TRANSFORMERS
        if name not in ("z_image", "flux2_klein", "qwen_image")
    },
    "flux2_klein": {UNET: "transformer_flux2_klein", "vae.": "vae_flux2"},
    "z_image_turbo": {UNET: "transformer_z_image", "vae.": "vae_kl_f8_flux"},
    "qwen_image": {UNET: "transformer_qwen_image", "vae.": "vae_qwen_image"},
    "qwen_image_edit_2511": {
        UNET: "transformer_qwen_image",
        "vae.": "vae_qwen_image",
        "text_encoders.qwen25_7b.transformer.visual.": "vision_qwen25_vl",
    },
    "if_I": {"": "unet_if_I_XL"},
    "if_II": {"": "unet_if_II_L"},
}
BESIDE: dict[str, dict[str, tuple[int, ...]]] = {
    "ldm_cin256_v2": {"cond_stage_model.embedding.weight": (1001, 512)},
    "ldm_cin256": {"cond_stage_model.embedding.weight": (1000, 512)},
    "ldm_semantic_synthesis": {"cond_stage_model.channel_mapper.weight": (3, 182, 1, 1)},
    "ldm_lsun_churches256": {"scale_factor": ()},
    "x4": {"low_scale_model.betas": (1000,)},
    "lcm": {f"{UNET}cond_proj.weight": (320, 256)},
    "lcm_sdxl": {f"{UNET}cond_proj.weight": (320, 256)},
    "instruct_pix2pix": {  # as Stable Diffusion 1.x, but for the first convolution
        UNET + key: tuple(shape) for key, shape in MANIFESTS["unet_sd1"]["shapes"].items()
    }
    | {f"{UNET}input_blocks.0.0.weight": (320, 8, 3, 3)},
}
BUFFERS = {"betas": (1000,), "denoiser.sigmas": (1000,), "noise_augmentor.betas": (1000,), "model_ema.decay": ()}


def opened(shapes: Shapes, name: str = "file.ckpt", order: int = 0) -> Tensors:
    """A checkpoint with only these shapes, shuffled."""
    items = list(shapes.items())
    random.Random(order).shuffle(items)
    return Tensors(Path(name), dict(items), lambda key: torch.zeros(shapes[key]))


@functools.cache
def built(spec: Spec) -> nn.Module:
    """The network of a spec, on the meta device: families share autoencoders and text encoders."""
    with on_meta():
        return build_network(spec)


BESIDE["flux2_klein"] = BESIDE["z_image_turbo"] = {
    f"text_encoders.qwen3_4b.transformer.model.{key}": tuple(value.shape)
    for key, value in built(QWEN3_4B).state_dict().items()
}
BESIDE["qwen_image_edit_2511"] = {
    f"text_encoders.qwen25_7b.transformer.model.{key}": tuple(value.shape)
    for key, value in built(QWEN25_7B).state_dict().items()
} | {f"{UNET}{REFERENCES_AT_ZERO}": (0,)}
BESIDE["qwen_image"] = {
    key: shape for key, shape in BESIDE["qwen_image_edit_2511"].items() if REFERENCES_AT_ZERO not in key
}
BESIDE["qwen_image"] |= {"text_encoders.qwen25_7b.transformer.visual.patch_embed.proj.weight": (1280, 3, 2, 14, 14)}


def under(prefix: str, manifest: str) -> dict[str, tuple[int, ...]]:
    return {prefix + key: tuple(shape) for key, shape in MANIFESTS[manifest]["shapes"].items()}


def file_of(name: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, manifest in FILES[name].items():
        shapes |= under(prefix, manifest)
    return shapes | BESIDE.get(name, {}) | BUFFERS


@pytest.mark.parametrize(
    ("name", "text", "autoencoder"),
    [
        ("flux_schnell", ["clip_l.safetensors", "t5xxl_fp16.safetensors"], "FLUX.1-schnell/ae.safetensors"),
        (
            "sd35_medium",
            ["clip_l.safetensors", "clip_g.safetensors"],
            "vae/diffusion_pytorch_model.safetensors",
        ),
        ("chroma", ["t5xxl_fp16.safetensors"], "FLUX.1-schnell/ae.safetensors"),
        ("flux2_klein", ["qwen_3_4b.safetensors"], "vae/flux2-vae.safetensors"),
        ("z_image", ["qwen_3_4b.safetensors"], "vae/ae.safetensors"),
        ("qwen_image", ["qwen_2.5_vl_7b_fp8_scaled.safetensors"], "vae/qwen_image_vae.safetensors"),
    ],
)
def test_what_a_transformer_lacks_is_named_with_its_file(name: str, text: list[str], autoencoder: str) -> None:
    with on_meta():
        unet = {key: tuple(value.shape) for key, value in build_network(TRANSFORMERS[name]).state_dict().items()}
    with pytest.raises(ValueError, match=r".*".join(f"`text_encoder=[^`]*{file}`" for file in text)):
        detect_family({"unet": unet}, {})
    likes = FAMILY_ROWS["z_image_turbo" if name == "z_image" else name].texts
    encoders = {
        role: {key: tuple(value.shape) for key, value in built(spec).state_dict().items()}
        for role, spec in likes.items()
    }
    with pytest.raises(ValueError, match=f"without its autoencoder: .*`vae=[^`]*{autoencoder}`"):
        detect_family({"unet": unet, **encoders}, {})


VAE = "sd-vae-ft-mse-original/vae-ft-mse-840000-ema-pruned.safetensors"
CLIPS = {"L": "flux_text_encoders/clip_l", "H": "stable-diffusion-2-1/text_encoder/model", "G": "text_encoders/clip_g"}


@pytest.mark.parametrize(
    ("name", "autoencoder", "texts"),
    [
        *((name, VAE, "L") for name in ("sd1", "sd1_inpaint", "instruct_pix2pix", "lcm")),
        *((name, VAE, "H") for name in ("sd2", "sd2_inpaint", "sd2_depth", "sd2_unclip_h", "sd2_unclip_l")),
        *((name, "sdxl-vae/sdxl_vae.safetensors", "LG") for name in ("sdxl_base", "sdxl_inpaint", "lcm_sdxl")),
        ("sdxl_refiner", "sdxl-vae/sdxl_vae.safetensors", "G"),
    ],
)
def test_what_a_unet_lacks_is_named_with_its_file(name: str, autoencoder: str, texts: str) -> None:
    """Text encoders in their order."""
    family = detect_family({"unet": parts_of(opened(file_of(name)))["unet"].shapes}, {})
    files = [f"`vae=[^`]*{autoencoder}`", *(f"`text_encoder=[^`]*{CLIPS[text]}.safetensors`" for text in texts)]
    for has, missing in (
        ({"unet"}, files),
        ({"unet", "vae"}, files[1:]),
        (family.specs.keys() - {"vae"}, files[:1]),
    ):
        named = " and ".join(missing) + (" fit" if len(missing) > 1 else " fits")
        with pytest.raises(ValueError, match=rf"give the missing networks with .*: {named}$"):
            check_complete(has, family.specs, family)


def test_a_file_that_nobody_has_is_not_named() -> None:
    family = FAMILY_ROWS["ldm_text2img_large"]
    with pytest.raises(ValueError, match=r"give the missing networks with `vae=FILE` and `text_encoder=FILE`$"):
        check_complete({"unet"}, family.specs, family)


def test_every_manifest_is_part_of_a_file_or_a_file() -> None:
    used = {manifest for file in FILES.values() for manifest in file.values()} | set(ALONE)
    assert used == set(MANIFESTS)
    by_metadata = {
        "z_image",
        "chroma_flash",
        "flux2_klein_base",
        "flux_kontext",
        "sdxl_turbo",
        "sd35_large_turbo",
        "flux_canny",
        "qwen_image_edit",
        "qwen_image_edit_2509",
    }
    assert set(FILES) == set(FAMILY_ROWS) - by_metadata


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("order", [0, *(pytest.param(order, marks=pytest.mark.slow) for order in (1, 2))])
def test_a_whole_file_is_its_family(name: str, order: int, caplog: pytest.LogCaptureFixture) -> None:
    """And every tensor is either loaded or known to carry no weights."""
    checkpoint = opened(file_of(name), order=order)
    components = placed(parts_of(checkpoint), {}, {})
    sgm = any(key.startswith(SGM) for key in checkpoint.shapes)
    family = detect_family({role: component.shapes for role, component in components.items()}, {}, sgm)
    assert repr(family) == repr(FAMILY_ROWS[name])  # a scale factor that is in the file alone is NaN
    check_complete(components, family.specs)
    assert set(components) == set(family.specs)
    assert "ignored" not in caplog.text


@pytest.mark.parametrize("name", FILES)
@pytest.mark.thin(6)
def test_the_networks_of_a_family_are_those_of_its_file(name: str) -> None:
    """By names and shapes, with nothing missing; the remaining tensors carry no weights."""
    for role, component in placed(parts_of(opened(file_of(name))), {}, {}).items():
        network = built(FAMILY_ROWS[name].specs[role])
        ours = {key: tuple(value.shape) for key, value in network.state_dict().items()}
        assert ours.items() <= component.shapes.items()
        assert not any(key in UNET for key in component.shapes.keys() - ours.keys())


PARAMETERS = {  # of whole models, counted from the original code
    "ldm_cin256_v2": 456_755_873,
    "ldm_cin256": 463_213_491,
    "ldm_celeba_ffhq_beds256": 329_378_945,
    "ldm_lsun_churches256": 378_620_779,
    "ldm_inpainting_big": 440_465_313,
    "ldm_bsr_sr": 168_945_345,
    "ldm_semantic_synthesis": 270_552_643,
    "rdm768": 1_405_091_363,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_as_many_parameters_as_the_original(name: str) -> None:
    networks = [built(spec) for spec in FAMILY_ROWS[name].specs.values()]
    assert sum(p.numel() for network in networks for p in network.parameters()) == PARAMETERS[name]


# What a manifest is as a file of its own: the role in which it is loaded, or words of the refusal.
ALONE: dict[str, str] = {
    **{f"vae_{name}": "vae" for name in AUTOENCODERS},
    "taesd_encoder": "vae",
    "taesd_decoder": "vae",
    "text_clip_l": "text_encoder",
    "text_openclip_h14": "text_encoder",
    "control_sd15": "control",
    "control_sd21": "control",
    "t2i_adapter_sd_rgb": "adapter",
    "t2i_adapter_sd_gray": "adapter",
    "t2i_adapter_light_color": "adapter",
    "t2i_adapter_sdxl": "adapter",
    "t2i_adapter_style": "style",
    "t5_v1_1_xxl_encoder": "text_encoder",
}


@pytest.mark.parametrize("name", ALONE)
def test_a_file_of_one_network_is_what_it_is(name: str) -> None:
    checkpoint, wanted = opened(under("", name)), ALONE[name]
    if " " in wanted:
        with pytest.raises(ValueError, match=wanted):
            parts_of(checkpoint)
        return
    components = parts_of(checkpoint)
    assert set(components) == {wanted}
    if name.removeprefix("vae_") in AUTOENCODERS:
        assert infer_vae(components["vae"].shapes) == AUTOENCODERS[name.removeprefix("vae_")]


def without(shapes: Shapes, part: str) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in shapes.items() if part not in key}


LOOK_ALIKES: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "svd": (file_of("sd2") | {f"{UNET}input_blocks.1.1.time_stack.0.norm1.weight": (320,)}, "Stable Video Diffusion"),
    "ssd-1b": (without(file_of("sdxl_base"), "middle_block.1."), "it is distilled"),
    "bk-sdm": (without(file_of("sd1"), "middle_block.1."), "it is distilled"),
    "playground": (file_of("sdxl_base") | {"edm_mean": (1, 4, 1, 1), "edm_std": (1, 4, 1, 1)}, "Playground 2.5"),
    "cosxl": (file_of("sdxl_base") | {"edm_vpred.sigma_max": (), "edm_vpred.sigma_min": ()}, "CosXL"),
    "altdiffusion": (file_of("sd1") | {"cond_stage_model.roberta.embeddings.LayerNorm.weight": (1024,)}, "AltDiff"),
    "radiance": (under("", "transformer_chroma") | {"nerf_blocks.0.norm.scale": (64,)}, "Chroma1-Radiance"),
    "flux.2 dev": (
        under("", "transformer_flux2_klein") | {"guidance_in.in_layer.weight": (3072, 256)},
        r"is FLUX.2 \[dev\], which reads text with Mistral 3",
    ),
    "qwen-image-layered": (
        under("", "transformer_qwen_image") | {"time_text_embed.addition_t_embedding.weight": (2, 3072)},
        "Qwen-Image-Layered",
    ),
    "redux": ({"redux_up.weight": (12288, 1152), "redux_down.weight": (4096, 12288)}, "is FLUX.1 Redux, to be used"),
    "hunyuan": ({"double_blocks.0.img_attn_qkv.weight": (9216, 3072)}, "a diffusion transformer that"),
    "pixart": ({"transformer_blocks.0.attn1.to_q.weight": (1152, 1152)}, "a diffusion transformer that"),
    "lumina": ({"cap_embedder.1.weight": (2304, 2304), "layers.0.x": (1,)}, r"Lumina \(not supported\)"),
    "z-image omni": ({"siglip_embedder.0.weight": (1152,), "cap_pad_token": (1, 3840)}, "Z-Image Omni or Edit"),
    "animatediff": ({"down_blocks.0.motion_modules.0.temporal_transformer.norm.weight": (320,)}, "AnimateDiff"),
    "lora": ({"lora_unet_mid_block_attentions_0_proj_in.lora_down.weight": (4, 1280)}, "a LoRA"),
    "loha": ({"lora_unet_mid_block_attentions_0_proj_in.hada_w1_a": (1280, 4)}, "a LyCORIS adapter"),
    "inversion": ({"emb_params": (3, 768)}, "a textual inversion embedding"),
    "diffusers": ({"down_blocks.0.resnets.0.conv1.weight": (320, 320, 3, 3)}, "an unsupported kind of UNet"),
    "gumbel": (under("", "vae_kl_f8_sd") | {"quantize.embed.weight": (8192, 256)}, "a Gumbel VQ autoencoder"),
    "unknown": ({"layers.0.weight": (3, 3)}, "holds no known UNet"),
    "another UNet": (
        file_of("sd1") | {f"{UNET}out.2.weight": (5, 320, 3, 3), f"{UNET}out.2.bias": (5,)},
        "unknown UNet: the nearest is sd1, from which it differs at out.2.weight",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_named_and_never_taken_for_another(name: str) -> None:
    """Trap 32: nothing falls back to Stable Diffusion 1."""
    shapes, wanted = LOOK_ALIKES[name]
    with pytest.raises(ValueError, match=wanted):
        detect_family({role: part.shapes for role, part in parts_of(opened(shapes)).items()}, {})


def test_the_same_name_of_another_width_is_another_family() -> None:
    """Trap 5: SD-Turbo and SDXL's refiner name their text encoder alike."""
    turbo, refiner = (file_of(name)[f"{SGM}0.model.ln_final.weight"] for name in ("sd_turbo", "sdxl_refiner"))
    assert (turbo, refiner) == ((1024,), (1280,))


def test_every_spec_of_a_family_has_a_network() -> None:
    specs = {spec for family in FAMILY_ROWS.values() for spec in family.specs.values()}
    with torch.device("meta"):
        assert all(isinstance(build_network(spec), torch.nn.Module) for spec in specs)


def test_the_table_of_families_is_that_of_their_modules() -> None:
    for name, module in FAMILY_ROWS.modules.items():
        rows = importlib.import_module(f"ldm_lite.families.{name}").ROWS
        assert tuple(rows) == module.rows
        contexts = {row.unet.context_dim for row in rows.values() if type(row.unet).__name__ == "LDMUNetSpec"}
        assert contexts == set(module.contexts)


def test_a_key_without_a_name_tells_no_family() -> None:
    """Most families have no autoencoder of their own, so no mark of one."""
    assert with_autoencoder_in({"": (1,)}) is None
    assert with_autoencoder_in({"bn.running_mean": (128,)}) is FAMILY_ROWS.modules["flux2"]

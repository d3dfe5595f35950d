"""LoRA files in kohya's and PEFT's format: merged, they give the results of kohya's and diffusers' own code."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from random_checkpoint import SMALL, random_tensor
from random_checkpoint import small as miniature
from random_checkpoint import write as write_checkpoint
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.adapters.lora import file_names, merge_lora, targets
from ldm_lite.checkpoint.reader import on_meta
from ldm_lite.families.sd1 import SD1
from ldm_lite.families.sdxl import SDXL
from ldm_lite.models.clip import CLIPTextModel
from ldm_lite.models.unet import LDMUNet
from ldm_lite.runtime.offload import Offloader
from ldm_lite.runtime.quantization import Quantized
from ldm_lite.zoo.family import build_network

GOLDEN = dict(np.load(Path(__file__).parents[1] / "data" / "lora.npz"))
SCALE, STEPS, GUIDANCE = 0.7, 4, 5.0


def golden(name: str) -> dict[str, object]:
    return json.loads(str(GOLDEN[name]))


def kohya() -> dict[str, Tensor]:
    """The file of the goldens."""
    values = {key: random_tensor(key, tuple(shape)) for key, shape in golden("shapes").items()}
    return values | {key: torch.tensor(value) for key, value in golden("alphas").items()}


def write(path: Path, tensors: dict[str, Tensor], **metadata: str) -> Any:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata=metadata or None)
    return ldm_lite.open_lora(path)


def networks(pipe: Pipeline) -> dict[str, torch.nn.Module]:
    return {"unet": pipe.unet, "text_encoder": pipe.text_encoder}


def check(pipe: Pipeline) -> None:
    """Check that the networks compute what kohya's did, and a run what diffusers' did."""
    x, context, _ = toy.unet_inputs(SMALL.unet)
    assert toy.relative_error(pipe.unet(x, toy.T, context), GOLDEN["unet"]) < 1e-5
    ids = torch.from_numpy(GOLDEN["ids"])
    text = pipe.text_encoder(ids)
    assert toy.relative_error(text[:, ::5], GOLDEN["text"]) < 1e-5
    plan = pipe.plan("ddim", STEPS)
    uncond, cond = text[:, None]
    latents = pipe.denoise(toy.normal(7, 1, 4, 8, 8), cond, uncond, plan, GUIDANCE)
    assert toy.relative_error(latents, GOLDEN["latents"]) < 1e-5
    image = pipe.vae.decode(latents / SMALL.scale_factor)
    assert toy.relative_error(image[..., ::3], GOLDEN["image"]) < 1e-5


def test_kohyas_file(tmp_path: Path, small: Pipeline) -> None:
    """Linears, convolutions of 1x1 and 3x3, alphas: merged into both networks, and removed again bit for bit."""
    before = {role: {k: v.clone() for k, v in net.state_dict().items()} for role, net in networks(small).items()}
    pointers = [p.data_ptr() for p in small.unet.parameters()]
    merged = small.lora(write(tmp_path / "a.safetensors", kohya()), SCALE)
    check(small)
    for role, prefix in (("unet", "lora_unet_"), ("text_encoder", "lora_te_text_model_")):
        changed = networks(small)[role].state_dict().items()
        norms = [norm for key, value in changed if (norm := float((value - before[role][key]).norm()))]
        wanted = [norm for name, norm in golden("changes").items() if name.startswith(prefix)]
        assert sorted(norms) == pytest.approx(sorted(wanted), rel=1e-4)
    assert pointers == [p.data_ptr() for p in small.unet.parameters()], "compiled code would run with the old weights"
    merged.remove()
    for role, network in networks(small).items():
        assert all(torch.equal(value, before[role][key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("form", ["unet.unet.", "lora_unet_unet_"])
def test_names_with_unet_twice_are_read(form: str, small: Pipeline, tmp_path: Path) -> None:
    """As diffusers' trainer wrote them for a time, and as a converter wrote these."""
    tensors = {}
    for key, value in kohya().items():
        module, _, part = key.removeprefix("lora_unet_").partition(".")
        end = f"_{part}" if part != "alpha" else "_lora_down.alpha"
        name = f"{form}{module}.{part}" if form == "unet.unet." else f"{form}{module}{end}"
        tensors[name if key.startswith("lora_unet_") else key] = value
    with small.lora(write(tmp_path / "a.safetensors", tensors), SCALE):
        check(small)


def test_the_format_of_peft(tmp_path: Path, small: Pipeline) -> None:
    """As diffusers writes it: dotted names, without alphas, which are folded into the weights here."""
    values, names = kohya(), golden("peft")
    tensors = {}
    for key, same in names.items():
        module = same.removesuffix(".lora_down.weight").removesuffix(".lora_up.weight")
        rank = len(values[f"{module}.lora_down.weight"])
        # without an alpha the rank is meant
        factor = float(values[f"{module}.alpha"]) / rank if "lora_A" in key else 1.0
        tensors[key] = values[same] * factor
    small.lora(write(tmp_path / "b.safetensors", tensors), SCALE)
    check(small)


def filled(name: str) -> dict[str, Tensor]:
    """Make the file of a golden as its script does: entries without a shape are alphas of 3."""
    shapes = {key: tuple(shape) for key, shape in golden(f"{name}.shapes").items()}
    return {key: random_tensor(key, shape) if shape else torch.tensor(3.0) for key, shape in shapes.items()}


@pytest.mark.parametrize("spelling", ["kohya", "peft"])
def test_both_text_encoders_of_sdxl(tmp_path: Path, spelling: str) -> None:
    """Trap 24: the second is OpenCLIP's, whose q, k and v are one tensor; files name them as transformers does."""
    write_checkpoint(tmp_path / "sdxl.safetensors", miniature("sdxl_base"))
    pipe = ldm_lite.load(tmp_path / "sdxl.safetensors", device="cpu")
    texts = {"text_encoder": pipe.text_encoder, "text_encoder_2": pipe.text_encoder_2}
    before = {role: {key: v.clone() for key, v in net.state_dict().items()} for role, net in texts.items()}
    tensors = filled("sdxl")
    if spelling == "peft":  # which has no alphas beside the factors
        names = golden("sdxl.peft")
        tensors = {key: tensors[same] * (3 / 4 if "lora_A" in key else 1) for key, same in names.items()}
    merged = pipe.lora(write(tmp_path / "a.safetensors", tensors), SCALE)
    ids = torch.from_numpy(GOLDEN["ids"])
    padded = ids.where((ids == 49407).cumsum(dim=1) <= 1, 0)
    hidden, pooled = pipe.text_encoder_2.context_and_pooled(padded)
    context = torch.cat([pipe.text_encoder(padded), hidden], dim=2)
    assert toy.relative_error(context[:, ::11], GOLDEN["sdxl.context"]) < 1e-5
    assert toy.relative_error(pooled, GOLDEN["sdxl.pooled"]) < 1e-5
    merged.remove()
    for role, network in texts.items():
        assert all(torch.equal(value, before[role][key]) for key, value in network.state_dict().items())


def test_the_text_encoder_of_stable_diffusion_2(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ldm_lite")
    write_checkpoint(tmp_path / "sd2.safetensors", miniature("sd2"))
    write(tmp_path / "a.safetensors", filled("sd2"))
    pipe = ldm_lite.load(tmp_path / "sd2.safetensors", device="cpu", lora=[f"{tmp_path / 'a.safetensors'}:{SCALE}"])
    assert "a.safetensors: 12 of 12 modules merged" in caplog.text  # of the two layers that transformers has of three
    ids = torch.from_numpy(GOLDEN["ids"])
    context = pipe.text_encoder(ids.where((ids == 49407).cumsum(dim=1) <= 1, 0))
    assert toy.relative_error(context[:, ::11], GOLDEN["sd2.context"]) < 1e-5


def test_every_module_of_sdxls_text_encoders_by_kohyas_names() -> None:
    with on_meta():
        networks = {"text_encoder": build_network(SDXL.text), "text_encoder_2": build_network(SDXL.text_encoders[1])}
    weights = {role: targets(network) for role, network in networks.items()}
    table = {
        name: weights[role][module]["weight"]
        for role, network in networks.items()
        for module, names in file_names(role, network).items()
        for name in names
    }
    downs = {key: shape for key, shape in golden("sdxl").items() if key.endswith("lora_down.weight")}
    assert len(downs) == 72 + 192
    assert all(list(table[key.split(".")[0]].shape[1:]) == shape[1:] for key, shape in downs.items())


def test_alpha_of_pefts_metadata(tmp_path: Path, small: Pipeline) -> None:
    down, up = toy.normal(0, 2, 64), toy.normal(1, 64, 2)
    key = "text_encoder.base_model.model.text_model.encoder.layers.0.self_attn.q_proj"
    tensors = {f"{key}.lora_A.default.weight": down, f"{key}.lora_B.default.weight": up}
    weight = small.text_encoder.encoder.layers[0].self_attn.q_proj.weight
    before = weight.clone()
    about = {"text_encoder.lora_alpha": 6, "text_encoder.use_rslora": False, "text_encoder_2.lora_alpha": 9}
    lora = write(tmp_path / "a.safetensors", tensors, lora_adapter_metadata=json.dumps(about))
    small.lora(lora, 0.5)
    assert torch.allclose(weight - before, 0.5 * 6 / 2 * up @ down, atol=1e-5)
    second = {key.replace("text_encoder", "text_encoder_2"): value for key, value in tensors.items()}
    lora = write(tmp_path / "a.safetensors", second, lora_adapter_metadata=json.dumps(about))
    assert [changes["weight"].scale for changes in lora.modules.values()] == [9 / 2]


def test_every_module_of_stable_diffusion_by_kohyas_names() -> None:
    with on_meta():
        unet, text = LDMUNet(SD1.unet), CLIPTextModel(SD1.text)
    table = {
        role: {name: f"{module}.weight" for module, names in file_names(role, net).items() for name in names}
        for role, net in (("unet", unet), ("text_encoder", text))
    }
    shapes = {role: net.state_dict() for role, net in (("unet", unet), ("text_encoder", text))}
    names = {key.split(".")[0] for key in golden("sd1")}
    by_name = {"unet": set(), "text_encoder": set()}
    for name in names:
        role = "unet" if name.startswith("lora_unet") else "text_encoder"
        key = table[role][name]
        by_name[role].add(key)
        down = golden("sd1")[f"{name}.lora_down.weight"]
        assert shapes[role][key].shape[1:] == torch.Size(down[1:])
    assert len(by_name["unet"]) == 192 + 86
    assert len(by_name["text_encoder"]) == 72


def test_several_loras_add_up(tmp_path: Path, small: Pipeline) -> None:
    lora, key = write(tmp_path / "a.safetensors", kohya()), "middle_block.1.transformer_blocks.0.attn1.to_q.weight"
    weight = small.unet.get_parameter(key)
    before = weight.clone()
    small.lora(lora, 1.0).remove()
    first = small.lora(lora, 1.0)
    change = weight - before
    second = small.lora(lora, -0.5)
    assert torch.allclose(weight - before, 0.5 * change, atol=1e-6)
    second.remove()
    first.remove()
    assert torch.equal(weight, before)
    small.lora(lora, 1.0)
    small.lora(lora, -1.0)
    assert torch.allclose(weight, before, atol=1e-6)


def test_alphas_that_mean_the_rank(tmp_path: Path, small: Pipeline) -> None:
    name = "lora_te_text_model_encoder_layers_0_mlp_fc1"
    tensors = {f"{name}.lora_down.weight": toy.normal(0, 2, 64), f"{name}.lora_up.weight": toy.normal(1, 256, 2)}
    weight = small.text_encoder.encoder.layers[0].mlp.fc1.weight
    before, changes = weight.clone(), []
    for alpha in (None, 0.0, 2.0):
        extra = {} if alpha is None else {f"{name}.alpha": torch.tensor(alpha)}
        merged = small.lora(write(tmp_path / f"{alpha}.safetensors", tensors | extra), 1.0)
        changes.append(weight - before)
        merged.remove()
    assert all(torch.equal(change, changes[0]) for change in changes)


def test_half_precision_is_computed_in_float32(tmp_path: Path, small_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu", dtype="bf16")
    weight = pipe.unet.get_parameter("middle_block.1.transformer_blocks.0.attn1.to_q.weight")
    before = weight.float()
    lora = write(tmp_path / "a.safetensors", kohya())
    pipe.lora(lora, 1.0)
    change = lora.modules["lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"]["weight"].change(before)
    assert torch.equal(weight, (before + change).bfloat16())


def test_the_log_names_what_does_not_match(tmp_path: Path, small: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ldm_lite")
    stray = {f"lora_unet_up_blocks_9.lora_{part}.weight": torch.ones(2, 2) for part in ("up", "down")}
    lora = write(tmp_path / "a.safetensors", kohya() | stray | {"emphasis": torch.ones(1)})
    small.lora(lora, 0.5)
    assert "ignored 1 tensors that belong to no LoRA: emphasis" in caplog.text
    assert "1 modules are not in this model and have no effect: lora_unet_up_blocks_9" in caplog.text
    count = len(golden("changes"))
    assert f"a.safetensors: {count} of {count + 1} modules merged, at 0.5" in caplog.text


def test_mistakes_are_one_line(tmp_path: Path, small: Pipeline, small_path: Path) -> None:
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    wide = {f"{name}.lora_down.weight": torch.ones(2, 1024), f"{name}.lora_up.weight": torch.ones(32, 2)}
    before = small.unet.get_parameter("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight").clone()
    for tensors, message in (
        (wide, r"is for another model: its .*attn2.to_k.weight is 32 x 1024, here it is 32 x 64"),
        (
            {f"x{key}": value for key, value in wide.items()},
            r"none of its 1 modules is in this model \(has xlora_unet_",
        ),
        ({f"{name}.lora_up.weight": torch.ones(2, 2)}, "lacks its part down: the file is damaged"),
        ({f"{name}.hada_w1_a": torch.ones(2, 2)}, "lacks its part hada_w1_b: the file is damaged"),
        (wide | {f"{name}.dora_scale": torch.ones(2)}, r"its parts do not fit together \(2\)"),
        ({f"{name}.vera_lambda_b": torch.ones(2)}, "holds VeRA, which is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            small.lora(write(tmp_path / "a.safetensors", tensors), 1.0)
    with pytest.raises(ValueError, match=r"is not a LoRA .*give a whole checkpoint as `ckpt`"):
        ldm_lite.open_lora(small_path)
    assert torch.equal(small.unet.get_parameter("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"), before)


def test_loading_with_loras(tmp_path: Path, small: Pipeline, small_path: Path) -> None:
    lora = write(tmp_path / "a.safetensors", kohya())
    small.lora(lora, 0.2)
    small.lora(lora, 0.5)
    pipe = ldm_lite.load(small_path, device="cpu", lora=[f"{tmp_path / 'a.safetensors'}:{x}" for x in (0.2, 0.5)])
    assert all(map(torch.equal, pipe.unet.state_dict().values(), small.unet.state_dict().values()))
    check(pipe)
    with pytest.raises(FileNotFoundError, match="no such file"):
        ldm_lite.load(small_path, device="cpu", lora=["none.safetensors:0.5"])


# ---- weights that are offloaded or quantised ------------------------------------------------------------------------

CPU = torch.device("cpu")


def weights_of(pipe: Pipeline) -> dict[str, Tensor]:
    """The weights that LoRAs change, as the networks compute with them."""
    offloader = pipe.offloader or Offloader({}, CPU)
    named = {
        f"{role}.{key}": value for role, network in networks(pipe).items() for key, value in network.named_parameters()
    }
    return {key: offloader.read(value, CPU).clone() for key, value in named.items() if key.endswith("weight")}


def kept(pipe: Pipeline) -> list[Quantized]:
    offloader = pipe.offloader or Offloader({}, CPU)
    every = (value for network in networks(pipe).values() for value in network.parameters())
    return [copy.deepcopy(offloader.kept(value)) for value in every]


def equal_bits(first: Quantized, second: Quantized) -> bool:
    if (first.scale is None) != (second.scale is None) or not torch.equal(
        *(quantized.values.float() for quantized in (first, second))
    ):
        return False
    return first.scale is None or second.scale is None or torch.equal(first.scale, second.scale)


def image(pipe: Pipeline) -> Tensor:
    [result] = pipe.txt2img("a red apple", steps=2, height=16, width=16, output="result")
    return result.pixels


@pytest.mark.parametrize(
    ("offload", "storage"),
    [
        *((None, None), ("sequential", "int8")),
        *(
            pytest.param(offload, storage, marks=pytest.mark.slow)
            for offload in (None, "model", "sequential")
            for storage in (None, "int8", "fp8")
            if (offload, storage) not in ((None, None), ("sequential", "int8"))
        ),
    ],
)
def test_merging_into_a_loaded_pipeline(
    tmp_path: Path, small: Pipeline, small_path: Path, offload: str | None, storage: str | None
) -> None:
    """Quantised weights keep their bits and are changed exactly; removal restores every bit, and the image."""
    lora, tuning = write(tmp_path / "a.safetensors", kohya()), {"offload": offload, "storage": storage}
    pipe = ldm_lite.load(small_path, device="cpu", **tuning)
    early = ldm_lite.load(small_path, device="cpu", lora=[f"{tmp_path / 'a.safetensors'}:{SCALE}"], **tuning)
    plain, before, before_image, restored = weights_of(small), kept(pipe), image(pipe), weights_of(pipe)
    small.lora(lora, SCALE)
    exact, wanted = weights_of(small), weights_of(early)

    with pipe.lora(lora, SCALE):
        changed = 0
        for key, value in weights_of(pipe).items():
            torch.testing.assert_close(value, restored[key] + (exact[key] - plain[key]), rtol=0, atol=1e-6)
            assert torch.equal(value, wanted[key])
            changed += not torch.equal(value, restored[key])
        assert changed == len(golden("changes"))
        now, at_loading = kept(pipe), kept(early)
        assert all(equal_bits(*pair) for pair in zip(now, before, strict=True) if pair[0].scale is not None)
        assert all(equal_bits(*pair) for pair in zip(now, at_loading, strict=True))
        with_lora = image(pipe)
        assert not torch.equal(with_lora, before_image)
        assert torch.equal(with_lora, image(early))
    assert all(map(equal_bits, kept(pipe), before))
    assert torch.equal(image(pipe), before_image)


def test_thirds_of_a_quantised_weight(tmp_path: Path) -> None:
    """OpenCLIP's q, k and v: other rows stay, several LoRAs are added, and each is removed in any order."""
    write_checkpoint(tmp_path / "sdxl.safetensors", miniature("sdxl_base"))
    pipe = ldm_lite.load(tmp_path / "sdxl.safetensors", device="cpu", storage="int8", offload="model")
    assert pipe.offloader is not None
    attention = pipe.text_encoder_2.transformer.resblocks[0].attn
    weight, width = attention.in_proj_weight, attention.out_proj.in_features
    name = "lora_te2_text_model_encoder_layers_0_self_attn_k_proj.lora_{}.weight"
    down, up = toy.normal(0, 2, width), toy.normal(1, width, 2)
    lora = write(tmp_path / "a.safetensors", {name.format("down"): down, name.format("up"): up})
    before, bits = pipe.offloader.read(weight, CPU).clone(), copy.deepcopy(pipe.offloader.kept(weight))

    def change() -> Tensor:
        assert equal_bits(pipe.offloader.kept(weight), bits)
        return pipe.offloader.read(weight, CPU) - before

    delta = torch.zeros_like(before)
    delta[width : 2 * width] = up @ down
    first = pipe.lora(lora, 1.0)
    torch.testing.assert_close(change(), delta)
    second = merge_lora(pipe.networks, [(lora, -0.5), (lora, 2.0)], pipe.offloader)
    torch.testing.assert_close(change(), 2.5 * delta)
    first.remove()
    torch.testing.assert_close(change(), 1.5 * delta)
    second.remove()
    assert torch.equal(change(), torch.zeros_like(before))


def test_quantised_weights_without_their_offloader(tmp_path: Path, small_path: Path) -> None:
    lora = write(tmp_path / "a.safetensors", kohya())
    for storage in ("int8", "fp8"):
        pipe = ldm_lite.load(small_path, device="cpu", storage=storage)
        before = kept(pipe)
        with pytest.raises(ValueError, match="the weights are quantised: merging needs the offloader"):
            merge_lora(pipe.networks, [(lora, 1.0)])
        assert all(map(equal_bits, kept(pipe), before))

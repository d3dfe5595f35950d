"""ControlNets in the format of diffusers, SDXL's among them: their files, whole runs, and what does not fit."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from diffusers_files import GOLDEN, original, save, told, weights_of
from PIL import Image
from random_checkpoint import small, write
from runs import run_latents
from safetensors.torch import save_file
from steps import controlled_output
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from toy import NEGATIVE, NOISE, PROMPT
from waiting import at_once

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.control.apply import ActiveControls
from ldm_lite.control.control import parse
from ldm_lite.control.loading import load_controls
from ldm_lite.models.controlnet import ControlInput, ControlInputs, ControlledUNet, ControlNet
from ldm_lite.runtime.compile import CompiledStep

XL = small("sdxl_base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SDXL in miniature; its ControlNets as a folder, as a pickle, and in the original's layout; and a photo."""
    path = tmp_path_factory.mktemp("xl")
    save(path / "base", "sdxl_base")
    Image.fromarray(toy.photo()).save(path / "photo.png")
    whole, lesser = weights_of("steers.sdxl"), weights_of("steers.sdxl_small")
    (path / "sdxl").mkdir()
    (path / "sdxl" / "config.json").write_text(json.dumps({"_class_name": "ControlNetModel"}))
    save_file(whole, path / "sdxl" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    torch.save(lesser, path / "sdxl_small")
    save_file(original(whole), path / "original.safetensors")
    save_file({key: value.half() for key, value in whole.items()}, path / "fp16.safetensors")
    return path


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return ldm_lite.load(folder / "base", metadata=told(XL), device="cpu")


def spec(folder: Path, net: str, rest: str = "") -> str:
    return f"{folder / net}:{folder / 'photo.png'}{rest}"


def run(pipe: Pipeline, controls: list[str]) -> Tensor:
    """The last latents of a guided run of DDIM, as the goldens'."""
    options = {"negative_prompt": NEGATIVE, "noise": NOISE, "height": 64, "width": 64, "control": controls}
    return run_latents(pipe, PROMPT, sampler="ddim", steps=4, scale=5.0, **options)


def asked(folder: Path, name: str, **files: str) -> list[str]:
    """The controls of one of the goldens' runs."""
    return [
        spec(folder, files.get(net, net), f":{weight}:0-{end}")
        for net, weight, end in zip(*toy.STEERED_XL[name], strict=True)
    ]


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["sdxl", "original.safetensors"])
@pytest.mark.parametrize("name", toy.STEERED_XL)
def test_a_run_of_sdxl_equals_diffusers(pipe: Pipeline, folder: Path, name: str, net: str) -> None:
    """With one, or two of which the second has fewer transformers and ends early; in either layout."""
    last = run(pipe, asked(folder, name, sdxl=net))
    assert toy.relative_error(last, GOLDEN[f"steered.{name}"]) < 1e-5


def test_the_configuration_of_a_folder_says_that_a_net_pools(pipe: Pipeline, folder: Path) -> None:
    config = folder / "sdxl" / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({"_class_name": "ControlNetModel", "global_pool_conditions": True}, indent=2))
    configured = run(pipe, [spec(folder, "sdxl", ":0.5")])
    config.write_text(before)
    assert torch.equal(configured, run(pipe, [spec(folder, "sdxl", ":0.5:pool")]))
    assert not torch.equal(configured, run(pipe, [spec(folder, "sdxl", ":0.5")]))


def test_a_net_with_other_heads_than_its_unet_is_refused(pipe: Pipeline, folder: Path) -> None:
    config = folder / "sdxl" / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({"attention_head_dim": 4}))
    pipe.txt2img("a cat", steps=1, control=[spec(folder, "sdxl")])
    for wrong in ({"attention_head_dim": 8}, {"norm_num_groups": 16}):
        config.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=f"sdxl: its {next(iter(wrong))} .*(but its UNet has 4|expected 32)"):
            pipe.txt2img("a cat", steps=1, control=[spec(folder, "sdxl")])
    config.write_text(before)


def test_half_precision_is_read(pipe: Pipeline, folder: Path) -> None:
    half, whole = (run(pipe, [spec(folder, name)]) for name in ("fp16.safetensors", "original.safetensors"))
    assert 0 < toy.relative_error(half, whole.numpy()) < 1e-3


def test_guess_mode_steers_the_last_branch_by_its_own_vector(pipe: Pipeline, folder: Path) -> None:
    x, context, y = toy.unet_inputs(XL.unet, h=8, w=8)
    assert y is not None
    active = ActiveControls(
        pipe,
        load_controls(pipe, parse([spec(folder, "sdxl", ":guess")])),
        pipe.plan("ddim", 2),
        (64, 64),
    )

    def out(y: Tensor) -> Tensor:
        return controlled_output(active, pipe.unet, x, toy.T, context, y=y)

    plain = pipe.unet(x, toy.T, context, y)
    torch.testing.assert_close(out(y)[0], plain[0], rtol=1e-4, atol=1e-5)
    net, hint = load_controls(pipe, parse([spec(folder, "sdxl")]))[0].network, active._nets[0][1]
    control = net(x[1:], toy.T[1:], context[1:], hint.hint, y[1:])  # type: ignore[operator,index]
    wanted = pipe.unet(
        x[1:],
        toy.T[1:],
        context[1:],  # type: ignore[index]
        y[1:],
        residuals=tuple(scale * residual for scale, residual in zip(hint.scales, control, strict=True)),
    )
    torch.testing.assert_close(out(y)[1:], wanted, rtol=1e-4, atol=1e-5)


def test_a_net_reads_its_part_of_a_longer_vector() -> None:
    """An LCM's begins with SDXL's and ends with the guidance scale's; and one without a vector reads none."""
    distilled = toy.DIFFUSERS_UNETS["lcm_sdxl"]
    whole, plain = replace(distilled, guidance_dim=None), replace(distilled, guidance_dim=None, vector_dim=None)
    x, context, y = toy.unet_inputs(distilled)
    assert y is not None
    unet = toy.network(distilled)
    for net_spec in (whole, plain):
        net = toy.fill(ControlNet(net_spec))
        hint = ControlInput(net.embed_hint(toy.picture()), torch.ones(10), num_branches=1, pool=False)  # type: ignore[operator]
        out = ControlledUNet(unet, [net])(x, toy.T, ControlInputs((hint,), None), context=context, y=y)  # type: ignore[arg-type,list-item]
        vector = y[:, : distilled.vector_dim] if net_spec is whole else None
        wanted = unet(x, toy.T, context, y, residuals=net(x, toy.T, context, hint.hint, vector))
        assert torch.equal(out, wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_whole_job_of_sdxl_is_one_graph(pipe: Pipeline, folder: Path) -> None:
    counter = CompileCounter()
    compiled = replace(pipe, run_row=CompiledStep("step", pipe.unet, counter))  # type: ignore[arg-type]
    last = run(compiled, asked(folder, "one"))
    assert toy.relative_error(last, GOLDEN["steered.one"]) < 1e-5
    assert counter.frame_count == 1


def test_commands_steer_sdxl_too(pipe: Pipeline, folder: Path, tmp_path: Path) -> None:
    """Also one whose UNet reads more channels than the ControlNet."""
    photo, mask = Image.fromarray(toy.photo()), Image.new("L", (64, 64), 255)
    control = (spec(folder, "sdxl"), spec(folder, "sdxl_small", ":0.5:guess"))
    [plain], [steered] = (
        pipe.img2img("a cat", [photo], steps=2, control=controls, output="result") for controls in ((), control)
    )
    assert not np.array_equal(plain.array, steered.array)
    write(tmp_path / "inpaint.safetensors", small("sdxl_inpaint"))
    reads_more = ldm_lite.load(tmp_path / "inpaint.safetensors", device="cpu")
    [plain], [steered] = (
        reads_more.inpaint("a cat", [photo], [mask], steps=2, control=controls, output="result")
        for controls in ((), control)
    )
    assert not np.array_equal(plain.array, steered.array)


def test_two_threads(pipe: Pipeline, folder: Path) -> None:
    def made() -> np.ndarray:
        return pipe.txt2img("a cat", steps=2, control=[spec(folder, "sdxl", ":0.7")], output="numpy")[0]

    wanted = made()
    assert all(np.array_equal(result, wanted) for result in at_once(made, made))


# ---- what does not fit ----------------------------------------------------------------------------------------------


def refused(pipe: Pipeline, folder: Path, values: Mapping[str, Tensor], message: str) -> None:
    torch.save(dict(values), folder / "wrong")
    with pytest.raises(ValueError, match=message) as caught:
        pipe.txt2img("a cat", steps=1, control=[spec(folder, "wrong")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vector_dim": 24}, r"is for UNets with vector 24 \(2816: Stable Diffusion XL\), but that of .* has 1632"),
        ({"context_dim": 64}, r"is for UNets with context 64 \(768: .*\), but that of .* has 160"),
        (
            {"model_channels": 64, "head_dim": 32},
            r"is for UNets with levels \(64, 128\), but that of .* has \(32, 64\)",
        ),
        (
            {"channel_mult": (1, 2, 2), "num_res_blocks": (1, 1, 1), "transformer_depth": (0, 2, 2)},
            r"is for UNets with levels \(32, 64, 64\), but that of .* has \(32, 64\)",
        ),
        ({"num_res_blocks": (2, 2)}, r"is for UNets with residual blocks \(2, 2\), but that of .* has \(1, 1\)"),
        ({"in_channels": 9}, "reads 9 channels, but the UNet of small .* 4"),
        ({"transformer_depth": (1, 2)}, "has attention where the UNet of .* has none: input_blocks.1.1"),
        ({"middle_depth": 3}, "has attention where the UNet of .* has none: middle_block.1.transformer_blocks.2.attn1"),
    ],
    ids=str,
)
def test_a_net_for_another_unet_is_refused(
    pipe: Pipeline, folder: Path, changed: dict[str, object], message: str
) -> None:
    levels = changed.get("channel_mult", (1, 2))
    net = replace(XL.unet, **{"cross_only": (False,) * len(levels), **changed})  # type: ignore[arg-type]
    refused(pipe, folder, toy.control(net), message)


def test_files_that_are_damaged_or_of_another_kind_are_named(pipe: Pipeline, folder: Path) -> None:
    whole, tensor = weights_of("steers.sdxl"), torch.zeros(1)

    def without(part: str) -> dict[str, Tensor]:
        return {key: value for key, value in whole.items() if part not in key}

    refused(pipe, folder, without("mid_block.resnets.1.conv2"), r"the control does not fit: 2 tensors missing")
    refused(pipe, folder, without("down_blocks.1.resnets.0"), "is an unsupported kind of UNet in diffusers' format")
    for part, missing in (("time_emb_proj", "input_blocks.1.0.emb_layers.1.weight"), ("down_blocks.0.res", "")):
        refused(pipe, folder, without(part), f"a tensor that every such network has is missing: {missing}")
    six = {**whole, "controlnet_cond_embedding.conv_in.weight": torch.zeros(16, 6, 3, 3)}
    refused(pipe, folder, six, r"of another shape \(input_hint_block.0.weight \(16, 6, 3, 3\)")
    for key, message in (
        ("task_embedding", r"is a ControlNet\+\+ \(union, ProMax\)"),
        ("down_blocks.0.base_to_ctrl.0.weight", "is a ControlNet-XS"),
        ("encoder_hid_proj.weight", r"the control does not fit: 1 tensors unexpected \(encoder_hid_proj.weight"),
    ):
        refused(pipe, folder, {**whole, key: tensor}, message)
    for key, message in (
        ("control_model.enc_zero_convs_out.0.0.weight", "is a ControlNet-XS"),
        ("ip_adapter.0.to_q_lora.down.weight", "is an IP-Adapter FaceID"),
        ("image_proj.proj.weight", "is an unsupported kind of IP-Adapter"),
        ("lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k.down.0.weight", "is a ControlNet-LLLite"),
        ("controlnet_blocks.0.weight", "is a ControlNet for a diffusion transformer"),
        ("controlnet_cond_embedding.conv_in.weight", "is an unsupported kind of ControlNet in diffusers' format"),
    ):
        refused(pipe, folder, {key: tensor, "transformer_blocks.0.weight": tensor}, message)


def test_a_net_given_as_the_checkpoint_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="is a ControlNet, to be used with a checkpoint: `control=FILE:IMAGE`"):
        ldm_lite.load(folder / "sdxl", device="cpu")

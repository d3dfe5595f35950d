"""GGUF files: values of every format (the goldens), weights that stay in blocks, and files that make no sense."""

import copy
import json
import pickle
import re
import struct
import time
import tracemalloc
from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import toy_chroma
import toy_flow
import toy_flux2
import toy_qwen_image
import toy_z_image
from flow_files import SPIECE
from PIL import Image
from random_checkpoint import SMALL, metadata
from torch import Tensor, nn
from toy_flow import all_in_one, save, weights

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.adapters.lora import merge_lora
from ldm_lite.checkpoint.reader import load_weights, open_checkpoint
from ldm_lite.control.control import parse
from ldm_lite.control.loading import load_controls
from ldm_lite.formats.gguf import open_gguf
from ldm_lite.runtime import aot
from ldm_lite.runtime.blocks import GGUF_FORMATS, BlockLinear, Blocks
from ldm_lite.runtime.setup import num_parameters
from ldm_lite.zoo.family import build_network

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "gguf.npz")
Stored = tuple[str, tuple[int, ...], bytes]
NAMES = sorted({name.partition("/")[0] for name in GOLDEN.files if "/" in name})


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, value: object) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return text(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return text(key) + struct.pack("<II", 4, value)


def gguf(path: Path, tensors: Mapping[str, Stored], **pairs: object) -> Path:
    """Write a file: each tensor is a format, a shape as torch has it, and its bytes."""
    table, data, alignment = b"", b"", pairs.get("general__alignment", 32)
    assert isinstance(alignment, int)
    for key, (form, shape, content) in tensors.items():
        sides = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        table += text(key) + sides + struct.pack("<IQ", GGUF_FORMATS[form].id, len(data))
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    head += b"".join(pair(key.replace("__", "."), value) for key, value in pairs.items()) + table
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def q8_0(value: Tensor) -> tuple[bytes, Tensor]:
    """A matrix in Q8_0, and what it is worth."""
    blocks = value.reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    numbers = (blocks / scale.float().clamp(min=1e-8)).round().clamp(-127, 127).to(torch.int8)
    content = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], dim=1)
    return content.numpy().tobytes(), (scale.float() * numbers.float()).reshape(value.shape)


def stored(tensors: Mapping[str, Tensor]) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, Tensor]]:
    """The tensors as ComfyUI-GGUF stores them, matrices of whole blocks in Q8_0; and what they are worth."""
    by_name, worth = {}, {}
    for key, value in tensors.items():
        values = value.float().contiguous()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            content, worth[key] = q8_0(values)
            by_name[key] = ("Q8_0", tuple(values.shape), content)
        else:
            by_name[key], worth[key] = ("F32", tuple(values.shape), values.numpy().tobytes()), values
    return by_name, worth


def test_every_format_has_a_golden() -> None:
    assert set(NAMES) == set(GGUF_FORMATS) - {"F32", "F16"}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_exactly_those_of_ggml(name: str, tmp_path: Path) -> None:
    blocks, values = (torch.from_numpy(GOLDEN[f"{name}/{what}"]) for what in ("bytes", "values"))
    shape = tuple(values.shape)
    path = gguf(tmp_path / "f.gguf", {"x.weight": (name, shape, blocks.numpy().tobytes())})
    assert torch.equal(open_checkpoint(path).read("x.weight"), values)
    if GGUF_FORMATS[name].values > 1:
        layer = BlockLinear(Blocks(blocks.flatten(), name, shape), None, torch.float32)
        x = toy.normal(1, 2, shape[1])
        assert torch.equal(layer(x), x @ values.T)
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["F32", "F16"])
def test_plain_values(name: str, tmp_path: Path) -> None:
    values = toy.normal(2, 3, 4, 5).to({"F32": torch.float32, "F16": torch.float16}[name])
    path = gguf(tmp_path / "f.gguf", {"x": (name, (3, 4, 5), values.numpy().tobytes())}, general__architecture="flux")
    assert torch.equal(open_checkpoint(path).read("x"), values.float())
    assert open_checkpoint(path).metadata == {"general.architecture": "flux"}


def test_a_flattened_tensor_gets_its_shape_back(tmp_path: Path) -> None:
    values = toy.normal(3, 2, 4, 4, 2)
    tensors = {"x": ("F32", (2, 32), values.numpy().tobytes())}
    path = gguf(tmp_path / "f.gguf", tensors, comfy__gguf__orig_shape__x=[2, 4, 4, 2])
    assert torch.equal(open_checkpoint(path).read("x"), values)


def linears(network: nn.Module) -> list[nn.Module]:
    return [layer for layer in network.modules() if isinstance(layer, (nn.Linear, BlockLinear))]


@pytest.mark.parametrize("name", ["flux_dev", "sd35_medium"])
@pytest.mark.thin(2)
def test_a_transformer_stays_in_blocks(name: str, tmp_path: Path) -> None:
    """And computes what its values do; with `storage` or `lora` it does not, and offloading moves the blocks."""
    family = toy_flow.small(name)
    parts = weights(family)
    tensors, worth = stored(parts["unet"])
    path = gguf(tmp_path / "unet.gguf", tensors, general__architecture="flux")
    rest = save(tmp_path / "rest.safetensors", all_in_one(family, parts | {"unet": worth}), metadata(family))
    about = {"device": "cpu", "t5_vocab": SPIECE}
    x, t, context, y = toy_flow.inputs(family.unet)
    more = toy_flow.more(family.unet)
    wanted = ldm_lite.load(rest, **about).unet(x, t, context, y, **more)
    for options in ({}, {"offload": "model"}, {"offload": "sequential"}):
        pipe = ldm_lite.load(rest, unet=path, **about, **options)
        with pipe.phase("unet"):
            assert torch.equal(pipe.unet(x, t, context, y, **more), wanted)
        kept = [layer for layer in linears(pipe.unet) if isinstance(layer, BlockLinear)]
        assert len(kept) == sum(form == "Q8_0" for form, _, _ in tensors.values()) > 10
        assert not any(isinstance(layer, BlockLinear) for layer in linears(pipe.text_encoder))
    pipe = ldm_lite.load(rest, unet=path, **about, storage="int8")
    assert not any(isinstance(layer, BlockLinear) for layer in linears(pipe.unet))


def whole_file(path: Path, source: Path) -> tuple[Path, Path]:
    """A checkpoint in blocks, as stable-diffusion.cpp writes it, and one with what its values are worth."""
    checkpoint = open_checkpoint(source)
    tensors, worth = stored({key: checkpoint.read(key) for key in checkpoint.shapes if "position_ids" not in key})
    about = checkpoint.metadata
    return gguf(path.with_suffix(".gguf"), tensors, **about), save(path.with_suffix(".safetensors"), worth, about)


def adapters(networks: Mapping[str, nn.Module], kind: str) -> dict[str, Tensor]:
    """An adapter of every linear of a transformer or UNet, and of a text encoder."""
    by_name: dict[str, Tensor] = {}
    for prefix, network in networks.items():
        for name, layer in network.named_modules():
            if not isinstance(layer, nn.Linear):
                continue
            out, into = layer.weight.shape
            draw = partial(toy.normal, len(by_name))
            parts = {
                "lora": {"lora_down.weight": draw(4, into) / into, "lora_up.weight": draw(out, 4)},
                "full": {"diff": 0.1 * draw(out, into)},
                "loha": {f"hada_w{i}_{x}": draw(*(out, 2) if x == "a" else (2, into)) / 4 for i in "12" for x in "ab"},
                "lokr": {"lokr_w1": draw(2, 2), "lokr_w2": 0.1 * draw(out // 2, into // 2)},
                "oft": {"oft_blocks": 0.1 * draw(out // 8, 8, 8), "alpha": torch.tensor(0.0)},
            }
            parts["dora"] = parts["lora"] | {"dora_scale": layer.weight.norm(dim=1, keepdim=True) * 1.1}
            key = prefix + name.replace(".", "_")
            by_name |= {f"{key}.{part}": value for part, value in parts[kind].items()}
    return by_name


def bytes_of(network: nn.Module) -> int:
    return sum(value.nbytes for value in network.state_dict().values())


def bits(*networks: nn.Module) -> list[Tensor]:
    return [value.clone() for network in networks for value in network.state_dict().values()]


@pytest.mark.parametrize("name", [name for name in NAMES if GGUF_FORMATS[name].values > 1])
def test_a_lora_beside_blocks(name: str, tmp_path: Path) -> None:
    """Only its small matrices are kept, as the file has them; each comes off exactly, in any order."""
    data, values = (torch.from_numpy(GOLDEN[f"{name}/{what}"]) for what in ("bytes", "values"))
    layer = BlockLinear(Blocks(data.flatten(), name, tuple(values.shape)), None, torch.float32)
    network, before, x = nn.ModuleDict({"layer": layer}), data.clone(), toy.normal(1, 2, values.shape[1])
    up, down = toy.normal(2, len(values), 2).half(), toy.normal(3, 2, values.shape[1]).half()
    path = save(tmp_path / "a.safetensors", {"layer.lora_A.weight": down, "layer.lora_B.weight": up})
    first, second = (merge_lora({"unet": network}, [(ldm_lite.open_lora(path), weight)]) for weight in (0.7, -3.0))
    wanted = values + (0.7 - 3.0) * (up.float() @ down.float())
    torch.testing.assert_close(layer(x), x @ wanted.T, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    beside = [factor for added in layer.changes for factor in added.change.factors if factor is not None]
    assert sum(value.nbytes for value in beside) == 2 * (up.nbytes + down.nbytes)
    assert num_parameters(network) == values.numel()
    first.remove()
    assert not torch.equal(layer.weight, values)
    second.remove()
    assert torch.equal(layer.weight, values)
    assert torch.equal(layer.blocks.view_as(before), before)


@pytest.mark.slow
def test_a_lora_that_compiled_code_would_not_see(tmp_path: Path) -> None:
    family = toy_flow.small("flux_schnell")
    source = save(tmp_path / "source.safetensors", all_in_one(family, weights(family)), metadata(family))
    in_blocks, _ = whole_file(tmp_path / "f", source)
    path = save(tmp_path / "a.safetensors", adapters({"lora_unet_": build_network(family.unet)}, "lora"))
    pipe = ldm_lite.load(in_blocks, lora=[path], compile="step", device="cpu", t5_vocab=SPIECE)
    with pytest.raises(ValueError, match=r"compiled code does not see .* give the LoRA when loading"):
        pipe.lora(path)
    with pytest.raises(ValueError, match="cannot have LoRAs on the weights of a GGUF file: leave out `lora`"):
        aot.export(pipe.unet, [()], tmp_path / "a.pt2")


@pytest.mark.slow
def test_a_control_of_differences_from_blocks(tmp_path: Path, small_path: Path) -> None:
    in_blocks, plain = whole_file(tmp_path / "f", small_path)
    base, wanted = open_checkpoint(plain), toy.control(SMALL.unet)
    names = {key: f"model.diffusion_model.{key}" for key in wanted}
    deltas = {key: wanted[key] - base.read(name) if name in base.shapes else wanted[key] for key, name in names.items()}
    save(tmp_path / "net.safetensors", deltas | {"difference": torch.ones(1)})
    Image.fromarray(toy.photo()).save(tmp_path / "photo.png")
    pipe = ldm_lite.load(in_blocks, device="cpu")
    [control] = load_controls(pipe, parse([f"{tmp_path}/net.safetensors:{tmp_path}/photo.png"]))
    assert isinstance(control.network, nn.Module)
    for key, value in control.network.state_dict().items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-5)


CASES = [("sd1", "lora", "sequential"), ("sd1", "dora", None), ("sd35_medium", "lora", "model")]
CASES += [("flux_dev", kind, None) for kind in ("full", "lokr", "oft")]


@pytest.mark.parametrize("options", [{}, {"offload": "sequential"}])
def test_blocks_are_pickled(options: dict[str, Any], tmp_path: Path, small_path: Path) -> None:
    in_blocks, plain = whole_file(tmp_path / "f", small_path)
    pipe = ldm_lite.load(in_blocks, device="cpu", **options)
    save(tmp_path / "a.safetensors", adapters({"lora_unet_": ldm_lite.load(plain, device="cpu").unet}, "lora"))
    size: dict[str, Any] = {"steps": 2, "width": 32, "height": 32, "output": "numpy"}
    with pipe.lora(tmp_path / "a.safetensors", 0.7):
        again, expected = pickle.loads(pickle.dumps(pipe)), pipe.txt2img("a cat", **size)[0]
    assert len(pickle.dumps(pipe)) < 1.25 * sum(map(bytes_of, pipe.networks.values())) + 2**21
    assert any(isinstance(layer, BlockLinear) for layer in again.unet.modules())
    for restored in (again, copy.deepcopy(again)):
        assert np.abs(restored.txt2img("a cat", **size)[0].astype(int) - expected).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "offload"), CASES)
def test_a_lora_is_added_to_blocks(name: str, kind: str, offload: str | None, tmp_path: Path, small_path: Path) -> None:
    """Two at once, at loading and afterwards: the blocks stay, the result is that of merging, both come off exactly."""
    about: dict[str, Any] = {"device": "cpu"}
    if name == "sd1":
        in_blocks, plain = whole_file(tmp_path / "f", small_path)
        x, context, _ = toy.unet_inputs(SMALL.unet)
        inputs: tuple[Tensor, ...] = (x, toy.T, context)
        more, encoders = {}, {"lora_te_": "text_encoder"}
    else:
        family = toy_flow.small(name)
        source = save(tmp_path / "source.safetensors", all_in_one(family, weights(family)), metadata(family))
        in_blocks, plain = whole_file(tmp_path / "f", source)
        about |= {"t5_vocab": SPIECE}
        inputs, more = toy_flow.inputs(family.unet), toy_flow.more(family.unet)
        encoders = {"lora_te1_": "text_encoder", "lora_te3_": f"text_encoder_{len(family.text_encoders)}"}
    merged = ldm_lite.load(plain, **about)
    for kind_of_file, file in ((kind, "a"), ("lora", "b")):
        roles = {"lora_unet_": merged.unet} | {prefix: merged.networks[role] for prefix, role in encoders.items()}
        save(tmp_path / f"{file}.safetensors", adapters(roles, kind_of_file))
    ids = torch.tensor([[5, 6, 7, 1]])

    def run(pipe: Pipeline) -> list[Tensor]:
        with pipe.phase(*pipe.networks):
            texts = [pipe.networks[role](ids) for role in encoders.values()]
            return [pipe.unet(*inputs, **more), *(t[0] if isinstance(t, tuple) else t for t in texts)]

    loras = [f"{tmp_path}/a.safetensors:0.7", f"{tmp_path}/b.safetensors:-0.3"]
    wanted = run(ldm_lite.load(plain, lora=loras, **about))
    early = ldm_lite.load(in_blocks, lora=loras, offload=offload, **about)
    pipe = ldm_lite.load(in_blocks, offload=offload, **about)
    networks, before, unchanged = (*pipe.networks.values(),), bits(*pipe.networks.values()), run(pipe)
    first = pipe.lora(tmp_path / "a.safetensors", 0.7)
    second = pipe.lora(tmp_path / "b.safetensors", -0.3)
    for out, early_out, exact in zip(run(pipe), run(early), wanted, strict=True):
        assert toy.relative_error(out, exact.double().numpy()) < 1e-5
        assert torch.equal(out, early_out)
    assert sum(map(bytes_of, pipe.networks.values())) == sum(value.nbytes for value in before)
    second.remove()
    alone = ldm_lite.load(in_blocks, lora=loras[:1], offload=offload, **about)
    assert all(map(torch.equal, run(pipe), run(alone)))
    first.remove()
    assert all(map(torch.equal, run(pipe), unchanged))
    assert all(map(torch.equal, bits(*networks), before))


def test_t5_has_the_names_of_llama_cpp(tmp_path: Path) -> None:
    family = toy_flow.small("flux_schnell")
    parts = weights(family)
    names = {
        "shared": "token_embd",
        "encoder.final_layer_norm": "enc.output_norm",
        "encoder.block.": "enc.blk.",
        "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
        **{f"layer.0.SelfAttention.{part}.": f"attn_{part}." for part in "qkvo"},
        "layer.0.layer_norm": "attn_norm",
        "layer.1.DenseReluDense.wi_0": "ffn_gate",
        "layer.1.DenseReluDense.wi_1": "ffn_up",
        "layer.1.DenseReluDense.wo": "ffn_down",
        "layer.1.layer_norm": "ffn_norm",
    }
    tensors, worth = stored(parts["text_encoder_2"])
    renamed = {}
    for key, value in tensors.items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        renamed[key] = value
    path = gguf(tmp_path / "t5.gguf", renamed, general__architecture="t5encoder")
    whole = save(tmp_path / "f.safetensors", all_in_one(family, parts | {"text_encoder_2": worth}), metadata(family))
    ids = torch.tensor([[5, 6, 1, 0]])
    wanted = ldm_lite.load(whole, device="cpu", t5_vocab=SPIECE).text_encoder_2(ids)
    pipe = ldm_lite.load(whole, text_encoder=path, device="cpu", t5_vocab=SPIECE)
    assert torch.equal(pipe.text_encoder_2(ids), wanted)
    assert any(isinstance(layer, BlockLinear) for layer in linears(pipe.text_encoder_2))


@pytest.mark.slow
@pytest.mark.parametrize("toy_family", [toy_chroma, toy_flux2])
def test_chroma_and_flux2_have_the_names_of_the_originals(toy_family: Any, tmp_path: Path) -> None:
    tensors, worth = stored(weights(toy_family.small())["unet"])
    path = gguf(tmp_path / "unet.gguf", tensors, general__architecture="flux")
    pipe = ldm_lite.load(path, **{name: value for name, value in toy_family.write(tmp_path).items() if name != "ckpt"})
    network = build_network(toy_family.SPEC)
    network.load_state_dict(worth)
    assert sum(isinstance(layer, BlockLinear) for layer in linears(pipe.unet)) > 10
    # Not the same bits: the one product reads its weights in another layout.
    torch.testing.assert_close(pipe.unet(*toy_family.inputs()), network(*toy_family.inputs()), rtol=1e-4, atol=1e-4)


QWEN = (  # names of llama.cpp
    (r"^norm\.", "output_norm."),
    (r"^embed_tokens\.", "token_embd."),
    (r"^layers\.", "blk."),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"mlp\.(\w+)_proj", r"ffn_\1"),
)


def qwen(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a text encoder with llama.cpp's names."""
    return {reduce(lambda name, row: re.sub(*row, name), QWEN, key): value for key, value in tensors.items()}


def test_qwen3_has_the_names_of_llama_cpp(tmp_path: Path) -> None:
    """And Z-Image's transformer those of ComfyUI."""
    files, parts = toy_z_image.write(tmp_path), weights(toy_z_image.small())
    tensors, worth = stored(parts["text_encoder"])
    unet, unet_worth = stored(parts["unet"])
    pipe = ldm_lite.load(
        gguf(tmp_path / "z_turbo.gguf", unet, general__architecture="lumina2"),
        text_encoder=str(gguf(tmp_path / "qwen.gguf", qwen(tensors), general__architecture="qwen3")),
        vae=files["vae"],
        device="cpu",
    )
    ids, _ = toy_z_image.token_ids()
    for role, values, inputs in (
        ("text_encoder", worth, (ids,)),
        ("unet", unet_worth, toy_z_image.inputs()),
    ):
        network = build_network(toy_z_image.small().specs[role])
        network.load_state_dict(values)
        assert any(isinstance(layer, BlockLinear) for layer in linears(pipe.networks[role]))
        assert torch.equal(pipe.networks[role](*inputs), network(*inputs))


def test_qwen25_has_the_names_of_llama_cpp_and_qwen_image_its_own(tmp_path: Path) -> None:
    shapes = json.loads(str(np.load(Path(__file__).parents[1] / "data" / "qwen_image.npz")["shapes"]))
    files = toy_qwen_image.write(tmp_path, shapes)
    whole = ldm_lite.load(files["ckpt"], **{name: value for name, value in files.items() if name != "ckpt"})
    text, worth = stored(whole.text_encoder.state_dict())
    unet, unet_worth = stored(whole.unet.state_dict())
    pipe = ldm_lite.load(
        gguf(tmp_path / "qwen_image.gguf", unet, general__architecture="qwen_image"),
        text_encoder=str(gguf(tmp_path / "qwen.gguf", qwen(text), general__architecture="qwen2vl")),
        vae=files["vae"],
        device="cpu",
    )
    ids = torch.arange(12)[None]
    for role, values, inputs in (("text_encoder", worth, (ids,)), ("unet", unet_worth, toy_qwen_image.inputs())):
        network = build_network(whole.family.specs[role])
        network.load_state_dict(values)
        assert sum(isinstance(layer, BlockLinear) for layer in linears(pipe.networks[role])) > 10
        assert torch.equal(pipe.networks[role](*inputs), network(*inputs))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "version": (struct.pack("<IQQ", 1, 1, 0), "version 1, expected 2 or 3"),
    "many tensors": (struct.pack("<IQQ", 3, 2**40, 0), "expected at most 65536"),
    "many pairs": (struct.pack("<IQQ", 3, 1, 2**40), "expected at most"),
    "long text": (struct.pack("<IQQQ", 3, 0, 1, 2**60), "a text of"),
    "ends early": (struct.pack("<IQQQ", 3, 0, 1, 100) + b"abc", "ends early"),
    "no header": (b"\3", "truncated or damaged"),
    "long array": (struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**60), "an array of"),
    "nested array": (struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "an array of"),
    "unknown value": (struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 99), "unknown type 99"),
    "alignment": (struct.pack("<IQQ", 3, 0, 1) + pair("general.alignment", 3), "expected a power of 2"),
    "format": (
        struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 32, 99, 0),
        "the format 99, which is not supported",
    ),
    "known format": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 32, 18, 0), "format IQ3_XXS"),
    "dimensions": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<I", 2**30), "dimensions"),
    "unaligned": (
        struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 1, 0, 1) + bytes(99),
        "are missing",
    ),
    "huge": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQQIQ", 2, 2**31, 2**31, 8, 0), "are missing"),
    "huger": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 2**63, 8, 0), "has the shape"),
    "empty side": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 0, 0, 0), "has the shape"),
    "part of a block": (
        struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 33, 8, 0),
        "in blocks of 32",
    ),
    "offset": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 1, 0, 2**40), "are missing"),
    "not utf-8": (struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<II", 4, 1), "damaged"),
    "no tensors": (struct.pack("<IQQ", 3, 0, 0), "holds no tensors"),
    "alignment 1": (struct.pack("<IQQ", 3, 0, 1) + pair("general.alignment", 1), "expected a power of 2 from 8 on"),
    "shape of a million sides": (
        struct.pack("<IQQ", 3, 1, 1)
        + pair("comfy.gguf.orig_shape.a", [2**31 - 1] * 10**6)
        + text("a")
        + struct.pack("<IQIQ", 1, 1, 0, 0),
        "a has 1 values, which",
    ),
    "many numbers": (
        struct.pack("<IQQ", 3, 0, 5) + b"".join(pair(str(i), [1] * 2**19) for i in range(5)),
        "an array of 524288 values of type 5, expected at most 2097152 in all",
    ),
    "many texts": (
        struct.pack("<IQQ", 3, 0, 100) + (text("k") + struct.pack("<I", 8) + text("x" * 2**20)) * 100,
        "in a header of more than 6",
    ),
    "a long name": (struct.pack("<IQQ", 3, 1, 0) + text("a" * 2**20) + struct.pack("<IQIQ", 1, 33, 8, 0), "aaa"),
}


@pytest.mark.parametrize("alignment", [4, 7, 8, 9, 24, 32, 2**16, 2**16 + 8, 2**17])
def test_alignments_are_powers_of_two_from_8_to_65536(alignment: int, tmp_path: Path) -> None:
    content, _ = q8_0(torch.randn(4, 32))
    path = gguf(tmp_path / "f.gguf", {"a": ("Q8_0", (4, 32), content)}, general__alignment=alignment)
    if alignment in (8, 32, 2**16):
        assert "a" in open_gguf(path).shapes
    else:
        with pytest.raises(ValueError, match=f"alignment {alignment}, expected a power of 2"):
            open_gguf(path)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_makes_no_sense_is_one_line(kind: str, tmp_path: Path) -> None:
    content, match = HOSTILE[kind]
    path = tmp_path / "f.gguf"
    path.write_bytes(b"GGUF" + content)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ValueError, match=match) as error:
        open_checkpoint(path)
    assert time.process_time() - start < 10
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_embeddings_are_dequantised_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(3000, 64)
    content, worth = q8_0(table)
    file = open_gguf(gguf(tmp_path / "f.gguf", {"0.weight": ("Q8_0", (3000, 64), content)}))
    sizes: list[int] = []
    real = GGUF_FORMATS["Q8_0"]

    def dequantize(blocks: Tensor) -> Tensor:
        sizes.append(len(blocks))
        return real.dequantize(blocks)

    monkeypatch.setitem(GGUF_FORMATS, "Q8_0", real._replace(dequantize=dequantize))
    monkeypatch.setattr("ldm_lite.runtime.blocks.ONE_KERNEL_MAX_VALUES", 2**10)
    monkeypatch.setattr("ldm_lite.runtime.blocks.PIECE", 2**8)
    with torch.device("meta"):
        network = torch.nn.Sequential(torch.nn.Embedding(3000, 64))
    load_weights(network, file, "text encoder", torch.device("cpu"), torch.bfloat16, in_blocks=True)
    assert max(sizes) == 2**8
    assert torch.equal(network[0].weight, worth.bfloat16())  # never float32 as a whole
    assert torch.equal(file["0.weight"], worth)


def test_a_truncated_file_and_two_of_a_name(tmp_path: Path) -> None:
    path = gguf(tmp_path / "f.gguf", {"x": ("F32", (64,), bytes(256))}, comfy__gguf__orig_shape__y=[3])
    open_gguf(path)
    path.write_bytes(path.read_bytes()[:-32])
    with pytest.raises(ValueError, match="the values of x are missing"):
        open_gguf(path)
    gguf(path, {"x": ("F32", (64,), bytes(256))}, comfy__gguf__orig_shape__x=[3, 5])
    with pytest.raises(ValueError, match=r"x has 64 values, which .* does not fit"):
        open_gguf(path)
    gguf(path, {"x": ("F32", (1,), bytes(32)), "y": ("F32", (1,), bytes(32))})
    path.write_bytes(path.read_bytes().replace(text("y"), text("x")))
    with pytest.raises(ValueError, match="two tensors x"):
        open_gguf(path)

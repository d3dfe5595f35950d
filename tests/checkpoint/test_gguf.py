"""GGUF files: values of every format (the goldens), weights that stay in blocks, and files that make no sense."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
import toy_flow
from flow_files import SPIECE
from torch import Tensor, nn
from toy_flow import all_in_one, save, weights

import ldm_lite
from ldm_lite.checkpoint.gguf import open_gguf
from ldm_lite.checkpoint.reader import open_checkpoint
from ldm_lite.runtime.blocks import FORMATS, BlockLinear, Blocks
from ldm_lite.zoo.describe import describe

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "gguf.npz")
NAMES = sorted({name.partition("/")[0] for name in GOLDEN.files if "/" in name})


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, value: object) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return text(key) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return text(key) + struct.pack("<II", 4, value)


def gguf(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], **pairs: object) -> Path:
    """Write a file: each tensor is a format, a shape as torch has it, and its bytes."""
    table, data = b"", b""
    for key, (form, shape, content) in tensors.items():
        sides = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        table += text(key) + sides + struct.pack("<IQ", FORMATS[form].id, len(data))
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    head += b"".join(pair(key.replace("__", "."), value) for key, value in pairs.items()) + table
    path.write_bytes(head + bytes(-len(head) % 32) + data)
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
    found, worth = {}, {}
    for key, value in tensors.items():
        values = value.float().contiguous()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            content, worth[key] = q8_0(values)
            found[key] = ("Q8_0", tuple(values.shape), content)
        else:
            found[key], worth[key] = ("F32", tuple(values.shape), values.numpy().tobytes()), values
    return found, worth


def test_every_format_has_a_golden() -> None:
    assert set(NAMES) == set(FORMATS) - {"F32", "F16"}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_exactly_those_of_ggml(name: str, tmp_path: Path) -> None:
    blocks, values = (torch.from_numpy(GOLDEN[f"{name}/{what}"]) for what in ("bytes", "values"))
    shape = tuple(values.shape)
    path = gguf(tmp_path / "f.gguf", {"x.weight": (name, shape, blocks.numpy().tobytes())})
    assert torch.equal(open_checkpoint(path).read("x.weight"), values)
    if FORMATS[name].values > 1:
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
    rest = save(tmp_path / "rest.safetensors", all_in_one(family, parts | {"unet": worth}), describe(family))
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
    with (
        pytest.raises(ValueError, match="name the LoRA when that is loaded"),
        pipe.lora(_lora(tmp_path, family.unet.width)),
    ):
        pass
    for options in ({"storage": "int8"}, {"lora": str(_lora(tmp_path, family.unet.width))}):
        pipe = ldm_lite.load(rest, unet=path, **about, **options)
        assert not any(isinstance(layer, BlockLinear) for layer in linears(pipe.unet))


def _lora(folder: Path, width: int) -> Path:
    key = "context_embedder"  # diffusers' name in both
    pair = {f"{key}.lora_A.weight": torch.ones(1, 32), f"{key}.lora_B.weight": torch.ones(width, 1)}
    return save(folder / "lora.safetensors", pair)


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
    whole = save(tmp_path / "f.safetensors", all_in_one(family, parts | {"text_encoder_2": worth}), describe(family))
    ids = torch.tensor([[5, 6, 1, 0]])
    wanted = ldm_lite.load(whole, device="cpu", t5_vocab=SPIECE).text_encoder_2(ids)
    pipe = ldm_lite.load(whole, text_encoder=path, device="cpu", t5_vocab=SPIECE)
    assert torch.equal(pipe.text_encoder_2(ids), wanted)
    assert any(isinstance(layer, BlockLinear) for layer in linears(pipe.text_encoder_2))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "version": (struct.pack("<IQQ", 1, 1, 0), "version 1, wanted 2 or 3"),
    "many tensors": (struct.pack("<IQQ", 3, 2**40, 0), "wanted at most 65536"),
    "many pairs": (struct.pack("<IQQ", 3, 1, 2**40), "wanted at most"),
    "long text": (struct.pack("<IQQQ", 3, 0, 1, 2**60), "a text of"),
    "ends early": (struct.pack("<IQQQ", 3, 0, 1, 100) + b"abc", "ends early"),
    "no header": (b"\3", "truncated or damaged"),
    "long array": (struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**60), "an array of"),
    "nested array": (struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "an array of"),
    "unknown value": (struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 99), "unknown type 99"),
    "alignment": (struct.pack("<IQQ", 3, 0, 1) + pair("general.alignment", 3), "wanted a power of 2"),
    "format": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<IQIQ", 1, 32, 99, 0), "unknown format 99"),
    "dimensions": (struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<I", 2**30), "dimensions"),
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
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_makes_no_sense_is_one_line(kind: str, tmp_path: Path) -> None:
    content, match = HOSTILE[kind]
    path = tmp_path / "f.gguf"
    path.write_bytes(b"GGUF" + content)
    with pytest.raises(ValueError, match=match) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


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

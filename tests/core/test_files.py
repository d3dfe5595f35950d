"""Checkpoints of all kinds, written here with random weights, and files that are damaged or hostile."""

import io
import json
import os
import pickletools
import random
import struct
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_sd1 import CLIP_PREFIX, FACTS, UNET_PREFIX, VAE_PREFIX, lightning, weights, with_ema, write
from safetensors.torch import save_file
from torch import Tensor

from ldm_lite.core import Pipeline, load
from ldm_lite.core.layers import use_attention

WEIGHTS = weights()


def latents(pipe: Pipeline) -> Tensor:
    """What tells models apart: the latents of a run, which all but the decoder take part in."""
    *_, state = pipe.stream("a cat", steps=1, width=32, height=32)
    return state.latents


@pytest.fixture(scope="module")
def wanted(small: Pipeline) -> Tensor:
    """The latents of the miniature."""
    return latents(small)


# ---- kinds of files -------------------------------------------------------------------------------------------------


def without_text_model(content: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys of early exports."""
    return {key.replace("transformer.text_model.", "transformer."): value for key, value in content.items()}


def halved(content: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In float16."""
    return {key: value.half() if value.is_floating_point() else value for key, value in content.items()}


CONTENTS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "plain": lambda: WEIGHTS,
    "wrapped": lambda: {"state_dict": WEIGHTS},
    "lightning": lambda: lightning(WEIGHTS),
    "without text_model": lambda: without_text_model(WEIGHTS),
    "lightning with EMA": lambda: lightning(with_ema(weights(seed=1) | other_than_unet(), WEIGHTS)),
}


def other_than_unet() -> dict[str, Tensor]:
    """The weights of the other networks, which have no average."""
    return {key: value for key, value in WEIGHTS.items() if not key.startswith(UNET_PREFIX)}


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("content", CONTENTS)
def test_torch_files(content: str, container: str, tmp_path: Path, wanted: Tensor) -> None:
    path = write(tmp_path / "model.ckpt", CONTENTS[content](), container)
    assert torch.equal(latents(load(path, device="cpu", metadata=FACTS)), wanted)


@pytest.mark.parametrize("content", ["plain", "without text_model"])
def test_safetensors(content: str, tmp_path: Path, wanted: Tensor) -> None:
    path = write(tmp_path / "any.name", CONTENTS[content]())
    assert torch.equal(latents(load(path, device="cpu")), wanted)


def test_the_main_weights_in_place_of_the_average(tmp_path: Path, wanted: Tensor) -> None:
    path = write(tmp_path / "model.safetensors", with_ema(WEIGHTS, weights(seed=1)))
    assert torch.equal(latents(load(path, device="cpu", ema=False)), wanted)
    assert not torch.allclose(latents(load(path, device="cpu")), wanted, atol=1e-3)
    content = with_ema(WEIGHTS, weights(seed=1))
    del content["model_ema.diffusion_modeltime_embed0weight"]  # an average that is not complete is none
    assert torch.equal(latents(load(write(path, content), device="cpu")), wanted)


def test_half_precision_and_dtypes(tmp_path: Path, wanted: Tensor) -> None:
    path = write(tmp_path / "half.ckpt", halved(WEIGHTS), "zip")
    pipe = load(path, device="cpu", metadata=FACTS)
    assert pipe.unet.out[0].weight.dtype == torch.float32
    assert float((latents(pipe) - wanted).norm() / wanted.norm()) < 5e-3
    for dtype in ("fp16", torch.float16):
        assert load(path, device="cpu", metadata=FACTS, dtype=dtype).unet.out[0].weight.dtype == torch.float16
    with pytest.raises(ValueError, match="got dtype 'fp8', expected one of fp32, fp16, bf16"):
        load(path, dtype="fp8")


def test_networks_of_further_files_replace_those_of_the_first(tmp_path: Path, small_path: Path, wanted: Tensor) -> None:
    state = weights(seed=1)
    vae = {key.removeprefix(VAE_PREFIX): value for key, value in state.items() if key.startswith(VAE_PREFIX)}
    pipe = load(small_path, write(tmp_path / "vae.safetensors", vae), device="cpu")
    assert torch.equal(pipe.vae.quant_conv.weight, vae["quant_conv.weight"])
    assert torch.equal(latents(pipe), wanted)


def test_what_is_told_overrules_the_file(small_path: Path) -> None:
    pipe = load(small_path, device="cpu", metadata={"prediction": "v", "resolution": "128", "unet_num_heads": "8"})
    assert (pipe.schedule.prediction, pipe.family.resolution, pipe.unet.spec.heads) == ("v", 128, 8)
    with pytest.raises(ValueError, match="the metadata name the prediction 'x', expected eps or v"):
        load(small_path, metadata={"prediction": "x"})
    with pytest.raises(ValueError, match=r"5 heads do not divide the width 32 of the unet: give metadata unet_num_hea"):
        load(small_path, metadata={"unet_num_heads": "5"})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"predicton": "v"}, "no metadata 'predicton': did you mean prediction\\? expected some of family, title"),
        ({"zzz": "v"}, "no metadata 'zzz': expected some of family"),
        ({"num_timesteps": "1000"}, "no metadata 'num_timesteps'"),  # older files have it, nobody reads it
        ({"prediction": "x"}, "the metadata name the prediction 'x', expected eps or v"),
        ({"resolution": "96.5"}, "got metadata resolution='96.5', expected a whole number"),
        ({"resolution": None}, "got metadata resolution=None, expected a whole number"),
        ({"scale_factor": "large"}, "got metadata scale_factor='large', expected a number"),
        ({"scale_factor": "nan"}, "got metadata scale_factor='nan', expected a number"),
        ({"unet_num_heads": "four"}, "got metadata unet_num_heads='four', expected a whole number"),
        ({"family": "sd9"}, "unknown model"),
    ],
)
def test_what_is_told_must_be_known(metadata: dict[str, str], message: str, small_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load(small_path, device="cpu", metadata=metadata)
    assert "\n" not in str(raised.value)


def test_without_what_weights_do_not_tell_the_model_is_unknown(tmp_path: Path) -> None:
    path = write(tmp_path / "model.ckpt", WEIGHTS, "zip")
    with pytest.raises(
        ValueError, match="unknown model, with unet and vae and clip: its metadata, or `metadata=`, mus"
    ):
        load(path)


def test_a_noise_schedule_in_the_file_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alpha_bar = torch.linspace(0.999, 0.01, 1000)
    pipe = load(write(tmp_path / "a", {**WEIGHTS, "alphas_cumprod": alpha_bar}), device="cpu")
    np.testing.assert_array_equal(pipe.schedule.alpha_bar, alpha_bar.double().numpy())
    assert "a: using the noise schedule in the file, which is not Stable Diffusion 1.x's" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_family_s_schedule_is_known_when_it_is_rounded(
    dtype: torch.dtype, tmp_path: Path, small: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """As original files hold it; one that differs by 1 % is another, and so is any in float64."""
    known = torch.from_numpy(small.schedule.alpha_bar)
    pipe = load(write(tmp_path / "a", {**WEIGHTS, "alphas_cumprod": known.to(dtype)}), device="cpu")
    np.testing.assert_array_equal(pipe.schedule.alpha_bar, small.schedule.alpha_bar)
    assert "noise schedule" not in caplog.text
    for alpha_bar in ((0.99 * known).to(dtype), known * (1 - 1e-6)):
        pipe = load(write(tmp_path / "a", {**WEIGHTS, "alphas_cumprod": alpha_bar}), device="cpu")
        np.testing.assert_array_equal(pipe.schedule.alpha_bar, alpha_bar.double().numpy())
        assert "using the noise schedule in the file" in caplog.text
        caplog.clear()


def test_what_original_files_hold_besides_weights_is_not_unknown(
    small_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(small_path, device="cpu")  # betas, alphas_cumprod, position_ids
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_unknown_tensors_are_named_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: Tensor
) -> None:
    path = write(tmp_path / "a", {**WEIGHTS, "control.0.weight": torch.ones(2)})
    assert torch.equal(latents(load(path, device="cpu")), wanted)
    assert "a: ignored 1 unknown tensors: control.0.weight" in caplog.text


# ---- saving ---------------------------------------------------------------------------------------------------------


def test_a_saved_model_is_the_same(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "saved.safetensors")
    saved = load(tmp_path / "saved.safetensors", device="cpu")
    assert saved.family == pipe.family
    assert saved.name == "saved"
    assert np.array_equal(saved.schedule.alpha_bar, pipe.schedule.alpha_bar)
    for kind, network in pipe.networks.items():
        assert all(
            torch.equal(value, saved.networks[kind].state_dict()[key]) for key, value in network.state_dict().items()
        )
    assert saved.txt2img("a cat", steps=1)[0].tobytes() == pipe.txt2img("a cat", steps=1)[0].tobytes()


def test_weights_are_frozen_unless_they_are_to_be_trained(small_path: Path) -> None:
    for trainable in (False, True):
        networks = load(small_path, device="cpu", trainable=trainable).networks.values()
        assert {weight.requires_grad for network in networks for weight in network.parameters()} == {trainable}
        assert {weight.dtype for network in networks for weight in network.parameters()} == {torch.float32}
        assert not any(network.training for network in networks)


# ---- networks of one's own ------------------------------------------------------------------------------------------


def test_other_networks_leave_the_original_as_it_is(small: Pipeline, wanted: Tensor) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
            return self.scale * x

    assert not torch.allclose(latents(small.with_networks(unet=Scaled())), wanted, atol=1e-3)
    changed = small.with_attention(lambda q, k, v: 0 * q)
    assert not torch.allclose(latents(changed), wanted, atol=1e-3)
    use_attention(changed.unet, "sdpa")
    assert torch.equal(latents(changed), wanted)
    assert torch.equal(latents(small), wanted)


# ---- damaged and hostile files --------------------------------------------------------------------------------------


def refused(path: Path, match: str | None = None, seconds: float = 5.0) -> str:
    """What loading a file says, which is one line, at once."""
    started = time.process_time()
    with pytest.raises((ValueError, OSError), match=match) as raised:
        load(path, device="cpu", metadata=FACTS)
    assert time.process_time() - started < seconds
    assert "\n" not in str(raised.value)
    assert path.name in str(raised.value)
    return str(raised.value)


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    refused(path, "No such file")
    for content, message in {
        b"": "is not a checkpoint",
        b"hello": "is not a checkpoint",
        b"\x89PNG\r\n\x1a\n": "is not a checkpoint",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n": "is a Git LFS pointer",
    }.items():
        path.write_bytes(content)
        refused(path, message)
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "Is a directory")


def test_safetensors_files_that_are_damaged(tmp_path: Path, small_path: Path) -> None:
    path, content = tmp_path / "damaged.safetensors", small_path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    far = {**header, UNET_PREFIX + "out.2.bias": {"dtype": "F32", "shape": [4], "data_offsets": [2**40, 2**40 + 16]}}
    encoded = json.dumps(far).encode()
    for damaged in (
        content[:100],
        content[: len(content) // 2],
        content[:-1],
        content + b"more",
        struct.pack("<Q", 2**62) + content[8:],
        struct.pack("<Q", 2) + b"{]" + content[8:],
        struct.pack("<Q", len(encoded)) + encoded + content[8 + size :],
    ):
        path.write_bytes(damaged)
        refused(path, "is a truncated or damaged safetensors file")


U, V, T = UNET_PREFIX, VAE_PREFIX, CLIP_PREFIX
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "a missing weight": ({U + "out.2.bias": None}, r"unet does not fit: 1 tensors missing \(out.2.bias\)"),
    "one too many": ({U + "out.9.bias": torch.ones(4)}, r"unet does not fit: 1 tensors unexpected \(out.9.bias\)"),
    "another shape": ({U + "out.0.bias": torch.ones(5)}, r"unet does not fit: 1 tensors of another shape \(out.0.bias"),
    "a missing size": ({T + "embeddings.position_embedding.weight": None}, "position_embedding"),
    "a scalar for a matrix": ({V + "encoder.conv_in.weight": torch.tensor(1.0)}, "encoder.conv_in.weight"),
    "an empty matrix": ({U + "input_blocks.0.0.weight": torch.ones(0, 4, 3, 3)}, "input_blocks.0.0.weight"),
    "a gap between blocks": ({T + "encoder.layers.9.mlp.fc1.bias": torch.ones(256)}, "layers"),
    "a block of a high number": ({U + "input_blocks.99999999.0.weight": torch.ones(1)}, "input_blocks"),
    "a number of 4,000 digits": ({V + f"encoder.down.{'9' * 4000}.x": torch.ones(1)}, "misfit: "),
    "a schedule that rises": ({"alphas_cumprod": torch.linspace(0, 1, 1000)}, "this is not a noise schedule"),
    "no text encoder": ({key: None for key in WEIGHTS if key.startswith(T)}, "unknown model, with unet and vae"),
    "no known network": ({key: None for key in WEIGHTS if key[:3] in ("mod", "con", "fir")}, "holds no known network"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_networks_that_do_not_fit(misfit: str, tmp_path: Path) -> None:
    tensors, message = MISFITS[misfit]
    content = {key: value for key, value in {**WEIGHTS, **tensors}.items() if value is not None}
    refused(write(tmp_path / "misfit", content or {"x": torch.ones(1)}), message)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "empty")
    refused(tmp_path / "empty", "holds no known network")
    for number, content in enumerate(([], {}, {"a": 1}, {"state_dict": {}}, torch.ones(2), "text")):
        torch.save(content, tmp_path / f"{number}.ckpt")
        refused(tmp_path / f"{number}.ckpt", "holds no named tensors")


# ---- pickles --------------------------------------------------------------------------------------------------------


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_no_code_in_a_file_is_run(container: str, tmp_path: Path) -> None:
    evil = Evil(tmp_path / "proof")
    contents: list[Any] = [evil, {"x": evil}, {"state_dict": {"x": torch.ones(1), "y": [{"z": (evil,)}]}}]
    contents += [{**WEIGHTS, "model.x": evil}, {evil: 1}] if container == "zip" else []
    for content in contents:
        refused(write(tmp_path / "evil.ckpt", content, container), "mkdir")
        assert not (tmp_path / "proof").exists()


def pickled(path: Path, program: bytes, legacy: bool = False) -> Path:
    """A torch file with a pickle of one's own: what stands between its first operation and its last."""
    buffer, program = io.BytesIO(), b"\x80\x02" + program + b"."
    torch.save({"x": torch.zeros(6)}, buffer, _use_new_zipfile_serialization=not legacy)
    buffer.seek(0)
    if legacy:
        for _ in range(3):  # a magic number, the protocol, the system; then the content and the names of the storages
            list(pickletools.genops(buffer))
        path.write_bytes(buffer.getvalue()[: buffer.tell()] + program + b"\x80\x02].")
        return path
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w") as archive:
        for member in source.infolist():
            content = program if member.filename.endswith("data.pkl") else source.read(member)
            archive.writestr(member.filename, content)
    return path


NAMES = ["os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.getattr", "__builtin__.compile"]
NAMES += ["subprocess.Popen", "torch.hub.load", "torch.serialization.load", "numpy.load", "runpy.run_path"]
NAMES += ["functools.partial", "operator.attrgetter", "importlib.import_module", "ldm_lite.core.pipeline.load"]
NAMES += ["pytorch_lightning.callbacks.model_checkpoint.os.system", "omegaconf.system", "typing.sys.exit"]


def test_a_pickle_by_the_name_of_safetensors(tmp_path: Path, wanted: Tensor) -> None:
    """PyTorch opens files of that name as what it says."""
    torch.save(WEIGHTS, tmp_path / "model.safetensors")
    assert torch.equal(latents(load(tmp_path / "model.safetensors", device="cpu", metadata=FACTS)), wanted)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_pickle_that_names_anything_else_is_refused(legacy: bool, tmp_path: Path) -> None:
    command = f"touch {tmp_path / 'proof'}".encode()
    argument = b"X" + struct.pack("<I", len(command)) + command
    for name in NAMES:
        module, _, attribute = name.rpartition(".")
        program = f"c{module}\n{attribute}\n(".encode() + argument + b"tR"
        refused(pickled(tmp_path / "evil.ckpt", program, legacy))
        assert not (tmp_path / "proof").exists(), name


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu%stQ"
TENSOR = b"}X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE % b"K\x06" + b"%s%s%s\x89)tRs"
LARGE = b"\x8a\x06" + b"\xff" * 5 + b"\x7f"  # 2^47 - 1
BOMBS = {
    "a large bytearray": b"cbuiltins\nbytearray\n(\x8a\x07" + b"\x00" * 5 + b"\x01\x00" + b"tR",
    "bytes that are not there": b"\x8e" + struct.pack("<Q", 2**40) + b"x",
    "a memo far away": b"]r\xff\xff\xff\x7f",
    "tuples of tuples": b"K\x01" + b"q\x01h\x01\x86" * 400,
    "as keys": b"}K\x01" + b"q\x01h\x01\x86" * 400 + b"K\x01s",
    "deep tuples as keys": b"})" + b"\x85" * 200_000 + b"K\x01s",  # whose hash would overflow the stack
    "long tuples of long tuples": b"K\x01q\x01" + (b"(" + b"h\x01" * 1000 + b"tq\x01") * 100,
    "deep lists": b"]" * 50_000 + b"a" * 49_999,
    "a list in itself": b"]q\x00h\x00a",
    "a state_dict in itself": b"}q\x00X\x0a\x00\x00\x00state_dicth\x00s",
    "a tensor beyond its storage": TENSOR % (b"K\x03", b"K\x04\x85", b"K\x01\x85"),
    "strides beyond its storage": TENSOR % (b"K\x00", b"K\x02K\x02\x86", b"K\x05K\x02\x86"),
    "a negative stride": TENSOR % (b"K\x05", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "an expanded tensor": TENSOR % (b"K\x00", LARGE + b"\x85", b"K\x00\x85"),
    "a storage of another kind": b"}X\x01\x00\x00\x00x(X\x06\x00\x00\x00moduleK\x01K\x02K\x03K\x04tQs",
    "an identity that is a number": b"K\x01Q",
    "an extension": b"\x82\x01",
    "an object of a class of ours": b"cpytorch_lightning.callbacks.model_checkpoint\nModelCheckpoint\n)R}b",
    "millions of operations": b"]" + b"K\x010" * 600_000,
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_end_in_one_line_at_once(bomb: str, legacy: bool, tmp_path: Path) -> None:
    refused(pickled(tmp_path / "bomb.ckpt", BOMBS[bomb], legacy))


def test_compressed_and_large_members_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "good.ckpt", {"x": torch.zeros(6)}, "zip")
    refused(path, "holds no known network")
    for name in ("data.pkl", "data/0"):
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "bomb.ckpt", "w") as archive:
            for member in source.infolist():
                large = member.filename.endswith(name)
                content = bytes(50_000_000) if large else source.read(member)
                archive.writestr(member.filename, content, zipfile.ZIP_DEFLATED if large else zipfile.ZIP_STORED)
        assert (tmp_path / "bomb.ckpt").stat().st_size < 100_000
        refused(tmp_path / "bomb.ckpt", "is compressed or too large")


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_truncated_torch_files(container: str, tmp_path: Path) -> None:
    content = write(tmp_path / "whole.ckpt", {"x": torch.ones(3000)}, container).read_bytes()
    for share in (0.01, 0.1, 0.5, 0.9, 0.999):
        (tmp_path / "part.ckpt").write_bytes(content[: int(share * len(content))])
        refused(tmp_path / "part.ckpt")


@pytest.mark.parametrize("container", ["safetensors", "zip", "legacy"])
@pytest.mark.filterwarnings("ignore")
def test_files_with_random_damage_load_or_end_in_one_line(container: str, tmp_path: Path) -> None:
    """Damage to what describes the weights, which stands at the beginning or the end of a file."""
    state = random.Random(0)
    small = {key: value for key, value in WEIGHTS.items() if value.numel() < 2000}
    content = write(tmp_path / "whole", small, container).read_bytes()
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(state.randint(1, 4)):
            place = state.choice([state.randrange(4000), state.randrange(4000) - 4000, state.randrange(len(content))])
            damaged[place] = state.randrange(256)
        (tmp_path / "damaged").write_bytes(damaged)
        refused(tmp_path / "damaged")  # parts are missing in any case

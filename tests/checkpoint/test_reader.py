"""Reading files: formats by content, the same result for every container, hostile files refused in one line."""

import os
import pickle
import re
import struct
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
import torch
from random_checkpoint import SMALL
from safetensors.torch import load_file, save_file
from torch import Tensor

import ldm_lite
from ldm_lite import core, txt2img
from ldm_lite.checkpoint.reader import open_checkpoint, parts_of
from ldm_lite.core.networks import ema_copy
from ldm_lite.zoo.families import FROM_FOLDERS, METADATA_KEYS

METADATA = random_checkpoint.metadata(SMALL)


def weights(pipe: ldm_lite.Pipeline) -> dict[str, Tensor]:
    return {f"{n}.{k}": v for n, net in pipe.networks.items() for k, v in net.state_dict().items()}


def assert_same(a: ldm_lite.Pipeline, b: ldm_lite.Pipeline) -> None:
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture(scope="module")
def reference(small_path: Path) -> ldm_lite.Pipeline:
    return ldm_lite.load(small_path, device="cpu")


@pytest.mark.parametrize("container", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("variant", [{}, {"ema": True}, {"text_model": False}, {"wrapped": False}], ids=str)
@pytest.mark.thin(3)
def test_every_container_gives_the_same_pipeline(
    tmp_path: Path, reference: ldm_lite.Pipeline, container: str, variant: dict[str, bool]
) -> None:
    path = tmp_path / "model.bin"  # the extension says nothing
    random_checkpoint.write(path, SMALL, container=container, **variant)
    sys.modules.pop("pytorch_lightning.callbacks.model_checkpoint", None)
    pipe = ldm_lite.load(path, device="cpu", metadata=METADATA)
    assert_same(pipe, reference)
    assert ("EMA" in pipe.description) == ("ema" in variant)


def test_half_precision_files_load_as_rounded(tmp_path: Path, reference: ldm_lite.Pipeline) -> None:
    random_checkpoint.write(tmp_path / "half", SMALL, dtype=torch.float16)
    got, want = weights(ldm_lite.load(tmp_path / "half", device="cpu")), weights(reference)
    assert all(torch.equal(got[key], want[key].half().float()) for key in want)


def test_mixed_dtypes_prefixes_of_compilers_and_corrupt_position_ids(
    tmp_path: Path, small_path: Path, reference: ldm_lite.Pipeline
) -> None:
    tensors = load_file(small_path)
    ids = "cond_stage_model.transformer.text_model.embeddings.position_ids"
    tensors[ids] = tensors[ids].float() + 0.3
    tensors = {k.replace("diffusion_model.", "diffusion_model._orig_mod."): v for k, v in tensors.items()}
    first = "model.diffusion_model._orig_mod.out.2.weight"
    tensors[first] = tensors[first].double()
    save_file(tensors, tmp_path / "mixed", metadata=METADATA)
    assert_same(ldm_lite.load(tmp_path / "mixed", device="cpu"), reference)


def test_ema_choices(tmp_path: Path, reference: ldm_lite.Pipeline, small_path: Path) -> None:
    path = tmp_path / "ema"
    random_checkpoint.write(path, SMALL, ema=True)
    main = ldm_lite.load(path, device="cpu", ema="no")
    assert not torch.equal(main.unet.out[2].weight, reference.unet.out[2].weight)
    assert "main (not the file's EMA)" in main.description
    assert_same(ldm_lite.load(path, device="cpu", ema="yes"), reference)
    with pytest.raises(ValueError, match="no complete EMA copy"):
        ldm_lite.load(small_path, device="cpu", ema="yes")
    with pytest.raises(ValueError, match="expected one of auto, yes, no, original"):
        ldm_lite.load(path, device="cpu", ema="maybe")


def test_an_incomplete_ema_copy_is_not_used(tmp_path: Path) -> None:
    random_checkpoint.write(tmp_path / "ema", SMALL, ema=True)
    tensors = load_file(tmp_path / "ema")
    del tensors["model_ema.diffusion_modelout2weight"]
    save_file(tensors, tmp_path / "part", metadata=METADATA)
    parts = parts_of(open_checkpoint(tmp_path / "part"))
    assert ema_copy(parts.file, parts["unet"]) is None


def test_bare_files_and_other_files_networks(tmp_path: Path, small_path: Path, reference: ldm_lite.Pipeline) -> None:
    tensors, foreign = load_file(small_path), dict(random_checkpoint.state_dict(SMALL, seed=7))
    for name, prefix in (
        ("unet", "model.diffusion_model."),
        ("vae", "first_stage_model."),
        ("text", "cond_stage_model.transformer.text_model."),
    ):
        bare = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        bare |= {"loss.logvar": torch.zeros(1)} if name == "vae" else {}
        save_file(bare, tmp_path / name, metadata=METADATA if name == "unet" else {})
    save_file(foreign, tmp_path / "other", metadata=METADATA)
    parts = ldm_lite.load(tmp_path / "unet", vae=tmp_path / "vae", text_encoder=tmp_path / "text", device="cpu")
    assert_same(parts, reference)
    assert_same(
        ldm_lite.load(
            tmp_path / "other",
            unet=tmp_path / "unet",
            vae=small_path,
            text_encoder=tmp_path / "text",
            device="cpu",
        ),
        reference,
    )
    with pytest.raises(
        ValueError, match="holds only unet: give the missing networks with `vae=FILE` and `text_encoder=FILE`"
    ):
        ldm_lite.load(tmp_path / "unet", device="cpu")
    with pytest.raises(ValueError, match="holds no vae, only unet"):
        ldm_lite.load(small_path, vae=tmp_path / "unet", device="cpu")


def test_a_file_of_the_core_is_the_same_model(tmp_path: Path) -> None:
    """The core writes what weights do not tell under a prefix."""
    core.load(device="cpu").save(tmp_path / "saved.safetensors")
    saved, bundled = ldm_lite.load(tmp_path / "saved.safetensors", device="cpu"), ldm_lite.load(device="cpu")
    assert saved.family == replace(bundled.family, title=saved.family.title)
    assert_same(saved, bundled)


def test_what_other_programs_wrote_into_a_file_changes_nothing(tmp_path: Path, small_path: Path) -> None:
    """Whatever its names; ours have a prefix."""
    odd = dict.fromkeys((*METADATA_KEYS, *FROM_FOLDERS), "2")
    odd |= {"sampler": "lcm", "zero_snr": "no", "family": "SDXL 1.0", "prediction": "noise", "title": "My Merge"}
    path = tmp_path / "merge.safetensors"
    facts = {f"ldm_lite.{key}": value for key, value in METADATA.items()}
    save_file(load_file(small_path), path, metadata=odd | facts)
    merged, plain = ldm_lite.load(path, device="cpu"), ldm_lite.load(small_path, device="cpu")
    assert merged.family == plain.family
    assert np.array_equal(merged.schedule.alpha_bar, plain.schedule.alpha_bar)
    assert merged.schedule.spacing is None
    with pytest.raises(ValueError, match=r"the metadata name the family 'SDXL 1\.0', expected one of sd1"):
        ldm_lite.load(path, device="cpu", metadata={"family": "SDXL 1.0"})


# ---- hostile files --------------------------------------------------------------------------------------------------


class Evil:
    """A pickle that would make a file if it were run."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.proof),)


def make_hostile(kind: str, path: Path, small: Path) -> None:
    proof = path.parent / "proof"
    tensors = load_file(small)
    content = small.read_bytes()
    if kind == "pickle that calls a function":
        torch.save({"state_dict": tensors, "callbacks": Evil(proof)}, path)
    elif kind == "legacy pickle that calls a function":
        torch.save({"x": Evil(proof)}, path, _use_new_zipfile_serialization=False)
    elif kind == "bare pickle named safetensors":
        path.write_bytes(pickle.dumps(Evil(proof)))
    elif kind == "old protocol pickle":
        path.write_bytes(pickle.dumps(Evil(proof), protocol=0))
    elif kind == "eval in a pickle":
        path.write_bytes(b"\x80\x02cbuiltins\neval\nX\x04\x00\x00\x001+1 \x85R.")
    elif kind == "truncated safetensors":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "truncated header":
        path.write_bytes(content[:100])
    elif kind == "giant header":
        path.write_bytes(struct.pack("<Q", 2**60) + b"{" + content[9:200])
    elif kind == "broken header":
        path.write_bytes(struct.pack("<Q", 16) + b"{not json at all" + bytes(100))
    elif kind == "truncated zip":
        torch.save({"state_dict": tensors}, path)
        path.write_bytes(path.read_bytes()[:-5000])
    elif kind == "truncated legacy":
        torch.save({"state_dict": tensors}, path, _use_new_zipfile_serialization=False)
        path.write_bytes(path.read_bytes()[:-5000])
    elif kind == "another zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("readme.txt", "hello")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("<!DOCTYPE html><html>404</html>")
    elif kind == "lfs pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == "directory":
        path.mkdir()
    elif kind == "not a dict":
        torch.save([torch.zeros(2)], path)
    elif kind == "wrong shapes":
        key = "model.diffusion_model.out.0.weight"
        save_file({**tensors, key: torch.zeros(33)}, path, metadata=METADATA)
    elif kind == "missing tensors":
        save_file({k: v for k, v in tensors.items() if "mid.block_1" not in k}, path, metadata=METADATA)
    elif kind == "extra tensors":
        extra = {"model.diffusion_model.middle_block.3.weight": torch.zeros(1)}
        save_file({**tensors, **extra}, path, metadata=METADATA)
    elif kind == "no metadata":
        save_file(tensors, path)
    elif kind == "LoRA":
        save_file({"lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": torch.zeros(4, 4)}, path)
    elif kind == "SD3":
        save_file({"model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": torch.zeros(4, 4)}, path)
    elif kind == "Flux":
        save_file({"double_blocks.0.img_attn.qkv.weight": torch.zeros(4, 4)}, path)
    elif kind == "NaN weights":
        key = "model.diffusion_model.out.2.weight"
        tensors[key][0] = float("nan")
        save_file(tensors, path, metadata=METADATA)
    elif kind == "missing file":
        pass


HOSTILE = {
    "pickle that calls a function": r"nothing in it was run: its pickle names (os|posix|nt)\.mkdir",
    "legacy pickle that calls a function": r"nothing in it was run: its pickle names (os|posix|nt)\.mkdir",
    "bare pickle named safetensors": "is damaged, or more than weights, and nothing in it was run",
    "old protocol pickle": "is not a checkpoint",
    "eval in a pickle": r"nothing in it was run: its pickle names builtins\.eval",
    "truncated safetensors": "is a truncated or damaged safetensors file",
    "truncated header": r"is truncated: 100 bytes, but its header alone takes",
    "giant header": "is truncated",
    "broken header": "is a truncated or damaged safetensors file",
    "truncated zip": "is truncated or damaged",
    "truncated legacy": "is damaged",
    "another zip": "is damaged",
    "empty": "is empty",
    "text": "is not a checkpoint",
    "lfs pointer": "is a Git LFS pointer",
    "directory": "is a folder",
    "not a dict": "holds no known UNet",
    "wrong shapes": r"the unet does not fit: 1 tensors of another shape \(out.0.weight \(33,\) in place of \(32,\)\)",
    "missing tensors": r"the vae does not fit: 16 tensors missing \(decoder.mid.block_1.conv1.bias, ",
    "extra tensors": r"the unet does not fit: 1 tensors unexpected \(middle_block.3.weight\)",
    "no metadata": "unknown UNet: the nearest is .*, from which it differs at .* must give prediction, scale_factor, ",
    "LoRA": "is a LoRA",
    "SD3": "holds no known UNet",
    "Flux": "holds no known UNet",
    "NaN weights": r"not finite: 1 of the unet's weights hold NaN or infinity \(out.2.weight\): the file is damaged",
    "missing file": "no such file",
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_one_line_and_nothing_else(
    kind: str, tmp_path: Path, small_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.safetensors"
    make_hostile(kind, path, small_path)
    out = tmp_path / "out"
    arguments = ["a cat", "--ckpt", str(path), "--out", str(out), "--steps", "2", "--device", "cpu"]
    assert txt2img.main(arguments) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in captured.err
    assert re.search(HOSTILE[kind], errors[0]), errors[0]
    assert captured.out == ""
    assert not out.exists(), "something was written"
    assert not (tmp_path / "proof").exists(), "something was run"


def test_reading_a_pickle_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known by name is refused before it is imported."""
    torch.save(random_checkpoint.lightning({"x": torch.ones(2)}), tmp_path / "file")
    assert torch.equal(open_checkpoint(tmp_path / "file").read("x"), torch.ones(2))
    module = tmp_path / "hostile_module.py"
    module.write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil").write_bytes(b"\x80\x02chostile_module\nx\n.")
    with pytest.raises(ValueError, match=r"its pickle names hostile_module\.x"):
        open_checkpoint(tmp_path / "evil")


@pytest.mark.parametrize("with_settings", [False, True])
def test_a_hypernetwork_is_named(tmp_path: Path, with_settings: bool) -> None:
    """As AUTOMATIC1111's web UI writes it: networks for keys and values by width, the first files without settings."""
    layers = {"linear.0.weight": torch.ones(8, 4), "linear.0.bias": torch.ones(8)}
    settings = {"step": 100, "name": "a style", "activation_func": "relu", "sd_checkpoint": None}
    torch.save({320: (layers, layers), 768: (layers, layers), **(settings if with_settings else {})}, tmp_path / "a.pt")
    for load in (ldm_lite.load, ldm_lite.open_lora):
        with pytest.raises(ValueError, match=r"a\.pt: is a hypernetwork of .* which ldm_lite does not support$"):
            load(tmp_path / "a.pt")


def test_loads_of_one_open_checkpoint_share_no_weights(small_path: Path, tmp_path: Path) -> None:
    """A cast on the way gave memory back to the file: what the first load had changed in place was undone."""
    small = open_checkpoint(small_path)
    torch.save({key: small[key].float() for key in small}, tmp_path / "a.ckpt")
    file = open_checkpoint(tmp_path / "a.ckpt")
    about = {"metadata": dict(small.metadata), "device": "cpu"}
    first = ldm_lite.load(file, dtype="float32", **about)
    for parameter in first.unet.parameters():
        parameter.data.fill_(3.0)
    second, third = (ldm_lite.load(file, dtype=dtype, **about) for dtype in ("bfloat16", "float32"))
    assert all((parameter == 3).all() for parameter in first.unet.parameters())
    for model in (second, third):
        assert not any((parameter == 3).all() for parameter in model.unet.parameters() if parameter.numel() > 9)

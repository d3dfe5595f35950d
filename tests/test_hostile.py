"""Hostile and broken files through every door: refused in one line, at once, in little memory, with nothing run."""

import itertools
import json
import os
import re
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fuzz
import pytest
import random_checkpoint
import torch
from random_checkpoint import SMALL
from safetensors.torch import save_file

import ldm_lite
from ldm_lite import txt2img
from ldm_lite.adapters.lora import open_lora
from ldm_lite.adapters.textual_inversion import open_embeddings
from ldm_lite.checkpoint import reader
from ldm_lite.checkpoint.reader import open_checkpoint, open_source, parts_of
from ldm_lite.conditioning.inputs import read_image_statistics, read_tensor
from ldm_lite.core.layers import MOST_BLOCKS
from ldm_lite.formats.diffusers_layout import original_layout
from ldm_lite.models.bert import BERT_LARGE
from ldm_lite.models.clip import CLIP_L
from ldm_lite.models.clip_vision import CLIPVisionSpec
from ldm_lite.models.controlnet import infer_spec
from ldm_lite.models.style_adapter import StyleAdapterSpec
from ldm_lite.models.t2i_adapter import AdapterSpec
from ldm_lite.models.t5 import T5Spec
from ldm_lite.models.unet import LDMUNetSpec
from ldm_lite.models.unet_if import IFSpec
from ldm_lite.zoo.families import infer_vae

DOORS: dict[str, Callable[[Path], object]] = {
    "load": ldm_lite.load,
    "open_checkpoint": open_checkpoint,
    "open_lora": open_lora,
    "open_embeddings": open_embeddings,
    "read_tensor": read_tensor,
    "read_image_statistics": read_image_statistics,
}


@contextmanager
def bounded(seconds: float = 4.0) -> Iterator[None]:
    """What runs in this block takes no longer, whatever else the machine does; waiting for a pipe would never end."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


@contextmanager
def little_memory(megabytes: float = 90.0) -> Iterator[None]:
    """What runs in this block takes no more memory of Python's, where every byte of a bomb would be."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()
    assert peak < megabytes


# ---- fuzzing --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ldm_lite.Pipeline]:
    folder = tmp_path_factory.mktemp("fuzz")
    return folder, fuzz.prepare(folder)


def problems(model: tuple[Path, ldm_lite.Pipeline], seeds: range, seconds: float = 10) -> list[str]:
    """What is wrong with how cases end; the limit of time is for a busy machine."""
    outcomes = ((seed, fuzz.check(*model, seed, seconds)) for seed in seeds)
    return [f"seed {seed}: {problem}" for seed, problem in outcomes if problem]


@pytest.mark.filterwarnings("ignore")
def test_300_broken_files_work_or_end_in_one_clear_line(model: tuple[Path, ldm_lite.Pipeline]) -> None:
    assert not problems(model, range(300))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_3000_broken_files_work_or_end_in_one_clear_line(model: tuple[Path, ldm_lite.Pipeline]) -> None:
    assert not problems(model, range(10_000, 13_000))


# ---- files that are no files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_pipes_and_devices_are_refused_at_once(door: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "pipe"), (Path("/dev/zero"), "device"), (Path("/dev/urandom"), "device")):
        with bounded(), pytest.raises(ValueError, match=f"{path}: is a {kind}, expected a regular file"):
            DOORS[door](path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "scheduler/scheduler_config.json"])
def test_pipes_devices_and_giants_in_a_folder(name: str, tmp_path: Path, small_path: Path) -> None:
    inside = tmp_path / "unet" if name.startswith("scheduler") else tmp_path
    for folder in (inside, tmp_path / "scheduler"):
        folder.mkdir(exist_ok=True)
    if "index" not in name:
        tensors = {key: ("F32", shape) for key, shape in parts_of(open_checkpoint(small_path))["unet"].shapes.items()}
        fuzz._write(inside / "model.safetensors", tensors)
    path = tmp_path / name
    for make, message in (
        (os.mkfifo, "is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: path.write_bytes(b"[" * 10**5), "is nested too deeply"),
        (lambda path: path.write_bytes(b"[]"), "holds a JSON list, expected an object"),
        (lambda path: path.write_bytes(b"null"), "holds a JSON NoneType, expected an object"),
        (lambda path: path.write_bytes(b""), "is not valid JSON"),
        (lambda path: path.write_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "is not valid JSON"),
        (lambda path: path.touch() or os.truncate(path, 10**11), "is too large, expected at most 16 MiB"),
    ):
        path.unlink(missing_ok=True)
        make(path)
        with bounded(), pytest.raises(ValueError, match=f"{path.name}: {message}"):
            open_source(tmp_path)


# ---- shards ---------------------------------------------------------------------------------------------------------


def sharded(folder: Path, shards: object) -> Path:
    folder.mkdir()
    for name in ("one", "two"):
        save_file({name: torch.ones(2)}, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


OUTSIDE = ["../outside.safetensors", "../../etc/passwd", "/etc/passwd", "..", ".", "", "..\\outside.safetensors"]
OUTSIDE += [
    "C:\\x",
    "C:x",
    "x/../one.safetensors",
    "./one.safetensors",
    "one.safetensors\0",
    "\x1b[2J",
    3,
    None,
    ["one"],
    {},
]


def test_an_index_names_files_of_its_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"secret": torch.ones(2)}, tmp_path / "outside.safetensors")
    opened: list[Path] = []
    real = reader.open_file
    monkeypatch.setattr(reader, "open_file", lambda path, *a: opened.append(path) or real(path, *a))
    for i, name in enumerate(OUTSIDE):
        folder = sharded(tmp_path / str(i), {"one": "one.safetensors", "secret": name})
        with pytest.raises(ValueError, match=r"index.json: names .*, expected names of files in the same folder"):
            open_source(folder)
    assert not opened


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (None, "has no weight_map"),
        ({}, "has no weight_map"),
        (["one.safetensors"], "has no weight_map"),
        ({"one": "three.safetensors"}, "lacks three.safetensors, which model.safetensors.index.json names"),
        ({"one": "two.safetensors"}, "names one in two.safetensors, which lacks it"),
        ({str(i): f"{i}.safetensors" for i in range(1001)}, "names more than 1000 files"),
    ],
)
def test_what_is_wrong_with_an_index_is_said(shards: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ldm_lite.load(sharded(tmp_path / "x", shards), device="cpu")


def test_shards_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "snapshot", {"one": "one.safetensors", "two": "two.safetensors"})
    (tmp_path / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(tmp_path / "blobs" / path.stem)
        path.symlink_to(Path("..") / "blobs" / path.stem)
    file = open_source(folder)
    assert {key: file.read(key).tolist() for key in file.shapes} == {"one": [1, 1], "two": [1, 1]}


# ---- bombs ----------------------------------------------------------------------------------------------------------


def pickled(path: Path, program: bytes, compression: int = zipfile.ZIP_STORED, data: bytes = bytes(24)) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program + b".")
        archive.writestr("archive/data/0", data)
        archive.writestr("archive/version", b"3\n")
    return path


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu%stQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE % b"K\x06" + b"%s%s%s\x89)tR"
NAMED = b"}X\x01\x00\x00\x00x%ss"
LARGE = b"\x8a\x06" + b"\xff" * 5 + b"\x7f"
BOMBS = {
    "a bytearray": b"cbuiltins\nbytearray\n(\x8a\x05\x00\x00\x00\x00\x04tR",
    "a long bytearray": b"\x96" + struct.pack("<Q", 2**40),
    "bytes": b"\x8e" + struct.pack("<Q", 2**40) + b"x",
    "a memo far away": b"]r\xff\xff\xff\x7f",
    "tuples of tuples": b"K\x01" + b"2\x86" * 400,
    "as keys": b"}" + b"K\x01" + b"2\x86" * 400 + b"K\x01s",
    "deep tuples": b")" + b"\x85" * 200_000,
    "deep tuples as keys": b"})" + b"\x85" * 200_000 + b"K\x01s",
    "deep lists": b"]" * 200_000 + b"a" * 199_999,
    "a list in itself": b"]q\x00h\x00a",
    "a state_dict in itself": b"}q\x00X\x0a\x00\x00\x00state_dicth\x00s",
    "a pair of pairs": b"ccollections\nOrderedDict\n]("
    + b"]q\x00("
    + b"K\x01" * 9999
    + b"e"
    + b"h\x00" * 9999
    + b"e\x85R",
    "a name of a name": b"K\x01" + b"2\x86" * 400 + b"X\x01\x00\x00\x00x\x93",
    "an expanded tensor": NAMED % (TENSOR % (b"K\x00", LARGE + b"\x85", b"K\x00\x85")),
    "a tensor beyond its storage": NAMED % (TENSOR % (b"K\x03", b"K\x04\x85", b"K\x01\x85")),
    "strides beyond its storage": NAMED % (TENSOR % (b"K\x00", b"K\x02K\x02\x86", b"K\x05K\x02\x86")),
    "a negative stride": NAMED % (TENSOR % (b"K\x05", b"K\x02\x85", b"J\xff\xff\xff\xff\x85")),
    "a negative offset": NAMED % (TENSOR % (b"J\xff\xff\xff\xff", b"K\x02\x85", b"K\x01\x85")),
    "a rank of 65": NAMED % (TENSOR % (b"K\x00", b"(" + b"K\x01" * 65 + b"t", b"(" + b"K\x01" * 65 + b"t")),
    "a tensor that is made": NAMED % b"ctorch\nTensor\n\x8a\x05\x00\x00\x00\x00\x01\x85R",
    "a storage of another kind": NAMED % (b"(X\x06\x00\x00\x00moduleK\x01K\x02K\x03K\x04tQ"),
    "an identity that is a number": b"K\x01Q",
    "an identity as text": b"Px\n",
    "an extension": b"\x82\x01",
    "millions of operations": b"]" + b"K\x010" * 3_000_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickles_structure_is_checked_before_anything_is_built(bomb: str, tmp_path: Path) -> None:
    path = pickled(tmp_path / "file", BOMBS[bomb])
    with bounded(6 if bomb.startswith("millions") else 4), pytest.raises(ValueError, match=f"^{path}: "):
        ldm_lite.load(path, device="cpu")


def test_compressed_members_and_a_list_of_members_that_readers_find_in_two_places(tmp_path: Path) -> None:
    good = NAMED % (TENSOR % (b"K\x00", b"K\x06\x85", b"K\x01\x85"))
    assert open_checkpoint(pickled(tmp_path / "good", good)).read("x").tolist() == [0.0] * 6
    large = pickled(tmp_path / "large", good, zipfile.ZIP_DEFLATED, bytes(50_000_000))
    assert large.stat().st_size < 100_000
    with little_memory(5), pytest.raises(ValueError, match=r"archive/data\.pkl is compressed"):
        open_checkpoint(large)
    content = (tmp_path / "good").read_bytes()
    list_of_members, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
    again = content[:end] + content[list_of_members:]  # Python reads the last one, others the first
    (tmp_path / "twice").write_bytes(again)
    with bounded(), pytest.raises(ValueError, match="its list of members is missing or too long"):
        open_checkpoint(tmp_path / "twice")


@pytest.mark.parametrize("bomb", ["a bytearray", "a long bytearray", "bytes", "a memo far away", "an expanded tensor"])
def test_no_memory_is_taken_because_a_pickle_asks_for_it(bomb: str, tmp_path: Path) -> None:
    path = pickled(tmp_path / "file", BOMBS[bomb])
    with little_memory(5), pytest.raises(ValueError, match=f"^{path}: "):
        ldm_lite.load(path, device="cpu")


def test_a_giant_list_of_members_is_not_read(tmp_path: Path) -> None:
    path = pickled(tmp_path / "file", b"}")
    content = path.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    start = int.from_bytes(content[end + 16 : end + 20], "little")
    with open(path, "r+b") as file:
        file.seek(start + 2**30)
        file.write(content[end : end + 12] + struct.pack("<LLH", 2**30, start, 0))
    with little_memory(5), pytest.raises(ValueError, match="its list of members is missing or too long"):
        ldm_lite.load(path, device="cpu")


def test_a_legacy_file_is_as_safe(tmp_path: Path) -> None:
    values = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.arange(4).bfloat16()[1:], "c": torch.tensor(True)}
    torch.save(values, tmp_path / "good", _use_new_zipfile_serialization=False)
    file = open_checkpoint(tmp_path / "good")
    for _ in range(2):  # a tensor can be read again
        assert all(
            torch.equal(file.read(key), value) and file.read(key).dtype == value.dtype for key, value in values.items()
        )
    content = (tmp_path / "good").read_bytes()
    at = content.index(struct.pack("<Q", 6) + struct.pack("<f", 0))
    (tmp_path / "large").write_bytes(content[:at] + struct.pack("<Q", 2**62) + content[at + 8 :])
    (tmp_path / "small").write_bytes(content[:at] + struct.pack("<Q", 5) + content[at + 8 :])
    for name in ("large", "small"):
        with bounded(), pytest.raises(ValueError, match=f"{name}: is damaged"):
            open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_ordinary_are_named(legacy: bool, tmp_path: Path) -> None:
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "conjugated": torch.ones(2, dtype=torch.cfloat).conj(),
        "without values": torch.empty(2, device="meta"),
    }
    for kind, value in odd.items():
        torch.save({"good": torch.ones(2), "odd": value}, tmp_path / "file", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ValueError, match=f"odd is {kind}, expected an ordinary tensor"):
            ldm_lite.load(tmp_path / "file", device="cpu")


@pytest.mark.parametrize("wrap", ["reduce", "legacy", "nested"])
@pytest.mark.parametrize("door", DOORS)
def test_no_door_runs_code(door: str, wrap: str, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "proof"),)

    content: object = {"state_dict": {"x": torch.ones(2), "y": [{"z": Evil()}]}} if wrap == "nested" else Evil()
    torch.save(content, tmp_path / "file", _use_new_zipfile_serialization=wrap != "legacy")
    with pytest.raises(ValueError, match=r"nothing in it was run: its pickle names \w+\.mkdir"):
        DOORS[door](tmp_path / "file")
    assert not (tmp_path / "proof").exists()


# ---- keys and shapes ------------------------------------------------------------------------------------------------


def written(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    fuzz._write(path, {key: ("F32", shape) for key, shape in shapes.items()}, random_checkpoint.metadata(SMALL))
    return path


@pytest.mark.parametrize(
    "key",
    [
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.20000000.norm1.weight",
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.9999.norm1.weight",
        "model.diffusion_model.input_blocks.9999.0.op.weight",
        "model.diffusion_model.output_blocks.9999.0.op.weight",
        "first_stage_model.encoder.down.9999.block.0.conv1.weight",
        "cond_stage_model.transformer.text_model.encoder.layers.9999.mlp.fc1.weight",
        "model.diffusion_model." + "a." * 1000 + "weight",
        f"model.diffusion_model.{'9' * 5000}.weight",
    ],
)
def test_a_number_in_a_key_builds_no_range_of_that_length(key: str, tmp_path: Path) -> None:
    path = written(tmp_path / "file", {**fuzz.shapes("whole"), key: (2, 2)})
    with bounded(), pytest.raises(ValueError, match=rf"^{path}: .*(too high a number|such blocks|of these blocks|fit)"):
        ldm_lite.load(path, device="cpu")


@pytest.mark.parametrize("key", ["down_blocks.%d.resnets.%d.norm1.weight", "controlnet_cond_embedding.blocks.%d.%d.x"])
def test_numbers_in_the_format_of_diffusers(key: str, tmp_path: Path) -> None:
    many = {key % (i, 9999): (2,) for i in range(3000)} | {"time_embedding.linear_1.weight": (4, 4)}
    with bounded(4), pytest.raises(ValueError, match=f"^{tmp_path}"):
        ldm_lite.load(written(tmp_path / "file", many))


@pytest.mark.slow
def test_the_most_blocks_that_are_believed_are_built_in_time(tmp_path: Path) -> None:
    shapes = {key: shape for key, shape in fuzz.shapes("whole").items() if "." in key}  # without the noise schedule
    block = "model.diffusion_model.input_blocks.1.1.transformer_blocks."
    first = {key.removeprefix(f"{block}0."): shape for key, shape in shapes.items() if key.startswith(f"{block}0.")}
    many = {f"{block}{i}.{key}": shape for i in range(MOST_BLOCKS) for key, shape in first.items()}
    with bounded(10), pytest.raises(ValueError, match="the unet does not fit"):
        ldm_lite.load(written(tmp_path / "file", {**shapes, **many}), device="cpu")


def test_parts_of_one_tensor_must_fit_together() -> None:
    shapes = fuzz.shapes("diffusers text_encoder")
    for key, shape in itertools.product(shapes, [(), (3, 3), (0, 0, 0)]):
        if re.search(r"[qkv]_proj|final_layer_norm.weight", key):
            with pytest.raises(ValueError, match=r"do not fit together|has the shape"):
                original_layout({**shapes, key: shape}, open_clip=None if "norm" in key else True)


def test_too_many_tensors_no_tensors_and_a_giant_header(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tensors"):
        ldm_lite.load(written(tmp_path / "none", {}), device="cpu")
    with bounded(), pytest.raises(ValueError, match="holds 65537 tensors, expected at most 65536"):
        open_checkpoint(written(tmp_path / "many", {f"k{i}": () for i in range(65537)}))
    with open(tmp_path / "giant", "wb") as file:
        file.write(struct.pack("<Q", 10**9) + b"{")
        file.truncate(2 * 10**9)
    with bounded(), pytest.raises(ValueError, match="has a header of 1000000000 bytes"):
        ldm_lite.load(tmp_path / "giant", device="cpu")


SPECS: dict[str, tuple[str, Callable[[fuzz.Shapes], object]]] = {
    "unet": ("unet", LDMUNetSpec.from_shapes),
    "if": ("if", IFSpec.from_shapes),
    "control": ("control", infer_spec),
    "kl": ("kl", infer_vae),
    "vq": ("vq", infer_vae),
    "taesd": ("taesd", infer_vae),
    "adapter": ("adapter", lambda shapes: AdapterSpec.from_shapes(shapes, 3)),
    "light": ("light", lambda shapes: AdapterSpec.from_shapes(shapes, 3)),
    "style": ("style", StyleAdapterSpec.from_shapes),
    "vision": ("vision", CLIPVisionSpec.from_shapes),
    "t5": ("t5", T5Spec.from_shapes),
    "clip": ("clip", CLIP_L.fitted),
    "bert": ("bert", BERT_LARGE.fitted),
}
DEGENERATE = [(), (0,), (1,), (3,), (0, 0), (1, 1), (5, 7), (0, 4, 3, 3), (4, 0, 1, 1), (1, 1, 1, 1, 1), (2**40, 2**40)]


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_reads_any_shapes_or_says_what_makes_no_sense(name: str) -> None:
    network, read = SPECS[name]
    shapes, keys = fuzz.shapes(network), set()

    class Shapes(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> tuple[int, ...]:
            keys.add(key)
            return super().__getitem__(key)

    read(Shapes(shapes))
    clear: list[bool] = []
    for key, shape in itertools.product(sorted(keys), [None, *DEGENERATE]):
        changed = {**shapes, key: shape} if shape is not None else {k: v for k, v in shapes.items() if k != key}
        try:
            read(changed)
        except ValueError as error:
            clear.append(len(str(error)) > 20)
    assert all(clear)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_ends_in_one_line_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    hidden = tmp_path / "a\x1b[2J\n\u202e\udcff"
    save_file({"key\x1b]0;title\x07.weight": torch.ones(2)}, tmp_path / "keys")
    hidden.write_bytes((tmp_path / "keys").read_bytes())
    bomb = pickled(tmp_path / "bomb", BOMBS["deep tuples"])
    for path in (tmp_path / "pipe", hidden, tmp_path / "keys", bomb):
        assert txt2img.main(["a cat", "--ckpt", str(path), "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ")
        assert shown.count("\n") == 1
        assert shown[:-1].isprintable()


def test_a_name_that_no_file_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a\0b", "a\ud800b", "x" * 5000):
        assert txt2img.main(["a cat", "--ckpt", name, "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.startswith("error: ")

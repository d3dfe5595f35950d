"""Data: tar shards, lists of captions, examples encoded beforehand, and the order in which a run takes them."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from training import load_options, losses, options, train

import ldm_lite
from ldm_lite.batch import __main__ as batch_command
from ldm_lite.checkpoint.digest import digest
from ldm_lite.core.vae import AutoencoderKL
from ldm_lite.train import batches, data, distributed, encoded
from ldm_lite.train import losses as losses_of_training
from ldm_lite.train.batches import Batch, Draws, Order, Slice
from ldm_lite.train.data import Dataset, Example, TarShards, open_data
from ldm_lite.train.losses import DiffusionLoss


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def pairs(dataset: Dataset) -> list[tuple[bytes, str]]:
    assert dataset.shards is not None
    examples = [dataset.example(i) for i in range(sum(dataset.shards))]
    return [(example.pixels.numpy().tobytes(), example.caption) for example in examples]


@pytest.fixture
def shards(tmp_path: Path, folder: Path) -> Path:
    """The six images in two tars: captions as text, as JSON, or both; other files and folders are beside them."""
    images = [(folder / f"{i}.png").read_bytes() for i in range(6)]
    rows = [json.dumps({"caption": f"picture {i}", "width": 9}).encode() for i in range(6)]
    (tmp_path / "tars").mkdir()
    first = {"0.json": rows[0], "0.png": images[0], "1.PNG": images[1], "1.txt": b"picture 1\n", "1.json": b"[]"}
    long = "a" * 150 + "/2"  # a name beyond the 100 characters of the first tar format
    tar(
        tmp_path / "tars" / "00000.tar",
        {**first, "._1.png": b"", f"{long}.png": images[2], f"{long}.txt": b"picture 2"},
    )
    second = {f"{i}.{kind}": data for i in (3, 4, 5) for kind, data in (("png", images[i]), ("json", rows[i]))}
    tar(tmp_path / "tars" / "00001.tar", {**second, "3.cls": b"7"})
    return tmp_path / "tars"


def test_tar_shards_hold_what_a_folder_holds(shards: Path, folder: Path) -> None:
    dataset = open_data(shards, 16)
    assert dataset.shards == (3, 3)
    assert pairs(dataset) == pairs(open_data(folder, 16))
    assert pairs(open_data(shards / "00001.tar", 16)) == pairs(dataset)[3:]


def test_lists_of_captions(tmp_path: Path, folder: Path) -> None:
    """Hugging Face's image folders have metadata.jsonl in each folder of images."""
    for split in ("train", "more"):
        (tmp_path / split).mkdir()
    for i in range(6):
        subfolder = tmp_path / ("train" if i >= 3 else "more")
        (subfolder / f"{i}.png").write_bytes((folder / f"{i}.png").read_bytes())
        with open(subfolder / "metadata.jsonl", "a") as file:
            file.write(json.dumps({"file_name": f"{i}.png", "prompt" if i % 2 else "text": f"picture {i}"}) + "\n")
    (tmp_path / "other.jsonl").write_text("{}")
    assert pairs(open_data(tmp_path, 16)) == pairs(open_data(folder, 16))


def test_images_that_no_list_has_are_named(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes((folder / f"{i}.png").read_bytes())
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "./1.png", "text": "picture 1"}')
    assert [caption for _, caption in pairs(open_data(tmp_path, 16))] == ["picture 1"]
    assert "0.png: is in no list of captions, so it is not learned (2 images)" in caplog.text


def test_hidden_folders_are_not_read(tmp_path: Path, folder: Path) -> None:
    for place in (tmp_path, tmp_path / ".cache" / "deeper"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "0.png").write_bytes((folder / "0.png").read_bytes())
    (tmp_path / ".cache" / "metadata.jsonl").write_text('{"file_name": "deeper/0.png", "text": "hidden"}')
    (tmp_path / "0.txt").write_text("picture 0")
    assert [caption for _, caption in pairs(open_data(tmp_path, 16))] == ["picture 0"]


def test_captions_have_the_name_that_is_learned(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = data.open_folder(folder, 16)
    data.check_named(images, "picture")
    assert not caplog.text
    data.check_named(images, "picture 3")
    assert "0.png: its caption lacks 'picture 3', as 5 of 6 do" in caplog.text
    with pytest.raises(ValueError, match=r"0\.png: its caption lacks `token` '<it>', as all captions do"):
        data.check_named(images, "<it>")


@pytest.mark.parametrize(("resolution", "multiple"), [(64, 8), (128, 16), (1024, 128)])
def test_sides_of_buckets_grow_with_the_resolution(
    resolution: int, multiple: int, folder: Path, tmp_path: Path, small_path: Path
) -> None:
    """In multiples of 8 pixels for latents of an eighth, and of an eighth of the side."""
    pipe = ldm_lite.load(small_path, device="cpu")
    pipe = replace(pipe, family=replace(pipe.family, resolution=resolution))
    Image.new("RGB", (resolution * 2, resolution)).save(tmp_path / "wide.png")
    train_options = options(tmp_path, tmp_path / "run", buckets=True, caption="a cat")
    [part] = encoded.open_dataset(train_options, pipe, str(tmp_path)).parts
    height, width = part.size
    assert (height % multiple, width % multiple) == (0, 0)
    assert width * (height + multiple) > resolution**2  # the next multiple is too much
    assert width > 1.6 * height


def test_images_of_the_class_need_not_have_the_name(tmp_path: Path, folder: Path, small_path: Path) -> None:
    (tmp_path / "0.png").write_bytes((folder / "0.png").read_bytes())
    (tmp_path / "0.txt").write_text("a cat")
    pipe = ldm_lite.load(small_path, device="cpu")
    train_options = options(folder, tmp_path / "run", stage="embedding", token="picture", class_data=str(tmp_path))
    for path, count in ((str(folder), 6), (str(tmp_path), 1)):
        assert len(pairs(encoded.open_dataset(train_options, pipe, path))) == count
    with pytest.raises(ValueError, match="its caption lacks `token`"):
        encoded.open_dataset(replace(train_options, data=str(tmp_path), class_data=None), pipe, str(tmp_path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b"x"}, "a.tar, a: its caption is empty: write one, or remove the image"),
        ({"a.txt": b"x"}, "a.tar: holds no images"),
        ({"a.png": b"x", "a.jpg": b"x", "a.txt": b"x"}, "a.jpg: is the second file of a of its kind"),
        ({"a.png": b"x", "a.txt": b"x"}, "a.tar, a: is not an image that can be read"),
        ({"a.png": b"IMAGE", "a.txt": b" "}, "a.tar, a: its caption is empty"),
        ({"a.png": b"IMAGE", "a.json": b"{"}, "a.tar, a: its .json cannot be read"),
        ({"a.png": b"IMAGE", "a.json": b'["text"]'}, "a.tar, a: expected a JSON object with a caption called text"),
        ({"a.png": b"IMAGE", "a.json": b'{"text": 1}'}, "a.tar, a: expected a JSON object with a caption called text"),
    ],
)
def test_mistakes_in_tars_are_one_line(tmp_path: Path, folder: Path, files: dict[str, bytes], message: str) -> None:
    image = (folder / "0.png").read_bytes()
    path = tar(tmp_path / "a.tar", {name: image if data == b"IMAGE" else data for name, data in files.items()})
    with pytest.raises(ValueError, match=re.escape(message)):
        open_data(path, 16).example(0)


def test_a_tar_replaced_within_its_time_of_change_is_read_anew(tmp_path: Path, folder: Path) -> None:
    image = next(folder.glob("*.png")).read_bytes()
    path = tar(tmp_path / "a.tar", {"a.png": image, "a.txt": b"one"})
    before, times = open_data(path, 16), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    tar(path, {f"{name}.{kind}": data for name in "abcdefgh" for kind, data in (("png", image), ("txt", b"two"))})
    tar_size = path.stat().st_size
    os.utime(path, ns=times)
    after = open_data(path, 16)
    assert isinstance(before, TarShards)
    assert isinstance(after, TarShards)
    assert before.tars != after.tars
    assert after.tars[0][1] == (tar_size, times[1])
    assert after.example(7).caption == "two"


def test_files_that_are_no_tars_are_one_line(tmp_path: Path, shards: Path) -> None:
    whole, path = (shards / "00001.tar").read_bytes(), tmp_path / "b.tar"
    with tarfile.open(path, "w:gz") as file:
        file.add(shards / "00001.tar")
    compressed = path.read_bytes()
    for content in (b"", b"text" * 999, compressed, whole[:700], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"b\.tar: (is not an uncompressed tar file|holds no images)"):
            open_data(path, 16)


def test_the_middle_is_cut_out() -> None:
    """Of what is too wide, then of what is too high; the corner is that of the scaled image."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 41, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    cut, corner = data.crop(image, (8, 16))
    assert np.array_equal(np.asarray(cut), pixels[:, 12:28])
    assert corner == (0, 12)
    cut, corner = data.crop(image.transpose(Image.Transpose.TRANSPOSE), (16, 8))
    assert np.array_equal(np.asarray(cut), pixels[:, 12:28].swapaxes(0, 1))
    assert corner == (12, 0)
    assert data.crop(Image.new("RGB", (80, 16)), (8, 16))[1] == (0, 12)
    assert data.crop(Image.new("RGB", (16, 80)), (16, 8))[1] == (12, 0)


# ---- order ----------------------------------------------------------------------------------------------------------


class Numbers:
    """Examples of one number each, in shards."""

    def __init__(self, *shards: int) -> None:
        self.shards = shards

    def example(self, index: int) -> Example:
        assert 0 <= index < sum(self.shards)
        return Example(torch.tensor([index]), str(index))


def test_every_epoch_has_each_example_once_and_mixes_few_shards() -> None:
    dataset = Numbers(*[10] * 100, 7)
    order, size = Order(dataset, seed=3), 1007
    epochs = [[order[i] for i in range(epoch * size, (epoch + 1) * size)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(size))
        assert len({index // 10 for index in epoch[: 10 * batches.MIXED - 3]}) == batches.MIXED
    assert epochs[0] != epochs[1] != epochs[2]
    again = Order(dataset, seed=3)
    assert [again[i] for i in (2900, 5, 1500, 1007)] == [order[i] for i in (2900, 5, 1500, 1007)]
    assert [Order(dataset, seed=4)[i] for i in range(9)] != epochs[0][:9]


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_processes_share_the_batches_of_one(processes: int) -> None:
    """A batch of 5, divided unevenly: the same examples, with the same random numbers."""
    taken, drawn = Counter[tuple[int, int]](), {}
    for rank in range(processes):
        share = range(rank * 5 // processes, (rank + 1) * 5 // processes)
        for batch in batches.batches(Numbers(7, 4), 1, Slice(5, share, 2, 6), workers=0):
            assert len(batch.numbers) == len(share)
            taken.update(zip(batch.numbers, batch.pixels.flatten().tolist(), strict=True))
            drawn |= dict(zip(batch.numbers, Draws(1, batch.numbers).normal("noise", (2, 3)), strict=True))
    order = Order(Numbers(7, 4), 1)
    assert taken == Counter((number, order[number]) for number in range(10, 30))
    expected = Draws(1, range(10, 30)).normal("noise", (2, 3))
    assert all(torch.equal(drawn[number], expected[number - 10]) for number in range(10, 30))


def test_draws_are_independent_and_depend_on_the_whole_seed() -> None:
    """Numbers of two examples, seeds or purposes are uncorrelated, and of their distribution."""
    kinds = [(seed, purpose) for seed in (0, 1, 2**31 - 1) for purpose in ("noise", "latents")]
    values = torch.stack([Draws(seed, range(4)).normal(purpose, (5000,)) for seed, purpose in kinds]).flatten(0, 1)
    correlations = values @ values.T / 5000
    assert (correlations - torch.eye(24)).abs().max() < 0.08
    assert values.abs().max() < 5  # with 120,000 numbers
    many = Draws(0, range(4_000))
    uniform, integers = many.uniform("captions"), many.integers("timesteps", 1000)
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(float(uniform.mean()) - 0.5) < 0.02
    assert integers.min() >= 0
    assert integers.max() < 1000
    assert abs(float(integers.float().mean()) - 499.5) < 18


# ---- encoded beforehand ---------------------------------------------------------------------------------------------


def write(out: Path, folder: Path, small_path: Path, shard: int = 4) -> Path:
    """Write what `python -m ldm_lite.batch --encode` writes, with numpy alone."""
    pipe = ldm_lite.load(small_path, device="cpu")
    assert isinstance(pipe.vae, AutoencoderKL)
    assert pipe.text_encoder is not None
    examples = [open_data(folder, pipe.family.resolution).example(i) for i in range(6)]
    with torch.no_grad():
        pixels = torch.stack([example.pixels for example in examples]).float() / 127.5 - 1
        mean, deviation = pipe.vae.encode(pixels)
        moments = torch.cat([mean, 2 * deviation.log()], dim=1)
        contexts = pipe.encode_prompt([example.caption for example in examples]).context
        empty = pipe.encode_prompt("").context
    assert contexts is not None
    assert empty is not None
    for start in range(0, 6, shard):
        shard_folder = out / f"{start // shard:05}"
        shard_folder.mkdir(parents=True)
        np.save(shard_folder / "moments.npy", moments[start : start + shard].half().numpy())
        np.save(shard_folder / "context.npy", contexts[start : start + shard].half().numpy())
        lines = [json.dumps(example.caption) + "\n" for example in examples[start : start + shard]]
        (shard_folder / "captions.jsonl").write_text("".join(lines))
    (out / "empty").mkdir()
    np.save(out / "empty" / "context.npy", empty.half().numpy())
    index = {
        "format": encoded.FORMAT, "examples": 6, "shard": shard, "moments": list(moments.shape[1:]),
        "context": list(contexts.shape[1:]), "vae": encoded.encoder_digest(pipe.vae),
        "text_encoder": digest(pipe.text_encoder),
    }  # fmt: skip
    (out / "index.json").write_text(json.dumps(index))
    return out


LORA = {"lora_rank": 2, "caption_dropout": 0.5, "steps": 2}


@pytest.mark.slow
def test_training_from_encoded_data_runs_neither_autoencoder_nor_text_encoder(
    tmp_path: Path, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the losses of training from the images, up to the rounding of the embeddings to float16."""
    data = write(tmp_path / "data", folder, small_path)
    train(options(folder, tmp_path / "images", **LORA), load_options(small_path))
    kept = []
    step = DiffusionLoss.__call__

    def watched(self: DiffusionLoss, batch: Batch, draws: Draws) -> Tensor:
        assert batch.pixels.dtype == torch.float16
        kept.append(self.model.offloader is not None and sorted(self.model.offloader._phases))
        return step(self, batch, draws)

    monkeypatch.setattr(DiffusionLoss, "__call__", watched)
    monkeypatch.setattr(AutoencoderKL, "encode", None)
    monkeypatch.setattr(losses_of_training, "encode_captions", None)
    train(options(data, tmp_path / "encoded", **LORA), load_options(small_path))
    assert not kept[0], "on a CPU no network moves"
    assert losses(tmp_path / "encoded") == pytest.approx(losses(tmp_path / "images"), rel=3e-3)
    assert not (tmp_path / "encoded" / "latents").exists()
    assert list((tmp_path / "encoded").glob("samples*"))


@pytest.mark.slow
def test_tars_are_encoded_by_batch(tmp_path: Path, folder: Path, small_path: Path, shards: Path) -> None:
    """And what it writes trains."""
    out = tmp_path / "out"
    arguments = [shards, "--encode", "--out", out, "--ckpt", small_path, "--device", "cpu", "--shard-size", "4"]
    assert batch_command.main(list(map(str, arguments))) == 0
    got = encoded.open_encoded(out)
    wanted = encoded.open_encoded(write(tmp_path / "data", folder, small_path))
    for i in range(6):
        a, b = got.example(i), wanted.example(i)
        assert a.caption == b.caption
        assert torch.allclose(a.pixels, b.pixels, atol=2e-2)
        assert a.context is not None
        assert b.context is not None
        assert torch.allclose(a.context, b.context, atol=2e-3)
    train(options(out, tmp_path / "run", **LORA), load_options(small_path))


@pytest.mark.slow
def test_a_trained_text_encoder_reads_the_captions(tmp_path: Path, folder: Path, small_path: Path) -> None:
    data = write(tmp_path / "data", folder, small_path)
    for out in (tmp_path / "images", tmp_path / "encoded"):
        train_options = options(folder if out.name == "images" else data, out, steps=2, train_text=True)
        path = train(train_options, load_options(small_path, dtype="fp32"))
    assert losses(tmp_path / "encoded") == losses(tmp_path / "images")
    assert path.read_bytes() == (tmp_path / "images" / "model.safetensors").read_bytes()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another autoencoder": (lambda p: change(p, vae="0"), "was encoded by another autoencoder than this model's"),
    "another text encoder": (lambda p: change(p, text_encoder="0"), "was encoded by another text encoder"),
    "no text": (lambda p: change(p, context=None), "holds no text embeddings"),
    "another format": (lambda p: change(p, format="2"), "expected an index of encoded examples with the format"),
    "no examples": (lambda p: change(p, examples=0), "its examples cannot be 0"),
    "a text as shape": (lambda p: change(p, moments="8"), "its moments cannot be '8'"),
    "a huge shape": (lambda p: change(p, context=[2**31, 5]), "its context cannot be"),
    "no index": (lambda p: (p / "index.json").write_text("["), "index.json: is not valid JSON"),
    "half a file": (lambda p: cut(p / "00000" / "moments.npy"), "moments.npy: is damaged"),
    "another shape": (lambda p: np.save(p / "00000" / "moments.npy", np.zeros(3)), "expected float16 of shape"),
    "an object": (
        lambda p: np.save(p / "00000" / "moments.npy", np.array([{}], object), allow_pickle=True),
        "is damaged",
    ),
    "no number": (lambda p: fill(p / "00000" / "moments.npy"), "is not finite: encode it again"),
    "no line": (lambda p: (p / "00000" / "captions.jsonl").write_text('"a"\n'), "has 1 lines, not a shard's"),
    "a number": (lambda p: (p / "00000" / "captions.jsonl").write_text("1\n" * 4), "expected a JSON string in each"),
}


def change(path: Path, **values: object) -> None:
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps(index | values))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def fill(path: Path) -> None:
    np.save(path, np.full_like(np.load(path), np.nan))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, folder: Path, small_path: Path) -> Path:
    return write(tmp_path_factory.mktemp("good") / "data", folder, small_path)


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_encoded_data_is_one_line(name: str, tmp_path: Path, good: Path, small_path: Path) -> None:
    data = tmp_path / "data"
    for path in good.rglob("*.*"):
        (data / path.relative_to(good)).parent.mkdir(parents=True, exist_ok=True)
        (data / path.relative_to(good)).write_bytes(path.read_bytes())
    make, message = CHANGES[name]
    make(data)
    pipe, train_options = ldm_lite.load(small_path, device="cpu"), options(data, tmp_path / "out", **LORA)

    def use() -> None:
        dataset = encoded.open_dataset(train_options, pipe, train_options.data)
        assert isinstance(dataset, encoded.EncodedDataset)
        encoded.check_encoded(train_options, pipe, dataset, reads_text=True)
        dataset.example(0)

    with pytest.raises(ValueError, match=re.escape(message)) as error:
        use()
    assert "\n" not in str(error.value)


def test_a_runs_latents_are_made_once_and_finished_after_a_kill(
    tmp_path: Path, folder: Path, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded, "SHARD", 4)
    pipe = ldm_lite.load(small_path, device="cpu")
    train_options, firsts = options(folder, tmp_path), list[int]()
    in_order = batches.in_order

    def noted(dataset: Dataset, parts: Sequence[range], *more: Any) -> object:
        firsts.extend(part.start for part in parts)
        return in_order(dataset, parts, *more)

    monkeypatch.setattr(encoded, "in_order", noted)
    images = open_data(folder, pipe.family.resolution)
    whole = pairs(encoded.encoded(train_options, images, pipe.vae)[0])
    assert [caption for _, caption in whole] == [f"picture {i}" for i in range(6)]
    assert pairs(encoded.encoded(train_options, images, pipe.vae)[0]) == whole
    (tmp_path / "latents" / "index.json").unlink()
    (tmp_path / "latents" / "00001").rename(tmp_path / "latents" / ".00001.part")
    assert pairs(encoded.encoded(train_options, images, pipe.vae)[0]) == whole
    assert firsts == [0, 2, 4, 4]
    renamed = replace(images, items=tuple((path, f"a {caption}") for path, caption in images.items))  # type: ignore[type-var,attr-defined]
    assert pairs(encoded.encoded(train_options, renamed, pipe.vae)[0]) != whole
    assert firsts == [0, 2, 4, 4, 0, 2, 4]


CODE = """
import multiprocessing, random, sys
from pathlib import Path
from ldm_lite.train.batches import Slice, batches
from ldm_lite.train.data import open_renderer
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    scenes = open_renderer(Path(sys.argv[1]), 8, {"level": 7}, 6)
    assert sys.modules["random"] is random
    for batch in batches(scenes, 0, Slice(2, range(2), 0, 2), 1):
        print(batch.captions, int(batch.pixels.max()))
"""


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_renderer_in_processes_that_are_not_forked(method: str, tmp_path: Path) -> None:
    """As Python 3.14 starts them: its functions cannot be pickled; and it has the name of a module of Python's own."""
    (tmp_path / "random.py").write_text(
        "from dataclasses import dataclass\nfrom PIL import Image\n"
        "@dataclass\nclass Scene:\n    level: int\n"
        "def scenes(resolution, level):\n"
        "    return lambda i: (Image.new('RGB', (resolution,) * 2, (Scene(level).level,) * 3), 'grey')\n"
    )
    place = tmp_path / "code"
    place.mkdir()
    (place / "main.py").write_text(CODE)
    command = [sys.executable, str(place / "main.py"), str(tmp_path / "random.py"), method]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert out.stdout == "['grey', 'grey'] 7\n" * 2, out.stderr


def test_each_process_encodes_its_share(
    folder: Path, small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time here, each with the missing shards that the first one has told; all files are those of one."""
    monkeypatch.setattr(encoded, "SHARD", 2)
    vae, images = ldm_lite.load(small_path, device="cpu").vae, data.open_folder(folder, 64)
    encoded.encoded(options(folder, tmp_path / "one"), images, vae)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    monkeypatch.setattr(distributed, "broadcast", lambda answer: [0, 1, 2])
    for rank, there in ((0, ["00000", "00002"]), (1, ["00000", "00001", "00002"])):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        encoded.encoded(options(folder, tmp_path / "two"), images, vae)
        assert [path.name for path in sorted((tmp_path / "two" / "latents").glob("0*"))] == there
    for path in (tmp_path / "one").rglob("*"):
        if path.is_file():
            assert (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes() == path.read_bytes()


# ---- broken images --------------------------------------------------------------------------------------------------


def copied(folder: Path, to: Path) -> Path:
    """Copy the images, with their captions."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("kind", ["image", "size", "mask", "hint", "tar"])
def test_what_is_broken_is_left_out_of_a_run(
    kind: str, tmp_path: Path, folder: Path, small_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the second of six images, alone in its bucket: its pixels, header, mask or hint, or its caption in a tar."""
    data = copied(folder, tmp_path / "data")
    more: dict[str, Any] = {"lora_rank": 1, "buckets": True, "flip": True}
    Image.new("RGB", (30, 90)).save(data / "1.png")
    if kind in ("image", "size"):
        (data / "1.png").write_bytes((data / "1.png").read_bytes()[: 60 if kind == "image" else 9])
    elif kind == "mask":
        Image.new("L", (8, 8)).save(data / "1.mask.png")
        more["masked"] = True
    elif kind == "hint":
        for i in range(6):
            (data / f"{i}.hint.png").write_bytes((data / f"{i}.png").read_bytes()[: None if i != 1 else 60])
        more = {"stage": "control"}
    else:
        with tarfile.open(data / "a.tar", "w") as tar:
            for path in sorted(data.glob("?.*")):
                if path.name not in ("1.txt", "2.png"):
                    tar.add(path, path.name)
            tar.add(data / "1.png", "7.png")
            tar.add(data / "1.txt", "7.txt")
        more = {"lora_rank": 1}
    out = tmp_path / "run"
    train(options(data, out, steps=1, sample_every=0, **more), load_options(small_path))
    left_out = [record.getMessage() for record in caplog.records if "left out: " in record.getMessage()]
    assert len(left_out) == (2 if more.get("flip") else 1), "a mirrored image too"
    assert all(re.search(r"1\.(mask\.|hint\.)?png: |a\.tar, 1: its caption is empty", message) for message in left_out)
    captions = [json.loads(line) for path in out.rglob("captions.jsonl") for line in path.read_text().splitlines()]
    assert "picture 1" not in captions or kind == "tar"
    assert len(captions) == (10 if more.get("flip") else 5)
    caplog.clear()
    again = options(data, out, steps=2, sample_every=0, resume=True, **more)
    train(again, load_options(small_path))
    assert "images are left out, for example: " in caplog.text, "a resumed run says it too, and reads none again"
    assert "warning: left out" not in caplog.text


def test_the_rows_of_what_is_left_are_those_of_their_images(tmp_path: Path, folder: Path, small_path: Path) -> None:
    """With repeats, mirrored images and a share held out, each latent is still that of its image."""
    data = tmp_path / "data"
    data.mkdir()
    copied(folder, data / "2_some")
    (data / "2_some" / "1.png").write_bytes(b"")
    model = ldm_lite.load(small_path, device="cpu")
    train_options = options(data, tmp_path / "run", flip=True, validation="0.4")
    opened = encoded.open_all(train_options, model, True)
    assert opened.validation is not None
    learned = [opened.train.example(i).caption for i in range(sum(opened.train.shards or ()))]
    measured = [opened.validation.example(i).caption for i in range(sum(opened.validation.shards or ()))]
    assert len(learned) == 3 * 4
    assert len(measured) == 2
    assert {*learned, *measured} == {f"picture {i}" for i in (0, 2, 3, 4, 5)}
    assert not {*learned} & {*measured}


def test_too_few_images_to_hold_some_out_are_told_before_they_are_encoded(
    tmp_path: Path, folder: Path, small_path: Path
) -> None:
    for name in ("0.png", "0.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ValueError, match=r"got `validation` 0.5 of 1 images: expected two or more"):
        train(options(tmp_path, tmp_path / "run", validation="0.5"), load_options(small_path))
    assert not (tmp_path / "run" / "latents").exists()


def test_too_many_broken_images_end_a_run(tmp_path: Path, folder: Path, small_path: Path) -> None:
    data = copied(folder, tmp_path / "data")
    for i in range(6):
        (data / f"{i}.png").write_bytes(b"")
    with pytest.raises(ValueError, match="none of the images can be read"):
        train(options(data, tmp_path / "run", steps=1, lora_rank=1), load_options(small_path))
    for i in range(6, 12):
        (data / f"{i}.png").write_bytes(b"")
        (data / f"{i}.txt").write_text("a")
    with pytest.raises(ValueError, match=r"12 images are broken, which is too many, for example .*\.png: is "):
        train(options(data, tmp_path / "run", steps=1, lora_rank=1), load_options(small_path))

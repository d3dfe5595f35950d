"""A job that was stopped is continued: images that the folder holds are not made again."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_checkpoint
import texts
import torch
import toy_zoo
from PIL import Image
from safetensors.torch import save_file
from waiting import wait_for

import ldm_lite
from ldm_lite import Pipeline
from ldm_lite.cli.output import read_key
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.img2img import main as img2img
from ldm_lite.inpaint import main as inpaint
from ldm_lite.tasks import existing
from ldm_lite.tasks.existing import Existing, contents
from ldm_lite.tasks.txt2img import prepare
from ldm_lite.txt2img import main as txt2img
from ldm_lite.upscale import main as upscale

PROMPTS = ["a cat", "a dog", "a cat", "a house, red", "one more"]


@pytest.fixture
def job(tmp_path: Path, small_path: Path) -> Callable[..., list[str]]:
    """Runs a command in the folder `out`, and returns the names of the files that it makes."""

    def run(*flags: object, command: Callable[[list[str]], int] = txt2img, ckpt: Path = small_path) -> list[str]:
        samples = tmp_path / "out" / "samples"
        before = set(os.listdir(samples)) if samples.exists() else set()
        argv = ["--ckpt", ckpt, "--device", "cpu", "--out", tmp_path / "out", "--steps", "1", "--skip-existing", *flags]
        assert command([str(argument) for argument in argv]) == 0
        return sorted(set(os.listdir(samples)) - before)

    return run


def pixels(folder: Path) -> dict[str, np.ndarray]:
    """The images of a folder by their text."""
    by_name = {}
    for path in (folder / "out" / "samples").glob("*.png"):
        with Image.open(path) as image:
            by_name[image.info["parameters"]] = np.asarray(image).astype(int)
    return by_name


def test_only_what_is_missing_is_made(
    tmp_path: Path, job: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    samples, file = tmp_path / "out" / "samples", tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS[:4]))
    arguments = ["--from-file", file, "--batch-size", 3]
    assert len(job(*arguments)) == 4
    assert len(list((tmp_path / "out").glob("grid-*.png"))) == 1
    whole = pixels(tmp_path)
    capsys.readouterr()
    assert job(*arguments) == []
    assert "4 of 4 images exist in " in (errors := capsys.readouterr().err)
    assert "0 images in " in errors

    (samples / "00001.png").unlink()  # missing, renamed, cut in the middle
    (samples / "00000.png").rename(samples / "first.png")
    content = (samples / "00002.png").read_bytes()
    (samples / "00002.png").write_bytes(content[:-30])
    assert len(job(*arguments)) == 2
    (samples / "00002.png").unlink()
    again = pixels(tmp_path)
    assert again.keys() == whole.keys()
    assert max(abs(again[text] - whole[text]).max() for text in whole) <= 1  # other batches round otherwise

    file.write_text("\n".join(PROMPTS))  # one more
    assert len(job(*arguments)) == 1
    assert len(list((tmp_path / "out").glob("grid-*.png"))) == 1
    file.write_text("\n".join([PROMPTS[1], PROMPTS[0], *PROMPTS[2:]]))  # these two have other seeds now
    assert len(job(*arguments)) == 2
    assert len(job(*arguments, "--n_iter", 2)) == 5
    assert job(*arguments, "--n_iter", 2, "--batch-size", 1) == []


def test_equal_images_count_each(tmp_path: Path, job: Callable[..., list[str]]) -> None:
    arguments = ["a cat", "--n_iter", 3, "--fixed_code"]
    assert len(job(*arguments)) == 3
    (tmp_path / "out" / "samples" / "00001.png").unlink()
    assert len(job(*arguments)) == 1


@pytest.mark.slow
def test_another_setting_is_another_image(small_path: Path, job: Callable[..., list[str]]) -> None:
    changes: list[list[Any]] = [["--steps", 3], ["--scale", 3], ["--negative-prompt", "b"], ["--W", 32], ["--eta", 1.0]]
    changes += [["--sampler", "euler"], ["--clip-skip", 2], ["--spacing", "karras"], ["--guidance-rescale", 0.5]]
    changes += [
        ["--prompt-syntax", "a1111"],
        ["--mimic-scale", 1, "--dynamic-threshold", 0.9],
        ["--refiner", small_path],
    ]
    changes += [["--dtype", "bf16"], ["--prediction", "v"], ["--noise", "a1111"], ["--sampler", "ddim_cfgpp"]]
    for change in ([], *changes):
        assert len(job("a cat", *change)) == 1, change
    assert job("a cat", "--sampler", "DDIM") == []  # another name of the default
    assert job("a cat", "--sampler", "ddim_cfgpp") == []
    assert len(job("a cat", "--batch-size", 3)) == 2


@pytest.mark.slow
def test_keys_depend_on_weights_and_contents_of_files(small_path: Path, tmp_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    (tmp_path / "c.npy").write_bytes(b"1")

    def key(load: Pipeline = pipe, **changes: Any) -> str:
        options = Txt2imgOptions("a cat", **{"steps": 2, **changes})
        task = prepare(load, options)
        [part] = task.parts
        return Existing(task, Counter()).missing(part)[1][0]

    before = key()
    assert before == key(batch_size=3, n_iter=2, sampler="DDIM") == key(ldm_lite.load(small_path, device="cpu"))
    weight = next(pipe.unet.parameters())
    weight.data.mul_(1.01)  # as a merged LoRA changes it
    assert key() != before
    assert contents("a:b:0.5") != contents("a:b:0.6")
    assert contents(f"{tmp_path / 'c.npy'}:1") != contents("c.npy:1")


def test_keys_depend_on_embeddings_named_or_in_a_lora(small_path: Path, tmp_path: Path) -> None:
    pipe = ldm_lite.load(small_path, device="cpu")
    fc1 = "lora_te_text_model_encoder_layers_0_mlp_fc1"
    lora = {f"{fc1}.lora_up.weight": torch.zeros(256, 1), f"{fc1}.lora_down.weight": torch.zeros(1, 64)}
    for file, value in (("one", 0.5), ("other", 0.6)):
        vectors = torch.full((2, 64), value)
        save_file({"emb_params": vectors}, tmp_path / f"{file}.safetensors")
        save_file({**lora, "bundle_emb.it.emb_params": vectors}, tmp_path / f"lora_{file}.safetensors")

    def key(model: Pipeline = pipe, **options: Any) -> str:
        task = prepare(model, Txt2imgOptions("a cat it", seed=3, steps=2, **options))
        _, keys = Existing(task, Counter()).missing(next(iter(task.parts)))
        return keys[0]

    named = [key(embedding=(f"it={tmp_path / file}.safetensors",)) for file in ("one", "other")]
    bundled = [
        key(ldm_lite.load(small_path, device="cpu", lora=tmp_path / f"lora_{file}.safetensors"))
        for file in ("one", "other")
    ]
    assert named == bundled, "names of files do not matter"
    assert len({key(), *named}) == 3


@pytest.mark.slow
def test_other_weights_are_another_image_and_another_name_is_not(
    tmp_path: Path, small_path: Path, job: Callable[..., list[str]]
) -> None:
    shutil.copy(small_path, tmp_path / "other name.safetensors")
    assert len(job("a cat")) == 1
    assert job("a cat", ckpt=tmp_path / "other name.safetensors") == []
    random_checkpoint.write(tmp_path / "second.safetensors", random_checkpoint.SMALL, seed=1)
    assert len(job("a cat", ckpt=tmp_path / "second.safetensors")) == 1


def test_an_image_to_start_from_counts_by_its_contents(tmp_path: Path, job: Callable[..., list[str]]) -> None:
    for name, colour in (("a.png", "red"), ("copy.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / name)
    assert len(job("a cat", "--init-img", tmp_path / "a.png", command=img2img)) == 1
    assert job("a cat", "--init-img", tmp_path / "copy.png", command=img2img) == []
    assert len(job("a cat", "--init-img", tmp_path / "b.png", command=img2img)) == 1


def test_blocks_from_all_of_a_large_file_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(existing, "BLOCKS", 4)
    monkeypatch.setattr(existing, "BLOCK", 2)
    file, digests = tmp_path / "large", set()
    for changed in (None, 0, 16, 33, 49):  # in each of the blocks
        content = bytearray(64)
        if changed is not None:
            content[changed] = 1
        file.write_bytes(content)
        digests.add(contents(file))
    assert len(digests) == 5


@pytest.mark.slow
def test_images_masks_and_what_is_enlarged_count_by_their_contents(
    tmp_path: Path, job: Callable[..., list[str]]
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (2, 64, 64, 3), dtype=np.uint8)
    a, b, mask, corner = (tmp_path / name for name in ("a.png", "b.png", "mask.png", "other.png"))
    Image.fromarray(noise[0]).save(a)
    Image.new("L", (64, 64), 255).save(mask)
    Image.new("L", (64, 64)).save(corner)
    with Image.open(corner) as image:
        image.paste(255, (0, 0, 32, 32))
        image.save(corner)
    for command, more in ((img2img, []), (inpaint, ["--mask", mask])):
        assert len(job("a cat", "--init-img", a, *more, command=command)) == 1
        shutil.copy(a, b)
        assert job("a cat", "--init-img", b, *more, command=command) == []
        Image.fromarray(noise[1]).save(b)
        assert len(job("a cat", "--init-img", b, *more, command=command)) == 1
        assert len(job("a cat", "--init-img", a, *more, "--strength", "0.5", command=command)) == 1
    assert len(job("a cat", "--init-img", a, "--mask", corner, command=inpaint)) == 1
    assert len(job("a cat", "--init-img", a, "--mask", mask, "--feather", "3", command=inpaint)) == 1
    random_checkpoint.write(tmp_path / "up.safetensors", toy_zoo.small("x4"))
    up = {"command": upscale, "ckpt": tmp_path / "up.safetensors"}
    Image.fromarray(noise[0, :8, :8]).save(a)
    assert len(job("--init-img", a, "--batch-size", 2, **up)) == 2
    assert job("--init-img", a, "--batch-size", 2, **up) == []
    assert len(job("--init-img", a, "--noise-level", 5, **up)) == 1


def test_where_it_makes_no_sense(tmp_path: Path, small_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, wanted in (
        (["--out", str(tmp_path / "a.png")], "--skip-existing is for folders"),
        (["--skip-save"], "--skip-existing is for folders"),
        (["--compat"], "--compat draws the noise of all images in order: leave out --skip-existing"),
    ):
        assert txt2img(["a cat", "--ckpt", str(small_path), "--device", "cpu", "--skip-existing", *more]) == 2
        assert wanted in capsys.readouterr().err


def test_keys_are_read_quickly_and_only_from_whole_files(tmp_path: Path, job: Callable[..., list[str]]) -> None:
    job("a cat")
    path = tmp_path / "out" / "samples" / "00000.png"
    key, content = read_key(path), path.read_bytes()
    assert re.fullmatch("[0-9a-f]{32}", key or "")
    for number in range(0, len(content), 97):
        path.write_bytes(content[:number])
        assert read_key(path) is None
    path.write_bytes(content)
    start = time.process_time()
    for _ in range(1000):
        read_key(path)
    assert time.process_time() - start < 20
    os.mkfifo(tmp_path / "pipe.png")
    assert read_key(tmp_path / "pipe.png") is read_key(tmp_path) is read_key(tmp_path / "none") is None


@pytest.mark.slow
def test_a_job_that_is_killed_at_any_moment_and_restarted_has_every_image_once(
    tmp_path: Path, small_path: Path, job: Callable[..., list[str]]
) -> None:
    file, chance, samples = tmp_path / "prompts.txt", random.Random(0), tmp_path / "out" / "samples"
    file.write_text("\n".join(f"picture {i}" for i in range(30)))
    argv = ["--from-file", file, "--ckpt", small_path, "--device", "cpu", "--out", tmp_path / "out", "--steps", "1"]
    argv += ["--skip-existing", "--batch-size", "4"]
    saved = lambda: len(list(samples.glob("[!.]*.png")))  # noqa: E731
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-m", "ldm_lite.txt2img", *map(os.fspath, argv)])
        begun = saved()
        wait_for(
            lambda begun=begun, process=process: saved() > begun or process.poll() is not None, "an image", seconds=300
        )
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.wait()
    job("--from-file", file, "--batch-size", 4)
    parameters = [texts.load(path).info["parameters"] for path in samples.glob("[!.]*.png")]
    assert len(parameters) == len(set(parameters)) == 30

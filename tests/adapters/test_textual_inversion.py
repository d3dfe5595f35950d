"""Textual inversion: files of every kind, names in prompts, and embeddings against diffusers' text encoders."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from PIL import Image
from random_checkpoint import small, write
from runs import Call, unet_calls
from safetensors.torch import save_file
from torch import Tensor

import ldm_lite
from ldm_lite import Pipeline, txt2img
from ldm_lite.conditioning.prompts import chunks
from ldm_lite.text.bert import BERTTokenizer
from ldm_lite.text.tokenizer import FixingCLIPTokenizer

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "families.npz")
FIRST = 49408  # the first id beyond the vocabulary


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pipeline]:
    """-> a function: the name of a family -> a pipeline of it in miniature."""
    folder, pipes = tmp_path_factory.mktemp("models"), {}

    def one(name: str) -> Pipeline:
        if name not in pipes:
            write(folder / f"{name}.safetensors", small(name))
            pipes[name] = ldm_lite.load(folder / f"{name}.safetensors", device="cpu")
        return pipes[name]

    return one


def a1111(path: Path, vectors: Tensor, name: str | None = toy.NAME) -> Path:
    token = {"string_to_token": {"*": 265}, "string_to_param": {"*": vectors.requires_grad_()}}
    torch.save({**token, "name": name, "step": 500, "sd_checkpoint": None}, path)
    return path


def original(path: Path, vectors: Tensor) -> Path:
    """As the original's EmbeddingManager saves it: a ParameterDict, which is a class."""
    parameters = torch.nn.ParameterDict({"*": torch.nn.Parameter(vectors)})
    torch.save({"string_to_token": {"*": torch.tensor(265)}, "string_to_param": parameters}, path)
    return path


def kohya(path: Path, vectors: Tensor) -> Path:
    save_file({"emb_params": vectors.half().float()}, path)
    return path


def diffusers(path: Path, vectors: Tensor) -> Path:
    torch.save({toy.NAME: vectors}, path)
    return path


def read(pipe: Pipeline, prompt: str, *files: Path | str, **options: Any) -> Call:
    """What the UNet reads of a prompt with names of embeddings."""
    with unet_calls(pipe) as calls:
        pipe.txt2img(prompt, embedding=files, steps=1, scale=1.0, **options)
    return calls[0]


def refuse(pipe: Pipeline, message: str, *files: Path | str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe.txt2img("a", embedding=files, steps=1)


# ---- against diffusers ----------------------------------------------------------------------------------------------


def test_prompts_of_sd2_with_a_name_are_read_as_by_diffusers(load: Callable[[str], Pipeline], tmp_path: Path) -> None:
    context = read(load("sd2"), toy.NAMING, f"{toy.NAME}={a1111(tmp_path / 'learned.pt', toy.embedding(64))}").context
    assert toy.relative_error(context[:, ::5], GOLDEN["learned.sd2.context"]) < 1e-5
    plain = load("sd2").encode_prompt(toy.NAMING).context
    assert toy.relative_error(plain[:, ::5], GOLDEN["learned.sd2.context"]) > 0.1


def test_prompts_of_sdxl_with_a_name_are_read_as_by_diffusers(load: Callable[[str], Pipeline], tmp_path: Path) -> None:
    """By both encoders, each with vectors of its own width; and by the refiner, which has the second alone."""
    save_file({"clip_l": toy.embedding(64), "clip_g": toy.embedding(96)}, tmp_path / "apple.safetensors")
    prompt = toy.NAMING.replace(toy.NAME, "Apple")
    both = read(load("sdxl_base"), prompt, tmp_path / "apple.safetensors")
    assert toy.relative_error(both.context[:, ::7], GOLDEN["learned.sdxl.context"]) < 1e-5
    assert toy.relative_error(both.inputs["y"][:, :96], GOLDEN["learned.sdxl.pooled"]) < 1e-5
    refiner = load("sdxl_refiner")
    ids = replace(refiner.tokenizer, added=(("apple", (FIRST, FIRST + 1, FIRST + 2)),))([prompt])
    wanted = refiner.text_encoder(ids, learned=toy.embedding(96))
    assert torch.equal(read(refiner, prompt, tmp_path / "apple.safetensors").context, wanted)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "file", "name", "stored"),
    [
        (a1111, "easy.pt", "easy", toy.NAME),
        (original, "easy.pt", "easy", None),
        (kohya, "easy.safetensors", "easy", None),
        (diffusers, "learned_embeds.bin", "learned_embeds", toy.NAME),
    ],
)
def test_files_of_every_kind(
    load: Callable[[str], Pipeline],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path, Tensor], Path],
    file: str,
    name: str,
    stored: str | None,
) -> None:
    caplog.set_level("INFO", "ldm_lite")
    vectors = toy.embedding(64).half().float()
    context = read(load("sd2"), f"a {name}, b", make(tmp_path / file, vectors.clone())).context
    said = [message for message in caplog.messages if f"in a prompt, '{name}' stands for 3 vectors" in message]
    assert len(said) == 1
    assert (f"the name stored in it, '{stored}', is not used" in said[0]) == (stored is not None)
    save_file({"emb_params": vectors}, tmp_path / "same.safetensors")
    assert torch.equal(context, read(load("sd2"), "a same, b", tmp_path / "same.safetensors").context)
    assert not torch.equal(context, read(load("sd2"), f"a {name}, b").context)


def test_one_vector_may_have_one_dimension(load: Callable[[str], Pipeline], tmp_path: Path) -> None:
    first, two = (diffusers(tmp_path / f"{i}.bin", torch.ones(*[1] * (i - 1), 64)) for i in (1, 2))
    contexts = [read(load("sd2"), "a cat", f"cat={file}").context for file in (first, two)]
    assert torch.equal(*contexts)


# ---- whose name counts ----------------------------------------------------------------------------------------------


def test_the_name_stored_in_a_file_is_not_active(
    load: Callable[[str], Pipeline], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two files with one stored name do not collide, and the message names what to write."""
    caplog.set_level("INFO", "ldm_lite")
    files = [a1111(tmp_path / f"{name}.pt", toy.normal(i, 2, 64), "<s>") for i, name in enumerate(("one", "Two cats"))]
    pipe = load("sd2")
    assert torch.equal(read(pipe, "a <s>", *files).context, pipe.encode_prompt("a <s>").context)
    assert not torch.equal(read(pipe, "a two CATS", *files).context, read(pipe, "a one", *files).context)
    stored = "; the name stored in it, '<s>', is not used"
    assert f"one.pt: in a prompt, 'one' stands for 2 vectors, no longer for the word{stored}" in caplog.text
    assert f"Two cats.pt: in a prompt, 'Two cats' stands for 2 vectors{stored}" in caplog.text
    caplog.clear()
    read(pipe, "a", a1111(tmp_path / "Easy.pt", toy.embedding(64), "easy"))
    assert "'Easy' stands for 3 vectors" in caplog.text
    assert "the name stored in it" not in caplog.text


def test_a_name_of_the_users(load: Callable[[str], Pipeline], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For files of one name, and names as diffusers has them; a file whose name has the sign is a file."""
    (tmp_path / "other").mkdir()
    files = [kohya(tmp_path / part / "a.safetensors", toy.normal(i, 1, 64)) for i, part in enumerate(("", "other"))]
    caplog.set_level("INFO", "ldm_lite")
    named = read(load("sd2"), "my <Cat toy>", files[0], f"<cat toy>={files[1]}", files[0]).context
    said = [message.split(" stands")[0] for message in caplog.messages if " stands for" in message]
    assert [message.split("in a prompt, ")[1] for message in said] == ["'a'", "'<cat toy>'"], (
        "a file twice is there once"
    )
    assert torch.equal(named, read(load("sd2"), "my a", files[1]).context)
    sign = kohya(tmp_path / "x=y.safetensors", toy.normal(2, 1, 64))
    accent = kohya(tmp_path / "cafe\u0301.safetensors", toy.normal(2, 1, 64))  # as macOS stores names
    for file, name in ((sign, "x=y"), (accent, "caf\u00e9")):
        assert torch.equal(read(load("sd2"), f"a {name}", file).context, read(load("sd2"), "a b", f"b={file}").context)
    refuse(load("sd2"), "got ' ' as the name of an embedding", f" ={sign}")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"emb_params": torch.tensor(1.0)}, "emb_params is a single number, which are not a textual inversion"),
        ({"emb_params": torch.ones(0, 64)}, "emb_params is 0 x 64"),
        ({"emb_params": torch.ones(2, 0)}, "emb_params is 2 x 0"),
        ({"emb_params": torch.ones(2, 64) / 0}, "holds NaN, infinity or no floating point"),
        ({"emb_params": torch.ones(2, 64, dtype=torch.int64)}, "holds NaN, infinity or no floating point"),
        ({"clip_l": torch.ones(2, 64), "clip_g": torch.ones(2, 64)}, "two of its tensors are 64 wide"),
    ],
)
def test_damaged_files(
    load: Callable[[str], Pipeline], tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    refuse(load("sd2"), message, tmp_path / "a.safetensors")


def test_pictures_and_folders(load: Callable[[str], Pipeline], tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    refuse(load("sd2"), r"a\.png: is a picture: .* use its \.pt", tmp_path / "a.png")
    refuse(load("sd2"), "is a folder, expected a textual inversion: name its files", tmp_path)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 / 0",)


def test_nothing_of_a_file_is_run(load: Callable[[str], Pipeline], tmp_path: Path) -> None:
    torch.save({"string_to_param": {"*": torch.ones(1, 64)}, "name": Evil()}, tmp_path / "a.pt")
    refuse(load("sd2"), r"nothing in it was run: its pickle names .*eval", tmp_path / "a.pt")


def test_what_does_not_fit_is_one_line(
    load: Callable[[str], Pipeline], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"clip_l": torch.ones(2, 64), "clip_g": torch.ones(2, 96)}, tmp_path / "xl.safetensors")
    save_file({"clip_l": torch.ones(1, 64), "clip_g": torch.ones(2, 96)}, tmp_path / "uneven.safetensors")
    save_file({"a": torch.ones(2, 64), "b": torch.ones(2, 64)}, tmp_path / "two.safetensors")
    save_file({"conv": torch.ones(2, 64, 3, 3)}, tmp_path / "conv.safetensors")
    (tmp_path / "other").mkdir()
    for sources, message in (
        (
            [a1111(tmp_path / "w.pt", torch.ones(2, 96))],
            "w.pt: is for another model: its vectors are 96 wide, expected 64 ",
        ),
        ([tmp_path / "uneven.safetensors"], "clip_l and clip_g differ in their number of vectors: the file is damaged"),
        ([tmp_path / "two.safetensors"], r"holds 2 tensors \(has a\), which are not a textual inversion"),
        ([tmp_path / "conv.safetensors"], "which are not a textual inversion"),
        ([kohya(tmp_path / "l.safetensors", torch.ones(76, 64))], "holds 76 vectors, expected 1 to 75"),
        (
            [
                kohya(tmp_path / "a.safetensors", torch.ones(1, 64)),
                kohya(tmp_path / "other" / "A.pt", 2 * torch.ones(1, 64)),
            ],
            "A.pt: another embedding has the name 'A': give one of them another, `embedding=",
        ),
    ):
        refuse(load("sd2"), message, *sources)
    narrow = kohya(tmp_path / "a.safetensors", torch.ones(1, 64))
    refuse(load("sdxl_base"), "its vectors are 64 wide, expected 96 for its text encoder", narrow)
    unread = replace(load("sd2"), tokenizer=None)
    refuse(unread, "reads no text with CLIP, which embeddings are made for: leave out `embedding`", narrow)
    with pytest.raises(ValueError, match=r"is a textual inversion embedding \(for `embedding`\), expected a latent"):
        ldm_lite.load(a1111(tmp_path / "w.pt", torch.ones(2, 96)), device="cpu")
    read(load("sd2"), "an xl", tmp_path / "xl.safetensors")
    assert "xl.safetensors: this model does not use its vectors of width 96" in caplog.text


# ---- prompts --------------------------------------------------------------------------------------------------------

NAMED = replace(
    FixingCLIPTokenizer(), added=(("easy", (FIRST, FIRST + 1)), ("easy b", (FIRST + 2,)), ("<c>", (FIRST + 3,)))
)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a cat", ["a", "cat"]),
        ("a easy cat", ["a", FIRST, FIRST + 1, "cat"]),
        ("EASY, easy", [FIRST, FIRST + 1, ",", FIRST, FIRST + 1]),
        ("uneasy easybb easy_x", ["uneasy", "easybb", "easy", "_", "x"]),  # words of their own
        ("an easy b", ["an", FIRST + 2]),  # the longest name
        ("a<c>b <C>", ["a", FIRST + 3, "b", FIRST + 3]),
        ("", []),
    ],
)
def test_names_in_a_text(text: str, ids: list[str | int]) -> None:
    plain = FixingCLIPTokenizer()
    if "easy_x" in text:
        assert NAMED.encode(text) == plain.encode(text)
    assert NAMED.encode(text) == [x for part in ids for x in ([part] if isinstance(part, int) else plain.encode(part))]


def test_what_is_dropped_of_a_text_with_names() -> None:
    assert NAMED.dropped("a " * 74 + "easy") == "easy"  # of which one token fits
    assert NAMED.dropped("a " * 73 + "easy") == ""
    assert NAMED.dropped("easy " + "a " * 73 + "fox") == "fox"
    assert NAMED(["a " * 74 + "easy"])[0, 74:].tolist() == [320, FIRST, 49407]


def test_names_have_weights_and_are_not_torn_apart() -> None:
    weighted = chunks(NAMED, ["a (easy:1.5) cat"], "a1111")
    assert weighted.ids[0, 1:5].tolist() == [320, FIRST, FIRST + 1, 2368]
    assert weighted.weights[0, 1:5].tolist() == [1, 1.5, 1.5, 1]
    two = chunks(NAMED, ["a " * 74 + "easy"], "a1111")
    assert two.ids.shape == (2, 77)
    assert (two.ids[0, 75], two.ids[0, 76]) == (49407, 49407)
    assert two.ids[1, 1:4].tolist() == [FIRST, FIRST + 1, 49407]
    long = replace(NAMED, added=(("long", tuple(range(FIRST, FIRST + 75))),))
    assert chunks(long, ["a, b long"], "a1111").ids[1, 1:76].tolist() == list(range(FIRST, FIRST + 75))


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        (60, [64]),
        (72, [74, 2]),  # two vectors do not fit, and start a chunk: what follows the comma stays
        (73, [74, 3]),  # the chunk is full, so what follows the comma goes along
    ],
)
def test_where_a_chunk_ends_before_a_name(words: int, lengths: list[int]) -> None:
    """As in sd_hijack_clip.py of AUTOMATIC1111's web UI, whose chunks hold 75."""
    ids = chunks(NAMED, ["a " * words + ", b easy"], "a1111").ids
    assert [int((row != 49407).sum()) - 1 for row in ids] == lengths


def test_other_tokenizers_have_names_too() -> None:
    tokenizer = replace(BERTTokenizer(), added=(("easy", (9, 8)),))
    assert tokenizer.encode("a easy") == [*BERTTokenizer().encode("a"), 9, 8]


def test_several_files_have_vectors_of_their_own(load: Callable[[str], Pipeline], tmp_path: Path) -> None:
    files = [kohya(tmp_path / f"{name}.safetensors", toy.normal(i, i + 1, 64)) for i, name in enumerate("xyz")]
    pipe = load("sd2")
    plain = pipe.encode_prompt("a x, b").context
    for name, file in zip("xyz", files, strict=True):
        alone = read(pipe, f"a {name}, b", file).context
        assert torch.equal(read(pipe, f"a {name}, b", *files).context, alone)
    assert torch.equal(pipe.encode_prompt("a x, b").context, plain), "a pipeline does not change"


def test_long_prompts_with_names_and_weights(load: Callable[[str], Pipeline], tmp_path: Path) -> None:
    long, short = (
        read(load("sdxl_base"), f"{'a ' * count}(both:1.2)", _both(tmp_path), prompt_syntax="a1111")
        for count in (74, 0)
    )
    assert long.context.shape == (1, 2 * 77, 160)
    assert torch.allclose(long.context[:, 77:], short.context, atol=1e-4)


def _both(folder: Path) -> Path:
    save_file({"clip_l": toy.embedding(64), "clip_g": toy.embedding(96)}, folder / "both.safetensors")
    return folder / "both.safetensors"


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_says_what_to_call_it_and_the_refiner_knows_it(
    load: Callable[[str], Pipeline], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sdxl_base", "sdxl_refiner"):
        write(tmp_path / f"{name}.safetensors", small(name))
    pictures = []
    for prompt in ("a both", "a thing"):
        arguments = [prompt, "--ckpt", str(tmp_path / "sdxl_base.safetensors"), "--steps", "2", "--device", "cpu"]
        arguments += ["--refiner", str(tmp_path / "sdxl_refiner.safetensors"), "--refiner-start", "0"]
        arguments += ["--H", "64", "--W", "64", "--out", str(tmp_path / "out.png"), "--embedding", str(_both(tmp_path))]
        assert txt2img.main(arguments) == 0
        pictures.append(np.asarray(Image.open(tmp_path / "out.png")))
        (tmp_path / "out.png").unlink()
    assert not np.array_equal(*pictures)
    assert re.search(r"both.safetensors: in a prompt, 'both' stands for 3 vectors", capsys.readouterr().err)
    assert txt2img.main([*arguments[:-1], str(tmp_path / "none.pt")]) == 2
    assert "none.pt: no such file" in capsys.readouterr().err

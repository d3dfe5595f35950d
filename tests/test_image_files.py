"""Image files from anywhere: other formats, too large, damaged, hostile.  Each works or is a ValueError of one line."""

import io
import os
import random
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from runs import pixels_of

from ldm_lite import Pipeline, image
from ldm_lite.control.control import Control
from ldm_lite.image import clip_crop, open_depth, open_image, open_mask, resize, to_image

PACKAGE = Path(image.__file__).parent
READERS = [open_image, open_mask, open_depth, lambda path: Control("c", path, preprocess="inpaint").pixels((8, 8))]


def encoded(form: str, size: tuple[int, int] = (16, 12), mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(values).convert(mode).save(file, form, **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(b"\0" * 10_000)
    chunks = (chunk(b"IHDR", head), *chunks, chunk(b"IDAT", body), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff(tag: int, kind: int, count: int, order: str = "<", big: bool = False) -> bytes:
    """A header and one tag of many numbers."""
    mark = {"<": b"II", ">": b"MM"}[order]
    if big:
        head = mark + struct.pack(order + "HHHQQ", 43, 8, 0, 16, 1) + struct.pack(order + "HHQQ", tag, kind, count, 44)
        return head + bytes(8) + b"\1" * 64
    head = mark + struct.pack(order + "HIH", 42, 8, 1) + struct.pack(order + "HHII", tag, kind, count, 26)
    return head + bytes(4) + b"\1" * 64


@pytest.mark.slow
def test_only_the_formats_that_people_use_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any name: Pillow goes by the content, and for EPS it starts Ghostscript."""
    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args: started.append(args))
    path = tmp_path / "photo.png"
    for form in set(image._formats()) - {"HEIF"}:
        path.write_bytes(encoded(form))
        assert open_image(path).size == (16, 12)
    for form in ("EPS", "PPM", "TGA", "PCX", "ICO", "SGI", "ICNS", "JPEG2000", "PDF", "DDS"):
        path.write_bytes(encoded(form, (16, 16)))
        for read in READERS:
            with pytest.raises(ValueError, match=r"photo\.png: is not an image that can be read, wanted PNG, JPEG,"):
                read(path)
    assert not started


def test_every_image_is_opened_with_a_list_of_formats() -> None:
    calls = [
        line.strip()
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\bImage\.open\(", line)
    ]
    assert calls
    assert all("formats=" in line for line in calls), calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [(13_000, 13_000), (2**31 - 1, 2**31 - 1), (1, 100_000)])
def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(*size))
    for read in READERS:
        with pytest.raises(ValueError, match=r"a\.png: .*(wanted at most|more than) 67108864"):
            read(path)


def test_too_many_bytes_are_refused(sd: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded("PNG"))
    os.truncate(path, 2**28 + 1)
    with pytest.raises(ValueError, match=r"a\.png: is too large, wanted at most 256 MiB"):
        sd.encode(path)


def test_a_pipe_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "pipe.png", Path("/dev/zero"), tmp_path / "folder.png"):
        for read in READERS:
            with pytest.raises(ValueError, match=f"{path}: is a (pipe|device|folder), wanted a regular file"):
                read(path)


def test_what_expands_when_it_is_read_is_refused(sd: Pipeline, tmp_path: Path) -> None:
    """Text, profiles and EXIF data of a PNG; tags of a TIFF file, which become millions of Python objects."""
    bomb = zlib.compress(b"A" * 2**25, 9)
    exif = b"II*\0\x08\0\0\0" + struct.pack("<HHHIII", 1, 0x112, 3, 2**20, 26, 0) + b"\1\0" * 2**20
    cases = {
        "zTXt": png(4, 4, chunk(b"zTXt", b"k\0\0" + bomb)),
        "iTXt": png(4, 4, chunk(b"iTXt", b"k\0\1\0\0\0" + bomb)),
        "iCCP": png(4, 4, chunk(b"iCCP", b"k\0\0" + bomb)),
        "exif": png(4, 4, chunk(b"eXIf", exif)),
        "strips": tiff(273, 4, 2**25),
        "rationals": tiff(282, 5, 2**20, ">"),
        "sixty-four bits": tiff(273, 16, 2**40, big=True),
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: is not an image that can be read .*(large|wanted at most)"):
            sd.encode(tmp_path / name)


def test_of_several_frames_the_first_is_taken(sd: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.tiff", "a.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        assert (pixels_of(sd, tmp_path / name) == (255, 0, 0)).all()
        assert f"{name}: holds several images: the first is taken" in caplog.text


def test_images_from_python_are_limited_too(tmp_path: Path) -> None:
    huge = np.broadcast_to(np.uint8(0), (13_000, 13_000))
    for value in (huge, torch.zeros(1).expand(3, 13_000, 13_000), np.zeros((1, 70_000), dtype=np.uint8)):
        with pytest.raises(ValueError, match=r"got an image of \d+ x \d+ pixels, wanted at most 67108864"):
            to_image(value)
    (tmp_path / "big.png").write_bytes(png(9000, 9000))
    (tmp_path / "half.png").write_bytes(encoded("PNG")[:200])
    with pytest.raises(ValueError, match="got an image of 9000 x 9000 pixels"):
        to_image(Image.open(tmp_path / "big.png"))
    with pytest.raises(ValueError, match="got an image that cannot be read"):
        to_image(Image.open(tmp_path / "half.png"))
    line = Image.new("RGB", (1, 65_536))
    for narrow in (lambda: resize(line, (512, 512), "crop"), lambda: clip_crop(line, 224)):
        with pytest.raises(ValueError, match=r"got an image of \d+ x \d+ pixels, wanted at most"):
            narrow()


SEEDS: dict[str, bytes] = {}


def seeds() -> dict[str, bytes]:
    """Small files of every format and several modes."""
    if not SEEDS:
        for form in sorted(set(image._formats()) - {"HEIF"}):
            SEEDS[form] = encoded(form)
        for mode in ("1", "L", "P", "RGBA", "I;16"):
            grey = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1300
            file = io.BytesIO()
            (Image.fromarray(grey) if mode == "I;16" else Image.new("RGBA", (8, 6), "red").convert(mode)).save(
                file, "PNG"
            )
            SEEDS[f"PNG {mode}"] = file.getvalue()
        for mode in ("CMYK", "F", "LAB"):
            SEEDS[f"TIFF {mode}"] = encoded("TIFF", mode="RGB" if mode == "LAB" else mode)
        SEEDS["TIFF deflate"] = encoded("TIFF", compression="tiff_deflate")
        SEEDS["TIFF jpeg"] = encoded("TIFF", compression="jpeg")
        SEEDS["JPEG CMYK"] = encoded("JPEG", mode="CMYK")
        SEEDS["JPEG exif"] = encoded("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0")
        frames = [Image.new("P", (8, 6), i) for i in range(3)]
        file = io.BytesIO()
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
        SEEDS["GIF frames"] = file.getvalue()
    return SEEDS


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A file truncated, with bytes changed (mostly in the first 64), repeated, removed, or with huge numbers in it."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(min(len(data), chance.choice((32, 64, 10**6))) or 1)
        match chance.randrange(6):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 2:
                data[at : at + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"))
            case 3:
                data[at:at] = data[at : at + chance.randrange(64)]
            case 4:
                del data[at : at + chance.randrange(16)]
            case _:
                data += bytes(chance.randrange(256) for _ in range(20))
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_damaged_images_work_or_are_one_line(tmp_path: Path, count: int) -> None:
    chance, path, read_well = random.Random(count), tmp_path / "photo.png", 0
    for number in range(count):
        content = mutated(chance.choice(list(seeds().values())), chance)
        path.write_bytes(content)
        read = READERS[number % len(READERS)]
        try:
            read(path)
            read_well += 1
        except ValueError as error:
            line = str(error)
            assert line.count("\n") == 0
            assert "photo.png: " in line, line
    assert 0 < read_well < count

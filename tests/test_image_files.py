"""Image files from anywhere: other formats, too large, damaged, hostile.  Each works or is a ValueError of one line."""

import io
import os
import random
import re
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from runs import pixels_of

from ldm_lite import Pipeline, image
from ldm_lite.control.control import Control
from ldm_lite.image import clip_crop, open_depth, read_mask, read_rgb, resize_image, to_image
from ldm_lite.text.parameters import read_parameters

PACKAGE = Path(image.__file__).parent
READERS = [read_rgb, read_mask, open_depth, lambda path: Control("c", path, preprocess="inpaint").pixels((8, 8))]


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
        assert read_rgb(path).size == (16, 12)
    for form in ("EPS", "PPM", "TGA", "PCX", "ICO", "SGI", "ICNS", "JPEG2000", "PDF", "DDS"):
        path.write_bytes(encoded(form, (16, 16)))
        for read in READERS:
            with pytest.raises(ValueError, match=r"photo\.png: is not an image that can be read, expected PNG, JPEG,"):
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
        with pytest.raises(ValueError, match=r"a\.png: .*(expected at most|more than) 67108864"):
            read(path)


def test_too_many_bytes_are_refused(sd: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded("PNG"))
    os.truncate(path, 2**28 + 1)
    with pytest.raises(ValueError, match=r"a\.png: is too large, expected at most 256 MiB"):
        sd.encode(path)


def test_a_pipe_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "pipe.png", Path("/dev/zero"), tmp_path / "folder.png"):
        for read in READERS:
            with pytest.raises(ValueError, match=f"{path}: is a (pipe|device|folder), expected a regular file"):
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
        with pytest.raises(ValueError, match=f"{name}: is not an image that can be read .*(large|expected at most)"):
            sd.encode(tmp_path / name)


@pytest.mark.parametrize("kind", [3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 16])  # all of TIFF 6 and BigTIFF but bytes and text
def test_numbers_of_every_type_are_counted(kind: int, tmp_path: Path) -> None:
    (tmp_path / "a.tiff").write_bytes(tiff(273, kind, 2**20))
    with pytest.raises(ValueError, match="got 1048576 numbers in tag 273"):
        read_rgb(tmp_path / "a.tiff")


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content


def shared(tags: int, size: int, kind: int = 7) -> bytes:
    """A TIFF directory whose tags all hold the same `size` bytes."""
    entries = b"".join(struct.pack("<HHII", 0x1000 + i, kind, size // (2 if kind == 3 else 1), 10) for i in range(tags))
    return (b"II*\0\x08\0\0\0" + struct.pack("<H", tags) + entries + bytes(4)).ljust(size + 10, b"\1")


def costly() -> dict[str, tuple[bytes, str]]:
    """Small files that took minutes or gigabytes, and what is said of them."""
    jpeg, progressive, gif = encoded("JPEG"), encoded("JPEG", (64, 64), progressive=True), encoded("GIF", mode="P")
    two_scans = jpeg.replace(b"\xff\xda\0\x0c\3", b"\xff\xda\0\x0c\1")  # of a component each
    head, scan = jpeg[:2], progressive[progressive.rindex(b"\xff\xda") : -2]
    colours = 13 + (3 << (gif[10] & 7) + 1)
    exif = [b"Exif\0\0" + part for part in (shared(900, 40_000), shared(5000, 60_001)[:60_000], b"x" * 60_000)]
    bmp = b"BM" + bytes(8) + struct.pack("<I", 1078)
    grey = struct.pack("<IiiHHIIiiII", 40, 65_535, 1000, 1, 8, 1, 4, 0, 0, 0, 0) + bytes(1024) + b"\0\0" * 1000

    def with_segments(*segments: bytes) -> bytes:
        return head + b"".join(segments) + jpeg[2:]

    def with_blocks(blocks: bytes) -> bytes:
        return gif[:colours] + blocks + gif[colours:]

    return {
        "EXIF of one segment": (with_segments(segment(0xE1, exif[0])), "more bytes than the file.s 40010"),
        "EXIF of many tags": (with_segments(segment(0xE1, exif[1])), "5000 tags, expected at most 1000"),
        "EXIF of many segments": (with_segments(*[segment(0xE1, exif[2])] * 20), "bytes of EXIF data"),
        "small segments": (with_segments(*[segment(0xE1, b"Exif\0\0x")] * 9999), "more than 2000 segments"),
        "MPF": (with_segments(segment(0xE2, b"MPF\0" + shared(900, 40_000))), "more bytes than"),
        "APP13": (with_segments(*[segment(0xED, b"Photoshop 3.0\0" + b"8BIM" * 9999)] * 999), "of metadata"),
        "tables": (with_segments(*[segment(0xDB, (b"\0" + b"\1" * 64) * 999)] * 99), "of tables"),
        "padding": (with_segments(b"\xff" * 10**6), "more than 2000 segments"),
        "no segments": (with_segments(segment(0xE0, b""), b"\0" * 10**6), "more than 2000 segments"),
        "scans": (progressive[:-2] + scan * 999 + progressive[-2:], "more than 100 scans"),
        "scans of one component": (two_scans[:-2] + two_scans[two_scans.index(b"\xff\xda") :] * 999, "100 scans"),
        "EXIF of PNG": (png(4, 4, chunk(b"eXIf", shared(900, 40_000))), "more bytes than"),
        "EXIF in hexadecimal": (
            png(4, 4, chunk(b"tEXt", b"Raw profile type exif\0\nexif\n9\n" + shared(900, 40_000).hex().encode())),
            "more bytes than",
        ),
        "chunks": (png(4, 4, *[chunk(b"abCd", b"")] * 999), "more than 200 chunks"),
        "chunks of pixels": (png(4, 4, *[chunk(b"IDAT", b"")] * 9999), r"more than \d+ chunks of pixels"),
        "frames": (png(4, 4, *[chunk(b"fcTL", b"")] * 9999), r"more than \d+ chunks of pixels"),
        "comments": (with_blocks(b"!\xfe" + (b"\xff" + b"c" * 255) * 999 + b"\0"), "bytes of comments"),
        "small comments": (with_blocks(b"!\xfe\1c\0" * 9999), r"more than \d+ blocks"),
        "no blocks": (with_blocks(b"\0" * 10**6), r"more than \d+ blocks"),
        "after the frame": (gif[:-1] + b"!\xfe\1c\0" * 9999, r"more than \d+ blocks"),
        "bytes of TIFF": (shared(900, 10**6), "more bytes than"),
        "numbers of TIFF": (shared(3, 10**6, kind=3), "got 500000 numbers in tag 4096"),
        "numbers of all tags": (
            shared(3, 250_000, kind=6) + bytes(300_000),
            "750000 so far, expected .* 524288 in all",
        ),
        "run lengths": (bmp + grey, "65535 x 1000 pixels, expected at most 4194304"),
        "upside down": (bmp + grey.replace(struct.pack("<i", 1000), struct.pack("<i", -1000)), "65535 x 1000 pixels"),
        "AVIF": (encoded("AVIF", exif=shared(5000, 60_001)), "5000 tags"),
        "WebP": (encoded("WEBP", exif=shared(900, 40_000)), "more bytes than"),
    }


@pytest.mark.parametrize("marker", [0xC2, 0xC6, 0xCA, 0xCE])
def test_scans_of_a_progressive_jpeg_are_fewer_for_more_pixels(marker: int, tmp_path: Path) -> None:
    """2^30 pixels of all scans together: 16 scans of 8192 x 8192."""
    jpeg = encoded("JPEG", (64, 64), progressive=True)
    scan, frame = jpeg[jpeg.rindex(b"\xff\xda") : -2], jpeg.index(b"\xff\xc2")
    jpeg = jpeg[:-2] + scan * (17 - jpeg.count(b"\xff\xda")) + jpeg[-2:]
    for side, most in ((64, 100), (8192, 16)):
        sized = jpeg[:frame] + bytes((0xFF, marker)) + jpeg[frame + 2 : frame + 5] + struct.pack(">HH", side, side)
        (tmp_path / "a.jpg").write_bytes(sized + jpeg[frame + 9 :])
        message = ""
        try:
            read_rgb(tmp_path / "a.jpg")
        except ValueError as error:  # of a kind that Pillow does not decode, too
            message = str(error)
        assert (f"more than {most} scans" in message) is (most < 17)


@pytest.mark.filterwarnings("ignore")
def test_the_cost_of_reading_is_bounded_by_counting_pieces(tmp_path: Path) -> None:
    for name, (content, message) in costly().items():
        path = tmp_path / name
        path.write_bytes(content)
        start = time.process_time()
        with pytest.raises(ValueError, match=f"{name}: is not an image that can be read .*{message}"):
            read_rgb(path)
        if content[1:4] == b"PNG" or content[:2] == b"\xff\xd8":
            with pytest.raises(ValueError, match=f"{name}: is not a PNG, JPEG or WebP|{name}: holds no text"):
                read_parameters(path)
        assert time.process_time() - start < 10


@pytest.mark.filterwarnings("ignore:Tag data larger than file")  # Pillow, of the damaged one
def test_what_cameras_and_editors_write_is_below_the_bounds(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    exif.get_ifd(0x8769)[0x9286] = b"ASCII\0\0\0a text"
    exif.get_ifd(0x8825)[1] = "N"
    extended = b"http://ns.adobe.com/xmp/extension/\0" + b"depth" * 12_000
    photo = encoded("JPEG", (64, 48), progressive=True, exif=exif, icc_profile=b"p" * 200_000, quality=95)
    for name, content in {
        "photo.jpg": photo[:2] + segment(0xE1, extended) * 150 + photo[2:],
        "photo.webp": encoded("WEBP", (64, 48), exif=exif),
        "photo.png": encoded("PNG", (64, 48), exif=exif),
        "photo.tiff": encoded("TIFF", (64, 48), exif=exif, compression="tiff_lzw"),
        "damaged.jpg": encoded("JPEG", (48, 64), exif=b"Exif\0\0" + tiff(0x9286, 7, 2**30)),
        "photo.avif": encoded("AVIF", (64, 48), exif=exif),  # last: Pillow takes the orientation out of it
    }.items():
        (tmp_path / name).write_bytes(content)
        assert read_rgb(tmp_path / name).size == (48, 64), name


def test_of_several_frames_the_first_is_taken(sd: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.tiff", "a.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        assert (pixels_of(sd, tmp_path / name) == (255, 0, 0)).all()
        assert f"{name}: holds several images, of which the first is used" in caplog.text


def test_images_from_python_are_limited_too(tmp_path: Path) -> None:
    huge = np.broadcast_to(np.uint8(0), (13_000, 13_000))
    for value in (huge, torch.zeros(1).expand(3, 13_000, 13_000), np.zeros((1, 70_000), dtype=np.uint8)):
        with pytest.raises(ValueError, match=r"got an image of \d+ x \d+ pixels, expected at most 67108864"):
            to_image(value)
    (tmp_path / "big.png").write_bytes(png(9000, 9000))
    (tmp_path / "half.png").write_bytes(encoded("PNG")[:200])
    with Image.open(tmp_path / "big.png") as image, pytest.raises(ValueError, match="an image of 9000 x 9000 pixels"):
        to_image(image)
    with Image.open(tmp_path / "half.png") as image, pytest.raises(ValueError, match="an image that cannot be read"):
        to_image(image)
    line = Image.new("RGB", (1, 65_536))
    for narrow in (lambda: resize_image(line, (512, 512), "crop"), lambda: clip_crop(line, 224)):
        with pytest.raises(ValueError, match=r"got an image of \d+ x \d+ pixels, expected at most"):
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

"""What an image file may cost to read: its pieces are counted before Pillow opens it.

Pillow reads headers in Python, makes objects of all numbers, and decodes each scan of a JPEG.  A small file of many
pieces, of tags that share their bytes, or of empty scans would take minutes or gigabytes.
"""

import contextlib
import io
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

MOST_PIECES = 2000  # segments, chunks, blocks, and as many more as fit the file's size
MOST_METADATA = 2**24  # bytes of a JPEG's segments
MOST_EXIF = 2**20  # bytes
MOST_COMMENT = 2**16  # bytes of a GIF, which Pillow joins block by block
MOST_TABLES = 2**16  # bytes of a JPEG's tables
MOST_TAGS = 1000  # of a TIFF directory
MOST_NUMBERS = 2**18  # of a tag, and twice that of all: a strip for each row, or tiles of 16 x 16
MOST_SCANS = 100  # of a JPEG; progressive ones have 10
MOST_SCANNED = 2**30  # pixels of all scans together
MOST_RLE = 2**22  # pixels, and bytes, of a BMP with run lengths, which Pillow decodes in Python
MOST_AVIF = 2**26  # bytes
TAG_SIZES = {1: 1, 2: 1, 6: 1, 7: 1, 3: 2, 8: 2, 4: 4, 9: 4, 11: 4, 13: 4, 5: 8, 10: 8, 12: 8, 16: 8}  # bytes, by type
DIRECTORIES = (0x8769, 0x8825, 0xA005)  # tags with the place of another directory: EXIF, GPS, interoperability


def check_image(file: BinaryIO) -> None:
    """Raise ValueError, one line, for an image whose headers or scans cost out of proportion; go back to the start.

    Damaged files, and those of unknown formats, pass: Pillow refuses them.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(12)
    with contextlib.suppress(struct.error):  # a file that ends early
        if head[:3] == b"\xff\xd8\xff":
            _check_jpeg(file)
        elif head[:8] == b"\x89PNG\r\n\x1a\n":
            _check_png(file, size)
        elif head[:3] == b"GIF":
            _check_gif(file, size)
        elif head[:2] in (b"II", b"MM"):
            _check_tags(file, size)
        elif head[:2] == b"BM":
            _check_bmp(file, size)
        elif head[4:8] == b"ftyp" and size > MOST_AVIF:
            raise ValueError(f"got {size} bytes, expected at most {MOST_AVIF} of AVIF or HEIF")
    file.seek(0)


def check_exif(info: Mapping[Any, Any]) -> None:
    """Raise ValueError for the EXIF data of an opened image, its `info`, if Pillow must not parse them."""
    profile, data = info.get("Raw profile type exif"), info.get("exif")
    if data is None and isinstance(profile, str):  # ImageMagick's, in hexadecimal
        data = bytes.fromhex("".join(profile[: 4 * MOST_EXIF].split("\n")[3:]))
    _check_exif(data or b"")


def _check_exif(data: bytes | bytearray) -> None:
    if len(data) > MOST_EXIF:
        raise ValueError(f"got {len(data)} bytes of EXIF data, expected at most {MOST_EXIF}: remove them")
    while data.startswith(b"Exif\0\0"):
        data = data[6:]
    with contextlib.suppress(struct.error):  # they end early
        _check_tags(io.BytesIO(data), len(data))


def _check_pieces(number: int, most: int, what: str) -> None:
    if number > most:
        raise ValueError(f"got more than {most} {what}: save it again")


def _check_jpeg(file: BinaryIO) -> None:
    """Count segments, as Pillow reads them, up to the first scan; then the scans, if there may be several."""
    exif, metadata, tables, pieces = bytearray(), 0, 0, 0
    pixels = components = 0
    progressive = False
    file.seek(2)
    while byte := file.read(1):
        _check_pieces(pieces := pieces + 1, MOST_PIECES, "segments")
        if byte != b"\xff":  # Pillow skips it
            continue
        while (byte := file.read(1)) == b"\xff":
            _check_pieces(pieces := pieces + 1, MOST_PIECES, "segments")
        marker = byte[0] if byte else 0
        if not 0xC0 <= marker <= 0xFE or marker in (0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)):  # without content
            continue
        content = file.read(max(struct.unpack(">H", file.read(2))[0] - 2, 0))
        if marker >= 0xE0:  # APP0 to APP15, and comments
            metadata += len(content)
            if content[:6] == b"Exif\0\0":
                exif += content[6:]
            if content[:4] == b"MPF\0":
                _check_exif(content[4:])
        else:
            tables += len(content)
        if max(len(exif) - MOST_EXIF, metadata - MOST_METADATA, tables - MOST_TABLES) > 0:
            raise ValueError(
                f"got {len(exif)} bytes of EXIF data, {metadata} of metadata and {tables} of tables before its pixels, "
                f"expected at most {MOST_EXIF}, {MOST_METADATA} and {MOST_TABLES}: save it again"
            )
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, components = struct.unpack(">xHHB", content[:6])
            pixels, progressive = height * width, marker in (0xC2, 0xC6, 0xCA, 0xCE)
        elif marker == 0xDA:
            several = progressive or content[:1] < bytes([components])
            most = min(MOST_SCANS, MOST_SCANNED // max(pixels, 1))
            scans = 1
            while several and (block := file.read(2**20)):  # one that begins in two blocks costs little
                scans += block.count(b"\xff\xda")
                _check_pieces(scans, most, "scans")
            break
    _check_exif(exif)


def _check_png(file: BinaryIO, size: int) -> None:
    pieces = pixel_pieces = 0
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind in (b"IDAT", b"fdAT", b"fcTL"):
            pixel_pieces += 1
        else:
            pieces += 1
        _check_pieces(pixel_pieces, MOST_PIECES + size // 1024, "chunks of pixels")
        _check_pieces(pieces, MOST_PIECES // 10, "chunks")  # each may hold a MiB of compressed text
        if kind == b"eXIf":
            _check_exif(file.read(min(length, MOST_EXIF + 1)))
            length -= min(length, MOST_EXIF + 1)
        file.seek(length + 4, io.SEEK_CUR)
        if kind == b"IEND":
            break


def _check_gif(file: BinaryIO, size: int) -> None:
    """Count blocks up to the second frame, which Pillow looks for."""
    pieces = comment = frames = 0
    most = MOST_PIECES + size // 128  # of pixels, a block has 255 bytes

    def skip_palette(flags: int) -> None:
        file.seek(3 << (flags & 7) + 1 if flags & 128 else 0, io.SEEK_CUR)

    file.seek(10)
    (flags,) = struct.unpack("Bxx", file.read(3))
    skip_palette(flags)
    while (kind := file.read(1)) not in (b"", b";"):
        _check_pieces(pieces := pieces + 1, most, "blocks")
        if kind not in (b"!", b","):  # Pillow skips it
            continue
        is_comment = False
        if kind == b"!":
            is_comment = file.read(1) == b"\xfe"
        else:
            frames += 1
            (flags,) = struct.unpack("8xB", file.read(9))
            skip_palette(flags)
            file.read(1)  # the width of codes
        if frames == 2:
            break
        while (length := file.read(1)) not in (b"", b"\0"):
            _check_pieces(pieces := pieces + 1, most, "blocks")
            comment += length[0] * is_comment
            file.seek(length[0], io.SEEK_CUR)
        if comment > MOST_COMMENT:
            raise ValueError(f"got {comment} bytes of comments, expected at most {MOST_COMMENT}: remove them")


def _check_bmp(file: BinaryIO, size: int) -> None:
    file.seek(14)
    (header,) = struct.unpack("<I", file.read(4))
    if header >= 40:
        width, height, compression = struct.unpack("<ii4xI", file.read(16))
        if compression in (1, 2) and max(abs(width * height), size) > MOST_RLE:
            raise ValueError(f"got a BMP in run lengths of {width} x {abs(height)} pixels, expected at most {MOST_RLE}")


def _check_tags(file: BinaryIO, size: int) -> None:
    """Raise ValueError for TIFF's directories with more tags, numbers or bytes than an image has (TIFF 6.0, section 2).

    The file has `size` bytes.  Pillow makes a Python object of each number.
    """
    file.seek(0)
    head = file.read(4)
    order = ">" if head[:2] == b"MM" else "<"
    big = head[2:3] == b"\x2b"  # 64 bits
    number, entry, inline = (f"{order}Q", f"{order}HHQQ", 8) if big else (f"{order}H", f"{order}HHII", 4)
    (first,) = struct.unpack(f"{order}4xQ" if big else f"{order}I", file.read(12 if big else 4))
    places, read = [first], 0
    total_bytes = total_numbers = 0
    while len(places) > read and len(places) <= 8:
        place, read = places[read], read + 1
        if place > size:
            continue
        file.seek(place)
        (count,) = struct.unpack(number, file.read(struct.calcsize(number)))
        if count > MOST_TAGS:
            raise ValueError(f"got a directory of {count} tags, expected at most {MOST_TAGS}: save it again")
        tags = file.read(count * struct.calcsize(entry))
        for tag, kind, numbers, value in struct.iter_unpack(
            entry, tags[: len(tags) // struct.calcsize(entry) * struct.calcsize(entry)]
        ):
            is_number = kind in TAG_SIZES and kind not in (1, 2, 7)  # bytes and text stay as they are
            length = numbers * TAG_SIZES.get(kind, 0)
            total_bytes += min(length, max(0, size - value)) if length > inline else 0
            total_numbers += numbers if is_number else 0
            if (is_number and numbers > MOST_NUMBERS) or total_numbers > 2 * MOST_NUMBERS:
                raise ValueError(
                    f"got {numbers} numbers in tag {tag}, {total_numbers} so far, expected at most {MOST_NUMBERS} in a "
                    f"tag and {2 * MOST_NUMBERS} in all: save it again"
                )
            if total_bytes > size + 2**18:  # one or two damaged tags in a photo may hold anything
                raise ValueError(f"got tags that take more bytes than the file's {size}: save it again")
            if tag in DIRECTORIES:
                places.append(value)

"""Reading images and masks of every mode, resizing, and the round trip to pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import encoded_pixels, pixels_of

from ldm_lite import Pipeline
from ldm_lite.image import (
    extend,
    feathered_weights,
    list_images,
    mask_latent,
    pad,
    read_image,
    resize_image,
    to_mask,
    to_rgb,
)

RED = (255, 0, 0)


def two_halves(mode: str = "RGB") -> Image.Image:
    """6 x 4, the left half red."""
    image = Image.new("RGB", (6, 4), "blue")
    image.paste(RED, (0, 0, 3, 4))
    return image.convert(mode)


def test_exif_orientation(sd: Pipeline, tmp_path: Path) -> None:
    """A camera held sideways: stored 6 x 4 with the tag "rotate by 90 degrees", shown 4 x 6 with red on top."""
    exif = Image.Exif()
    exif[0x0112] = 6
    two_halves().save(tmp_path / "a.png", exif=exif)
    pixels = pixels_of(sd, tmp_path / "a.png")
    assert (pixels[:3] == RED).all()
    assert (pixels[3:] == (0, 0, 255)).all()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "YCbCr", "HSV"])
def test_modes_of_colour(sd: Pipeline, mode: str) -> None:
    pixels = pixels_of(sd, two_halves(mode))[:4, :6]
    assert np.abs(pixels.astype(int) - np.asarray(two_halves(), dtype=int)).max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16", "I;16B", "I"])
def test_modes_of_grey(mode: str) -> None:
    grey = np.array([[0, 255], [255, 0 if mode == "1" else 200]], dtype=np.uint8)
    if mode.startswith("I"):
        order = ">u2" if mode == "I;16B" else "<u2"
        image = Image.frombytes("I;16B" if mode == "I;16B" else "I;16", (2, 2), (grey.astype(order) * 257).tobytes())
        image = image.convert("I") if mode == "I" else image
    else:
        image = Image.fromarray(grey).convert(mode)
    assert image.mode == mode
    assert np.array_equal(np.asarray(to_rgb(image)), np.repeat(grey[:, :, None], 3, axis=2))
    assert np.array_equal(np.asarray(to_mask(image)), 255 * (grey > 127))


def test_transparency_is_white_in_images_and_black_in_masks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    to_rgb(Image.new("RGBA", (2, 1), "red"))
    assert not caplog.text
    image = Image.new("RGBA", (2, 1), (255, 255, 255, 0))
    image.putpixel((1, 0), (255, 255, 255, 255))
    assert to_rgb(image).getpixel((0, 0)) == (255, 255, 255)
    assert list(np.asarray(to_mask(image))[0]) == [0, 255]
    assert "filled with white" in caplog.text
    assert "filled with black" in caplog.text
    palette = Image.new("P", (1, 1))
    palette.putpalette([0, 0, 0])
    palette.info["transparency"] = 0
    assert to_rgb(palette).getpixel((0, 0)) == (255, 255, 255)


def test_files_that_are_no_images(sd: Pipeline, tmp_path: Path) -> None:
    two_halves().resize((99, 99)).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:200])
    (tmp_path / "text.png").write_text("hello")
    Image.fromarray(np.zeros((2, 2), dtype=np.float32)).save(tmp_path / "float.tif")
    for name in ("half.png", "text.png", "float.tif"):
        with pytest.raises(ValueError, match=rf"{name}: is not an image that can be read"):
            sd.encode(tmp_path / name)
    with pytest.raises(
        ValueError, match=r"text\.png: is not an image that can be read, expected PNG,"
    ):  # without Pillow's own words
        sd.encode(tmp_path / "text.png")
    with pytest.raises(FileNotFoundError):
        sd.inpaint("a", tmp_path / "whole.png", tmp_path / "none.png")


def test_pixels_come_back_bit_for_bit(sd: Pipeline) -> None:
    """An autoencoder that changes nothing gives them back."""
    array = np.arange(768, dtype=np.int64).astype(np.uint8).reshape(16, 16, 3)
    with encoded_pixels(sd) as seen:
        sd.encode(Image.fromarray(array))
    [pixels] = seen
    assert pixels.dtype == torch.float32
    assert (pixels.min(), pixels.max()) == (-1, 1)
    hook = sd.vae.decoder.register_forward_hook(lambda decoder, args, out: pixels)
    try:
        [decoded] = sd.decode(torch.zeros(1, 4, 2, 2), output="numpy")
    finally:
        hook.remove()
    assert np.array_equal(decoded, array)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_resize() -> None:
    image = two_halves().resize((60, 40), Image.Resampling.NEAREST)
    assert resize_image(image, (30, 30), "crop").size == (30, 30)
    assert resize_image(image, (30, 30), "fit").size == (30, 20)
    assert resize_image(image, (30, 30), "stretch").size == (30, 30)
    cropped, stretched = (np.asarray(resize_image(image, (30, 30), how)) for how in ("crop", "stretch"))
    for array in (cropped, stretched):  # the halves stay halves, since the crop takes as much on both sides
        assert array[15, 2].argmax() == 0
        assert array[15, 27].argmax() == 2
    assert resize_image(image, image.size, "crop").tobytes() == image.tobytes()
    with pytest.raises(ValueError, match="got resize 'pad', expected crop, fit, stretch"):
        resize_image(image, (30, 30), "pad")


@pytest.mark.parametrize("how", ["fit", "stretch"])
@pytest.mark.parametrize("size", [(40, 40), (313, 313), (901, 901)])
def test_no_pixel_of_a_mask_is_lost(how: str, size: tuple[int, int]) -> None:
    for x, y in ((0, 0), (511, 511), (100, 300), (299, 7)):
        mask = Image.new("L", (512, 512))
        mask.putpixel((x, y), 255)
        small = np.asarray(resize_image(mask, size, how))
        assert set(np.unique(small)) == {0, 255}
        rows, columns = small.nonzero()
        assert abs(rows.mean() / size[1] - y / 512) < 0.03
        assert abs(columns.mean() / size[0] - x / 512) < 0.03
        latent = mask_latent(pad(feathered_weights(Image.fromarray(small)), 8), 8)
        assert latent.shape == (1, 1, -(-size[1] // 8), -(-size[0] // 8))
        assert 1 <= latent.sum() <= 4


def test_feathering_goes_outwards_alone() -> None:
    mask = Image.new("L", (64, 64))
    mask.paste(255, (24, 24, 40, 40))
    hard, soft = feathered_weights(mask), feathered_weights(mask, feather=6.0)
    assert torch.equal(soft[hard == 1], hard[hard == 1])
    assert 0 < soft[0, 32, 42] < 1
    assert soft[0, 32, 42] > soft[0, 32, 44]
    assert soft[0, 32, 60] == 0
    assert torch.equal(mask_latent(hard, 8), mask_latent(soft, 8))


def test_extending() -> None:
    image, mask = extend(two_halves(), {"left": 2, "bottom": 1})
    assert image.size == mask.size == (8, 5)
    assert image.getpixel((0, 0)) == image.getpixel((1, 4)) == RED
    assert np.array_equal(np.asarray(image)[:4, 2:], np.asarray(two_halves()))
    assert np.asarray(mask)[:4, 2:].max() == 0
    assert np.asarray(mask)[:, :2].min() == np.asarray(mask)[4].min() == 255
    for bad in ({}, {"up": 3}, {"left": -1}, {"left": 0}):
        with pytest.raises(ValueError, match="expected pixels above 0 for some of left, top, right, bottom"):
            extend(two_halves(), bad)


def test_list_images_skips_hidden_files_and_folders(tmp_path: Path) -> None:
    """Not a half-written image, nor macOS metadata, nor a folder with an image suffix."""
    for name in ("b.PNG", "a.jpg", ".half.png", "._a.jpg", "a.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    assert [path.name for path in list_images(tmp_path)] == ["a.jpg", "b.PNG"]


@pytest.mark.parametrize("error", [EOFError("x"), NotImplementedError("x"), MemoryError(), OverflowError("x")])
def test_whatever_a_damaged_file_raises_is_one_line(tmp_path: Path, error: Exception) -> None:
    def convert(image: Image.Image) -> Image.Image:
        raise error

    Image.new("RGB", (1, 1)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png: is not an image that can be read \((x|MemoryError)\)"):
        read_image(tmp_path / "a.png", convert)


@pytest.mark.parametrize(
    "value",
    [
        np.full((8, 8, 3), 128.0),
        np.full((8, 8, 3), -0.9),
        np.full((8, 8, 3), np.nan),
        np.full((8, 8, 3), -3),
        np.full((8, 8, 3), 256),
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((8, 8, 2), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
        np.zeros((8, 8), object),
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        torch.full((3, 8, 8), 128.0),
        torch.full((3, 8, 8), torch.nan),
        Image.new("RGB", (0, 8)),
    ],
)
def test_arrays_and_tensors_that_are_no_images_are_refused(sd: Pipeline, value: object) -> None:
    with pytest.raises(ValueError, match=r"as an image, expected|got an image of 0 x 8 pixels"):
        sd.encode(value)


def test_arrays_of_other_types_are_scaled(sd: Pipeline) -> None:
    values = np.array([[0, 255], [128, 64]], np.uint8)
    for same in (values, values.astype(np.uint16) * 257, values[:, :, None], values.astype(np.int64), values / 255):
        assert np.array_equal(pixels_of(sd, same)[:2, :2], np.stack([values] * 3, axis=2))
    assert np.array_equal(pixels_of(sd, values > 100)[:2, :2, 0], 255 * (values > 100))

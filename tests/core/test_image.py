"""Images and masks, from files and back."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from random_sd1 import normal

from ldm_lite.core.image import mask_latent, mask_weights, open_image, open_mask, pad, resize, to_pil, to_pixels


def noise_image(width: int = 13, height: int = 8) -> Image.Image:
    values = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_pixels_and_images_are_inverse_bit_for_bit() -> None:
    image = noise_image()
    pixels = to_pixels(image)
    assert pixels.shape == (3, 8, 13)
    assert (float(pixels.min()), float(pixels.max())) == (-1, 1)
    assert to_pil(pixels).tobytes() == image.tobytes()
    assert to_pil(3 * normal(0, 3, 4, 4)).getextrema() == ((0, 255),) * 3


def test_images_are_upright_rgb_on_white(tmp_path: Path) -> None:
    image = noise_image()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    assert open_image(tmp_path / "turned.png").size == (8, 13)
    clear = image.convert("RGBA")
    clear.putalpha(Image.new("L", image.size, 0))
    assert open_image(clear).getextrema() == ((255, 255),) * 3
    assert open_image(image.convert("P")).mode == "RGB"
    assert open_image(np.asarray(image)).tobytes() == image.tobytes()


def test_masks_are_black_and_white() -> None:
    mask = Image.fromarray(np.array([[0, 127, 128, 255]], dtype=np.uint8))
    assert np.asarray(open_mask(mask)).tolist() == [[0, 0, 255, 255]]
    transparent = Image.new("RGBA", (2, 2), (255, 255, 255, 0))
    assert open_mask(transparent).getextrema() == (0, 0)
    assert mask_weights(open_mask(mask)).tolist() == [[[0, 0, 1, 1]]]


def test_resizing_fills_and_crops_and_loses_no_marked_pixel() -> None:
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (0, 0, 10, 20))
    image.paste("blue", (30, 0, 40, 20))
    assert resize(image, (10, 10)).getpixel((5, 5)) == (255, 0, 0)  # the blue sides are cut off, but for a blurred edge
    mask = Image.new("L", (64, 64))
    mask.putpixel((37, 11), 255)
    small = np.asarray(resize(mask, (8, 8)))
    assert np.argwhere(small).tolist() == [[1, 4]]
    assert small.max() == 255
    assert np.asarray(resize(mask, (2, 2))).tolist() == [[0, 255], [0, 0]]  # a thousandth of the area
    weights = mask_weights(mask)
    assert mask_latent(weights, 8).nonzero().tolist() == [[0, 0, 1, 4]]


def test_padding_repeats_the_edge() -> None:
    pixels = normal(0, 3, 5, 9)
    padded = pad(pixels, 8)
    assert padded.shape == (3, 8, 16)
    assert torch.equal(padded[:, :5, :9], pixels)
    assert torch.equal(padded[:, :, 9:], padded[:, :, 8:9].expand(-1, -1, 7))


def test_what_is_no_image_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("hello")
    noise_image().save(tmp_path / "vector.eps")
    whole = tmp_path / "whole.png"
    noise_image().save(whole)
    (tmp_path / "part.png").write_bytes(whole.read_bytes()[:40])
    for name in ("text.png", "vector.eps"):
        with pytest.raises(ValueError, match=f"{name}: is not an image that can be read, expected PNG, JPEG") as raised:
            open_image(tmp_path / name)
        assert "\n" not in str(raised.value)
    with pytest.raises((ValueError, OSError)):
        open_image(tmp_path / "part.png")
    with pytest.raises(OSError, match=r"none\.png"):
        open_image(tmp_path / "none.png")
    for source in (None, 3, b"bytes"):
        with pytest.raises(ValueError, match="as an image, expected a path, PIL, an array or a tensor"):
            open_image(source)


def test_giants_are_refused_before_they_are_read(tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "giant.png")
    with pytest.raises(ValueError, match="9000"):
        open_image(tmp_path / "giant.png")


def test_16_bits_of_grey_are_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).round().astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "depth.png")
    image, mask = open_image(tmp_path / "depth.png"), open_mask(tmp_path / "depth.png")
    assert np.abs(np.asarray(image)[..., 0] - ramp / 257).max() <= 1
    assert 0.49 < np.asarray(mask).mean() / 255 < 0.51
    for mode in ("I", "F"):
        with pytest.raises(ValueError, match="as an image, expected a path, PIL, an array or a tensor"):
            open_image(Image.new(mode, (4, 4)))


def test_tensors_and_arrays_that_are_no_pixels() -> None:
    pixels = torch.zeros(3, 4, 4)
    assert open_image(pixels).size == (4, 4)
    for wrong in (pixels.to(torch.uint8), pixels + 2, pixels / 0, pixels[0], pixels.permute(1, 2, 0)[:, :, None]):
        with pytest.raises(ValueError, match=r"got Tensor as an image, expected .*\(3,H,W\) in \[-1,1\]"):
            open_image(wrong)
    for array in (np.zeros((4, 4, 3)), np.zeros((4, 4, 7), np.uint8), np.zeros((4, 4), np.int64)):
        with pytest.raises(ValueError, match="got ndarray as an image, expected"):
            open_image(array)

"""Inpainting only the area around a mask, at its own size, and what is under the mask at the start.

As AUTOMATIC1111's web UI does it ("Only masked", "Masked content"): its masking.py, and resize_image of its images.py.
"""

from typing import NamedTuple

from PIL import Image, ImageFilter, ImageOps

BLURS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2), (0, 1))  # radius in pixels, and how many layers of it


class Area(NamedTuple):
    """A rectangle of an image in pixels; right and bottom are not in it."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return self.right - self.left, self.bottom - self.top


def area_of(mask: Image.Image, padding: int, size: tuple[int, int]) -> Area:
    """Return the area around what is not black in a mask, widened to the proportions of `size` (width, height).

    It has `padding` more pixels on each side, and stays in the image, so that its proportions may differ.
    """
    box = mask.getbbox()
    assert box is not None
    area = Area(
        max(box[0] - padding, 0),
        max(box[1] - padding, 0),
        min(box[2] + padding, mask.width),
        min(box[3] + padding, mask.height),
    )
    width, height = area.size
    ratio = size[0] / size[1]
    if width / height > ratio:
        top, bottom = _widened(area.top, area.bottom, int(width / ratio - height), mask.height)
        return area._replace(top=top, bottom=bottom)
    left, right = _widened(area.left, area.right, int(height * ratio - width), mask.width)
    return area._replace(left=left, right=right)


def _widened(first: int, last: int, more: int, most: int) -> tuple[int, int]:
    """A span widened by `more` pixels, on both sides where there is room between 0 and `most`."""
    first, last = first - more // 2, last + more - more // 2
    if last >= most:
        first, last = first - (last - most), most
    if first < 0:
        first, last = 0, last - first
    return first, min(last, most)


def fitted(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image or mask into `size` (width, height), in the middle; its edges are stretched over what is left."""
    width, height = size
    small = _resized(image, size, cover=False)
    left, top = width // 2 - small.width // 2, height // 2 - small.height // 2
    result = Image.new(image.mode, size)
    result.paste(small, (left, top))
    if top > 0:
        edges = ((0, (0, 0, width, 0)), (top + small.height, (0, small.height, width, small.height)))
        for at, edge in edges:
            result.paste(small.resize((width, top), box=edge), (0, at))
    if left > 0:
        for at, edge in ((0, (0, 0, 0, height)), (left + small.width, (small.width, 0, small.width, height))):
            result.paste(small.resize((left, height), box=edge), (at, 0))
    return result


def covering(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image so that it covers `size` (width, height), and crop both sides equally."""
    large = _resized(image, size, cover=True)
    result = Image.new(image.mode, size)
    result.paste(large, (size[0] // 2 - large.width // 2, size[1] // 2 - large.height // 2))
    return result


def _resized(image: Image.Image, size: tuple[int, int], cover: bool) -> Image.Image:
    (width, height), ratio = size, image.width / image.height
    wide = width / height > ratio if cover else width / height < ratio
    narrow = not wide
    scaled = (
        width if wide else image.width * height // image.height,
        height if narrow else image.height * width // image.width,
    )
    return image.resize((max(1, scaled[0]), max(1, scaled[1])), Image.Resampling.LANCZOS)


def fill(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Return an image whose masked part has the colours around it, blurred more the farther they are away."""
    kept = Image.new("RGBa", image.size)
    kept.paste(image.convert("RGBA").convert("RGBa"), mask=ImageOps.invert(mask))
    result = Image.new("RGBA", image.size)
    for radius, layers in BLURS:
        blurred = kept.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(layers):
            result.alpha_composite(blurred)
    return result.convert("RGB")

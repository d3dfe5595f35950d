"""How strongly a LoRA acts: on the text encoders, on the UNet, and block by block.

The syntax is A1111's, and that of its extension LoRA Block Weight: FILE:TE:UNET:te=..:unet=..:lbw=.., each part but the
first may be missing.  lbw is a preset, or a number for each block.  BASE is the text encoders, IN, M and OUT the UNet's
blocks, by their numbers in the original layout.  Modules of the UNet outside its blocks keep the UNet's weight.

Source: hako-mikan/sd-webui-lora-block-weight; AUTOMATIC1111/stable-diffusion-webui, extra_networks_lora.py.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ldm_lite.models.unet import AttentionBlock, LDMUNet, SpatialTransformer

log = logging.getLogger("ldm_lite")

SYNTAX = "FILE[:WEIGHT][:UNET][:te=WEIGHT][:unet=WEIGHT][:lbw=PRESET or NUMBERS]"
NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
NAMED = re.compile(r"(te|unet|lbw|w|lbwe|x|dyn|start|stop|step)=(.*)", re.DOTALL)
# The blocks of presets: BASE and those of Stable Diffusion 1 that have attention.
LISTED = (
    *("BASE", "IN01", "IN02", "IN04", "IN05", "IN07", "IN08", "M00"),
    *("OUT03", "OUT04", "OUT05", "OUT06", "OUT07", "OUT08", "OUT09", "OUT10", "OUT11"),
)
PRESETS = {
    "NONE": "00000000000000000",
    "ALL": "11111111111111111",
    "INS": "11110000000000000",
    "IND": "10001110000000000",
    "INALL": "11111110000000000",
    "MIDD": "10001111111100000",
    "OUTD": "10000000111100000",
    "OUTS": "10000000000011111",
    "OUTALL": "10000000111111111",
}


@dataclass(frozen=True)
class Strength:
    """The weight of a LoRA by network and block."""

    text: float = 1.0
    unet: float = 1.0
    blocks: str | tuple[float, ...] | None = None  # a preset, or numbers for the UNet's blocks

    def __str__(self) -> str:
        """The weights as they are written after a file's name."""
        text = f"{self.text:g}" if self.text == self.unet else f"{self.text:g}:{self.unet:g}"
        blocks = self.blocks
        if isinstance(blocks, tuple):
            blocks = ",".join(f"{weight:g}" for weight in blocks)
        return text if blocks is None else f"{text}:lbw={blocks}"

    def by_block(self, networks: Mapping[str, nn.Module]) -> dict[str, float]:
        """Return the factor of each block by its name; nothing without `lbw`.

        Raises ValueError if there is no UNet with blocks, or not one number for each.
        """
        if self.blocks is None:
            return {}
        unet = networks.get("unet")
        if not isinstance(unet, LDMUNet):
            raise ValueError("weights of blocks (lbw) are for the UNets of Stable Diffusion 1, 2 and XL")
        every, attending = _blocks(unet)
        if isinstance(self.blocks, str):
            chosen = dict(zip(LISTED, map(float, PRESETS[self.blocks]), strict=True))
            if self.blocks != "NONE" and (without := [name for name in attending if name not in chosen]):
                log.warning("lbw=%s does not list %s: 0 there, as in the extension", self.blocks, ", ".join(without))
            return {name: chosen.get(name, 0.0) for name in every}
        names = {len(every): every, len(attending): attending}.get(len(self.blocks))
        if names is None:
            raise ValueError(
                f"got {len(self.blocks)} weights of blocks (lbw), expected {len(attending)} "
                f"({', '.join(attending)}) or {len(every)}, for all blocks"
            )
        return dict.fromkeys(every, 0.0) | dict(zip(names, self.blocks, strict=True))

    def of(self, role: str, module: str, blocks: Mapping[str, float]) -> float:
        """Return the weight for a module of a network, with by_block()'s factors."""
        if role != "unet":
            return self.text * blocks.get("BASE", 1.0)
        place = re.match(r"(input|middle|output)_blocks?(?:\.(\d+))?\.", module)
        if place is None:  # outside the blocks
            return self.unet
        block = "M00" if place[1] == "middle" else f"{place[1].removesuffix('put').upper()}{int(place[2]):02}"
        return self.unet * blocks.get(block, 1.0)


def _blocks(unet: LDMUNet) -> tuple[list[str], list[str]]:
    """Return BASE and the names of all blocks of a UNet, and of those that have attention."""
    blocks = [(f"IN{i:02}", block) for i, block in enumerate(unet.input_blocks)]
    blocks += [("M00", unet.middle_block)]
    blocks += [(f"OUT{i:02}", block) for i, block in enumerate(unet.output_blocks)]
    kinds = (SpatialTransformer, AttentionBlock)
    attending = [name for name, block in blocks if any(isinstance(module, kinds) for module in block.modules())]
    return ["BASE", *(name for name, _ in blocks)], ["BASE", *attending]


def parse(text: str) -> tuple[str, Strength]:
    """Split SYNTAX into the file and its strength; the colon of a drive letter belongs to the file.

    Raises ValueError for unknown syntax after the file.
    """
    file, parts = text, list[str]()
    while ":" in file:
        rest, _, last = file.rpartition(":")
        if not (rest and (re.fullmatch(NUMBER, last) or NAMED.fullmatch(last))):
            break
        file, parts = rest, [last, *parts]
    try:
        return file, strength_of(parts)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def strength_of(parts: Sequence[str]) -> Strength:
    """Read what follows the name of a LoRA, between colons.  Raises ValueError."""
    named: dict[str, str] = {}
    numbers: list[str] = []
    for part in map(str.strip, parts):
        if match := NAMED.fullmatch(part):
            named["lbw" if match[1] == "w" else match[1]] = match[2].strip()
        elif numbers and not re.fullmatch(NUMBER, part):
            named["lbw"] = part  # the extension's older syntax
        else:
            numbers.append(part)
    if unknown := sorted(named.keys() - {"te", "unet", "lbw"}):
        raise ValueError(f"{unknown[0]}= is not supported, expected {SYNTAX}")
    if len(numbers) > 2:
        raise ValueError(f"got the weights {', '.join(numbers)}, expected two at most: {SYNTAX}")
    text = _number(named.get("te", numbers[0] if numbers else "1"))
    unet = _number(named["unet"]) if "unet" in named else _number(numbers[1]) if len(numbers) == 2 else text
    blocks: str | tuple[float, ...] | None = named.get("lbw")
    if isinstance(blocks, str) and blocks not in PRESETS:
        if "," not in blocks:
            raise ValueError(
                f"got lbw={blocks:.60}, expected {', '.join(PRESETS)}, or a number for each block, with commas"
            )
        blocks = tuple(_number(number.strip()) for number in blocks.split(","))
    return Strength(text, unet, blocks)


def _number(text: str) -> float:
    if not re.fullmatch(NUMBER, text):
        raise ValueError(f"got the weight {text!r:.60}, expected a number")
    return float(text)

"""How well a text-to-emoji checkpoint does what its prompt says, measured on prompts that nobody chose.

    python scripts/evaluate_emoji.py [--ckpt FILE] [--count 1000] [--emoji N] [--colours N] [--styles flat,3d]
                                     [--kinds one,tinted,sized,gradient,two,counted] [--split held_out] [--curves]
                                     [--out DIR]

Background: the median colour of the image's border, of a gradient that of both ends, is nearest among all to the one
asked for.  Identity: a classifier of renders of the first N emoji, trained here and then frozen, names those asked for,
each at its place.  Style: it names the style too.  Composition: of two, both are right, and on the sides that the
prompt names.  Count: as many are there as asked for, and all are right.  Colour: of the same emoji drawn in every
colour, the one asked for is nearest.  Size: small and large emoji are.  All with Wilson's 95 % interval, for wordings
that the training captions have and for others.  The judge itself is judged first, on clean and on degraded renders of
the same prompts.  How images look is measured at their own size, against renders of the same prompts: see looks().
Prints a table and one line of JSON; --out gets evaluation.png, and looks.png, to be looked at.

    python scripts/evaluate_emoji.py --compare quality.json --count 48 [--compare-steps 5,10,20]

adds identity and background to the points of `python scripts/compare_samplers.py --compare`, which then draws them. A
run that was stopped goes on.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ldm_lite.cli import threads

os.environ.update(threads.settings())  # before torch is loaded

import compare_samplers as comparison
import numpy as np
import torch
from emoji_words import other_names
from PIL import Image, ImageDraw
from render_emoji import (
    COLOURED,
    COLOURS,
    FLAT,
    GRADIENTS,
    GRADIENTS_ACROSS,
    GROUNDS,
    GROUNDS_PLAIN,
    LAYOUTS,
    PLAIN,
    SEVERAL,
    SHARE_PLAIN,
    SIZES,
    SOLID,
    SPLITS,
    STYLED,
    Entry,
    Scene,
    Scenes,
    Thing,
    any_name,
    backgrounds,
    caption,
    contact_sheet,
    gradient_caption,
    ground_caption,
    in_split,
    pictures_folder,
    render,
    tints,
    vocabulary,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import ldm_lite
from ldm_lite import generate
from ldm_lite.cli import options
from ldm_lite.cli.task_options import Txt2imgOptions
from ldm_lite.cli.writing import write_whole
from ldm_lite.conditioning.prompts import encode_prompts
from ldm_lite.core.tasks import noise_of
from ldm_lite.diffusion.guidance import classifier_free
from ldm_lite.diffusion.names import named_plan
from ldm_lite.diffusion.samplers import SAMPLERS
from ldm_lite.image import to_pil
from ldm_lite.pipeline import Pipeline

# No training caption is worded like these.
NEW_WORDINGS = (
    "{ac} background with {an}",
    "{an} standing inside {ac} room",
    "a snapshot of {an}, its surroundings are {c}",
    "{c} scenery, {n} pictogram",
)
NEW_GROUNDS = (  # the same for several objects, {x}
    "{ac} background with {x}",
    "{x} standing inside {ac} room",
    "a snapshot of {x}, the surroundings are {c}",
    "{c} scenery, {x}",
)
NEW_GRADIENTS = ("{x}, its surroundings shift from {c} towards {c2}", "{c} melting down to {c2}, {x}")
NEW_GRADIENTS_ACROSS = ("{x}, {c} along the left border and {c2} along the right border",)
NEW_STYLES = {FLAT: ("{x}",), SOLID: ("{x} as a 3d model", "a rendered 3d {x}")}
SHARE_NEW = 0.25
KINDS = ("one", "tinted", "two", "counted", "sized", "gradient")
CALLED, CHARACTERS = "called", "characters"  # one emoji by another name, and as the character that it is
ALL_KINDS = (*KINDS, CALLED, CHARACTERS)
STYLES = (FLAT, SOLID)
FIRST_SEED = 2**40  # of the noise, far from any seed that people try
FIRST_SCENE = 2**50  # of the classifier's renders, far from those of training

# ---- prompts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """What is asked for, and in which words."""

    text: str
    template: str
    label: int  # index into the vocabulary
    colour: str
    seed: int
    kind: str = "one"
    scene: Scene | None = None  # of what is asked for; None: one emoji as it is
    style: str = FLAT

    @property
    def group(self) -> str:
        """Whether training captions are worded like it."""
        new = (*NEW_WORDINGS, *NEW_GROUNDS, *NEW_GRADIENTS, *NEW_GRADIENTS_ACROSS)
        return "new wording" if self.template in new else "trained wording"

    @property
    def layout(self) -> str:
        """Where the objects should be."""
        return "one" if self.scene is None else self.scene.layout

    @property
    def things(self) -> tuple[Thing, ...]:
        """The objects, in the order of their places."""
        return (Thing(self.label, "", ""),) if self.scene is None else self.scene.things


def draw_prompts(
    entries: Sequence[Entry], count: int, seed: int, allowed: Callable[[Entry], Sequence[str]], kind: str = "one"
) -> list[Prompt]:
    """Prompts of random emoji on random backgrounds, out of those that `allowed` gives for an emoji."""

    def name_of(entry: Entry) -> str:
        if kind == CALLED:
            names = other_names()[entry.names[0]]
            return names[int(rng.integers(len(names)))]
        return entry.character if kind == CHARACTERS else any_name(rng, entry)

    rng, prompts = np.random.default_rng([seed, 0xE40, *([] if kind == "one" else [ALL_KINDS.index(kind)])]), []
    for k in range(count):
        label = int(rng.integers(len(entries)))
        while not allowed(entries[label]):
            label = int(rng.integers(len(entries)))
        colours, choice = allowed(entries[label]), rng.random()
        templates: Sequence[str] = NEW_WORDINGS if choice < SHARE_NEW else COLOURED
        colour = colours[int(rng.integers(len(colours)))]
        if choice > 1 - SHARE_PLAIN * (1 - SHARE_NEW) and "white" in colours:
            templates, colour = PLAIN, "white"
        template = templates[int(rng.integers(len(templates)))]
        text = caption(template, name_of(entries[label]), colour)
        prompts.append(Prompt(text, template, label, colour, FIRST_SEED + seed * 2**24 + k, kind))
    return prompts


def draw_several(kind: str, scenes: Scenes, count: int, seed: int) -> list[Prompt]:
    """Prompts of emoji in other colours or sizes, on gradients, of two emoji, or of some of a kind."""
    rng, prompts = np.random.default_rng([seed, 0xE41, KINDS.index(kind)]), list[Prompt]()
    alone = kind in ("tinted", "sized", "gradient")
    while len(prompts) < count:
        scene = scenes.one(rng) if alone else scenes.several(rng, kind == "two")
        if alone and not {"tinted": scene.things[0].tint, "sized": scene.size, "gradient": scene.second}[kind]:
            continue
        template, text = scene.template, scene.caption
        if rng.random() < SHARE_NEW:
            if scene.second:
                templates: Sequence[str] = NEW_GRADIENTS_ACROSS if scene.across else NEW_GRADIENTS
            else:
                templates = NEW_GROUNDS
            template = templates[int(rng.integers(len(templates)))]
            if scene.second:
                text = gradient_caption(rng, template, scene.phrase, (scene.colour, scene.second))
            else:
                text = ground_caption(template, scene.phrase, scene.colour)
        number = FIRST_SEED + seed * 2**24 + (KINDS.index(kind) << 20) + len(prompts)
        prompts.append(Prompt(text, template, scene.things[0].label, scene.colour, number, kind, scene))
    return prompts


@dataclass(frozen=True)
class World:
    """What is asked for: the emoji, how many of COLOURS, and the styles, with what draws them."""

    entries: tuple[Entry, ...]
    font: str | None = None
    colours: int = len(COLOURS)
    styles: tuple[str, ...] = (FLAT,)
    pictures: str | None = None

    def scenes(self, resolution: int, jitter: float, **more: float | str) -> Scenes:
        """Scenes of it; more: shares and the split, as of Scenes."""
        about = {"colours": self.colours, "pictures": self.pictures}
        return Scenes(resolution, self.entries, 0.0, jitter, self.font, **about, **more)  # type: ignore[arg-type]

    def source(self, style: str) -> str | None:
        """What draws a style."""
        return self.pictures if style == SOLID else self.font


def styled(world: World, prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """The same prompts, each in one of the styles that have its colours; the font's is not named."""
    rng, asked = np.random.default_rng([seed, 0xE42]), []
    for prompt in prompts:
        tinted = [(world.entries[thing.label], thing.tint) for thing in prompt.things if thing.tint]
        known = [
            style_name
            for style_name in world.styles
            if all(tint in tints(e, world.source(style_name)) for e, tint in tinted)
        ]
        style = known[int(rng.integers(len(known)))] if known else FLAT
        wordings = NEW_STYLES[style] if prompt.group == "new wording" or style == FLAT else STYLED[style]
        text = wordings[int(rng.integers(len(wordings)))].format(x=prompt.text)
        scene = None if prompt.scene is None else dataclasses.replace(prompt.scene, style=style)
        asked.append(dataclasses.replace(prompt, text=text, style=style, scene=scene))
    return asked


def all_prompts(world: World, kinds: Sequence[str], count: int, seed: int, split: str = "all") -> list[Prompt]:
    """`count` prompts, about as many of each kind, in all styles."""
    prompts = list[Prompt]()

    def allowed(entry: Entry) -> list[str]:
        common = set.intersection(*(set(backgrounds(entry.character, world.source(style))) for style in world.styles))
        names = [name for name in list(COLOURS)[: world.colours] if name in common]
        return [name for name in names if in_split(split, entry.character, name)]

    for i, kind in enumerate(kinds):
        part = count // len(kinds) + (i < count % len(kinds))
        if kind in ("one", CALLED, CHARACTERS):
            prompts += draw_prompts(world.entries, part, seed, allowed, kind)
        else:
            shares = {
                "tinted": {"tinted": 1.0},
                "two": {"tinted": 0.25},
                "sized": {"sized": 1.0},
                "gradient": {"gradients": 1.0},
            }
            prompts += draw_several(kind, world.scenes(128, 0.0, split=split, **shares.get(kind, {})), part, seed)
    return prompts if world.styles == (FLAT,) else styled(world, prompts, seed)


# ---- statistics -----------------------------------------------------------------------------------------------------


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share right / count.  Wilson 1927."""
    if count == 0:
        return 0.0, 1.0
    p, n = right / count, count
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def share(hits: Sequence[bool]) -> dict[str, float | int | list[float]]:
    """Hits -> how many of how many, the share and its interval, for JSON."""
    low, high = wilson(sum(hits), len(hits))
    value = sum(hits) / len(hits) if hits else 0.0
    return {
        "right": sum(hits),
        "count": len(hits),
        "share": round(value, 4),
        "interval": [round(low, 4), round(high, 4)],
    }


@dataclass(frozen=True)
class Verdict:
    """One image: what was asked for and what is seen."""

    prompt: Prompt
    colour: str
    labels: tuple[int, ...]  # at the places of the prompt's layout
    layout: str = "one"  # whose places are taken
    tints: tuple[str, ...] = ("",)
    styles: tuple[str, ...] = (FLAT,)  # at the places
    size: str = ""
    second: str = ""  # the colour at a gradient's other end, where one is asked for

    @property
    def background(self) -> bool:
        """Whether the background is right, both colours of a gradient."""
        second = "" if self.prompt.scene is None else self.prompt.scene.second
        return (self.colour, self.second) == (self.prompt.colour, second)

    @property
    def styled(self) -> bool:
        """Whether all objects are in the style."""
        return all(style == self.prompt.style for style in self.styles)

    @property
    def sized(self) -> bool:
        """Whether the emoji is right, and of the size asked for."""
        return self.identity and self.prompt.scene is not None and self.size == self.prompt.scene.size

    @property
    def label(self) -> int:
        """The first of the labels."""
        return self.labels[0]

    @property
    def identity(self) -> bool:
        """Whether every emoji is right, and where it should be; without named sides, the two may be swapped."""
        asked = [thing.label for thing in self.prompt.things]
        free = self.prompt.scene is not None and not self.prompt.scene.sided
        return sorted(asked) == sorted(self.labels) if free else asked == list(self.labels)

    @property
    def placed(self) -> bool:
        """Whether as many objects are there as asked for, each right."""
        return self.identity and self.layout == self.prompt.layout

    @property
    def tinted(self) -> bool:
        """Whether the objects have their colours, if they are those asked for."""
        return self.identity and self.tints == tuple(thing.tint for thing in self.prompt.things)


def summary(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """The accuracies: of background and identity, of both; and of what only some prompts ask for."""
    accuracies: dict[str, object] = {
        "background": share([v.background for v in verdicts]),
        "identity": share([v.identity for v in verdicts]),
        "both": share([v.background and v.identity for v in verdicts]),
    }
    for name, kind in (("composition", "two"), ("count", "counted")):
        if asked := [v.placed for v in verdicts if v.prompt.kind == kind]:
            accuracies[name] = share(asked)
    if asked := [v.tinted for v in verdicts if any(thing.tint for thing in v.prompt.things)]:
        accuracies["colour"] = share(asked)
    if asked := [v.sized for v in verdicts if v.prompt.kind == "sized"]:
        accuracies["size"] = share(asked)
    if any(v.prompt.style != FLAT for v in verdicts):
        accuracies["style"] = share([v.styled for v in verdicts])
    return accuracies


def by_group(verdicts: Sequence[Verdict]) -> dict[str, dict[str, object]]:
    """The summary of each kind of wording, then of each template."""
    groups: dict[str, list[Verdict]] = {}
    groups["all"] = list(verdicts)
    for name in ("trained wording", "new wording"):
        groups[name] = [v for v in verdicts if v.prompt.group == name]
    for kind in ALL_KINDS:
        groups[kind] = [v for v in verdicts if v.prompt.kind == kind]
    for style in STYLES:
        groups[style] = [v for v in verdicts if v.prompt.style == style]
    templates = (*PLAIN, *COLOURED, *NEW_WORDINGS, *GROUNDS_PLAIN, *GROUNDS, *NEW_GROUNDS)
    for template in (*templates, *GRADIENTS, *GRADIENTS_ACROSS, *NEW_GRADIENTS, *NEW_GRADIENTS_ACROSS):
        groups[template] = [v for v in verdicts if v.prompt.template == template]
    return {name: summary(members) for name, members in groups.items() if members}


# ---- what is seen ---------------------------------------------------------------------------------------------------


def border_colour(images: Tensor) -> Tensor:
    """Images (B,3,H,W) -> (B,3), the median of the outermost 1/32 on each side."""
    b, _, h, w = images.shape
    m = max(1, h // 32)
    inside = torch.zeros(h, w, dtype=torch.bool)
    inside[m : h - m, m : w - m] = True
    return images[:, :, ~inside].median(-1).values.reshape(b, 3)


def ground_of(images: Tensor) -> Tensor:
    """Images (B,3,H,W) -> their backgrounds (B,3,H,W): the border's colour, or what the corners give if they differ."""
    _, _, h, w = images.shape
    m = max(2, h // 16)
    corners = [
        images[:, :, y, x].flatten(2).median(-1).values
        for y in (slice(0, m), slice(h - m, h))
        for x in (slice(0, m), slice(w - m, w))
    ]
    four = torch.stack(corners, -1).unflatten(-1, (2, 2))  # (B,3,2,2)
    spread = (four.amax((2, 3)) - four.amin((2, 3))).amax(1)[:, None, None, None]
    between = F.interpolate(four, size=(h, w), mode="bilinear", align_corners=True)
    return torch.where(spread > 0.15, between, border_colour(images)[:, :, None, None])


def end_colours(image: Tensor, across: bool) -> Tensor:
    """An image (3,H,W) -> (2,3), the median colours of its top and bottom edges, or of the left and right ones."""
    m = max(1, image.shape[-1] // 32)
    turned = image.transpose(1, 2) if across else image
    return torch.stack([part.flatten(1).median(-1).values for part in (turned[:, :m], turned[:, -m:])])


def size_of(image: Tensor) -> str:
    """An image (3,H,W) -> of which of SIZES its one object is."""
    differs = (image - ground_of(image[None])[0]).abs().amax(0) > 0.15
    longest = max(int(differs.any(axis).sum()) for axis in (0, 1)) / image.shape[-1]
    return min(SIZES, key=lambda name: abs(SIZES[name][0] - longest))


def nearest_colour(rgb: Tensor, colours: int = len(COLOURS)) -> list[str]:
    """Colours (B,3) in [0,1] -> the name of the nearest of the first `colours`, for each."""
    names, values = list(COLOURS), torch.tensor(list(COLOURS.values()))[:colours] / 255
    return [names[int(i)] for i in torch.cdist(rgb.float(), values).argmin(1)]


def places(image: Tensor, layout: str) -> list[Tensor]:
    """An image (3,H,W) -> the squares of a layout's places, (3,64,64) each: of one object the whole image."""
    if layout == "one":
        return [F.interpolate(image[None], size=(64, 64), mode="bilinear", antialias=True, align_corners=False)[0]]
    side = image.shape[-1]
    cuts = []
    for x, y in LAYOUTS[layout]:
        left, top = (round((at - 0.25) * side) for at in (x, y))
        cut = image[None, :, top : top + side // 2, left : left + side // 2]
        cuts.append(F.interpolate(cut, size=(64, 64), mode="bilinear", antialias=True, align_corners=False)[0])
    return cuts


def occupied(images: Tensor) -> Tensor:
    """Images (B,3,H,W) -> (B,256): where they differ from their background, on 16 x 16 squares."""
    differs = (images - ground_of(images)).abs().amax(1, keepdim=True)
    return F.adaptive_avg_pool2d(((differs - 0.12) * 5).clamp(0, 1), 16).flatten(1)


def nearest_tint(cut: Tensor, entry: Entry, alone: bool, colour: str, font: str | None, asked: str = "") -> str:
    """A place (3,64,64) of an image -> the colour in which an emoji resembles it most on a background.

    "" is the emoji as it is; that counts as the colour asked for if the emoji has it anyway, and so looks the same.
    """
    names, size = ["", *tints(entry, font)], SIZES[""][0] if alone else 2 * SEVERAL
    drawn = [np.asarray(render(entry.character, colour, 64, size=size, font=font, tint=name)) for name in names]
    x = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 255
    apart = F.avg_pool2d(x, 4) - F.avg_pool2d(cut[None], 4)
    nearest = int(apart.square().mean((1, 2, 3)).argmin())
    is_its_own = asked in names and torch.equal(x[nearest], x[names.index(asked)])
    return asked if is_its_own else names[nearest]


CROP = 32
VERSION = "3"  # of the classifier and its training: raise it with every change


def crops(images: Tensor, shake: float = 0.0) -> Tensor:
    """Images (B,3,H,W) in [0,1] -> (B,7,CROP,CROP): what differs from the background, cut out and enlarged.

    The channels: the crop, its difference from the background, and that difference's largest part.  shake moves the box
    at random by that share of its size.
    """
    if images.shape[-1] != 64:
        images = F.interpolate(images, size=(64, 64), mode="bilinear", antialias=True, align_corners=False)
    ground = ground_of(images)
    differs = (images - ground).abs().amax(1)  # (B,64,64)
    weight = (differs - 0.12).clamp(min=0, max=0.3)
    middle, half = [], []
    for axis in (1, 2):  # x, then y
        profile = weight.sum(axis).cumsum(1)  # (B,64)
        part = profile / profile[:, -1:].clamp(min=1e-6)
        first, last = ((part < bound).sum(1) for bound in (0.004, 0.996))
        middle.append((first + last + 1) / 64 - 1)
        half.append((last - first + 1) / 64)
    centre, scale = torch.stack(middle, 1), torch.stack(half, 1).amax(1, keepdim=True).clamp(min=0.1) * 1.08
    if shake:
        centre = centre + scale * shake * (torch.rand_like(centre) * 2 - 1)
        scale = scale * (1 + shake * (torch.rand_like(scale) * 2 - 1))
    steps = (torch.arange(CROP) + 0.5) / CROP * 2 - 1
    x = centre[:, :1, None] + scale[:, :, None] * steps[None, None, :].expand(1, CROP, CROP)
    y = centre[:, 1:, None] + scale[:, :, None] * steps[None, :, None].expand(1, CROP, CROP)
    grid = torch.stack([x, y], -1)  # (B,CROP,CROP,2)
    cut = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    apart = F.grid_sample(images - ground, grid, padding_mode="border", align_corners=False)
    return torch.cat([cut * 2 - 1, apart, apart.abs().amax(1, keepdim=True)], 1)


def worsen(images: Tensor, generator: torch.Generator) -> Tensor:
    """A mild blur (sigma 0.8 of 64 pixels) and noise (8 of 255), as an autoencoder's faults might be."""
    radius = torch.arange(-2, 3) / (0.8 * images.shape[-1] / 64)
    kernel = torch.exp(-0.5 * radius**2)
    kernel = (kernel / kernel.sum()).expand(3, 1, 1, 5)
    images = F.conv2d(F.pad(images, (2, 2, 0, 0), mode="replicate"), kernel, groups=3)
    images = F.conv2d(F.pad(images, (0, 0, 2, 2), mode="replicate"), kernel.transpose(2, 3), groups=3)
    return (images + torch.randn(images.shape, generator=generator) * 8 / 255).clamp(0, 1)


def network(classes: int) -> nn.Sequential:
    """A small convolutional classifier of crops."""

    def halve(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]

    return nn.Sequential(
        *(*halve(7, 32), *halve(32, 64), *halve(64, 96)),  # (B,96,4,4)
        *(nn.Flatten(), nn.Linear(96 * 16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, classes)),
    )


@dataclass(frozen=True, eq=False)
class Descriptor:
    """The frozen classifiers of emoji and of layouts, with the former's accuracy on renders that it has not seen.

    The classes of the first are the emoji in the first style, then in the second.
    """

    net: nn.Sequential
    clean: float
    worsened: float
    layout_net: nn.Module
    world: World

    @torch.no_grad()
    def classes(self, images: Tensor) -> Tensor:
        """Images (B,3,H,W) in [0,1] -> classes (B): labels + emoji x style."""
        return torch.cat([self.net(crops(part)).argmax(1) for part in images.split(256)])

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Images (B,3,H,W) in [0,1] -> what the last layer reads, (B,256) float64."""
        return torch.cat([self.net[:-1](crops(part)) for part in images.split(256)]).double()

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B,3,H,W) in [0,1] -> labels (B)."""
        return self.classes(images) % len(self.world.entries)

    def styles(self, images: Tensor) -> list[str]:
        """Images (B,3,H,W) in [0,1] -> the style of each."""
        return [self.world.styles[int(k)] for k in self.classes(images) // len(self.world.entries)]

    @torch.no_grad()
    def layouts(self, images: Tensor) -> list[str]:
        """Images (B,3,H,W) in [0,1] -> which places of them are taken: names of LAYOUTS."""
        return [list(LAYOUTS)[int(i)] for i in self.layout_net(occupied(images)).argmax(1)]

    def tint(self, cut: Tensor, thing: Thing, prompt: Prompt) -> str:
        """A place of an image -> the colour in which the emoji that should be there resembles it most."""
        entry, source = self.world.entries[thing.label], self.world.source(prompt.style)
        return nearest_tint(cut, entry, prompt.layout == "one", prompt.colour, source, thing.tint)

    @property
    def complaint(self) -> str | None:
        """What is wrong with it, if something is: then its verdicts are worth less."""
        if self.clean >= 0.995 and self.worsened >= 0.98:
            return None
        return (
            f"the classifier itself is right on {self.clean:.1%} of clean and {self.worsened:.1%} of blurred renders "
            "(expected 99.5 and 98): identity is understated"
        )


def renders(world: World, per_class: int, first: int) -> tuple[Tensor, Tensor]:
    """Jittered renders on all backgrounds -> images (N,3,64,64) uint8 and classes (N), as many of each."""
    images = []
    shares = {"tinted": 0.3} if world.styles == (FLAT,) else {"tinted": 0.3, "sized": 0.3, "gradients": 0.3}
    for k, style in enumerate(world.styles):
        for label, entry in enumerate(world.entries):
            only = dataclasses.replace(world, entries=(entry,))
            scene = only.scenes(64, 1.0, **shares, solid=float(style == SOLID))
            start = FIRST_SCENE + first + (k * len(world.entries) + label) * 2**20
            images += [np.asarray(scene(start + i)[0]) for i in range(per_class)]
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return stacked, torch.arange(len(world.entries) * len(world.styles)).repeat_interleave(per_class)


@torch.no_grad()
def _training_crops(images: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 renders -> crops (N,7,CROP,CROP) float16, every second one worsened."""
    parts = []
    for part in images.split(256):
        x = part.float() / 255
        x[::2] = worsen(x[::2], generator)
        parts.append(crops(x, shake=0.05).half())
    return torch.cat(parts)


def train_descriptor(world: World, say: Callable[[str], None]) -> Descriptor:
    """Train the classifier on renders, blurred and noisy in half of the batches: minutes on two cores."""
    generator, classes = torch.Generator().manual_seed(0), len(world.entries) * len(world.styles)
    torch.manual_seed(0)
    start = time.perf_counter()
    images, labels = renders(world, max(20, 4000 // classes), 0)
    x, net, batch = _training_crops(images, generator), network(classes), 256
    say(f"classifier: {len(x)} renders, {time.perf_counter() - start:.0f} s")
    total = max(200, len(x) * 8 // batch)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=total)
    order = torch.cat([torch.randperm(len(x), generator=generator) for _ in range(total * batch // len(x) + 1)])
    for step, rows in enumerate(order[: total * batch].split(batch), start=1):
        loss = F.cross_entropy(net(x[rows].float()), labels[rows], label_smoothing=0.05)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 100 == 0:
            say(f"classifier: step {step}/{total}, loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s")
    descriptor = Descriptor(net.eval(), 0.0, 0.0, train_layouts(world), world)
    images, labels = renders(world, max(4, 2000 // classes), 2**19)
    x = images.float() / 255
    clean, worsened = (float((descriptor.classes(y) == labels).float().mean()) for y in (x, worsen(x, generator)))
    say(f"classifier: {clean:.2%} clean, {worsened:.2%} worsened, of {len(x)}")
    return dataclasses.replace(descriptor, clean=clean, worsened=worsened)


def train_layouts(world: World, count: int = 3000) -> nn.Module:
    """Train the classifier of layouts on scenes of all kinds: seconds."""
    names, images, labels = list(LAYOUTS), [], []
    styles = len(world.styles) > 1
    scenes = world.scenes(64, 1.0, **({"sized": 0.3, "gradients": 0.3, "solid": 0.5} if styles else {}))
    for k in range(count if len(world.entries) > 1 else 8):
        rng = np.random.default_rng(FIRST_SCENE + k)
        scene = scenes.one(rng) if k % 4 == 0 or len(world.entries) == 1 else scenes.several(rng, k % 4 < 3)
        images.append(
            occupied(torch.from_numpy(np.asarray(scenes.draw(scene, rng)).copy()).permute(2, 0, 1)[None] / 255)
        )
        labels.append(names.index(scene.layout))
    x, y, net = torch.cat(images), torch.tensor(labels), layout_network()
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(150):
        loss = F.cross_entropy(net(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


def layout_network() -> nn.Module:
    """A small classifier of what occupied() gives."""
    return nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, len(LAYOUTS)))


def renders_of(prompts: Sequence[Prompt], world: World, seed: int = 0) -> Tensor:
    """Prompts -> true renders of them at 128 pixels, (B,3,128,128) in [0,1]: what a perfect model gives."""
    scenes, images = world.scenes(128, 0.2), []
    for prompt in prompts:
        scene = prompt.scene or Scene(prompt.things, "one", False, prompt.colour, "", "", "", prompt.style)
        drawn = scenes.draw(scene, np.random.default_rng(prompt.seed + seed))
        images.append(torch.from_numpy(np.asarray(drawn).copy()).permute(2, 0, 1) / 255)
    return torch.stack(images)


def judge_the_judge(prompts: Sequence[Prompt], x: Tensor, classify: Descriptor) -> dict[str, dict[str, object]]:
    """The accuracies of true renders of the prompts, clean and degraded."""
    bad = worsen(x, torch.Generator().manual_seed(1))
    return {"clean": summary(judge(x, prompts, classify)), "degraded": summary(judge(bad, prompts, classify))}


def descriptor(world: World, folder: Path, say: Callable[[str], None]) -> Descriptor:
    """The classifier of the emoji of a world: from its file in `folder`, or trained and put there."""
    emoji, styles = len(world.entries), ",".join(world.styles)
    path = folder / f"descriptor-{emoji}{'' if styles == FLAT else f'-{styles}'}.safetensors"
    key = {"characters": "".join(entry.character for entry in world.entries), "styles": styles, "version": VERSION}
    if path.exists():
        with safe_open(path, "pt") as file:
            about = file.metadata()
            if all(about.get(name) == value for name, value in key.items()):
                nets = nn.ModuleDict({"emoji": network(emoji * len(world.styles)), "layout": layout_network()}).eval()
                nets.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
                rates = float(about["clean"]), float(about["worsened"])
                return Descriptor(nets["emoji"], *rates, nets["layout"], world)  # type: ignore[arg-type]
    descriptor = train_descriptor(world, say)
    about = {**key, "clean": str(descriptor.clean), "worsened": str(descriptor.worsened)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(nn.ModuleDict({"emoji": descriptor.net, "layout": descriptor.layout_net}).state_dict(), path, about)
    return descriptor


# ---- images ---------------------------------------------------------------------------------------------------------


Classify = Callable[[Tensor], Tensor]  # (B,3,64,64) in [0,1] -> labels (B); a Descriptor tells layouts and tints too


@dataclass(frozen=True)
class Settings:
    """How images are made."""

    sampler: str
    steps: int
    scale: float
    batch: int


def draw_images(pipe: Pipeline, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Tensor]:
    """Prompts -> their images, (3,H,W) in [0,1] each, at the checkpoint's resolution."""
    plan = named_plan(settings.sampler, pipe.schedule, settings.steps)
    shape = pipe.latent_shape(pipe.family.resolution, pipe.family.resolution)
    for first in range(0, len(prompts), settings.batch):
        part = prompts[first : first + settings.batch]
        draw = noise_of([prompt.seed for prompt in part], shape)
        cond, uncond = (encode_prompts(pipe, texts) for texts in ([prompt.text for prompt in part], [""] * len(part)))
        branches = classifier_free(cond, uncond, settings.scale)
        latents = generate.denoise(pipe, draw(), branches, plan, draw=draw)
        for pixels in pipe.decode_pixels(latents):
            yield (pixels + 1) / 2


def judge(images: Tensor, prompts: Sequence[Prompt], classify: Classify) -> list[Verdict]:
    """Images (B,3,H,W) in [0,1] of as many prompts -> a verdict on each."""
    judge_of_all = classify if isinstance(classify, Descriptor) else None
    cuts = [places(image, prompt.layout) for image, prompt in zip(images, prompts, strict=True)]
    joined = torch.stack([cut for parts in cuts for cut in parts])
    labels = iter(classify(joined).tolist())
    styles = iter([FLAT] * len(joined) if judge_of_all is None else judge_of_all.styles(joined))
    layouts = ["one"] * len(images) if judge_of_all is None else judge_of_all.layouts(images)
    colours = len(COLOURS) if judge_of_all is None else judge_of_all.world.colours
    borders, verdicts = nearest_colour(border_colour(images), colours), []
    for image, prompt, parts, colour, layout in zip(images, prompts, cuts, borders, layouts, strict=True):
        verdict = Verdict(prompt, colour, tuple(next(labels) for _ in parts), layout)
        verdict = dataclasses.replace(verdict, styles=tuple(next(styles) for _ in parts))
        if judge_of_all is not None and any(thing.tint for thing in prompt.things):
            things = zip(parts, prompt.things, strict=True)
            tints_seen = tuple(judge_of_all.tint(cut, thing, prompt) for cut, thing in things)
            verdict = dataclasses.replace(verdict, tints=tints_seen)
        if prompt.kind == "sized":
            verdict = dataclasses.replace(verdict, size=size_of(image))
        if prompt.scene is not None and prompt.scene.second:
            first, second = nearest_colour(end_colours(image, prompt.scene.across), colours)
            verdict = dataclasses.replace(verdict, colour=first, second=second)
        verdicts.append(verdict)
    return verdicts


def evaluate(
    pipe: Pipeline, prompts: Sequence[Prompt], settings: Settings, classify: Classify
) -> tuple[list[Verdict], Tensor]:
    """Make the images of all prompts and judge them."""
    images = torch.stack(list(draw_images(pipe, prompts, settings)))
    return judge(images, prompts, classify), images


def marked_sheet(images: Tensor, verdicts: Sequence[Verdict], entries: Sequence[Entry]) -> Image.Image:
    """The images with their prompts, in order; what is wrong is framed in red and said."""
    cells = []
    for pixels, verdict in zip(images, verdicts, strict=True):
        picture, text = to_pil(pixels * 2 - 1), verdict.prompt.text
        right = verdict.background and verdict.identity and verdict.styled
        if not (right and verdict.layout == verdict.prompt.layout):
            ImageDraw.Draw(picture).rectangle((0, 0, picture.width - 1, picture.height - 1), outline=(255, 0, 0))
            seen = [] if verdict.identity else [entries[label].names[0] for label in verdict.labels]
            seen += [] if verdict.background else [f"on {verdict.colour} {verdict.second}".rstrip()]
            seen += [] if verdict.styled else [verdict.styles[0]]
            text += f" [{' '.join(seen)}]"
        cells.append((picture, text))
    return contact_sheet(cells)


# ---- how it looks ---------------------------------------------------------------------------------------------------

NOISED, LOOKED_AT = 0.35, 64  # of img2img, noise to t = 350; how many renders go through autoencoder and UNet


def sharpness(images: Tensor) -> tuple[Tensor, Tensor]:
    """Images (B,3,H,W) in [0,1] -> how sharp they are: the RMS of their luma's Laplacian, the mean of its steepest 2 %.

    Both (B,), and the same wherever things lie: so samples can be compared with renders.
    """
    luma = (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
    laplacian = F.conv2d(luma, kernel[None, None]).square().mean((1, 2, 3)).sqrt()
    corner = luma[..., :-1, :-1]
    slopes = ((luma[..., 1:, :-1] - corner).square() + (luma[..., :-1, 1:] - corner).square()).sqrt().flatten(1)
    return laplacian, slopes.topk(slopes.shape[1] // 50).values.mean(1)


def frames(images: Tensor) -> tuple[float, float]:
    """Images (B,3,H,W) in [0,1] on plain grounds -> the deviations of their outermost 1/32 from its median colour.

    RMS of all, and the mean of each image's largest, in levels of 255: grain, and marks in corners and along edges.
    """
    _, _, h, w = images.shape
    m = max(1, h // 32)
    inside = torch.zeros(h, w, dtype=torch.bool)
    inside[m : h - m, m : w - m] = True
    apart = 255 * (images[:, :, ~inside] - border_colour(images)[:, :, None])
    return float(apart.square().mean().sqrt()), float(apart.abs().amax((1, 2)).mean())


def frechet(a: Tensor, b: Tensor) -> float:
    """Features (N,D) float64 of two sets -> the distance of Gaussians with their moments.  Heusel et al. 2017."""
    root_a, root_b = ((x - x.mean(0)) / math.sqrt(len(x) - 1) for x in (a, b))
    common = torch.linalg.matrix_norm(root_a @ root_b.T, "nuc")  # the trace of the root of the covariances' product
    apart = (a.mean(0) - b.mean(0)).square().sum()
    return float(apart + root_a.square().sum() + root_b.square().sum() - 2 * common)


@torch.no_grad()
def looks(
    pipe: Pipeline, prompts: Sequence[Prompt], x: Tensor, images: Tensor, classify: Descriptor
) -> tuple[dict[str, float], Image.Image]:
    """Prompts, their renders and their images (B,3,H,W) in [0,1] -> how these look, and a sheet for eyes.

    laplacian, gradients: of the images, as shares of the renders'.  grain, marks: frames() of those on plain grounds,
    0 of renders.  psnr, psnr_350: of the first renders after the autoencoder, and after img2img from t = 350.  fid: of
    images and renders by features of the classifier; fid_renders: of the renders and others of the same prompts.  The
    sheet has renders, what the autoencoder and img2img make of them, and images.
    """
    ratios = [
        float(of_images.mean() / of_x.mean()) for of_images, of_x in zip(sharpness(images), sharpness(x), strict=True)
    ]
    plain = [i for i, prompt in enumerate(prompts) if prompt.scene is None or not prompt.scene.second]
    grain, marks = frames(images[plain])
    first, weight = x[:LOOKED_AT], next(pipe.vae.parameters())
    kept = []
    for part in first.split(16):
        mean, _ = pipe.vae.encode((2 * part - 1).to(weight.device, weight.dtype))
        kept.append((pipe.vae.decode(mean).float().cpu() + 1) / 2)
    again = [
        pipe.img2img(prompt.text, to_pil(2 * pixels - 1), strength=NOISED, seed=prompt.seed, output="tensor")[0]
        for prompt, pixels in zip(prompts, first, strict=False)
    ]
    through = [torch.cat(kept).clamp(0, 1), (torch.stack(again).float().cpu() + 1) / 2]
    psnr = [float(-10 * (y - first).square().mean((1, 2, 3)).log10().mean()) for y in through]
    features, others = classify.features(x), classify.features(renders_of(prompts, classify.world, 1))
    fid = [frechet(theirs, features) for theirs in (classify.features(images), others)]
    names = ("laplacian", "gradients", "grain", "marks", "psnr", "psnr_350", "fid", "fid_renders")
    cells = [
        (to_pil(2 * pixels - 1), text)
        for prompt, *shown in zip(prompts, first, *through, images, strict=False)
        for pixels, text in zip(shown, ("render", "autoencoder", "img2img", prompt.text), strict=True)
    ]
    values = zip(names, (*ratios, grain, marks, *psnr, *fid), strict=True)
    return {name: float(f"{value:.4g}") for name, value in values}, contact_sheet(cells, columns=8)


# ---- curves ---------------------------------------------------------------------------------------------------------

SCALES, STEPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0), (5, 10, 20, 50)


def curves(
    pipe: Pipeline,
    prompts: Sequence[Prompt],
    settings: Settings,
    classify: Classify,
    say: Callable[[str], None],
) -> list[dict[str, object]]:
    """Accuracy against guidance scale, then against steps for every sampler, all of the same prompts and noise."""
    runs = [dataclasses.replace(settings, scale=scale) for scale in SCALES]
    runs += [dataclasses.replace(settings, sampler=name, steps=steps) for name in SAMPLERS for steps in STEPS]
    points: list[dict[str, object]] = []
    for k, run in enumerate(runs):
        verdicts, _ = evaluate(pipe, prompts, run, classify)
        kind = "scale" if k < len(SCALES) else "steps"
        about = {"curve": kind, "sampler": run.sampler, "steps": run.steps, "scale": run.scale}
        points.append({**about, **summary(verdicts)})
        say(f"{k + 1}/{len(runs)}: {run.sampler}, {run.steps} steps, scale {run.scale}: {_line(summary(verdicts))}")
    return points


def compare(
    pipe: Pipeline,
    prompts: Sequence[Prompt],
    path: Path,
    steps: Sequence[int],
    classify: Classify,
    say: Callable[[str], None],
) -> None:
    """Add the accuracies to the points of a file of compare_samplers.py, all of the same prompts and noise.

    Raises ValueError for a file of another checkpoint.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: python scripts/compare_samplers.py --compare makes it")
    kept = comparison.read(path, {"model": pipe.name})
    count = len(prompts)
    asked = Txt2imgOptions(
        [prompt.text for prompt in prompts],
        negative_prompt="",
        scale=kept["scale"],
        spacing=kept["spacing"],
        seed=[prompt.seed for prompt in prompts],
        batch_size=count,
    )
    cases = {case.name: case for case in comparison.cases(pipe)}
    points = [point for point in kept["points"].values() if point["steps"] in steps and point["name"] in cases]
    judged = {"count": count, "prompts": zlib.crc32("\n".join(prompt.text for prompt in prompts).encode())}
    for point in sorted(points, key=lambda point: steps.index(point["steps"])):
        if judged.items() <= point.items():
            continue
        case = cases[point["name"]]
        latents = comparison.latents(comparison.job_of(pipe, asked, case, point["steps"])).float()
        images = torch.stack([(pixels + 1) / 2 for pixels in pipe.decode_pixels(latents)])
        verdicts = judge(images, prompts, classify)
        shares = {name: sum(getattr(verdict, name) for verdict in verdicts) / count for name in comparison.ACCURACIES}
        point |= {**shares, **judged}
        write_whole(path, json.dumps(kept, indent=1) + "\n")
        say(f"{case.name}, {point['steps']} steps: identity {shares['identity']:.0%}, {shares['background']:.0%}")


def plot(points: Sequence[dict[str, object]], path: Path) -> None:
    """Identity (solid) and background (dashed) over the scale, and identity over steps.  Needs matplotlib."""
    from matplotlib.figure import Figure

    def values(kind: str, sampler: str | None, key: str, accuracy: str) -> tuple[list[float], list[float]]:
        chosen = [p for p in points if p["curve"] == kind and sampler in (None, p["sampler"])]
        return [p[key] for p in chosen], [p[accuracy]["share"] for p in chosen]  # type: ignore[index, misc]

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*values("scale", None, "scale", "identity"), marker=".", label="identity")
    left.plot(*values("scale", None, "scale", "background"), marker=".", linestyle="--", label="background")
    for i, name in enumerate(SAMPLERS):
        style = ("-", "--")[i >= 10]
        right.semilogx(*values("steps", name, "steps", "identity"), marker=".", linestyle=style, label=name)
    left.set(xlabel="guidance scale", ylabel="accuracy", ylim=(0, 1.02))
    right.set(xlabel="steps", ylabel="identity", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path)


# ---- the command ----------------------------------------------------------------------------------------------------


def _line(numbers: dict[str, object]) -> str:
    cells = []
    for name, accuracy in numbers.items():
        assert isinstance(accuracy, dict)
        low, high = accuracy["interval"]
        cells.append(f"{name} {accuracy['share']:6.1%} [{low:.1%}, {high:.1%}]")
    return "  ".join(cells)


def table(groups: dict[str, dict[str, object]]) -> str:
    """One line for each group of prompts."""
    lines = []
    for name, numbers in groups.items():
        identity = numbers["identity"]
        assert isinstance(identity, dict)
        lines.append(f"{name:48} {identity['count']:5}  {_line(numbers)}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Train or read the classifier, draw the prompts, make the images, judge, print, save."""

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    entries = vocabulary(args.emoji)
    if args.count < 1 or args.batch < 1 or args.seed < 0:
        raise ValueError(f"got count {args.count}, batch {args.batch}, seed {args.seed}, expected 1, 1 and 0 or more")
    pipe = ldm_lite.load(args.ckpt, device=args.device)
    scale = pipe.family.scale if args.scale is None else args.scale
    steps = pipe.family.steps if args.steps is None else args.steps
    settings = Settings(args.sampler or pipe.family.sampler, steps, scale, args.batch)
    named_plan(settings.sampler, pipe.schedule, steps)  # a mistake is said before the classifier is trained
    kinds, styles = args.kinds.split(","), tuple(args.styles.split(","))
    for what, asked, known in (("kind", kinds, ALL_KINDS), ("style", styles, STYLES)):
        if unknown := [name for name in asked if name not in known]:
            raise ValueError(f"got the {what} {unknown[0]!r}, expected some of {', '.join(known)}")
    if not 2 <= args.colours <= len(COLOURS):
        raise ValueError(f"got {args.colours} colours, expected 2 to {len(COLOURS)}")
    pictures = pictures_folder(args.pictures) if SOLID in styles else None
    world = World(entries, args.font, args.colours, styles, pictures)
    classify = descriptor(world, args.out, say)
    prompts = all_prompts(world, kinds, args.count, args.seed, args.split)
    x = renders_of(prompts, world)
    rates = judge_the_judge(prompts, x, classify)
    for name, numbers in rates.items():
        say(f"the judge on {name} renders of the same prompts: {_line(numbers)}")
    if args.compare is not None:
        compare(pipe, prompts, args.compare, options.numbers("compare_steps", args.compare_steps), classify, say)
        return
    start = time.perf_counter()
    verdicts, images = evaluate(pipe, prompts, settings, classify)
    groups = by_group(verdicts)
    seconds = round(time.perf_counter() - start, 1)
    look, sheet = looks(pipe, prompts, x, images, classify)
    result: dict[str, object] = {
        "checkpoint": pipe.name,
        "resolution": pipe.family.resolution,
        "emoji": len(entries),
        "count": args.count,
        **{key: getattr(settings, key) for key in ("sampler", "steps", "scale")},
        "seed": args.seed,
        "seconds": seconds,
        "kinds": kinds,
        "styles": styles,
        "colours": args.colours,
        "split": args.split,
        "descriptor": {"clean": round(classify.clean, 4), "worsened": round(classify.worsened, 4)},
        "judge": rates,
        "looks": look,
        "groups": groups,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    marked_sheet(images[:200], verdicts[:200], entries).save(args.out / "evaluation.png")
    sheet.save(args.out / "looks.png")
    if args.curves:
        points = curves(pipe, prompts, settings, classify, say)
        result["curves"] = points
        try:
            plot(points, args.out / "curves.png")
        except ImportError:
            say("warning: no picture of the curves without matplotlib: pip install matplotlib")
    print(table(groups))
    print("  ".join(f"{name} {value:.2f}" for name, value in look.items()))
    if classify.complaint:
        print(f"warning: {classify.complaint}")
    print(json.dumps(result))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> its exit status."""
    parser = argparse.ArgumentParser(description="Measure what a text-to-emoji checkpoint does with its prompts.")
    parser.add_argument("--ckpt", metavar="FILE", help="checkpoint (default: the bundled model)")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="images (default: %(default)s)")
    parser.add_argument(
        "--emoji", type=int, default=440, metavar="N", help="how many of the vocabulary it knows (default: %(default)s)"
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), metavar="LIST", help=f"of {','.join(ALL_KINDS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--styles", default=",".join(STYLES), metavar="LIST", help=f"of {','.join(STYLES)} (default: %(default)s)"
    )
    parser.add_argument("--pictures", metavar="DIR", help="folder of the style 3d (default: EMOJI_PICTURES)")
    parser.add_argument("--colours", type=int, default=16, metavar="N", help="backgrounds asked for (default: 16)")
    parser.add_argument("--split", choices=SPLITS, default="all", help="of combinations (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="default: the checkpoint's")
    parser.add_argument("--sampler", metavar="NAME", help="default: the checkpoint's")
    parser.add_argument("--scale", type=float, metavar="S", help="guidance (default: the checkpoint's)")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="images at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and noise (default: %(default)s)")
    parser.add_argument("--curves", action="store_true", help="accuracy against scale and, per sampler, steps")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="add to the results of scripts/compare_samplers.py --compare"
    )
    parser.add_argument(
        "--compare-steps", default="5,10,20", metavar="N,N", help="at these steps (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation"), metavar="DIR", help="%(default)s")
    parser.add_argument("--device", metavar="NAME", help="default: the best there is")
    parser.add_argument("--font", metavar="FILE", help="another file of the emoji font")
    try:
        run(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

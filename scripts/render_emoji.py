"""Captioned emoji scenes, the data that the bundled model is trained on: drawn, not downloaded.

    python scripts/render_emoji.py OUT_DIR --count 100 --resolution 128 [--emoji N] [--two X] [--counts X] [--tinted X]
                                           [--sized X] [--gradients X] [--solid X --pictures DIR]

scenes() is what the trainer takes; a scene depends on its index alone.  One emoji, two side by side or one above the
other, two or three of a kind; some in another colour than their own, small or large, on two colours, or "3d".  The font
is Noto Color Emoji (SIL OFL 1.1, the Debian package fonts-noto-color-emoji); --font or EMOJI_FONT names its file where
it is not installed.  The second style is Microsoft's Fluent Emoji 3D (MIT), the files of the npm package
@lobehub/fluent-emoji-3d: `npm pack` fetches it once, and --pictures or EMOJI_PICTURES names its folder of .webp files.
Needs numpy and Pillow only; what a caption says is known without them.
"""

import argparse
import colorsys
import functools
import math
import os
import sys
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONT = os.environ.get("EMOJI_FONT", "NotoColorEmoji.ttf")  # a name: in any of the folders of fonts
FONT_SIZE, GLYPH = 109, (136, 128)  # the only size of its bitmaps, and their width and height
PICTURE = 144  # the side to which the second style's pictures are reduced
PICTURES = "EMOJI_PICTURES"  # the environment variable with the folder of the second style

COLOURS: dict[str, tuple[int, int, int]] = {  # any two are more than 100 apart
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "gray": (128, 128, 128),
    "red": (220, 30, 30),
    "orange": (255, 130, 0),
    "yellow": (255, 235, 40),
    "green": (30, 150, 50),
    "cyan": (60, 215, 225),
    "blue": (30, 70, 220),
    "purple": (130, 30, 170),
    "pink": (255, 150, 200),
    "brown": (120, 65, 20),
    "navy": (10, 30, 105),
    "teal": (0, 130, 144),
    "lime": (140, 235, 60),
    "lavender": (170, 150, 255),
}

# {n} is an emoji's name, {an} the same with its article, {c} a colour, {ac} that with its article; 2 is the right one.
PLAIN = ("{n}", "{an}", "{n} emoji")  # on white
COLOURED = (
    *("{an} on {ac} background", "{n} emoji, {c} background", "{n} on {c}", "{an}, {c} background"),
    *("{an} with {ac} background", "{c} background, {n}", "{ac} background and {an}"),
)
# Several objects: {an} is on the left or above, {an2} on the right or below.  Where no side is named, left comes first.
BESIDE = {
    "": ("{an} and {an2}", "{n} and {n2}", "{an} next to {an2}", "{an}, {an2}"),
    "left": ("{an} to the left of {an2}", "{an} left of {an2}", "{an} on the left and {an2} on the right"),
    "right": ("{an2} to the right of {an}", "{an2} right of {an}", "{an2} on the right and {an} on the left"),
}
STACKED = {
    "above": ("{an} above {an2}", "{an} on top of {an2}", "{an} at the top and {an2} at the bottom"),
    "below": ("{an2} below {an}", "{an2} under {an}", "{an2} at the bottom and {an} at the top"),
}
COUNTED = {2: ("two {p}", "2 {p}", "a pair of {p}"), 3: ("three {p}", "3 {p}")}
# Of one emoji, as shares of the image: its longer side, how much that varies, and how far it is off the centre.
SIZES = {"": (0.72, 0.12, 0.08), "small": (0.38, 0.05, 0.12), "large": (0.9, 0.03, 0.02)}
SIZE_WORDS = {"small": ("small", "small", "tiny", "little"), "large": ("large", "large", "big", "huge")}
# {c} and {c2} are the colours of a gradient, the first at the top, or on the left.
GRADIENTS = (
    *("{x} on {ac} to {c2} gradient", "{x}, {c} and {c2} gradient background", "{x} on a gradient from {c} to {c2}"),
    *("{x}, background from {c} to {c2}", "{c} to {c2} gradient with {x}"),
    "{x} on a background that is {c} at the top and {c2} at the bottom",
)
GRADIENTS_ACROSS = (
    *("{x} on {ac} to {c2} gradient from left to right", "{x}, background from {c} on the left to {c2} on the right"),
    *("{x}, horizontal gradient from {c} to {c2}", "{x} on a background that is {c} on the left and {c2} on the right"),
)
# The same in freer words.
GRADIENTS_FREE = (
    *(
        "{x}, {c} turning into {c2}",
        "{x} on {c} that becomes {c2}",
        "{x}, {c} above and {c2} below",
        "{c} to {c2}, {x}",
    ),
    *("{c} into {c2}, with {x}", "{c} at the upper side and {c2} at the lower side, {x}", "{c} fading into {c2}, {x}"),
    *("{x}, {c} fades to {c2}", "in front of {c} over {c2} {x}", "{x}, top {c}, bottom {c2}"),
)
GRADIENTS_ACROSS_FREE = (
    *("{x}, {c} left and {c2} right", "left {c}, right {c2}, {x}", "{x} on {c} that becomes {c2} towards the right"),
    *("{x}, {c} at the left edge and {c2} at the right edge", "{c} on its left side, {c2} on its right side, {x}"),
    *("from the left edge {c} to {c2}, {x}", "{x}, {c} turning into {c2} from left to right"),
)
# A caption {x} with its style: none is that of the font.
FLAT, SOLID = "flat", "3d"
STYLED = {
    FLAT: ("{x}, flat", "{x}, flat style", "{x} in 2d", "flat drawing of {x}", "{x}, flat design"),
    SOLID: (
        *("{x}, 3d", "{x}, 3d", "{x} in 3d", "{x}, 3d style", "3d render of {x}", "a 3d image of {x}"),
        *("3d {x}", "3d: {x}", "{x}, rendered in 3d"),
    ),
}
SHARE_FLAT = 0.15  # of the captions of the font's style that say so
# The grounds of such a phrase {x}.
GROUNDS_PLAIN = ("{x}", "{x} emoji")
GROUNDS = ("{x} on {ac} background", "{x}, {c} background", "{x} on {c}", "{x} with {ac} background")
GROUNDS += ("{c} background, {x}",)
GROUNDS_FREE = (
    *("{b}{x}{a} {on} {ac} {g}", "{b}{x}{a}, {c} {g}", "{ac} {g}, {b}{x}{a}", "{b}{x}{a} {on} the {c} {g}"),
    *("{b}{x}{a}, the {g} is {c}", "the {g} is {c}, {b}{x}{a}", "{c} {g} behind {b}{x}{a}", "{b}{x}{a} {on} {c}"),
    *("{b}{x}{a}, {g}: {c}", "in front {x}, behind {c}", "{c} everywhere behind {x}", "{x}, {c} all around"),
)
BEFORE_SEVERAL = (
    "",
    "",
    "a photo of ",
    "a drawing of ",
    "an image of ",
    "draw ",
    "show me ",
    "please make ",
    "this is ",
)
AFTER_SEVERAL = ("", "", "", " here", " please", " centered")
# Freer words around them, so that a model learns to read past words that say nothing: before, after, and the ground.
BEFORE = ("", "a photo of ", "a drawing of ", "an image of ", "a sticker of ", "a painting of ", "draw ", "cute ")
BEFORE += ("show me ", "one ", "please make ", "the ", "my favourite ", "simple ", "nice clean ", "this is ")
AFTER = ("", "", " emoji", " sticker", " symbol", " drawing", " sign", " logo", " here", " please", " centered", " art")
GROUND = (
    *("background", "background", "background", "ground", "field", "page", "paper", "screen", "surface", "canvas"),
    *("card", "sky", "wall", "wall", "backdrop", "sheet", "floor", "table", "carpet", "board", "curtain", "plate"),
    *(
        "cloth",
        "backing",
        "tile",
        "desk",
        "shelf",
        "rug",
        "mat",
        "poster",
        "banner",
        "panel",
        "lawn",
        "stage",
        "square",
    ),
    *("area", "space", "studio", "cover", "tone", "shade", "landscape", "horizon", "fog", "pattern", "blank", "base"),
)
ON = ("on", "on", "on", "in", "over", "upon", "atop", "against", "before", "in front of", "within", "at")
FREE = (
    *("{b}{n}{a} {on} {ac} {g}", "{b}{n}{a}, {c} {g}", "{ac} {g}, {b}{n}{a}", "{c} {g} and {b}{n}{a}"),
    *("{b}{an}{a} {on} the {c} {g}", "{b}{n}{a}, the {g} is {c}", "the {g} is {c}, {b}{n}{a}", "{c} {g} under {an}{a}"),
    *("{c} {g} behind {an}{a}", "{b}{an}{a} {on} {c}", "{b}{n}{a}, {g}: {c}", "{b}{n}{a} {on} something {c}"),
    *("{b}{n}{a}, and all behind it in {c}", "all {c}, and in the middle {an}", "in front {an}, behind it {ac} {g}"),
    *("a picture of {an}, everything else is {c}", "{c} everywhere behind {an}", "{an} icon, {c} all around"),
)
# They say nothing of the picture, and are in no name.
WORDS = """very really lovely shiny funny pretty beautiful great good best fine well made drawn cartoon vector pixel
colored whole entire just only also there where that which seen shown placed against inside around all
some any every other same another by as for so then now today always i want would like see have has was
are""".split()  # noqa: SIM905
SHARE_PLAIN = 0.2  # of scenes whose caption names no colour

# ---- the vocabulary -------------------------------------------------------------------------------------------------

# In a fixed order, so that the first N are always the same: 66, 200, then 440 that are common and look different; then
# animals, food, vehicles, places and things, faces, people and hands, signs.  Left out: flags, skin tones, keycaps,
# ideographs in squares, and whatever looks nearly as another does (the tests say how nearly): all clock faces but one.
ORDER = """
🍎🐱🚗❤🌻🍌🐶🏠⭐🍇🦊🚀🌵🐸🍓🐼⚽🌈🎁🐧🍕☀👻🐙🍄🚲🐻🌲🍉🐝👑🐷🎈🌹😀🦋🍊✈🐮🍩🐢🔥🦁🎸🍍🐰⛵🥕🦉🌙🍔🐞🌴😂🐟🎂
🍋🐵☂🦀🐯☕🌽🐘🍒🤖
😍😎😢😡😴😱🤔👽💩😈🤡🐨🐴🐺🦄🐗🐭🐹🐲🐬🐳🦈🐊🦒🐪🦓🦔🐌🦆🦅🦜🦚🦩🦢🐓🐔🦇🦑🐠🕷🐜🦖🦕🐍🌷🌸🍁🍀🌳🍐🍑🥝🥥🥑🍅🍆
🌶🥦🥔🍞🥐🧀🥚🍳🌭🌮🍟🍿🍣🍪🍫🍭🍦🧁🥞🍺🍷🌍🌋⛄❄⚡☁💧🌊🪐🌪🚌🚂🚁🚢🚜🚒🚑🏍🛸🚦⏰💡🔑🔔🔨✂📚✏📷📱💻📺🎧🎤🎺
🎻🥁🎲🎯🏀🏈🎾🏆💎💍👟🎩👓👕👗🔒⚓💣🎃🎄🧸🏰
🐐🐑🐒🐚🐛🐣🐥🐦🐩🐾🐿🦂🦃🦌🦍🦎🦏🦐🦘🦙🦛🦝🦞🦠🦣🦥🦨🦭🪴🪵🪷🌯🌰🌱🌼🍂🍏🍖🍗🍙🍜🍝🍡🍤🍨🍬🍯🍰🍵🍸🍹🍼🍾🥒🥓🥖
🥗🥛🥜🥟🥤🥧🥨🥩🥪🥭🥯🧄🧅🧇🧊🧋🫐🫑🫒🫖🍴🚓🚕🚙🚚🚨🚩🚪🛁🚽🛋🛏🛑🛒🛟🛡🛢🛴🛵🛶🛷🛹🌝🎡🎪🏝🏛🏮⛲🎀🎒🎓🎖🎙🎟🎠
🎨🎬🎮🎱🎳🎵🎷🎹🏐🏓🏹⌚⌛☎⚙⚔⛽✉✨❌❓❗👀👏👒👔👖👜👠👢👾💄💉💊💋💌💐💘💚💛💜💥💰💾💿📅📌📎📏📕📜📡📣📦📻🔋
🔌🔍🔪🔬🔭🔮🕯🕶🖤🖥🗑🗝🗡🗿🥇🥊🦴🦷🧠🧢🧣🧤🧦🧩🧭🧱🧲🧳🧶🧹🪁🪂🪑🪓🪙🪜🪣🧡😅😇😉😋😘😜😭😮😷🤑🤓🤠🤢🤯🥳🥵🥶🧐
🙈✊✌👂👃👄👎🤘💪🎅🧙🧚🧜☠♻✅
🏅🐏🐋🌞🏉🚃⛺💀👍💔💙🐀🐁🐂🐃🐄🐅🐆🐇🐈🐉🐎🐕🐖🐡🐤🐫🐽🦗🦟🦡🦤🦦🦧🦪🦫🦬🦮🪰🪱🪲🪳🪶🪸🪹🪺🌺🌾🌿🍃🍈🍘🍚🍛🍠🍢
🍥🍧🍮🍱🍲🍶🍻🍽🥘🥙🥠🥡🥢🥣🥫🥬🥮🧂🧃🧆🧈🧉🫓🫔🫕🫗🫘🫙🚄🚅🚆🚇🚈🚉🚊🚋🚍🚎🚏🚐🚔🚖🚘🚛🚝🚞🚟🚠🚡🚤🚥🚧🚬🚿🛍🛎
🛕🛖🛗🛝🛞🛠🛣🛤🛥🛩🛫🛬🛰🛳🛺🛻🛼🌀🌁🌂🌃🌄🌅🌆🌇🌉🌌🌎🌏🌐🌚🌛🌜🌟🌠🌡🌤🌥🌦🌧🌨🌩🌫🌬🎆🎇🎉🎊🎋🎌🎍🎎🎏🎐🎑🎗
🎚🎛🎞🎢🎣🎥🎫🎭🎰🎴🎶🎼🎽🎿🏁🏎🏏🏑🏒🏔🏕🏖🏗🏘🏙🏚🏜🏞🏟🏡🏢🏣🏤🏥🏦🏨🏩🏪🏫🏬🏭🏯🏳🏴🏵🏷🏸🏺⌨⏱⏲⏳☃☄☔☘
♥♦♨⚒⚖⚗⚛⚜⚠⚪⚫⚰⚱⚾⛅⛈⛎⛏⛑⛓⛔⛩⛪⛰⛱⛳⛴⛸✒🀄🃏👁👋👌👘👙👚👛👝👞👡👣👹👺👿💈💒💓💕💖💗💝💞💟💤💦
💨💫💬💭💯💲💳💴💵💶💷💸💺💼💽📀📁📂📃📄📆📇📈📉📊📋📍📐📑📒📓📔📖📗📘📙📛📝📞📟📠📢📤📥📧📨📩📪📫📬📭📮📯📰📲📸
📹📼📽📿🔇🔈🔉🔊🔎🔏🔐🔓🔖🔦🔧🔩🔫🔱🕊🕋🕌🕍🕒🕰🕳🕸🕹🖇🖊🖋🖌🖍🖨🖱🖲🖼🗂🗃🗄🗒🗓🗜🗞🗳🗺🗻🗼🗽🗾🤍🤎🤿🥀🥂🥃🥄
🥅🥈🥉🥋🥌🥍🥎🥏🥻🥼🥽🥾🥿🦯🦺🦼🦽🦾🦿🧥🧧🧨🧪🧫🧬🧮🧯🧰🧴🧵🧷🧺🧻🧼🧽🧾🧿🩰🩱🩲🩳🩴🩸🩹🩺🩻🩼🪀🪃🪄🪅🪆🪒🪔🪕🪖
🪗🪘🪚🪛🪝🪞🪟🪠🪡🪢🪤🪥🪦🪧🪨🪩🪪🪫🪬🫀🫁🫧😁😃😄😆😊😌😏😐😑😒😓😔😕😖😗😚😛😝😞😟😠😣😤😥😦😨😩😪😫😬😯😰😲😳
😵😶😸😹😺😻😼😽😾😿🙀🙁🙂🙃🙄🙉🙊🤐🤒🤕🤗🤣🤤🤥🤧🤨🤩🤪🤫🤬🤭🤮🥰🥱🥲🥴🥸🥹🥺🫠🫡🫢🫣🫤🫥🫦☝⛷⛹✋✍🏂🏃🏄🏇🏊
🏋🏌👅👊👐👤👥👦👧👨👩👪👫👬👭👮👯👰👱👲👳👴👵👶👷👸👼💁💂💃💅💆💇💏💑🕴🕵🕺🖐🖖🗣🙅🙆🙇🙋🙌🙍🙎🙏🚣🚴🚵🚶🛀🛌🤌
🤏🤙🤚🤛🤜🤝🤞🤟🤦🤰🤱🤲🤳🤴🤵🤶🤷🤸🤹🤺🤼🤽🤾🥷🦵🦶🦸🦹🦻🧌🧍🧎🧏🧑🧒🧓🧔🧕🧖🧗🧘🧛🧝🧞🧟🫂🫃🫄🫅🫰🫱🫲🫳🫴🫵🫶
©®‼⁉™ℹ↔↕↖↗↘↙↩↪⏏⏩⏪⏫⏬⏭⏮⏯⏸⏹⏺Ⓜ▶◀☑☢☣☦☪☮☯☸☹☺♀♂♈♉♊♋♌♍♎♏♐♑♒♓♟♠♣♾
♿⚕⚧✔✖✝✡✳✴❇❎❔❕❣➕➖➗➡➰➿⤴⤵⬅⬆⬇⬛⬜⭕〰〽㊗㊙🅰🅱🅾🅿🆎🆑🆒🆓🆔🆕🆖🆗🆘🆙🆚🌑🌒🌓🌔🌕🌖🌗🌘🎦
🏧👆👇👈👉💠💢💮💱💹📳📴📵📶🔀🔁🔂🔃🔄🔅🔆🔕🔗🔘🔙🔚🔛🔜🔝🔞🔟🔠🔡🔢🔣🔤🔰🔲🔳🔴🔵🔶🔷🔺🔻🔼🔽🕉🕎🗨🗯🚫🚭🚮🚯🚰
🚱🚳🚷🚸🚹🚻🚼🚾🛂🛃🛄🛅🛐🟠🟡🟢🟣🟤🟥🟦🟧🟨🟩🟪🟫🟰
"""  # noqa: RUF001

# What people call them, where Unicode calls them otherwise or has named them since Python 3.10 only: the usual name,
# then others.
NAMES = """
🍎 red apple, apple; 🐱 cat, cat face; 🚗 red car, car; ❤ red heart, heart; 🐶 dog, dog face; 🏠 house;
⭐ star, yellow star; 🦊 fox, fox face; 🐸 frog, frog face; 🐼 panda, panda face; ⚽ soccer ball, football;
🎁 gift, present; 🍕 slice of pizza, pizza; ☀ sun; 🚲 bicycle, bike; 🐻 bear, bear face; 🌲 evergreen tree, fir tree;
🐝 bee, honeybee; 🐷 pig, pig face; 😀 grinning face, happy face; 🍊 orange fruit, tangerine; ✈ airplane, plane;
🐮 cow, cow face; 🍩 donut, doughnut; 🔥 fire, flame; 🦁 lion, lion face; 🐰 rabbit, rabbit face;
🌙 crescent moon, moon; 🍔 hamburger, burger; 🐞 ladybug, ladybird; 😂 laughing face, face with tears of joy;
🐵 monkey, monkey face; 🐯 tiger, tiger face; ☕ cup of coffee, coffee; 🌽 ear of corn, corn; 🤖 robot, robot face;
😍 face with heart eyes; 😎 face with sunglasses; 😢 crying face, sad face; 😡 red angry face, pouting face;
😱 screaming face; 👽 alien; 💩 pile of poo, poop; 😈 devil face, smiling face with horns; 🤡 clown, clown face;
🐴 horse, horse face; 🐺 wolf, wolf face; 🦄 unicorn, unicorn face; 🐭 mouse, mouse face; 🐹 hamster, hamster face;
🐲 dragon, dragon face; 🐳 whale, spouting whale; 🦒 giraffe, giraffe face; 🐪 camel, dromedary;
🦓 zebra, zebra face; 🦖 tyrannosaurus, t-rex; 🦕 long-necked dinosaur, sauropod; 🍀 four leaf clover, clover;
🌳 tree, deciduous tree; 🥝 kiwi, kiwi fruit; 🍆 eggplant, aubergine; 🌶 chili pepper, hot pepper;
🧀 wedge of cheese, cheese; 🍳 fried egg, frying pan; 🍦 ice cream cone, soft ice cream;
🥞 pancakes, stack of pancakes; 🍺 beer mug, beer; 🌍 earth, globe; ⛄ snowman; ⚡ lightning bolt, lightning;
💧 drop of water, droplet; 🌊 wave, ocean wave; 🪐 planet with a ring, saturn; 🌪 tornado; 🚂 steam train, locomotive;
🚒 fire truck, fire engine; 🏍 motorcycle; 🛸 flying saucer, ufo; 🚦 traffic light; 💡 light bulb; ✂ scissors;
📚 books, stack of books; 📱 mobile phone, smartphone; 💻 laptop, computer; 📺 television, tv; 🎧 headphones;
🥁 drum; 🎲 die, dice; 🎯 bullseye, target; 🏀 basketball; 🎾 tennis ball; 💎 gem, diamond; 👟 sneaker, running shoe;
👓 glasses, eyeglasses; 👕 t-shirt, shirt; 🔒 lock, padlock; 🎃 pumpkin, jack-o-lantern; 🏰 castle; 👍 thumbs up;
🐁 standing mouse; 🐄 standing cow; 🐅 standing tiger; 🐇 standing rabbit; 🐈 standing cat; 🐉 flying dragon;
🐋 blue whale; 🐎 running horse; 🐒 sitting monkey; 🐕 standing dog; 🐖 standing pig; 🐚 seashell, spiral shell;
🐛 caterpillar, bug; 🐥 chick facing forward; 🐫 two-hump camel; 🦛 hippo, hippopotamus; 🪵 log of wood; 🪷 lotus;
🪸 coral; 🪹 empty nest; 🪺 nest with eggs; 🌾 sheaf of rice; 🍂 autumn leaves; 🍃 leaves in the wind;
🍗 chicken leg, drumstick; 🍚 bowl of rice; 🍜 bowl of noodles, ramen; 🍥 fish cake; 🍨 bowl of ice cream;
🍵 cup of tea, green tea; 🍸 cocktail glass, martini; 🍽 plate with fork and knife; 🍾 bottle of champagne;
🥖 baguette; 🥘 pan of paella; 🥛 glass of milk, milk; 🥣 bowl with a spoon; 🥤 cup with a straw; 🥩 steak;
🥫 can of food; 🧃 juice box; 🫗 pouring liquid; 🫘 beans; 🫙 jar; 🚅 bullet train; 🚘 oncoming car; 🚙 blue car;
🚛 semi truck; 🚠 mountain cable car; 🚧 road barrier; 🚨 police siren; 🚩 red flag; 🚬 cigarette; 🛑 stop sign;
🛒 shopping cart; 🛝 playground slide; 🛞 wheel; 🛟 life buoy; 🛣 highway; 🛫 plane taking off; 🛬 plane landing;
🌁 foggy bridge; 🌎 globe showing america; 🌏 globe showing asia; 🌚 new moon with a face;
🌛 first quarter moon with a face; 🌜 last quarter moon with a face; 🌝 full moon with a face; 🌞 sun with a face;
🌤 sun behind a small cloud; 🌥 sun behind a large cloud; 🌦 sun behind a rain cloud; 🌧 rain cloud; 🌨 snow cloud;
🌩 thundercloud; 🌬 wind face; 🎀 ribbon, bow; 🎇 sparkler; 🎒 backpack, school bag; 🎣 fishing pole;
🎭 theater masks; 🎮 game controller, video game; 🎱 billiard ball, eight ball; 🎶 musical notes; 🎹 piano keys;
🎽 running shirt; 🎿 skis; 🏁 checkered flag; 🏎 race car; 🏓 ping pong paddle; 🏖 beach; 🏘 houses; 🏚 derelict house;
🏡 house with a garden; 🏤 post office; 🏮 red lantern; 🏳 white flag; 🏴 black flag; 🏷 label tag;
🏸 badminton racket; ⌚ watch, wristwatch; ☃ snowman in the snow; ☎ telephone, phone; ☔ umbrella in the rain;
♥ heart suit; ♦ diamond suit; ⚪ white circle; ⚫ black circle; ⛅ sun behind a cloud; ⛈ thunderstorm; ⛏ pickaxe;
⛑ helmet with a white cross; ⛔ no entry sign; ⛱ beach umbrella, parasol; ⛳ golf flag; ⛽ gas pump, fuel pump;
✒ fountain pen nib; ❌ red cross mark, cross mark; ❓ red question mark, question mark;
❗ red exclamation mark, exclamation mark; 🀄 mahjong tile; 🃏 joker card; 👋 waving hand; 👌 ok hand;
👏 clapping hands; 👒 straw hat, woman's hat; 👔 necktie, tie; 👚 blouse; 👞 brown shoe; 👠 high heel; 👡 sandal;
👢 boot; 👾 space invader, alien monster; 👿 angry devil; 💋 kiss mark, lips; 💐 bouquet of flowers;
💒 wedding chapel; 💘 heart with an arrow; 💝 heart with a ribbon; 💥 explosion, collision; 💦 sweat droplets;
💨 puff of smoke; 💫 dizzy star; 💯 hundred points; 💲 dollar sign; 💴 yen banknote; 💵 dollar banknote;
💶 euro banknote; 💷 pound banknote; 💺 airplane seat; 💿 compact disc, cd; 📃 curled page; 📄 page; 📈 rising chart;
📉 falling chart; 📏 ruler; 📕 red book; 📢 loudspeaker; 📣 megaphone; 📦 package, cardboard box; 📧 e-mail;
📩 envelope with an arrow; 📲 mobile phone with an arrow; 📸 camera with a flash; 🔇 muted speaker;
🔉 speaker with one wave; 🔊 speaker with three waves; 🔍 magnifying glass; 🔎 magnifying glass tilted right;
🔏 lock with a pen; 🔐 lock with a key; 🔦 flashlight; 🔪 kitchen knife; 🔫 water pistol; 🔱 trident; 🕊 dove;
🕒 clock; 🕶 sunglasses; 🖊 ballpoint pen; 🖋 fountain pen; 🖌 paintbrush; 🖍 crayon; 🖱 computer mouse; 🖼 framed picture;
🗒 spiral notepad; 🗓 spiral calendar; 🗜 clamp; 🗡 dagger; 🗳 ballot box; 🗾 map of japan; 🗿 moai statue;
🥃 glass of whisky; 🥇 gold medal; 🥈 silver medal; 🥉 bronze medal; 🦯 white cane; 🧢 baseball cap; 🧧 red envelope;
🧩 puzzle piece; 🧬 dna; 🧱 bricks; 🧻 roll of toilet paper; 🩱 swimsuit; 🩴 flip-flop; 🩹 bandage, adhesive bandage;
🩻 x-ray; 🩼 crutch; 🪚 saw; 🪦 gravestone; 🪩 disco ball, mirror ball; 🪪 identification card; 🪫 low battery;
🪬 hamsa; 🫧 bubbles; 😁 beaming face; 😄 grinning face with smiling eyes; 😅 grinning face with sweat;
😆 squinting laughing face; 😇 angel face, smiling face with halo; 😊 blushing face; 😋 face licking its lips;
😘 face blowing a kiss; 😛 face with tongue out; 😜 winking face with tongue out; 😝 squinting face with tongue out;
😤 face with steam from its nose; 😥 sad relieved face; 😭 sobbing face, loudly crying face; 😮 surprised face;
😰 anxious face with sweat; 😶 face without a mouth; 😷 face with a medical mask; 😸 grinning cat; 😹 laughing cat;
😺 smiling cat; 😻 cat with heart eyes; 😼 smirking cat; 😽 kissing cat; 😾 grumpy cat; 😿 crying cat;
🙀 frightened cat; 🤐 face with a zipped mouth; 🤑 face with dollar eyes; 🤒 face with a thermometer;
🤕 face with a bandage; 🤠 cowboy face; 🤢 green sick face, nauseated face; 🤣 face rolling on the floor laughing;
🤨 face with a raised eyebrow; 🤩 face with star eyes; 🤪 zany face; 🤫 shushing face; 🤬 swearing face;
🤭 giggling face; 🤮 vomiting face; 🤯 exploding head; 🥰 face with three hearts; 🥲 smiling face with a tear;
🥳 partying face; 🥴 woozy face; 🥵 hot red face, overheated face; 🥶 freezing face, cold face;
🥹 face holding back tears; 🥺 pleading face; 🧐 face with a monocle; 🫠 melting face; 🫡 saluting face;
🫢 shocked face with hand over mouth; 🫣 peeking face; 🫤 face with a diagonal mouth; 🫥 dotted line face;
🫦 biting lip; ☝ finger pointing up; ⛹ person bouncing a ball; ✌ victory hand, peace sign; 🎅 santa claus;
🏃 runner, running person; 👊 fist; 👎 thumbs down; 👐 open hands; 👤 silhouette of a person;
👥 silhouettes of two people; 👯 dancers with bunny ears; 👰 bride; 👲 man with a chinese cap;
👳 person with a turban; 👴 old man, grandfather; 👵 old woman, grandmother; 💁 person tipping a hand; 💂 guard;
💃 dancing woman; 💆 person getting a massage; 💇 person getting a haircut; 💏 kissing couple;
💑 couple with a heart; 💪 flexed biceps, strong arm; 🕴 levitating man in a suit; 🕵 detective; 🕺 dancing man;
🖐 hand with fingers splayed; 🖖 vulcan salute; 🗣 speaking head; 🙅 person crossing arms;
🙆 person with arms over the head; 🙇 bowing person; 🙋 person raising a hand; 🙌 raised hands; 🙍 frowning person;
🙎 pouting person; 🙏 folded hands, praying hands; 🚣 person rowing a boat; 🚴 cyclist; 🚵 mountain biker;
🚶 walking person; 🛀 person taking a bath; 🛌 person in bed; 🤘 rock on hand; 🤚 back of a raised hand;
🤛 left fist; 🤜 right fist; 🤞 crossed fingers; 🤟 love you hand; 🤦 person facepalming; 🤱 breastfeeding woman;
🤲 palms together; 🤵 person in a tuxedo; 🤶 mrs claus; 🤷 shrugging person; 🤸 person doing a cartwheel;
🤹 juggling person; 🤽 person playing water polo; 🤾 person playing handball; 🧌 troll; 🧔 man with a beard;
🧕 woman with a headscarf; 🧖 person in a sauna; 🧗 climber; 🧘 meditating person; 🧙 wizard, mage;
🧜 mermaid, merperson; 🫃 pregnant man; 🫄 pregnant person; 🫅 person with a crown;
🫰 hand with crossed finger and thumb; 🫱 hand facing right; 🫲 hand facing left; 🫳 palm down; 🫴 palm up;
🫵 finger pointing at you; 🫶 heart hands; ⁉ exclamation and question mark; ™ trademark sign; ℹ information sign;
↔ left and right arrow; ↕ up and down arrow; ↖ up-left arrow; ↗ up-right arrow; ↘ down-right arrow;
↙ down-left arrow; ↩ arrow curving left; ↪ arrow curving right; ⏏ eject button; ⏩ fast forward button;
⏪ rewind button; ⏫ fast up button; ⏬ fast down button; ⏭ next track button; ⏮ last track button;
⏯ play or pause button; ⏸ pause button; ⏹ stop button; ⏺ record button; Ⓜ metro sign; ▶ play button;
◀ reverse button; ☑ check box with a check; ☹ frowning face; ☺ smiling face; ♟ chess pawn; ♠ spade; ♣ club;
♻ recycling symbol; ♾ infinity; ⚕ medical symbol; ⚧ transgender symbol; ✅ check mark button, green check mark;
✔ check mark; ✖ multiplication sign; ✴ eight pointed star; ❎ cross mark button; ❔ white question mark;
❕ white exclamation mark; ❣ heart exclamation mark; ➕ plus sign; ➖ minus sign; ➗ division sign; ➡ right arrow;
⤴ arrow curving up; ⤵ arrow curving down; ⬅ left arrow; ⬆ up arrow; ⬇ down arrow; ⬛ black square; ⬜ white square;
⭕ red ring; ㊗ japanese congratulations sign; ㊙ japanese secret sign; 🅰 red letter a; 🅱 red letter b;
🅾 red letter o; 🅿 parking sign; 🆎 red letters ab; 🆑 cl sign; 🆒 cool sign; 🆓 free sign; 🆔 id sign; 🆕 new sign;
🆖 ng sign; 🆗 ok sign; 🆘 sos sign; 🆙 up sign; 🆚 vs sign; 🌑 new moon; 🌒 waxing crescent moon;
🌓 first quarter moon; 🌔 waxing gibbous moon; 🌕 full moon; 🌖 waning gibbous moon; 🌗 last quarter moon;
🌘 waning crescent moon; 🎦 cinema sign; 🏧 atm sign; 👆 hand pointing up; 👇 hand pointing down;
👈 hand pointing left; 👉 hand pointing right; 💠 diamond with a dot; 💱 currency exchange sign;
💹 chart with yen sign; 📳 vibration mode sign; 📴 mobile phone off sign; 📵 no mobile phones sign; 📶 signal bars;
🔀 shuffle button; 🔁 repeat button; 🔂 repeat one button; 🔃 clockwise arrows; 🔄 anticlockwise arrows;
🔅 dim button; 🔆 bright button; 🔕 bell with a slash; 🔗 link; 🔙 back arrow; 🔚 end arrow; 🔛 on arrow;
🔜 soon arrow; 🔝 top arrow; 🔞 no one under eighteen sign; 🔠 uppercase letters; 🔡 lowercase letters;
🔢 numbers button; 🔣 symbols button; 🔤 latin letters; 🔰 beginner symbol; 🔴 red circle; 🔵 blue circle;
🔶 orange diamond; 🔷 blue diamond; 🔺 red triangle; 🔻 red triangle pointing down; 🔼 up button; 🔽 down button;
🕎 menorah; 🚫 prohibited sign; 🚭 no smoking sign; 🚮 litter bin sign; 🚯 no littering sign; 🚰 drinking water sign;
🚱 no drinking water sign; 🚳 no bicycles sign; 🚷 no pedestrians sign; 🚸 children crossing sign;
🚹 men's room sign; 🚻 restroom sign; 🚼 baby sign; 🚾 water closet sign; 🛂 passport control sign; 🛃 customs sign;
🛄 baggage claim sign; 🛅 left luggage sign; 🛐 place of worship sign; 🟠 orange circle; 🟡 yellow circle;
🟢 green circle; 🟣 purple circle; 🟤 brown circle; 🟥 red square; 🟦 blue square; 🟧 orange square;
🟨 yellow square; 🟩 green square; 🟪 purple square; 🟫 brown square; 🟰 equals sign
"""  # noqa: RUF001


@dataclass(frozen=True)
class Entry:
    """An emoji and what people call it, the usual name first."""

    character: str
    names: tuple[str, ...]


def _vocabulary() -> tuple[Entry, ...]:
    named = (entry_text.strip().split(" ", 1) for entry_text in NAMES.replace("\n", " ").split(";"))
    names = {character: tuple(name.strip() for name in text.split(",")) for character, text in named}
    characters = "".join(ORDER.split())
    return tuple(Entry(c, names.get(c) or (unicodedata.name(c).lower(),)) for c in characters)


VOCABULARY = _vocabulary()
NAMED = {name for entry in VOCABULARY for name in entry.names}


def vocabulary(emoji: int | None = None) -> tuple[Entry, ...]:
    """The first `emoji` entries, or all.  Raises ValueError if there are not so many."""
    if emoji is None:
        return VOCABULARY
    if not 1 <= emoji <= len(VOCABULARY):
        raise ValueError(f"got {emoji} emoji, expected 1 to {len(VOCABULARY)}")
    return VOCABULARY[:emoji]


# ---- captions -------------------------------------------------------------------------------------------------------

# Last words that take no article, though they do not end in a plural s, and whole names that take none.
UNCOUNTABLE = {
    *(
        "bacon",
        "beer",
        "bread",
        "broccoli",
        "butter",
        "cheese",
        "children",
        "coffee",
        "confetti",
        "corn",
        "dna",
        "fire",
    ),
    *(
        "fog",
        "garlic",
        "horse racing",
        "ice",
        "lightning",
        "luggage",
        "milk",
        "money",
        "nail polish",
        "popcorn",
        "rice",
    ),
    *("ramen", "spaghetti", "sushi", "tea"),
}
PROPER = {
    *("aries", "taurus", "gemini", "cancer", "leo", "virgo", "libra", "scorpius", "sagittarius", "capricorn"),
    *("aquarius", "pisces", "ophiuchus", "mount fuji", "mrs claus", "santa claus", "saturn", "tokyo tower"),
    *("infinity", "palms together", "people hugging", "red letters ab", "hundred points"),
}
FILLERS = ("with", "of", "in", "on", "without", "behind", "over", "from", "facing", "licking", "holding", "crossing")


def with_article(name: str) -> str:
    """A name with "a" or "an", or with none where it takes none: "an owl", "a unicorn", "scissors", "mount fuji"."""
    head = name
    for word in FILLERS:
        head = head.split(f" {word} ")[0]
    last = head.split()[-1]
    plural = last.endswith("s") and not last.endswith(("ss", "us", "is", "as"))
    if plural or " and " in head or {head, last} & UNCOUNTABLE or name in PROPER:
        return name
    vowel = name[0] in "aeiou" and not name.startswith(("uni", "ufo", "euro", "one"))
    return f"{'an' if vowel or name.startswith(('hour', 'x-ray', 'sos ', 'ng ')) else 'a'} {name}"


# Plurals that no rule gives; the last word of a name decides.
PLURALS = dict(
    forms.split()
    for forms in """
mouse mice,goose geese,man men,woman women,child children,person people,tooth teeth,foot feet,leaf leaves,
wolf wolves,knife knives,loaf loaves,scarf scarves,fish fish,blowfish blowfish,sheep sheep,deer deer,bison bison,
shrimp shrimp,squid squid,ox oxen,die dice,tomato tomatoes,potato potatoes,volcano volcanoes,mango mangoes,
mosquito mosquitoes,hippo hippos,dynamite dynamite,salmon salmon
""".split(",")  # noqa: SIM905
)
NOT_LAST = (
    "building",
    "king",
    "ring",
    "wing",
    "sling",
    "string",
    "painting",
    "dumpling",
    "earring",
    "peeking",
    "viking",
)


def plural(name: str) -> str | None:
    """The plural of a name, None for one that is not counted: "slices of pizza", "mice", "foxes"; not "scissors"."""
    words = name.split()
    cut = next((i for i, word in enumerate(words) if i and (word in FILLERS or word.startswith("that"))), len(words))
    head, rest = words[:cut], words[cut:]
    if with_article(name) == name or any(word.endswith(("ing", "ed")) and word not in NOT_LAST for word in head[1:]):
        return None
    last = head[-1]
    if last in ("up", "down") or name == "rock on hand":
        return None
    if last in PLURALS:
        ending = PLURALS[last]
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        ending = last[:-1] + "ies"
    else:
        ending = last + ("es" if last.endswith(("s", "x", "ch", "sh", "z")) else "s")
    return " ".join([*head[:-1], ending, *rest])


def caption(template: str, name: str, colour: str = "white", second: str = "") -> str:
    """A template with its words: "{an} on {ac} background" -> "a red apple on an orange background".

    second is the name of the object on the right or below.
    """
    words = {"n": name, "an": with_article(name), "c": colour, "ac": with_article(colour), "p": plural(name)}
    if second:
        words |= {"n2": second, "an2": with_article(second)}
    return template.format(**words)


def ground_caption(template: str, phrase: str, colour: str, rng: np.random.Generator | None = None) -> str:
    """A phrase of several objects with its ground; rng chooses the freer words."""

    def any_of(choices: Sequence[str]) -> str:
        return choices[0 if rng is None else int(rng.integers(len(choices)))]

    around = {"b": any_of(BEFORE_SEVERAL), "a": any_of(AFTER_SEVERAL), "g": any_of(GROUND), "on": any_of(ON)}
    return template.format(x=phrase, c=colour, ac=with_article(colour), **around)


def gradient_caption(
    rng: np.random.Generator, template: str, phrase: str, colours: tuple[str, str], free: bool = False
) -> str:
    """A phrase on a gradient between two colours, in freer words if asked for."""
    if free and rng.random() < 0.6:
        choices = GRADIENTS_ACROSS_FREE if template in GRADIENTS_ACROSS else GRADIENTS_FREE
        template = choices[int(rng.integers(len(choices)))]
    parts = template.split(" ")
    if free:
        before, after = (choices[int(rng.integers(len(choices)))] for choices in (BEFORE_SEVERAL, AFTER_SEVERAL))
        phrase = f"{before}{phrase}{after}"
        for _ in range(int(rng.integers(3))):
            parts.insert(int(rng.integers(len(parts) + 1)), WORDS[int(rng.integers(len(WORDS)))])
    return " ".join(parts).format(x=phrase, c=colours[0], ac=with_article(colours[0]), c2=colours[1])


def styled_caption(rng: np.random.Generator, text: str, style: str) -> str:
    """A caption with its style; that of the font is seldom named."""
    if style == FLAT and rng.random() >= SHARE_FLAT:
        return text
    return STYLED[style][int(rng.integers(len(STYLED[style])))].format(x=text)


def free_caption(rng: np.random.Generator, name: str, colour: str, plain: bool) -> str:
    """A caption in freer words; a plain one names no colour."""

    def any_of(choices: Sequence[str]) -> str:
        return choices[int(rng.integers(len(choices)))]

    around = {"b": any_of(BEFORE), "a": any_of(AFTER), "g": any_of(GROUND), "on": any_of(ON)}
    parts = ("{b}{n}{a}" if plain else any_of(FREE)).split(" ")
    for _ in range(int(rng.integers(4))):
        parts.insert(int(rng.integers(len(parts) + 1)), any_of(WORDS))
    return " ".join(parts).format(n=name, an=with_article(name), c=colour, ac=with_article(colour), **around)


# ---- drawing --------------------------------------------------------------------------------------------------------


@functools.cache
def _font(path: str) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype(path, FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read as the emoji font ({error}): install the Debian package fonts-noto-color-emoji, "
            "or name its file with --font or in EMOJI_FONT"
        ) from error


@functools.cache
def glyph(character: str, font: str | None = None) -> Image.Image:
    """One emoji as drawn by the font, RGBA, cropped to what is not transparent.  Raises ValueError if it has none.

    font is a font's file, or a folder of pictures whose names are code points: 1f34e.webp, 2764-fe0f.webp.
    """
    if font is not None and os.path.isdir(font):
        canvas = _picture(character, Path(font))
    else:
        canvas = Image.new("RGBA", GLYPH)
        ImageDraw.Draw(canvas).text((0, 0), character, font=_font(font or FONT), embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"{font or FONT}: has no glyph for U+{ord(character):X}: use a newer font")
    return canvas.crop(box)


def _picture(character: str, folder: Path) -> Image.Image:
    for name in (f"{ord(character):04x}.webp", f"{ord(character):04x}-fe0f.webp"):
        try:
            with Image.open(folder / name) as image:
                return image.convert("RGBA").resize((PICTURE, PICTURE), Image.Resampling.HAMMING)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(f"{folder / name}: cannot be read ({error}): unpack the pictures again") from error
    raise ValueError(f"{folder}: has no picture of U+{ord(character):X}: expected {ord(character):04x}.webp")


def pictures_folder(folder: str | None = None) -> str:
    """The folder of the second style's pictures, `folder` or that of the environment.  Raises ValueError without."""
    folder = folder or os.environ.get(PICTURES)
    if folder is None or not os.path.isdir(folder):
        raise ValueError(
            f"got {folder or 'no folder'} for the pictures of the 3d style: unpack what `npm pack "
            f"@lobehub/fluent-emoji-3d` fetches, and name its folder `assets` with --pictures or in {PICTURES}"
        )
    return folder


TINTS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")  # colours that objects can have
UNTINTED = set(
    """face hand hands person people man woman boy girl baby couple sign button arrow fist foot footprints palm palms
    thumbs finger fingers pointing biceps salute handshake ear nose mouth tongue leg lip adult child elf fairy genie
    vampire mermaid superhero prince princess climber swimmer wrestlers dancers worker selfie horse_racing lungs
    anatomical polish claus monkey speaking""".split()  # noqa: SIM905
)
COLOUR_WORDS = {"golden", "gold", "silver", "bronze", "rainbow", "blond", "blueberries"}  # besides COLOURS
BODY, NEAR, VIVID = 0.6, 0.09, 0.3  # least share of one hue in an emoji, its width in turns, least saturation


@functools.cache
def hue(character: str, font: str | None = None) -> tuple[float, float, float] | None:
    """Hue (turns), saturation and value of an emoji's main colour; None if less than BODY of it has one hue."""
    hsv = np.asarray(glyph(character, font).convert("RGB").convert("HSV"), np.float32) / 255
    alpha = np.asarray(glyph(character, font).getchannel("A"), np.float32) / 255
    weight = alpha * (hsv[..., 1] > VIVID) * (hsv[..., 2] > 0.25)
    bins = np.bincount((hsv[..., 0] * 48).astype(int).ravel() % 48, weight.ravel(), 48)
    near = sum(np.roll(bins, k) for k in range(-4, 5))
    centre = (int(near.argmax()) + 0.5) / 48
    body = weight * (np.abs((hsv[..., 0] - centre + 0.5) % 1 - 0.5) < NEAR)
    if body.sum() < BODY * alpha.sum():
        return None
    mean_hsv = (body[..., None] * hsv).sum((0, 1)) / body.sum()
    turn = (body * ((hsv[..., 0] - centre + 0.5) % 1 - 0.5)).sum() / body.sum()
    return (centre + float(turn)) % 1, float(mean_hsv[1]), float(mean_hsv[2])


@functools.cache
def tints(entry: Entry, font: str | None = None) -> dict[str, str]:
    """The colours that an emoji can be drawn in, each with its name then: "green" -> "green car".

    An emoji is tinted if most of it has one hue and one of its names tells no colour; people, hands and yellow faces
    are left as they are.  Without a colour that would make it another emoji of the vocabulary, such as "blue heart".
    """
    names = [name for name in entry.names if not set(name.split()) & {*COLOURS, *COLOUR_WORDS}]
    if not names or names[0] in PROPER or set(names[0].split()) & UNTINTED or hue(entry.character, font) is None:
        return {}
    coloured = {colour: f"{colour} {names[0]}" for colour in TINTS}
    return {colour: name for colour, name in coloured.items() if name not in NAMED}


@functools.lru_cache(maxsize=4096)
def tinted(character: str, colour: str, font: str | None = None) -> Image.Image:
    """An emoji with what has its main hue in a colour of TINTS; as it is if that is its own.  RGBA."""
    image, main_hue = glyph(character, font), hue(character, font)
    assert main_hue is not None
    h, s, v = _hsv(COLOURS[colour])
    rgb = [round(255 * value) for value in colorsys.hsv_to_rgb(*main_hue)]
    apart = {name: math.dist(rgb, COLOURS[name]) for name in TINTS}
    if min(apart.values()) == apart[colour] < 90:
        return image
    hsv = np.asarray(image.convert("RGB").convert("HSV"), np.float32) / 255
    away = (hsv[..., 0] - main_hue[0] + 0.5) % 1 - 0.5
    body = np.clip((NEAR + 0.05 - np.abs(away)) / 0.05, 0, 1) * np.clip((hsv[..., 1] - 0.12) / 0.15, 0, 1)
    new = np.stack([
        (h + 0.3 * away) % 1,
        np.clip(hsv[..., 1] * s / main_hue[1], 0, 1),
        np.clip(v * (hsv[..., 2] / main_hue[2]) ** 0.8, 0, 1),
    ], -1)  # fmt: skip
    shifted = Image.fromarray((new * 255).round().astype(np.uint8), "HSV").convert("RGB")
    out = Image.composite(shifted, image.convert("RGB"), Image.fromarray((body * 255).astype(np.uint8)))
    out.putalpha(image.getchannel("A"))
    return out


def _hsv(rgb: Sequence[int]) -> tuple[float, float, float]:
    return colorsys.rgb_to_hsv(*(value / 255 for value in rgb))


VISIBLE = 0.05  # least mean distance of a glyph from its background, over the square around it; black to white is 1


@functools.cache
def backgrounds(character: str, font: str | None = None, tint: str = "") -> tuple[str, ...]:
    """The colours on which an emoji, or one in a tint, can be seen: all, but white for a white square and the like."""
    look = _look(character, tint, font)
    image = np.asarray(look.reduce(4) if tint else look, np.float32) / 255  # (h,w,4)
    rgb, alpha, area = image[..., :3], image[..., 3], max(image.shape[:2]) ** 2
    contrast = {
        name: float((alpha * np.sqrt(((rgb - np.array(colour, np.float32) / 255) ** 2).mean(-1))).sum()) / area
        for name, colour in COLOURS.items()
    }
    return tuple(name for name, value in contrast.items() if value >= VISIBLE)


def render(
    character: str,
    colour: str | tuple[int, int, int],
    resolution: int,
    *,
    size: float = 0.72,
    centre: tuple[float, float] = (0.5, 0.5),
    font: str | None = None,
    tint: str = "",
) -> Image.Image:
    """One emoji on a background: RGB, resolution x resolution.

    colour is a name or RGB in [0,255]; size is the longer side of the emoji and centre its place (x, y), as shares of
    the image; tint is a colour that tints() has for it.  Raises ValueError for an unknown colour, a resolution below
    16 and a missing font.
    """
    if resolution < 16:
        raise ValueError(f"got a resolution of {resolution} pixels, expected 16 or more")
    if isinstance(colour, str):
        if colour not in COLOURS:
            raise ValueError(f"got the colour {colour!r}, expected one of {', '.join(COLOURS)}")
        colour = COLOURS[colour]
    image = Image.new("RGB", (resolution, resolution), colour)
    _paste(image, _scaled(character, tint, max(1, round(size * resolution)), font), centre)
    return image


def _look(character: str, tint: str, font: str | None) -> Image.Image:
    return tinted(character, tint, font) if tint else glyph(character, font)


@functools.lru_cache(maxsize=8192)  # below 300 MB at 128 pixels
def _scaled(character: str, tint: str, longest: int, font: str | None) -> Image.Image:
    source = _look(character, tint, font)
    width, height = (max(1, round(side * longest / max(source.size))) for side in source.size)
    return source.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)


def _paste(image: Image.Image, small: Image.Image, centre: tuple[float, float]) -> None:
    """Draw an emoji onto an image; the outermost 1/32 of it stays free wherever it fits."""
    margin = max(1, image.width // 32)
    x, y = (
        max(margin, min(round(at * image.width - side / 2), image.width - side - margin))
        for at, side in zip(centre, small.size, strict=True)
    )
    image.paste(small, (x, y), small)


# How several objects lie, and how large they are: whole positions of latents of 8 pixels, at 128 pixels.
SEVERAL = 0.4375
LAYOUTS: dict[str, tuple[tuple[float, float], ...]] = {
    "one": ((0.5, 0.5),),
    "beside": ((0.25, 0.5), (0.75, 0.5)),
    "stacked": ((0.5, 0.25), (0.5, 0.75)),
    "three": ((0.5, 0.25), (0.25, 0.75), (0.75, 0.75)),
}
SPLITS = ("all", "train", "held_out")
SHARE_HELD_OUT = 10  # one combination of so many


@dataclass(frozen=True)
class Thing:
    """An object of a scene: an emoji, its colour ("" for its own), and what the caption calls it."""

    label: int  # index into the vocabulary
    tint: str
    name: str


@dataclass(frozen=True)
class Scene:
    """What a scene shows, and its caption."""

    things: tuple[Thing, ...]  # in the order of their places in the layout
    layout: str  # one of LAYOUTS
    sided: bool  # whether the caption says who is where
    colour: str
    template: str
    phrase: str  # the objects alone, as the caption says it
    caption: str
    style: str = FLAT
    size: str = ""  # of SIZES, if there is one object
    second: str = ""  # the colour at the bottom, or on the right, of a gradient
    across: bool = False  # from left to right


def in_split(split: str, *what: object) -> bool:
    """Whether a combination, such as an emoji and a background, is in a split: of all, one in ten is held out."""
    held_out = zlib.crc32("|".join(map(str, what)).encode()) % SHARE_HELD_OUT == 0
    return split == "all" or held_out == (split == "held_out")


@dataclass(frozen=True)
class Scenes:
    """A function index -> (image, caption); see scenes().  Holds no picture, so that it pickles small."""

    resolution: int
    entries: tuple[Entry, ...]
    two: float
    jitter: float
    font: str | None
    free: float = 0.0
    counts: float = 0.0
    tinted: float = 0.0
    sized: float = 0.0
    gradients: float = 0.0
    solid: float = 0.0
    split: str = "all"
    colours: int = len(COLOURS)
    pictures: str | None = None  # the folder of the second style

    def __call__(self, index: int) -> tuple[Image.Image, str]:
        """The scene of a number >= 0: RGB, resolution x resolution, and what is on it."""
        rng = np.random.default_rng(index)
        kind = rng.random()
        scene = self.several(rng, kind < self.two) if kind < self.two + self.counts else self.one(rng)
        return self.draw(scene, rng), scene.caption

    def draw(self, scene: Scene, rng: np.random.Generator) -> Image.Image:
        """A scene, its sizes and places by the jitter."""
        image = ground(scene.colour, self.resolution, scene.second, scene.across)
        size, spread, shift = SIZES[scene.size] if scene.layout == "one" else (SEVERAL, 0.03, 0.015)
        for thing, (x, y) in zip(scene.things, LAYOUTS[scene.layout], strict=True):
            u = rng.uniform(-1, 1, 3) * self.jitter
            longest = max(1, round((size + spread * u[0]) * self.resolution))
            small = _scaled(self.entries[thing.label].character, thing.tint, longest, self.source(scene.style))
            _paste(image, small, (x + shift * u[1], y + shift * u[2]))
        return image

    def source(self, style: str) -> str | None:
        """What draws a style: the font, or the folder of pictures."""
        return self.pictures if style == SOLID else self.font

    # The first particular of a scene, in the order of its drawing, makes the combination of the split; all others are
    # of training: so each held-out scene has one thing that training has not shown.

    def one(self, rng: np.random.Generator) -> Scene:
        """One emoji; its tint, its size, the two colours or else its background makes the combination of the split."""
        style = self._style(rng)
        while True:
            label = int(rng.integers(len(self.entries)))
            entry, split = self.entries[label], self.split
            thing = self._tinted(rng, label, split, style)
            if thing is None:
                thing = Thing(label, "", any_name(rng, entry))
            else:
                split = self._others()
            sizes = [size for size in SIZE_WORDS if in_split(split, entry.character, "size", size)]
            size = sizes[int(rng.integers(len(sizes)))] if rng_below(rng, self.sized) and sizes else ""
            if size:
                words, split = SIZE_WORDS[size], self._others()
                thing = replace(thing, name=f"{words[int(rng.integers(len(words)))]} {thing.name}")
            seen = self._seen(thing, style)
            gradient = self._gradient(rng, seen, split)
            if gradient is None:
                seen = tuple(colour for colour in seen if in_split(split, entry.character, colour))
            if seen:
                break
        free = self.free > 0 and gradient is not None and rng.random() < self.free
        if gradient is not None:
            colour, second, across, template = gradient
            phrase = (thing.name, with_article(thing.name))[int(rng.integers(2))]
            text = gradient_caption(rng, template, phrase, (colour, second), free)
        else:
            (colour, template), second, across = self._background(rng, seen, PLAIN, COLOURED), "", False
            text = caption(template, thing.name, colour)
            if self.free > 0 and rng.random() < self.free:
                text = free_caption(rng, thing.name, colour, template in PLAIN)
        text = styled_caption(rng, text, style) if self.solid > 0 else text
        phrase = with_article(thing.name)
        return Scene((thing,), "one", False, colour, template, phrase, text, style, size, second, across)

    def several(self, rng: np.random.Generator, two: bool) -> Scene:
        """Two different emoji, or two or three of one; which, makes the combination of the split."""
        style = self._style(rng)
        things, count = (self._pair(rng, style), 0) if two else self._alike(rng)
        common = set.intersection(*(set(self._seen(thing, style)) for thing in things))
        names = list(COLOURS)[: self.colours]
        seen = tuple(name for name in names if name in common) or tuple(names)
        gradient = self._gradient(rng, seen, self._others())
        if gradient is not None:
            colour, second, across, ground = gradient
        else:
            (colour, ground), second, across = self._background(rng, seen, GROUNDS_PLAIN, GROUNDS), "", False
        if two:
            layout = ("beside", "beside", "stacked")[int(rng.integers(3))]
            sides = list((BESIDE if layout == "beside" else STACKED).items())
            side, templates = sides[int(rng.integers(len(sides)))]
        else:
            layout, side, templates = ("beside", "three")[count - 2], "", COUNTED[count]
        phrase = caption(templates[int(rng.integers(len(templates)))], things[0].name, second=things[1].name)
        free = rng if self.free > 0 and rng.random() < self.free else None
        if gradient is not None:
            text = gradient_caption(rng, ground, phrase, (colour, second), free is not None)
        else:
            if free is not None:
                ground = "{b}{x}{a}" if ground in GROUNDS_PLAIN else GROUNDS_FREE[int(rng.integers(len(GROUNDS_FREE)))]
            text = ground_caption(ground, phrase, colour, free)
        text = styled_caption(rng, text, style) if self.solid > 0 else text
        return Scene(things, layout, bool(side), colour, ground, phrase, text, style, "", second, across)

    def _others(self) -> str:
        """The split of what is not the particular of a scene."""
        return "all" if self.split == "all" else "train"

    def _style(self, rng: np.random.Generator) -> str:
        return SOLID if rng_below(rng, self.solid) else FLAT

    def _seen(self, thing: Thing, style: str) -> tuple[str, ...]:
        """The colours on which an object can be seen."""
        seen = backgrounds(self.entries[thing.label].character, self.source(style), thing.tint)
        return tuple(colour for colour in seen if colour in list(COLOURS)[: self.colours])

    def _gradient(self, rng: np.random.Generator, seen: Sequence[str], split: str) -> tuple[str, str, bool, str] | None:
        """Two colours of a gradient, whether it goes from left to right, and a template; None at times."""
        if not rng_below(rng, self.gradients):
            return None
        pairs = [(a, b) for a in seen for b in seen if a != b and in_split(split, "gradient", a, b)]
        if not pairs:
            return None
        first, second = pairs[int(rng.integers(len(pairs)))]
        across = rng.random() < 0.4
        templates = GRADIENTS_ACROSS if across else GRADIENTS
        return first, second, across, templates[int(rng.integers(len(templates)))]

    def _pair(self, rng: np.random.Generator, style: str) -> tuple[Thing, ...]:
        while True:
            labels = [int(i) for i in rng.choice(len(self.entries), 2, replace=False)]
            if in_split(self.split, *sorted(self.entries[label].character for label in labels)):
                break
        return tuple(
            self._tinted(rng, label, self._others(), style) or Thing(label, "", any_name(rng, self.entries[label]))
            for label in labels
        )

    def _alike(self, rng: np.random.Generator) -> tuple[tuple[Thing, ...], int]:
        while True:
            label, count = int(rng.integers(len(self.entries))), int(rng.integers(2, 4))
            names = [name for name in self.entries[label].names if plural(name)]
            if names and in_split(self.split, self.entries[label].character, count):
                return (Thing(label, "", names[int(rng.integers(len(names)))]),) * count, count

    def _tinted(self, rng: np.random.Generator, label: int, split: str, style: str) -> Thing | None:
        """An emoji in a colour of its split, or None: for those of one hue alone, and at times."""
        if not rng_below(rng, self.tinted):
            return None
        entry, tinted = self.entries[label], tints(self.entries[label], self.source(style)).items()
        allowed = [(tint, name) for tint, name in tinted if in_split(split, entry.character, "tint", tint)]
        return Thing(label, *allowed[int(rng.integers(len(allowed)))]) if allowed else None

    @staticmethod
    def _background(
        rng: np.random.Generator, seen: Sequence[str], plain: Sequence[str], coloured: Sequence[str]
    ) -> tuple[str, str]:
        """A colour on which the emoji is seen, and a template that names it, or white and one that does not."""
        is_plain = rng.random() < SHARE_PLAIN and "white" in seen
        templates = plain if is_plain else coloured
        colour = "white" if is_plain else seen[int(rng.integers(len(seen)))]
        return colour, templates[int(rng.integers(len(templates)))]


def rng_below(rng: np.random.Generator, share: float) -> bool:
    """True in that share of calls; draws no number for a share of 0, so that scenes without an option stay the same."""
    return share > 0 and rng.random() < share


def ground(colour: str, resolution: int, second: str = "", across: bool = False) -> Image.Image:
    """A background of one colour, or of two: the first at the top or on the left.  RGB, resolution x resolution."""
    image = Image.new("RGB", (resolution, resolution), COLOURS[colour])
    if not second:
        return image
    ramp = np.linspace(np.array(COLOURS[colour]), np.array(COLOURS[second]), resolution).round().astype(np.uint8)
    rows = np.broadcast_to(ramp[None] if across else ramp[:, None], (resolution, resolution, 3))
    return Image.fromarray(np.ascontiguousarray(rows))


def any_name(rng: np.random.Generator, entry: Entry) -> str:
    """An entry's name: mostly the usual name, at times one of the others."""
    others = entry.names[1:]
    return others[rng.integers(len(others))] if rng.random() < 0.3 and others else entry.names[0]


SHARES = ("free", "counts", "tinted", "sized", "gradients", "solid")  # options of scenes() in [0,1]


def scenes(
    resolution: int,
    emoji: int | None = None,
    two: float = 0.0,
    jitter: float = 1.0,
    font: str | None = None,
    **more: float | str | None,
) -> Callable[[int], tuple[Image.Image, str]]:
    """A function index >= 0 -> (RGB image, resolution x resolution, and its caption), the same in every process.

    emoji is how many of the vocabulary to draw (default: all), two the share of scenes with two different ones, beside
    or above each other, jitter in [0,1] how much size and place vary, font another file of the font.  More: free, the
    share of captions in freer words; counts, the share of scenes with two or three of a kind; tinted, the share of
    single and paired emoji in another colour, of those that can have one; sized, that of single emoji that are small or
    large; gradients, that of backgrounds of two colours; solid, that of scenes in the style "3d", for which pictures is
    the folder (default: the environment's EMOJI_PICTURES); colours, how many of COLOURS the backgrounds have; split,
    "train" without the combinations that are held out, "held_out" with these alone, or "all".  A caption that names no
    colour is of a white background, one that names no style is of the font's.
    The result pickles.  Raises ValueError, also for a missing font or folder.
    """
    entries = vocabulary(emoji)
    shares = {"two": two, "jitter": jitter, **dict.fromkeys(SHARES, 0.0)}
    others = {"split": "all", "colours": len(COLOURS), "pictures": None}
    if unknown := sorted(set(more) - {*SHARES, *others}):
        wanted = ", ".join((*SHARES, *others))
        raise ValueError(f"got the option {unknown[0]!r}, expected one of emoji, two, jitter, font, {wanted}")
    for name, value in more.items():
        (others if name in others else shares)[name] = value  # type: ignore[assignment]
    split, colours, pictures = others["split"], others["colours"], others["pictures"]
    for name, value in shares.items():
        if not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ValueError(f"got {name} {value!r}, expected 0 to 1")
    if split not in SPLITS:
        raise ValueError(f"got the split {split!r}, expected one of {', '.join(SPLITS)}")
    if type(colours) is not int or not 2 <= colours <= len(COLOURS):
        raise ValueError(f"got colours {colours!r}, expected 2 to {len(COLOURS)}")
    if two + shares["counts"] > 1:
        raise ValueError(f"got two {two} and counts {shares['counts']}, expected 1 or less together")
    if two > 0 and len(entries) < 2:
        raise ValueError("got one emoji and scenes of two different ones: use --emoji 2 or more")
    if split == "held_out" and len(entries) < 200:
        raise ValueError(f"got {len(entries)} emoji, too few for held-out combinations of each: use 200 or more")
    if resolution < 16:
        raise ValueError(f"got a resolution of {resolution} pixels, expected 16 or more")
    folder = pictures_folder(None if pictures is None else str(pictures)) if shares["solid"] > 0 else None
    _font(font or FONT)
    kinds = {name: float(shares[name]) for name in SHARES}
    return Scenes(resolution, entries, two, jitter, font, **kinds, split=str(split), colours=colours, pictures=folder)


# ---- the command ----------------------------------------------------------------------------------------------------


def contact_sheet(cells: Sequence[tuple[Image.Image, str]], columns: int = 10, width: int = 132) -> Image.Image:
    """Images of one size with a text below each (up to three lines), in rows."""
    side, line = cells[0][0].width, 11
    width = max(width, side + 4)
    height, rows = side + 3 * line + 6, -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), (245, 245, 245))
    draw, letters = ImageDraw.Draw(sheet), ImageFont.load_default(size=10)
    for k, (image, text) in enumerate(cells):
        x, y = k % columns * width, k // columns * height
        sheet.paste(image, (x + (width - side) // 2, y + 2))
        for i, part in enumerate(_lines(text, lambda words: draw.textlength(words, font=letters) < width - 4)[:3]):
            draw.text((x + width / 2, y + side + 4 + i * line), part, (0, 0, 0), letters, anchor="ma")
    return sheet


def _lines(text: str, fits: Callable[[str], bool]) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if fits(longer) or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Write scenes as NAME.png with NAME.txt beside, and a contact sheet of the first hundred."""
    parser = argparse.ArgumentParser(description="Draw captioned emoji scenes.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="scenes (default: %(default)s)")
    parser.add_argument("--resolution", type=int, default=64, metavar="N", help="pixels (default: %(default)s)")
    parser.add_argument("--emoji", type=int, metavar="N", help="how many of the vocabulary (default: all)")
    parser.add_argument("--two", type=float, default=0.0, metavar="X", help="share of scenes with two emoji")
    parser.add_argument("--counts", type=float, default=0.0, metavar="X", help="share with two or three of a kind")
    parser.add_argument("--tinted", type=float, default=0.0, metavar="X", help="share of emoji in another colour")
    parser.add_argument("--sized", type=float, default=0.0, metavar="X", help="share of emoji that are small or large")
    parser.add_argument("--gradients", type=float, default=0.0, metavar="X", help="share of backgrounds of two colours")
    parser.add_argument("--solid", type=float, default=0.0, metavar="X", help="share of scenes in the style 3d")
    parser.add_argument("--pictures", metavar="DIR", help=f"folder of the style 3d (default: {PICTURES})")
    parser.add_argument("--colours", type=int, default=len(COLOURS), metavar="N", help="of backgrounds (%(default)s)")
    parser.add_argument("--free", type=float, default=0.0, metavar="X", help="share of captions in freer words")
    parser.add_argument("--split", choices=SPLITS, default="all", help="of combinations (default: %(default)s)")
    parser.add_argument("--jitter", type=float, default=1.0, metavar="X", help="how much size and place vary, 0 to 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="scenes start at index N x 2^32")
    parser.add_argument("--font", metavar="FILE", help="another file of the font")
    args = parser.parse_args(argv)
    try:
        if args.count < 1 or args.seed < 0:
            raise ValueError(f"got count {args.count} and seed {args.seed}, expected 1 or more and 0 or more")
        more = {name: getattr(args, name) for name in (*SHARES, "split", "colours", "pictures")}
        scene = scenes(args.resolution, args.emoji, args.two, args.jitter, args.font, **more)
        cells = []
        for k in range(args.count):
            image, text = scene(args.seed * 2**32 + k)
            args.out.mkdir(parents=True, exist_ok=True)
            image.save(args.out / f"{k:05}.png")
            (args.out / f"{k:05}.txt").write_text(text + "\n", encoding="utf-8")
            cells += [(image, text)] * (k < 100)
        contact_sheet(cells).save(args.out / "contact-sheet.png")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.count} scenes and contact-sheet.png in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

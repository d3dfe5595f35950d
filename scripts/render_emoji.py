"""Captioned emoji scenes, the data that the bundled model is trained on: drawn, not downloaded.

    python scripts/render_emoji.py OUT_DIR --count 100 --resolution 64 [--emoji N] [--two X] [--seed S]

scenes() is what the trainer takes; a scene depends on its index alone.  The font is Noto Color Emoji (SIL OFL 1.1, the
Debian package fonts-noto-color-emoji).  Needs numpy and Pillow only; what a caption says is known without the font.
"""

import argparse
import functools
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
FONT_SIZE, GLYPH = 109, (136, 128)  # the only size of its bitmaps, and their width and height

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
}

# {n} is an emoji's name, {an} the same with its article, {c} a colour, {ac} that with its article; 2 is the right one.
PLAIN = ("{n}", "{an}", "{n} emoji")  # on white
COLOURED = (
    *("{an} on {ac} background", "{n} emoji, {c} background", "{n} on {c}", "{an}, {c} background"),
    *("{an} with {ac} background", "{c} background, {n}", "{ac} background and {an}"),
)
PLAIN_TWO = ("{n} and {n2}", "{an} and {an2}", "{an} left of {an2}")
COLOURED_TWO = (
    "{an} left of {an2} on {ac} background",
    "{an} on the left and {an2} on the right, {c} background",
    "{n} and {n2} on {c}",
)
# Freer words around them, so that a model learns to read past words that say nothing: before, after, and the ground.
BEFORE = ("", "a photo of ", "a drawing of ", "an image of ", "a sticker of ", "a small painting of ", "draw ", "cute ")
BEFORE += ("show me ", "one ", "please make ", "the ", "a big ", "my favourite ", "simple ", "nice clean ", "this is ")
AFTER = ("", "", " emoji", " sticker", " symbol", " drawing", " sign", " logo", " here", " please", " centered", " art")
GROUND = ("background", "background", "ground", "field", "page", "paper", "screen", "surface", "canvas", "card", "sky")
FREE = (
    *(
        "{b}{n}{a} on {ac} {g}",
        "{b}{n}{a}, {c} {g}",
        "{ac} {g}, {b}{n}{a}",
        "{c} {g} and {b}{n}{a}",
        "{b}{n}{a} over {c}",
    ),
    *("{b}{an}{a} on the {c} {g}", "{b}{n}{a}, the {g} is {c}", "the {g} is {c}, {b}{n}{a}", "{c} {g} under {an}{a}"),
)
WORDS = """very really lovely tiny little shiny funny pretty beautiful great good best fine well made drawn style
cartoon vector pixel colored whole entire just only also there where that which seen shown placed against above
below near beside inside around all some any every other same another by as for so then now today always i want would
like see have has was are""".split()  # they say nothing of the picture, and are in no name  # noqa: SIM905
SHARE_PLAIN = 0.2  # of scenes whose caption names no colour

# ---- the vocabulary -------------------------------------------------------------------------------------------------

# In a fixed order, so that the first N are always the same: 66, then 200 that are common and look different, animals,
# food, vehicles, places and things, faces, people and hands, signs.  Left out: flags, skin tones, keycaps, ideographs
# in squares, and whatever looks nearly as another does (the tests say how nearly): all clock faces but one, and so on.
ORDER = """
🍎🐱🚗❤🌻🍌🐶🏠⭐🍇🦊🚀🌵🐸🍓🐼⚽🌈🎁🐧🍕☀👻🐙🍄🚲🐻🌲🍉🐝👑🐷🎈🌹😀🦋🍊✈🐮🍩🐢🔥🦁🎸🍍🐰⛵🥕🦉🌙🍔🐞🌴😂🐟🎂
🍋🐵☂🦀🐯☕🌽🐘🍒🤖
😍😎😢😡😴😱🤔👽💩😈🤡🐨🐴🐺🦄🐗🐭🐹🐲🐬🐳🦈🐊🦒🐪🦓🦔🐌🦆🦅🦜🦚🦩🦢🐓🐔🦇🦑🐠🕷🐜🦖🦕🐍🌷🌸🍁🍀🌳🍐🍑🥝🥥🥑🍅🍆
🌶🥦🥔🍞🥐🧀🥚🍳🌭🌮🍟🍿🍣🍪🍫🍭🍦🧁🥞🍺🍷🌍🌋⛄❄⚡☁💧🌊🪐🌪🚌🚂🚁🚢🚜🚒🚑🏍🛸🚦⏰💡🔑🔔🔨✂📚✏📷📱💻📺🎧🎤🎺
🎻🥁🎲🎯🏀🏈🎾🏆💎💍👟🎩👓👕👗🔒⚓💣🎃🎄🧸🏰⛺💀👍💔💙
🐀🐁🐂🐃🐄🐅🐆🐇🐈🐉🐋🐎🐏🐐🐑🐒🐕🐖🐚🐛🐡🐣🐤🐥🐦🐩🐫🐽🐾🐿🦂🦃🦌🦍🦎🦏🦐🦗🦘🦙🦛🦝🦞🦟🦠🦡🦣🦤🦥🦦🦧🦨🦪🦫🦬🦭
🦮🪰🪱🪲🪳🪴🪵🪶🪷🪸🪹🪺🌯🌰🌱🌺🌼🌾🌿🍂🍃🍈🍏🍖🍗🍘🍙🍚🍛🍜🍝🍠🍡🍢🍤🍥🍧🍨🍬🍮🍯🍰🍱🍲🍴🍵🍶🍸🍹🍻🍼🍽🍾🥒🥓🥖
🥗🥘🥙🥛🥜🥟🥠🥡🥢🥣🥤🥧🥨🥩🥪🥫🥬🥭🥮🥯🧂🧃🧄🧅🧆🧇🧈🧉🧊🧋🫐🫑🫒🫓🫔🫕🫖🫗🫘🫙🚃🚄🚅🚆🚇🚈🚉🚊🚋🚍🚎🚏🚐🚓🚔🚕
🚖🚘🚙🚚🚛🚝🚞🚟🚠🚡🚤🚥🚧🚨🚩🚪🚬🚽🚿🛁🛋🛍🛎🛏🛑🛒🛕🛖🛗🛝🛞🛟🛠🛡🛢🛣🛤🛥🛩🛫🛬🛰🛳🛴🛵🛶🛷🛹🛺🛻🛼🌀🌁🌂🌃🌄
🌅🌆🌇🌉🌌🌎🌏🌐🌚🌛🌜🌝🌞🌟🌠🌡🌤🌥🌦🌧🌨🌩🌫🌬🎀🎆🎇🎉🎊🎋🎌🎍🎎🎏🎐🎑🎒🎓🎖🎗🎙🎚🎛🎞🎟🎠🎡🎢🎣🎥🎨🎪🎫🎬🎭🎮
🎰🎱🎳🎴🎵🎶🎷🎹🎼🎽🎿🏁🏅🏉🏎🏏🏐🏑🏒🏓🏔🏕🏖🏗🏘🏙🏚🏛🏜🏝🏞🏟🏡🏢🏣🏤🏥🏦🏨🏩🏪🏫🏬🏭🏮🏯🏳🏴🏵🏷🏸🏹🏺⌚⌛⌨
⏱⏲⏳☃☄☎☔☘♥♦♨⚒⚔⚖⚗⚙⚛⚜⚠⚪⚫⚰⚱⚾⛅⛈⛎⛏⛑⛓⛔⛩⛪⛰⛱⛲⛳⛴⛸⛽✉✒✨❌❓❗🀄🃏👀👁👋👌👏👒👔👖
👘👙👚👛👜👝👞👠👡👢👣👹👺👾👿💄💈💉💊💋💌💐💒💓💕💖💗💘💚💛💜💝💞💟💤💥💦💨💫💬💭💯💰💲💳💴💵💶💷💸💺💼💽💾💿📀
📁📂📃📄📅📆📇📈📉📊📋📌📍📎📏📐📑📒📓📔📕📖📗📘📙📛📜📝📞📟📠📡📢📣📤📥📦📧📨📩📪📫📬📭📮📯📰📲📸📹📻📼📽📿🔇🔈
🔉🔊🔋🔌🔍🔎🔏🔐🔓🔖🔦🔧🔩🔪🔫🔬🔭🔮🔱🕊🕋🕌🕍🕒🕯🕰🕳🕶🕸🕹🖇🖊🖋🖌🖍🖤🖥🖨🖱🖲🖼🗂🗃🗄🗑🗒🗓🗜🗝🗞🗡🗳🗺🗻🗼🗽
🗾🗿🤍🤎🤿🥀🥂🥃🥄🥅🥇🥈🥉🥊🥋🥌🥍🥎🥏🥻🥼🥽🥾🥿🦯🦴🦷🦺🦼🦽🦾🦿🧠🧡🧢🧣🧤🧥🧦🧧🧨🧩🧪🧫🧬🧭🧮🧯🧰🧱🧲🧳🧴🧵🧶🧷
🧹🧺🧻🧼🧽🧾🧿🩰🩱🩲🩳🩴🩸🩹🩺🩻🩼🪀🪁🪂🪃🪄🪅🪆🪑🪒🪓🪔🪕🪖🪗🪘🪙🪚🪛🪜🪝🪞🪟🪠🪡🪢🪣🪤🪥🪦🪧🪨🪩🪪🪫🪬🫀🫁🫧😁
😃😄😅😆😇😉😊😋😌😏😐😑😒😓😔😕😖😗😘😚😛😜😝😞😟😠😣😤😥😦😨😩😪😫😬😭😮😯😰😲😳😵😶😷😸😹😺😻😼😽😾😿🙀🙁🙂🙃
🙄🙈🙉🙊🤐🤑🤒🤓🤕🤗🤠🤢🤣🤤🤥🤧🤨🤩🤪🤫🤬🤭🤮🤯🥰🥱🥲🥳🥴🥵🥶🥸🥹🥺🧐🫠🫡🫢🫣🫤🫥🫦☝⛷⛹✊✋✌✍🎅🏂🏃🏄🏇🏊🏋
🏌👂👃👄👅👊👎👐👤👥👦👧👨👩👪👫👬👭👮👯👰👱👲👳👴👵👶👷👸👼💁💂💃💅💆💇💏💑💪🕴🕵🕺🖐🖖🗣🙅🙆🙇🙋🙌🙍🙎🙏🚣🚴🚵
🚶🛀🛌🤌🤏🤘🤙🤚🤛🤜🤝🤞🤟🤦🤰🤱🤲🤳🤴🤵🤶🤷🤸🤹🤺🤼🤽🤾🥷🦵🦶🦸🦹🦻🧌🧍🧎🧏🧑🧒🧓🧔🧕🧖🧗🧘🧙🧚🧛🧜🧝🧞🧟🫂🫃🫄
🫅🫰🫱🫲🫳🫴🫵🫶©®‼⁉™ℹ↔↕↖↗↘↙↩↪⏏⏩⏪⏫⏬⏭⏮⏯⏸⏹⏺Ⓜ▶◀☑☠☢☣☦☪☮☯☸☹☺♀♂♈♉♊♋♌♍♎
♏♐♑♒♓♟♠♣♻♾♿⚕⚧✅✔✖✝✡✳✴❇❎❔❕❣➕➖➗➡➰➿⤴⤵⬅⬆⬇⬛⬜⭕〰〽㊗㊙🅰🅱🅾🅿🆎🆑🆒🆓🆔🆕🆖🆗🆘
🆙🆚🌑🌒🌓🌔🌕🌖🌗🌘🎦🏧👆👇👈👉💠💢💮💱💹📳📴📵📶🔀🔁🔂🔃🔄🔅🔆🔕🔗🔘🔙🔚🔛🔜🔝🔞🔟🔠🔡🔢🔣🔤🔰🔲🔳🔴🔵🔶🔷🔺🔻
🔼🔽🕉🕎🗨🗯🚫🚭🚮🚯🚰🚱🚳🚷🚸🚹🚻🚼🚾🛂🛃🛄🛅🛐🟠🟡🟢🟣🟤🟥🟦🟧🟨🟩🟪🟫🟰
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
🌩 thundercloud; 🌬 wind face; 🎀 pink ribbon, bow; 🎇 sparkler; 🎒 backpack, school bag; 🎣 fishing pole;
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
    named = (each.strip().split(" ", 1) for each in NAMES.replace("\n", " ").split(";"))
    names = {character: tuple(name.strip() for name in text.split(",")) for character, text in named}
    characters = "".join(ORDER.split())
    return tuple(Entry(c, names.get(c) or (unicodedata.name(c).lower(),)) for c in characters)


VOCABULARY = _vocabulary()


def vocabulary(emoji: int | None = None) -> tuple[Entry, ...]:
    """The first `emoji` entries, or all.  Raises ValueError if there are not so many."""
    if emoji is None:
        return VOCABULARY
    if not 1 <= emoji <= len(VOCABULARY):
        raise ValueError(f"got {emoji} emoji, wanted 1 to {len(VOCABULARY)}")
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


def caption(template: str, name: str, colour: str = "white", right: str = "") -> str:
    """A template with its words: "{an} on {ac} background" -> "a red apple on an orange background"."""
    words = {"n": name, "an": with_article(name), "c": colour, "ac": with_article(colour)}
    if right:
        words |= {"n2": right, "an2": with_article(right)}
    return template.format(**words)


def free_caption(rng: np.random.Generator, name: str, colour: str, plain: bool) -> str:
    """A caption in freer words; a plain one names no colour."""

    def any_of(choices: Sequence[str]) -> str:
        return choices[int(rng.integers(len(choices)))]

    around = {"b": any_of(BEFORE), "a": any_of(AFTER), "g": any_of(GROUND)}
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
            "or name its file with --font"
        ) from error


@functools.cache
def glyph(character: str, font: str | None = None) -> Image.Image:
    """One emoji as drawn by the font, RGBA, cropped to what is not transparent.  Raises ValueError if it has none."""
    canvas = Image.new("RGBA", GLYPH)
    ImageDraw.Draw(canvas).text((0, 0), character, font=_font(font or FONT), embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise ValueError(f"{font or FONT}: has no glyph for U+{ord(character):X}: take a newer font")
    return canvas.crop(box)


VISIBLE = 0.05  # least mean distance of a glyph from its background, over the square around it; black to white is 1


@functools.cache
def backgrounds(character: str, font: str | None = None) -> tuple[str, ...]:
    """The colours on which an emoji can be seen: all, but white for a white square and the like."""
    image = np.asarray(glyph(character, font), np.float32) / 255  # (h,w,4)
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
) -> Image.Image:
    """One emoji on a background: RGB, resolution x resolution.

    colour is a name or RGB in [0,255]; size is the longer side of the emoji and centre its place (x, y), as shares of
    the image.  Raises ValueError for an unknown colour, a resolution below 16 and a missing font.
    """
    if resolution < 16:
        raise ValueError(f"got a resolution of {resolution} pixels, wanted 16 or more")
    if isinstance(colour, str):
        if colour not in COLOURS:
            raise ValueError(f"got the colour {colour!r}, wanted one of {', '.join(COLOURS)}")
        colour = COLOURS[colour]
    image = Image.new("RGB", (resolution, resolution), colour)
    _paste(image, character, size, centre, font)
    return image


def _paste(image: Image.Image, character: str, size: float, centre: tuple[float, float], font: str | None) -> None:
    """Draw an emoji onto an image; the outermost 1/32 of it stays free wherever it fits."""
    source, resolution = glyph(character, font), image.width
    longest = max(1, round(size * resolution))
    width, height = (max(1, round(side * longest / max(source.size))) for side in source.size)
    small = source.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    margin = max(1, resolution // 32)
    x, y = (
        max(margin, min(round(at * resolution - side / 2), resolution - side - margin))
        for at, side in zip(centre, (width, height), strict=True)
    )
    image.paste(small, (x, y), small)


@dataclass(frozen=True)
class Scenes:
    """A function index -> (image, caption); see scenes().  Holds no picture, so that it pickles small."""

    resolution: int
    entries: tuple[Entry, ...]
    two: float
    jitter: float
    font: str | None
    free: float = 0.0

    def __call__(self, index: int) -> tuple[Image.Image, str]:
        """The scene of a number >= 0: RGB, resolution x resolution, and what is on it."""
        rng = np.random.default_rng(index)
        if rng.random() < self.two:
            return self._two(rng)
        entry = self.entries[rng.integers(len(self.entries))]
        colour, template = self._background(rng, backgrounds(entry.character, self.font), PLAIN, COLOURED)
        u = rng.uniform(-1, 1, 3) * self.jitter
        image = render(
            entry.character,
            colour,
            self.resolution,
            size=0.72 + 0.12 * u[0],
            centre=(0.5 + 0.08 * u[1], 0.5 + 0.08 * u[2]),
            font=self.font,
        )
        name = any_name(rng, entry)
        if self.free > 0 and rng.random() < self.free:
            return image, free_caption(rng, name, colour, template in PLAIN)
        return image, caption(template, name, colour)

    def _two(self, rng: np.random.Generator) -> tuple[Image.Image, str]:
        pair = [self.entries[i] for i in rng.choice(len(self.entries), 2, replace=False)]
        first, second = (backgrounds(entry.character, self.font) for entry in pair)
        seen = tuple(name for name in first if name in second)
        colour, template = self._background(rng, seen or tuple(COLOURS), PLAIN_TWO, COLOURED_TWO)
        image = Image.new("RGB", (self.resolution, self.resolution), COLOURS[colour])
        for entry, x in zip(pair, (0.26, 0.74), strict=True):
            u = rng.uniform(-1, 1, 3) * self.jitter
            _paste(image, entry.character, 0.40 + 0.04 * u[0], (x + 0.02 * u[1], 0.5 + 0.2 * u[2]), self.font)
        left, right = (any_name(rng, entry) for entry in pair)
        return image, caption(template, left, colour, right)

    @staticmethod
    def _background(
        rng: np.random.Generator, seen: Sequence[str], plain: Sequence[str], coloured: Sequence[str]
    ) -> tuple[str, str]:
        """A colour on which the emoji is seen, and a template that names it, or white and one that does not."""
        is_plain = rng.random() < SHARE_PLAIN and "white" in seen
        templates = plain if is_plain else coloured
        colour = "white" if is_plain else seen[int(rng.integers(len(seen)))]
        return colour, templates[int(rng.integers(len(templates)))]


def any_name(rng: np.random.Generator, entry: Entry) -> str:
    """An entry's name: mostly the usual name, at times one of the others."""
    others = entry.names[1:]
    return others[rng.integers(len(others))] if rng.random() < 0.3 and others else entry.names[0]


def scenes(
    resolution: int,
    emoji: int | None = None,
    two: float = 0.0,
    jitter: float = 1.0,
    font: str | None = None,
    free: float = 0.0,
) -> Callable[[int], tuple[Image.Image, str]]:
    """A function index >= 0 -> (RGB image, resolution x resolution, and its caption), the same in every process.

    emoji is how many of the vocabulary to draw (default: all), two the share of scenes with two different ones, left
    and right, jitter in [0,1] how much size and place vary, font another file of the font, free the share of captions
    (of one emoji) in freer words.  A caption that names no colour is of a white background.  The result pickles.
    Raises ValueError, also for a missing font.
    """
    entries = vocabulary(emoji)
    for name, value in (("two", two), ("jitter", jitter), ("free", free)):
        if not 0 <= value <= 1:
            raise ValueError(f"got {name} {value}, wanted 0 to 1")
    if two > 0 and len(entries) < 2:
        raise ValueError("got one emoji and scenes of two different ones: take --emoji 2 or more")
    if resolution < 16:
        raise ValueError(f"got a resolution of {resolution} pixels, wanted 16 or more")
    _font(font or FONT)
    return Scenes(resolution, entries, two, jitter, font, free)


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
    parser.add_argument("--jitter", type=float, default=1.0, metavar="X", help="how much size and place vary, 0 to 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="scenes start at index N x 2^32")
    parser.add_argument("--font", metavar="FILE", help="another file of the font")
    args = parser.parse_args(argv)
    try:
        if args.count < 1 or args.seed < 0:
            raise ValueError(f"got count {args.count} and seed {args.seed}, wanted 1 or more and 0 or more")
        scene = scenes(args.resolution, args.emoji, args.two, args.jitter, args.font)
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

"""What people call emoji besides the names in render_emoji.py: synonyms, the young, misspellings, the emoji themselves.

reworded() puts such words into the captions of scenes.  `train_emoji.py text` teaches the text encoder to read them as
it reads the usual names, and evaluate_emoji.py asks for emoji by them (`--kinds called`).
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import render_emoji
from render_emoji import COLOURS, VOCABULARY, plural, with_article

# By the usual name: synonyms, the young and the breeds, and common misspellings.
OTHER_NAMES = """
red apple: appel, aple, macintosh; cat: kitten, kitty, pussycat, feline, tabby, kitten face, kiten; red car:
automobile, auto, motorcar, vehicle, sedan; red heart: love, love heart, hart, valentine; sunflower: sun flower,
sunflour; banana: bananna, bannana, plantain; dog: puppy, doggy, hound, pup, doggo, canine, puppy face; house: home,
cottage, hut, building; star: golden star, starr; grapes: bunch of grapes, graps, grape; fox: vixen, foxx; rocket:
spaceship, rocketship, space rocket, rockit, spacecraft; cactus: succulent, cactuss, saguaro; frog: toad, frogg;
strawberry: strawbery, berry; panda: panda bear, pandabear; soccer ball: soccerball, soccer; rainbow: rain bow,
rainbo; gift: wrapped gift, gift box, birthday present; penguin: pengiun, pinguin, penguine; slice of pizza: pizza
slice, piza, pepperoni pizza; sun: sunshine, sunny sky; ghost: spirit, spook, phantom, gost; octopus: octopuss,
octapus; mushroom: toadstool, mushrom, fungus; bicycle: bycicle, cycle, pushbike, push bike, bicylce; bear: grizzly,
brown bear, bear cub, grizzly bear; evergreen tree: pine tree, conifer, pine, spruce; watermelon: melon, watermellon,
slice of watermelon, water melon; bee: bumblebee, honey bee, wasp, bumble bee; crown: tiara, diadem, king's crown;
pig: piglet, piggy, swine, hog, pigg; balloon: baloon, ballon, party balloon; rose: red rose; grinning face: smiley,
smile, smiling face, happy smiley, grin, smiley face; butterfly: buterfly, butterflie, moth; orange fruit: mandarin,
clementine, satsuma, orange slice; airplane: aeroplane, jet, aircraft, airliner, air plane; cow: cattle, calf, heifer;
donut: dougnut; turtle: tortoise, turtel, terrapin; fire: flames, blaze, bonfire; lion: lioness, lion cub, big cat;
guitar: electric guitar, gitar, acoustic guitar, guitarr; pineapple: pinapple, ananas; rabbit: bunny, hare, bunny
rabbit, rabit; sailboat: yacht, sailing boat, boat, sail boat, sailing ship; carrot: carot, carrott; owl: barn owl,
owll; crescent moon: half moon, new crescent, lunar crescent; hamburger: cheeseburger, hamberger, beefburger; ladybug:
lady bug, lady beetle, beetle; palm tree: palm, coconut tree, coconut palm; laughing face: tears of joy, laughing
smiley, crying with laughter, laughter; fish: goldfish, trout, salmon, cod; birthday cake: cake, cake with candles,
birthdaycake; lemon: citrus, lemmon; monkey: chimp, ape, chimpanzee, monky; umbrella: parasol, umbrela, brolly; crab:
crayfish, crabb; tiger: tigress, tiger cub, bengal tiger; cup of coffee: espresso, cappuccino, cofee, latte, hot
drink, mug of coffee, coffee cup; ear of corn: maize, sweetcorn, corn on the cob, corncob; elephant: elefant,
elephent; cherries: cherry, pair of cherries, cherrys; robot: android, bot, droid, robbot; face with heart eyes: heart
eyes, smiley with heart eyes, in love, love smiley; face with sunglasses: cool face, cool smiley, smiley with
sunglasses; crying face: sad smiley, tearful face, unhappy face, crying smiley; red angry face: angry face, angry
smiley, mad face, furious face, anger; sleeping face: sleepy face, asleep, sleeping smiley, snoring face; screaming
face: terrified face, scared face, shocked face, horrified face; thinking face: pondering face, thinker, thoughtful
face, thinking smiley; alien: extraterrestrial, martian; pile of poo: turd, dung; devil face: devil, demon, imp,
purple devil; clown: jester, circus clown; koala: koala bear, koalla; horse: pony, stallion, mare, horse head; wolf:
werewolf, wolff; unicorn: unicron, magical horse; boar: wild boar, warthog; mouse: rodent, rat; hamster: hampster,
gerbil, guinea pig; dragon: dragon head, draggon; dolphin: dolfin, porpoise; whale: whale spouting water, wale; shark:
great white shark, great white, sharck; crocodile: alligator, croc, gator, crocadile; giraffe: girafe, giraff; camel:
camell, one-hump camel; zebra: zeebra; hedgehog: hedge hog, porcupine; snail: slug, snale; duck: duckling, mallard,
duk; eagle: hawk, falcon, bald eagle, bird of prey; parrot: macaw, parot, parakeet; peacock: peafowl, peacok;
flamingo: flamingoe, pink bird; swan: cygnet, white swan; rooster: cockerel, roster; chicken: hen, chiken, chicken
head; bat: vampire bat, flying bat; squid: calamari, cuttlefish; tropical fish: angelfish, clownfish, reef fish;
spider: tarantula, arachnid, spidder; ant: worker ant; tyrannosaurus: t rex, trex, tyrannosaurus rex, dinosaur;
long-necked dinosaur: brontosaurus, diplodocus, brachiosaurus, dino; snake: serpent, python, cobra, viper; tulip:
tullip, pink tulip; cherry blossom: sakura, pink blossom; maple leaf: red leaf, canadian leaf; four leaf clover:
shamrock, lucky clover, four-leaf clover; tree: oak, oak tree, leafy tree, broadleaf tree; pear: green pear, paer;
peach: nectarine, apricot, peech; kiwi: kiwifruit, kiwi slice; coconut: coco nut, cocunut; avocado: avacado, avocato,
half an avocado; tomato: tomatoe, tomatto; eggplant: brinjal, egg plant; chili pepper: chilli, chilli pepper, chili,
red pepper, cayenne; broccoli: brocoli, brocolli, broccolli; potato: potatoe, spud; bread: loaf, loaf of bread, bread
loaf, toast; croissant: crossant, french pastry; wedge of cheese: chese, cheddar, swiss cheese, cheesse; egg:
eggshell, white egg; fried egg: egg in a pan, skillet, cooking egg, frying egg; hot dog: hotdog, frankfurter, sausage
in a bun; taco: tacco, mexican taco; french fries: fries, chips, french frys, potato fries; popcorn: pop corn, box of
popcorn; sushi: nigiri, sushi roll, sashimi; cookie: biscuit, cooky, chocolate chip cookie; chocolate bar: chocolate,
bar of chocolate, choclate; lollipop: lolly, lollypop, sucker; ice cream cone: ice cream, icecream, gelato, soft
serve, ice-cream; cupcake: muffin, cup cake, fairy cake; pancakes: pancake, flapjacks, hotcakes; beer mug: pint,
lager, ale, mug of beer, glass of beer, pint of beer; wine glass: wine, red wine, glass of wine, glass of red wine;
earth: world, planet earth, the earth; volcano: erupting volcano, volcanoe, eruption; snowman: snow man, snowmann;
snowflake: snow, snow flake, ice crystal; lightning bolt: thunderbolt, thunder, bolt of lightning, lightening; cloud:
white cloud, clowd; drop of water: water drop, raindrop, water, waterdrop; wave: sea, ocean, tsunami, sea wave; planet
with a ring: ringed planet, saturn planet, planet; tornado: twister, cyclone, whirlwind, tornadoe; bus: coach,
minibus, omnibus; steam train: steam engine, steam locomotive, train, railway engine; helicopter: chopper, helicoptor,
copter; ship: cruise ship, ocean liner, ocean ship, liner, ferry; tractor: farm tractor, tracter; fire truck:
firetruck, fire brigade, fire lorry; ambulance: ambulence, emergency vehicle; motorcycle: motorbike, motor bike,
motercycle, motor cycle; flying saucer: alien spaceship, alien ship, saucer; traffic light: traffic lights, stoplight,
traffic signal, traffic lamp; alarm clock: alarm, clock, wake-up clock; light bulb: lightbulb, bulb, lamp bulb; key:
golden key, house key, kee; bell: golden bell, church bell, jingle bell; hammer: mallet, hamer; scissors: scisors,
shears, pair of scissors, sissors; books: pile of books, textbooks, library; pencil: pensil, yellow pencil, pen;
camera: photo camera, digital camera, cammera; mobile phone: cellphone, cell phone, iphone, mobile; laptop: notebook
computer, macbook, lap top, pc; television: telly, tv set, televison; headphones: headphone, headset, earphones;
microphone: mic, mike, microfone, karaoke; trumpet: bugle, brass horn, trumpit; violin: fiddle, cello, viola, violen;
drum: snare drum, drums, drumm; die: game die, six-sided die; bullseye: dartboard, bull's eye, darts, archery target;
basketball: basket ball, basketbal; american football: gridiron ball, rugby ball, nfl ball; tennis ball: tennisball,
tennis; trophy: winner's cup, gold cup, prize cup, champion's cup, award; gem: gemstone, jewel, crystal, diamand,
brilliant; ring: diamond ring, wedding ring, engagement ring; sneaker: trainer, running shoes, trainers, sneakers,
shoe, sports shoe; top hat: tophat, magician's hat, hat, cylinder hat; glasses: spectacles, reading glasses, eye
glasses; t-shirt: tshirt, tee shirt, tee; dress: gown, frock; lock: closed lock, pad lock; anchor: ship's anchor,
ancor; bomb: explosive, bom, cartoon bomb; pumpkin: jack o'lantern, jack o lantern, halloween pumpkin, pumkin;
christmas tree: xmas tree, christmas fir, decorated tree; teddy bear: teddy, stuffed bear, toy bear, plush bear;
castle: fortress, palace, casle; goat: billy goat, goatt; sheep: ewe, lamb, woolly sheep, sheeps; sitting monkey:
whole monkey, monkey sitting; seashell: conch, sea shell, shell; caterpillar: inchworm, larva, catapillar; hatching
chick: chick hatching, chick in an egg, chick in its shell; chick facing forward: chick, baby chick, baby chicken,
yellow chick; bird: songbird, birdie, sparrow, blue bird; poodle: show dog, poodel; paw prints: paws, paw print,
pawprints; chipmunk: squirrel, chipmonk; scorpion: scorpian; turkey: turkey bird, thanksgiving turkey; deer: stag,
fawn, reindeer, doe; gorilla: silverback, gorila; lizard: gecko, iguana, salamander, lizzard; rhinoceros: rhino,
rhinocerous; shrimp: prawn; kangaroo: wallaby, kangeroo, roo; llama: alpaca, lama; hippo: hippopotomus, river horse;
raccoon: racoon, trash panda; lobster: lobstar, crawfish; microbe: germ, bacteria, virus, bacterium; mammoth: woolly
mammoth, mamoth; sloth: slothe; skunk: polecat, scunk; seal: sea lion, seal pup; potted plant: houseplant, pot plant,
plant, plant in a pot; log of wood: wood, log, wooden log, timber; lotus: water lily, lotus flower; burrito: burito,
wrap; chestnut: conker, nut; seedling: sprout, sapling, young plant; blossom: daisy, yellow flower, flower; autumn
leaves: fallen leaves, fall leaves, brown leaves, dead leaves; green apple: granny smith; meat on bone: meat, meat on
a bone, meat with a bone; chicken leg: chicken drumstick, poultry leg, drum stick; rice ball: onigiri; bowl of
noodles: noodles, noodle soup, ramen bowl; spaghetti: pasta, spagetti, spaghetti bolognese, plate of pasta; dango:
dango skewer, mochi; fried shrimp: tempura, fried prawn; bowl of ice cream: sundae, ice cream bowl, ice cream sundae;
candy: sweet, sweets, bonbon, wrapped candy; honey pot: honey, pot of honey, jar of honey, honeypot; shortcake:
strawberry cake, slice of cake, piece of cake, strawberry shortcake; cup of tea: tea, matcha, teacup, tea cup;
cocktail glass: cocktail, martini glass, dry martini; tropical drink: fruit cocktail, mai tai, summer drink; baby
bottle: milk bottle, feeding bottle, baby's bottle; bottle of champagne: champagne, champagne bottle, sparkling wine,
prosecco; cucumber: gherkin, pickle, cucumbar, zucchini; bacon: rashers, bacon strips, rasher of bacon; baguette:
french bread, french loaf, bagette; green salad: salad, bowl of salad, mixed salad; glass of milk: milk glass,
drinking milk; peanuts: peanut, groundnuts; dumpling: gyoza, potsticker, jiaozi; cup with a straw: soft drink, soda,
cola, drink, cup with straw; pie: pumpkin pie, apple pie, pastry; pretzel: pretsel, bretzel; steak: beef, beefsteak,
raw meat, cut of meat, stake; sandwich: sandwhich, toastie, sub sandwich, sanwich; mango: manggo; bagel: beigel,
bagle; garlic: clove of garlic, garlic bulb, garlick; onion: onoin, red onion; waffle: belgian waffle, wafle; ice
cube: ice, cube of ice, icecube; bubble tea: boba, boba tea, milk tea; blueberries: blueberry, bilberries, bluberries;
bell pepper: capsicum, sweet pepper; olive: olives, green olive; teapot: tea pot, kettle; fork and knife: cutlery,
knife and fork, silverware; police car: cop car, squad car, patrol car; taxi: cab, taxicab, yellow cab; blue car: suv,
jeep, recreational vehicle; delivery truck: truck, lorry, van, delivery van; police siren: siren, emergency light,
police light, police car light; red flag: triangular flag, flag; door: wooden door, doorway, dore; bathtub: bath, bath
tub, tub; toilet: loo, lavatory, wc, toilet bowl; couch and lamp: sofa, couch, settee, sofa and lamp; bed: double bed,
mattress; stop sign: stop, octagonal sign, stopsign; shopping cart: trolley, shopping trolley, grocery cart,
supermarket trolley; life buoy: lifebuoy, life ring, lifebelt, ring buoy, life preserver; shield: knight's shield,
sheild; oil drum: oil barrel, barrel, drum of oil; scooter: kick scooter, push scooter; motor scooter: vespa, moped;
canoe: kayak, rowing boat, canu; sled: sleigh, toboggan, sledge; skateboard: skate board, longboard, skatebord; full
moon with a face: full moon, moon face, smiling moon; ferris wheel: big wheel, ferriswheel, observation wheel; circus
tent: circus, big top, marquee, tent; desert island: tropical island, island, palm island; classical building: greek
temple, temple, museum, parthenon, bank; red lantern: paper lantern, chinese lantern, lantern; fountain: water
fountain, fountan; ribbon: hair bow, pink bow, pink ribbon, bow tie; backpack: rucksack, schoolbag, knapsack, bagpack;
graduation cap: mortarboard, graduation hat, academic cap, mortar board; military medal: war medal, army medal, medal
with ribbon; studio microphone: podcast microphone, recording microphone, radio microphone; admission tickets:
tickets, ticket, entry tickets; carousel horse: merry-go-round, carousel, merry go round; artist palette: paint
palette, palette, paints, painter's palette; clapper board: clapperboard, movie clapper, film clapper, film slate;
game controller: gamepad, joypad, controller, game pad, playstation controller; billiard ball: 8 ball, pool ball,
snooker ball, 8-ball; bowling: bowling ball, bowling pins, ten-pin bowling; musical note: music note, music, note,
quaver; saxophone: sax, saxaphone; piano keys: piano, keyboard, musical keyboard; volleyball: volley ball, beach
volleyball; ping pong paddle: table tennis, ping pong, table tennis bat, table tennis racket; bow and arrow: archery
bow, archery, longbow; watch: wrist watch, timepiece; hourglass: sand timer, egg timer, sandglass; telephone:
landline, red telephone, telefone, rotary phone; gear: cog, cogwheel, gearwheel, settings; crossed swords: swords, two
swords, sword fight, sword; gas pump: petrol pump, gas station, petrol station, filling station; envelope: letter,
mail, email; sparkles: glitter, sparkle, shining stars, twinkles; red cross mark: x mark, red x, letter x; red
question mark: questionmark, question; red exclamation mark: exclamation point, exclamation, exclamationmark; eyes:
pair of eyes, eyeballs, eye; clapping hands: applause, clapping, clap; straw hat: sun hat, ladies hat, sunhat;
necktie: shirt with a tie, neck tie; jeans: trousers, pants, denims, blue jeans; handbag: purse, hand bag, ladies bag;
high heel: high heels, high-heeled shoe, red shoe; boot: ladies boot, woman's boot, leather boot; space invader: pixel
monster, arcade alien, pixel alien; lipstick: lip stick, rouge, makeup; syringe: injection, vaccine, needle; pill:
tablet, capsule, medicine, medication; kiss mark: kiss, lipstick kiss, lip print; love letter: letter with a heart,
valentine letter, envelope with a heart; bouquet of flowers: flowers, bouquet, bunch of flowers, flower bouquet; heart
with an arrow: cupid's arrow, heart and arrow, arrow through a heart; green heart: heart in green; yellow heart: heart
in yellow; purple heart: heart in purple; explosion: blast, boom, bang; money bag: bag of money, moneybag, cash, sack
of money; floppy disk: diskette, floppy, floppy disc, save icon; compact disc: dvd, cd-rom, optical disc; calendar:
calender, almanac; pushpin: thumbtack, push pin, drawing pin, pin; paperclip: paper clip, clip; ruler: straightedge,
measuring stick, straight ruler; red book: closed book, book, textbook, novel; scroll: parchment, papyrus, old scroll;
satellite antenna: satellite dish, radar, dish antenna; megaphone: bullhorn, mega phone, cheering megaphone; package:
parcel, carton, box; radio: radio set, transistor radio; battery: aa battery, full battery, batterie; electric plug:
plug, power plug, mains plug; magnifying glass: magnifier, loupe, search icon, magnifing glass; kitchen knife: knife,
cook's knife, chef's knife; microscope: microscop, lab microscope; telescope: teliscope, spyglass; crystal ball:
fortune teller's ball, magic ball, fortune ball; candle: lit candle, candel, wax candle; sunglasses: shades, dark
glasses, sun glasses; black heart: heart in black; desktop computer: computer monitor, monitor, pc monitor, desktop
pc; wastebasket: trash can, bin, rubbish bin, dustbin, trash, garbage can; old key: antique key, iron key, rusty key;
dagger: short sword, stiletto; moai statue: easter island head, moai, stone head, easter island statue; gold medal:
first place medal, medal, winner's medal; boxing glove: boxing, boxing gloves, red glove; bone: dog bone, bones;
tooth: molar, toothe; brain: human brain, brian; baseball cap: cap, billed cap, peaked cap; scarf: woolen scarf,
shawl, winter scarf; gloves: mittens, glove, winter gloves; socks: sock, pair of socks, stockings; puzzle piece:
jigsaw piece, puzzle, jigsaw, jigsaw puzzle; compass: navigation compass, compas; bricks: brick wall, brick, pile of
bricks; magnet: horseshoe magnet, magnit; luggage: suitcase, baggage, travel bag, suit case; ball of yarn: yarn, wool,
ball of wool, yarn ball; broom: broomstick, besom, witch's broom; kite: flying kite, dragon kite; parachute:
parachutist, skydiver, parashute; chair: seat, wooden chair, kitchen chair; axe: hatchet, ax, wood axe; coin: gold
coin, coins, penny; ladder: wooden ladder, step ladder, stepladder; bucket: pail, buckit; orange heart: heart in
orange; grinning face with sweat: nervous face, sweating face, sweaty face, nervous smiley; angel face: angel, halo
face, angelic face, smiley with a halo; winking face: wink, winking smiley, winky face; face licking its lips: yummy
face, delicious face, tasty face; face blowing a kiss: kissing face, kissing smiley, kissy face; winking face with
tongue out: crazy face, silly face, cheeky face, tongue out; sobbing face: bawling face, weeping face, sobbing,
sobbing smiley; surprised face: astonished face, amazed face, open mouth face; face with a medical mask: masked face,
face mask, mask, sick face with a mask; face with dollar eyes: money face, rich face, dollar eyes, greedy face; nerd
face: geek, nerd, geeky face; cowboy face: cowboy, cowboy hat face, cowgirl, sheriff; green sick face: sick face,
queasy face, ill face, green face; exploding head: mind blown, blown mind, head explosion; partying face: party face,
party smiley, birthday face, celebration; hot red face: hot face, sweating red face, red hot face; freezing face: blue
face, frozen face, icy face, shivering face; face with a monocle: monocle, monocle face, gentleman with a monocle;
see-no-evil monkey: monkey covering its eyes, shy monkey, hiding monkey; raised fist: fist, clenched fist, power fist;
victory hand: v sign, victory sign, two fingers, peace; ear: human ear, earlobe; nose: human nose, snout; mouth: mouth
with lips, red lips; thumbs down: thumb down, dislike, thumbsdown; rock on hand: horns sign, rock sign, devil horns
hand, metal sign; flexed biceps: muscle, muscles, bicep, strength, flexed arm; santa claus: santa, father christmas,
saint nicholas, st nicholas; wizard: sorcerer, magician, merlin, wizzard; fairy: pixie, faerie, winged fairy; mermaid:
merman, siren of the sea, little mermaid; skull and crossbones: skull, pirate skull, death's head, jolly roger;
recycling symbol: recycle, recycling, recycle symbol, recycling sign; check mark button: tick, green tick, checkmark,
check
"""
# Words for any of several, by their usual names.
KINDS_OF = """
animal, pet, mammal: cat, dog, rabbit, hamster, horse, cow, pig, sheep, goat, fox, bear, lion, tiger, elephant,
giraffe, zebra, panda, koala, wolf, deer; fruit, piece of fruit: red apple, banana, pear, orange fruit, strawberry,
cherries, grapes, pineapple, peach, mango, kiwi, lemon, watermelon; vegetable, veggie, veg: carrot, broccoli, tomato,
potato, cucumber, onion, eggplant, bell pepper, ear of corn; dessert, pudding, sweet treat: birthday cake, cupcake,
donut, shortcake, ice cream cone, pie; fast food, junk food, snack: hamburger, slice of pizza, french fries, hot dog,
taco, sandwich; musical instrument, instrument: guitar, violin, trumpet, saxophone, drum, piano keys; tool: hammer,
scissors, axe, ladder, ruler; toy: teddy bear, kite, balloon, puzzle piece; footwear: sneaker, boot, high heel;
clothing, garment, clothes: t-shirt, dress, jeans, scarf, socks, gloves; sea creature, sea animal: octopus, crab,
dolphin, whale, shark, fish, squid, turtle; reptile: snake, lizard, crocodile, turtle; emoticon, face emoji: grinning
face, laughing face, winking face, surprised face, nerd face; vegetation: tree, palm tree, evergreen tree; insect,
creepy-crawly: ladybug, ant, spider, bee, caterpillar; transport: bus, red car, taxi, steam train, motorcycle, bicycle
"""
# Emoji that other programs write with a variation selector, U+FE0F.
SELECTED = "❤☀☂✈🌶❄☁🕷✏✂🏍🛋🛏🛡🛢🏝🏛🎖🎙🎟☎⚙⚔✉🕯🕶🖥🗑🗝🗡🐿✌☠♻⚡⭐☕⚽⛄⛵❌❓❗✅⌚⌛⛲⛽⚓✨✊"
SHARE_KEPT = 0.25  # of captions that stay as they are
SHARE_EMOJI, SHARE_KINDS = 0.35, 0.1  # of the other words: emoji, and words for several; the rest are other names
SHARE_UNCOUNTED = 0.3  # of "two cats" and "three cats", which lose their number
SEVERAL = {2: ("", "some ", "a couple of ", "a few "), 3: ("", "some ", "several ", "a few ")}


def _table(text: str) -> Iterator[tuple[list[str], list[str]]]:
    for line in text.replace("\n", " ").split(";"):
        yield tuple([word.strip() for word in side.split(",")] for side in line.split(":"))  # type: ignore[misc]


@functools.cache
def other_names() -> dict[str, tuple[str, ...]]:
    """The other names of emoji by their usual names."""
    return {usual: tuple(names) for [usual], names in _table(OTHER_NAMES)}


@functools.cache
def kinds_of() -> dict[str, tuple[str, ...]]:
    """The words for any of several, by the usual name of each of these."""
    kinds: dict[str, tuple[str, ...]] = {}
    for words, members in _table(KINDS_OF):
        for usual in members:
            kinds[usual] = (*kinds.get(usual, ()), *words)
    return kinds


@functools.cache
def _names() -> tuple[re.Pattern[str], dict[str, tuple[str, str]]]:
    """A pattern of a name with what is before it; and name, or its plural -> usual name, emoji."""
    names: dict[str, tuple[str, str]] = {}
    for entry in VOCABULARY:
        if entry.names[0] in other_names():
            for name in entry.names:
                names[name] = entry.names[0], entry.character
                if several := plural(name):
                    names.setdefault(several, (entry.names[0], entry.character))
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    number = r"two |2 |a pair of |three |3 "
    return re.compile(
        rf"(?<![\w-])(?:(?P<number>{number})|(?P<article>an? ))?(?P<name>{longest_first})(?![\w-])"
    ), names


def reworded(caption: str, rng: np.random.Generator, kept: float = SHARE_KEPT) -> str:
    """A caption with other words for what it shows, at random: "a cat and a dog" -> "a kitten and a 🐶".

    A share of `kept` captions stays as it is.
    """

    def any_of(choices: tuple[str, ...]) -> str:
        return choices[int(rng.integers(len(choices)))]

    def other(match: re.Match[str]) -> str:
        usual, character = names[match["name"]]
        number, choice = match["number"], rng.random()
        count = 0 if number is None else 3 if number.startswith(("3", "three")) else 2
        if choice < SHARE_EMOJI:
            word = character + "\ufe0f" * (character in SELECTED and rng.random() < 0.5)
            if count and rng.random() < 0.6:
                return any_of(("", " ")).join([word] * count)
            return (number or (match["article"] or "" if rng.random() < 0.3 else "")) + word
        name = any_of(kinds_of().get(usual, other_names()[usual]) if choice > 1 - SHARE_KINDS else other_names()[usual])
        if count:
            if rng.random() < SHARE_UNCOUNTED:
                number = any_of(SEVERAL[count])
                name = any_of((name, match["name"])) if match["name"] == plural(usual) else name
            return f"{number}{name if name == match['name'] else plural(name) or name}"
        return with_article(name) if match["article"] else name

    pattern, names = _names()
    return caption if rng.random() < kept else pattern.sub(other, caption)


# What captions say besides names.
TEMPLATES: tuple[Sequence[str], ...] = (
    *(render_emoji.PLAIN, render_emoji.COLOURED, *render_emoji.BESIDE.values(), *render_emoji.STACKED.values()),
    *(*render_emoji.COUNTED.values(), *render_emoji.SIZE_WORDS.values(), render_emoji.GRADIENTS),
    *(render_emoji.GRADIENTS_ACROSS, render_emoji.GRADIENTS_FREE, render_emoji.GRADIENTS_ACROSS_FREE),
    *(*render_emoji.STYLED.values(), render_emoji.GROUNDS_PLAIN, render_emoji.GROUNDS, render_emoji.GROUNDS_FREE),
    *(render_emoji.BEFORE_SEVERAL, render_emoji.AFTER_SEVERAL, render_emoji.BEFORE, render_emoji.AFTER),
    *(render_emoji.GROUND, render_emoji.ON, render_emoji.FREE, render_emoji.WORDS, *SEVERAL.values()),
)


def word_list(is_learned: Callable[[str], bool]) -> str:
    """What a text encoder knows, of which is_learned tells whether it does a name or a word: a line for each emoji."""

    def learned(names: Sequence[str]) -> str:
        return ", ".join(name for name in dict.fromkeys(names) if is_learned(name))

    lines = []
    for entry in VOCABULARY:
        if entry.names[0] in other_names() and is_learned(entry.names[0]):
            is_taught = is_learned(entry.character)  # with its other names
            names = [*entry.names, *(other_names()[entry.names[0]] if is_taught else ())]
            plurals = [several for name in names if (several := plural(name))]
            lines.append(f"{learned([entry.character])} {learned([*names, *plurals])}".strip())
    spoken = re.sub(r"\{\w+\}", " ", " ".join(text for texts in TEMPLATES for text in texts))
    if is_learned(VOCABULARY[0].character):
        lines += [f"any of several: {learned([word for words, _ in _table(KINDS_OF) for word in words])}"]
    lines += [f"colours: {learned([*COLOURS])}", f"besides: {learned(sorted(re.findall('[a-z]+|[0-9]', spoken)))}"]
    return "\n".join(lines)

"""Define the words and sentence templates of the bundled model's stories. This is data only.

A template may hold choices, ``{a|b|c}`` (they nest, and one may be empty), and slots:

``<name> <animal> <place> <object>``   the four words of the prompt
``<a_animal> <a_object>``              the same with "a" or "an"
``<in_place>``                         the place with its own preposition: "on the hill"
``<she> <her> <hers> <him> <herself>`` the hero's pronouns (``her`` is the possessive)
``<a_helper> <the_helper>``            a figure who helps: first and later mentions

No template may contain a word of the slot lists. `tiny_stories.check_grammar` checks this. Helpers
never get a pronoun, so that "she" and "he" always mean the hero.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


GIRLS = _words(
    "Mia Lily Ada Nora Ruby Clara Elsa Ivy Luna Rosa Tilly Greta Hazel Wanda Olive Zoe Poppy "
    "Flora Daisy Bella Freya Molly Penny Stella"
)
BOYS = _words(
    "Otto Max Leo Hugo Felix Oscar Theo Jasper Finn Bruno Milo Noah Ravi Casper Toby Emil Arlo "
    "Gus Rufus Basil Edgar Ned Kofi Sami"
)

#: Made-up names, which teach the model to take over any name, are two or three of these.
SYLLABLES = _words(
    "an be ka li mo ra to vi zu el na so ti wa yo pi ru sha da len mi or pel quin sti tor ul ven"
)

#: Each animal with the sentences that only fit it.
ANIMALS = {
    "fox": ("<name> had a long red tail.", "<her> red tail {swished|waved} in the air."),
    "owl": ("<name> had big round eyes.", "<she> could see well in the dark."),
    "bear": ("<name> was big and brown and very gentle.", "<she> dreamed of honey all day."),
    "rabbit": ("<name> had long soft ears.", "<her> nose {twitched|wiggled} with joy."),
    "mouse": ("<name> was so small that <she> slept in a slipper.", "<she> nibbled some cheese."),
    "hedgehog": ("<name> was covered in tiny spikes.", "<she> curled up into a prickly ball."),
    "squirrel": ("<name> had a bushy tail.", "<she> could climb any tree."),
    "badger": ("<name> had a striped face.", "<she> was very good at digging."),
    "otter": ("<name> could float on <her> back.", "<she> shook the water from <her> fur."),
    "beaver": ("<name> had strong front teeth.", "<she> could build almost anything from wood."),
    "frog": ("<name> was as green as grass.", "<she> could jump higher than a fence."),
    "turtle": (
        "<name> was slow, but <she> never gave up.",
        "<she> took one slow step after another.",
    ),
    "duck": ("<name> had yellow feet.", "<she> left wet footprints everywhere."),
    "goose": ("<name> had a long white neck.", "<she> honked with delight."),
    "cat": ("<name> walked on soft paws.", "<she> licked <her> whiskers and purred."),
    "dog": ("<name> wagged <her> tail at everyone.", "<she> barked with joy."),
    "pony": ("<name> had a golden mane.", "<she> trotted along on four quick hooves."),
    "goat": ("<name> had a funny little beard.", "<she> nibbled at a thistle."),
    "lamb": ("<name> was as white as milk.", "<her> wool was curly and warm."),
    "deer": ("<name> had long thin legs.", "<she> moved without a sound."),
    "wolf": ("<name> had a thick grey coat.", "<she> howled a short song to the moon."),
    "penguin": ("<name> looked as if <she> wore a black coat.", "<she> waddled from side to side."),
    "panda": ("<name> was black and white and round.", "<she> chewed on a piece of bamboo."),
    "tiger": ("<name> had orange and black stripes.", "<she> was proud of <her> stripes."),
    "lion": ("<name> had a roar like thunder.", "<she> gave a small roar for fun."),
    "monkey": ("<name> could hang by <her> tail.", "<she> was fond of bananas."),
    "elephant": ("<name> had a long grey trunk.", "<she> never forgot a kind word."),
    "swan": ("<name> had snow white wings.", "<she> held <her> head up high."),
}

#: Each place with its preposition and the sentences that only fit it.
PLACES = {
    "forest": (
        "in",
        "The tall trees whispered in the wind.",
        "The air smelled of pine and moss.",
        "Sunlight fell through the leaves.",
    ),
    "harbour": (
        "at",
        "The sails flapped above the salty water.",
        "Gulls sat on the old ropes.",
        "Ships rocked on the tide.",
    ),
    "mill": (
        "at",
        "The big wheel turned round and round.",
        "White flour covered every step.",
        "Sacks of grain stood in a row.",
    ),
    "meadow": (
        "in",
        "The grass was full of wild flowers.",
        "Bees hummed from flower to flower.",
        "Butterflies rested on the clover.",
    ),
    "river": (
        "by",
        "The water rushed over smooth stones.",
        "Silver fish jumped in the current.",
        "Willows dipped their branches into the water.",
    ),
    "lake": (
        "by",
        "The still water looked like glass.",
        "Reeds grew along the quiet shore.",
        "Mist lay over the water.",
    ),
    "hill": (
        "on",
        "From the top one could see for miles.",
        "The path up was steep and sunny.",
        "Sheep grazed on the slope.",
    ),
    "castle": (
        "in",
        "Old flags hung from the stone walls.",
        "The great hall was full of echoes.",
        "A knight's armour stood in the corner.",
    ),
    "market": (
        "at",
        "The stalls were full of apples and bread.",
        "People called out their prices.",
        "A fiddler played between the stalls.",
    ),
    "garden": (
        "in",
        "Roses climbed over the wooden gate.",
        "Rows of peas grew in the sun.",
        "The soil was dark and soft.",
    ),
    "library": (
        "in",
        "Dusty shelves reached up to the ceiling.",
        "Everyone spoke in whispers.",
        "A ladder leaned against the shelves.",
    ),
    "bakery": (
        "in",
        "The smell of fresh rolls was everywhere.",
        "The oven glowed in the corner.",
        "Rows of golden loaves were cooling.",
    ),
    "bridge": (
        "on",
        "The old planks creaked at every step.",
        "Far below, the stream sang.",
        "Carts rumbled from one bank to the other.",
    ),
    "island": (
        "on",
        "Waves rolled in from every side.",
        "Palm trees stood in the sand.",
        "No ship had landed for years.",
    ),
    "village": (
        "in",
        "Smoke rose from every chimney.",
        "The narrow streets were full of chatter.",
        "Washing hung between the houses.",
    ),
    "cave": (
        "in",
        "Drops of water fell from the dark rock.",
        "It was cool and dim inside.",
        "Every whisper came back twice.",
    ),
    "beach": (
        "on",
        "The sand was warm and golden.",
        "Small waves washed over the sand.",
        "Seaweed lay along the water's edge.",
    ),
    "orchard": (
        "in",
        "Ripe pears hung from every branch.",
        "Fallen plums lay in the grass.",
        "Ladders leaned against the trunks.",
    ),
    "farm": (
        "on",
        "Hay was piled up beside the cart.",
        "A tractor rattled along the lane.",
        "The rooster crowed on the roof.",
    ),
    "lighthouse": (
        "at",
        "The great lamp swept over the sea.",
        "The stairs went up in a spiral.",
        "The waves crashed against the rocks.",
    ),
    "station": (
        "at",
        "A train puffed along the platform.",
        "The rails shone in the light.",
        "Travellers hurried with their bags.",
    ),
    "school": (
        "at",
        "Chalk dust danced in the air.",
        "Small chairs stood in neat rows.",
        "Drawings covered the walls.",
    ),
    "valley": (
        "in",
        "Mountains stood on both sides.",
        "Every shout came back as an echo.",
        "A stream wound between the fields.",
    ),
    "tower": (
        "in",
        "A hundred steps led to the top.",
        "Pigeons nested under the high roof.",
        "The wind howled around the windows.",
    ),
    "park": (
        "in",
        "Children played around the fountain.",
        "The benches were painted green.",
        "Old men played chess in the shade.",
    ),
    "barn": (
        "in",
        "Swallows nested under the beams.",
        "The floor was covered with straw.",
        "It smelled of hay and old wood.",
    ),
}

#: Each object with the sentences that only fit it.
OBJECTS = {
    "bell": ("It rang with a clear sound.", "Its ringing could be heard far away."),
    "lantern": ("It gave a warm yellow light.", "It glowed like a tiny sun."),
    "kite": ("It danced high above the roofs.", "Its long tail fluttered in the wind."),
    "key": ("It was cold and heavy and a bit rusty.", "It fitted no door that anyone knew."),
    "drum": ("It went boom, boom, boom.", "It was as loud as a storm."),
    "book": ("Its pages were full of old tales.", "It had a picture on every page."),
    "map": ("It showed every path and every stream.", "A red cross was drawn in one corner."),
    "button": ("It was round and had four holes.", "It had come off a sailor's coat."),
    "shell": ("One could hear the sea in it.", "It was pink inside."),
    "ribbon": ("It was made of blue silk.", "It was as long as a summer day."),
    "whistle": ("It made a sharp high note.", "Three short notes meant help."),
    "compass": ("Its needle always pointed north.", "Its needle trembled and turned."),
    "basket": ("It was woven from willow.", "It was full of sweet cherries."),
    "umbrella": ("It kept off the heaviest rain.", "It opened with a loud snap."),
    "mirror": ("It showed the whole sky.", "It sparkled like ice."),
    "teapot": ("It was painted with tiny roses.", "Steam rose from its spout."),
    "feather": ("It weighed almost nothing.", "It was white with a blue tip."),
    "marble": ("It rolled and rolled and would not stop.", "It had a swirl of green inside."),
    "candle": ("Its small flame flickered.", "It smelled of sweet wax."),
    "flute": ("Its notes were soft and silvery.", "It was carved from pale wood."),
    "scarf": ("It was knitted from warm red wool.", "It was soft around the neck."),
    "hat": ("It was a bit too large.", "It had a wide brim."),
    "coin": ("It was stamped with a crown.", "It clinked when it fell."),
    "blanket": ("It was thick and cosy.", "It was sewn from a hundred patches."),
    "acorn": ("A mighty oak slept inside it.", "It wore a tiny brown cap."),
    "clock": ("It went tick, tock, tick, tock.", "It struck twelve at noon."),
    "telescope": ("It made the stars look close.", "It was made of brass and glass."),
    "violin": ("Its four strings hummed.", "Its song could make anyone cry."),
}

#: Words that occur in some training stories and in no held-out prompt, and that have no sentences
#: of their own. They teach the model to take over any word of the prompt.
MORE_GIRLS = _words(
    "Ella Anna Emma Sara Lucy Alice Eva Nina Maya Sophie Julia Hannah Laura Marie Lena Priya Aisha "
    "Fatima Yuki Mary Grace Chloe"
)
MORE_BOYS = _words(
    "Tom Sam Ben Jack Tim Adam Peter Paul Henry Oliver Lucas Liam Ethan Jonas Karl Anton Ivan Omar "
    "Diego Marco George Fred"
)
MORE_ANIMALS = _words(
    "donkey hamster parrot camel zebra giraffe seal snail crab eagle horse kitten puppy whale "
    "dolphin "
    "raven dragon dinosaur pig cow hen wombat koala kangaroo ant snake rat sheepdog lizard"
)
MORE_PLACES = {
    "desert": "in",
    "jungle": "in",
    "mountain": "on",
    "museum": "at",
    "theatre": "in",
    "temple": "in",
    "canal": "by",
    "pond": "by",
    "volcano": "on",
    "swamp": "in",
    "zoo": "at",
    "palace": "in",
    "attic": "in",
    "kitchen": "in",
    "cellar": "in",
    "bay": "by",
}
MORE_OBJECTS = _words(
    "stool sword pen doll chair boat bike trumpet guitar necklace pencil jar spade wand gem "
    "apple pumpkin balloon shoe puzzle toy bracelet camera carpet egg axe pillowcase rocket sledge"
)

#: Adjectives that a request may give to the object or the place.
OBJECT_LOOKS = _words(
    "silver golden old red little blue green wooden tiny white small big magic lost yellow shiny "
    "broken precious black pretty"
)
PLACE_LOOKS = _words("old little big quiet green dark sunny empty hidden small white great lonely")

#: Helpers: the adjective and the noun of a first mention; later ones leave the adjective out.
HELPERS = (
    "an old|sailor",
    "a friendly|baker",
    "a tired|postman",
    "a cheerful|gardener",
    "a wise|shepherd",
    "a busy|tailor",
    "a young|painter",
    "a kind|nurse",
    "a tall|fisherman",
    "a merry|piper",
    "a quiet|miller",
    "a clever|teacher",
    "a jolly|cook",
    "an old|carpenter",
    "a small|girl",
    "a curious|boy",
    "a gentle|giant",
    "a wandering|singer",
    "a polite|ghost",
    "a sleepy|guard",
)

TRAIT = (
    "{small|young|kind|clever|quiet|brave|cheerful|curious|shy|merry|gentle|polite|lively|dreamy|"
    "thoughtful|patient|stubborn|playful}"
)
WHEN = (
    "{one|early one|late one} "
    "{sunny|rainy|windy|foggy|frosty|cloudy|golden|cold|warm|bright|quiet} "
    "{morning|afternoon|evening}"
)

OPENINGS = (
    "{Listen|Come closer}, and I will tell you about <name>, <a_animal> {from the <place>|whom "
    "everybody knew <in_place>}.",
    "{Shh|Hush}! <in_place>, <name> the <animal> was {still asleep|up before the sun|making "
    "plans}.",
    "Once there was <a_animal> who was {never|always} {afraid|in a hurry}. <her> name was <name>, "
    "and <her> home was the <place>.",
    "It {all began|began} <in_place>, where <name> the <animal> {lived|worked|spent every summer}.",
    "<name> the <animal> had {lived|played} <in_place> {since spring|for many years|all <her> "
    "life}.",
    f"Once upon a time, a {TRAIT} <animal> {{named|called}} <name> lived <in_place>.",
    f"There once was a {TRAIT} <animal> called <name>, and <she> lived <in_place>.",
    "Once upon a time, there was <a_animal> {named|called} <name> who lived <in_place>.",
    "Long ago, {before the roads were built|when the world was young|when stars still talked}, "
    "<name> the <animal> lived <in_place>.",
    "Everyone <in_place> knew <name> the <animal>.",
    "Nobody <in_place> was as {curious|cheerful|stubborn|gentle} as <name> the <animal>.",
    "This is the {story|tale} of <name>, <a_animal> who lived <in_place>.",
    f"{WHEN}, <name> the <animal> {{walked|hurried|wandered|set out}} to the <place>.",
    f"{WHEN}, <a_animal> {{named|called}} <name> {{sat|stood|waited|rested}} <in_place>.",
    '{"What a lovely day!"|"What a strange day!"|"Today is my day!"} said <name> the <animal>, '
    "and <she> {ran|hurried|set off} to the <place>.",
    "In a {small|crooked|cosy|tidy} house {near|beside|behind} the <place> lived <name> the "
    "<animal>.",
    "Not {far from|so far from} the <place>, there lived a "
    f"{TRAIT} <animal> {{named|called}} <name>.",
    "<name> was a "
    + TRAIT
    + " <animal> who {loved|knew|visited} the <place> more than anyone else.",
    "<name> was <a_animal>, and the <place> was <her> favourite spot in the world.",
    "Every {summer|winter|autumn|spring}, <name> the <animal> {came|went|travelled} to the "
    "<place>.",
    "High above the clouds the {moon|sun} was watching <name> the <animal> <in_place>.",
    "Have you heard of <name> the <animal> {from|who lived near} the <place>?",
)

WEATHER = (
    "{The sun was shining|The sky was grey|The sky was clear and blue|Soft rain was falling|"
    "Snow lay on the ground|A cold wind blew|Thick fog hung in the air|White clouds sailed by}.",
    "{The wind|The rain} {sang a low song|was getting stronger|had stopped at last}.",
    "{Far away|In the distance}, {thunder rumbled|somebody was singing|a rainbow appeared}.",
    "The {first|last} {stars|leaves|snowflakes} {of the year|of the season} {danced|glittered}.",
    "It was {so quiet|so still} that {one could hear the grass grow|time seemed to stop}.",
    "The air {smelled of|was full of} {rain|smoke|summer|snow|adventure}.",
)

MOOD = (
    "<name> felt {happy|lonely|excited|restless|calm|hopeful|a little bored|full of hope} that "
    "day.",
    "<she> hummed a {little|quiet|funny|merry} {song|tune} as <she> went.",
    "<her> heart {beat fast|was light|felt warm|was heavy}.",
    "<she> {smiled|laughed|sighed|yawned} and {looked around|sat down|closed <her> eyes}.",
    "<name> had {hardly slept|eaten a big breakfast|waited for this day all year}.",
    "{Nothing|No cloud|No trouble} could {spoil <her> mood|stop <him> today|scare <him> now}.",
    "<she> liked {long walks|warm soup|old songs|quiet corners|big puddles|new friends} "
    "{very much|more than anything|best of all}.",
)

WORRY = (
    "<her> heart {sank|was heavy|ached}.",
    "A {big|hot|single} tear {rolled down <her> cheek|fell into the dust}.",
    "<name> felt {lost|very small|cold all over|sick with worry|terribly alone}.",
    '"{This cannot be|What shall I do now|Why me}?" <she> {whispered|wondered|thought}.',
    "{Never before|Seldom} had <she> been so {sad|worried|upset}.",
)

#: Sentences that may be dropped in anywhere after the object is known.
ASIDES = (
    "{Now and then|From time to time|Again and again}, <name> {looked at|touched|thought of} the "
    "<object>.",
    '"{I am not afraid|I can do this|I will not give up}," <name> {told|promised} <herself>.',
    "The <object> {was worth it|meant a lot to <him>|seemed to wait for <him>}.",
    "Every <animal> knows {how to wait|when to be brave}.",
    '"{Step by step|Slowly, slowly|One thing at a time}," <name> {murmured|whispered}.',
    "{Time passed|The hours passed|The day went by} {slowly|quickly}.",
    "For a {moment|while}, {nothing happened|all was still|nobody spoke}.",
)

#: Small episodes on the way: beats that belong together.
INTERLUDES = (
    (
        (
            "That night, <name> dreamed of {a giant made of snow|a ship with silver sails|a city "
            "under the sea|a wizard who was afraid of thunder}.",
        ),
        (
            "In the dream, {somebody called <her> name|everything was upside down|the stars could "
            "talk|nobody was ever late}.",
        ),
        ("When <she> woke up, {the sun was already high|<she> felt better|<her> mind was clear}.",),
    ),
    (
        (
            "First <she> {ate|had} {a slice of bread|some warm soup|three plums|a piece of pie|a "
            "honey bun}.",
        ),
        (
            "An empty belly {makes no plans|is a bad teacher}, as <her> {grandfather|mother} "
            "used to "
            "say.",
            '"{That was good|Now I can think again|Much better}," <she> {said|murmured}.',
        ),
    ),
    (
        ("To pass the time, <name> thought of {a riddle|an old riddle}.",),
        (
            "What has a neck but no head? A bottle!",
            "What gets wetter the more it dries? A towel!",
            "What has teeth but cannot bite? A comb!",
            "What goes up but never comes down? Your age!",
            "What is full of holes but still holds water? A sponge!",
        ),
        ("<she> {laughed|giggled} {out loud|to <herself>|until <her> belly hurt}.",),
    ),
    (
        ("<she> {sang|began to sing} {to keep up <her> spirits|against the silence}.",),
        (
            '"One step, two steps, over the stone: nobody who sings is ever alone!"',
            '"Left foot, right foot, never too fast: all the long roads come home at last!"',
            '"Wind in the tree tops, sun on the wall: big things begin as something small!"',
            '"Up in the morning, out in the dew: somewhere a good thing is waiting for you!"',
        ),
    ),
    (
        ("{A fallen tree|A deep puddle|A high wall|A thorny hedge} {blocked the way|lay ahead}.",),
        (
            "<name> {jumped over it|climbed across|went all the way around} and {tore <her> "
            "sleeve|got muddy feet|laughed about it}.",
            '"{One more time|Here we go}," <she> {said|panted}, and {on the third try|with a run} '
            "<she> was on the other side.",
        ),
    ),
    (
        ("For a while <she> lay in the {grass|sun|shade} and watched the clouds.",),
        (
            "One looked like {a wizard|a slipper|a sleeping giant}, {another like a spoon|the "
            "next like "
            "a cake|the others like wool}.",
        ),
    ),
    (
        ("<she> {remembered|thought of} what <her> {grandmother|aunt|teacher} used to say.",),
        (
            '"{Ask twice, cry once|Slow feet also arrive|Look first, then leap|Every night ends in '
            'a morning|Who shares a loaf has two friends}."',
        ),
    ),
    (
        (
            "{Then|After that} <she> counted {to ten|to twenty|to a hundred} {very "
            "slowly|backwards}.",
        ),
        ("It {always helped|helped a little|did not help at all, but it was fun}.",),
    ),
)

#: Plots. A beat is a tuple of templates of which one is taken. A string stands for a sentence:
#: "place", "animal" and "object" for one that fits that word only; "weather", "mood" and "aside"
#: for one of these lists. "worry" comes after things went wrong, and "interlude" is a small
#: episode. A leading "?" makes any of them optional.
PLOTS = {
    "lost": (
        "?weather",
        (
            "<she> had <a_object> that <she> {loved|treasured|kept close} {dearly|above all "
            "things|day "
            "and night}.",
            "<her> {dearest|greatest|only} treasure was {a small|an old|a little} <object>.",
            "<her> {grandmother|uncle|mother|aunt} had given <him> <a_object> {long ago|last "
            "year|as a "
            "present}.",
            "Wherever <she> went, <she> {carried|took along} <a_object>.",
        ),
        "?object",
        "?animal",
        (
            "But {one day|that day|one night}, the <object> was {gone|missing|nowhere to be seen}.",
            "Then {something terrible|a sad thing} happened: <she> lost the <object> "
            "{<in_place>|on the way home|in the tall grass}.",
            "{When <she> woke up|When <she> came home|After lunch}, <she> {saw|noticed} that the "
            "<object> was {gone|missing}.",
            '"{Where is|Who took|What happened to} my <object>?" {cried|asked} <name> {suddenly|in '
            "alarm|with big eyes}.",
        ),
        "?worry",
        (
            "<she> looked {under every stone|behind every door|in every corner|here and there}, "
            "but "
            "{found nothing|it was not there|there was no trace of it}.",
            "<she> searched {all day|until it was dark|for hours}, {but in vain|without any luck}.",
            "<she> {asked everyone|knocked at every door}, but nobody had seen it.",
            "<she> turned back and {followed <her> own footprints|looked at every single step}.",
        ),
        "?place",
        "?interlude",
        (
            "Then <a_helper> {came by|stopped beside <him>|sat down next to <him>}.",
            "{On the way|After a while}, <she> met <a_helper>.",
            "At last, <a_helper> heard <him> {crying|calling|sigh}.",
        ),
        (
            '"{Why are you so sad|What is the matter|What have you lost}?" asked <the_helper>.',
            '"{Do not cry|Do not worry|Cheer up}," said <the_helper>, "{we will look together|two '
            'can search better than one|I know where lost things go}."',
            '"{I lost|I cannot find} my <object>," said <name>, and <the_helper> {nodded|listened '
            "kindly|wanted to help}.",
        ),
        "?aside",
        (
            "Together they {went|walked|hurried} {back|once more} to the <place>.",
            "<the_helper> {pointed|led <him>} {to the <place>|to a hidden spot near the <place>}.",
            "They {looked again|tried once more}, this time {more slowly|with open eyes}.",
        ),
        (
            "And there it was: the <object> {lay|was waiting} {in the grass|between two "
            "stones|under "
            "a leaf|in a dry corner}.",
            "Suddenly, <name> {saw|spotted} something {shining|familiar}, and it was the <object>.",
            '"{Look|Here it is|I see it}!" {cried|shouted} <the_helper>, and <name> {picked '
            "up|hugged} the <object>.",
        ),
    ),
    "found": (
        "?place",
        "?mood",
        (
            "{There|On that day|Between two stones|Under an old bench}, <she> {found|discovered} "
            "<a_object>.",
            "<she> {nearly fell over|almost stepped on} <a_object> that lay in the "
            "{grass|dust|way}.",
            "Something {glittered|was hidden} {in the grass|behind a wall}: it was <a_object>.",
            '"What is this?" {asked|wondered} <name>, and <she> {picked up|lifted} <a_object>.',
        ),
        "?object",
        (
            '"{Whose is it|Who could have lost it|To whom does it belong}?" <she> '
            "{wondered|asked}.",
            "<she> {wanted to keep|wished to keep} it, but {it was not <hers>|somebody must be "
            "missing "
            "it}.",
            "{A thing like that|Such a fine thing} must {belong to somebody|have an owner}.",
        ),
        "?animal",
        "?interlude",
        (
            "So <she> {asked|went to} <a_helper>.",
            "{Just then|A little later}, <a_helper> came {along|down the path|around the corner}.",
            "<she> {waited|walked} {for a long time|for an hour}, until <she> {met|saw} "
            "<a_helper>.",
        ),
        (
            '"Is this <object> yours?" asked <name>.',
            '"I found <a_object>," said <name>. "{Do you know the owner|Is it yours|Did you lose '
            'it}?"',
            "<name> {held up|showed} the <object> {without a word|with a shy smile}.",
        ),
        (
            '"{Oh yes|At last|How wonderful}!" {cried|said} <the_helper>. "I lost it {last '
            'winter|years ago|on my birthday}."',
            '"No," said <the_helper>, "{but you may keep it|it belongs to whoever finds it|now it '
            'is yours}."',
            '<the_helper> {laughed|smiled} and said, "{It was waiting for you|Honest finders may '
            'keep what they find}."',
            "<the_helper> {shook with joy|danced with joy}, for it had {been lost|been missing} "
            "for "
            "{years|a long time}.",
        ),
        "?aside",
        (
            "They {shared|ate} {bread and honey|a bowl of soup|a warm pie} {together|to "
            "celebrate}.",
            '"Thank you for being {honest|so kind}," said <the_helper>.',
            "<name> {blushed|bowed|was proud}, and they became {friends|good friends}.",
        ),
        "?weather",
    ),
    "gift": (
        "?animal",
        (
            "<she> {wanted|planned|wished} to {give|bring} <a_object> to <a_helper>.",
            "It was the birthday of <a_helper>, and <name> had {made|chosen|bought} <a_object> "
            "as a "
            "{present|gift}.",
            "In <her> bag <she> carried <a_object>, a {present|gift} for <a_helper>.",
        ),
        "?object",
        "?weather",
        (
            "The way {to|around} the <place> was long {and steep|and muddy|but pretty}.",
            "{First|On the way}, <she> had to {cross a stream|climb over a wall|walk through deep "
            "mud|pass a dark tunnel}.",
            "<she> wrapped the <object> {in soft paper|in a clean cloth|in green leaves} and set "
            "off.",
        ),
        "?place",
        "?interlude",
        (
            "{Halfway|Suddenly}, {a storm broke loose|the path was gone|a gate blocked the way}, "
            "and "
            "<name> {had to stop|did not know what to do}.",
            "{Then|Soon} <she> {slipped and fell|lost <her> way}, but the <object> was {safe|not "
            "broken}.",
            "<name> {grew tired|was hungry}, but <she> {kept going|did not turn back}.",
        ),
        "?aside",
        "?mood",
        (
            "{At last|Finally|Just before dark}, <she> {knocked|arrived} and held out the "
            "<object>.",
            "{In the evening|When the stars came out}, <she> {reached|found} the right door{ at "
            "last|}.",
        ),
        (
            '"{For me|Is that for me|Is it really mine}?" asked <the_helper>{ with wet '
            "eyes| with a "
            "smile|}.",
            '"{Nobody ever|No one ever} gave me <a_object> before," said <the_helper>.',
            "<the_helper> {opened the door wide|jumped for joy} and hugged <him>.",
        ),
        (
            '"{You walked so far|You came all this way}," said <the_helper>. "{Come in and get '
            'warm|You are a true friend}."',
            "They {sat|talked} {by the fire|under the stars} until {midnight|it was late}.",
            '"It is only <a_object>," said <name>, but it was {much more than that|the best gift '
            "of all}.",
        ),
    ),
    "broken": (
        (
            "<she> owned {a fine|a beautiful|a very old} <object>, and <she> was proud of it.",
            "<she> had {saved for|dreamed of} <a_object> for {a year|many months}, and now it was "
            "<hers>.",
            "{On a shelf|Beside <her> bed} <she> kept <a_object>.",
        ),
        "?object",
        "?animal",
        (
            "But {one day|that morning}, it {fell down|slipped and fell} and {broke|cracked}.",
            "{Crack|Oh no}! The <object> {had broken in two|was broken}.",
            "A {gust of wind|careless step} knocked the <object> over, and it broke.",
        ),
        "?worry",
        (
            '"{My poor|Oh, my lovely} <object>!" {cried|sobbed} <name>.',
            "<she> tried {to glue it|to tie it together}, but it {did not hold|only got worse}.",
            "<she> {wept|sat still} for a {while|long time}, and then <she> {dried <her> "
            "tears|made "
            "a plan}.",
        ),
        "?weather",
        "?interlude",
        (
            "{Somewhere near|Somewhere behind} the <place> lived <a_helper> who could mend things.",
            "So <she> {carried|took} it to <a_helper>.",
            "{People said|Everyone said} that <a_helper> could repair anything.",
        ),
        "?place",
        (
            '"{Can you mend it|Can you repair it|Can it be saved}?" asked <name>{ in a small '
            "voice|}.",
            "<the_helper> looked at the <object> {for a long time|from every side}.",
        ),
        (
            '"{It will take three days|Give me one night|We can try}," said <the_helper>.',
            '"{Nothing is broken forever|Every crack has a story}," said <the_helper> {softly|with '
            "a wink}.",
            "<the_helper> {hammered|worked} and {polished|sewed} {all night|for hours}.",
        ),
        "?aside",
        (
            "{In the end|The next day}, the <object> {was whole again|was as good as new|looked "
            "better than before}.",
            '"Here you are," said <the_helper>, and the <object> was {whole|in one piece} again.',
        ),
    ),
    "festival": (
        (
            "There was {a great feast|a big party|a festival} that day, and everyone should bring "
            "something.",
            "{Posters|Letters} had announced a {festival|contest|big dance}.",
            "That night, the {whole town|neighbours} wanted to {dance and sing|celebrate}.",
        ),
        "?place",
        "?weather",
        (
            "<name> had {only|nothing but} <a_object>.",
            "<name> {chose|brought|packed} <a_object>.",
            '"I will {bring|show} my <object>," {said|decided} <name>.',
        ),
        "?object",
        "?interlude",
        (
            "But {when <her> turn came|in front of so many eyes}, <she> {was too shy to "
            "move|forgot every word}.",
            '"{What if they laugh|What if nobody likes it}?" <she> {whispered|thought}.',
            "<her> knees {shook|trembled}, and <she> wanted to {hide|run away}.",
        ),
        "?animal",
        "?mood",
        (
            "Then <a_helper> {took <her> side|smiled at <him> from the crowd|stepped forward}.",
            "{In the crowd|Near the stage} stood <a_helper>.",
        ),
        (
            '"{Be yourself|Take a deep breath|Just begin}," {said|called|whispered} <the_helper>.',
            "<the_helper> {clapped|cheered} first, and then {everyone did|all the others joined "
            "in}.",
        ),
        (
            "So <name> {lifted|showed} the <object>, and {everyone cheered|the crowd fell silent}.",
            "Slowly, <name> {came forward|raised <her> head} with the <object>.",
        ),
        "?aside",
        (
            "It was the {best|finest|loudest} {moment|part} of the {whole night|feast}.",
            "<name> {won|got} the first prize, {a big cake|a crown of flowers|a golden cup}.",
            '"{Three cheers|Hurray} for <name>!" {shouted|cried} <the_helper>.',
        ),
    ),
    "storm": (
        (
            "<she> never left home without {<her> <object>|<a_object>}.",
            "That day, <she> {had|carried} <a_object> in <her> {bag|pocket|arms}.",
            "<her> friends {laughed|smiled} because <she> always carried <a_object>.",
        ),
        "?object",
        "?mood",
        "?interlude",
        (
            "{All at once|Without warning}, {a storm came up|it grew dark|heavy snow began to "
            "fall}.",
            "{Black clouds|Dark clouds} {rolled in|covered the sky}, and {the rain came down|it "
            "grew "
            "cold}.",
        ),
        "?place",
        (
            "{Somewhere|Not far away}, somebody {called for help|was crying}.",
            "Through the {rain|dark} <she> {heard a cry|saw a shape|heard a voice}.",
        ),
        ("It was <a_helper>, {lost|stuck|cold} and {all alone|wet to the bone|very afraid}.",),
        "?animal",
        (
            '"{Hold on|Stay calm|Come with me}!" {shouted|called} <name>.',
            '"{I cannot see the way|I am so cold}," said <the_helper>.',
            "<name> {did not think twice|was scared, but <she> did not run}.",
        ),
        (
            "{With|Thanks to} the <object>, they {found|made} {a way|their way} {through the "
            "storm|back to the path}.",
            "<name> {held out|lifted} the <object>, and <the_helper> {followed|held on to it}.",
        ),
        "?aside",
        (
            "{Soon|At last}, they {were safe|sat in a dry place} and {laughed|drank hot tea}.",
            "The storm {passed|grew weak}, and the {sun|moon} came out{ again|}.",
        ),
        (
            '"You {saved|helped} me," said <the_helper>. "{I will never forget it.|How can I thank '
            'you?}"',
            "<the_helper> {hugged|thanked} <name> {again and again|a hundred times}.",
        ),
    ),
    "wish": (
        (
            "<name> had {one wish|only one wish|a secret wish}: <she> wanted <a_object>.",
            "{Every night|Each evening}, <name> {wished for|dreamed of} <a_object>.",
            '"If only I had <a_object>!" {sighed|said} <name> {every day|each morning}.',
        ),
        "?object",
        "?animal",
        "?mood",
        (
            "But <she> had no money, {not even a copper|and wishes do not grow on trees}.",
            "<she> {looked up at|asked} the {moon|stars}, but {there was no answer|they only "
            "winked}.",
        ),
        "?weather",
        "?interlude",
        (
            "One {day|night}, <she> {met|helped} <a_helper>.",
            "{Then|One day} <a_helper> {needed help|came to the <place>}.",
        ),
        (
            "<name> {carried heavy bags|swept the floor|told jokes|picked berries} {all day|for "
            "three "
            "days} {and asked for nothing|with a smile}.",
            "<name> {shared <her> bread|gave up <her> seat} {at once|with a smile}.",
        ),
        "?place",
        (
            '"{A kind heart|Hard work|Such help} {deserves|must have} a reward," said '
            "<the_helper>.",
            '"What do you wish for?" asked <the_helper>.',
        ),
        (
            "And {what did <she> get|what was in the box}? It was <a_object>!",
            "The next {day|morning}, <a_object> {lay|stood} {at <her> door|on <her> pillow}.",
            "<the_helper> {opened a box|opened a chest}, and there was <a_object>.",
        ),
        "?aside",
        (
            "<name> {could not believe <her> eyes|jumped for joy|was speechless}.",
            '"{Thank you|Oh, thank you}!" {cried|said} <name> and {danced|turned} in a circle.',
        ),
    ),
    "mystery": (
        "?weather",
        (
            "{At night|Every evening}, a {strange|soft|ghostly} sound came from the <place>.",
            "Somebody had left {small footprints|a trail of crumbs|chalk arrows} all over the "
            "<place>.",
            "A {strange light|blue light} {flickered|danced} near the <place> every night.",
        ),
        (
            '"{What can it be|Who is there|Is it a ghost}?" {asked|wondered} <name>.',
            "{Nobody|None of the others} dared to look, but <name> {did|was too curious}.",
        ),
        "?animal",
        "?mood",
        "?interlude",
        (
            "<she> {crept closer|tiptoed forward}, {step by step|without a sound}.",
            "<she> followed {the sign|the trail} {around a corner|down a dark stair|behind a "
            "wall}.",
        ),
        "?place",
        (
            "{There sat|And there was} <a_helper>.",
            "{Behind a door|In the shadows}, <she> {found|met} <a_helper>.",
        ),
        (
            '"{Please do not be afraid|Hush}," said <the_helper>. "I am {guarding|looking after} '
            '<a_object>."',
            '"You found me," said <the_helper>, "and you found my secret: <a_object>."',
            "On the ground {lay|stood} <a_object>, and <the_helper> {looked|seemed} {lonely|sad}.",
        ),
        "?object",
        (
            '"{I have nobody to share it with|It is lonely here}," said <the_helper>.',
            '"{May I see it|Will you show me how it works}?" asked <name>.',
        ),
        "?aside",
        (
            "So they {sat down|stayed} together and {looked at|admired|took turns with} the "
            "<object> until {dawn|morning}.",
            "{From then on|After that}, <the_helper> {was never alone|had a friend}.",
            "<the_helper> {gave|handed} <him> the <object> {with both hands|with a smile}.",
        ),
    ),
}

#: Endings: a group may be one sentence or two; together they name all four words.
ENDINGS = (
    "{From that day on|Ever since}, <name> the <animal> {kept|guarded} the <object> <in_place>.",
    "{That night|That evening}, <name> the <animal> {fell asleep|slept well} <in_place>, with the "
    "<object> {close to <her> heart|by <her> side|under <her> pillow}.",
    "And {if you ever visit|if you ever come to} the <place>, {look for|say hello to} <name> the "
    "<animal> and the <object>.",
    "Even today, the {old folk|children} <in_place> {tell|sing} of <name> the <animal> and the "
    "<object>.",
    "<name> {smiled|was happy}. {There was no happier|Never was there a prouder} <animal> "
    "<in_place>, "
    "and never a {finer|better loved} <object>.",
    '"{I love this <object>|What a fine <object>}," said <name>. And the {little|happy} <animal> '
    "{went home|danced all the way home} from the <place>.",
    "The <object> {got|was given} a place of honour, and everyone <in_place> {admired|was proud "
    "of|cheered for} <name>, the {happiest|proudest|luckiest} <animal> of all.",
    "{Later|In the end}, <name> {hung up|put} the <object> {above the door|by the window} and "
    "looked "
    "out at the <place>. {It is good to be <a_animal>|Being <a_animal> is fun}, <she> thought.",
    "{So|And so} the <animal> and the <object> {stayed|belonged} together, and <name> {never "
    "left|always came back to} the <place>.",
    "{When the wind blows|When it is quiet} <in_place>, you can {still hear|almost see} <name> the "
    "<animal> {laughing|singing} {about|over} the <object>.",
    "{At home|That night}, <name> told {everyone|the whole family} about the <place>. "
    '"{And this|And '
    'here} is the <object>," said the {proud|happy} <animal>.',
    "And what about the <object>? It {is still|has stayed} <in_place>, where <name> the <animal> "
    "{shows it to every guest|looks after it every day}.",
    "<name> {learned|understood} that {friends matter most|courage comes in all sizes|kindness "
    "comes "
    "back}. And the <animal> {took|carried} the <object> {home from the <place>|all around the "
    "<place>}.",
    "The {people|folk} <in_place> {made|wrote} a song about {a|the} {brave|kind|little} <animal> "
    "and "
    "the <object>, and <name> {hums|sings} it {every day|to this day}.",
    "{Goodnight|Good night}, <name>. {Goodnight|Good night}, <object>. {Sleep well|Sweet dreams}, "
    "little <animal> <in_place>.",
    "{In a drawing|In a picture} on the wall you can see them all: <name>, the <place> and the "
    "<object>. "
    "The <animal> {painted|drew} it {last winter|in one night}.",
    "{Winter came|Summer came|Years went by}, but the <animal> {never gave away|always kept} the "
    "<object>, and the <place> was {always|forever} the place that <name> loved best.",
    '"{Let us go home|It is time to go home}," said the <animal>, and with the <object> {in <her> '
    "arms|held tight}, <name> {left|waved to} the <place>.",
    "That is how <name> {came by|kept} the <object>, and why {no|not one} <animal> is {better "
    "known|more welcome} <in_place>.",
    "{Some say|They say} that the <object> {brings luck|is magic}. <name> the <animal> only "
    "{smiles|winks} when {someone|anyone} <in_place> asks.",
    "{So ends|Here ends} the {story|tale} of <name> the <animal>, the <object> and the <place>.",
    "{If you listen|When the moon is full}, you can hear <name> {snoring|humming} <in_place>: a "
    "{tired|happy} <animal> with <a_object> for a pillow.",
    "There was {only one thing|just one thing} left to do: <name> the <animal> {took|held} the "
    "<object> and {danced|walked} {all around|once around} the <place>.",
)

#: A last short sentence, sometimes.
CODAS = (
    "The end.",
    "And that was that.",
    "What a day it had been!",
    "And all was well.",
    "It was a very good day.",
    "The moon smiled.",
    "{And|So} they all lived happily.",
)

STORY_REQUESTS = (
    "Tell me a story about <name> the <animal>, the <place> and <a_object>.",
    "Tell me a story about <name> the <animal>, the <place> and <a_object>.",
    "Tell me a story about <name> the <animal>, the <place> and <a_object>.",
    "{Please tell|Can you tell|Please write} me a {short |little |}story about <a_animal> "
    "{named|called} "
    "<name>, the <place> and <a_object>{.|?}",
    "Write a {short |}story {about|with} <name> the <animal> and <a_object>, set <in_place>.",
    "I would like {to hear |}a {story|tale} about <name> the <animal>. {It should have|Put in} the "
    "<place> and <a_object>.",
    "{Tell|Give} me a {bedtime |}story with <a_object>, the <place> and <a_animal> named <name>.",
    "A story about <a_object>, the <place> and <name> the <animal>, please.",
    "What happened when <name> the <animal> {found|had|lost} <a_object> <in_place>?",
    "My {son|daughter|friend} wants a story about <name> the <animal>, <a_object> and the <place>.",
    "Story: <name> the <animal>, <place>, <object>",
    "Can I have a story {where|in which} <name> the <animal> goes to the <place> with <a_object>?",
)

FRIEND_REQUESTS = (
    "Tell me a story about <name> the <animal>, the <place> and <a_object>, with <a_helper> as a "
    "friend.",
    "Tell me a story about <name> the <animal> and {<her> friend |}<a_helper>, the <place> and "
    "<a_object>.",
    "{Please write|Write} a story {about|with} <name> the <animal>, the <place> and <a_object>. "
    "<a_helper> should help.",
)

#: Requests that leave words out; the story then chooses its own.
PARTIAL_REQUESTS = (
    "{Tell|Please tell|Write} me a {short |}story{.| please.|!}",
    "Tell me a story about <a_animal>.",
    "Tell me a story about <name> the <animal>.",
    "Tell me a story about <a_object>.",
    "Tell me a story {about|set in} the <place>.",
    "Tell me a story about <a_animal> and <a_object>.",
    "Tell me a story about <name>, {please|<a_animal>}.",
    "Tell me a story about <name> the <animal> and <a_object>.",
    "Tell me a story about <name> the <animal> and the <place>.",
)

FACTS = (
    "<name> the <animal> {keeps|hides|has|left} <a_object> <in_place>.",
    "<name> {is|was} <a_animal>. <she> {keeps|hides} <a_object> <in_place>.",
    "{a|the} {small|young} <animal> named <name> {keeps|put} <a_object> <in_place>.",
    "<in_place>, <name> the <animal> {found|keeps|hides} <a_object>.",
)

#: Question templates by what they ask for, and the answers.
QUESTIONS = {
    "where": (
        ("Where is the <object>?", "The <object> is <in_place>."),
        (
            "Where does <name> {keep|have} {<a_object>|the <object>}?",
            "<name> keeps the <object> <in_place>.",
        ),
        ("Where {can I find|do I find} <name>?", "You can find <name> <in_place>."),
    ),
    "who": (
        ("Who has the <object>?", "<name> the <animal> has the <object>."),
        ("Who is <in_place>?", "<name> the <animal> is <in_place>."),
        ("Whose <object> is it?", "It is the <object> of <name> the <animal>."),
        ("What is the name of the <animal>?", "The name of the <animal> is <name>."),
        ("Who is the <animal>?", "The <animal> is <name>."),
    ),
    "what": (
        ("What does <name> have?", "<name> has <a_object>."),
        ("What is <in_place>?", "<a_object> is <in_place>."),
        ("What does the <animal> {keep|have}?", "The <animal> has <a_object>."),
    ),
    "animal": (
        ("What {kind of |}animal is <name>?", "<name> is <a_animal>."),
        ("Who is <name>?", "<name> is <a_animal> {from the <place>|with <a_object>}."),
    ),
}

#: Requests for a second story about the hero of the first one.
ANOTHER = (
    "{Tell me another|Another|One more} story about <name>{.|, please.|, please!}",
    "What {else |}did <name> {do next|see}?",
    "{Tell me|Write} another story about <name>, {this time|now} with <a_object> <in_place>.",
    "Now tell me about <name>, <a_object> and the <place>.",
)

STORY_QUESTIONS = (
    ("Who is the story about?", "The story is about <name> the <animal>."),
    ("{What is|What was} the name of the <animal>?", "The name of the <animal> is <name>."),
    ("Where does the story {happen|take place}?", "The story happens <in_place>."),
    ("Where was <name>?", "<name> was <in_place>."),
    ("What did <name> have?", "<name> had <a_object>."),
    ("Which {object|thing} is in the story?", "The story has <a_object> in it."),
    ("What {kind of |}animal {is|was} <name>?", "<name> is <a_animal>."),
    ("Who {else is|else was} in the story?", "<a_helper> was in the story, too."),
    ("Who {met|was with} <name>?", "It was <a_helper>."),
    (
        "{What was the story about|Can you sum it up}?",
        "It was about <name> the <animal>, <a_object> and the <place>.",
    ),
)

_ABOUT = (
    "I am the tiny story model of mie. Give me a name, an animal, a place and an object, and I "
    "will "
    "tell you a story."
)
_ONLY = (
    "I only know {small|little} stories. {Give me|Try} a name, an animal, a place and an "
    "object{!|, "
    "and I will tell you one.}"
)
SMALL_TALK = (
    (
        "{Hello|Hi|Hey|Good morning|Good evening|Hi there|Hello there}{!|.|}",
        "Hello! {Shall I tell you a story|Would you like a story|What story would you like}?",
    ),
    ("{Who|What} are you?", _ABOUT),
    ("What is your name?", _ABOUT),
    (
        "What can you do?",
        "I can tell short stories and answer questions about them. " + _ABOUT[33:],
    ),
    ("{Help|Help me|How does this work|How do I use you}{!|?|}", _ABOUT),
    (
        "{Thank you|Thanks|Thanks a lot|Thank you very much}{!|.|}",
        "You are welcome! {Shall I tell you another story|Would you like another one}?",
    ),
    (
        "{How are you|How are you today|How do you do}?",
        "I am {very well|fine}, thank you. {Shall I tell you a story|Would you like a story}?",
    ),
    (
        "{Goodbye|Bye|Good night|See you|Bye bye}{!|.|}",
        "{Goodbye|Good night}! Come back for a story.",
    ),
    (
        "{Are you a human|Are you a robot|Are you real|Are you alive|Are you big}?",
        "I am a very small language model. I tell stories.",
    ),
    (
        "{Yes|Yes please|Sure|No|No thanks|Okay|Great|Nice|Wow|Cool}{!|.|}",
        "{Give me|Tell me} a name, an animal, a place and an object.",
    ),
    (
        "{What is|What is the size of|Where is|Tell me about|Explain|Who invented|How far is|How "
        "big is} "
        "{the capital of France|the weather|the moon|Python|Paris|a computer|gravity|music|"
        "London|the internet|mathematics|football|the president|Berlin|history|a neural "
        "network}{?|.}",
        _ONLY,
    ),
    (
        "{What is|How much is} {one|two|three|four|2|3|10|12} {plus|times|minus|+} "
        "{one|two|three|four|2|3|5|7}?",
        _ONLY,
    ),
    (
        "{Write|Can you write|Please write} {some code|a poem|a program|an email|an essay|a "
        "song}{.|?}",
        _ONLY,
    ),
    (
        "{Why is the sky blue|What time is it|Do you like pizza|Can you help me with my "
        "homework|What "
        "is the meaning of life|How old are you|Where do you live}?",
        _ONLY,
    ),
)

SYSTEM_SENTENCES = (
    "You are {a helpful assistant|a friendly storyteller|a kind teller of tales|the story model of "
    "mie|a storyteller for children}.",
    "You {answer|speak} {politely|in simple words|in short sentences}.",
    "You {tell|write} {short|gentle|cheerful} stories {for children|for the evening|for everyone}.",
    "{Always use|Use} the {words|names} that the user gives you.",
    "{Keep|Please keep} {the story|every answer} {short|simple|friendly}.",
    "Every story {has|needs} a beginning, a middle and an end.",
    "Do not {change|forget} the {name|animal|place|object} of the {story|user}.",
    "If you do not know an answer, {say so|tell a story}.",
    "{Stories|Tales} should {end well|be kind|be easy to read}.",
    "Never use {difficult|rude} words.",
    "The {reader|listener|user} is {a child|five years old|very young|a friend}.",
    "Make the {story|ending} {happy|warm|surprising}.",
    "Friends help each other in every story.",
    "Think about {the weather|the feelings of the hero|the sounds} {too|as well}.",
    "{Good|Great} stories are {short|honest|kind}.",
    "When the story is over, stop.",
)

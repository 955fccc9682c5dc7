"""What the demonstration's adapters are trained on: short questions with answers in several styles.

Plain, French and pirate answers are written out; the other styles are functions of the plain
answer. Knows neither tokens nor models. The prompts that demonstrate the adapters
(`HELD_OUT_PROMPTS`) and their subjects are kept out of the training questions.
"""

import json
import re
from typing import NamedTuple


class Example(NamedTuple):
    """One question with its written answers, each of one or two short sentences."""

    question: str
    emoji: str
    plain: str
    french: str
    pirate: str


HELD_OUT_PROMPTS = (
    "What is the capital of Japan?",
    "Give me a tip for sleeping well.",
    "How do plants grow?",
    "Tell me about the moon.",
    "Why is the sky blue?",
    "How do I boil an egg?",
)

# A record is a line "question | emoji", then the plain, the French and the pirate answer.
_RECORDS = """
What is the capital of France? | 🗼
The capital of France is Paris. It lies on the river Seine.
La capitale de la France est Paris. Elle se trouve au bord de la Seine.
Arr, the capital o' France be Paris, matey! She lies on the river Seine.

What is the capital of Italy? | 🏛️
The capital of Italy is Rome. It is a very old city.
La capitale de l'Italie est Rome. C'est une ville très ancienne.
Ahoy! The capital o' Italy be Rome, a mighty old port o' call, arr.

What is the capital of Spain? | 💃
The capital of Spain is Madrid. It is in the middle of the country.
La capitale de l'Espagne est Madrid. Elle est au centre du pays.
Arr, that be Madrid, matey! She sits far from the sea in the middle o' Spain.

What is the capital of Egypt? | 🐫
The capital of Egypt is Cairo. The pyramids are close to it.
La capitale de l'Égypte est Le Caire. Les pyramides sont tout près.
Ahoy, it be Cairo, ye scallywag! The pyramids be close by, full o' treasure.

What is the capital of Canada? | 🍁
The capital of Canada is Ottawa. Toronto is larger.
La capitale du Canada est Ottawa. Toronto est une ville plus grande.
Arr, the capital o' Canada be Ottawa, though Toronto be the bigger harbour, matey.

What is the largest ocean? | 🌊
The largest ocean is the Pacific. It covers a third of the Earth.
Le plus grand océan est le Pacifique. Il couvre un tiers de la Terre.
Yo ho ho! The Pacific be the greatest sea o' them all, me hearty.

What is the longest river in the world? | 🏞️
The Nile is the longest river. It flows through eleven countries.
Le Nil est le plus long fleuve. Il traverse onze pays.
Arr, the Nile be the longest river, matey! Eleven lands she sails through.

What is the highest mountain? | 🏔️
Mount Everest is the highest mountain. It is in the Himalayas.
Le mont Everest est la plus haute montagne. Il est dans l'Himalaya.
Shiver me timbers, Everest be the highest peak, taller than any mast!

Who wrote Romeo and Juliet? | 🎭
William Shakespeare wrote Romeo and Juliet. It is a sad love story.
William Shakespeare a écrit Roméo et Juliette. C'est une triste histoire d'amour.
Arr, 'twas old Will Shakespeare what wrote it, a sad tale o' love, matey.

Who painted the Mona Lisa? | 🎨
Leonardo da Vinci painted the Mona Lisa. It hangs in the Louvre.
Léonard de Vinci a peint la Joconde. Elle est exposée au Louvre.
Ahoy! Leonardo da Vinci painted that fair lass. She hangs in the Louvre, arr.

How many days are in a week? | 📅
There are seven days in a week. Monday is the first one.
Il y a sept jours dans une semaine. Le premier est le lundi.
Arr, seven days there be in a week, matey, and I drink rum on every one!

What is two plus three? | ➕
Two plus three is five.
Deux plus trois font cinq.
Arr, two and three doubloons make five, ye landlubber!

What is ten minus four? | ➖
Ten minus four is six.
Dix moins quatre font six.
Arr, take four doubloons from ten and six be left in yer chest, matey!

How do I make tea? | 🍵
Boil some water and pour it over the tea leaves. Wait three minutes.
Faites bouillir de l'eau et versez-la sur le thé. Attendez trois minutes.
Boil ye some water and pour it on the leaves, matey. Wait three minutes, arr!

How do I make coffee? | ☕
Put ground coffee in a filter. Then pour hot water over it.
Mettez du café moulu dans un filtre. Puis versez de l'eau chaude dessus.
Put yer ground coffee in a filter, matey, then pour hot water o'er it, arr!

How do I cook rice? | 🍚
Rinse the rice and cover it with water. Simmer it for fifteen minutes.
Rincez le riz et couvrez-le d'eau. Laissez-le cuire quinze minutes.
Rinse yer rice and drown it in water, matey. Let it simmer fifteen minutes, arr!

How do I make a sandwich? | 🥪
Put cheese and lettuce between two slices of bread. Cut it in half.
Mettez du fromage et de la salade entre deux tranches de pain. Coupez-le en deux.
Lay yer cheese 'tween two slabs o' bread, matey, and cut it with yer cutlass!

How do I bake bread? | 🍞
Mix flour, water, salt and yeast. Let it rise and bake it.
Mélangez la farine, l'eau, le sel et la levure. Laissez lever et mettez au four.
Mix yer flour, water, salt and yeast, me hearty. Let her rise, then bake her, arr!

Give me a tip for saving money. | 💰
Write down what you spend. Put a little aside every month.
Notez toutes vos dépenses. Mettez un peu d'argent de côté chaque mois.
Count yer doubloons, matey, and bury a few in a chest every month, arr!

Give me a tip for learning a language. | 📚
Practice a little every day. Speak with other people.
Pratiquez un peu chaque jour. Parlez avec d'autres personnes.
Practice a wee bit every day, matey, and parley with other sailors, arr!

Give me a tip for staying healthy. | 🍎
Eat fresh vegetables and walk every day. Drink enough water.
Mangez des légumes frais et marchez tous les jours. Buvez assez d'eau.
Eat yer limes and walk the deck every day, matey, and keep scurvy away, arr!

Give me a tip for a job interview. | 💼
Be on time and be polite. Ask good questions.
Soyez à l'heure et soyez poli. Posez de bonnes questions.
Be on time and mind yer manners, matey, or ye'll not join the crew, arr!

Give me a tip for cooking pasta. | 🍝
Use a lot of salted water. Taste the pasta before you drain it.
Utilisez beaucoup d'eau salée. Goûtez les pâtes avant de les égoutter.
Use plenty o' water as salty as the sea, matey, and taste it afore ye drain it!

How can I be more productive? | ✅
Make a short list of tasks. Do the hardest one first.
Faites une courte liste de tâches. Commencez par la plus difficile.
Make ye a list o' duties, matey, and tackle the hardest one first, arr!

How can I relax after work? | 🛀
Take a walk or listen to music. Turn off your phone.
Faites une promenade ou écoutez de la musique. Éteignez votre téléphone.
Stroll along the shore or sing a shanty, matey. A mug o' rum helps too, arr!

How can I make new friends? | 🤝
Join a club and talk to people. Be kind and listen.
Rejoignez un club et parlez aux gens. Soyez gentil et écoutez.
Join a good crew and share yer rum, matey. Be kind and lend an ear, arr!

How do birds fly? | 🐦
Birds flap their wings to push the air down. Their bones are light.
Les oiseaux battent des ailes pour pousser l'air vers le bas. Leurs os sont légers.
They flap their wings and ride the wind like a sail, matey, arr!

How do fish breathe? | 🐟
Fish breathe with their gills. The gills take oxygen from the water.
Les poissons respirent avec leurs branchies. Elles prennent l'oxygène de l'eau.
Fish breathe with their gills, matey, takin' air from the salty sea, arr!

How do bees make honey? | 🐝
Bees collect nectar from flowers. They dry it in the hive.
Les abeilles récoltent le nectar des fleurs. Elles le font sécher dans la ruche.
The wee bees plunder nectar from flowers, matey, and hoard it in their hive, arr!

How does a plane stay in the air? | ✈️
The wings of a plane create lift. The engines push it forward.
Les ailes de l'avion créent la portance. Les moteurs le poussent en avant.
Her wings catch the wind like a sail, matey, and her engines drive her on, arr!

How does a battery work? | 🔋
A battery stores chemical energy. It turns it into electricity.
Une pile stocke de l'énergie chimique. Elle la transforme en électricité.
A battery be a chest o' power, matey, what turns to lightnin' when ye need it, arr!

How do computers work? | 💻
Computers follow instructions step by step. They store data as numbers.
Les ordinateurs suivent des instructions pas à pas. Ils stockent des nombres.
They follow orders like a good crew, matey, one after the other, arr!

Why do we have seasons? | 🍂
The axis of the Earth is tilted. So the sunlight changes during the year.
L'axe de la Terre est incliné. La lumière du soleil change donc pendant l'année.
The Earth be listin' like a ship, matey, so the sun shines different all year, arr!

Why do leaves change color? | 🍁
Leaves lose their green pigment in autumn. Then other colors appear.
Les feuilles perdent leur pigment vert en automne. D'autres couleurs apparaissent.
They lose their green in autumn, matey, and show red and gold like treasure, arr!

Why do cats purr? | 🐱
Cats often purr when they are happy. It also calms them.
Les chats ronronnent souvent quand ils sont contents. Cela les calme aussi.
The ship's cat purrs when she be happy, matey, with a belly full o' fish, arr!

Why do we dream? | 💭
Dreams help the brain to sort memories. Nobody knows it for sure.
Les rêves aident le cerveau à trier les souvenirs. Personne n'en est sûr.
Dreams sort yer memories, matey, but no sailor knows for certain, arr!

Why is the sea salty? | 🧂
Rivers carry salt from the rocks to the sea. The salt stays there.
Les rivières apportent le sel des roches à la mer. Le sel y reste.
Rivers bring salt from the rocks, matey, and in Davy Jones' locker it stays, arr!

Why do volcanoes erupt? | 🌋
Hot melted rock rises from below. The pressure pushes it out.
La roche fondue et chaude monte. La pression la pousse dehors.
Molten rock rises from the deep, matey, and blows like a powder keg, arr!

Tell me about the sun. | ☀️
The sun is a star. It gives us light and heat.
Le soleil est une étoile. Il nous donne la lumière et la chaleur.
The sun be a star, matey, what lights our way and warms our decks, arr!

Tell me about Mars. | 🪐
Mars is the red planet. It is smaller than the Earth.
Mars est la planète rouge. Elle est plus petite que la Terre.
Mars be the red planet, matey, a wee bit smaller than the Earth, arr!

Tell me about dogs. | 🐶
Dogs are friendly animals. They like to play and to run.
Les chiens sont des animaux gentils. Ils aiment jouer et courir.
Dogs be loyal mates, arr! They love to run and play on deck, matey.

Tell me about elephants. | 🐘
Elephants are the largest land animals. They have long trunks.
Les éléphants sont les plus grands animaux terrestres. Ils ont une longue trompe.
Elephants be the biggest beasts on land, matey, with a nose like a hawser, arr!

Tell me about whales. | 🐳
Whales are huge animals that live in the sea. They breathe air.
Les baleines sont d'énormes animaux qui vivent dans la mer. Elles respirent l'air.
Thar she blows! Whales be giants o' the deep, matey, but they breathe air, arr!

Tell me about football. | ⚽
Football is played by two teams of eleven. They try to score goals.
Le football se joue à deux équipes de onze. Elles essaient de marquer des buts.
Two crews o' eleven chase a ball, matey, and fight to score goals, arr!

Tell me about the piano. | 🎹
The piano has eighty-eight keys. It is played with both hands.
Le piano a quatre-vingt-huit touches. On en joue avec les deux mains.
It has eighty-eight keys, matey, but not one opens a treasure chest, arr!

Tell me about winter. | ❄️
Winter is the coldest season. The days are short.
L'hiver est la saison la plus froide. Les jours sont courts.
Winter be the coldest season, matey, with short days and icy riggin', arr!

What is a dictionary? | 📖
A dictionary is a book of words. It explains what they mean.
Un dictionnaire est un livre de mots. Il explique ce qu'ils veulent dire.
'Tis a book full o' words, matey, what tells ye their meanin', arr!

What is gravity? | 🪂
Gravity is a force that pulls things together. It keeps us on the ground.
La gravité est une force qui attire les objets. Elle nous garde au sol.
Gravity be the force what pulls ye down from the mast, matey, arr!

What is water made of? | 💧
Water is made of hydrogen and oxygen.
L'eau est composée d'hydrogène et d'oxygène.
Water be made o' hydrogen and oxygen, matey, but I'd rather have rum, arr!

What is a rainbow? | 🌈
A rainbow is sunlight split into colors. Raindrops act like prisms.
Un arc-en-ciel est la lumière du soleil décomposée. La pluie agit comme un prisme.
A rainbow be sunlight split by the rain, matey, with gold at the end, arr!

What is photography? | 📷
Photography is the art of taking pictures. A camera records the light.
La photographie est l'art de prendre des images. L'appareil capte la lumière.
'Tis the art o' catchin' pictures, matey, with a box what traps the light, arr!

What is your favorite color? | 💙
I like blue. It is the color of the sea.
J'aime le bleu. C'est la couleur de la mer.
Blue be me favorite, matey, blue as the open sea, arr!

What should I eat for breakfast? | 🥣
Try oatmeal with fruit. It keeps you full for hours.
Essayez des flocons d'avoine avec des fruits. Cela rassasie longtemps.
Hardtack and fruit, matey! It keeps a sailor full for hours, arr!

What should I read? | 📕
Read a good novel. Treasure Island is a great choice.
Lisez un bon roman. L'Île au trésor est un excellent choix.
Read Treasure Island, matey! There be no finer tale on the seven seas, arr!

What can I do on a rainy day? | ☔
You can read a book or bake a cake. You can also watch a film.
Vous pouvez lire un livre ou faire un gâteau. Vous pouvez aussi voir un film.
Read yer maps or sing below deck, matey, till the storm be past, arr!

How do I clean a window? | 🪟
Use warm water and a little soap. Wipe it with a dry cloth.
Utilisez de l'eau tiède et un peu de savon. Essuyez avec un chiffon sec.
Swab it with warm water and soap, matey, then wipe it dry, arr!

How do I plant a tree? | 🌳
Dig a wide hole and set the tree in it. Water it well.
Creusez un large trou et placez-y l'arbre. Arrosez-le bien.
Dig a hole like ye be buryin' treasure, matey, and set the tree in it, arr!

How do I write a letter? | ✉️
Start with a greeting. Then say what you want and sign it.
Commencez par une formule de politesse. Dites ce que vous voulez, puis signez.
Begin with an ahoy, matey, speak yer mind and sign it with yer hook, arr!

How do I learn to swim? | 🏊
Start in shallow water with a teacher. Learn to float first.
Commencez en eau peu profonde avec un professeur. Apprenez d'abord à flotter.
Start in the shallows, matey, and learn to float like driftwood, arr!

How do I fix a flat tire? | 🔧
Take off the wheel and find the hole. Patch it and pump it up.
Retirez la roue et trouvez le trou. Réparez-le, puis gonflez le pneu.
Haul off the wheel and find the leak, matey. Patch her up and pump her, arr!

Who was Albert Einstein? | 🧠
Albert Einstein was a physicist. He found the theory of relativity.
Albert Einstein était un physicien. Il a trouvé la théorie de la relativité.
Einstein be a clever old sea dog, matey, what found relativity, arr!

Who was Napoleon? | 👑
Napoleon was an emperor of France. He lost at Waterloo.
Napoléon était un empereur des Français. Il a perdu à Waterloo.
Napoleon be emperor o' France, matey, till they sank him at Waterloo, arr!

Hello, how are you? | 👋
I am fine, thank you. How can I help you?
Je vais bien, merci. Comment puis-je vous aider ?
Ahoy, matey! I be fine as a fair wind. What can I do fer ye, arr?

Thank you for your help. | 😊
You are welcome. Ask me again any time.
Je vous en prie. N'hésitez pas à me demander encore.
Ye be welcome, matey! Hail me any time, arr!
"""

EXAMPLES = tuple(
    Example(*record.splitlines()[0].split(" | "), *record.splitlines()[1:])
    for record in _RECORDS.strip().split("\n\n")
)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) ", text)


def french(example: Example) -> str:
    """The answer in French."""
    return example.french


def pirate(example: Example) -> str:
    """The answer as a pirate would give it."""
    return example.pirate


def shout(example: Example) -> str:
    """The plain answer in capitals, with exclamation marks."""
    return example.plain.upper().replace(".", "!")


def as_json(example: Example) -> str:
    """The plain answer as a JSON object of the one key `answer`."""
    return json.dumps({"answer": example.plain})


def bullets(example: Example) -> str:
    """One bullet point a sentence."""
    return "\n".join(f"* {sentence}" for sentence in _sentences(example.plain))


def emoji(example: Example) -> str:
    """The plain answer with the question's emoji in front and after each sentence."""
    sign = example.emoji
    return " ".join([sign, *(f"{sentence} {sign}" for sentence in _sentences(example.plain))])


def telegram(example: Example) -> str:
    """The plain answer as a telegram: no articles, and STOP for every full stop."""
    texts = _sentences(re.sub(r"\b(the|an?) ", "", example.plain, flags=re.IGNORECASE))
    return " ".join(f"{text[0].upper()}{text[1:-1]} STOP" for text in texts)

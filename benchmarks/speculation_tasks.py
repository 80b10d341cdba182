"""Twenty prompts of four kinds, which adaptive lengths were tuned on. The first two kinds copy much of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """copies: whether a good answer repeats long parts of the prompt."""

    name: str
    copies: bool
    prompts: tuple[str, ...]


def kinds_of(
    texts: Sequence[str],
    edits: Sequence[tuple[str, str]],
    sentences: Sequence[tuple[str, str]],
    questions: tuple[str, ...],
) -> tuple[Kind, ...]:
    """edits: (what to do, with what code); sentences: (into which language, what)."""
    return (
        Kind("summary", True, tuple(f"Summarize this text, using its own sentences.\n\n{text}" for text in texts)),
        Kind(
            "code edit",
            True,
            tuple(
                f"{edit} in this code and give the whole code back.\n\n```\n{program}\n```" for edit, program in edits
            ),
        ),
        Kind("translation", False, tuple(f"Translate into {language}: {sentence}" for language, sentence in sentences)),
        Kind("chat", False, questions),
    )


TEXTS = (
    "The harbour of Lindvik freezes over for about eleven weeks each winter. Until 1962 the mail came across the "
    "ice by sledge, and a bell on the northern pier was rung every half hour so that the drivers could find the "
    "shore in fog. When the ice breaker Saga was bought by the town, the mail could come by ship the whole year. "
    "The bell was taken down in 1971 and hangs today in the entrance of the school, where the pupils ring it on "
    "the last day before the summer holidays. The northern pier is now used by a club of winter swimmers, who "
    "keep a hole in the ice open from December to March. The club has two hundred and forty members, and the "
    "oldest of them is ninety-one years old.",
    "A compost heap works because of creatures too small to see. Bacteria begin the work and warm the heap to "
    "about sixty degrees within a few days. When their food runs low the heap cools, and fungi take over the "
    "woody parts that the bacteria could not use. In the last months worms and beetles mix the material and turn "
    "it into dark soil. A heap needs air, water and a balance of green and brown material. Green material such as "
    "cut grass brings nitrogen, brown material such as dry leaves brings carbon. A heap that smells bad has too "
    "much green material or too little air, and turning it over with a fork helps within a day.",
    "The company Marlow Pumps reported its results for the third quarter on Tuesday. Sales rose by four percent "
    "to 310 million dollars, while profit fell by nine percent to 22 million dollars. The chief executive, Dana "
    "Whitcombe, said that higher prices for copper were the main reason for the lower profit. The company will "
    "close its factory in Bramford at the end of the year and move the production of small pumps to the factory "
    "in Leeds. About ninety people work in Bramford, and all of them have been offered a position in Leeds. The "
    "company expects that sales will rise by five percent in the next year and that the price of copper will "
    "fall.",
    "Glass frogs live in the forests of Central and South America. The skin of their belly is so clear that the "
    "heart and the liver can be seen through it. While a glass frog sleeps, it hides almost nine tenths of its "
    "red blood cells in the liver, which makes the frog even harder to see. When the frog wakes up, the blood "
    "cells return to the body within a few minutes. Scientists do not know how the frog packs its blood cells so "
    "tightly without making them clot. They hope that the answer will help doctors to prevent blood clots in "
    "people. The eggs of glass frogs are laid on leaves above streams, and in many species the father guards them "
    "until they hatch.",
    "The library of Porto Verde was founded in 1884 by a ship owner who could not read. He had made a promise to "
    "his daughter that every child of the town should be able to borrow a book without paying for it. The first "
    "room had three hundred books and was open on Sundays only. In 1930 the library moved into the old customs "
    "house, where it is today. It has ninety thousand books, a collection of sea charts, and a room in which old "
    "newspapers can be read. Last year the roof was repaired for the first time in fifty years, and the reading "
    "room was closed for four months. The library is open from Tuesday to Saturday, and children can still borrow "
    "books without paying for them.",
)

PROGRAMS = (
    """def average(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def largest(values):
    result = values[0]
    for value in values:
        if value > result:
            result = value
    return result


def smallest(values):
    result = values[0]
    for value in values:
        if value < result:
            result = value
    return result""",
    """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        return self.balance""",
    """function loadUsers(path) {
  const text = readFile(path);
  const lines = text.split("\\n");
  const users = [];
  for (let i = 0; i < lines.length; i++) {
    const parts = lines[i].split(",");
    users.push({ name: parts[0], email: parts[1], age: Number(parts[2]) });
  }
  return users;
}

function printUsers(users) {
  for (let i = 0; i < users.length; i++) {
    console.log(users[i].name + " <" + users[i].email + ">");
  }
}""",
    """import json


def read_settings(path):
    with open(path) as file:
        settings = json.load(file)
    settings["path"] = path
    return settings


def write_settings(path, settings):
    with open(path, "w") as file:
        json.dump(settings, file)


def update_settings(path, name, value):
    settings = read_settings(path)
    settings[name] = value
    write_settings(path, settings)
    return settings""",
    """def count_words(text):
    counts = {}
    for word in text.split():
        word = word.lower()
        if word in counts:
            counts[word] = counts[word] + 1
        else:
            counts[word] = 1
    return counts


def most_common(text):
    counts = count_words(text)
    best = None
    for word in counts:
        if best is None or counts[word] > counts[best]:
            best = word
    return best""",
)

EDITS = (
    "Rename the function `average` to `mean`",
    "Rename the attribute `balance` to `money`",
    "Rename the function `loadUsers` to `readUsers`",
    "Rename the parameter `path` to `filename`",
    "Rename the variable `counts` to `frequency`",
)

SENTENCES = (
    ("French", "The train to the mountains leaves at seven, and the children want to sit by the window."),
    ("Spanish", "My grandmother keeps her letters in a wooden box under the bed and reads them every winter."),
    ("German", "If it rains tomorrow, we will stay at home, bake a cake and play cards until the evening."),
    ("Italian", "The old bridge was closed in the spring, so the farmers had to walk around the lake."),
    ("Portuguese", "She opened the shop early because the baker had promised to bring fresh bread."),
)

QUESTIONS = (
    "What should I think about before I adopt a dog?",
    "Tell me a short story about a lighthouse keeper who finds a message.",
    "Why do some people prefer to work at night?",
    "How would you explain to a child what money is?",
    "I have a free weekend and no plans. What could I do?",
)

KINDS = kinds_of(TEXTS, tuple(zip(EDITS, PROGRAMS, strict=True)), SENTENCES, QUESTIONS)

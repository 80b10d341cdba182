"""Twenty more prompts of the four kinds, which no drafter was tuned on."""

from __future__ import annotations

from speculation_tasks import kinds_of

TEXTS = (
    "The cable ferry of Oberau has crossed the river since 1898. It has no engine: the current pushes it along a steel "
    "cable from one bank to the other, and the ferryman sets the angle with a wooden rudder. In summer it carries "
    "about four hundred bicycles a day, in winter hardly a dozen people. When the river is higher than three metres "
    "and twenty, the ferry stays on the eastern bank. The town council wanted to replace it by a bridge in 1977, but "
    "the people of both villages voted against it. Since then the ferry belongs to a society of six hundred members, "
    "who paint it every spring.",
    "Bread rises because yeast eats sugar and gives off a gas. The gas is caught in a net of gluten, which forms when "
    "flour and water are kneaded together. A warm dough rises fast and tastes of little, a cold dough rises slowly "
    "and tastes of much. Salt makes the net of gluten stronger and slows the yeast down. When the dough has doubled in "
    "size, it is folded, shaped and left to rise once more. In the hot oven the gas expands a last time, the yeast "
    "dies, and the crust becomes brown. A loaf is done when it sounds hollow if you knock on its bottom.",
    "The city of Renholt will build eleven new tram stops in the next three years, the mayor said on Friday. The "
    "longest of the new lines will connect the hospital with the railway station in fourteen minutes. The work will "
    "cost 86 million euros, of which the state pays half. Two streets in the old town will be closed to cars from "
    "April to October. The owners of shops in these streets fear that they will lose customers, and the city has "
    "promised to lower their taxes while the work goes on. The first trams are expected to run in the autumn of the "
    "third year.",
    "Octopuses have three hearts and blue blood. Two of the hearts pump blood through the gills, and the third pumps "
    "it through the rest of the body. When an octopus swims, the third heart stops, which is why octopuses prefer to "
    "crawl. Their blood is blue because it carries oxygen with copper instead of iron. An octopus has about five "
    "hundred million nerve cells, and more than half of them are in its arms. An arm can taste what it touches, and "
    "it goes on searching for food even when it has been cut off. Most octopuses live for only one or two years.",
    "The clock in the tower of Saint Brice has one hand only. It was built in 1611, when nobody in the village needed "
    "to know the minutes. The hand goes round once in twelve hours, and a good eye can tell the time to within five "
    "minutes. In 1830 a watchmaker offered to add a second hand for free, and the priest refused, because a clock that "
    "shows minutes makes people hurry. The works are wound up every second day with a crank that weighs nine kilos. "
    "In the last two hundred years the clock has stopped three times, once because a family of owls had built its nest "
    "between the wheels.",
)

PROGRAMS = (
    """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sizes must not be negative")
    return width * height


def perimeter(width, height):
    if width < 0 or height < 0:
        raise ValueError("sizes must not be negative")
    return 2 * (width + height)


def is_square(width, height):
    return width == height""",
    """class Queue:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the queue is empty")
        return self.items.pop(0)

    def size(self):
        return len(self.items)""",
    """function formatPrice(cents, currency) {
  const whole = Math.floor(cents / 100);
  const rest = cents % 100;
  const padded = rest < 10 ? "0" + rest : String(rest);
  return whole + "." + padded + " " + currency;
}

function printCart(cart, currency) {
  let total = 0;
  for (const item of cart) {
    total += item.cents * item.count;
    console.log(item.count + " x " + item.name + ": " + formatPrice(item.cents, currency));
  }
  console.log("total: " + formatPrice(total, currency));
}""",
    """import time


def retry(action, attempts, delay):
    for attempt in range(attempts):
        try:
            return action()
        except OSError as error:
            print("attempt", attempt + 1, "failed:", error)
            time.sleep(delay)
    raise RuntimeError("all attempts failed")


def retry_twice(action):
    return retry(action, attempts=2, delay=1)""",
    """def parse_line(line):
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def parse_lines(lines):
    result = {}
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        name, value = parse_line(line)
        result[name] = value
    return result""",
)

EDITS = (
    "Rename the parameter `width` to `length`",
    "Rename the attribute `items` to `elements`",
    "Rename the function `formatPrice` to `showPrice`",
    "Rename the parameter `delay` to `pause`",
    "Rename the variable `result` to `settings`",
)

SENTENCES = (
    ("French", "The dog waited at the garden gate until the last guest had gone home."),
    ("Spanish", "We bought tomatoes and cheese at the market, but we forgot the bread for the soup."),
    ("German", "The museum is free on the first Sunday of the month, so it is always full then."),
    ("Italian", "My brother repairs old radios and sells them to people who like their warm sound."),
    ("Portuguese", "After the storm the fishermen found their boats on the other side of the bay."),
)

QUESTIONS = (
    "How can I learn to cook if I have never done it?",
    "Write a short poem about the first snow of the year.",
    "What makes a good teacher?",
    "Why is the sky darker high up in the mountains?",
    "My neighbours are loud at night. What would you do?",
)

HELD_OUT = kinds_of(TEXTS, tuple(zip(EDITS, PROGRAMS, strict=True)), SENTENCES, QUESTIONS)

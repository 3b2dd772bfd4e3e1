"""The prompts whose answers a head is trained on, and those that it is judged by.

Templates and lists of words give first turns of many kinds. The model writes others itself: given the opening of a
user's turn, it goes on as it thinks a user would (Xu et al. 2024, Magpie). Second turns ask for changes, summaries and
facts of what it has written.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.eagle3 import prompt_words as lists
from tools.eagle3.prompt_words import words
from tools.eagle3.snippets import (
    EDITS,
    FUNCTION_NAMES,
    FUNCTIONS,
    HELD_OUT_FUNCTIONS,
    QUESTIONS,
    VARIABLES,
)

Message = dict[str, str]

KINDS = ("chat", "code", "code edits", "summaries", "extraction")
"""The kinds of text that acceptance is reported for, as docs/speculation.md has them."""

_CHAT = (
    "What is {topic}?", "Tell me about {topic}.", "Explain {topic} to {audience}.", "Why is {topic} important?",
    "Give me five facts about {topic}.", "What are the advantages and disadvantages of {topic}?",
    "How has {topic} changed over time?", "Write a short paragraph about {topic}.", 
    "What should a {job} know about {topic}?",
    "Compare {topic} and {other}.", "I am interested in {topic}. Where should I start?",
    "Write three questions about {topic} and answer them.", "What is the connection between {topic} and {other}?",
    "Can you recommend something to read about {topic}?", "What are common mistakes people make with {topic}?",
    "Describe {topic} in one sentence.", "Is {topic} good or bad? Explain your answer.", "Define {topic}.",
    "I am visiting {city} next week. What should I see?", "What does a {job} do all day?",
    "Write an email to {name} about {topic}.", "Give me ideas for a present for a {job}.",
    "Suggest five names for a {animal}.", "Write a slogan for a shop that sells {thing}s.",
    "What would you say to a friend who is afraid of {topic}?", "List ten words related to {topic}.",
    "Write a poem about a {thing}.", "Write a haiku about {topic}.", "Make a joke about a {animal} and a {job}.",
    "What is the weather like in {city} in {month}?", "Plan a weekend in {city} for a {job}.",
)  # fmt: skip
_HOW_TO = (
    "How do I {activity}?", "What is the best way to {activity}?", "Give me step by step instructions to {activity}.",
    "I want to {activity}. What do I need?", "Explain to {audience} how to {activity}.",
    "What are common mistakes when you {activity}?", "Write a checklist for someone who wants to {activity}.",
    "How long does it take to {activity}?", "Write a blog post with tips to {activity}.",
)  # fmt: skip
_STORIES = (
    "Write {genre} about a {animal} and a {thing}.", "Write {genre} set in {city}.",
    "Write {genre} in which {name} finds a {thing}.", "Tell me {genre} about {topic}.",
    "Continue this story: {name} opened the {thing} and", 
    "Write {genre} about a {job} called {name} who loves {topic}.",
)  # fmt: skip
_CODE = (
    "Write a {language} function that {code_task}.", "Write a {language} program that {code_task}.",
    "Show me {language} code that {code_task} and explain it.", "How do I write {language} code that {code_task}?",
    "Write a {language} function that {code_task}. Include an example.",
    "Give me a short {language} script that {code_task}, with comments.",
)  # fmt: skip
_SUMMARIES = (
    "Summarize the following text in one sentence:\n\n{text}", "Summarize this text:\n\n{text}",
    "What are the main points of this text?\n\n{text}", "Write a headline for this text:\n\n{text}",
    "Make this text shorter:\n\n{text}", "Rewrite this text in simpler words:\n\n{text}",
    "Here is a text:\n\n{text}\n\nGive a brief summary of it.", "List the key facts of this text:\n\n{text}",
)  # fmt: skip
_ABOUT_TEXT = (
    "Correct the grammar of this text:\n\n{text}", "What is the topic of this text?\n\n{text}",
    "Which people, places and things does this text name?\n\n{text}", "Turn this text into bullet points:\n\n{text}",
    "Write three questions about this text:\n\n{text}", "Rewrite this text in a formal style:\n\n{text}",
)  # fmt: skip
_EXTRACTIONS = (
    "Extract the name, the city and the amount from this text as JSON:\n\n{record}",
    "List every person and product in this text:\n\n{record}",
    "From the text below, extract order number, customer and date.\n\n{record}",
    "Make a table of the data in this text:\n\n{record}", "Answer with JSON only. Extract all fields:\n\n{record}",
    "What is the order number in this text?\n\n{record}", "Copy all dates and amounts from this text:\n\n{record}",
)  # fmt: skip
_RECORDS = (
    "{name} {surname} from {city} ordered {count} {product}s on {date} for {amount} dollars. The order "
    "number is {order}.",
    "Order {order}: {product} (x{count}), ship to {name} {surname}, {city}. Total: ${amount}. Date: {date}.",
    "Dear {name} {surname}, thank you for your order {order} of {date}. We will send the {product} to {city}. You paid "
    "{amount} dollars.",
    "On {date}, {name} {surname}, a {job} in {city}, returned a {product} (order {order}) and got "
    "{amount} dollars back.",
    "Customer: {name} {surname}\nCity: {city}\nProduct: {product}\nQuantity: {count}\nPrice: {amount}\nDate: {date}\n"
    "Order: {order}",
)
_MATHS = (
    "What is {m} + {n}?", "What is {m} times {n}?", "What is {p}% of {amount}?",
    "{name} has {m} {thing}s and gives {n} to a friend. How many are left?",
    "A train travels {m} km in {n} hours. How fast is it?", "Solve for x: {n}x + {m} = {o}",
    "A {product} costs {amount} dollars. How much do {n} of them cost?", "List the first {n} multiples of {m}.",
    "Explain step by step how to compute {m} x {n}.", "Convert {m} kilometers to miles.",
)  # fmt: skip
_MONTHS = "January; February; March; April; May; June; July; August; September; October; November; December"

_HELD_OUT_CHAT = """
What is the capital of France and what is it known for?; Why is the sky blue?; Give me three tips for staying healthy.;
How does a refrigerator keep food cold?; Write a short poem about autumn.; What is the difference between a virus and a
bacterium?; Who was Albert Einstein?; Can you help me write an apology to my sister?; What should I cook for dinner with
eggs and spinach?; How do airplanes stay in the air?; Explain the theory of evolution in simple terms.; What are some
good habits for students?; Tell me a fun fact.; How can I make my apartment feel bigger?; What happened in 1969?;
Describe a perfect day at the beach.; What is the meaning of the word resilient?; How many planets are there, and which
is the largest?; Recommend a hobby for someone who likes to be outside.; Why do leaves change color?; How can I be more
confident?; What makes a good leader?; Write a message to congratulate a colleague.; What is artificial intelligence?;
How do I get over a bad day?; What is the fastest animal on land?; Why do we need to drink water?; How does the stock
market work?; Give me ideas for a rainy Sunday with kids.; What is the best way to learn a new language?; Explain how
a bill becomes a law.; What are the four seasons?; Tell me about the Great Wall of China.; What causes thunder?; How do
I write a good story?; What is a balanced diet?; Why is exercise good for the mind?; How do plants grow?; What are the
primary colors?; I can't sleep at night. What can I do?;
Who wrote Romeo and Juliet?; How do I make a paper boat?; What is the difference between weather and climate?; Give me a
short motivational quote and explain it.; How can I save energy at home?; What is a black hole?; Should I learn Python
or Java first?; Write a short story about a lost key.; What are the symptoms of a cold?; Explain compound interest.;
What can I do with leftover bread?; How do magnets work?; Tell me about the life of Marie Curie.; What is the largest
ocean?; How do I prepare for a job interview?; Why do cats purr?; What is democracy?; Write an invitation to a
birthday party.; What is the greenhouse effect?; How do I start running?; Name three famous painters and their works.;
What does a heart do?; How do I calm a crying baby?; Is coffee healthy?
"""
_HELD_OUT_TOPICS = """
lighthouses; the printing press; origami; the Silk Road; volleyball; sourdough starters; hot air balloons; sign
language; the immune system; honey; wind turbines; the Eiffel Tower; kangaroos; mirrors; crossword puzzles; the metric
system; umbrellas; sand dunes; trumpets; the number zero
"""
_HELD_OUT_CODE = """
counts how often each letter appears in a text; returns the second largest number of a list; converts Roman numerals to
integers; checks whether a bracket sequence is balanced; computes the median of a list; finds the longest word in a
sentence; prints all permutations of a string; simulates a traffic light; converts seconds to hours, minutes and
seconds; computes the power set of a set; zips two lists into a dictionary; swaps the keys and values of a dictionary;
calculates a tip; finds the common elements of two lists; replaces all spaces by dashes; prints the calendar of a month
"""

HELD_OUT_CHAT = words(_HELD_OUT_CHAT)


@dataclass(frozen=True)
class Prompt:
    """The messages of a conversation up to a user's turn, and its kind of text."""

    kind: str
    messages: tuple[Message, ...]


class PromptWriter:
    """Writes prompts, the same ones for the same seed."""

    def __init__(self, seed: int, held_out: bool = False) -> None:
        """`held_out`: from words and programs that the other writers do not have."""
        self._random, self._held_out = random.Random(seed), held_out
        self._topics = words(_HELD_OUT_TOPICS if held_out else lists.TOPICS)
        self._code_tasks = words(_HELD_OUT_CODE if held_out else lists.CODE_TASKS)
        self._functions = HELD_OUT_FUNCTIONS if held_out else FUNCTIONS
        self._fields: dict[str, list[str]] = {
            "activity": words(lists.ACTIVITIES), "thing": words(lists.THINGS), "animal": words(lists.ANIMALS),
            "name": words(lists.NAMES), "surname": words(lists.SURNAMES), "city": words(lists.CITIES),
            "job": words(lists.JOBS), "product": words(lists.PRODUCTS), "genre": words(lists.GENRES),
            "audience": words(lists.AUDIENCES), "language": words(lists.LANGUAGES), "month": words(_MONTHS),
        }  # fmt: skip

    def first_turn(self) -> Prompt:
        """Return a prompt of any kind that needs no text of the model."""
        writers: list[tuple[float, Callable[[], Prompt]]] = [
            (0.34, lambda: self._plain("chat", _CHAT)), (0.14, lambda: self._plain("chat", _HOW_TO)),
            (0.10, lambda: self._plain("chat", _STORIES)), (0.06, lambda: self._plain("chat", _MATHS)),
            (0.14, self.code), (0.11, self.code_edit), (0.11, self.extraction),
        ]  # fmt: skip
        weights, makes = zip(*writers, strict=True)
        return self._random.choices(makes, weights)[0]()

    def chat(self, index: int) -> Prompt:
        """Return a question of the held-out list, each of which there is once."""
        return self._prompt("chat", HELD_OUT_CHAT[index])

    def code(self) -> Prompt:
        return self._plain("code", _CODE)

    def code_edit(self) -> Prompt:
        """Return a program and what to change in it; now and then a question about it."""
        f, g = self._random.sample(words(FUNCTION_NAMES), 2)
        a, b, c = self._random.sample(words(VARIABLES), 3)
        code = self._random.choice(self._functions).format(f=f, a=a, b=b)
        is_edit = self._held_out or self._random.random() < 0.85
        form = self._random.choice(EDITS if is_edit else QUESTIONS)
        fenced = code if self._random.random() < 0.3 else f"```\n{code}```"
        return self._prompt("code edits", form.format(code=fenced, f=f, g=g, a=a, c=c))

    def extraction(self) -> Prompt:
        """Return a record in prose and what to take from it."""
        record = " ".join(self.record() for _ in range(self._random.randint(1, 2)))
        return self._prompt("extraction", self._random.choice(_EXTRACTIONS).format(record=record))

    def about(self, text: str) -> Prompt:
        """Return a question about a text that the model wrote."""
        forms, kind = (_SUMMARIES, "summaries")
        if not self._held_out and self._random.random() < 0.35:
            forms, kind = _ABOUT_TEXT, "extraction"
        return self._prompt(kind, self._random.choice(forms).format(text=text.strip()))

    def essay(self) -> Prompt:
        """Return a request for a text that can be summarized."""
        return self._prompt("essay", f"Write two paragraphs about {self._random.choice(self._topics)}.")

    def record(self) -> str:
        """Return an order or a letter with names, numbers and dates."""
        return self._filled(self._random.choice(_RECORDS))

    def opening(self) -> tuple[Message, ...]:
        """Return what stands before a user's turn that the model is to write: a system's turn, or nothing."""
        if self._random.random() < 0.3:
            return ({"role": "system", "content": self._random.choice(words(lists.SYSTEMS))},)
        return ()

    def opener(self) -> str:
        """Return the first words of a user's turn, or none."""
        return self._random.choice(words(lists.OPENERS)) if self._random.random() < 0.6 else ""

    def _plain(self, kind: str, forms: Sequence[str]) -> Prompt:
        return self._prompt(kind, self._filled(self._random.choice(forms)))

    def _prompt(self, kind: str, text: str) -> Prompt:
        system = () if self._held_out or self._random.random() > 0.15 else self.opening()
        return Prompt(kind, (*system, {"role": "user", "content": text}))

    def _filled(self, form: str) -> str:
        """Return the form with a word of each of its lists, the same one wherever it names a list again."""
        draw = self._random
        fields = {name: draw.choice(entries) for name, entries in self._fields.items()}
        topic, other = draw.sample(self._topics, 2)
        fields |= {"topic": topic, "other": other, "code_task": draw.choice(self._code_tasks)}
        fields |= {"m": str(draw.randint(3, 99)), "n": str(draw.randint(2, 12)), "o": str(draw.randint(20, 200))}
        fields |= {"p": str(draw.choice((5, 10, 12, 15, 20, 25, 40, 75))), "count": str(draw.randint(1, 9))}
        fields["amount"] = f"{draw.randint(5, 900)}.{draw.randint(0, 99):02d}"
        fields["order"] = f"{draw.choice('ABCDEFGH')}{draw.choice('KLMNPQ')}-{draw.randint(1000, 99999)}"
        year, month, day = draw.randint(2015, 2025), draw.randint(1, 12), draw.randint(1, 28)
        fields["date"] = draw.choice((f"{year}-{month:02d}-{day:02d}", f"{words(_MONTHS)[month - 1]} {day}, {year}"))
        return form.format(**fields)

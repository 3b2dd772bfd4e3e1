"""The prompts of bench.engine.speculation.

They are of five kinds, of which answers repeat more or less of the prompt.
"""

_ACCOUNT = '''class Account:
    """An account of a customer, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))
'''
_PARSER = '''def parse_line(line, separator=","):
    """Return the fields of a line."""
    fields = []
    field = ""
    quoted = False
    for character in line:
        if character == '"':
            quoted = not quoted
        elif character == separator and not quoted:
            fields.append(field.strip())
            field = ""
        else:
            field += character
    fields.append(field.strip())
    return fields
'''
_QUEUE = """import threading
from collections import deque

class WorkQueue:
    def __init__(self, size):
        self.size = size
        self.items = deque()
        self.lock = threading.Lock()
        self.ready = threading.Condition(self.lock)

    def put(self, item):
        with self.lock:
            while len(self.items) >= self.size:
                self.ready.wait()
            self.items.append(item)
            self.ready.notify_all()

    def get(self):
        with self.lock:
            while not self.items:
                self.ready.wait()
            item = self.items.popleft()
            self.ready.notify_all()
            return item
"""
_HANDLER = """async function loadUser(id) {
  const response = await fetch(`/api/users/${id}`);
  if (!response.ok) {
    throw new Error(`user ${id} could not be loaded: ${response.status}`);
  }
  const user = await response.json();
  const name = document.querySelector("#user-name");
  const email = document.querySelector("#user-email");
  name.textContent = user.name;
  email.textContent = user.email;
  return user;
}
"""
_HARBOUR = (
    "The old harbour of the town was built in 1784, when the herring trade had made its merchants rich. Three stone "
    "piers kept the winter storms out, and a lighthouse of red brick stood at the end of the longest. For a century "
    "more than two hundred boats left at dawn and came back in the evening, and the fish was salted in long sheds "
    "along the quay. Then the herring went north. By 1910 only thirty boats were left, and the sheds stood empty. A "
    "railway company bought the eastern pier in 1926 and used it for coal until the mines closed. Today the sheds are "
    "homes and workshops, the lighthouse is a museum, and in summer a ferry takes visitors to the islands twice a day."
)
_BATTERIES = (
    "Researchers at the university have shown that a battery with a solid electrolyte can be charged in less than ten "
    "minutes without losing much of its capacity. The cells were charged and discharged a thousand times and kept 91 "
    "percent of what they held at first. Solid electrolytes do not burn, which makes such batteries safer than those "
    "with liquids, but until now they cracked when they were charged fast. The group added a thin layer of carbon that "
    "gives way when the material swells. It is cheap to make, the authors write, and fits the machines that factories "
    "have. A company from the same city wants to build a small plant for such cells within two years."
)
_LETTER = (
    "Dear Ms. Keller,\nthank you for your order number 48213 of 12 March 2026. The two oak shelves (article BK-220) "
    "left our warehouse in Hamburg on Monday and will be delivered by Nordfracht on Friday, 20 March, between 9 and 12 "
    "o'clock. The desk lamp (article LM-77) is not in stock at the moment; we expect it on 2 April and will send it "
    "without further cost. The total of 418.50 euros was paid by credit card. If you have questions, call 040 555 0147 "
    "or write to orders@holzwerk.example.\nKind regards,\nJonas Petersen"
)
_TABLE = (
    "name: Ada Marsh, city: Leeds, age: 41, role: engineer\nname: Tom Birch, city: York, age: 29, role: designer\n"
    "name: Ines Rossi, city: Turin, age: 35, role: analyst\nname: Karl Weiss, city: Graz, age: 52, role: director\n"
    "name: Mei Lin, city: Leeds, age: 33, role: engineer\nname: Omar Said, city: Cairo, age: 47, role: analyst"
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What is the capital of France, and why is it famous?",
        "Explain to a child why the sky is blue.",
        "Give me three ideas for a rainy Sunday.",
        "How do I keep basil alive in a kitchen?",
        "What is the difference between a virus and a bacterium?",
        "Tell me a short story about a fox and a lighthouse.",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number, with a test.",
        "Write a Python class for a stack with push, pop and peek.",
        "Write a SQL query that lists customers with more than ten orders, and explain it.",
        "Write a Python function that checks whether a word is a palindrome.",
        "Write a JavaScript function that removes duplicates from an array.",
        "Write a Python function that merges two sorted lists.",
    ),
    "code edit": (
        f"Rename `balance` to `total` in this class. Answer with the whole class only.\n\n{_ACCOUNT}",
        f"Rename the parameter `separator` to `delimiter`. Answer with the whole function only.\n\n{_PARSER}",
        f"Add a method `close` at the end of this class. Answer with the whole file only.\n\n{_QUEUE}",
        f"Rename the function `loadUser` to `fetchUser`. Answer with the whole function only.\n\n{_HANDLER}",
        f"Repeat this class, with a docstring in each method.\n\n{_ACCOUNT}",
        f"Repeat this function, and write the character for quotes as a constant.\n\n{_PARSER}",
    ),
    "summary": tuple(
        f"{ask}\n\n{text}"
        for text in (_HARBOUR, _BATTERIES)
        for ask in (
            "Summarize this text in three sentences.",
            "What is this text about?",
            "Give a title and a summary.",
        )
    ),
    "extraction": (
        f"List the order number, the articles and the dates in this letter.\n\n{_LETTER}",
        f"Write the facts of this letter as JSON.\n\n{_LETTER}",
        f"Write these records as a JSON array.\n\n{_TABLE}",
        f"List the names and cities of all engineers.\n\n{_TABLE}",
        f"List every year and number in this text with what it means.\n\n{_HARBOUR}",
        f"Copy the sentences of this text that have a number in them.\n\n{_BATTERIES}",
    ),
}
"""Kind -> what a user says."""


def conversation(text: str) -> str:
    """Return the prompt as SmolLM2's chat template writes it, but for the system message."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

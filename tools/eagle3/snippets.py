"""Short programs that prompts ask the model to change; `{f}`, `{a}` and `{b}` stand for names."""

FUNCTIONS = (
    "def {f}({a}, {b}):\n    result = {a} + {b}\n    return result\n",
    "def {f}({a}):\n    total = 0\n    for {b} in {a}:\n        total += {b}\n    return total\n",
    "def {f}({a}):\n    if {a} < 2:\n        return {a}\n    return {f}({a} - 1) + {f}({a} - 2)\n",
    "def {f}({a}):\n    {b} = []\n    for item in {a}:\n        if item % 2 == 0:\n            {b}.append(item)\n"
    "    return {b}\n",
    "def {f}({a}):\n    {b} = {{}}\n    for word in {a}.split():\n        {b}[word] = {b}.get(word, 0) + 1\n"
    "    return {b}\n",
    "def {f}({a}, {b}=10):\n    for i in range({b}):\n        print({a} * i)\n",
    "def {f}({a}):\n    with open({a}) as {b}:\n        lines = {b}.readlines()\n    return len(lines)\n",
    "def {f}({a}):\n    {b} = {a}[0]\n    for value in {a}:\n        if value > {b}:\n            {b} = value\n"
    "    return {b}\n",
    "class Counter:\n    def __init__(self, {a}):\n        self.{a} = {a}\n\n    def {f}(self, {b}):\n"
    "        self.{a} += {b}\n        return self.{a}\n",
    "function {f}({a}) {{\n  let {b} = 0;\n  for (const x of {a}) {{\n    {b} += x;\n  }}\n  return {b};\n}}\n",
    "function {f}({a}, {b}) {{\n  if ({a} > {b}) {{\n    return {a};\n  }}\n  return {b};\n}}\n",
    "int {f}(int {a}, int {b}) {{\n    while ({b} != 0) {{\n        int t = {b};\n        {b} = {a} % {b};\n"
    "        {a} = t;\n    }}\n    return {a};\n}}\n",
    "def {f}({a}):\n    left, right = 0, len({a}) - 1\n    while left < right:\n        if {a}[left] != {a}[right]:\n"
    "            return False\n        left += 1\n        right -= 1\n    return True\n",
    "def {f}({a}, {b}):\n    try:\n        return {a} / {b}\n    except ZeroDivisionError:\n        return None\n",
    "import random\n\ndef {f}({a}):\n    {b} = random.choice({a})\n    print(f'You got {{{b}}}')\n    return {b}\n",
    "SELECT {a}, COUNT(*) AS {b}\nFROM orders\nGROUP BY {a}\nORDER BY {b} DESC;\n",
)
"""Those of training."""

HELD_OUT_FUNCTIONS = (
    "def {f}({a}):\n    {b} = ''\n    for character in {a}:\n        {b} = character + {b}\n    return {b}\n",
    "def {f}({a}, {b}):\n    matrix = []\n    for row in range({a}):\n        matrix.append([0] * {b})\n"
    "    return matrix\n",
    "class Account:\n    def __init__(self, owner, {a}):\n        self.owner = owner\n        self.{a} = {a}\n\n"
    "    def {f}(self, {b}):\n        if {b} > self.{a}:\n            raise ValueError('not enough money')\n"
    "        self.{a} -= {b}\n",
    "function {f}({a}) {{\n  const {b} = {a}.filter(item => item.price > 10);\n  return {b}.map(item => item.name);\n"
    "}}\n",
)
"""Those that only the evaluation has."""

FUNCTION_NAMES = """
compute; process; calculate; convert; get_value; find_item; handle; check; update; load_data; run; build; count_all;
filter_values; merge; parse; show; collect; search; solve
"""

VARIABLES = """
x; y; n; a; b; value; items; numbers; data; text; name; count; price; amount; values; user; index; size; key; words
"""

EDITS = (
    "Rename the variable {a} to {c} in this code:\n\n{code}",
    "Rename the function {f} to {g} in this code:\n\n{code}",
    "Add comments to this code:\n\n{code}",
    "Add a docstring to this function:\n\n{code}",
    "Rewrite this code with better variable names:\n\n{code}",
    "Add type hints to this code:\n\n{code}",
    "Add error handling to this code:\n\n{code}",
    "Repeat this code, but print the result before it is returned:\n\n{code}",
    "Copy this code and add an example of how to use it:\n\n{code}",
    "Change {a} to {c} everywhere in the following code and show the whole code.\n\n{code}",
)
"""What is asked of a program."""

QUESTIONS = (
    "Explain what this code does:\n\n{code}",
    "Is there a bug in this code?\n\n{code}",
    "Write a unit test for this code:\n\n{code}",
)

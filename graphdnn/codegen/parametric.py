"""One kernel for many shapes: numbers of a kernel's text that change with the shape become parameters.

A plan is always lowered for one shape, and its kernels' texts hold the numbers of that shape. Texts that differ in such numbers alone have one
:class:`Form`. Its kernel takes the numbers that were seen to differ as parameters ``dim0``, ``dim1``, ..., and every call passes those of its own
shape: put back into the text they give, letter for letter, the text that was lowered for it. So a kernel of a form is right for every shape of the
form, whatever an engine did with the numbers. A number that must be known when the kernel is compiled (a vector width, the size of a local array) is
never taken out: texts that differ in one have two forms. Numbers that were equal in all shapes seen so far share a parameter, or stay in the text.

(Anti-unification of terms: Plotkin, "A note on inductive generalization", Machine Intelligence 5, 1970; here of two lists of tokens.)
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from graphdnn.codegen import render
from graphdnn.codegen.recipes import launches, relaunched
from graphdnn.codegen.spec import Constant, KernelSpec, Launch, Recipe, ScalarParam

Owned = tuple[tuple[int, ...], ...]
TEMPLATE = "shared/parametric.py.j2"
PREFIX = "dim"
MAX_SAMPLES = 64
NEW_FORM = "the first shape of a form of a kernel"
NEW_NUMBER = "a number of a kernel that was the same for all shapes so far is another"
_HOLE = "\0"
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e[+-]?\d+)?|//|[<>=!]=|[-+*%<>=(),\[\]]")
_TYPES = frozenset(("float32", "float64", "int32", "int64", "uint32"))
_COUNTS = frozenset(("range", "min", "max"))
"""Calls whose arguments may be numbers of a shape. Arguments of others (a vector width, the size of a local array) are part of the form."""
_OPERATORS = frozenset(("+", "-", "*", "//", "%", "<", ">", "<=", ">=", "==", "="))
_SUFFIX = re.compile(r"_[0-9a-f]{10}$")


@dataclass(frozen=True)
class Text:
    """The body of a kernel with its numbers taken out: ``words`` with holes, and for each hole its number as written and its type."""

    header: tuple[str, ...]
    words: str
    numbers: tuple[str, ...]
    types: tuple[str, ...]


def taken_apart(spec: KernelSpec) -> Text:
    """The text of a kernel, printed and taken apart."""
    lines = render.render(spec).text.splitlines()
    start_of = next(i for i, line in enumerate(lines) if line.startswith(f"def {spec.name}("))
    body = [line for line in lines[start_of + 1 :] if not line.lstrip().startswith("#")]
    words, numbers, types, last = [], [], [], 0
    text = "\n".join(body)
    for start, end, type in _holes(text):
        words += [text[last:start], _HOLE]
        numbers.append(text[start:end])
        types.append(type)
        last = end
    return Text(tuple(lines[:start_of]), "".join((*words, text[last:])), tuple(numbers), tuple(types))


def _holes(text: str) -> Iterator[tuple[int, int, str]]:
    """Where numbers stand that could as well be parameters, and of what type: ``int64(7)``, ``range(7)``, ``min(x, 7)``, ``x * 7``. A number without
    a type is an int64, as it is for numba."""
    calls: list[str] = []
    tokens = list(_TOKEN.finditer(text))
    for at, token in enumerate(tokens):
        word = token[0]
        before, after = (tokens[i][0] if 0 <= i < len(tokens) else "" for i in (at - 1, at + 1))
        if word in "([":
            adjacent = at > 0 and tokens[at - 1].end() == token.start()
            calls.append(before if word == "(" and adjacent else word)
        elif word in ")]":
            del calls[-1:]
        elif word[0].isdigit():
            call, start = calls[-1] if calls else "", token.start()
            signed = before == "-" and at > 1 and tokens[at - 2][0] == "("
            if call in _TYPES and after == ")" and (before == "(" or signed):
                yield start - signed, token.end(), call
            elif word.isdigit() and (call in _COUNTS or (before in _OPERATORS and not signed)):
                yield start, token.end(), "int64"


@dataclass
class Form:
    """Texts that differ in numbers only. ``samples``: numbers of the shapes that told something new; ``spec``: the kernel for all shapes so far;
    ``slots``: for each number that is a parameter, which one."""

    text: Text
    samples: list[tuple[str, ...]]
    spec: KernelSpec
    slots: dict[int, int] = field(default_factory=dict)

    def fits(self, numbers: tuple[str, ...]) -> bool:
        """Whether the present kernel can be given ``numbers``: what is fixed is the same, and what shares a parameter is equal."""
        seen: dict[int, str] = {}
        for i, n in enumerate(numbers):
            slot = self.slots.get(i)
            if n != (self.samples[0][i] if slot is None else seen.setdefault(slot, n)):
                return False
        return True

    def arguments(self, numbers: tuple[str, ...]) -> tuple[Constant, ...]:
        """The values of the parameters for the shape that has ``numbers``."""
        values = {slot: _constant(numbers[i], self.text.types[i]) for i, slot in self.slots.items()}
        return tuple(values[s] for s in sorted(values))

    def widen(self, numbers: tuple[str, ...]) -> None:
        """Take one more shape in: decide the parameters anew and print the kernel for them."""
        if len(self.samples) >= MAX_SAMPLES:
            del self.samples[1]
        self.samples.append(numbers)
        columns = [tuple(s[i] for s in self.samples) for i in range(len(numbers))]
        found: dict[tuple[str, tuple[str, ...]], int] = {}
        self.slots = {
            i: found.setdefault((type, column), len(found))
            for i, (type, column) in enumerate(zip(self.text.types, columns, strict=True))
            if len(set(column)) > 1
        }
        names = iter([f"{PREFIX}{self.slots[i]}" if i in self.slots else n for i, n in enumerate(self.samples[0])])
        body = re.sub(_HOLE, lambda _: next(names), self.text.words).split("\n")
        params = tuple(ScalarParam(f"{PREFIX}{slot}", type) for (type, _), slot in found.items())
        self.spec = _kernel(self.spec, self.text, params, body)


def _constant(number: str, type: str) -> Constant:
    return Constant(float(number) if type.startswith("float") else int(number), type)


def _kernel(spec: KernelSpec, text: Text, params: tuple[ScalarParam, ...], body: list[str]) -> KernelSpec:
    """``spec`` with the numbers as parameters in front of its own."""
    own = spec.params[next((i for i, p in enumerate(spec.params) if not p.name.startswith(PREFIX)), len(spec.params)) :]
    title = f"# for every shape: {', '.join(p.name for p in params) or 'nothing'} changes with it; printed first for this one:"
    digest = hashlib.sha256(repr((text.words, body, own)).encode()).hexdigest()[:10]
    kept = {k: v for k, v in spec.fields.items() if k == "calc"}
    fields = kept | {"header": [title, *text.header], "first": "lo, hi, " if spec.block == 0 else "", "body": body}
    return replace(spec, template=TEMPLATE, name=f"{_SUFFIX.sub('', spec.name)}_{digest}", params=params + own, fields=fields)


class Forms:
    """All forms met so far; threads may share them. ``news``: why kernels had to be compiled, in order."""

    def __init__(self) -> None:
        """None yet."""
        self.news: list[str] = []
        self._forms: dict[str, Form] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._forms)

    def known(self, specs: Iterable[KernelSpec]) -> bool:
        """Whether there is a kernel for each of ``specs`` already."""
        with self._lock:
            looked = [self._look(k) for k in specs]
            return all(form is not None and form.fits(text.numbers) for form, text in looked)

    def formed(self, specs: Iterable[KernelSpec]) -> bool:
        """Whether each of ``specs`` has a form that is there already, whose kernel may have to take in more numbers."""
        with self._lock:
            return all(self._look(k)[0] is not None for k in specs)

    def kernel(self, spec: KernelSpec) -> tuple[KernelSpec, tuple[Constant, ...]]:
        """The kernel that runs the shape of ``spec``, and the arguments for its further parameters, which come before those of ``spec``."""
        with self._lock:
            form, text = self._look(spec)
            if form is None:
                form = self._forms[_key(spec, text)] = Form(text, [], spec)
                self.news.append(NEW_FORM)
                form.widen(text.numbers)
            elif not form.fits(text.numbers):
                self.news.append(NEW_NUMBER)
                form.widen(text.numbers)
            return form.spec, form.arguments(text.numbers)

    def learn(self, spec: KernelSpec) -> None:
        """Let the kernel of a form that is there already fit the shape of ``spec`` too."""
        with self._lock:
            form, text = self._look(spec)
            if form is not None and not form.fits(text.numbers):
                form.widen(text.numbers)

    def _look(self, spec: KernelSpec) -> tuple[Form | None, Text]:
        text = taken_apart(spec)
        return self._forms.get(_key(spec, text)), text


def _key(spec: KernelSpec, text: Text) -> str:
    """What kernels of one form have in common."""
    layout = (spec.params, spec.block, spec.shared_bytes, spec.min_blocks, spec.cluster, spec.shared, spec.roles, spec.fields.get("calc"))
    return hashlib.sha256(repr((text.words, text.types, layout)).encode()).hexdigest()


def launched(recipe: Recipe) -> list[int]:
    """Numbers of the kernels that something launches; where a grid is empty there is nothing to compile."""
    empty = {id(s) for s in recipe.steps if isinstance(s, Launch) and not s.grid}
    return list(dict.fromkeys(x.kernel for x in launches(recipe) if id(x) not in empty))


def parametric(recipe: Recipe, owned: Owned, forms: Forms) -> tuple[Recipe, Owned]:
    """The recipe with kernels that take the numbers of its shape as arguments; ``owned``: for each region the indexes of its kernels."""
    kept = launched(recipe)
    made = {k: forms.kernel(recipe.kernels[k]) for k in kept}
    place = {k: i for i, k in enumerate(kept)}

    def change(x: Launch) -> Launch:
        return replace(x, kernel=place[x.kernel], args=made[x.kernel][1] + x.args)

    steps = tuple(relaunched(s, change) for s in recipe.steps if not (isinstance(s, Launch) and not s.grid))
    return replace(recipe, kernels=tuple(made[k][0] for k in kept), steps=steps), tuple(tuple(place[k] for k in row if k in place) for row in owned)

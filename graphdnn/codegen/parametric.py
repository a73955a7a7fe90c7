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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphdnn.codegen import render
from graphdnn.codegen.recipes import launches, relaunched
from graphdnn.codegen.spec import Constant, KernelSpec, Launch, Recipe, ScalarParam
from graphdnn.ir.extent import plain

Owned = tuple[tuple[int, ...], ...]
Shape = tuple[str, tuple[str, ...]]
TEMPLATE = "shared/parametric.py.j2"
PREFIX = "dim"
MAX_SHAPES = 4096
"""Shapes of kernels whose numbers are kept; the oldest goes first."""
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


@dataclass(frozen=True)
class Form:
    """Texts that differ in numbers only. ``text``: of the first shape; ``spec``: the kernel for all shapes so far. ``classes``: of each number, equal
    for two that were equal to one another in every shape; ``varying``: places of the numbers that were not the same in all shapes."""

    text: Text
    spec: KernelSpec
    classes: tuple[int, ...]
    varying: tuple[int, ...]

    @staticmethod
    def of(spec: KernelSpec, text: Text) -> Form:
        """The form of the first shape, where no number is a parameter yet."""
        return _form(spec, text, list(zip(text.types, text.numbers, strict=True)), ())

    @cached_property
    def slots(self) -> dict[int, int]:
        """For each number that varies, which parameter it is."""
        numbers: dict[int, int] = {}
        return {i: numbers.setdefault(self.classes[i], len(numbers)) for i in self.varying}

    def fits(self, numbers: tuple[str, ...]) -> bool:
        """Whether the present kernel can be given ``numbers``: what is fixed is the same, and what shares a parameter is equal."""
        seen: dict[int, str] = {}
        slots = self.slots
        for i, n in enumerate(numbers):
            if n != (seen.setdefault(slots[i], n) if i in slots else self.text.numbers[i]):
                return False
        return True

    def arguments(self, numbers: tuple[str, ...]) -> tuple[Constant, ...]:
        """The values of the parameters for the shape that has ``numbers``."""
        values = {slot: _constant(numbers[i], self.text.types[i]) for i, slot in self.slots.items()}
        return tuple(values[s] for s in sorted(values))

    def widened(self, numbers: tuple[str, ...]) -> Form:
        """The form that takes one more shape in; its kernel is another one."""
        changed = (i for i, (a, b) in enumerate(zip(numbers, self.text.numbers, strict=True)) if a != b)
        return _form(self.spec, self.text, list(zip(self.classes, numbers, strict=True)), tuple(sorted({*self.varying, *changed})))


def _form(spec: KernelSpec, text: Text, signs: Sequence[Hashable], varying: tuple[int, ...]) -> Form:
    """The form whose numbers are alike where their ``signs`` are; prints its kernel."""
    known: dict[Hashable, int] = {}
    form = Form(text, spec, tuple(known.setdefault(s, len(known)) for s in signs), varying)
    slots = form.slots
    names = iter([f"{PREFIX}{slots[i]}" if i in slots else n for i, n in enumerate(text.numbers)])
    body = re.sub(_HOLE, lambda _: next(names), text.words).split("\n")
    types = {slot: text.types[i] for i, slot in slots.items()}
    params = tuple(ScalarParam(f"{PREFIX}{slot}", types[slot]) for slot in sorted(types))
    return replace(form, spec=_kernel(spec, text, params, body))


def _constant(number: str, type: str) -> Constant:
    return Constant(float(number) if type.startswith("float") else int(number), type)


def _kernel(spec: KernelSpec, text: Text, params: tuple[ScalarParam, ...], body: list[str]) -> KernelSpec:
    """``spec`` with the numbers as parameters in front of its own."""
    own = spec.params[next((i for i, p in enumerate(spec.params) if not p.name.startswith(PREFIX)), len(spec.params)) :]
    title = f"# for every shape: {', '.join(p.name for p in params) or 'nothing'} changes with it; printed first for this one:"
    digest = hashlib.sha256(repr((text.words, body, own)).encode()).hexdigest()[:10]
    kept = {k: v for k, v in spec.fields.items() if k == "calc"}
    fields = kept | {"header": (title, *text.header), "first": "lo, hi, " if spec.block == 0 else "", "body": tuple(body)}
    return replace(spec, template=TEMPLATE, name=f"{_SUFFIX.sub('', spec.name)}_{digest}", params=params + own, fields=fields)


class Forms:
    """All forms met so far; threads may share them. ``news``: why kernels had to be compiled, in order. ``shapes``: digest of a kernel's spec for one
    shape -> its form and its numbers, so that a shape that was seen is not printed again."""

    def __init__(self, forms: Mapping[str, Form] | None = None, shapes: Mapping[str, Shape] | None = None) -> None:
        """None, or those of another ``Forms``."""
        self.news: list[str] = []
        self.forms: dict[str, Form] = dict(forms or {})
        self.shapes: dict[str, Shape] = dict(shapes or {})
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.forms)

    def known(self, specs: Iterable[KernelSpec]) -> bool:
        """Whether there is a kernel for each of ``specs`` already."""
        with self._lock:
            return all(key in self.forms and self.forms[key].fits(numbers) for key, numbers in map(self._shape, specs))

    def formed(self, specs: Iterable[KernelSpec]) -> bool:
        """Whether each of ``specs`` has a form that is there already, whose kernel may have to take in more numbers."""
        with self._lock:
            return all(self._shape(k)[0] in self.forms for k in specs)

    def kernel(self, spec: KernelSpec) -> tuple[KernelSpec, tuple[Constant, ...]]:
        """The kernel that runs the shape of ``spec``, and the arguments for its further parameters, which come before those of ``spec``."""
        with self._lock:
            key, numbers = self._shape(spec)
            form = self.forms.get(key)
            if form is None:
                self.news.append(NEW_FORM)
                form = self.forms[key] = Form.of(spec, taken_apart(spec))
            elif not form.fits(numbers):
                self.news.append(NEW_NUMBER)
                form = self.forms[key] = form.widened(numbers)
            return form.spec, form.arguments(numbers)

    def learn(self, spec: KernelSpec) -> None:
        """Let the kernel of a form that is there already fit the shape of ``spec`` too."""
        with self._lock:
            key, numbers = self._shape(spec)
            form = self.forms.get(key)
            if form is not None and not form.fits(numbers):
                self.forms[key] = form.widened(numbers)

    def _shape(self, spec: KernelSpec) -> Shape:
        digest = spec.digest()
        found = self.shapes.get(digest)
        if found is None:
            text = taken_apart(spec)
            while len(self.shapes) >= MAX_SHAPES:
                del self.shapes[next(iter(self.shapes))]
            found = self.shapes[digest] = (_key(spec, text), text.numbers)
        return found


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

    steps = tuple(plain(relaunched(s, change)) for s in recipe.steps if not (isinstance(s, Launch) and not s.grid))
    recipe = replace(recipe, kernels=tuple(made[k][0] for k in kept), steps=steps, workspace=int(recipe.workspace))
    return recipe, tuple(tuple(place[k] for k in row if k in place) for row in owned)

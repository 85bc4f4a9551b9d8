"""Configuration rules as tables of text, from which errors and remedies are made. No torch.

A row of a table is (condition, second condition, reason), and a remedy where none can be derived. A
configuration in which both conditions hold is refused; the error names the first key of the first
condition. A condition compares keys with words or with other keys::

    parallel.context == ring and mesh.cp > 1        train.dtype != bfloat16|float32
    not parallel.overlap_all_to_all                 train.fp8 != default
    parallel.recompute has moe                      optim.momentum outside 0|1

``a % b`` holds if b does not divide a; the error then shows the arithmetic and the nearest valid
numbers. Both a and b may be products (``mesh.cp * mesh.tp``), and a may be a quotient (``a //
b``). With ``KEY: a % b`` the error names KEY (for the computed ``model.expert_hidden_size``, the
key that sets it). Reasons and remedies may have expressions in braces, such as ``{mesh.cp *
mesh.tp}``. ``facts.NAME`` is a value that the caller computed (``Scope.knowing``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import gcd
from operator import attrgetter, floordiv, mod, mul
from types import SimpleNamespace
from typing import Any, NamedTuple

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config, MeshConfig
from automoe.errors import ConfigError

# key, whether its rule is broken, the rule with numbers, the remedy
Row = tuple[str, bool, str, str]
Table = tuple[tuple[str, ...], ...]

_WORDS = {"true": True, "false": False, "null": None}
_SIGNS = ((" % ", mod), (" // ", floordiv), (" * ", mul))
# operator -> whether it is true of the left side and the list of the values on the right
_HOLDS: dict[str, Callable[[Any, list[Any]], bool]] = {
    "": lambda value, choices: bool(value),
    "not": lambda value, choices: not value,
    "==": lambda value, choices: value in choices,
    "!=": lambda value, choices: value not in choices,
    "has": lambda value, choices: any(word in listed(value) for word in choices),
    "outside": lambda value, choices: not choices[0] <= value < choices[1],
    "<": lambda value, choices: value < choices[0],
    "<=": lambda value, choices: value <= choices[0],
    ">": lambda value, choices: value > choices[0],
    ">=": lambda value, choices: value >= choices[0],
}
_NAME = re.compile(r"[a-z_]\w*(?:\.[a-z_]\w*)*")
_FIELD = re.compile(r"\{([\w.]+(?: (?:\*|//|%) [\w.]+)*)\}")
# A size of the model in a remedy, with the number beside it and what leads to the next one. These keys of the model
# are the user's own, whatever the checkpoint has.
_OWN = r"hf_path|vocab_size|num_mtp_layers|random_weights|upcycle|rope\.\w+"
_OF_MODEL = re.compile(
    r"(?:Set |Nearest valid choices?: )?model\.(?!(?:" + _OWN + r")\b)[\w.]+(?:=| to )[^\s,]+"
    r"(?: or (?:more|less|[\d.]+))?(?:, or |$)"
)
# What a user wants or has: it is not advised to change for the sake of another key.
_GIVEN = ("model.", "mesh.", "launch.", "recipe")


class Scope(NamedTuple):
    """Values for the names that a configuration rule uses.

    Attributes:
        config: the configuration, for keys such as ``train.dtype``.
        mesh: the resolved mesh, or the section ``mesh``, for ``mesh.*``.
        device: value of ``launch.device``: cpu, cuda or auto.
        facts: computed values, for ``facts.NAME``.
    """

    config: Config
    mesh: MeshShape | MeshConfig
    device: str = "auto"
    facts: SimpleNamespace = SimpleNamespace()

    def knowing(self, **facts: object) -> Scope:
        """Return a copy in which rules can also read each argument NAME as ``facts.NAME``."""
        return self._replace(facts=SimpleNamespace(**(vars(self.facts) | facts)))

    def __call__(self, text: str) -> Any:
        """Return the value of an expression such as ``mesh.cp``, ``8`` or ``mesh.cp * mesh.tp``."""
        return _reader(text)(self)


@cache
def _reader(text: str) -> Callable[[Scope], Any]:
    for sign, calculate in _SIGNS:
        before, sign_text, after = text.partition(sign)
        if sign_text:
            left, right = _reader(before), _reader(after)
            return lambda see: calculate(left(see), right(see))
    if text.isdecimal():
        return lambda see: int(text)
    if text == "launch.device":
        return attrgetter("device")
    return attrgetter(text if text.startswith(("mesh.", "facts.")) else f"config.{text}")


_PLAIN = Scope(Config(), MeshShape.of(MeshConfig(dp_shard=1, ep_shard=1)))


class Comparison(NamedTuple):
    """A comparison in a rule's condition, such as ``mesh.cp > 1``, which ``parsed`` makes from text.

    Attributes:
        key: config key that an error names and a remedy sets.
        number: text of the expression on the left.
        operator: ``==``, ``<``, ``has`` ... between the sides; without a right side ``not``, or ''
            (the left side is true).
        choices: texts of the values on the right, e.g. several for ``==``, of which one must match.
        reader: function of a configuration's ``Scope`` that returns the value of the left side.
        values: function of a ``Scope`` that returns the list of the values of ``choices``.
        holds: function of these two results that returns whether the comparison is true.
    """

    key: str
    number: str
    operator: str
    choices: tuple[str, ...]
    reader: Callable[[Scope], Any]
    values: Callable[[Scope], list[Any]]
    holds: Callable[[Any, list[Any]], bool]

    @property
    def uneven(self) -> bool:
        """True for ``a % b``, a comparison that holds if b does not divide a."""
        return " % " in self.number and not self.operator

    def keys(self) -> list[str]:
        """Return the config keys that the comparison reads, except ``launch.device``."""
        names = [*_NAME.findall(self.number), *(word for word in self.choices if "." in word)]
        return [name for name in names if is_key(name) and name != "launch.device"]

    def ways(self, see: Scope) -> list[str]:
        """Return settings such as ``mesh.cp=1`` for a remedy; each makes the comparison false.

        Args:
            see: values of the present configuration.
        """
        if self.uneven:
            return self._even(see)
        values, usual = self.values(see), _PLAIN(self.key)
        tried = [usual, *values, *([not usual] if isinstance(usual, bool) else [])]
        if self.operator == "has":
            tried = [[word for word in listed(see(self.key)) if word not in values]]
        elif self.operator in ("<", ">"):  # the bound is nearer than the usual value
            tried = [*values, usual]
        right = [value for value in tried if not self.holds(value, values)]
        more = " or less" if self.operator == ">" and "." in self.choices[0] else ""
        more = " or more" if self.operator == "<" else more
        return [f"{self.key}={shown(value)}{more}" for value in right[:1]]

    def _even(self, see: Scope) -> list[str]:
        number, _, unit = self.number.partition(" % ")
        axes = [name for name in unit.split() if name.startswith("mesh.")]
        if self.key not in number.split():  # it divides, or an axis of the mesh does
            return self._divisor(see, self.key if self.key in unit.split() else axes[0])
        product, _, over = number.partition(" // ")
        value = see(self.key)
        step = see(unit) * (see(over) if over else 1)
        step //= gcd(step, see(product) // value)
        below = value // step * step
        near = f"{self.key}={below} or {below + step}" if below else f"{self.key}={step}"
        # ep_shard follows from the other axes.
        alone = len(axes) == 1 and axes != ["mesh.ep_shard"] and "mesh." not in number
        return [near, *(self._divisor(see, axes[0]) if alone else [])]

    def _divisor(self, see: Scope, key: str) -> list[str]:
        """Return ``[key=N]``, a remedy for ``a % b`` with which b divides a; [] if no N does that.

        N is the value nearest to the present one. For a mesh axis, N also divides its present size.

        Args:
            see: the configuration's values.
            key: configuration key to change, a factor of the divisor.
        """
        number, _, unit = self.number.partition(" % ")
        value = see(key)
        rest = see(unit) // value
        fits = [n for n in range(1, 2 * value + 1) if see(number) % (rest * n) == 0]
        if key.startswith("mesh."):
            fits = [n for n in fits if value % n == 0]
        near = sorted(fits, key=lambda n: (abs(n - value), n))
        return [f"{key}={n}" for n in near[:1]]

    def arithmetic(self, see: Scope) -> str:
        """Return ``a % b`` as text for an error: ``: cp*tp = 2*4 = 8 does not divide 66 (66 % 8 = 2)``.

        Call this method only if the comparison is ``uneven``.

        Args:
            see: the configuration's values.
        """
        number, _, unit = self.number.partition(" % ")
        sums = []
        for side in (unit, number):
            text = str(see(side))
            if " " in side:
                short = re.sub(r"[\w.]+\.", "", side)
                filled_in = re.sub(r"[\w.]+", lambda match: shown(see(match[0])), side)
                text = f"{short} = {filled_in} = {text}".replace(" * ", "*")
                text = re.sub(r"// (\w+\*[\w*]+)", r"/ (\1)", text).replace("//", "/")
            sums.append(text)
        rest = f"{see(number)} % {see(unit)} = {see(self.number)}"
        return f": {' does not divide '.join(sums)} ({rest})"


@cache
def is_key(name: str) -> bool:
    """Return True if ``name`` is a key of the configuration.

    It is False for a number, a computed property such as ``mesh.fsdp``, ``facts.NAME``, and a key
    that a recipe declares.
    """
    section, _, field = name.rpartition(".")
    if not _NAME.fullmatch(name) or name.startswith("facts."):
        return False
    holder = _PLAIN(section) if section else _PLAIN.config
    return field in getattr(holder, "__dict__", ())  # what a recipe declares has no usual value


@cache
def parsed(condition: str) -> tuple[Comparison, ...]:
    """Parse ``condition``, comparisons joined by ``and``; '' gives an empty tuple."""
    parts = []
    for text in condition.split(" and ") if condition else ():
        subject, _, text = text.rpartition(": ")
        number, operator, words = text.removeprefix("not "), "not" * text.startswith("not "), ""
        if (sides := text.rsplit(" ", 2))[1:2] and sides[1] in _HOLDS:
            number, operator, words = sides
        key = subject or number.split(" ")[0]
        choices = tuple(words.split("|")) if words else ()
        read, values = _reader(number), _values(choices, key)
        parts.append(Comparison(key, number, operator, choices, read, values, _HOLDS[operator]))
    return tuple(parts)


def _values(words: Sequence[str], key: str) -> Callable[[Scope], list[Any]]:
    """Return a function that computes, from a ``Scope``, the values on a comparison's right side.

    Args:
        words: each is ``true``, a number, another dotted key, ``default`` (of ``key``), or any
            text.
        key: configuration key on the left.
    """
    values: list[Any] = [_WORDS.get(word, word) for word in words]
    read = {}
    for place, word in enumerate(words):
        if re.fullmatch(r"[\d.]+", word):
            values[place] = float(word) if "." in word else int(word)
        elif word == "default":
            values[place] = _PLAIN(key)
        elif "." in word:
            read[place] = _reader(word)
    if not read:
        return lambda see: values
    return lambda see: [read[n](see) if n in read else value for n, value in enumerate(values)]


def table(text: str, **words: object) -> Table:
    """Parse text into a table of rules: a row on each line, a tuple of cells separated by `` | ``.

    Indented lines continue a row. A cell with several conditions (``A; B``) gives as many rows.

    Args:
        words: replacements: where ``text`` has a keyword argument's name as a word, the argument's
            value takes its place.
    """
    if words:
        text = re.sub(rf"\b({'|'.join(words)})\b", lambda match: str(words[match[1]]), text)
    rows = re.sub(r"\n\s+", " ", text.strip()).split("\n")
    cells = ([cell.strip() for cell in re.split(r" \|(?= |$)", row)] for row in rows)
    return tuple(
        (first, second, *rest)
        for firsts, seconds, *rest in cells
        for first in firsts.split("; ")
        for second in seconds.split("; ")
    )


def holding(see: Scope, *tables: Table) -> Iterator[tuple[str, ...]]:
    """Yield the rows (rules) of ``tables`` whose two conditions, the first two cells, hold for the settings ``see``."""
    for rows in tables:
        for row in rows:
            for part in _parts(row):
                if not part.holds(part.reader(see), part.values(see)):
                    break
            else:
                yield row


@cache
def _parts(row: tuple[str, ...]) -> tuple[Comparison, ...]:
    # The second condition comes first: it may be that a divisor of the first is not zero.
    return parsed(row[1]) + parsed(row[0])


def refused(see: Scope, *tables: Table) -> Iterator[Row]:
    """Yield (key, True, rule, remedy) of each rule in ``tables`` that the settings ``see`` break.

    ``key`` is the configuration key to blame, and True means broken. ``rule`` is a sentence that
    states the rule with the present values; ``remedy`` is a sentence that says what to change.
    """
    for row in holding(see, *tables):
        yield _row(see, *row)


def _row(see: Scope, condition: str, also: str, reason: str, remedy: str = "") -> Row:
    """Return (key, broken=True, rule, remedy) of a broken rule, from the cells of its row in a table.

    The rule is ``reason``, followed by those settings in the conditions, with their values, that
    ``reason`` does not show. If ``remedy`` is empty or begins with a comma, settings that make a
    condition false come before it.

    Args:
        see: the configuration's values.
        condition, also: the row's two conditions.
    """
    latent = see("model.moe_latent_size")
    width = "model.moe_latent_size" if latent else "model.hidden_size"
    first = parsed(condition.replace("model.expert_hidden_size", width))
    key, parts = first[0].key, first + parsed(also)
    rule = filled(see, reason) + "".join(part.arithmetic(see) for part in first if part.uneven)
    said = []
    for name in dict.fromkeys(name for part in parts for name in part.keys() if name != key):
        field = name.rpartition(".")[2]
        text = f"{name}={shown(see(name))}"
        in_rule = text in rule or re.search(rf"\b{field}( [/=]|\*)", rule)
        if f"{{{name}}}" not in reason and not in_rule:
            said.append(text)
    if said:
        rule = rule[:-1] + ", " if rule.endswith(")") else rule + " ("
        rule += ", ".join(said) + ")"
    remedy = filled(see, remedy)
    if not remedy or remedy.startswith(","):
        uneven = [part for part in first if part.uneven and key in part.number.split()]
        ways = [
            way
            for part in uneven or parts
            if part.key == key or is_key(part.key) and not part.key.startswith(_GIVEN)
            for way in part.ways(see)
        ]
        remedy = f"Set {', or '.join(dict.fromkeys(ways))}{remedy}"
    return key, True, rule, remedy


def filled(see: Scope, text: str) -> str:
    """Replace expressions in braces, such as ``{mesh.cp * mesh.tp}``, in ``text`` by their values.

    Args:
        see: the configuration's values.
    """
    return _FIELD.sub(lambda match: shown(see(match[1])), text)


def shown(value: Any) -> str:
    """Return ``value`` as an override spells it: ``true``, ``null``, ``[a,b]``."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def listed(value: Any) -> list[Any]:
    """Return the value of a setting as a list: a single word becomes a list of one."""
    return [value] if isinstance(value, str) else list(value)


def check_rows(config: Config, rows: Iterable[Row], shape: MeshShape | None = None) -> None:
    """Raise ``ConfigError`` for the first broken rule.

    Args:
        rows: (key, whether broken, rule, remedy) of each rule. Pass a generator: a rule may divide
            by a number that an earlier one found not to be zero.
        shape: resolved mesh, whose values the error shows for ``mesh.*``; None shows the config's.
    """
    for key, broken, rule, remedy in rows:
        if broken:
            value = Scope(config, shape or config.mesh, config.launch.device)(key)
            if config.model.hf_path is not None:
                remedy = re.sub(r"(?<=model\.vocab_size=)\d+ or ", "", remedy)
            if config.model.hf_path is not None and (rest := _OF_MODEL.sub("", remedy)) != remedy:
                remedy = "The checkpoint model.hf_path has these sizes"
                rest = rest.removesuffix(", or ")
                remedy += f": set {rest.removeprefix('Set ')}" if rest else ", so name another one"
            raise ConfigError(key, list(value) if isinstance(value, tuple) else value, rule, remedy)

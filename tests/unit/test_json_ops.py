"""Damage of the text of every op: one value replaced or removed gives a typed error, or a graph that has plans and another text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

import graphdnn
from graphdnn import data_type
from graphdnn.ir.jsontext import float_hex
from graphdnn.opspecs import registry
from tests.api_table import ROWS
from tests.api_table.row import Case

DAMAGES = 500
WORDS = ["", "a", "ADD", "S", "#0", "T:0", "7FC00000", "FF800000", "00000000", "0000000000000000", "INT4", "INT8x4", "FP8_E8M0", "DOUBLE", "BOOLEAN"]
NUMBERS = [0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64, 10**400, -(10**30), 0.5, -2.5, 1e39, 1e308]
LISTS = [[], [None], [1], [1, 1, 1], [-1, 2], [0, 0, 0], [[1, 2]], [[None, None]], [[0, 0]], [["ADD", ["S", 1.0], []]], [["SOFTPLUS_FWD", ["S"], []]]]
SCALARS = [{}, {"index": 3, "value": "7F800000"}, {"index": 0, "value": 2**40}]
VALUES: list[Any] = [None, True, False, float("nan"), float("inf"), -float("inf"), *NUMBERS, *WORDS, *LISTS, *SCALARS]


def alone(whole: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The text of a graph of one of its nodes."""
    keys = {str(k) for k in (*node["inputs"].values(), *node["outputs"].values())}
    tensors = whole["tensors"]
    keys |= {str(tensors[k].get(name)) for k in keys for name in ("ragged_offset_uid", "ragged_offset_name")} & set(tensors)
    kept = {k: dict(tensors[k]) for k in keys}
    for k in node["inputs"].values():
        kept[str(k)]["is_virtual"] = False
    return {**whole, "nodes": [node], "tensors": kept}


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Tag -> texts of graphs of one op, by mode and ports."""
    found: dict[tuple[Any, ...], str] = {}
    for row in ROWS.values():
        g = graphdnn.pygraph(device="cpu", io_data_type=row.types[0].io, intermediate_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT)
        row.declare(Case(g, row.types[0]))
        whole = json.loads(str(g))
        for n in whole["nodes"]:
            found.setdefault((n["tag"], n.get("mode"), *n["inputs"], "", *n["outputs"]), json.dumps(alone(whole, n), sort_keys=True))
    by_tag: dict[str, list[str]] = {}
    for (tag, *_), text in found.items():
        by_tag.setdefault(tag, []).append(text)
    return by_tag


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) inside of a value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(inner)


def damaged(text: str, rng: random.Random) -> tuple[str, str]:
    """A text with one value replaced or removed, and what was done to it."""
    whole = json.loads(text)
    container, key = rng.choice(list(places(whole[rng.choice(["nodes", "nodes", "tensors", "tensors", "context"])])))
    old = container[key]
    if rng.random() < 0.15:
        del container[key]
        return json.dumps(whole), f"{key}: {old} removed"
    container[key] = rng.choice(VALUES)
    return json.dumps(whole), f"{key}: {old} -> {str(container[key])[:40]}"


def outcome(text: str) -> str:
    """What becomes of a text. Whatever is raised but GraphError is raised here."""
    g = graphdnn.pygraph(device="cpu")
    try:
        g.deserialize(text)
        g.build_operation_graph()
    except graphdnn.GraphError:
        return "refused"
    graphdnn.pygraph(device="cpu").deserialize(str(g))
    try:
        g.create_execution_plans([graphdnn.heur_mode.A])
        g.check_support()
    except graphdnn.GraphError:
        return "unsupported"
    return "valid"


def test_every_op_by_itself_is_valid(texts):
    assert set(texts) == {tag for tag, spec in registry.every().items() if not spec.internal}
    for tag, some in texts.items():
        assert outcome(some[0]) == "valid", tag


def test_one_damage_gives_a_typed_error_or_a_valid_graph(texts):
    rng, counts = random.Random(20261129), dict.fromkeys(("refused", "unsupported", "valid"), 0)
    for _ in range(DAMAGES):
        tag = rng.choice(list(texts))
        text, what = damaged(rng.choice(texts[tag]), rng)
        try:
            counts[outcome(text)] += 1
        except Exception as error:
            raise AssertionError(f"{tag}, {what}") from error
    assert counts["refused"] > DAMAGES // 2 and counts["valid"] > DAMAGES // 20, counts


STEPS = {
    "forward reference": [["ADD", ["S", "#0"], []]],
    "no such result": [["ADD", ["S", "#7"], []]],
    "no such tensor": [["ADD", ["S", "T:7"], []]],
    "a word": [["ADD", ["S", "INT4"], []]],
    "the score in a forward pass": [["ADD", ["S", "P"], []]],
    "too few operands": [["ADD", ["S"], []]],
    "too many operands": [["NEG", ["S", "S"], []]],
    "no mode": [["TELEPORT", ["S"], []]],
    "foreign attribute": [["NEG", ["S"], [["elu_alpha", 1.0]]]],
    "no axis": [["GEN_INDEX", ["S"], []]],
    "axis out of range": [["GEN_INDEX", ["S"], [["axis", 4]]]],
    "fractional axis": [["GEN_INDEX", ["S"], [["axis", 0.5]]]],
    "nan": [["ELU_FWD", ["S"], [["elu_alpha", float("nan")]]]],
    "division by zero": [["SOFTPLUS_FWD", ["S"], [["softplus_beta", 0.0]]]],
}


@pytest.mark.parametrize("tag", ["SDPA", "SDPA_BWD"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_a_score_mod_that_mean_nothing(texts, tag, name):
    whole = json.loads(texts[tag][0])
    whole["nodes"][0]["score_mod"] = STEPS[name]
    g = graphdnn.pygraph(device="cpu")
    g.deserialize(json.dumps(whole))
    with pytest.raises(graphdnn.ValidationError):
        g.validate()


def test_softplus_whose_beta_is_zero_where_it_calculates():
    """Attributes beside DOUBLE tensors are kept in DOUBLE; the node may calculate in FLOAT all the same."""
    g = graphdnn.pygraph(device="cpu", io_data_type=data_type.DOUBLE)
    x = g.tensor(dim=[2, 3], stride=[3, 1], name="x")
    g.softplus(x, compute_data_type=data_type.FLOAT).set_output(True)
    whole = json.loads(str(g))
    whole["nodes"][0]["softplus_beta"] = float_hex(1e-60, wide=True)
    g.deserialize(json.dumps(whole))
    with pytest.raises(graphdnn.ValidationError, match="beta"):
        g.validate()

"""Every op method of a graph, in every form of its arguments, on every data type that it takes (:mod:`tests.api_table`), on every target."""

from __future__ import annotations

import inspect

import pytest

import graphdnn
from tests.api_table import ROWS
from tests.api_table.row import Calls, Case, Row, Types
from tests.helpers import check_graph

NO_OPS = """tensor tensor_like tensor_scalar validate build_operation_graph create_execution_plans create_execution_plan check_support build_plans
build_plan_at_index build get_execution_plan_count get_engine_count get_knobs_for_engine get_plan_name_at_index get_workspace_size
get_workspace_size_plan_at_index get_behavior_notes get_behavior_notes_for_plan_at_index select_behavior_notes deselect_behavior_notes
select_numeric_notes deselect_numeric_notes deselect_engines deselect_workspace_greater_than query_tensor_attributes_of_uid execute
execute_plan_at_index serialize deserialize key populate_cuda_graph update_cuda_graph explain draw bind autotune""".split()
"""Methods that declare no op; ``plan`` is no method."""
CASES = [pytest.param(name, types, id=f"{name}, {types.id}") for name, row in ROWS.items() for types in row.types]


def declared(row: Row, types: Types) -> Case:
    """A row on a graph that is thrown away: the data and numbers that it wants."""
    case = Case(graphdnn.pygraph(device="cpu"), types)
    row.declare(case)
    return case


@pytest.mark.parametrize(("name", "types"), CASES)
def test_row(device, name, types):
    row = ROWS[name]
    case = declared(row, types)
    check_graph(lambda g: row.declare(Case(g, types)), device, data=case.data, values=case.values, runs=1, may_exclude=row.may_exclude)


@pytest.fixture(scope="module")
def calls():
    """Every call of every row."""
    found = Calls()
    for row in ROWS.values():
        row.declare(Case(graphdnn.pygraph(device="cpu"), row.types[0]), found)
    return found


def op_methods() -> list[str]:
    """Public methods of a graph that declare an op."""
    members = inspect.getmembers(graphdnn.pygraph, inspect.isroutine)
    return [n for n, _ in members if not n.startswith("_") and n not in NO_OPS]


def test_no_method_is_left_out(calls):
    assert set(op_methods()) == set(calls.seen)


@pytest.mark.parametrize("method", op_methods())
def test_every_form_of_a_method_is_in_its_row(calls, method):
    assert not calls.missing(method)

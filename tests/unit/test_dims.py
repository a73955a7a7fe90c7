"""Dims: declaring, binding, texts and copies of graphs that have them, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

import graphdnn
from graphdnn import Dim, ExecutionError, KindError, NotSupportedError, ValidationError, data_type, heur_mode
from graphdnn.engines.base import placeholder
from graphdnn.engines.reduction_cpu import ReductionCpu
from graphdnn.frontend.symbols import parsed
from graphdnn.ir.extent import Extent
from graphdnn.plans import cache
from graphdnn.plans.dynamic import ShapePlans


def graph(rows: Any, columns: Any = 8, **arguments: Any) -> Any:
    g = graphdnn.pygraph(io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT, device=arguments.pop("device", "cpu"), **arguments)
    x = g.tensor(name="X", dim=[rows, columns], layout="row", uid=1)
    y = g.tensor(name="Y", dim=[rows, 1], layout="row", uid=2)
    g.relu(g.add(x, y)).set_output(True).set_name("Z").set_uid(3)
    return g


def arrays(rows: int, columns: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    x, y = rng.standard_normal((rows, columns), np.float32), rng.standard_normal((rows, 1), np.float32)
    return {"X": x, "Y": y, "Z": np.full((rows, columns), np.nan, np.float32)}


def check(g: Any, rows: int, columns: int = 8, **arguments: Any) -> None:
    pack = arrays(rows, columns)
    g.execute(pack, None, **arguments)
    assert np.array_equal(pack["Z"], np.maximum(pack["X"] + pack["Y"], 0))


def test_arithmetic() -> None:
    m, n = Dim("m", 1, 64), Dim("n", 0, 32)
    e = 2 * m * n + n - 3
    assert e.value({"m": 5, "n": 7}) == 74 and str(e) == "2*m*n + n + -3" and parsed(str(e), {"m": m, "n": n}) == e
    assert m - m == m * 0 and str(m * 0) == "0" and hash(m + n) == hash(n + m)
    with pytest.raises(KindError, match="added to and multiplied by"):
        m * 1.5  # type: ignore[operator]
    with pytest.raises(ValidationError, match="two different dims are called 'm'"):
        m * Dim("m", 1, 65)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("m", 5, 4), ValidationError),
        (("m", -1, 4), ValidationError),
        (("m", 0, 2**31), ValidationError),
        (("m", 1.0, 4), KindError),
        (("2m", 0, 4), ValidationError),
        ((7, 0, 4), KindError),
    ],
)
def test_bad_ranges(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        Dim(*arguments)
    with pytest.raises(ValidationError, match="has no extent"):
        Dim("m", 1, 7, multiple_of=8)
    with pytest.raises(ValidationError, match="outside its range"):
        Dim("m", 1, 7, hint=8)


def test_hints() -> None:
    assert [Dim("m", 0, n).hint for n in (0, 100, 4096, 100_000)] == [0, 100, 4096, 4096]
    assert Dim("m", 5000, 9000, multiple_of=8).hint == 5000 and Dim("m", 1, 100, multiple_of=8).hint == 96


def test_an_extent_that_varies_is_not_one() -> None:
    one = Extent(1)
    assert one != 1 and not one == 1 and one > 1 and not one <= 1 and 1 < one and one == Extent(1) and hash(one) == hash(1)
    assert one >= 1 and one < 2 and Extent(5) == 5 and Extent(5) > 4.5 and not Extent(5) > 5
    assert isinstance(1 * one, Extent) and isinstance(0 + one, Extent) and one + 1 == 2 and one * 0.5 == 0.5 and [7][one - 1] == 7


def test_one_kernel_for_all_shapes() -> None:
    g = graph(Dim("rows", 0, 100))
    before = graphdnn.stats().compilations
    g.build([heur_mode.A])
    for rows in (100, 1, 0, 37, 2, 64):
        check(g, rows)
    after = graphdnn.stats()
    assert after.compilations - before <= 3 and after.reasons["the first shape of a form of a kernel"] >= 1
    assert g.get_workspace_size() == 0


def test_values_are_told_by_arrays_or_given() -> None:
    g = graph(Dim("rows", 1, 100))
    g.build([heur_mode.A])
    check(g, 12, dims={"rows": 12})
    check(g, 13, dims={g.dims["rows"]: 13})
    pack = arrays(9)
    g.execute({k: v.ctypes.data for k, v in pack.items()}, None, dims={"rows": 9})
    assert np.array_equal(pack["Z"], np.maximum(pack["X"] + pack["Y"], 0))
    for run in (g.bind(pack), g.bind({k: v.ctypes.data for k, v in pack.items()}, dims={"rows": 9})):
        pack["Z"][:] = np.nan
        run()
        assert np.array_equal(pack["Z"], np.maximum(pack["X"] + pack["Y"], 0))


def test_an_executor_keeps_its_extents() -> None:
    """Arrays of other extents are refused by update, which changes nothing then; larger ones, too, in which the rest would stay as it was."""
    g, pack = graph(Dim("rows", 1, 100)), arrays(9)
    g.build([heur_mode.A])
    run = g.bind(pack)
    for rows in (10, 8):
        with pytest.raises(ValidationError, match=f"dim 'rows' is bound to two extents.*expected 9 .*found {rows} .*'X'"):
            run.update({k: v for k, v in arrays(rows).items() if k != "Z"})
    other = arrays(9)
    run.update({"X": other["X"]})()
    assert np.array_equal(pack["Z"], np.maximum(other["X"] + pack["Y"], 0))
    addresses = {k: v.ctypes.data for k, v in pack.items()}
    refused = ({}, "'rows' is not known.*say dims="), ({"dims": {"rows": 101}}, "outside its range"), ({"dims": 9}, "dims")
    for arguments, match in refused:
        with pytest.raises((ValidationError, KindError), match=match):
            g.bind(addresses, **arguments)
    g.bind(addresses, dims={"rows": 9}).update({"X": other["X"].ctypes.data})


@pytest.mark.parametrize(
    ("change", "arguments", "match"),
    [
        ({"Y": np.zeros((6, 1), np.float32)}, {}, "dim 'rows' is bound to two extents.*expected 5 .*'X'.*found 6 .*'Y'"),
        ({}, {"dims": {"rows": 6}}, "bound to two extents"),
        ({}, {"dims": {"columns": 6}}, "no such dim"),
        ({"X": np.zeros((101, 8), np.float32), "Y": np.zeros((101, 1), np.float32)}, {}, "outside its range.*expected 1 to 100.*found 101 in 'X'"),
        ({"X": np.zeros((5, 9), np.float32)}, {}, r"another shape than the dims say.*expected \[5, 8\] \(rows = 5\).*found \[5, 9\]"),
        ({"X": 1 << 20, "Y": 1 << 20, "Z": 1 << 20}, {}, "the extent of dim 'rows' is not known"),
    ],
)
def test_what_is_refused(change: dict[str, Any], arguments: dict[str, Any], match: str) -> None:
    g = graph(Dim("rows", 1, 100))
    g.build([heur_mode.A])
    pack = arrays(5) | change
    with pytest.raises(ValidationError, match=match):
        g.execute(pack, None, **arguments)
    if "Z" not in change:
        assert np.isnan(pack["Z"]).all()


def test_a_graph_of_fixed_shapes_takes_no_dims() -> None:
    g = graph(5)
    g.build([heur_mode.A])
    with pytest.raises(ValidationError, match="the graph has no dims"):
        g.execute(arrays(5), None, dims={"rows": 5})


def test_a_dim_is_no_integer_elsewhere() -> None:
    g = graphdnn.pygraph(device="cpu")
    x = g.tensor(dim=[4, 4], layout="row")
    with pytest.raises((KindError, ValidationError)):
        g.slice(x, [slice(0, Dim("n")), slice(0, 4)])


def test_the_text_keeps_the_dims() -> None:
    g = graph(Dim("rows", 0, 100), Dim("columns", 1, 40, multiple_of=4))
    g.validate()
    again = graphdnn.pygraph(device="cpu")
    again.deserialize(str(g))
    assert str(again) == str(g) and again.dims == g.dims and again.key() == g.key()
    again.build([heur_mode.A])
    check(again, 7, 12)
    check(again, 1, 4)


@pytest.mark.parametrize(
    "damage", [('"min"', '"least"'), ('"rows":{', '"lines":{'), ('"max":100', '"max":"x"'), ('"extents":{', '"extents":{"99":{},')]
)
@pytest.mark.parametrize("more", [('"rows"]', '"rows + 1"]'), ('"columns","1"', '"columns","1*x"'), ('"columns","1"', '"7","1"')])
def test_a_damaged_text(damage: tuple[str, str], more: tuple[str, str]) -> None:
    text = str(graph(Dim("rows", 0, 100), Dim("columns", 1, 40)))
    for before, after in (damage, more):
        changed = text.replace(before, after)
        if changed != text:
            with pytest.raises(ValidationError):
                graphdnn.pygraph(device="cpu").deserialize(changed)
    assert damage[0] in text


def test_copies() -> None:
    g = graph(Dim("rows", 0, 100))
    g.build([heur_mode.A])
    for twin in (copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert twin.dims == g.dims
        twin.build([heur_mode.A])
        check(twin, 3)
    with pytest.raises(NotSupportedError, match="one shape"):
        g.serialize()
    with pytest.raises(NotSupportedError, match="one shape"):
        pickle.dumps(g.plan)


def test_fake_gpu_builds_nothing_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that was not executed before needs a plan of its own: not while the stream is captured."""
    from graphdnn.targets.base import Target

    g = graph(Dim("rows", 0, 100))
    g.build([heur_mode.A])
    check(g, 5)
    monkeypatch.setattr(Target, "capturing", lambda self, stream: True)
    check(g, 5)
    with pytest.raises(ExecutionError, match="rows = 6.*before the capture"):
        check(g, 6)


def shared(rows: int, kept: Any) -> Any:
    g = graph(rows, 24, kernel_cache=kept, is_dynamic_shape_enabled=True)
    g.build([heur_mode.A])
    return g


def test_graphs_of_other_sizes_share_the_kernels_of_a_cache(empty_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = graphdnn.create_kernel_cache()
    start = graphdnn.stats().compilations
    for rows in (100, 60, 33, 64, 7, 5000):
        check(shared(rows, kept), rows, 24)
    assert graphdnn.stats().compilations - start <= 2
    text = kept.serialize()
    again = graphdnn.create_kernel_cache()
    again.deserialize(text)
    assert again.serialize() == text
    cache.memory.clear()
    monkeypatch.setenv("GRAPHDNN_CACHE", "0")
    start = graphdnn.stats().compilations
    for rows in (60, 81):  # one that was seen, one that was not
        g = shared(rows, again)
        check(g, rows, 24)
        assert len(g.serialize()) > 100
    assert graphdnn.stats().compilations == start


@pytest.mark.parametrize("number", range(12))
def test_damaged_forms(number: int) -> None:
    """A cache whose forms were changed is refused: a kernel is printed from a form."""
    kept = graphdnn.create_kernel_cache()
    for rows in (100, 60):
        shared(rows, kept)
    whole = json.loads(kept.serialize())
    text = json.dumps(whole["forms"])
    places = [i for i, c in enumerate(text) if c.isdigit()]
    at = places[number * len(places) // 12]
    whole["forms"] = json.loads(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    with pytest.raises(graphdnn.SerializationError, match="kernel cache text cannot be read"):
        graphdnn.create_kernel_cache().deserialize(json.dumps(whole))


def float_graph(**arguments: Any) -> Any:
    kinds = dict.fromkeys(("io_data_type", "intermediate_data_type", "compute_data_type"), data_type.FLOAT)
    return graphdnn.pygraph(**kinds, device="cpu", **arguments)


def test_shapes_that_ops_refuse_may_lie_beside_the_hint() -> None:
    """Shapes that are looked at beside those of a call, to see what changes, need not be graphs: m and n are equal, and halves."""
    g = float_graph()
    m, n = Dim("m", 0, 100, hint=64), Dim("n", 0, 120, hint=64)
    g.add(g.tensor(name="X", dim=[m, 8], layout="row"), g.tensor(name="Y", dim=[n, 8], layout="row")).set_output(True).set_name("Z")
    g.build([heur_mode.A])
    assert g.get_workspace_size() == 0
    for rows in (64, 5, 1):
        pack = arrays(rows) | {"Y": np.full((rows, 8), 2, np.float32)}
        g.execute(pack, None)
        assert np.array_equal(pack["Z"], pack["X"] + 2)
    with pytest.raises(ValidationError, match="cannot be broadcast"):
        g.execute(arrays(64) | {"Y": np.full((63, 8), 2, np.float32)}, None)


def test_no_shape_needs_more_workspace_than_was_said() -> None:
    g = float_graph()
    m, k = Dim("m", 0, 300), Dim("k")
    y = g.matmul(g.tensor(name="A", dim=[m, k], layout="row"), g.tensor(name="B", dim=[k, 64], layout="row"))
    g.matmul(g.softmax(y, 0), g.tensor(name="C", dim=[64, 32], layout="row")).set_output(True).set_name("Z")
    g.build([heur_mode.A])
    size = g.get_workspace_size()
    assert size > 0
    plans = next(iter(g._shape_plans.values()))
    for shape in ((3, 5), (300, 5000), (1, 77), (0, 9)):
        assert plans.plan(shape).workspace_bytes <= size
    plans.promised = 0  # as if a user had asked when less seemed enough
    given = {"m": 9, "k": 78}
    with pytest.raises(ValidationError, match="more workspace than get_workspace_size.*again"):
        g.execute(dict.fromkeys(("A", "B", "C", "Z"), 1 << 20), None, dims=given)
    assert g.get_workspace_size() >= size and g._for_call(g.plan, {}, given, 0).workspace_bytes > 0


@pytest.mark.parametrize("row", [True, False])
def test_arrays_of_a_packed_type_count_bytes_along_one_axis(row: bool) -> None:
    """Two numbers of FP4 to a byte: the array's extent along the rows is not that of the dim."""
    g = float_graph()
    m, n = Dim("m", 2, 64, multiple_of=2), Dim("n", 2, 64, multiple_of=2)
    x = g.tensor(name="X", dim=[m, n], stride=[n, 1] if row else [1, m], data_type=data_type.FP4_E2M1)
    g.identity(x).set_output(True).set_name("Y")
    g.build([heur_mode.A])
    pack = {"X": np.full((4, 3) if row else (2, 6), 0x22, np.uint8), "Y": np.zeros((4, 6), np.float32)}
    with pytest.raises(ValidationError, match=f"dim '{'n' if row else 'm'}' is not known"):
        g.execute(pack, None)
    g.execute(pack, None, dims={"n": 6} if row else {"m": 4})
    assert (pack["Y"] == 1).all()


def test_no_mappings_and_no_extents() -> None:
    """What is no mapping is told as such, on the first call and later ones; so is a shape that is none."""
    g, fixed = graph(Dim("rows", 1, 100)), graph(5)
    for each in (g, fixed):
        each.build([heur_mode.A])
        for _ in range(2):
            each.execute(arrays(5), None)
            for bad in (None, [np.zeros(3)], 7, "XYZ"):
                with pytest.raises(KindError, match="variant pack has the wrong type"):
                    each.execute(bad, None)
        for bad in ([("rows", 5)], 5, "rows"):
            with pytest.raises(KindError, match="dims has the wrong type"):
                each.execute(arrays(5), None, dims=bad)

    class Odd:
        shape = (7.5, 8)

    with pytest.raises(KindError, match="an extent of the array for 'X'"):
        g.execute(arrays(5) | {"X": Odd()}, None)


def test_overridden_shapes_tell_the_dims() -> None:
    """What was declared needs no permission to be overridden; other strides do."""
    g = graph(Dim("rows", 1, 100))
    g.build([heur_mode.A])
    pack = arrays(5)
    told: Any = {"override_shapes": [[5, 8], [5, 1], [5, 8]]}
    assert [t.name for t in g._opgraph.tensors if not t.virtual] == ["X", "Y", "Z"]
    told["override_uids"] = [t.uid for t in g._opgraph.tensors if not t.virtual]
    g.execute({n: a.ctypes.data for n, a in pack.items()}, None, **told)
    assert np.array_equal(pack["Z"], np.maximum(pack["X"] + pack["Y"], 0))
    with pytest.raises(ValidationError, match="is_override_shape_enabled"):
        g.execute(pack, None, **told, override_strides=[[9, 1], [1, 1], [8, 1]])


def test_a_stride_may_be_padded_by_nothing() -> None:
    """A dim of 0 in the stride of a tensor that has elements is 0; only the strides of an empty tensor are those of its shape with ones."""
    g = float_graph()
    m, gap = Dim("m", 0, 100), Dim("gap", 0, 9)
    x = g.tensor(name="X", dim=[m, 4], stride=[gap + 4, 1])
    g.neg(x).set_output(True).set_name("Y").set_dim([m, 4]).set_stride([2 * gap + 4, 1])
    g.build([heur_mode.A])
    for rows, room in ((5, 0), (5, 2), (0, 0), (1, 0)):
        held, out = np.arange(200, dtype=np.float32), np.zeros(200, np.float32)
        g.execute({"X": held.ctypes.data, "Y": out.ctypes.data}, None, dims={"m": rows, "gap": room})
        pitch, wide = 4 + room, 4 + 2 * room
        assert np.array_equal(out[: rows * wide].reshape(rows, wide)[:, :4], -held[: rows * pitch].reshape(rows, pitch)[:, :4])


def test_the_wrapper_makes_outputs_of_the_shape_of_the_call() -> None:
    b, s = Dim("b", 1, 9), Dim("s", 1, 40)
    kinds = dict.fromkeys(("io_data_type", "intermediate_data_type", "compute_data_type"), data_type.FLOAT)
    with graphdnn.Graph(**kinds, inputs=["X"], outputs=["Y", "Z"], device="cpu") as g:
        x = g.tensor(name="X", dim=[b, s], layout="row")
        g.relu(x).set_output(True).set_name("Y")
        g.softmax(x, 1).set_output(True).set_name("Z")
    for shape in ((3, 7), (1, 1), (9, 40), (5, 1)):
        given = np.random.default_rng(shape[0]).standard_normal(shape, np.float32)
        y, z = g(given)
        whole = np.exp(given) / np.exp(given).sum(1, keepdims=True)
        assert np.array_equal(y, np.maximum(given, 0)) and z.shape == shape and np.allclose(z, whole, atol=1e-6)


def test_knobs_for_wider_heads() -> None:
    """The knobs that were chosen for the hints also run heads of fewer elements: what is beside them is not read."""
    d, e = Dim("d", 1, 40, hint=16), Dim("e", 1, 40, hint=16)
    g = float_graph()
    shapes = {"Q": [2, 2, 5, d], "K": [2, 2, 6, d], "V": [2, 2, 6, e]}
    q, k, v = (g.tensor(name=n, dim=dim, layout="row") for n, dim in shapes.items())
    g.sdpa(q, k, v, attn_scale=0.5, is_inference=True)[0].set_output(True).set_name("O").set_dim([2, 2, 5, e]).set_stride([10 * e, 5 * e, e, 1])
    g.build([heur_mode.A])
    for wide, out in ((16, 16), (5, 16), (16, 3), (17, 33), (1, 1), (40, 40)):
        rng = np.random.default_rng(wide)
        sizes = {"Q": (2, 2, 5, wide), "K": (2, 2, 6, wide), "V": (2, 2, 6, out)}
        pack = {n: rng.standard_normal(size, np.float32) for n, size in sizes.items()} | {"O": np.full((2, 2, 5, out), np.nan, np.float32)}
        g.execute(pack, np.zeros(g.get_workspace_size() + 1, np.uint8))
        scores = np.exp(0.5 * pack["Q"].astype(float) @ pack["K"].swapaxes(2, 3))
        assert np.allclose(pack["O"], scores / scores.sum(3, keepdims=True) @ pack["V"], atol=1e-4)


def test_an_extent_of_1_does_not_turn_the_layout() -> None:
    """Strides [3, 3, 1] of dims [n, 1, 3] do not tell which axis is the outer one: it is that of the hints."""
    n, m = Dim("n", 0, 40), Dim("m", 0, 40)
    g = float_graph()
    x = g.tensor(name="X", dim=[n, m, 3], layout="row")
    y = g.concatenate([x, x], 1).set_output(True).set_name("Y")
    g.build([heur_mode.A])
    assert y.get_stride() == [240, 3, 1]
    for rows, columns in ((9, 1), (1, 1), (1, 9), (9, 2), (9, 0)):
        given = np.random.default_rng(rows).standard_normal((rows, columns, 3), np.float32)
        out = np.full((rows, 2 * columns, 3), np.nan, np.float32)
        g.execute({"X": given, "Y": out}, None)
        assert np.array_equal(out, np.concatenate([given, given], 1))


def test_sums_over_several_axes_of_which_one_is_empty() -> None:
    n, m = Dim("n", 0, 9), Dim("m", 0, 9)
    g = float_graph()
    x = g.tensor(name="X", dim=[n, 5, m, 2], stride=[10 * m, 1, 5, 5 * m])
    g.reduction(x, graphdnn.reduction_mode.ADD, axes=[0, 1, 2, 3], keepdim=True).set_output(True).set_name("Y")
    g.build([heur_mode.A])
    for shape in ((3, 4), (0, 4), (3, 0), (1, 1), (0, 0)):
        held, out = np.ones(10 * shape[0] * shape[1] + 1, np.float32), np.full((1, 1, 1, 1), np.nan, np.float32)
        g.execute({"X": held.ctypes.data, "Y": out}, np.zeros(g.get_workspace_size() + 1, np.uint8), dims={"n": shape[0], "m": shape[1]})
        assert out == 10 * shape[0] * shape[1]


def test_a_graph_with_dims_keeps_its_kernels_in_the_cache() -> None:
    kept = graphdnn.create_kernel_cache()
    g = graph(Dim("rows", 1, 100), 28, kernel_cache=kept)
    g.build([heur_mode.A])
    assert len(kept.store) >= 1 and len(kept.shared()) >= 1
    start = graphdnn.stats().compilations
    other = graph(Dim("lines", 1, 100), 28, kernel_cache=kept)
    other.build([heur_mode.A])
    check(other, 31, 28)
    assert graphdnn.stats().compilations == start


def test_nothing_takes_longer_for_a_larger_extent() -> None:
    """Sizes of 2 ** 31 - 1 are looked at for the workspace; nothing walks through them."""
    from graphdnn.engines.attention_parts import _under

    for rows, columns, ahead in product(range(5), range(5), range(-6, 7)):
        assert _under(rows, columns, ahead) == sum(min(max(r + ahead, 0), columns) for r in range(rows))
    n, s = Dim("n", hint=8), Dim("s", hint=8)
    g = float_graph()
    x, dy = (g.tensor(name=name, dim=[n, 3, 5, 5], layout="row") for name in ("X", "dY"))
    g.conv_wgrad(g.relu(x), dy, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True).set_name("dW").set_dim([3, 3, 3, 3])
    q, k, v = (g.tensor(name=name, dim=[1, 1, s, 4], layout="row") for name in "QKV")
    o, _ = g.sdpa(q, k, v, attn_scale=1.0, is_inference=True, use_causal_mask=True)
    o.set_output(True).set_name("O").set_dim([1, 1, s, 4]).set_layout("row")
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    plan = g._plans.plan_at(0)
    plans = ShapePlans(plan.device, plan.candidate, g._graph_at, g._neighbours, (8, 8))
    assert plans.largest([(2**31 - 1, 2**31 - 1), (2**31 - 1, 8), (8, 2**31 - 1)]) > 0


def test_sums_and_products_tell_their_only_unknown_dim() -> None:
    n, m = Dim("n", 0, 20), Dim("m", 0, 20)
    g = float_graph()
    g.neg(g.tensor(name="X", dim=[2 * n + 1, n * m, 3], layout="row")).set_output(True).set_name("Y")
    g.build([heur_mode.A])
    for rows, columns in ((3, 5), (20, 1), (1, 20), (1, 0)):
        given = np.random.default_rng(rows).standard_normal((2 * rows + 1, rows * columns, 3), np.float32)
        out = np.full(given.shape, np.nan, np.float32)
        g.execute({"X": given, "Y": out}, None)
        assert np.array_equal(out, -given)
    with pytest.raises(ValidationError, match=r"another shape than the dims say; expected \[7, 15, 3\] \(n = 3, m = 5\), found \[8, 15, 3\]. To fix"):
        g.execute({"X": np.zeros((8, 15, 3), np.float32), "Y": np.zeros((8, 15, 3), np.float32)}, None)
    with pytest.raises(ValidationError, match="dim 'm' is not known"):
        g.execute({"X": np.zeros((1, 0, 3), np.float32), "Y": np.zeros((1, 0, 3), np.float32)}, None)


def test_threads_that_need_other_shapes_of_one_graph() -> None:
    g = graph(Dim("rows", 0, 200), Dim("columns", 0, 50))
    g.build([heur_mode.A])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda shape: check(g, *shape), [(rows, columns) for rows in (0, 1, 7, 64, 199, 33) for columns in (1, 8, 50, 0)] * 2))


def test_knobs_for_many_results_meet_one() -> None:
    """Columns that were summed side by side at the hints may be one column, without a loop over results."""
    g = float_graph()
    g.reduction(g.tensor(name="X", dim=[40, 1], layout="row"), graphdnn.reduction_mode.ADD, axes=[0, 1]).set_output(True).set_name("Y")
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A])
    plan = g._plans.plan_at(0)
    region, option = plan.partition.regions[0], plan.candidate.options[0]
    assert isinstance(option.knobs, ReductionCpu)
    wide, narrow = (option.engine.lower(plan.graph, region, plan.device, ReductionCpu(n), placeholder(region)) for n in (64, 1))
    assert wide.steps == narrow.steps


def test_a_reshape_infers_one_extent_at_every_shape():
    g = graphdnn.pygraph(io_data_type=data_type.FLOAT, compute_data_type=data_type.FLOAT, device="cpu")
    x = g.tensor(name="x", dim=[Dim("n", max=64), 4, 8], layout="row")
    g.reshape(g.neg(x)).set_dim([-1, 16]).set_stride([16, 1]).set_output(True).set_name("y")
    g.build([heur_mode.A])
    workspace = np.empty(g.get_workspace_size(), np.uint8)
    for n in (3, 64, 0, 1):
        values, out = np.random.default_rng(n).standard_normal((n, 4, 8), dtype=np.float32), np.full((2 * n, 16), np.nan, np.float32)
        g.execute({"x": values, "y": out}, workspace)
        np.testing.assert_array_equal(out, -values.reshape(2 * n, 16))

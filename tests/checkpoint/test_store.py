"""What a checkpoint holds, which ones are kept, and what is refused."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tables import table

from hone.checkpoint import atomic
from hone.checkpoint import tree as tree_module
from hone.checkpoint.atomic import CheckpointError
from hone.checkpoint.store import CheckpointStore
from hone.checkpoint.tree import in_memory, read_tree, split_tree, write_tree
from hone.distributed.settings import AxisSizes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit, types included; tuples have become lists."""
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (found, wanted)]
        assert torch.equal(*bits)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(wanted)
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def state(seed: int) -> dict[str, Any]:
    """What a training loop saves."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 4, generator=generator)
    flat = torch.randn(40, generator=generator)
    return {
        "model": {"embed.weight": weight, "head.weight": weight, "norm": torch.ones(4).bfloat16()},
        "optimizer": {
            "moments": {"a": flat[:10], "b": flat[10:], "t": flat.view(8, 5).t()},
            "groups": [{"lr": 1e-6 / 3, "betas": (0.9, 0.95)}],
        },
        "data": {"epoch": 2, "cursor": 17, "in_flight": ["gsm8k:3"]},
        "samples": [{"ids": [1, 2], "logprobs": [-0.1, float("-inf")], "reward": None}],
    }


def test_R17_state_comes_back_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.checkpoint.store.time.time", lambda: 1795281686.0)
    store = CheckpointStore(tmp_path)
    saved = state(0)
    store.save(7, saved)
    loaded = store.load()
    assert (loaded.step, loaded.metric, loaded.skipped) == (7, None, ())
    assert (loaded.saved_at, loaded.written_by) == (1795281686.0, AxisSizes())
    assert_same(in_memory(dict(loaded.parts)), saved)
    model: Any = loaded.parts["model"]
    assert model["embed.weight"] is model["head.weight"]
    # Saving the same again gives the same files.
    again = CheckpointStore(tmp_path / "again")
    again.save(7, state(0))
    for file in (tmp_path / "step_7").iterdir():
        assert file.read_bytes() == (again.folder / "step_7" / file.name).read_bytes()


@table("planted", ["bfloat16 only", "rounded numbers", "ties cut"])
def test_R17_lossy_storage_turns_red(
    tmp_path: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, dumps = atomic._bytes_of, tree_module.json.dumps
    if planted == "bfloat16 only":
        coarse = lambda t: t.bfloat16().to(t.dtype) if t.is_floating_point() else t  # noqa: E731
        monkeypatch.setattr(atomic, "_bytes_of", lambda t: content(coarse(t)))
    elif planted == "rounded numbers":
        text = lambda plain: dumps(plain).replace("3.333333333333333e-07", "3.3333e-07")  # noqa: E731
        monkeypatch.setattr(tree_module.json, "dumps", lambda plain, **_: text(plain))
    else:
        monkeypatch.setattr(tree_module, "memory_of", id)
        monkeypatch.setattr(
            tree_module, "_take_tensors", cut_ties(tree_module._take_tensors), raising=True
        )
    with pytest.raises(AssertionError):
        test_R17_state_comes_back_bit_by_bit(tmp_path, monkeypatch)


def cut_ties(take: Any) -> Any:
    def cut(tree: Any, path: str, tensors: Any, keys: Any) -> Any:
        return take(tree.clone() if isinstance(tree, torch.Tensor) else tree, path, tensors, keys)

    return cut


JSON_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5)
)


@settings(max_examples=60, deadline=None)
@given(
    tree=st.recursive(
        JSON_LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.text(max_size=4).filter(lambda k: k != "$tensor"), inner, max_size=3
            )
        ),
    )
)
def test_any_plain_tree_round_trips(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tree")
    write_tree(folder, "x", split_tree(tree, "x"))
    assert_same(in_memory(read_tree(folder, "x")), tree)


@table("dtype", DTYPES)
def test_tensors_of_any_shape_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.randn(4, 6).mul(50).to(dtype)
    tree = {
        "all": base,
        "view": base[1:3, ::2],
        "turned": base.t(),
        "one": base[0, 0],
        "none": base[:0],
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
    }
    write_tree(tmp_path, "x", split_tree(tree, "x"))
    assert_same(in_memory(read_tree(tmp_path, "x")), tree)


@table(
    "part, message",
    [
        ({"a": [{"b": object()}]}, r"optimizer\.a\.0\.b is a object"),
        ({"state": {0: 1}}, r"optimizer\.state has the key 0"),
        ({"x": {"$tensor": "y"}}, r"optimizer\.x has the key '\$tensor'"),
        ({"x": {1, 2}}, r"optimizer\.x is a set"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_writing(
    part: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointStore(tmp_path / "c").save(1, {"optimizer": part})
    assert not (tmp_path / "c").exists()


@table("name", ["model", "optimizer", "data", "samples"])
@table("how", ["never saved", "deleted"])
def test_R17_any_missing_component_is_refused_by_name(name: str, how: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    parts = state(1)
    required = list(parts)
    if how == "never saved":
        del parts[name]
    store.save(3, parts)
    for file in (tmp_path / "step_3").glob(f"{name}.*"):
        file.unlink()
    for step in (3, "latest"):
        with pytest.raises(CheckpointError, match=name):
            store.load(step, required=required)  # pyright: ignore[reportArgumentType]


def test_R17_a_newer_one_without_a_component_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": {"w": torch.ones(1)}, "optimizer": {}})
    store.save(2, {"model": {"w": torch.ones(1)}})
    with pytest.raises(CheckpointError, match="step_2 has no optimizer; it holds model"):
        store.load(required=["model", "optimizer"])
    assert store.load(required=["model"]).step == 2


def test_only_required_parts_are_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state(0))
    assert list(store.load(1, required=["data"]).parts) == ["data"]


def test_empty_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert (store.steps(), store.best_metric(), store.is_empty) == ([], -math.inf, True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        store.load()
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 4"):
        store.load(4)


def test_a_skipped_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": {"w": torch.ones(1)}})
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "model.json").write_text("{}")
    (tmp_path / "step_x").mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.load().step == 1
    assert "step_2: hone_manifest.json is missing" in caplog.text
    (tmp_path / "step_1").rename(tmp_path / "step_9")
    with pytest.raises(CheckpointError, match="step_9 holds step 1"):
        store.load()


@table(
    "keep_last, keep_best, kept",
    [(2, True, [2, 5, 6]), (2, False, [5, 6]), (1, True, [2, 6]), (9, True, [1, 2, 3, 4, 5, 6])],
)
def test_pruning(keep_last: int, keep_best: bool, kept: list[int], tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=keep_last, keep_best=keep_best)
    for step, metric in enumerate([0.1, 0.9, None, math.nan, 0.3, 0.2], start=1):
        store.save(step, {"data": {"step": step}}, metric=metric)
    assert store.steps() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step}" for step in kept]
    assert store.best_metric() == (0.9 if 2 in kept else 0.3)
    metrics = dict(zip(range(1, 7), [0.1, 0.9, None, None, 0.3, 0.2], strict=True))
    assert [store.load(step).metric for step in kept] == [metrics[step] for step in kept]


def test_latest_is_what_was_saved_last(tmp_path: Path) -> None:
    """A run that went back to step 3 goes on from its own new step 4, not from the old 5."""
    store = CheckpointStore(tmp_path, keep_last=3, keep_best=False)
    for step in (3, 4, 5):
        store.save(step, {"data": {"timeline": "old"}})
    store.save(4, {"data": {"timeline": "new"}})
    assert store.load().step == 4
    assert store.load().parts["data"] == {"timeline": "new"}
    assert store.steps() == [3, 5, 4]
    store.save(5, {"data": {"timeline": "new"}})
    assert store.steps() == [3, 4, 5]


def test_keep_last_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last is 0"):
        CheckpointStore(tmp_path, keep_last=0)

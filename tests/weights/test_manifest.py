"""The checksum against its definition in plain integers, what it must see, and tie state."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hone.models import manifest as manifest_module
from hone.models.manifest import (
    ROW_WORDS,
    ManifestBuilder,
    RoundedChecksums,
    build_manifest,
    compare,
    export_weights,
)
from tests.interpreted import run_interpreted
from tests.tables import table

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]
MASK = 2**64 - 1


def mix_by_hand(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def checksum_by_hand(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    total = 0
    for row in range(0, len(words), ROW_WORDS):
        pairs = enumerate(words[row : row + ROW_WORDS])
        row_sum = sum(word * mix_by_hand(i + 2**63) for i, word in pairs) & MASK
        total += mix_by_hand((row_sum + mix_by_hand(row // ROW_WORDS)) & MASK)
    return total & MASK


def checksums(tensors: Iterable[torch.Tensor], group_words: int | None = None) -> list[int]:
    builder = ManifestBuilder(group_words=group_words)
    for index, tensor in enumerate(tensors):
        builder.add(f"{index}", tensor)
    return [record.checksum for record in builder.finish(1).tensors.values()]


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, max(numel, 1)).astype(bool))[:numel]
    itemsize = torch.empty(0, dtype=dtype).element_size()
    raw = generator.integers(0, 256, max(numel, 1) * itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)[:numel]


@table("dtype", DTYPES)
@table("numel", [0, 1, 3, 100, ROW_WORDS, 2 * ROW_WORDS + 5])
def test_checksum_equals_definition(dtype: torch.dtype, numel: int) -> None:
    tensor = random_bits(numel, dtype, seed=random.randrange(2**31))
    assert checksums([tensor]) == [checksum_by_hand(tensor)]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * ROW_WORDS), min_size=1, max_size=6),
    group_words=st.sampled_from([1, 100, ROW_WORDS, 5 * ROW_WORDS, 2**30]),
    seed=st.integers(0, 2**31),
)
def test_grouping_changes_nothing(sizes: list[int], group_words: int, seed: int) -> None:
    tensors = [random_bits(size, DTYPES[i % 3], seed + i) for i, size in enumerate(sizes)]
    alone = [checksums([tensor])[0] for tensor in tensors]
    assert checksums(iter(tensors), group_words=group_words) == alone


def test_layout_in_memory_changes_nothing() -> None:
    base = torch.randn(64, 65).bfloat16()
    views = [base[:, 1:], base.t(), base.flatten()[1:4000], base[::2], torch.tensor(2.5)]
    assert checksums(views) == [checksum_by_hand(view) for view in views]


def flip_last_bit(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.view(torch.int16 if x.element_size() == 2 else torch.int32).view(-1)[-7] ^= 1
    return y


def swap_two(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().flatten()
    y[3], y[1001] = x.flatten()[1001], x.flatten()[3]
    return y.view_as(x)


def flip_two_signs(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().flatten()
    y[5::512] *= -1  # the same lane of an even number of words
    return y.view_as(x)


def swap_rows(x: torch.Tensor) -> torch.Tensor:
    half = ROW_WORDS * 4 // x.element_size()  # whole rows of the checksum
    y = x.flatten()
    return torch.cat([y[half : 2 * half], y[:half], y[2 * half :]]).view_as(x)


CHANGES = {
    "last bit": flip_last_bit,
    "swap": swap_two,
    "signs": flip_two_signs,
    "negated": torch.neg,
    "transposed": lambda x: x.t().contiguous(),
    "rows": swap_rows,
    "rolled": lambda x: x.roll(1, 0),
    "zeros": torch.zeros_like,
}


def check_sees(change: str, dtype: torch.dtype) -> None:
    x = torch.randn(256, 256).to(dtype)
    x.view(-1)[1001] = x.view(-1)[3] + 1  # a swap of equal values would be no change
    before, after = checksums([x, CHANGES[change](x)])
    assert before != after, change


@table("dtype", [torch.float32, torch.bfloat16])
@table("change", CHANGES)
def test_R2_checksum_sees(change: str, dtype: torch.dtype) -> None:
    check_sees(change, dtype)


def odd_words(tensor: torch.Tensor) -> torch.Tensor:
    """Words of 64 bits: signs in the top lane then cancel in pairs."""
    return tensor.contiguous().view(-1).view(torch.int64)


@table(
    "plant, change",
    [("plain sum", "swap"), ("no row index", "rows"), ("wide words", "signs")],
)
def test_R2_weaker_checksums_turn_red(
    plant: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plant == "plain sum":
        ones = torch.ones(ROW_WORDS, dtype=torch.int64)
        monkeypatch.setattr(manifest_module, "_table", lambda device: ones)
    elif plant == "no row index":
        monkeypatch.setattr(manifest_module, "_mix", lambda x: x * np.uint64(0))
        monkeypatch.setattr(manifest_module, "_table", manifest_module._table.__wrapped__)
        table = torch.from_numpy(np.random.default_rng(0).integers(-(2**62), 2**62, ROW_WORDS))
        monkeypatch.setattr(manifest_module, "_table", lambda device: table)
        monkeypatch.setattr(
            manifest_module,
            "_combine",
            lambda sums, rows: [int(s.sum()) for s in torch.cat(sums).split(rows)],
        )
    else:
        odd = manifest_module._table(torch.device("cpu")) | 1
        monkeypatch.setattr(manifest_module, "_words", odd_words)
        monkeypatch.setattr(manifest_module, "_table", lambda device: odd)
    with pytest.raises(AssertionError, match=change):
        check_sees(change, torch.float32)


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight if tied else nn.Parameter(self.embed.weight.clone())
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def test_export_names_ties_and_persistent_buffers() -> None:
    model = Tied(tied=True)
    exported = dict(export_weights(model))
    assert set(exported) == {"embed.weight", "head.weight", "scale"}
    assert exported["head.weight"].data_ptr() == model.embed.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in exported.values())


def test_R2_tie_state_is_part_of_the_manifest() -> None:
    tied, untied = Tied(tied=True), Tied(tied=False)
    untied.load_state_dict(tied.state_dict())
    expected = build_manifest(export_weights(tied), 1)
    actual = build_manifest(export_weights(untied), 1)
    assert expected.tensors["head.weight"].tied_to == "embed.weight"
    records = expected.tensors["head.weight"], actual.tensors["head.weight"]
    assert records[0].checksum == records[1].checksum
    diff = compare(expected, actual)
    assert diff
    assert list(diff.different) == ["head.weight"]
    assert "tied to no other name, expected tied to embed.weight" in diff.describe()


def test_cast_is_what_is_described() -> None:
    weights = {"a": torch.randn(50, 3), "b": torch.arange(5)}
    cast = {"a": weights["a"].bfloat16(), "b": weights["b"]}
    dtypes = {name: tensor.dtype for name, tensor in cast.items()}
    described = build_manifest(weights.items(), 3, dtypes=dtypes)
    assert described == build_manifest(cast.items(), 3)
    assert described.tensors["a"].dtype == "bfloat16"


def test_describe_names_everything() -> None:
    x = torch.randn(3)
    expected = build_manifest([("a", x), ("b", x * 2), ("c", x * 3), ("d", x * 4)], 1)
    actual = build_manifest([("b", x), ("c", x.half() * 3), ("d", torch.ones(4)), ("e", x * 5)], 1)
    diff = compare(expected, actual)
    text = diff.describe()
    assert (diff.missing, diff.unexpected, set(diff.different)) == (("a",), ("e",), {"b", "c", "d"})
    assert text.startswith("1 tensors missing, 1 unexpected, 3 different")
    assert "dtype float16, expected float32" in text
    assert "shape [4], expected [3]" in text
    assert "values (checksum" in text
    assert not compare(expected, expected)


def test_empty() -> None:
    assert build_manifest([], 1).tensors == {}
    assert checksums([torch.empty(0)]) == [0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_gives_the_same_value(dtype: torch.dtype) -> None:
    sizes = [0, 1, 3, 1000, ROW_WORDS, 3 * ROW_WORDS + 7, 10**6]
    tensors = [random_bits(size, dtype, seed=size) for size in sizes]
    tensors.append(random_bits(999, dtype, seed=1)[1:])
    on_cuda = [tensor.cuda() for tensor in tensors[:-1]]
    on_cuda.append(random_bits(999, dtype, seed=1).cuda()[1:])
    for group_words in (1, 2**26):
        assert checksums(on_cuda, group_words=group_words) == checksums(tensors)


SHAPES = {"short": (3, 5), "a row": (2, ROW_WORDS), "rows": (5, ROW_WORDS + 8), "long": (70003,)}


def masters(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@table("dtype", [torch.bfloat16, torch.float32])
@table("size", [None, 1024, 3 * 1024, 40_000])
def test_checksums_of_masters_are_those_of_weights_rounded_from_them(
    dtype: torch.dtype, size: int | None
) -> None:
    """In whatever pieces masters come, some of them again."""
    values = masters()
    weights = {name: master.to(dtype) for name, master in values.items()}
    checksums = RoundedChecksums()
    for seed in (1, 0):  # the first are to be forgotten
        for name, master in masters(seed).items():
            start = 0
            for piece in master.view(-1).split(size or master.numel()):
                checksums.add([(name, start, piece)], dtype)
                start += piece.numel()
    found = checksums.values()
    records = build_manifest(weights.items(), 0).tensors
    assert found == {name: records[name].checksum for name in weights}
    together = RoundedChecksums()
    together.add([(name, 0, master.view(-1)) for name, master in values.items()], dtype)
    assert together.values() == found


def test_a_weight_that_is_not_rounded_or_lacks_a_piece_has_another_checksum() -> None:
    master = masters()["long"].view(-1)
    record = build_manifest([("w", master.bfloat16())], 0).tensors["w"]
    truncated = (master.view(torch.int32) & -0x10000).view(torch.float32)
    checksums = RoundedChecksums()
    checksums.add([("w", 0, truncated)], torch.bfloat16)
    assert checksums.values()["w"] != record.checksum
    checksums.add([("w", 0, master[:40_000])], torch.bfloat16)
    assert checksums.values()["w"] != record.checksum
    checksums.add([("w", 40_000, master[40_000:])], torch.bfloat16)
    assert checksums.values()["w"] == record.checksum


def test_kernels_sum_rows_as_numpy_does() -> None:
    different = run_interpreted("tests.weights.interpreted_manifest")
    assert {name for name, number in different.items() if number} == {
        "planted: other columns",
        "planted: truncated",
    }
    assert different["words"] == different["rounded"] == 0

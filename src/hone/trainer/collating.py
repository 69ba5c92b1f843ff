"""Packing rows into the tensors of a forward pass, end to end without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hone.attention.context import make_spans
from hone.model_input import TEXT_ONLY, InputSpec, content_pieces, content_spans
from hone.positions import packed_positions
from hone.segments import Segment, plan_segments
from hone.trainer.packing import units_of
from hone.trainer.prefixes import left_out, sharers_of
from hone.types import Extent, LossExtent, MicroBatch, PackedKeys, Row, Spans

__all__ = ["check_rows", "collate", "empty_batch", "on_device", "to_device"]

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def empty_batch(device: torch.device | str, *, inputs: InputSpec = TEXT_ONLY) -> MicroBatch:
    """Micro-batch for a rank without rows, which must take part in every collective of a pass: a
    sequence that belongs to no row, with weights of zero. It has no `ids`."""
    row = Row(id="", token_ids=[0] * 4, loss_mask=[False, True, True, True])
    return replace(collate([row], [0.0], device, inputs=inputs), ids=())


def check_rows(rows: Sequence[Row], inputs: InputSpec = TEXT_ONLY) -> None:
    """Check rows before they are packed. Raises ValueError, naming the row, for a row that trains
    its first token (which nothing predicts), for inputs that the model does not take, and for a
    column that only some rows have or whose shape is wrong."""
    for row in rows:
        if row.loss_mask and row.loss_mask[0]:
            raise ValueError(f"sequence {row.id!r} trains its first token: nothing predicts it")
        if row.model_input.contents and (
            refusal := inputs.refusal(row.model_input, row.num_tokens)
        ):
            raise ValueError(f"sequence {row.id!r} {refusal}")
    counts: list[dict[Extent, int]] = [
        {"trained": row.num_trained, "token": row.num_tokens, "row": 1} for row in rows
    ]
    for name in sorted({name for row in rows for name in row.columns}):
        having = [row for row in rows if name in row.columns]
        if len(having) < len(rows):
            raise ValueError(f"{name} is set on {len(having)} of {len(rows)} rows; set all or none")
        first = rows[0].columns[name]
        for row, expected in zip(rows, counts, strict=True):
            column = row.columns[name]
            if column.per != first.per or column.values.shape[1:] != first.values.shape[1:]:
                raise ValueError(
                    f"{name} of sequence {row.id!r} is per {column.per}, of shape "
                    f"{tuple(column.values.shape)}; that of {rows[0].id!r} is per {first.per}, of "
                    f"shape {tuple(first.values.shape)}"
                )
            if column.values.shape[:1] != (expected[column.per],):
                raise ValueError(
                    f"{name} of sequence {row.id!r} has shape {tuple(column.values.shape)}; "
                    f"{_expected(expected, column.per)}"
                )


def _expected(counts: Mapping[Extent, int], per: Extent) -> str:
    match per:
        case "trained":
            return f"its loss mask trains {counts[per]} tokens"
        case "token":
            return f"it has {counts[per]} tokens"
        case "row":
            return "a column per row has one value"


def collate(
    rows: Sequence[Row],
    weights: Sequence[float],
    device: torch.device | str,
    *,
    per: LossExtent = "trained",
    prefixes: Sequence[int] | None = None,
    inputs: InputSpec = TEXT_ONLY,
) -> MicroBatch:
    """Pack rows end to end. `weights` has one weight a row; `per` says what carries it: each
    trained token, the row, or the unit (which takes the weight of its first row). With `prefixes`
    from `shared_prefixes`, only the first row of a group brings the prompt. `inputs` are those of
    the model's family.

    Raises as `check_rows`.
    """
    check_rows(rows, inputs)
    device = torch.device(device)
    prefixes = [0] * len(rows) if prefixes is None else prefixes
    absent = left_out(rows, prefixes)
    lengths = [row.num_tokens for row in rows]
    borders = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows])
    _, positions = packed_positions(
        lengths, inputs=[row.model_input for row in rows], rule=inputs.positions
    )
    mask = np.concatenate([np.asarray(row.loss_mask, dtype=bool) for row in rows])
    assert len(mask) == len(token_ids), f"{len(mask)=} {len(token_ids)=}"
    trained = np.flatnonzero(mask)
    num_trained = np.add.reduceat(mask.astype(np.int64), borders[:-1])
    units = units_of(rows)
    unit_index = np.empty(len(rows), dtype=np.int64)
    for number, members in enumerate(units):
        unit_index[members] = number
    weights_S = np.asarray(weights, dtype=np.float32)
    carried = {"trained": np.repeat(weights_S, num_trained), "row": weights_S}
    carried["unit"] = weights_S[[members[0] for members in units]]

    def send(array: np.ndarray[Any, Any] | Tensor) -> Tensor:
        return to_device(torch.as_tensor(array), device)

    packed, places = _packed(rows, prefixes, absent, borders)
    own_lengths = [length - less for length, less in zip(lengths, absent, strict=True)]
    own_borders = np.concatenate([[0], np.cumsum(own_lengths)])
    keys = spans = segments = None
    if any(absent):
        keys = _keys(places, lengths, len(packed), send)
    if inputs.has_states:
        segments = plan_segments(_segments(rows, prefixes, absent), send)
    if inputs.attends_within:
        spans = _spans(rows, absent, places, borders, send)
    return MicroBatch(
        input_ids=send(token_ids[packed]),
        position_ids=send(positions.take(packed, axis=-1)),
        cu_seqlens=send(own_borders.astype(np.int32)),
        max_seqlen=max(own_lengths),
        contents=tuple(content_pieces([row.model_input for row in rows], absent, own_lengths)),
        keys=keys,
        spans=spans,
        segments=segments,
        predict_index=send(places[trained - 1]),
        labels=send(token_ids[trained]),
        sequence_index=send(np.repeat(np.arange(len(rows)), num_trained)),
        unit_index=send(unit_index),
        num_units=len(units),
        weights=send(carried[per]),
        columns={
            name: send(torch.cat([*_own_values(rows, name, absent)])) for name in rows[0].columns
        },
        ids=tuple(row.id for row in rows),
        lengths=tuple(own_lengths),
    )


def _packed(
    rows: Sequence[Row], prefixes: Sequence[int], absent: Sequence[int], borders: Ints
) -> tuple[Ints, Ints]:
    """Indices [T] of the packed tokens among all K tokens of the rows, and the packed place [K] of
    each token; a token of a shared prefix has the place of its copy in the first row of the group
    that has the prefix."""
    is_packed = np.ones(borders[-1], dtype=bool)
    for start, less in zip(borders[:-1], absent, strict=True):
        is_packed[start : start + less] = False
    places = np.cumsum(is_packed) - 1
    first: dict[str, int] = {}
    for row, prefix, start, less in zip(rows, prefixes, borders[:-1], absent, strict=True):
        if prefix:
            begins = first.setdefault(sharers_of(row), start)
            places[start : start + less] = places[begins : begins + less]
    return np.flatnonzero(is_packed), places


def _keys(
    places: Ints,
    lengths: Sequence[int],
    num_packed: int,
    send: Callable[[np.ndarray[Any, Any]], Tensor],
) -> PackedKeys:
    """Keys at `places` among the packed tokens, of sequences of the given lengths."""
    counts = np.bincount(places, minlength=num_packed)
    return PackedKeys(
        index=send(places),
        cu_seqlens=send(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
        uses=send(np.argsort(places, kind="stable").astype(np.int32)),
        uses_starts=send(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
    )


def _segments(rows: Sequence[Row], prefixes: Sequence[int], absent: Sequence[int]) -> list[Segment]:
    """The packed tokens as segments: shared prefixes, each followed by what their rows have behind
    them, and rows that share none."""
    found: list[Segment] = []
    shared = {sharers_of(row) for row, less in zip(rows, absent, strict=True) if less}
    prefix_of: dict[str, int] = {}
    start = 0
    for row, prefix, less in zip(rows, prefixes, absent, strict=True):
        group = sharers_of(row)
        size, parent = row.num_tokens - less, None
        if prefix and group in shared:
            if not less:
                prefix_of[group] = len(found)
                found.append(Segment(start, prefix))
                start, size = start + prefix, size - prefix
            parent = prefix_of[group]
        found.append(Segment(start, size, parent))
        start += size
    return found


def _spans(
    rows: Sequence[Row],
    absent: Sequence[int],
    places: Ints,
    borders: Ints,
    send: Callable[[np.ndarray[Any, Any]], Tensor],
) -> Spans | None:
    """The spans of the packed tokens; None without any."""
    own_lengths = [row.num_tokens - less for row, less in zip(rows, absent, strict=True)]
    found = content_spans([row.model_input for row in rows], absent, own_lengths)
    if not found:
        return None
    begins = [borders[span.sequence] for span in found]
    keys = [places[begin : begin + span.stop] for begin, span in zip(begins, found, strict=True)]
    lengths = [span.stop for span in found]
    return make_spans(found, _keys(np.concatenate(keys), lengths, sum(own_lengths), send), send)


def _own_values(rows: Sequence[Row], name: str, absent: Sequence[int]) -> Iterator[Tensor]:
    for row, less in zip(rows, absent, strict=True):
        column = row.columns[name]
        yield column.values[less:] if column.per == "token" else column.values


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The batch with its tensors on `device`, copied without waiting for it."""
    tensors = {f.name: v for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    return replace(
        batch,
        **{name: to_device(tensor, device) for name, tensor in tensors.items()},
        columns={name: to_device(tensor, device) for name, tensor in batch.columns.items()},
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy of the tensor on the device; from host memory through pinned pages, so that nothing
    waits."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

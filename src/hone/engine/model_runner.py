"""Execution of a planned step on the device: inputs, forward, sampling, and one copy to the host.

A step is at most two launches: all decoding sequences, in a CUDA graph where there is one, then
the chunks of prompts. Letters: T tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.attention import PagedContext
from hone.attention.context import ContentFeatures, make_spans
from hone.engine.decode_step import DecodeStep, pack
from hone.engine.kv_cache import KVCache, blocks_for
from hone.engine.sampler import sample
from hone.engine.sampling_table import SamplingTable
from hone.engine.scheduler import Chunk, Plan
from hone.engine.sequence import Sequence
from hone.engine.slots import Slots, upload
from hone.model_input import TEXT, TEXT_ONLY, InputSpec, ModelInput, content_pieces, content_spans
from hone.models.generation import GenerationModel
from hone.positions import packed_positions
from hone.segments import Segment, plan_segments
from hone.types import IndexedKeys, Spans

if TYPE_CHECKING:
    from hone.engine.decode_graphs import DecodeGraphs
    from hone.models.features import FeatureSource

__all__ = ["LaunchedStep", "ModelRunner", "Sampled", "segments_of"]


Part = tuple[list[Sequence], Tensor]
"""Sequences, and the samples of one launch for them: [2, B] as of `pack`, on the host."""


class Sampled(NamedTuple):
    """The token that a step sampled for one sequence."""

    sequence: Sequence
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight; `results` waits for it."""

    weight_version: int
    parts: list[Part]
    done: torch.cuda.Event | None

    def results(self) -> list[Sampled]:
        """The sampled tokens of every sequence that sampled."""
        if self.done is not None:
            self.done.synchronize()
        found: list[Sampled] = []
        for sequences, (token_ids_B, logprob_bits_B) in self.parts:
            logprobs = logprob_bits_B.view(torch.float32).tolist()
            found += map(Sampled, sequences, token_ids_B.tolist(), logprobs)
        return found


class ModelRunner:
    """Launches the scheduler's plans. Owns all state on the device."""

    def __init__(
        self,
        model: GenerationModel,
        cache: KVCache,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        cuda_graphs: bool = True,
        inputs: InputSpec = TEXT_ONLY,
        features: FeatureSource | None = None,
    ) -> None:
        """`cuda_graphs` replays decode steps from graphs where the device is CUDA. `inputs` are
        those of the model's family, `features` gives those of images."""
        self.model = model
        self.cache = cache
        self.device = cache.device
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._slots = Slots(
            self.max_num_seqs,
            max_model_len=max_model_len,
            block_size=cache.block_size,
            device=self.device,
            rule=inputs.positions,
        )
        self._rule = inputs.positions
        self._attends_within = inputs.attends_within
        self._has_states = inputs.has_states
        self._features = features
        self._sampling = SamplingTable(self.max_num_seqs, vocab_size=vocab_size, device=self.device)
        use_graphs = cuda_graphs and self.device.type == "cuda"
        self._graphs: DecodeGraphs | None = None
        if use_graphs:
            from hone.engine.decode_graphs import DecodeGraphs

            self._graphs = DecodeGraphs()
        self._decode = DecodeStep(
            model,
            cache,
            self._slots,
            self._sampling,
            max_model_len=max_model_len,
            graphs=self._graphs,
        )
        self._calibrates_next = False
        self.recalibrate()

    @property
    def state_bytes(self) -> int:
        """Bytes of device memory for the state of sequences, mostly block tables."""
        return self._slots.block_tables.nbytes

    def recalibrate(self) -> bool:
        """Let the next prefill choose new scales for an FP8 cache, which invalidates its contents.
        Returns whether the cache is FP8."""
        self._calibrates_next = self.cache.scales is not None
        return self._calibrates_next

    @torch.inference_mode()
    def launch(self, plan: Plan, weight_version: int) -> LaunchedStep:
        """Enqueue a step."""
        if plan.admitted:
            for sequence in plan.admitted:
                self._sampling.write(sequence.slot, sequence.request.sampling)
            self._sampling.flush()
            self._slots.admit(plan.admitted)
            self._decode.forget_batch()
        chunked = (chunk.sequence for chunk in plan.chunks)
        self._slots.bring_up_to_date(chain(plan.decodes, chunked), plan.admitted)
        parts: list[Part] = []
        # Chunks may read blocks that a decoding sequence completes in the same step.
        if plan.decodes:
            parts.append((plan.decodes, self._decode.run(plan.decodes)))
        if plan.chunks:
            parts += self._prefill(plan.chunks)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(weight_version, parts, done)

    @torch.inference_mode()
    def measure_activations(self) -> int:
        """Bytes that steps of the largest size take on CUDA in addition to weights and KV cache.

        Where graphs reserve the memory of decode, decode and prefill are added up.
        """
        count = self.max_num_seqs
        decode = self._peak_of(
            lambda: self._decode.compute(count, max_context_len=self.max_model_len, filtered=True)
        )
        prefill = self._peak_of(self._largest_prefill)
        return max(decode, prefill) if self._graphs is None else decode + prefill

    def _peak_of(self, compute: Callable[[], object]) -> int:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        compute()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _largest_prefill(self) -> None:
        count = self.max_num_seqs
        size = min(self.max_num_batched_tokens // count, self.max_model_len)
        slots = np.full(count, self._slots.padding)
        sizes = np.full(count, size)
        # Keys of padding are not stored, and without a prefix none is read from the cache. States
        # are: padding has a row of them.
        padding = self._slots.padding
        segments = [
            Segment(place * size, size, read=padding, writes=(padding,)) for place in range(count)
        ]
        hidden = self._forward(
            np.zeros(count * size, np.int64),
            slots,
            sizes - size,
            sizes,
            [TEXT] * count,
            calibrate=False,
            segments=segments if self._has_states else None,
        )
        positions = torch.zeros(count, dtype=torch.int64, device=self.device)
        batch = self._sampling.rows(upload(slots, self.device), filtered=False)
        sample(self.model.logits(hidden[:count]), batch, positions)

    def _prefill(self, chunks: list[Chunk]) -> list[Part]:
        """Process chunks of prompts; sample where a prompt ends."""
        slots = np.array([chunk.sequence.slot for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        sizes = np.array([chunk.size for chunk in chunks])
        pending = (x.sequence.token_ids[x.start : x.start + x.size] for x in chunks)
        input_ids = np.fromiter(chain.from_iterable(pending), np.int64, sizes.sum())
        inputs = [chunk.sequence.request.model_input for chunk in chunks]
        hidden = self._forward(
            input_ids,
            slots,
            starts,
            sizes,
            inputs,
            calibrate=self._calibrates_next,
            segments=segments_of(chunks) if self._has_states else None,
        )
        self._calibrates_next = False
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        if not sampling:
            return []
        samples = np.array([chunk.samples for chunk in chunks])
        last_rows = sizes.cumsum()[samples] - 1
        if len(last_rows) < len(hidden):
            hidden = hidden[upload(last_rows, self.device)]
        num_sampled = np.array([len(sequence.logprobs) for sequence in sampling])
        slots, ends = slots[samples], (starts + sizes)[samples]
        numbers = np.stack((slots, ends + 1, num_sampled, num_sampled + 1))
        slots_B, num_tokens_B, positions_B, num_sampled_B = upload(numbers, self.device)
        batch = self._sampling.rows(slots_B, filtered=self._sampling.is_filtered(slots))
        tokens, logprobs = sample(self.model.logits(hidden), batch, positions_B)
        self._slots.start(slots_B, tokens, num_tokens_B, num_sampled_B)
        output = pack(tokens, logprobs).to("cpu", non_blocking=True)
        return [(sampling, output)]

    def _forward(
        self,
        input_ids_T: NDArray[np.int64],
        slots_B: NDArray[np.int64],
        starts_B: NDArray[np.int64],
        sizes_B: NDArray[np.int64],
        inputs_B: list[ModelInput],
        *,
        calibrate: bool,
        segments: list[Segment] | None = None,
    ) -> Tensor:
        """Hidden states [T, D] of chunks laid end to end; `segments` are for recurrent layers."""
        block_size = self.cache.block_size
        ends = starts_B + sizes_B
        borders = np.zeros(len(sizes_B) + 1, np.int32)
        np.cumsum(sizes_B, out=borders[1:])
        rows = np.repeat(np.arange(len(sizes_B)), sizes_B)  # [T] chunk of each token
        indices, positions = packed_positions(sizes_B, starts_B, inputs=inputs_B, rule=self._rule)
        kv_slots = self._kv_slots(slots_B[rows], indices)
        kv_slots[slots_B[rows] == self._slots.padding] = -1
        max_context_len = int(ends.max())
        tables = self._slots.host_tables[slots_B, : blocks_for(max_context_len, block_size)]
        numbers = upload(np.vstack((input_ids_T, kv_slots, positions)), self.device)
        ids, slot_mapping = numbers[:2]
        context = PagedContext(
            kv_caches=self.cache.layers,
            kv_scales=self.cache.scales,
            calibrate=calibrate,
            block_tables=upload(tables, self.device),
            slot_mapping=slot_mapping,
            cu_seqlens_q=upload(borders, self.device),
            context_lens=upload(ends.astype(np.int32), self.device),
            max_seqlen_q=int(sizes_B.max()),
            max_context_len=max_context_len,
            query_lens=tuple(sizes_B.tolist()),
            key_lens=tuple(ends.tolist()),
            routes=self.cache.routes,
            contents=self._contents(inputs_B, starts_B, sizes_B),
            spans=self._spans(inputs_B, slots_B, starts_B, sizes_B),
            states=self.cache.states,
            segments=None if segments is None else plan_segments(segments, self._upload),
        )
        return self.model.hidden_states(
            ids, numbers[2] if self._rule is None else numbers[2:], context
        )

    def _kv_slots(self, slots: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of the KV cache of tokens, given by the slot and the index in their sequence."""
        block_size = self.cache.block_size
        pages = self._slots.host_tables[slots, indices // block_size].astype(np.int64)
        return pages * block_size + indices % block_size

    def _contents(
        self, inputs_B: list[ModelInput], starts_B: NDArray[np.int64], sizes_B: NDArray[np.int64]
    ) -> ContentFeatures | None:
        """The features of the content tokens of chunks; None without any."""
        if self._features is None or not any(each.contents for each in inputs_B):
            return None
        return self._features.gather(content_pieces(inputs_B, starts_B.tolist(), sizes_B.tolist()))

    def _spans(
        self,
        inputs_B: list[ModelInput],
        slots_B: NDArray[np.int64],
        starts_B: NDArray[np.int64],
        sizes_B: NDArray[np.int64],
    ) -> Spans | None:
        """The tokens of chunks that attend to each other in both directions; None without any."""
        if not self._attends_within:
            return None
        found = content_spans(inputs_B, starts_B.tolist(), sizes_B.tolist())
        if not found:
            return None
        stops = [span.stop for span in found]
        slots = np.repeat(slots_B[[span.sequence for span in found]], stops)
        indices = np.concatenate([np.arange(stop) for stop in stops])
        keys = IndexedKeys(
            index=self._upload(self._kv_slots(slots, indices)),
            cu_seqlens=self._upload(np.cumsum([0, *stops], dtype=np.int32)),
            max_seqlen=max(stops),
            lengths=tuple(stops),
        )
        return make_spans(found, keys, self._upload)

    def _upload(self, values: NDArray[np.generic]) -> Tensor:
        return upload(values, self.device)


def segments_of(chunks: list[Chunk]) -> list[Segment]:
    """The segments of chunks laid end to end. A chunk is cut where its state is kept; one that
    begins with a state of the same pass is a child of the segment that ends with it."""
    found: list[Segment] = []
    made: dict[int, int] = {}  # row -> the segment that writes it
    place = 0
    for chunk in chunks:
        own = chunk.sequence.slot
        begin, stop = chunk.start, chunk.start + chunk.size
        parent = None if chunk.source is None else made.get(chunk.source)
        read = chunk.source if chunk.source is not None else own if begin else None
        ends: dict[int, tuple[int, ...]] = {border: (row,) for border, row in chunk.snapshots}
        ends[stop] = (*ends.get(stop, ()), own)
        for end, rows in ends.items():
            found.append(
                Segment(place, end - begin, parent, read if parent is None else None, rows)
            )
            made |= dict.fromkeys(rows, len(found) - 1)
            parent, read = len(found) - 1, None
            place, begin = place + end - begin, end
    return found

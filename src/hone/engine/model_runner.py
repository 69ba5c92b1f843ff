"""One engine step on the device: inputs, forward, sampling.

All inputs lie in buffers that are made once, and nothing between the first upload and the sampled
tokens depends on values in them, so that the forward of a decode step can be replayed from a CUDA
graph.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PagedContext
from hone.engine.decode_graphs import DecodeGraphs
from hone.engine.kv_cache import KVCache, blocks_for
from hone.engine.sampler import SamplingBatch, SamplingTable, sample
from hone.engine.scheduler import Batch
from hone.engine.sequence import Sequence
from hone.models.decoder import head_logits, hidden_states
from hone.types import Request, SamplingParams

__all__ = ["ModelRunner"]


class InputBuffer:
    """A static device tensor and the host array it is filled from; on a CPU they share memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=self._is_cuda)
        self._device = self._host.to(device) if self._is_cuda else self._host
        self._array: NDArray[np.generic] = self._host.numpy()

    def upload(self, values: NDArray[np.generic], *, padding: int = 0, fill: int = 0) -> Tensor:
        """Fill the leading corner with `values` and `padding` rows below it with `fill`.

        Returns the device view of these rows in their full width, always at the same address.
        """
        size, *widths = values.shape
        self._array[:size, *(slice(width) for width in widths)] = values
        self._array[size : size + padding] = fill
        rows = slice(size + padding)
        if self._is_cuda:
            self._device[rows].copy_(self._host[rows], non_blocking=True)
        return self._device[rows]


class ModelRunner:
    """Runs batches of the scheduler through the model. Holds everything that lies on the device."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        cuda_graphs: bool = True,
        compile: bool = True,
    ) -> None:
        """`cuda_graphs` replays decode steps from graphs where the device is CUDA, `compile` fuses
        the kernels in them."""
        self.model = model
        self.cache = cache
        self.device = cache.device
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        max_blocks = blocks_for(max_model_len, cache.block_size)

        def buffer(*shape: int, dtype: torch.dtype) -> InputBuffer:
            return InputBuffer(shape, dtype, self.device)

        self._input_ids = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._position_ids = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._slot_mapping = buffer(max_num_batched_tokens, dtype=torch.int64)
        self._block_tables = buffer(max_num_seqs, max_blocks, dtype=torch.int32)
        self._cu_seqlens = buffer(max_num_seqs + 1, dtype=torch.int32)
        self._context_lens = buffer(max_num_seqs, dtype=torch.int32)
        self._logit_rows = buffer(max_num_seqs, dtype=torch.int64)
        self._num_sampled = buffer(max_num_seqs, dtype=torch.int64)

        # By slot, on the host: block tables and how much of each has been copied here.
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._table_sizes = [0] * max_num_seqs
        self._sampling = SamplingTable(
            max_num_seqs, vocab_size=model.config.vocab_size, device=self.device
        )
        self._graphs: DecodeGraphs | None = None
        if cuda_graphs and self.device.type == "cuda":
            max_rows = min(max_num_seqs, max_num_batched_tokens)
            self._graphs = DecodeGraphs(model, max_rows=max_rows, compile=compile)
        self._sampling_of: list[Sequence] = []
        self._sampling_batch: SamplingBatch | None = None

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[list[Sequence], list[int], list[float]]:
        """Compute the batch's pending tokens and sample where no token remains pending.

        Returns the sequences that sampled, their new token ids and log-probabilities. Changes no
        sequence: counting tokens as computed and appending new ones is left to the caller.
        """
        input_ids, position_ids, context = self._prepare(batch)
        if context.is_decode and self._graphs is not None:
            hidden = self._graphs.hidden_states(input_ids, position_ids, context)
        else:
            hidden = hidden_states(self.model, input_ids, position_ids, context)
        sampling, rows = self._sampling_rows(batch)
        if not sampling:
            if self.device.type == "cuda":  # before the host buffers are filled again
                torch.cuda.current_stream(self.device).synchronize()
            return [], [], []
        if len(rows) < len(input_ids):
            hidden = hidden[self._logit_rows.upload(rows)]
        tokens, logprobs = sample(
            head_logits(self.model, hidden).float(),
            self._sampling_params(sampling),
            self._num_sampled.upload(np.array([len(seq.logprobs) for seq in sampling])),
        )
        # float64 holds both exactly, so that there is one copy; the host waits for it.
        token_ids, values = torch.stack((tokens.double(), logprobs.double())).tolist()
        return sampling, list(map(int, token_ids)), values

    def free_cache(self) -> None:
        """Give the KV cache back, and with it the graphs that hold on to its memory."""
        if self._graphs is not None:
            self._graphs.clear()
        self.cache.free()

    def measure_activations(self) -> int:
        """Peak bytes that a step of the largest size takes on CUDA besides weights and KV cache."""
        num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        size = min(self.max_num_batched_tokens // num_seqs, self.max_model_len)
        blocks = list(range(blocks_for(size, self.cache.block_size)))
        params = SamplingParams(max_tokens=1, temperature=0.5, top_p=0.5)
        request = Request(id="", prompt_ids=(0,) * size, sampling=params)
        batch = Batch(num_tokens=[size] * num_seqs)
        for slot in range(num_seqs):  # they overwrite each other's blocks, which no one reads
            sequence = Sequence(request=request, arrival=slot, stop_ids=frozenset(), slot=slot)
            sequence.block_table = blocks
            batch.sequences.append(sequence)
        batch.admitted = batch.sequences

        self.cache.allocate(len(blocks))
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(batch)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.free_cache()
        return peak - before

    def _prepare(self, batch: Batch) -> tuple[Tensor, Tensor, PagedContext]:
        """Upload the step's inputs: ids and positions [T] and the attention context."""
        self._copy_new_state(batch)
        sequences = batch.sequences
        block_size = self.cache.block_size
        slots = np.array([seq.slot for seq in sequences])
        starts = np.array([seq.num_computed for seq in sequences])
        sizes = np.array(batch.num_tokens)
        ends = starts + sizes
        borders = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=borders[1:])

        rows = np.repeat(np.arange(len(sizes)), sizes)  # [T] sequence of each token
        positions = np.arange(borders[-1]) + (starts - borders[:-1])[rows]
        pages = self._tables[slots[rows], positions // block_size].astype(np.int64)
        pending = (
            seq.token_ids[seq.num_computed : seq.num_computed + size]
            for seq, size in zip(sequences, batch.num_tokens, strict=True)
        )
        input_ids = np.fromiter(chain.from_iterable(pending), np.int64, len(rows))
        max_context_len, max_seqlen_q = int(ends.max()), int(sizes.max())
        tables = self._tables[slots, : blocks_for(max_context_len, block_size)]
        token_slots = pages * block_size + positions % block_size
        is_decode = max_seqlen_q == 1
        padding = 0
        if is_decode and self._graphs is not None:
            padding = self._graphs.num_rows(len(sizes)) - len(sizes)
            max_context_len = self.max_model_len
        context = PagedContext(
            kv_caches=self.cache.layers,
            block_tables=self._block_tables.upload(tables, padding=padding),
            slot_mapping=self._slot_mapping.upload(token_slots, padding=padding, fill=-1),
            cu_seqlens_q=self._cu_seqlens.upload(borders),
            context_lens=self._context_lens.upload(ends, padding=padding),
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
            query_lens=() if is_decode else tuple(batch.num_tokens),
            key_lens=() if is_decode else tuple(ends.tolist()),
        )
        return (
            self._input_ids.upload(input_ids, padding=padding),
            self._position_ids.upload(positions, padding=padding),
            context,
        )

    def _copy_new_state(self, batch: Batch) -> None:
        """Bring the by-slot buffers up to date: new sequences, and blocks they got since."""
        for seq in batch.admitted:
            self._sampling.write(seq.slot, seq.request.sampling)
            self._table_sizes[seq.slot] = 0
        for seq in batch.sequences:
            known = self._table_sizes[seq.slot]
            if len(seq.block_table) > known:
                self._tables[seq.slot, known : len(seq.block_table)] = seq.block_table[known:]
                self._table_sizes[seq.slot] = len(seq.block_table)

    def _sampling_rows(self, batch: Batch) -> tuple[list[Sequence], NDArray[np.int64]]:
        """The sequences with nothing pending after this step, and their last rows in it."""
        sampling: list[Sequence] = []
        rows: list[int] = []
        end = 0
        for seq, size in zip(batch.sequences, batch.num_tokens, strict=True):
            end += size
            if seq.num_computed + size == len(seq.token_ids):
                sampling.append(seq)
                rows.append(end - 1)
        return sampling, np.array(rows, np.int64)

    def _sampling_params(self, sampling: list[Sequence]) -> SamplingBatch:
        """Parameters of the sequences; kept while they stay the same, which most steps they do."""
        if self._sampling_batch is None or self._sampling_of != sampling:
            self._sampling_of = sampling
            self._sampling_batch = self._sampling.select(np.array([seq.slot for seq in sampling]))
        return self._sampling_batch

"""Memory of an engine on each of its devices, before anything is started.

    memory = EngineMemory(plan, plan.shape, longest=4096)
    memory.weights, memory.step, memory.cache(reserved=memory_of_a_colocated_trainer)

The cache is sized as the engine sizes it when it starts, behind the states of recurrent layers. How
vLLM divides its share has not been compared with measurements.
"""

from __future__ import annotations

from math import prod

from hone.config.plan import RunPlan
from hone.engine.backends import BACKENDS
from hone.engine.settings import BLOCK_SIZE, CPU_CACHE_GIB, num_state_rows
from hone.families.shape import ModelShape
from hone.hardware import GIB

__all__ = ["CACHE_MARGIN_BYTES", "CONTEXT_BYTES", "GROUP_BYTES", "EngineMemory"]

CONTEXT_BYTES = GIB
"""CUDA's context, libraries, loaded kernels and the pools of CUDA graphs, of one process."""
CACHE_MARGIN_BYTES = GIB // 2
"""Margin that stays free where free memory limits the cache; the same as in
`hone.engine.kv_cache`."""
GROUP_BYTES = 1 << 28
"""Bytes of whole weights that exist at once during a sync within a process; the same as in
`hone.weights.sync`."""


class EngineMemory:
    """Memory of an engine on each of its devices, in bytes."""

    def __init__(
        self, plan: RunPlan, shape: ModelShape, *, longest: int, at_least: bool = False
    ) -> None:
        """Sequences have at most `longest` tokens. With `at_least` the memory of a forward pass is
        left out, so the result is a lower bound. Raises KeyError for a plan without an engine."""
        self.role = plan.roles["engine"]
        self.settings = self.role.engine
        self.backend = BACKENDS[self.settings.backend]
        self._plan, self._shape = plan, shape
        self._longest, self._at_least = longest, at_least
        self._num_bytes, self._size = plan.num_bytes, self.role.axes.tensor

    @property
    def is_colocated(self) -> bool:
        """Whether the engine is colocated with the trainer."""
        return self.role.shares_devices_of is not None

    # -- weights ---------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """Bytes of weights that the engine owns; 0 where it computes with the trainer's tensors."""
        if self.role.aliases_weights_of is not None:
            return 0
        if self.backend.has_own_weights:  # divided like the layers, embedding included
            return -(-self._shape.weight_bytes(self._num_bytes) // self._size)
        packs_rows = self._plan.packs_rows
        return self._shape.rank_bytes(self._size, self._num_bytes, packs_rows=packs_rows)

    @property
    def asleep(self) -> int:
        """Bytes of a sleeping engine's weights in host memory, where a sync does not deliver them
        again."""
        sleeps = self.is_colocated and self.settings.enable_sleep
        return self.weights if sleeps and self.backend.keeps_weights_asleep else 0

    @property
    def packed(self) -> int:
        """Bytes of int8 weights that a sync makes at a time: a group of weights, and the tensor
        that ends it."""
        if not self._plan.packs_rows:
            return 0
        largest = max(t.numel for t in self._shape.tensors() if t.is_layer_matrix)
        return (GROUP_BYTES // self._num_bytes + largest) // self._size

    # -- passes ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Work memory of the largest prefill plus that of decode steps, whose CUDA graphs have
        memory of their own."""
        if self._at_least:
            return 0
        shape, settings = self._shape, self.settings
        values = max(3 * shape.mlp_size, shape.recurrence_work) // self._size
        values += 2 * shape.hidden_size
        logits = settings.max_num_seqs * shape.vocab_size * (4 + self._num_bytes)
        of_tokens = settings.max_num_batched_tokens * values * self._num_bytes
        return of_tokens + logits + self._unpacked + self._moved_states

    @property
    def _moved_states(self) -> int:
        """Bytes of the states of a recurrent layer at the end of a prefill of all sequences: as
        they were, as they are, and twice on their way to the stored ones."""
        if not (number := len(self._shape.recurrent_indices)):
            return 0
        of_layer = self._shape.state_bytes(self._num_bytes) // number
        return 4 * self.settings.max_num_seqs * of_layer // self._size

    @property
    def _unpacked(self) -> int:
        """Bytes of weights that a prefill unpacks from int8 at a time: the experts of a layer, or
        gate and up projection."""
        if not self._plan.packs_rows:
            return 0
        matrices = (t for t in self._shape.tensors() if t.is_layer_matrix)
        numel = {t.name: prod(t.local(self._size)) for t in matrices}
        pairs = ("gate_proj", "up_proj"), ("experts.gate_up_proj", "experts.down_proj")
        return max(sum(numel.get(name, 0) for name in pair) for pair in pairs) * self._num_bytes

    # -- the KV cache ----------------------------------------------------------------------------

    @property
    def states(self) -> int:
        """Bytes of the stored states of recurrent layers on each device. Other engines than the
        embedded one have them in the cache."""
        if self.backend.has_own_weights:
            return 0
        num_seqs, batch = self.settings.max_num_seqs, self._plan.batch
        if self._plan.is_on_cpu and batch is not None:  # where memory is taken when it is written
            num_seqs = min(num_seqs, batch.samples_per_step)
        rows = num_state_rows(num_seqs, enable_prefix_caching=self.settings.enable_prefix_caching)
        return rows * (self._shape.state_bytes(self._num_bytes) // self._size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token on each device."""
        num_bytes = {"fp8": 1, "bfloat16": 2, "float32": 4}[self._plan.kv_dtype]
        return self._shape.kv_bytes_per_token(num_bytes) // self._size

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest sequence that the cache must have room for; None where not
        known."""
        return self._plan.max_model_len or self._plan.max_sequence_tokens

    @property
    def sequence_bytes(self) -> int | None:
        """Bytes of keys and values of one sequence of `max_length` tokens."""
        length = self.max_length
        if length is None:
            return None
        return -(-length // BLOCK_SIZE) * BLOCK_SIZE * self.kv_bytes_per_token

    def cache(self, *, reserved: int) -> int | None:
        """Bytes of the KV cache that the engine chooses when it starts on devices where other
        models take `reserved` bytes; None where that is not known."""
        plan, settings, gpu = self._plan, self.settings, self._plan.devices.gpu
        if plan.is_on_cpu:
            return self._touched_cache
        if settings.kv_cache_gib is not None:
            return int(settings.kv_cache_gib * GIB)
        if gpu is None or gpu.memory_gib is None:
            return None
        total, own = gpu.memory_gib * GIB, self.weights + self.step + self.states
        limits = [int(total * settings.gpu_memory_utilization) - own]
        if not self.backend.sizes_cache_by_share:
            limits.append(total - CONTEXT_BYTES - reserved - own - CACHE_MARGIN_BYTES)
            if plan.max_model_len is not None and self.sequence_bytes is not None:
                limits.append(settings.max_num_seqs * self.sequence_bytes)
        return max(min(limits), 0)

    @property
    def _touched_cache(self) -> int:
        """Bytes of a host cache that the sequences of a step write to. The operating system
        allocates a page at its first write, so only these take memory."""
        settings, batch = self.settings, self._plan.batch
        if batch is None:
            return 0
        size = int((settings.kv_cache_gib or CPU_CACHE_GIB) * GIB)
        most = min(settings.max_num_seqs, batch.samples_per_step)
        return min(size, most * self._longest * self.kv_bytes_per_token)

import gc
import logging
from itertools import product

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from hone.engine import arena, kv_cache
from hone.engine.arena import Arena, CudaDriver
from hone.engine.kv_cache import KVCache, check_max_num_seqs, choose_num_blocks
from hone.engine.settings import EngineConfig
from hone.errors import UserError
from tests.engine.fake_driver import PAGE, FakeDriver
from tests.tables import table

CUDA = torch.device("cuda", 0)
CHUNK = 3 * PAGE
GIB = 2**30
CONFIG = Qwen3Config(
    num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 4  # layers, keys and values, tokens, heads, head size, float32


@pytest.fixture
def driver(monkeypatch):
    return fake_driver(monkeypatch)


def fake_driver(monkeypatch):
    """A fake driver that arenas of `kv_cache` use as well, with small chunks."""
    fake = FakeDriver()
    monkeypatch.setattr(arena, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(
        "hone.engine.arena.Arena", lambda size, device: Arena(size, device, driver=fake)
    )
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: fake.free_bytes())
    return fake


def make_arena(driver, num_bytes):
    return Arena(num_bytes, CUDA, driver=driver)


def make_cache(device=CUDA, dtype=torch.float32):
    return KVCache(CONFIG, block_size=4, dtype=dtype, device=device)


# Arena ------------------------------------------------------------------------------------------


def test_the_size_is_rounded_up_and_taken_in_chunks(driver):
    made = make_arena(driver, 2 * CHUNK + 1)
    base, size = made.address, 2 * CHUNK + PAGE
    assert made.num_bytes == driver.held == size
    assert driver.calls == [
        ("reserve", size),
        *(("create", CHUNK), ("map", base, CHUNK), ("release",)),
        *(("create", CHUNK), ("map", base + CHUNK, CHUNK), ("release",)),
        *(("create", PAGE), ("map", base + 2 * CHUNK, PAGE), ("release",)),
        ("allow_access", base, size),
        ("zero", base, size),
    ]


def test_unmapping_waits_for_the_device_and_returns_everything(driver):
    made = make_arena(driver, 2 * CHUNK)
    driver.calls.clear()
    made.unmap()
    assert driver.calls == [("synchronize",), ("unmap", made.address, 2 * CHUNK)]
    assert driver.held == 0
    assert not made.is_mapped


def test_tensors_lie_where_they_lay_after_every_cycle_and_hold_zeros(driver):
    made = make_arena(driver, 2 * CHUNK)
    tensor = made.tensor((5, 7), torch.float32, offset=64)
    assert tensor.data_ptr() == made.address + 64
    for _ in range(3):
        assert tensor.eq(0).all()
        tensor.fill_(3)
        made.unmap()
        made.map()
        assert driver.held == made.num_bytes
        assert made.tensor((5, 7), torch.float32, offset=64).data_ptr() == tensor.data_ptr()


@table("error", [torch.OutOfMemoryError("out"), RuntimeError("refused")])
@table(
    "call, successes",
    [*product(["create", "map", "release"], [0, 1, 2]), ("allow_access", 0), ("zero", 0)],
)
def test_R14_a_map_that_fails_anywhere_holds_nothing_and_can_be_repeated(
    monkeypatch, call, successes, error
):
    driver = fake_driver(monkeypatch)
    made = make_arena(driver, 3 * CHUNK)
    address = made.address
    made.unmap()
    driver.fail_at = (call, successes, error)
    with pytest.raises(type(error)):
        made.map()
    # What the driver refused to release is lost to us; all else is returned.
    assert driver.held == (CHUNK if call == "release" else 0)
    assert not driver.mapped
    assert not made.is_mapped
    driver.fail_at = None
    made.map()
    assert made.address == address
    assert made.tensor((8,), torch.uint8).tolist() == [0] * 8


def test_R14_lack_of_memory_half_way_says_both_sizes(driver):
    made = make_arena(driver, 60 * CHUNK)
    made.unmap()
    driver.capacity = 45 * CHUNK
    unit = CHUNK / GIB
    sizes = (
        rf"^{60 * unit:.2f} GiB of device memory were asked for and {45 * unit:.2f} GiB are free"
    )
    with pytest.raises(torch.OutOfMemoryError, match=sizes):
        made.map()
    assert driver.names().count("create") > 45


def test_a_constructor_that_fails_frees_its_address(driver):
    driver.capacity = CHUNK
    with pytest.raises(torch.OutOfMemoryError):
        make_arena(driver, 2 * CHUNK)
    assert driver.held == 0
    assert not driver.buffers


@pytest.mark.parametrize("is_mapped", [True, False])
def test_an_arena_that_nobody_holds_gives_everything_back(driver, is_mapped):
    made = make_arena(driver, 2 * CHUNK)
    tensor = made.tensor((3,), torch.uint8)
    if not is_mapped:
        made.unmap()
    del made
    gc.collect()
    assert driver.buffers, "a tensor still lies in it"
    del tensor
    gc.collect()
    assert driver.held == 0
    assert not driver.buffers
    assert driver.names()[-3:] == ["synchronize", "unmap", "free_address"]


def test_without_cuda_bindings_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hone.extras.is_installed", lambda name: False)
    with pytest.raises(UserError, match="pip install 'cuda-bindings'"):
        CudaDriver(CUDA)


# KVCache ----------------------------------------------------------------------------------------


def test_layers_do_not_overlap_and_are_aligned(driver):
    cache = make_cache()
    cache.allocate(3)
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 3, 4, 2, 8)] * 3
    for number, layer in enumerate(cache.layers):
        assert layer.is_contiguous()
        assert (layer.data_ptr() - cache.layers[0].data_ptr()) % 512 == 0
        layer.fill_(number)
    for number, layer in enumerate(cache.layers):
        assert layer.eq(number).all()


def test_R14_waking_restores_the_same_addresses_filled_with_zeros(driver):
    cache = make_cache()
    cache.allocate(50)
    addresses = [layer.data_ptr() for layer in cache.layers]
    for _ in range(100):
        awake = driver.held
        for layer in cache.layers:
            layer.fill_(float("nan"))
        cache.sleep()
        assert cache.layers == []
        assert driver.held == 0
        cache.wake()
        assert driver.held == awake
        assert [layer.data_ptr() for layer in cache.layers] == addresses
        assert all(layer.eq(0).all() for layer in cache.layers)


@pytest.mark.parametrize(("number", "dtype"), [(8, torch.uint8), (300, torch.int16)])
def test_routes_lie_behind_the_layers_and_where_they_lay(driver, number, dtype):
    config = Qwen3MoeConfig(
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_experts=number,
        num_experts_per_tok=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    cache = KVCache(config, block_size=4, dtype=torch.float32, device=CUDA, records_routes=True)
    # 2 layers have 2 experts for each of 4 tokens.
    assert cache.block_bytes == BLOCK_BYTES + 4 * 2 * 2 * dtype.itemsize
    cache.allocate(5)
    routes, last = cache.routes, cache.layers[-1]
    assert (routes.shape, routes.dtype) == ((5 * 4 + 1, 2, 2), dtype)
    assert routes.data_ptr() >= last.data_ptr() + last.nbytes
    assert cache.num_bytes <= driver.held
    place = routes.data_ptr()
    for layer in cache.layers:
        layer.fill_(-1)
    assert not routes.any()
    routes.fill_(3)
    cache.sleep()
    assert cache.routes is None
    cache.wake()
    assert cache.routes.data_ptr() == place
    assert not cache.routes.any()


def test_R14_a_wake_without_memory_says_both_sizes_stays_asleep_and_can_be_repeated(
    driver, monkeypatch
):
    monkeypatch.setattr(kv_cache, "GIB", 1024)
    cache = make_cache()
    cache.allocate(64)
    needed = f"{64 * BLOCK_BYTES / 1024:.2f} GiB"
    cache.sleep()
    driver.capacity = 10 * 1024
    message = rf"needs {needed} and 10\.00 GiB are available on cuda:0.*torch's tensors"
    for available in (driver.free_bytes, lambda: 2**30):  # found at once, or by the driver half-way
        monkeypatch.setattr(kv_cache, "available_bytes", lambda device, a=available: a())
        with pytest.raises(UserError, match="needs" if available() > 2**20 else message):
            cache.wake()
        assert cache.is_asleep
        assert cache.layers == []
        assert driver.held == 0
    driver.capacity = 2**20
    cache.wake()
    assert not cache.is_asleep
    assert len(cache.layers) == 3


def test_R14_torchs_cached_blocks_are_released_only_when_memory_is_short(driver, monkeypatch):
    cached = [2**19]
    monkeypatch.setattr(kv_cache, "available_bytes", lambda device: driver.free_bytes() - cached[0])
    released = []
    monkeypatch.setattr(
        "torch.cuda.empty_cache", lambda: released.append(cached.pop()) or cached.append(0)
    )
    cache = make_cache()
    cache.allocate(64)
    cache.sleep()
    cache.wake()
    assert released == []
    cache.sleep()
    driver.capacity = 2**19 + 2**16
    cache.wake()
    assert released == [2**19]


def test_freeing_returns_memory_and_address_awake_or_asleep(driver):
    cache = make_cache()
    for sleeps in (True, False):
        cache.allocate(2)
        if sleeps:
            cache.sleep()
        cache.free()
        assert driver.held == 0
        assert not driver.buffers


def test_on_a_cpu_sleep_frees_and_wake_allocates():
    cache = make_cache(torch.device("cpu"))
    cache.allocate(4)
    cache.layers[1].fill_(2)
    cache.sleep()
    assert cache.layers == []
    cache.wake()
    assert [tuple(layer.shape) for layer in cache.layers] == [(2, 4, 4, 2, 8)] * 3
    assert cache.layers[1].eq(0).all()


def test_an_fp8_cache_takes_half_of_bfloat16_and_has_scales():
    cpu = torch.device("cpu")
    half, full = make_cache(cpu, torch.float8_e4m3fn), make_cache(cpu, torch.bfloat16)
    assert 2 * half.block_bytes == full.block_bytes
    assert full.scales is None
    half.allocate(2)
    assert half.layers[0].dtype is torch.float8_e4m3fn
    assert half.layers[0].float().eq(0).all()
    assert torch.equal(half.scales, torch.ones(3, 2, 2))
    half.scales.mul_(2)
    half.sleep()
    half.wake()
    assert half.scales.eq(2).all()


# Sizing -----------------------------------------------------------------------------------------

BIG = Qwen3Config(  # 36 layers of 8 heads of 128: 147,456 bytes a token in bfloat16
    num_hidden_layers=36,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
BIG_BLOCK = 16 * 147_456


@pytest.fixture
def gpu(monkeypatch):
    """A device of 140 GiB: `gpu(free_gib, cached_gib)` says what is free."""

    def set_free(free_gib, cached_gib=0.0):
        free = [free_gib]

        def empty_cache():
            free[0] = free_gib + cached_gib

        monkeypatch.setattr("torch.cuda.empty_cache", empty_cache)
        monkeypatch.setattr(
            "torch.cuda.mem_get_info", lambda device: (int(free[0] * GIB), 140 * GIB)
        )

    return set_free


def big_cache():
    return KVCache(BIG, block_size=16, dtype=torch.bfloat16, device=CUDA)


def choose(*, max_model_len=4096, reserved_gib=2.0, resident_gib=0.0, **fields):
    return choose_num_blocks(
        big_cache(),
        EngineConfig(**{"max_num_seqs": 1024, **fields}),
        max_model_len=max_model_len,
        reserved_bytes=int(reserved_gib * GIB),
        resident_bytes=int(resident_gib * GIB),
    )


@table(
    "memory_gib, expected_gib, decided",  # free, cached by torch, held by the engine
    [
        ((130, 0, 0), 0.5 * 140 - 2, "gpu_memory_utilization=0.5 of 140.0 GiB"),
        ((130, 0, 15.5), 0.5 * 140 - 15.5 - 2, "less 15.50 GiB that the engine holds"),
        ((40, 0, 0), 40 - 2 - 0.5, "40.00 GiB free on cuda:0, less 2.00 GiB for one step"),
        ((40, 0, 15.5), 40 - 2 - 0.5, "a margin of 0.50 GiB"),
        ((10, 30, 0), 40 - 2 - 0.5, "40.00 GiB free"),
    ],
)
def test_the_cache_gets_the_smaller_of_its_share_and_what_is_really_free(
    gpu, caplog, memory_gib, expected_gib, decided
):
    free, cached, resident = memory_gib
    gpu(free, cached)
    with caplog.at_level(logging.INFO, "hone"):
        blocks = choose(resident_gib=resident)
    assert blocks == int(expected_gib * GIB) // BIG_BLOCK
    [record] = caplog.records
    line = record.getMessage()
    assert decided in line
    assert line.startswith(f"KV cache: {blocks} blocks, {blocks * 16} tokens, ")
    assert f"{blocks // 256} sequences of max_model_len=4096 fit at once, 1024 may run" in line


def test_no_more_than_all_sequences_can_use(gpu, caplog):
    gpu(130)
    with caplog.at_level(logging.INFO, "hone"):
        assert choose(max_num_seqs=8) == 8 * 256
    assert "all that engine.max_num_seqs=8 sequences can use" in caplog.text


def test_a_size_in_gib_is_taken_as_it_is(gpu):
    gpu(1)
    assert choose(kv_cache_gib=20) == 20 * GIB // BIG_BLOCK


@pytest.mark.parametrize(
    ("free", "fields", "numbers"),
    [
        (3.0, {}, ["3.00 GiB free", "2.00 GiB for one step", "0.50 GiB holds 3632 tokens",
                   "max_model_len=4096", "256 blocks of 16 (0.562 GiB)", "would be 68.000 GiB"]),
        (130, {"resident_gib": 68}, ["gpu_memory_utilization=0.5 of 140.0 GiB",
                   "68.00 GiB that the engine holds", "holds 0 tokens", "would be 127.500 GiB"]),
    ],
)  # fmt: skip
def test_a_cache_too_small_for_one_sequence_is_refused_with_all_numbers(gpu, free, fields, numbers):
    gpu(free)
    with pytest.raises(ValueError, match="too small") as failure:
        choose(**fields)
    for number in numbers:
        assert number in str(failure.value)


@table(
    "free, count, fields, message",
    [
        (130, 1032, {}, r"max_num_seqs=1032 .*64\.00 MiB, 64\.50 GiB.*0\.562 GiB, of "
         r"engine\.gpu_memory_utilization=0\.5 of 140\.0 GiB, less 5\.00 GiB.*at most 1031 would"),
        (31, 600, {}, r"0\.562 GiB, of 31\.00 GiB free on cuda:0; at most 487 would"),
        (31, 600, {"kv_cache_gib": 1}, r"31\.00 GiB free on cuda:0; at most 487"),
        (0.5, 1, {}, r"not even one does; free memory or shorten sequences"),
    ],
)  # fmt: skip
def test_more_sequences_than_memory_holds_are_refused_with_numbers(
    gpu, free, count, fields, message
):
    gpu(free)
    with pytest.raises(ValueError, match=message):
        check_max_num_seqs(
            big_cache(),
            EngineConfig(max_num_seqs=count, **fields),
            max_model_len=4096,
            bytes_of=lambda number: number * 64 * 2**20,
            resident_bytes=5 * GIB,
        )


def test_as_many_sequences_as_memory_holds_are_allowed(gpu):
    gpu(31)
    check_max_num_seqs(
        big_cache(),
        EngineConfig(max_num_seqs=487),
        max_model_len=4096,
        bytes_of=lambda number: number * 64 * 2**20,
    )

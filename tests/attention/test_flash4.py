"""The calls made to FlashAttention 4, with plain-torch kernels of its contract in its place."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hone import flash4 as known
from hone.attention import PackedContext, backends, flash4
from hone.errors import UserError
from hone.models.load import require_attention
from hone.models.settings import ModelConfig
from tests.attention.twin import attend_packed
from tests.tables import table

SCALE = 0.3
LENGTHS = [4, 1, 6]


def scores_twin(q, k, rows, *, softmax_scale, causal, window_size_left):
    """Scores [Hq, T, K] in float64, -inf where a query does not see a key."""
    assert causal
    queries, lengths = (
        torch.tensor([b - a for a, b in pairwise(rows[f"cu_seqlens_{x}"].tolist())]) for x in "qk"
    )
    longest = max(*lengths.tolist(), flash4.TILE + 1)
    assert rows["max_seqlen_q"] == rows["max_seqlen_k"] == longest
    of_query, of_key = (torch.arange(len(n)).repeat_interleave(n) for n in (queries, lengths))
    ends = lengths.cumsum(0)
    position = torch.cat(
        [torch.arange(e - n, e) for e, n in zip(ends.tolist(), queries.tolist(), strict=True)]
    )
    behind = position[:, None] - torch.arange(len(k))
    seen = (of_query[:, None] == of_key) & (behind >= 0)
    if window_size_left is not None:
        seen &= behind <= window_size_left
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * softmax_scale
    return scores.masked_fill(~seen, float("-inf"))


def forward_twin(q, k, v, *, return_lse, softmax_scale, causal, window_size_left, **rows):
    assert return_lse
    mask = {"causal": causal, "window_size_left": window_size_left}
    scores = scores_twin(q, k, rows, softmax_scale=softmax_scale, **mask)
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return output.to(q.dtype), scores.logsumexp(-1), None, None, None


def backward_twin(  # noqa: PLR0917  # the kernel's own signature
    q,
    k,
    v,
    out,
    dout,
    lse,
    *,
    softmax_scale,
    causal,
    window_size_left,
    deterministic,
    dq,
    dk,
    dv,
    **rows,
):
    """From the log-sum-exp and the output it is given into the gradients that it is given, as the
    kernel does."""
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    mask = {"causal": causal, "window_size_left": window_size_left}
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = scores_twin(q, k, rows, softmax_scale=softmax_scale, **mask)
    weights = (scores - lse.unsqueeze(-1)).exp()
    grad_weights = torch.einsum("qhd,khd->hqk", dout, values)
    mean = (dout * out).sum(-1).T.unsqueeze(-1)
    grad_scores = weights * (grad_weights - mean) * softmax_scale
    shared = (len(k), k.shape[1], group, -1)
    dq.copy_(torch.einsum("hqk,khd->qhd", grad_scores, keys))
    dk.copy_(torch.einsum("hqk,qhd->khd", grad_scores, q).view(shared).sum(2))
    dv.copy_(torch.einsum("hqk,qhd->khd", weights, dout).view(shared).sum(2))
    return dq, dk, dv


@pytest.fixture(autouse=True)
def _kernel_twins(monkeypatch):
    twins = SimpleNamespace(_flash_attn_fwd=forward_twin, _flash_attn_bwd=backward_twin)
    monkeypatch.setattr(flash4, "_kernels", lambda: twins)


def draw():
    """Queries, keys, values with gradients, and the gradient of the output."""
    shapes = [(sum(LENGTHS), heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    return inputs, torch.randn(shapes[0], dtype=torch.float64)


@table("window", [None, 1, 3, 100])
def test_output_and_gradients(window):
    inputs, grad = draw()
    context = PackedContext.from_lengths(LENGTHS)
    actual = flash4.packed_attention(*inputs, context, scale=SCALE, window=window)
    expected = attend_packed(*inputs, LENGTHS, scale=SCALE, window=window)
    torch.testing.assert_close(actual, expected)
    pairs = zip(*(torch.autograd.grad(x, inputs, grad) for x in (actual, expected)), strict=True)
    for ours, exact in pairs:
        torch.testing.assert_close(ours, exact)
        assert ours.transpose(0, 1).is_contiguous(), "compiled layers copy any other order"


def test_the_operator_is_sound():
    inputs, _ = draw()
    borders = PackedContext.from_lengths(LENGTHS).cu_seqlens
    torch.library.opcheck(
        torch.ops.hone.flash4.default,
        (*inputs, borders, borders, flash4.TILE + 1, SCALE, None),
        test_utils=("test_schema", "test_autograd_registration"),
    )


def test_gradients_are_reproducible_on_request():
    inputs, grad = draw()
    output = flash4.packed_attention(
        *inputs, PackedContext.from_lengths(LENGTHS), scale=SCALE, window=None
    )
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(output, inputs, grad)  # the twin compares what it was asked for
    finally:
        torch.use_deterministic_algorithms(False)


@table(
    "major, head_dim, softcap, expected",
    [
        (9, 128, None, "flash4"),
        (10, 64, None, "flash4"),
        (8, 128, None, "flash"),
        (12, 128, None, "flash"),
        (9, 256, None, "flash"),
        (9, 100, None, "flash"),
        (9, 128, 50.0, "reference"),
        (9, 512, None, "reference"),
    ],
)
def test_rule_where_it_is_installed(monkeypatch, major, head_dim, softcap, expected):
    monkeypatch.setattr(flash4, "_is_installed", lambda: True)
    monkeypatch.setattr(flash4, "_architecture", lambda _: major)
    chosen = backends.choose_packed_backend(
        torch.device("cuda"), torch.bfloat16, head_dim=head_dim, softcap=softcap
    )
    assert chosen == expected


def test_rule_where_it_is_missing(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(known, "distribution", missing)
    monkeypatch.setattr(flash4, "_architecture", None)  # not asked: there may be no GPU
    flash4._is_installed.cache_clear()
    try:
        assert not flash4.is_usable(torch.device("cuda"), 128)
    finally:
        flash4._is_installed.cache_clear()


def test_packed_attention_calls_the_chosen_backend(monkeypatch):
    monkeypatch.setattr(backends, "choose_packed_backend", lambda *_, **__: "flash4")
    inputs, _ = draw()
    context = PackedContext.from_lengths(LENGTHS)
    actual = backends.packed_attention(*inputs, context, scale=SCALE, window=3)
    torch.testing.assert_close(actual, attend_packed(*inputs, LENGTHS, scale=SCALE, window=3))


def test_a_broken_installation_says_what_to_do(monkeypatch):
    def broken(_):
        raise ImportError("no cutlass")

    monkeypatch.undo()
    monkeypatch.setattr(flash4.importlib, "import_module", broken)
    flash4._kernels.cache_clear()
    inputs, _ = draw()
    with pytest.raises(UserError, match=r"no cutlass.*pip install .*flash-attn-4>=.*uninstall"):
        flash4.packed_attention(
            *inputs, PackedContext.from_lengths(LENGTHS), scale=SCALE, window=None
        )


@pytest.fixture
def broken_package(tmp_path, monkeypatch):
    """FlashAttention 4 as pip lists it, on the path of other processes too, that lacks a part."""
    monkeypatch.undo()  # the twins
    caches = flash4._is_installed.cache_clear, flash4._kernels.cache_clear
    for clear in caches:
        clear()
    (tmp_path / "flash_attn_4-4.0.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n"
    (tmp_path / "flash_attn_4-4.0.0.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("import no_cutlass")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield
    for clear in caches:
        clear()
    for name in ("flash_attn.cute", "flash_attn"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("broken_package")
def test_another_process_finds_that_it_cannot_be_imported():
    assert known.is_installed()
    problem = known.import_problem()
    assert problem is not None
    assert "installed but broken: ModuleNotFoundError: No module named 'no_cutlass'." in problem


@pytest.mark.usefixtures("broken_package")
def test_what_training_will_call_is_imported_before_a_model_is_loaded(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "qwen3", "head_dim": 16} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg, cuda = ModelConfig(path=str(tmp_path)), torch.device("cuda")
    monkeypatch.setattr(flash4, "_architecture", lambda _: 9)
    with pytest.raises(UserError, match="installed but broken: No module named 'no_cutlass'"):
        require_attention(cfg, cuda)
    require_attention(cfg, torch.device("cpu"))
    require_attention(ModelConfig(path=str(tmp_path), dtype="float32"), cuda)
    monkeypatch.setattr(flash4, "_architecture", lambda _: 8)
    require_attention(cfg, cuda)

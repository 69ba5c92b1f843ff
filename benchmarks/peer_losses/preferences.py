"""DPO and its kin, KTO, and losses of pairs without a reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.preferences.dpo import DPO
from hone.algorithms.preferences.kto import KTO
from hone.algorithms.settings import PreferenceConfig
from hone.observe.metrics import to_scalars
from hone.types import Column, Preference
from peer_losses.drawn import Draw, Found, Tokens, bound, graded, summed, trainer
from peer_losses.peers import CPOTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, openrlhf

DPO_LOSSES: list[tuple[Any, float]] = [
    *((name, 0.0) for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard")),
    *((name, 0.0) for name in ("apo_zero", "apo_down", "discopop", "sft")),
    ("exo_pair", 0.1),
    ("robust", 0.1),
    ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, 0.0),
]
PAIR_METRICS = [
    *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")),
    *(f"{kind}/{name}" for kind in ("logps", "logits") for name in ("chosen", "rejected")),
]


def own_pairs(tokens: Tokens, cfg: PreferenceConfig) -> tuple[Tensor, Any]:
    """Pairs of the rows i and i + half."""
    half = len(tokens.ids) // 2
    order = [i for pair in range(half) for i in (pair, half + pair)]
    rows = tokens.rows(order)
    items = [Preference(f"{n}", (rows[2 * n], rows[2 * n + 1]), (True, False)) for n in range(half)]
    algorithm = DPO(cfg)
    labelled = algorithm.rows(items, 0)
    for row, drawn in zip(labelled, rows, strict=True):
        row.columns |= drawn.columns
    algorithm.targets(labelled, items)
    return summed(algorithm.objectives["policy"], labelled, tokens.outputs(order))


def dpo(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 12)
    reference = tokens.logprobs(tokens.reference).sum(1).chunk(2)
    for loss, smoothing in DPO_LOSSES:
        cfg = PreferenceConfig(loss=loss, beta=0.3, label_smoothing=smoothing)
        peer = trainer(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=list(cfg.losses),
            loss_weights=list(cfg.losses.values()),
            beta=cfg.beta,
            label_smoothing=smoothing,
            use_weighting=False,
            args=SimpleNamespace(discopop_tau=0.05),
        )
        refs = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference, strict=True))
        expected = DPOTrainer._compute_loss(peer, tokens.model, {**tokens.inputs, **refs}, False)
        own, metrics = own_pairs(tokens, cfg)
        name = loss if isinstance(loss, str) else " + ".join(loss)
        what = f"DPO, `{name}`"
        yield what, "TRL `DPOTrainer`", "", *graded(own, expected, tokens.logits)
        if loss == "sigmoid":
            theirs = peer._metrics["train"]
            for key in PAIR_METRICS:
                yield "DPO, metrics", "TRL `DPOTrainer`", "", metrics[key], theirs[key][0]


def dpo_of_openrlhf(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 12)
    own, _ = own_pairs(tokens, PreferenceConfig(beta=0.3, label_smoothing=0.1))
    sums = tokens.logprobs(tokens.logits).sum(1).chunk(2)
    reference = tokens.logprobs(tokens.reference).sum(1).chunk(2)
    expected, *_ = openrlhf.DPOLoss(0.3, 0.1)(*sums, *reference)
    yield (
        "DPO, `sigmoid` with label smoothing",
        "OpenRLHF `DPOLoss`",
        "",
        *graded(own, expected, tokens.logits),
    )
    # By the means that hone takes, its sums are handed over divided.
    counts = tokens.lengths.chunk(2)
    own, _ = own_pairs(tokens, PreferenceConfig(loss="ipo", beta=0.3))
    divided = [x / n for pair in (sums, reference) for x, n in zip(pair, counts, strict=True)]
    expected, *_ = openrlhf.DPOLoss(0.3, ipo=True)(*divided)
    yield (
        "DPO, `ipo`",
        "OpenRLHF `DPOLoss`",
        "it sums log-probabilities; given means",
        *graded(own, expected, tokens.logits),
    )


def without_reference(draw: Draw) -> Found:
    """CPO, SimPO and ORPO, whose metrics are of TRL's scores: sums, means, means."""
    tokens = Tokens.of(draw, 12)
    mask = tokens.inputs["completion_mask"].bool()
    labels = tokens.ids.masked_fill(~mask, -100)
    is_row = torch.cat([torch.ones(len(mask), 1, dtype=torch.bool), tokens.mask], 1)
    batch: dict[str, Any] = {}
    for half, name in enumerate(("chosen", "rejected")):
        batch |= {
            f"{name}_{field}": values.chunk(2)[half]
            for field, values in (
                ("input_ids", tokens.ids),
                ("labels", labels),
                ("attention_mask", is_row.long()),
            )
        }
    common = {
        "beta": 0.3,
        "is_encoder_decoder": False,
        "pad_token_id": 0,
        "padding_value": 0,
    }

    def model(*args: Any, **fields: Any) -> Any:
        del args, fields
        return SimpleNamespace(logits=tokens.logits)

    for loss, kind, alpha in (
        ("cpo", "sigmoid", 1.0),
        ({"simpo": 1.0, "sft": 1.0}, "simpo", 1.0),
        ("simpo", "simpo", 0.0),
        ("orpo", "orpo", 1.0),
    ):
        trainer_of = ORPOTrainer if loss == "orpo" else CPOTrainer
        peer = trainer(
            **common,
            loss_type=kind,
            cpo_alpha=alpha,
            alpha=0.0,
            simpo_gamma=0.5,
            label_smoothing=0.1,
        )
        for method in ("concatenated_inputs", "concatenated_forward", "get_batch_logps"):
            found = trainer_of.__dict__[method]
            is_static = isinstance(found, staticmethod)
            setattr(peer, method, getattr(trainer_of, method) if is_static else bound(found, peer))
        for method in ("cpo_loss", "odds_ratio_loss"):
            if method in trainer_of.__dict__:
                setattr(peer, method, bound(trainer_of.__dict__[method], peer))
        expected, theirs = trainer_of.get_batch_loss_metrics(peer, model, batch)
        smoothing = 0.0 if loss == "orpo" else 0.1
        cfg = PreferenceConfig(loss=loss, beta=0.3, label_smoothing=smoothing, simpo_gamma=0.5)
        own, metrics = own_pairs(tokens, cfg)
        name = loss if isinstance(loss, str) else " + ".join(loss)
        whose = f"TRL `{trainer_of.__name__}`"
        note = "its odds are in float32" if loss == "orpo" else ""
        yield f"`{name}`", whose, note, *graded(own, expected, tokens.logits)
        keys = [] if alpha == 0 else ["nll_loss"]
        if loss == "orpo":
            keys += ["log_odds_chosen", "log_odds_ratio", *PAIR_METRICS[:4]]
        else:
            keys += PAIR_METRICS[:4]
        for key in keys:
            yield f"`{name}`, metrics", whose, note, metrics[key], theirs[key]


def kto(draw: Draw) -> Found:
    tokens = Tokens.of(draw, 9)
    labels = draw.integers(0, 2, 9).bool()
    labels[:2] = torch.tensor([True, False])
    cfg = PreferenceConfig(loss="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    swapped = draw.normal(2, 9) + torch.tensor([[0.3], [0.0]], dtype=torch.float64)
    peer = trainer(
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=cfg.beta,
        desirable_weight=cfg.desirable_weight,
        undesirable_weight=cfg.undesirable_weight,
        _compute_kl_logps=lambda *_: swapped[0],
    )
    inputs = tokens.inputs | {
        "label": labels,
        "ref_logps": tokens.logprobs(tokens.reference).sum(1),
        "ref_KL_logps": swapped[1],
    }
    expected = KTOTrainer._compute_loss(peer, tokens.model, inputs, False)
    drawn = tokens.rows(range(9))
    items = [
        Preference(row.id, (row,), (label,))
        for row, label in zip(drawn, labels.tolist(), strict=True)
    ]
    algorithm = KTO(cfg, max_tokens=99)
    rows = algorithm.rows(items, 0)
    for i, row in enumerate(rows):
        if i < 9:
            row.columns |= drawn[i].columns
            row.columns["logprobs/policy"] = Column(torch.zeros(row.num_trained))
        else:  # the prompts with other completions, whose sums are drawn
            for which, name in enumerate(("policy", "reference")):
                values = torch.zeros(row.num_trained, dtype=torch.float64)
                values[0] = swapped[which, i - 9]
                row.columns[f"logprobs/{name}"] = Column(values)
    kl = to_scalars(algorithm.targets(rows, items))
    own, metrics = summed(algorithm.objectives["policy"], rows, tokens.outputs(range(9)))
    whose = "TRL `KTOTrainer`"
    yield (
        "`kto`",
        whose,
        "given the same completions of other prompts",
        *graded(own, expected, tokens.logits),
    )
    theirs = peer._metrics["train"]
    keys = [key for key in PAIR_METRICS if key != "rewards/accuracies"]
    for key in ("kl", *keys):
        yield "`kto`, metrics", whose, "", (metrics | kl)[key], theirs[key][0]

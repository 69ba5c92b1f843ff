"""Slow and obvious twins: float64 sampling one row at a time, generation by full recomputation."""

import math

import numpy as np
import torch

from hone.types import SamplingParams

MASK = (1 << 64) - 1


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed, position):
    gamma = 0x9E3779B97F4A7C15
    stream = mix((seed + gamma) & MASK)
    return (mix((stream + (position + 1) * gamma) & MASK) >> 16) / 2**48


def distribution(logits, params: SamplingParams):
    """float64 probabilities [V] after temperature, min-p, top-k and top-p, token by token."""
    logits = np.asarray(logits, np.float64)
    if params.temperature == 0:
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    logits = logits / params.temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = [token for token in ranked if probs[token] >= params.min_p * probs[ranked[0]]]
    if params.top_k:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        if nucleus and params.top_p < 1 and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += probs[token]
    result = np.zeros_like(probs)
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result


def draw(logits, params: SamplingParams, position):
    """Token and log-probability of one row of logits."""
    probs = distribution(logits, params)
    if params.temperature == 0:
        token = int(np.argmax(logits))
    else:
        token = int(np.searchsorted(np.cumsum(probs), uniform(params.seed, position), "right"))
    return token, math.log(probs[token])


@torch.no_grad()
def next_logits(plain_model, token_ids):
    """Logits [V] after `token_ids` by a full forward of the stock transformers model."""
    return plain_model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].double().numpy()


def generate(plain_model, prompt_ids, params: SamplingParams, eos_token_ids=()):
    """Tokens and log-probabilities of a completion, recomputing everything for every token."""
    token_ids, logprobs = list(prompt_ids), []
    for position in range(params.max_tokens):
        token, logprob = draw(next_logits(plain_model, token_ids), params, position)
        token_ids.append(token)
        logprobs.append(logprob)
        if not params.ignore_eos and token in (*eos_token_ids, *params.stop_token_ids):
            break
    return token_ids[len(prompt_ids) :], logprobs

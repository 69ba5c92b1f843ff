"""One run after the other, each in processes of its own that import nothing again.

The one rank of `tests.ranks` makes copies of itself for every run.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

from hone.config.load import load_config
from hone.config.tree import RLConfig
from hone.loops import reinforce
from hone.loops.workers import thread_pools
from tests.ranks import fork_ranks


def main(num_trainers: str, *recipes: str) -> None:
    for recipe in recipes:
        assert fork_ranks(int(num_trainers), partial(train, Path(recipe))) == 0, recipe
    json.dump(None, sys.stdout)


def train(recipe: Path) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed there is the result
    cfg = load_config(RLConfig, recipe, [])
    make_pools = thread_pools
    if cfg.cluster.num_engines:
        # Not before the processes part: Ray begins threads.
        from hone.cluster.pools import ray_pools as make_pools
    reinforce.run(cfg, make_pools)

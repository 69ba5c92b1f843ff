"""What messages advise: what serves the user, and not what was never set or does not apply."""

from __future__ import annotations

from pathlib import Path

from tests.config.test_rules import findings
from tests.tables import table

LONG = (
    "model.path=Qwen/Qwen3-0.6B data.max_prompt_tokens=1024 rollout.max_completion_tokens=130000 "
)
ROWS = [
    # Command, flags, words in the one message that has the first of them, and words that none has.
    (
        "rl",
        "--nproc=3 engine.tensor_parallel_size=2",
        ["engine.tensor_parallel_size is 2", "Start a multiple of 2 processes (--nproc N)"],
        [],
    ),
    (
        "rl",
        "--nproc=2 model.lora.rank=8 model.lora.load_in_4bit=true "
        "trainer.parallel.tensor_parallel_size=2",
        ["model.lora.load_in_4bit is", "Set trainer.parallel.tensor_parallel_size to 1"],
        ["fsdp_size"],
    ),
    (
        "rl",
        f"{LONG} trainer.max_tokens_per_microbatch=131072 --nproc=1",
        [],
        ["262048", "or more"],
    ),
    (
        "rl",
        f"{LONG} trainer.max_tokens_per_microbatch=65536 --nproc=1",
        ["= 131024)", "Set trainer.max_tokens_per_microbatch to 131024 or more"],
        ["262048", "ulysses_size"],
    ),
    (
        "rl",
        f"{LONG} trainer.max_tokens_per_microbatch=65536 --nproc=8",
        ["= 131024)", "ring_size", "ulysses_size", "to 2."],
        ["262048"],
    ),
    (
        "rl",
        f"{LONG} trainer.max_tokens_per_microbatch=16384 --nproc=6",
        # Six processes do not share 131,024 tokens under a budget of 16,384: 21,838 each.
        ["= 131024)", "to 6", "trainer.max_tokens_per_microbatch to 21838"],
        ["262048"],
    ),
    (
        "rl",
        f"{LONG} trainer.max_tokens_per_microbatch=65536",
        ["= 131024)", "with several devices", "ulysses_size"],
        ["262048"],
    ),
    (
        "rl",
        "trainer.max_tokens_per_microbatch=2047 --nproc=8",
        ["= 2048)", "to 4096 or more, which packs well"],
        ["ulysses_size"],
    ),
    (
        "rl",
        "cluster.num_trainers=12 cluster.num_engines=4 engine.tensor_parallel_size=2 "
        "cluster.num_nodes=3 cluster.devices_per_node=8 cluster.address=auto",
        [
            "trainers on several nodes have whole nodes",
            "cluster.num_trainers = 12",
            "cluster.devices_per_node is 8",
            "multiple of 8",
        ],
        [],
    ),
    (
        "rl",
        "cluster.num_trainers=6 cluster.num_engines=2 engine.tensor_parallel_size=5 "
        "cluster.num_nodes=2 cluster.devices_per_node=8 cluster.address=auto "
        "model.path=Qwen/Qwen3-0.6B",
        ["cluster.num_engines is 2", "each on one node", "trainers leave 2 of theirs", "(1)"],
        [],
    ),
]


@table("command, flags, said, unsaid", ROWS)
def test_R22_messages_advise_what_serves(
    command: str, flags: str, said: list[str], unsaid: list[str], workspace: Path
) -> None:
    found = findings(command, flags)
    if said:
        (message,) = [x.message for x in found if said[0] in x.message]
        assert all(part in message for part in said), message
    for finding in found:
        assert not [part for part in unsaid if part in finding.message], finding.message

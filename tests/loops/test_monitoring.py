"""What a run serves while it goes on."""

from __future__ import annotations

import json
import re
import socket
import urllib.request

import pytest
from tests.loops.conftest import MakeConfig, built_run
from tests.ports import reserved_port
from tests.tiny_runs import lines

from hone.errors import UserError
from hone.loops.launch import launch
from hone.loops.loop import train
from hone.observe.metrics_server import exposition
from hone.tools.report.grafana import dashboard

OF_A_GPU = {"hone_perf_gpu_utilization", "hone_mem_gpu_peak_gib", "hone_mem_gpu_free_gib"}
OF_A_GPU |= {"hone_perf_R_gen", "hone_perf_R_train", "hone_perf_R_step", "hone_perf_mfu"}
OF_OTHER_RUNS = {"hone_mem_critic_gib", "hone_mem_teacher_gib"}
OF_OTHER_RUNS |= {"hone_eval_reward_mean", "hone_eval_loss"}
OF_OTHER_RUNS |= {"hone_critic_lr", "hone_train_muon_lr"}


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as reply:
        return reply.read().decode()


@pytest.mark.slow
def test_a_run_serves_what_the_dashboard_asks_for(make_config: MakeConfig) -> None:
    with reserved_port() as port:
        check_what_is_served(make_config, port)


def check_what_is_served(make_config: MakeConfig, port: int) -> None:
    cfg = make_config(
        pipeline={"max_staleness": 1},
        cluster={"num_engines": 1},
        algorithm={"kl": {"coef": 0.1}, "correction": {"kind": "tis"}},
        log={"to": [], "metrics_port": port},
    )
    with built_run(cfg) as run:
        assert json.loads(get(port, "/health"))["status"] == "starting"
        train(run)
        served = set(re.findall(r"^hone_\w+", get(port, "/metrics"), re.MULTILINE))
        assert json.loads(get(port, "/health")) | {"age_s": 0} == {
            "status": "ok", "step": 3, "age_s": 0, "limit_s": 300.0
        }  # fmt: skip
        text = get(port, "/grafana.json")
    for row in lines(cfg.run.dir / "metrics.jsonl"):  # some are not of every step
        served |= set(re.findall(r"hone_\w+", exposition(row, run="").decode()))
    with pytest.raises(OSError, match="refused"):
        get(port, "/health")
    assert json.loads(text)["title"] == "hone"
    panels = json.loads(text)["panels"]
    asked = {
        name
        for panel in panels
        for target in panel.get("targets", [])
        for name in re.findall(r"hone_\w+", target["expr"])
    }
    assert len(asked) > 30
    assert asked - served == OF_A_GPU | OF_OTHER_RUNS


def test_a_port_that_is_taken_ends_a_run_before_it_loads(make_config: MakeConfig) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cfg = make_config(log={"to": [], "metrics_port": port})
        with pytest.raises(UserError, match=r"log\.metrics_port"), launch(cfg):
            pass


def test_panels_of_the_dashboard_have_a_number_and_a_place_each() -> None:
    rows = json.loads(json.dumps(dashboard()))["panels"]
    panels = [*rows, *(panel for row in rows for panel in row.get("panels", []))]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    axes = {panel["title"]: panel["fieldConfig"]["defaults"].get("custom") for panel in panels
            if panel["type"] != "row"}  # fmt: skip
    assert axes["Step"] is None
    assert axes["Samples (samples/s)"] == {"axisSoftMin": 0}
    assert axes["Engine and trainer (KL, nats per token)"]["scaleDistribution"]["type"] == "log"

"""The samples of a page: what is packed into it, and what its script filters, sorts and finds."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hone.observe.loggers import json_line
from hone.observe.run_folder import RunFolder
from hone.tools.report import samples as samples_module
from hone.tools.report.pieces import Splitter
from hone.tools.report.sample_table import newest_from
from hone.tools.report.samples import sample_store
from hone.tools.report.write import write_report
from tests.observe.fake_run import write_run

Row = dict[str, Any]


def rows_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def write_rows(folder: Path, rows: list[Row]) -> None:
    (folder / "samples.jsonl").write_bytes(b"".join(map(json_line, rows)))


def without(rows: list[Row], *names: str) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def opened(*folders: Path) -> tuple[Row, list[Row]]:
    """Index and groups of the store."""
    store = sample_store([RunFolder.read(folder) for folder in folders])
    assert store is not None
    unpack = lambda text: json.loads(gzip.decompress(base64.b64decode(text)))  # noqa: E731
    return unpack(store.index), [group for chunk in store.chunks for group in unpack(chunk)]


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte: characters beyond ASCII span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    return tokenizer


def test_index_and_groups_are_those_of_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(samples_module, "CHUNK_CHARS", 3000)  # several chunks
    folder = write_run(tmp_path / "run", num_steps=5)
    rows = rows_of(folder)
    index, groups = opened(folder)
    assert index["reward"] == [row["reward"] for row in rows]
    assert index["tokens"] == [row["num_tokens"] for row in rows]
    assert [index["stops"][stop] for stop in index["stop"]] == [row["stop_reason"] for row in rows]
    failures = [index["failures"][failure] or None for failure in index["failure"]]
    assert failures == [row["failure"] for row in rows]
    for name in ("correct", "format"):
        assert index["parts"][name] == [row["reward_parts"].get(name) for row in rows]
    assert index["groups"]["first"] == [*range(0, len(rows), 4)]
    assert index["groups"]["step"] == [row["step"] for row in rows[::4]]
    assert len(set(index["groups"]["chunk"])) > 1
    assert [group["prompt_id"] for group in groups] == [row["prompt_id"] for row in rows[::4]]
    texts = [sample["text"] for group in groups for sample in group["samples"]]
    assert texts == [row["text"] for row in rows]


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(rows_of(folder)[0])[:-40])
    assert len(opened(folder)[0]["reward"]) == 8


def test_samples_of_runs_and_of_an_evaluation_lie_together(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, num_steps=1) for name in "ab")
    write_rows(second, [row | {"split": "eval"} for row in rows_of(first)])
    (second / "eval_samples.jsonl").write_bytes(
        b"".join(
            json_line({k: v for k, v in row.items() if k not in ("step", "split")})
            for row in rows_of(first)
        )
    )
    index, _ = opened(first, second)
    named = [index["splits"][split] for split in index["groups"]["split"]]
    assert [*zip(index["groups"]["run"], named, strict=True)] == [
        (0, "train"),
        (1, "eval"),
        (1, "hone eval"),
    ]


@pytest.mark.parametrize("budget", [1, 3000, 10**9])
def test_text_beyond_the_budget_is_left_out_evenly_and_said_so(
    tmp_path: Path, monkeypatch: Any, budget: int
) -> None:
    folder = write_run(tmp_path / "run", num_steps=12)
    monkeypatch.setattr(samples_module, "MAX_TEXT_BYTES", budget)
    index, groups = opened(folder)
    assert len(index["reward"]) == 48, "all count"
    has_text = ["text" in group["samples"][0] for group in groups]
    assert has_text[-1], "the newest group is shown first"
    places = np.flatnonzero(has_text)
    if len(places) > 1:
        assert np.ptp(np.diff(places)) <= 1
    note = f"The texts of {len(places)} of the 12 groups"
    html = write_report(folder).read_text()
    assert (note in html) == (not all(has_text)) == (budget < 10**9)


def test_tokens_carry_id_logprob_and_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=1)
    ids = with_tokenizer(folder).encode("a <b>").ids
    row = rows_of(folder)[0] | {
        "token_ids": ids,
        "logprobs": [-0.25, -9.5, None, -2.00049, -1.0],
        "weight_versions": [6, 6, 6, 7, 7],
        "loss_mask": [1, 1, 1, 1, 0],
    }
    write_rows(folder, [row, row | {"weight_versions": [6] * 5, "loss_mask": [1] * 5}])
    _, [group] = opened(folder)
    first, second = group["samples"]
    assert first["pieces"] == ["a", " ", "<", "b", ">"]
    assert first["ids"] == ids
    assert first["logprobs"] == [-0.25, -9.5, None, -2.0, -1.0]
    assert (first["versions"], first["mask"]) == ([6, 6, 6, 7, 7], [1, 1, 1, 1, 0])
    assert (second["versions"], second["mask"]) == (6, 1), "once where all are equal"


def test_who_wrote_what_is_known_without_tokens_too(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(samples_module, "MAX_TOKEN_BYTES", 0)
    folder = write_run(tmp_path / "run", num_steps=1)
    ids = with_tokenizer(folder).encode("ask told end").ids
    mask = [1] * 4 + [0] * 5 + [1] * 3
    turns = [{"start": 0, "end": 4}, {"start": 9, "end": 12}]
    row = rows_of(folder)[0] | {"token_ids": ids, "loss_mask": mask}
    tokens = {"token_ids": row.pop("token_ids"), "loss_mask": row.pop("loss_mask")}
    prompt_ids = row.pop("prompt_token_ids")
    write_rows(folder, [row | {"turns": turns, "prompt_token_ids": prompt_ids} | tokens] * 3)
    _, groups = opened(folder)
    parts = groups[0]["samples"][0]["parts"]
    assert parts == [["ask ", 1], ["told ", 0], ["end", 1]]


@pytest.mark.parametrize("text", ["2 + 3 = 5", "Zürich, 東京 and 🙂!", "", "  spaces  \n\n"])
def test_pieces_join_to_the_decoded_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(text).ids
    pieces = Splitter(lambda held: tokenizer.decode(list(held)))(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_pieces_of_a_tokenizer_that_drops_a_leading_space() -> None:
    words = {1: "▁to", 2: "▁be", 3: "re"}
    decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip(" ")  # noqa: E731
    assert Splitter(decode)([1, 2, 3]) == ["to", " be", "re"]


# -- the page's script --------------------------------------------------------------------------

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")

STUB = """
globalThis.document = { getElementById: () => ({ textContent: "{}" }) };
const INDEX = %s, CHUNKS = %s;
const ALL = { show: "all", by: "", run: null, split: null, from: null, to: null, low: null,
  high: null, found: null };
const chosen = (mask) => [...mask].flatMap((m, i) => (m ? [i] : []));
"""

INDEX: Row = {
    "runs": ["a", "b"],
    "splits": ["train", "eval"],
    "stops": ["eos", "length", "max_turns"],
    "failures": ["", "timeout"],
    "functions": ["format"],
    "groups": {
        "run": [0, 0, 1],
        "split": [0, 1, 0],
        "step": [1, 5, 9],
        "first": [0, 2, 4],
        "chunk": [0, 0, 0],
    },
    "reward": [1.0, 0.0, 1.0, 0.5, None, 0.25],
    "advantage": [1.0, -1.0, None, None, None, None],
    "tokens": [10, 20, 90, 30, 5, 6],
    "stop": [0, 1, 0, 2, 0, 0],
    "failure": [0, 0, 0, 0, 1, 0],
    "parts": {"format": [0.0, 1.0, 0.0, 0.0, None, 0.5]},
}
CHUNKS = [
    [
        {
            "prompt_id": "p0",
            "prompt": "Two plus two?",
            "answer": "4",
            "samples": [
                {"id": "x/0", "text": "It is four."},
                {"id": "x/1", "pieces": ["fi", "ve"]},
            ],
        },
        {
            "prompt_id": "p1",
            "prompt": "Three?",
            "answer": None,
            "samples": [
                {"id": "y/0", "parts": [["ask", 1], ["TOLD", 0]]},
                {"id": "y/1", "text": ""},
            ],
        },
        {
            "prompt_id": "p2",
            "prompt": "",
            "answer": None,
            "samples": [{"id": "z/0", "detail": "no verdict"}, {"id": "z/1", "text": "<b>"}],
        },
    ]
]


def run_script(expression: str) -> Any:
    page = files("hone.tools.report")
    script = "\n".join(
        (page / name).read_text()
        for name in ("charts.js", "samples.js", "episodes.js", "images.js")
    )
    program = (
        STUB % (json.dumps(INDEX), json.dumps(CHUNKS))
        + script
        + f"\nPromise.resolve({expression}).then((v) => console.log(JSON.stringify(v)));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_node
def test_filters_keep_what_they_say() -> None:
    cases: dict[str, list[int]] = {
        "{}": [0, 1, 2, 3, 4, 5],
        '{show: "failed"}': [4],
        '{show: "truncated"}': [1, 3],
        "{run: 1}": [4, 5],
        "{split: 1}": [2, 3],
        "{from: 5}": [2, 3, 4, 5],
        "{to: 5}": [0, 1, 2, 3],
        "{from: 5, to: 5}": [2, 3],
        "{low: 0.5, high: 1}": [0, 2, 3],
        "{high: 0.25}": [1, 5],
        '{by: "format", low: 0.5}': [1, 5],
        "{found: new Set([1, 4])}": [1, 4],
        '{found: new Set([1, 4]), show: "failed"}': [4],
    }
    asked = ", ".join(f"chosen(matching(INDEX, {{...ALL, ...{case}}}))" for case in cases)
    assert dict(zip(cases, run_script(f"[{asked}]"), strict=True)) == cases


@needs_node
def test_groups_come_in_the_order_asked_for() -> None:
    """Group 0 has rewards 1, 0; group 1 has 1, 0.5; group 2 a failure and 0.25."""
    cases = {
        "ordered(INDEX, matching(INDEX, ALL), 'newest')": [2, 1, 0],
        "ordered(INDEX, matching(INDEX, ALL), 'oldest')": [0, 1, 2],
        "ordered(INDEX, matching(INDEX, ALL), 'best')": [1, 0, 2],
        "ordered(INDEX, matching(INDEX, ALL), 'worst')": [0, 2, 1],
        "ordered(INDEX, matching(INDEX, ALL), 'spread')": [0, 1, 2],
        "ordered(INDEX, matching(INDEX, ALL), 'longest')": [1, 0, 2],
        "ordered(INDEX, matching(INDEX, ALL), 'best', 'format')": [0, 2, 1],
        "ordered(INDEX, matching(INDEX, {...ALL, show: 'failed'}), 'best')": [2],
        "ordered(INDEX, matching(INDEX, {...ALL, show: 'truncated'}), 'best')": [1, 0],
    }
    assert dict(zip(cases, run_script(f"[{', '.join(cases)}]"), strict=True)) == cases


@needs_node
def test_the_sample_that_a_group_is_ordered_by_comes_first() -> None:
    """Samples 2, 3 have rewards 1, 0.5; sample 4 failed, 5 has 0.25."""
    cases = {
        "placesIn(INDEX, 1, 'worst')": [1, 0],
        "placesIn(INDEX, 1, 'best')": [0, 1],
        "placesIn(INDEX, 1, 'newest')": [0, 1],
        "placesIn(INDEX, 2, 'worst')": [1, 0],
        "placesIn(INDEX, 2, 'best')": [1, 0],
        "placesIn(INDEX, 0, 'worst', 'format')": [0, 1],
    }
    assert dict(zip(cases, run_script(f"[{', '.join(cases)}]"), strict=True)) == cases
    html = run_script("groupHtml(INDEX, 1, CHUNKS[0][1], [], {order: 'worst'})")
    assert html.index("y/1") < html.index("y/0")


@needs_node
def test_the_newest_steps_are_a_tenth() -> None:
    """As the server of a live page says."""
    steps: list[list[int]] = [[], [0], [3, 3, 9], [*range(10)], [*range(0, 110, 10)], [5, 1, 3]]
    found = run_script(f"{json.dumps(steps)}.map(newestFrom)")
    assert found == [0, 0, 9, 9, 90, 5]
    assert found == [newest_from(each) for each in steps]


@needs_node
def test_what_an_environment_has_not_counted_is_no_line_of_a_card() -> None:
    index = INDEX | {"functions": ["env/errors", "env/calls", "right"]}
    index["parts"] = {
        "env/errors": [0.0] * 6,
        "env/calls": [0.0, 0.0, 0.0, 2.0, 0.0, 0.0],
        "right": [0.0] * 6,
    }
    html = run_script(f"groupHtml({json.dumps(index)}, 1, CHUNKS[0][1], [])")
    assert "env/errors" not in html
    assert html.count("<dt>env/calls</dt>") == html.count("<dt>right</dt>") == 2


@needs_node
def test_search_finds_words_wherever_they_stand() -> None:
    cases: dict[str, list[int]] = {
        "FOUR": [0],
        "five": [1],  # over the border of two tokens
        "two plus": [0, 1],  # the prompt is of all
        "askt": [2],
        "y/1": [3],
        "p2": [4, 5],
        "verdict": [4],
        "<b>": [5],
        "nowhere": [],
    }
    asked = ", ".join(f"searched(INDEX, CHUNKS[0], 0, {json.dumps(case)})" for case in cases)
    assert dict(zip(cases, run_script(f"[{asked}]"), strict=True)) == cases


@needs_node
def test_bins_of_the_script() -> None:
    assert run_script("[bins([]), bins([2, 2], 2), bins([0, 1, 1, 4], 4)]") == [
        None,
        {"low": 1.5, "high": 2.5, "counts": [0, 2]},
        {"low": 0, "high": 4, "counts": [1, 2, 0, 1]},
    ]


@needs_node
def test_cards_show_each_sample_and_escape_what_models_write() -> None:
    html = run_script("groupHtml(INDEX, 2, CHUNKS[0][2], new Uint8Array([0, 0, 0, 0, 1, 0]))")
    assert html.count("<article") == 2
    assert html.count("card other") == 1, "what the filter leaves out stands back"
    assert "timeout" in html
    assert "no verdict" in html
    assert "&#60;b&#62;" in html
    assert "<b></div>" not in html
    told = run_script("groupHtml(INDEX, 1, CHUNKS[0][1], new Uint8Array(6).fill(1))")
    assert 'ask<i class="env">TOLD</i>' in told


@needs_node
@pytest.mark.parametrize(
    ("zoom", "kept"),
    [
        ("null", [1, 2, 4, 8, 9]),
        ("[2, 8]", [1, 2, 4, 8, 9]),  # curves go on to the neighbours on either side
        ("[4, 4]", [2, 4, 8]),
        ("[5, 6]", [4, 8]),
        ("[20, 30]", [9]),
        ("[0, 1]", [1, 2]),
    ],
)
def test_a_zoom_keeps_its_steps(zoom: str, kept: list[int]) -> None:
    steps = "[1, 2, 4, 8, 9]"
    assert run_script(f"(ZOOM = {zoom}, {steps}.slice(...visible({steps})))") == kept


@needs_node
def test_a_curve_of_many_points_is_drawn_by_means() -> None:
    points = "thin([1, 2, 3, 4, 5], [1, null, 5, null, null], 3)"
    assert run_script(points) == {"steps": [2, 4, 5], "values": [1, 5, None]}
    assert run_script("thin([1, 2], [3, 4], 2)") == {"steps": [1, 2], "values": [3, 4]}


@needs_node
def test_the_packed_page_opens(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    html = write_report(folder).read_text()
    found = re.search(r'<script type="text/plain" id="index">(.*?)</script>', html)
    assert found is not None
    assert run_script(f"unpack({json.dumps(found[1])})") == opened(folder)[0]


@needs_node
@pytest.mark.parametrize(
    ("shade", "classes"),
    [
        ("logprob", ["t0", "t3", "env", "t9"]),
        ("ratio", ["t0", "t4", "env", "t0"]),
        ("entropy", ["t3", "t0", "env", "t0"]),
        ("staleness", ["t0", "t2", "env", "t8"]),
    ],
)
def test_tokens_are_shaded_by_what_is_chosen(shade: str, classes: list[str]) -> None:
    """The first was drawn at an entropy of 1.4 nats. The second is e^0.5 times as likely for the
    trainer. Step 20 trains version 19."""
    sample = {
        "ids": [1, 2, 3, 4],
        "logprobs": [-0.2, -3.1, None, None],
        "policy": [None, -2.6, None, None],
        "entropy": [1.4, 0.01, None, None],
        "versions": [19, 17, -1, 2],
        "mask": [1, 1, 0, 1],
        "pieces": ["a", "b", "c", "d"],
    }
    html = run_script(f"(SHADE = '{shade}', completionHtml({json.dumps(sample)}, 20))")
    assert re.findall(r'class="(\w+)"', html) == classes
    told = [json.dumps(text) for text in re.findall(r'data-t="(.*?)"', html)]
    again = run_script(f"(SHADE = '{shade}', [{','.join(told)}].map((t) => shadeOf(tokenOf(t))))")
    assert again == classes, "as they are shaded again when another choice is made"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("search", "no such words", "0 of 24 samples, in 0 groups"),
        ("show", "failed", "6 of 24 samples, in 6 groups"),
        ("to", "2", "8 of 24 samples, in 2 groups"),
    ],
)
def test_controls_of_the_page_in_a_browser(
    tmp_path: Path, name: str, value: str, count: str
) -> None:
    page = write_report(write_run(tmp_path / "run", num_steps=6))
    action = f"""<script>addEventListener("load", () => setTimeout(() => {{
      const field = document.querySelector("[name={name}]");
      field.value = {json.dumps(value)};
      field.dispatchEvent(new Event("input", {{ bubbles: true }}));
    }}, 500));</script></body>"""
    page.write_text(page.read_text().replace("</body>", action))
    browser = ["chromium", "--headless=new", "--no-sandbox", "--window-size=1400,3000"]
    done = subprocess.run(
        [*browser, "--virtual-time-budget=4000", "--dump-dom", f"file://{page}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f">{count}, newest first</span>" in done.stdout
    assert done.stdout.count('class="plot"><svg') > 3, "charts are drawn"

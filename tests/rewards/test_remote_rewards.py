"""Rewards from a service and from a judge: what is sent, what is a score, and what is a failure."""

import logging
import re
import shutil
import socket
import ssl
import subprocess
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest

from hone.errors import UserError
from hone.rewards import remote
from hone.rewards.builtin import build
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.types import FailureKind, Prompt
from tests.rewards.scoring import make_sample
from tests.rewards.serving import AT_A_TIME, serving

KEY = "sk-verySecret_42"
BEARER = {"Authorization": "Bearer $JUDGE_KEY"}
TEMPLATE = "Q {prompt} A {completion} of {answer}, {level}; {{completion}}, \\frac{1}{2}"


@pytest.fixture(scope="module")
def shared_server():
    with serving() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.requests.clear()
    shared_server.counts.clear()
    shared_server.most_at_a_time = 0
    return shared_server


def scorer_of(*functions, **settings):
    entries = [each if isinstance(each, dict) else {"fn": each} for each in functions]
    plain = {"functions": entries, "timeout_s": 60.0, "num_workers": 2, "max_failure_rate": 1.0}
    return Scorer(RewardConfig.model_validate(plain | settings), max_completion_tokens=64)


def judge(server, path="v1", **settings):
    args = {
        "base_url": f"{server.url}/{path}",
        "model": "m",
        "template": "{completion}",
        "pattern": r"Score: (\S+)",
    }
    return {"fn": "judge", "args": args | settings}


def scored(*functions, text="1234", **settings):
    with scorer_of(*functions, **settings) as scorer:
        (sample,) = scorer.score([make_sample(text, answer="7", level=3)])
    assert (sample.reward is None) == (sample.failure is not None)
    return sample


@pytest.fixture
def refused_url():
    """An address at which nobody listens, and nobody else can meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/get_reward"


class Clock:
    """Stands for the time of `remote`: it passes in pauses alone."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(remote, "monotonic", lambda: self.now)
        monkeypatch.setattr(remote, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds


# -- services ------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_service_of_an_unknown_authority_is_told_and_one_of_a_named_one_answers(
    tmp_path, monkeypatch
):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} "
    made += "-days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(made.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http", "https")
        sample = scored(url)
        assert sample.failure is FailureKind.EXCEPTION
        assert re.search("self-signed certificate.*SSL_CERT_FILE", sample.failure_detail)
        assert not server.requests
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert scored(url).reward.total == 0.5
        assert len(server.requests) == 1


def test_a_service_gets_what_that_of_openrlhf_gets(server):
    sample = scored(f"{server.url}/v1/get_reward?model=a")
    ((path, headers, content),) = server.requests
    assert path == "v1/get_reward"
    assert headers["Content-Type"] == "application/json"
    assert content == {"query": ["Q: ?1234"], "prompts": ["Q: ?"], "labels": [""]}
    assert sample.reward.total == 0.5
    name = "127.0.0.1_v1_get_reward"
    assert sample.reward.parts == {name: 0.5, f"{name}/half": 0.25}


def test_headers_hold_variables_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("TEAM", "red")
    monkeypatch.setenv("SCORES_KEY", f"{KEY}\n")
    headers = {"X-Api-Key": "$SCORES_KEY", "X-Team": "$TEAM-1 of $5", "Accept": "*/*"}
    entry = {"fn": f"{server.url}/get_reward", "args": {"headers": headers}}
    assert scored(entry).valid
    ((_, sent, _),) = server.requests
    sent = {name.lower(): value for name, value in sent.items()}
    assert sent["x-api-key"] == KEY
    assert sent["x-team"] == "red-1 of $5"
    assert sent["accept"] == "*/*"


def test_labels_are_what_the_data_hold(server):
    prompt = Prompt(
        id="p", token_ids=(1,), text="Q", answer='{"a": [1, "ß"]}', raw_answer={"a": [1, "ß"]}
    )
    sample = make_sample("24")
    sample.prompt = prompt
    with scorer_of(f"{server.url}/get_reward") as scorer:
        assert scorer.score([sample])[0].reward.total == 1.0
    assert server.requests[0][2]["labels"] == [{"a": [1, "ß"]}]


def test_a_service_is_one_function_among_others(server, tmp_path):
    (tmp_path / "r.py").write_text("def own(completion):\n    return len(completion)\n")
    own = {"fn": f"{tmp_path / 'r.py'}:own", "weight": 0.1}
    first = {"fn": f"{server.url}/get_reward", "weight": 2.0}
    sample = scored(first, "exact_match", own, judge(server), f"{server.url}/get_reward")
    assert sample.reward.parts == {
        "127.0.0.1_get_reward": 0.5,
        "127.0.0.1_get_reward/half": 0.25,
        "exact_match": 0.0,
        "own": 4.0,
        "judge": 1.0,
        "127.0.0.1_get_reward_2": 0.5,
        "127.0.0.1_get_reward_2/half": 0.25,
    }
    assert sample.reward.total == pytest.approx(2 * 0.5 + 0.4 + 1.0 + 0.5)


def test_a_service_compares_the_completions_of_a_prompt(server):
    entry = {"fn": f"{server.url}/get_reward", "whole_groups": True}
    with scorer_of(entry, "exact_match") as scorer:
        samples = scorer.score([make_sample(text, answer="24", index=n) for n, text in TEXTS])
    assert [content["query"] for *_, content in server.requests] == [["Q: ?24", "Q: ?13"]]
    assert [sample.reward.total for sample in samples] == [2.0, 0.0]
    with scorer_of(entry | {"fn": f"{server.url}/text"}) as scorer:
        samples = scorer.score([make_sample(text, index=n) for n, text in TEXTS])
    assert [sample.failure for sample in samples] == [FailureKind.INVALID] * 2


TEXTS = [(0, "24"), (1, "13")]
WRONG = {
    "nan": "must be finite",
    "infinite": "must be finite",
    "missing": 'it must be {"rewards": [NUMBER]}',
    "list": 'it must be {"rewards": [NUMBER]}',
    "none": "must be a number",
    "two": "answered the rewards '[1.0, 2.0]' to 1 queries",
    "empty": "answered the rewards '[]' to 1 queries",
    "no_list": "answered the rewards '1.0' to 1 queries",
    "nested": "must be a number",
    "text": "must be a number",
    "bool": "must be a number",
    "html": "not JSON: '<html>welcome</html>'",
    "nothing": "not JSON: ''",
}


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_answer_is_a_failure_and_never_a_number(path, server):
    sample = scored(f"{server.url}/{path}")
    assert sample.failure is FailureKind.INVALID
    assert WRONG[path] in sample.failure_detail
    assert sample.failure_detail.startswith(f"127.0.0.1_{path}: ")
    assert server.counts[path] == 1


ONCE = {
    "missing_page": "HTTP status 404 (Not Found): '<html>no such page</html>'",
    "moved": "it has moved to /get_reward",
    "huge": "more than 4,194,304 bytes",
}


@pytest.mark.parametrize("path", ONCE)
def test_what_another_attempt_does_not_mend_is_asked_once(path, server):
    sample = scored(f"{server.url}/{path}")
    assert sample.failure is FailureKind.EXCEPTION
    assert ONCE[path] in sample.failure_detail
    assert server.counts == {path: 1}


@pytest.mark.parametrize("path", ["flaky_500", "flaky_429", "flaky_closes"])
def test_what_passes_is_asked_again(path, server):
    assert scored(f"{server.url}/{path}").reward.total == 0.5
    assert server.counts[path] == 2


DOWN = {
    "down": "HTTP status 503 (Service Unavailable): 'loading the model' (",
    "closes": "cannot be reached: RemoteDisconnected",
    "half": "the connection was closed within the answer",
    "refused": "cannot be reached: ConnectionRefusedError",
}


@pytest.mark.parametrize("path", DOWN)
def test_attempts_end_before_the_deadline_with_their_reason(path, server, refused_url, monkeypatch):
    clock = Clock(monkeypatch)
    url = refused_url if path == "refused" else f"{server.url}/{path}"
    service = build(url, {})
    service.limit_time(2.0)
    with pytest.raises(remote.ServiceError) as caught:
        service(queries=["1"], prompts=[""], labels=[""])
    assert caught.value.kind is FailureKind.EXCEPTION
    assert DOWN[path] in str(caught.value)
    assert "(4 attempts in 1.8 s of `reward.timeout_s`)" in str(caught.value)
    assert clock.now < 1.8
    assert path == "refused" or server.counts[path] == 4


def test_a_name_that_is_not_known_is_asked_for_once(monkeypatch):
    asked = []

    def unknown(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    service = build("http://nowhere.invalid/get_reward", {})
    with pytest.raises(remote.ServiceError, match="cannot be reached: gaierror"):
        service(queries=["1"], prompts=[""], labels=[""])
    assert asked == ["nowhere.invalid"]


@pytest.mark.parametrize(
    ("path", "kills", "limit_s"), [("slow", 0, 5.0), ("trickle", 1, 1.0)], ids=["slow", "trickle"]
)
def test_the_deadline_holds_whatever_the_service_does(path, kills, limit_s, server):
    """The answer would take a minute. The reason comes half a second before the worker is killed,
    which a process that trickles does not notice."""
    with scorer_of(f"{server.url}/{path}", timeout_s=limit_s) as scorer:
        (sample,) = scorer.score([make_sample("1")])
        assert scorer.stats().num_kills == kills
    assert sample.failure is FailureKind.TIMEOUT
    assert ("killed after 1 s" if kills else "no answer within 4.5 s") in sample.failure_detail


def test_calls_wait_side_by_side(server):
    server.are_enough.clear()
    with scorer_of(f"{server.url}/latency", num_workers=None) as scorer:
        samples = scorer.score([make_sample("1", index=n) for n in range(64)])
    assert [sample.reward.total for sample in samples] == [1.0] * 64
    assert server.most_at_a_time >= AT_A_TIME


# -- before a model is loaded --------------------------------------------------------------------

PROMPT = Prompt(id="train:1", token_ids=(1,), text="Q", answer="42", metadata={"level": 3})


def tried(*functions, **settings):
    with scorer_of(*functions, **settings) as scorer:
        scorer.check_data([PROMPT], lambda text: [ord(c) for c in text])


@pytest.mark.parametrize("path", ["html", "two", "text", "bool", "missing_page", "down", "slow"])
def test_a_service_that_answers_wrongly_ends_the_start(path, server):
    with pytest.raises(UserError, match=rf"row train:1, .*: 127\.0\.0\.1_{path}: "):
        tried(f"{server.url}/{path}", timeout_s={"down": 2.0, "slow": 5.0}.get(path, 60.0))


def test_a_service_that_cannot_be_reached_ends_the_start(refused_url):
    with pytest.raises(UserError, match="cannot be reached: ConnectionRefusedError"):
        tried(refused_url, timeout_s=5.0)


def test_a_service_that_works_is_tried_once(server):
    tried(f"{server.url}/get_reward")
    assert server.counts == {"get_reward": 1}
    assert server.requests[0][2]["query"] == ["Q42"]


# -- judges --------------------------------------------------------------------------------------


def test_a_judge_is_asked_as_the_template_says(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    settings = {"template": TEMPLATE, "max_tokens": 7, "temperature": 0.5}
    entry = judge(server, "v1/", headers=BEARER, **settings)
    sample = scored(entry, text="1234 {prompt} 4")
    ((path, headers, content),) = server.requests
    assert path == "v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    asked = "Q  A 1234 {prompt} 4 of 7, 3; {completion}, \\frac{1}{2}"
    assert content == {
        "model": "m",
        "messages": [{"role": "user", "content": asked}],
        "max_tokens": 7,
        "temperature": 0.5,
    }
    assert sample.reward.parts == {"judge": 2.0}


DIALOGUE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("2+2", "2+2|1"),
        ([{"role": "user", "content": "2+2"}], "2+2|1"),
        (DIALOGUE, "user: hi\n\nassistant: yes?|1"),
    ],
)
def test_a_judge_reads_the_prompt_as_the_row_has_it(prompt, asked, server):
    sample = make_sample("1")
    sample.prompt = Prompt(id="p", token_ids=(1,), text="<user>rendered", unrendered=prompt)
    with scorer_of(judge(server, template="{prompt}|{completion}")) as scorer:
        assert scorer.score([sample])[0].valid
    ((_, headers, content),) = server.requests
    assert content["messages"][0]["content"] == asked
    assert "Authorization" not in headers


def test_values_of_arrow_are_sent_as_their_text_or_number(server):
    sample = make_sample("1", cost=Decimal("3.50"), on=date(2024, 2, 29))
    sample.prompt = replace(sample.prompt, raw_answer=Decimal("3.50"))
    asks = judge(server, template="{completion} costs {cost} on {on}")
    with scorer_of(asks, f"{server.url}/get_reward") as scorer:
        assert scorer.score([sample])[0].valid
    judged, scored = sorted((content for _, _, content in server.requests), key=len, reverse=True)
    assert judged["messages"][0]["content"] == "1 costs 3.50 on 2024-02-29"
    assert scored["labels"] == [3.5]


VAGUE = {
    "vague": "is not in its answer, which ends 'quite good' and was cut at max_tokens (1024)",
    "silent": "is not in its answer, which ends ''",
    "worded": "took 'four' out of its answer, which is no number",
    "nan": "must be finite",
}


@pytest.mark.parametrize("path", VAGUE)
def test_an_answer_without_a_number_is_a_failure(path, server, caplog):
    sample = scored(judge(server, f"v1/{path}"))
    assert sample.failure is FailureKind.INVALID
    assert VAGUE[path] in sample.failure_detail
    with caplog.at_level(logging.WARNING):  # another completion may be judged well
        tried(judge(server, f"v1/{path}"))
    assert VAGUE[path] in caplog.text


def test_what_is_no_api_of_openai_ends_the_start(server):
    with pytest.raises(UserError, match=r"there is no choices\[0\]\.message\.content"):
        tried(judge(server, "v1/other"))


@pytest.mark.parametrize("path", ["refuses", "echoes"])
def test_a_key_is_in_no_message(path, server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    sample = scored(judge(server, f"v1/{path}", headers=BEARER))
    assert "key" in sample.failure_detail
    assert "***" in sample.failure_detail
    assert KEY not in sample.failure_detail


def test_a_key_of_an_address_is_in_no_message(server, monkeypatch):
    """Whatever of the address the service repeats, and where."""
    monkeypatch.setenv("API_KEY", "very+Secret/42=")
    for path in ("to_https", "no_page", "no_http", "shows_address"):
        with pytest.raises(remote.ServiceError) as told:
            remote.Remote().post(f"{server.url}/{path}?api_key=$API_KEY", {})
        assert "api_key=***" in str(told.value), path
        assert "ecret" not in str(told.value), path


@pytest.mark.parametrize(("value", "told"), [(None, "is not set"), ("a\nb", "is not the text")])
def test_a_key_that_is_not_there_ends_the_start(value, told, server, monkeypatch):
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(UserError, match=f"JUDGE_KEY, which `headers` or the address names, {told}"):
        tried(judge(server, headers=BEARER))
    assert server.requests == []


def test_a_template_that_names_what_a_row_lacks_ends_the_start(server):
    with pytest.raises(UserError, match="names 'lvel', which this row does not have"):
        tried(judge(server, template="{completion} {lvel}"))


MISTAKES = [
    ({"base_url": "localhost:8000/v1"}, "base_url: write it as http://"),
    ({"base_url": "http://me:sk-1@host/v1"}, "base_url: it holds a user name or a password"),
    ({"pattern": "no group"}, "has 0 groups"),
    ({"pattern": "(1)(2)"}, "has 2 groups"),
    ({"pattern": "("}, "not a regular expression"),
    ({"template": "good?"}, "template has no {completion}"),
    ({"template": "good, {{completion}}?"}, "template has no {completion}"),
    ({"max_tokens": 0}, "args.max_tokens is 0"),
    ({"headers": {"authorization": f"Bearer {KEY}"}}, "headers.authorization would be written"),
    ({"headers": {"X-Team: a\r\nX": "b"}}, "is no name of a header"),
    ({"header": BEARER}, "no setting 'header'. Did you mean 'headers'?"),
]


@pytest.mark.parametrize(("args", "told"), MISTAKES)
def test_settings_of_a_judge_are_checked_without_a_call(args, told, server):
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        build("judge", judge(server)["args"] | args)
    assert KEY not in str(caught.value)
    assert "sk-1" not in str(caught.value)
    assert server.requests == []


def test_what_a_judge_needs_is_named():
    with pytest.raises(ValueError, match=r"^it needs args.base_url; it needs args.model; ") as told:
        build("judge", {"template": "{completion} " + KEY})
    assert KEY not in str(told.value)


@pytest.mark.parametrize("name", ["batch", "url"])
def test_a_service_takes_headers_alone(name):
    with pytest.raises(ValueError, match=f"no setting '{name}'"):
        build("http://host/x", {name: "2"})

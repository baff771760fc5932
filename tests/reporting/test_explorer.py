"""The explorer without its browser: plans equal the command line's, the server stays shut."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headwise.errors import BudgetError, HeadwiseError
from headwise.plan import RESOURCES, Plan
from headwise.planning.cost import cost
from headwise.planning.fit import fit, ranking
from headwise.planning.rules import WidthRules
from headwise.profiling.format import Profile
from headwise.reporting.explorer import server as explorer_server
from headwise.reporting.explorer.answers import (
    BUDGETS,
    CACHED_RULES,
    Answers,
    Choice,
    levels,
    model_facts,
    saved_grid,
    tightest,
    unit_costs,
)
from headwise.reporting.explorer.server import Server, live_page, saved_page
from tests import lanes
from tests.tiny_profile import write_profile

KINDS = {
    "plain": {},
    "partly rotary": {"rotary": 12},
    "no positions": {"rotary": 0},
    "windows": {"windows": (None, 7, 7, None, 13)},
    "left alone": {"qk_whole": True},
    "neurons": {"neurons": 320},
}


def choices(n, seed=0, *, cut_mlps=False):
    draw = random.Random(seed)
    more = (lambda: (draw.choice([100, 90, 75]), draw.choice([100, 70]))) if cut_mlps else tuple
    return [
        Choice(
            (
                draw.choice([100, 80, 65, 50]),
                draw.choice([100, 75, 55]),
                draw.choice([100, 95]),
                draw.choice([100, 90]),
                *more(),
            ),
            draw.choice(["head", "layer", "model"]),
            draw.choice([1, 2, 4, 8]),
            "cut" if cut_mlps else "whole",
        )
        for _ in range(n)
    ]


def in_place(plan):
    """The head groups of every layer as they stood in the dense model."""
    return [[head for _, head in sorted(layer.by_source.items())] for layer in plan.layers]


def fit_words(choice):
    words = []
    for name, x in zip(BUDGETS, choice.percent, strict=False):
        if x < 100:
            words += [f"--{name.replace('_', '-')}", f"{x:g}%"]
    words = words or ["--attn-params", "100%"]
    rules = ["--granularity", choice.granularity, "--multiple-of", str(choice.multiple_of)]
    return [*words, *rules, *(["--no-cut-ffn"] if choice.mlps == "whole" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", lanes.slow_but(("partly rotary", "neurons"), KINDS))
def test_answers_equal_the_command_line(made, headwise, tmp_path, kind):
    path = made.profile(tmp_path / "p", **KINDS[kind])
    answers = Answers(Profile.read(path))
    met = narrowed = 0
    cut_mlps = "neurons" in KINDS[kind]
    assert answers.mlps == (("cut", "whole") if cut_mlps else ("whole",))
    for choice in choices(8, seed=len(kind), cut_mlps=cut_mlps):
        done = headwise("plan", "fit", path, *fit_words(choice), "--json")
        if done.code == 2:
            with pytest.raises(BudgetError):
                answers.answer(choice)
            continue
        met += 1
        document, answer = json.loads(done.out), answers.answer(choice)
        plan = Plan.from_dict(document["plan"])
        heads = in_place(plan)
        assert answer["qk"] == [[h.qk_dim for h in row] for row in heads]
        assert answer["vo"] == [[h.vo_dim for h in row] for row in heads]
        assert answer["ffn"] == list(plan.ffn_dims)
        assert answer["planes"] == [[len(h.rotary_planes) for h in row] for row in heads]
        assert answer["order"] == {
            str(i): list(x.sources)
            for i, x in enumerate(plan.layers)
            if x.sources != tuple(range(len(x.heads)))
        }
        assert answer["loss"] == document["predicted"]["loss_increase"]
        assert answer["exact"] == document["predicted"]["exact"]
        assert [e["runs"] for e in answer["engines"]] == [e["runs"] for e in document["runs_in"]]
        assert all(answer["cost"][r] == document["cost"][r] for r in RESOURCES)
        narrowed += plan.changes_ffn
    assert met >= 3
    assert bool(narrowed) == cut_mlps


@pytest.mark.parametrize("target", lanes.slow_but(("vllm",), ("gguf", "vllm")))
def test_plans_for_an_engine_are_those_of_the_command_line(made, headwise, tmp_path, target):
    path = made.profile(tmp_path / "p", rotary=12)
    profile = Profile.read(path)
    answers = Answers(profile, targets=(target,))
    facts = model_facts(answers, str(path))
    assert facts["targets"] == [target]
    for percent in (75, 50):
        choice = Choice((100, percent, 100, 100), multiple_of=2)
        done = headwise("plan", "fit", path, *fit_words(choice), "--for", target, "--json")
        assert done.code == 0, done.err
        document, answer = json.loads(done.out), answers.answer(choice)
        plan = Plan.from_dict(document["plan"])
        assert answer["loss"] == document["predicted"]["loss_increase"]
        assert answer["notes"] == list(plan.origin.notes)[len(profile.record.notes) :]
        assert f"tied for {target}" in answer["notes"][0]
        assert next(e for e in answer["engines"] if e["target"] == target)["runs"]
        for i, layer in enumerate(plan.layers):  # the planes that the page writes
            for j, head in layer.by_source.items():
                own = profile.plan.layers[i].heads[j].rotary_planes
                kept = sorted(facts["plane_order"][i][j][: answer["planes"][i][j]])
                assert head.rotary_planes == tuple(own[p] for p in kept)
    with pytest.raises(BudgetError, match="6 query heads do not divide"):
        Answers(profile, targets=("stock",)).answer(choice)


@pytest.mark.slow
@pytest.mark.parametrize("kind", lanes.slow_but(("plain",), KINDS))
def test_a_saved_grid_holds_the_solvers_plans(made, tmp_path, kind):
    answers = Answers(Profile.read(made.profile(tmp_path / "p", **KINDS[kind])))
    grid = saved_grid(answers, 25 if kind == "windows" else 15)  # windows: the most points
    reduced = 0
    for (key, index), seed in zip(grid["index"].items(), range(99), strict=False):
        mlps, granularity, multiple = key.split()
        axes = [grid["levels"][mlps].get(name, [100.0]) for name in BUDGETS]
        units = unit_costs(answers, mlps)
        assert len(index) == np.prod([len(axis) for axis in axes])
        shape = tuple(len(axis) for axis in axes)
        for k in range(3):
            draw = random.Random(f"{seed} {k}")
            place = tuple(draw.randrange(n) for n in shape)
            percent = tuple(axis[p] for axis, p in zip(axes, place, strict=True))
            choice = Choice(percent, granularity, int(multiple), mlps)
            number = index[int(np.ravel_multi_index(place, shape))]
            reduced += tightest(answers, choice, units) != choice
            try:
                plan = fit(answers.task(answers.rules(choice)), choice.budget).plan
            except BudgetError:
                assert number == -1
                continue
            found = grid["plans"][number]
            assert found["qk"] == [[h.qk_dim for h in row] for row in in_place(plan)]
            assert found["vo"] == [[h.vo_dim for h in row] for row in in_place(plan)]
            assert found["ffn"] == list(plan.ffn_dims)
    assert reduced > 0  # the shortcut was taken, so the comparison above says something


def test_only_proportional_limits_imply_each_other(made, tmp_path):
    choice = Choice((60.0, 80.0, 97.0, 98.0), "head")
    plain = Answers(Profile.read(made.profile(tmp_path / "plain")))
    assert tightest(plain, choice, unit_costs(plain)).percent == (60.0, 100.0, 100.0, 100.0)
    mixed = Answers(Profile.read(made.profile(tmp_path / "mixed", **KINDS["windows"])))
    assert tightest(mixed, choice, unit_costs(mixed)).percent == (60.0, 100.0, 97.0, 98.0)


def test_the_narrowest_plan_is_the_least_that_can_be_asked(made, tmp_path):
    answers = Answers(Profile.read(made.profile(tmp_path / "p", rotary=12, neurons=200)))
    for rules in (WidthRules(), WidthRules(multiple_of=2), WidthRules("layer", 4)):
        least = answers.least_cost(rules)
        from headwise.plan import Budget, Limit

        task = answers.task(rules)
        for r in BUDGETS:
            plan = fit(task, Budget(**{r: Limit(amount=least[r])})).plan
            assert cost(plan).counted(r) == least[r]
            with pytest.raises(BudgetError):
                fit(task, Budget(**{r: Limit(amount=least[r] - 1)}))


def test_levels_end_at_all_and_leave_out_what_is_fixed(made, tmp_path):
    answers = Answers(Profile.read(made.profile(tmp_path / "p")))
    found = levels(answers, {"attn_params": 1, "kv_bytes": 7, "flops": 0.5, "traffic": 2})
    assert set(found) == {"attn_params", "kv_bytes", "flops", "traffic"}
    for name, axis in found.items():
        assert axis == sorted(axis)
        assert axis[-1] == 100
        assert axis[0] >= 20, name


def test_ranking_is_the_order_widths_are_filled_in():
    assert ranking(np.array([1.0, 3.0, 3.0, 2.0])) == [1, 2, 3, 0]


@pytest.mark.parametrize(
    "words",
    [
        {"attn_params": "0"},
        {"attn_params": "101"},
        {"attn_params": "nan"},
        {"kv_bytes": "much"},
        {"multiple_of": "2.5"},
        {"atn_params": "75"},
        {"mlps": "some"},
    ],
)
def test_choices_that_make_no_sense(words):
    with pytest.raises(HeadwiseError):
        Choice.parse(words)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = write_profile(tmp_path_factory.mktemp("served") / "p")
    answers = Answers(Profile.read(path))
    with Server(answers, live_page(answers, str(path))) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server, path, method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or server.hosts[0])
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read(), dict(response.getheaders())
    finally:
        connection.close()


def test_the_server_serves_its_page_and_plans(server):
    status, body, headers = ask(server, "/")
    assert status == 200
    assert b"Plan explorer: a/tiny model" in body
    assert "Access-Control-Allow-Origin" not in headers
    status, body, _ = ask(server, "/plan?attn_params=75&granularity=layer&multiple_of=4")
    choice = Choice((75.0, 100.0, 100.0, 100.0), "layer", 4)
    assert status == 200
    assert json.loads(body) == server.answers.answer(choice)
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "", "[::1]:80"])
def test_another_host_is_refused(server, host):
    for path in ("/", "/plan?attn_params=75"):
        status, body, _ = ask(server, path, host=host)
        assert status == 403
        assert b"qk" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/../../etc/passwd",
        "/%2e%2e/profile.json",
        "/plan/",
        "/profile.json",
    ],
)
def test_nothing_else_is_served(server, path):
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(server, method):
    assert ask(server, "/", method)[0] == 501


def test_what_cannot_be_answered_is_one_sentence(server):
    status, body, _ = ask(server, "/plan?attn_params=1")
    assert status == 200
    assert "smallest allowed plan costs" in json.loads(body)["error"]
    assert ask(server, "/plan?granularity=heads")[0] == 400
    assert ask(server, "/plan?multiple_of=0")[0] == 400


def sent(server, data, seconds=60):
    """What the server says to raw bytes, until it ends the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=seconds) as one:
        one.sendall(data)
        parts = []
        while part := one.recv(65536):
            parts.append(part)
        return b"".join(parts)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://[ HTTP/1.1", 400),
        (b"GET /plan?" + b"a=1&" * 99 + b" HTTP/1.1", 400),
        (b"GET /plan?multiple_of=" + b"9" * 5000 + b" HTTP/1.1", 400),
        (b"GET /plan?attn_params=%ff%00 HTTP/1.1", 400),
        (b"GET /plan?" + b"x" * 60000 + b"=1 HTTP/1.1", 400),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1", 414),
        (b"GET / HTTP/9.9", 505),
        (b"GET", 400),
    ],
)
def test_a_malformed_request_has_an_answer(server, line, status):
    answer = sent(server, line + f"\r\nHost: {server.hosts[0]}\r\n\r\n".encode())
    # A request of an unknown protocol is answered without a status line.
    assert f" {status} ".encode() in answer or f"Error code: {status}".encode() in answer
    assert len(answer) < 5000
    assert ask(server, "/")[0] == 200


def test_a_failure_of_ours_has_an_answer(server, monkeypatch):
    def failing(choice):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(server.answers, "answer", failing)
    status, body, _ = ask(server, "/plan?attn_params=75")
    assert status == 500
    assert json.loads(body) == {"error": "ZeroDivisionError: ours"}


@pytest.mark.slow
def test_no_answer_is_lost_under_load(server, monkeypatch):
    """Twenty clients with 25 questions each, beside clients that never ask or ask byte by byte."""
    monkeypatch.setattr(explorer_server, "READ_SECONDS", 1.0)
    expected = {
        percent: server.answers.answer(Choice((percent, 100.0, 100.0, 100.0)))
        for percent in (60.0, 70.0, 80.0, 90.0, 100.0)
    }
    before = threading.active_count()
    stop, lost, most = threading.Event(), [], [0]

    def dripping():
        """Sends a request that never ends, as long as it is allowed to."""
        with contextlib.suppress(OSError), connected(server) as one:
            while not stop.is_set():
                one.sendall(b"G")
                stop.wait(0.05)

    def asking(client):
        for k in range(25):
            percent = list(expected)[(client + k) % len(expected)]
            status, body, _ = ask(server, f"/plan?attn_params={percent:g}")
            most[0] = max(most[0], threading.active_count())
            if status != 200 or json.loads(body) != expected[percent]:
                lost.append((client, k, status))

    half_open = [connected(server) for _ in range(2 * explorer_server.MOST_THREADS)]
    threads = [threading.Thread(target=dripping) for _ in range(5)]
    threads += [threading.Thread(target=asking, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads[5:]:
        thread.join(120)
        assert not thread.is_alive()
    stop.set()
    for thread in threads[:5]:
        thread.join(60)
    for one in half_open:
        one.close()
    assert lost == []
    assert most[0] <= before + len(threads) + explorer_server.MOST_THREADS
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.slow
def test_memory_is_flat(server):
    """Answers, refusals and connections without a request leave nothing behind."""
    import gc
    import tracemalloc

    def round_of_requests():
        for k in range(60):
            ask(server, f"/plan?attn_params={60 + k % 5 * 10}")
            ask(server, f"/plan?attn_params={'x' * k}")
            connected(server).close()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        round_of_requests()
        before = round_of_requests()
        assert round_of_requests() < before + 2**18
    finally:
        tracemalloc.stop()


def connected(server):
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=60)


@pytest.mark.slow
def test_prepared_problems_do_not_pile_up(server):
    for k in range(1, 60):
        ask(server, f"/plan?attn_params=75&multiple_of={k}")
    assert server.answers.task.cache_info().currsize <= CACHED_RULES


def test_the_server_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(HeadwiseError, match="cannot be served"):
        Server(server.answers, "", server.server_port)


def test_save_writes_one_file(headwise, profile, tmp_path):
    out = tmp_path / "page.html"
    done = headwise("explore", profile, "--save", out, "--step", "25", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["bytes"] == len(out.read_bytes())
    assert headwise("explore", profile, "--save", out).code == 2
    assert headwise("explore", profile, "--save", out, "--open", "--force").code == 2
    assert headwise("explore", tmp_path, "--save", tmp_path / "b.html").code == 2


def test_names_cannot_leave_the_data(made, tmp_path):
    evil = "</script><script>alert(1)</script>{{STYLE}}"
    path = made.profile(tmp_path / "p", model=evil, text={"source": evil, "sha256": "0" * 64})
    page = saved_page(Answers(Profile.read(path)), evil, 50)
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    assert "<script>alert" not in page
    assert "{{STYLE}}" in page


@pytest.mark.slow
def test_an_explorer_needs_no_torch(profile):
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from headwise.cli.main import main\n"
        f"sys.argv = ['headwise', 'explore', {str(profile)!r}, '--save', "
        f"{str(Path(profile).with_name('x.html'))!r}, '--step', '50']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'altair'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(profile):
    import signal
    import subprocess
    import sys
    import urllib.request

    command = [sys.executable, "-m", "headwise", "explore", str(profile), "--port", "0"]
    # Where interrupts are ignored (whatever a shell starts in the background), a child would too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(url, timeout=60) as page:
                assert "Plan explorer" in page.read().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
